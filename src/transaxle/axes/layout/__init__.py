"""Applies a family's mapping rules for tensor names to a concrete model: computes axis sizes and tensor layouts."""
