"""Checkpoints cut into several files, and the index that names them."""
