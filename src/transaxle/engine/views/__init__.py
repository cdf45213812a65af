"""Tensors seen another way: decoded, encoded, cast, their scales unpacked."""
