"""Capacity: how many bytes a refit would move between which ranks, from a config alone."""
