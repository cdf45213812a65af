"""Conversions that the ranks of a job carry out together."""
