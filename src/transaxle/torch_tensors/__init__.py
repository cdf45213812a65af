"""Torch tensors of any kind: what a rank has of one, how it lies on a mesh, types, bytes, and wrapped modules."""
