"""Number formats that store a tensor as codes and scales: their definitions, their names on disk, and their
arithmetic.
"""
