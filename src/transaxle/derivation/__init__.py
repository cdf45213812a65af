"""Derives a model family's mapping rules by tracing a converter: the rules follow from where each element is moved."""
