"""Tensors, config, adapters and quantized weights of a live model."""
