"""Tensors in memory: types, destinations, placements."""
