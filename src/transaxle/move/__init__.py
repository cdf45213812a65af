"""Executes conversion plans by moving bytes from a source (files, or the memory of ranks) to a sink (files, memory,
checks).
"""
