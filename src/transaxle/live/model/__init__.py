"""The tensors of a model and what it says of itself."""
