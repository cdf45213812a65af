"""The grouped linear layer."""
