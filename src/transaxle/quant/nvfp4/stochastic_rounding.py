"""Stochastic rounding to E2M1: up with the probability with which the result is the value on average.

Scales are those of rounding to nearest (`transaxle.encodings.arithmetic.scaling`); only the codes differ. A value
between two neighbours becomes the one farther from zero if a random word of 32 bits is below the fraction of the way
there, times 2**32. So a value that has a code keeps it, and what is beyond the largest code becomes that.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from transaxle.encodings.encoding import NVFP4
from transaxle.quant import kernels
from transaxle.quant.kernels.components import Components

_LARGEST = 6.0
_TOP = 7
_SIGN = 8
_WORDS = 2.0**32
_FINEST = (2.0, 4.0)
"""Values below the first lie 1/2 apart, below the second 1, and beyond it 2."""


def quantize(x: torch.Tensor, words: torch.Tensor, amax: torch.Tensor) -> Components:
    """Quantize a matrix by rows to nvfp4.

    Args:
        x: [M, K] of bfloat16, float16 or float32; K is even.
        words: a random number below 2**32 for each element, int64 [M, K].
        amax: the amax of the whole tensor, float32 [1].
    """
    nearest = kernels.quantize(x, NVFP4, amax=amax)
    assert nearest.scale_inv is not None
    multiplier = _multiplier(nearest.scale_inv, amax).repeat_interleave(NVFP4.tile[1], 1)[:, : x.shape[1]]
    scaled = x.detach().float() * multiplier
    size = scaled.abs()
    size = torch.where(size <= _LARGEST, size, _LARGEST)  # of NaN too, as rounding to nearest has it
    codes = _codes(size, words) | torch.where(torch.signbit(scaled), _SIGN, 0)
    packed = (codes[:, ::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
    return replace(nearest, data=packed)


def _multiplier(scales: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Return what values of each tile are multiplied by: the rule of `scaling`, an operation of float32 at a time."""
    most = torch.finfo(torch.float32).max
    limit = amax.new_tensor(most)
    whole = torch.fmin(NVFP4.scale_max * NVFP4.code_max / amax, limit)
    whole = torch.where((amax == 0) | (whole == 0), 1.0, whole)
    return torch.fmin(1.0 / (scales.float() * (1.0 / whole)), limit)


def _codes(size: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return the codes, int64, of magnitudes from 0 to 6."""
    half, one = _FINEST
    step = torch.where(size < half, 0.5, torch.where(size < one, 1.0, 2.0))
    whole = (size / step).floor()
    fraction = size / step - whole  # exact: the step is a power of two
    first = torch.where(size < half, 0, torch.where(size < one, 2, 4)).long()
    code = whole.long() + first
    up = words.double() < fraction.double() * _WORDS
    return (code + up).clamp(max=_TOP)
