"""Packed or one by one: the forms that experts are stored in."""
