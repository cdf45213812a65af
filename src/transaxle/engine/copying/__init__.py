"""Transfers between boxes, and the workers that carry them out."""
