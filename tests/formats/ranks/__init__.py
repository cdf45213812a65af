"""Folders with one torch file for each rank."""
