"""Translates a checkpoint from one framework's tensor names and layouts (one dialect) into those of another
framework.
"""
