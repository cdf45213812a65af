"""Entries of a state dict that are no memory of their own, and modules that make them."""
