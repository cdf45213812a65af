"""Pickles, read and written as data: no global in them is ever imported or called."""
