"""Boxes, pieces and intervals: where the elements of a tensor lie."""
