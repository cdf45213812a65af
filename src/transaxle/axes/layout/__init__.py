"""Applies the tables of tensor names to a concrete model: axes get sizes, and stored tensors get layouts."""
