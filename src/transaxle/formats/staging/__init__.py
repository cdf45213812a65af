"""A target is written beside its place and moved there whole."""
