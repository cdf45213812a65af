"""Translates a checkpoint from one dialect (one framework's tensor names and layouts) into another dialect."""
