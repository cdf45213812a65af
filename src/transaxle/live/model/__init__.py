"""The tensors, config, adapters and quantized weights of a live model (a model in memory)."""
