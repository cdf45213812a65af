"""The memory behind quantized tensors: buffers, frames, what ranks share."""
