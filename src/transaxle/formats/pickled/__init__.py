"""Reads and writes pickles as data: no class or function that a pickle names is ever imported or called."""
