"""The places where checkpoints are stored (folders, object stores, hubs): reads of byte ranges, and atomic writes of
whole checkpoints.
"""
