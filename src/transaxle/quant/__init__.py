"""Quantized training: weights that are stored only as low-precision codes and their scales."""

from transaxle.quant import dispatch as _dispatch  # noqa: F401 - it registers operations and functions of the tensor
from transaxle.quant.dispatch import linear
from transaxle.quant.masters import MasterWeights
from transaxle.quant.nvfp4 import batch_over
from transaxle.quant.quantized_modules import from_torchao, quantize_, quantized_init, to_torchao
from transaxle.quant.quantizers import (
    MXFP8,
    NVFP4,
    DelayedScaling,
    Float8Block,
    Float8CurrentScaling,
    NVFP4BlockScaling,
    Quantizer,
)
from transaxle.quant.tensor import QuantizedTensor, from_components

__all__ = [
    "MXFP8",
    "NVFP4",
    "DelayedScaling",
    "Float8Block",
    "Float8CurrentScaling",
    "MasterWeights",
    "NVFP4BlockScaling",
    "QuantizedTensor",
    "Quantizer",
    "batch_over",
    "from_components",
    "from_torchao",
    "linear",
    "quantize_",
    "quantized_init",
    "to_torchao",
]
