"""Grouped matrix products: which kernel, and the products themselves."""
