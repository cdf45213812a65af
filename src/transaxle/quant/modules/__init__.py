"""Models with quantized parameters: state dicts, master weights, torchao."""
