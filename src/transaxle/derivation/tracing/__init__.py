"""Numbered tensors: sent through transformers, through a function, or read from two folders of a user's."""
