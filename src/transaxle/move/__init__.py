"""Executes plans by moving bytes from a source (files, the memory of ranks) to a sink."""
