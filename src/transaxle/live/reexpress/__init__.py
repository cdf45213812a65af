"""Tensors in memory re-expressed: another dialect, another mesh."""
