"""Derives a family's table of tensor names by tracing a converter: the table follows from where each element moves."""
