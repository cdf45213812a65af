"""Containers on disk: how each is recognised, catalogued, read and written. Names in them are never paths."""
