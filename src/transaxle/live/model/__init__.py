"""A live model's tensors, config, adapters and quantized weights."""
