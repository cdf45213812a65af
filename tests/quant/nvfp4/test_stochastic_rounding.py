"""Stochastic rounding to E2M1: the neighbours, their probabilities, and the mean."""

from __future__ import annotations

from math import ceil, sqrt

import numpy as np
import pytest
import torch

from tests.quant.nvfp4 import statement
from transaxle.encodings.encoding import NVFP4
from transaxle.quant import kernels
from transaxle.quant.kernels.components import Components
from transaxle.quant.nvfp4 import quantize, words

TOP = 2**32 - 1


def decoded(parts: Components) -> torch.Tensor:
    """Values of codes without the scales: code times tile scale over tile scale."""
    assert parts.data is not None
    codes = torch.stack([parts.data & 15, parts.data >> 4], -1).flatten(-2).long()
    levels = torch.tensor(statement.LEVELS)
    return levels[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)


def scaled(*sizes: float) -> torch.Tensor:
    """A tile whose elements are these before rounding: its first is 6, and all scales are 1."""
    return torch.tensor([[6.0, *sizes, *(0.0 for _ in range(15 - len(sizes)))]])


AMAX = torch.tensor([6.0 * 448])
"""The tensor's, by which a tile of amax 6 has the scale 1."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", [(5, 32), (1, 16), (7, 50)])
def test_codes_are_those_of_the_statement(dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    """Codes, scales and amax, of random numbers of many magnitudes."""
    generator = torch.Generator().manual_seed(sizes[0])
    x = torch.randn(sizes, generator=generator) * torch.exp2(torch.arange(sizes[0]) - 3.0)[:, None]
    x[0, 1], x[0, 3] = 0.0, -0.0
    x = x.to(dtype)
    random = words(torch.tensor([5, 1]), torch.arange(sizes[0]), torch.arange(sizes[1]), 0)
    found = quantize(x, random, kernels.amax(x))
    full = np.zeros((sizes[0], -(-sizes[1] // 16) * 16))
    full[:, : sizes[1]] = x.double().numpy()
    drawn = np.zeros(full.shape, np.uint64)
    drawn[:, : sizes[1]] = random.numpy().astype(np.uint64)
    wanted = statement.quantized(full, random=drawn)
    assert np.array_equal(decoded(found).numpy(), wanted.values[:, : sizes[1]])
    assert found.scale_inv is not None
    assert np.array_equal(found.scale_inv.double().numpy(), wanted.scales[:, ::16])
    assert torch.equal(torch.signbit(decoded(found)), torch.signbit(x))


def test_up_and_down_are_the_neighbours() -> None:
    """The smallest word rounds all away from zero that has no code, the largest nothing; what has one keeps it."""
    sizes = [0.1, 0.5, 0.6, 1.2, 1.5, 1.9, 2.5, 3.0, 3.5, 4.0, 4.5, 5.9]
    for sign in (1, -1):
        x = scaled(*(sign * size for size in sizes))
        low = decoded(quantize(x, torch.full(x.shape, TOP), AMAX))[0, 1 : 1 + len(sizes)]
        high = decoded(quantize(x, torch.zeros(x.shape, dtype=torch.int64), AMAX))[0, 1 : 1 + len(sizes)]
        floor = [max(level for level in statement.LEVELS if level <= np.float32(size)) for size in sizes]
        ceiling = [min(level for level in statement.LEVELS if level >= np.float32(size)) for size in sizes]
        assert (sign * low).tolist() == floor
        assert (sign * high).tolist() == ceiling


@pytest.mark.parametrize("size", [0.125, 0.3, 1.0 + 2**-20, 1.7, 2.25, 3.9, 4.5, 5.99])
def test_the_probability_is_the_fraction(size: float) -> None:
    """Of all 2**32 words those below the fraction of the way round up: the last one that does, and the one after."""
    value = float(np.float32(size))
    below = max(level for level in statement.LEVELS if level <= value)
    above = min(level for level in statement.LEVELS if level > value)
    first = ceil((value - below) / (above - below) * 2**32)
    x = scaled(size, size)
    drawn = torch.zeros(x.shape, dtype=torch.int64)
    drawn[0, 1], drawn[0, 2] = first - 1, first
    assert decoded(quantize(x, drawn, AMAX))[0, 1:3].tolist() == [above, below]


def test_the_mean_is_the_value() -> None:
    """4096 draws of each of many values: the mean is within six standard errors, which the gap of neighbours gives."""
    draws, values = 4096, torch.linspace(-5.9, 5.9, 105)
    x = torch.cat([scaled(*part.tolist()) for part in values.split(15)], 1).expand(draws, -1).contiguous()
    random = words(torch.tensor([77, 0]), torch.arange(draws), torch.arange(x.shape[1]), 0)
    found = decoded(quantize(x, random, AMAX))
    exact = x[0].double()
    below = torch.tensor([max(level for level in statement.LEVELS if level <= abs(value)) for value in exact.tolist()])
    above = torch.tensor([min(level for level in statement.LEVELS if level >= abs(value)) for value in exact.tolist()])
    part = (exact.abs() - below) / (above - below).clamp(min=0.5)
    error = (above - below) * (part * (1 - part)).sqrt() / sqrt(draws)
    distance = (found.mean(0) - exact).abs()
    assert (distance <= 6 * error + 1e-12).all()
    nearest = kernels.dequantize(kernels.quantize(x[:1], NVFP4, amax=AMAX), NVFP4, torch.float32)[0]
    assert ((nearest - exact).abs() > 6 * error + 1e-12).float().mean() > 0.8  # to nearest, the mean would be elsewhere


def test_zeros_and_what_is_not_finite() -> None:
    """A matrix of zeros has codes 0; infinite and NaN elements get the codes that rounding to nearest gives them."""
    zeros = torch.zeros((2, 16))
    random = torch.zeros((2, 16), dtype=torch.int64)
    assert not decoded(quantize(zeros, random, kernels.amax(zeros))).any()
    x = scaled(float("nan"), float("inf"), -float("inf"))
    found = quantize(x, random[:1], kernels.amax(x))
    nearest = kernels.quantize(x, NVFP4, amax=kernels.amax(x))
    assert found.data is not None
    assert nearest.data is not None
    assert torch.equal(found.data, nearest.data)
