"""Quantized training: tensors that live as codes and scales."""

from transaxle.quant.frame.quantizers import (
    MXFP8,
    NVFP4,
    DelayedScaling,
    Float8Block,
    Float8CurrentScaling,
    NVFP4BlockScaling,
    Quantizer,
)
from transaxle.quant.modules.masters import MasterWeights
from transaxle.quant.modules.quantized_modules import quantize_, quantized_init
from transaxle.quant.modules.torchao import from_torchao, to_torchao
from transaxle.quant.nvfp4.batch import batch_over
from transaxle.quant.tensor import dispatch as _dispatch  # noqa: F401 - it tells the tensor what operations do
from transaxle.quant.tensor import functions as _functions  # noqa: F401 - and what functions do
from transaxle.quant.tensor.linear import linear
from transaxle.quant.tensor.tensor import QuantizedTensor, from_components

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
