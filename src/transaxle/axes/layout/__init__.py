"""Applies a model family's tables of tensor names to a concrete model: computes axis sizes and the layouts of stored
tensors.
"""
