"""NVFP4 training: inputs, weights and gradients as they are multiplied."""
