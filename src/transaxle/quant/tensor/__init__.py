"""The tensor, and what operations and functions do with it."""

from transaxle.quant.quantized_tensor import rebuilt

rebuilt.__module__ = __name__  # what pickles call it: they outlive the file that it stands in
