"""Stochastic rounding to E2M1, the random numbers for it (Philox), and the random Hadamard transform."""

from __future__ import annotations

from math import ceil, sqrt

import numpy as np
import pytest
import torch

from tests.quant.nvfp4 import statement
from tests.some import some
from transaxle.encodings.encoding import NVFP4
from transaxle.quant import kernels
from transaxle.quant.kernels.components import Components
from transaxle.quant.nvfp4 import hadamard_matrix, philox, quantize, transpose_operand, words

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
    assert np.array_equal(some(found.scale_inv).double().numpy(), wanted.scales[:, ::16])
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
    assert torch.equal(some(found.data), some(nearest.data))


# Random numbers against published answers, and against Python's integers.

ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]  # fmt: skip
"""Known answers of Random123, `kat_vectors`: counter, key, words."""


@pytest.mark.parametrize(("counter", "key", "answer"), ANSWERS)
def test_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], answer: tuple[int, int, int, int]
) -> None:
    """The authors' own vectors, here and in the statement."""
    one, two, three, four = (torch.tensor(word) for word in counter)
    low, high = (torch.tensor(word) for word in key)
    assert tuple(int(word) for word in philox((one, two, three, four), (low, high))) == answer
    assert statement.philox(counter, key) == answer


@pytest.mark.parametrize("key", [0, 1, -1, -(2**63), 2**63 - 1, 0x123456789ABCDEF])
def test_an_element_has_its_word(key: int) -> None:
    """Wherever a part of the matrix begins, and whatever columns it has."""
    state = torch.tensor([key, 3])
    wanted = statement.words((key, 3), range(5, 9), range(3, 14), 1)
    found = words(state, torch.arange(5, 9), torch.arange(3, 14), 1)
    assert np.array_equal(found.numpy().astype(np.uint64), wanted)
    some = torch.tensor([12, 4, 5, 3])
    assert torch.equal(words(state, torch.arange(6, 8), some, 1), found[1:3, some - 3])


def test_words_differ_by_call_stream_and_key() -> None:
    """No two of these share a number by more than chance: 256 words of 32 bits."""
    rows = columns = torch.arange(16)
    drawn = [
        words(torch.tensor([key, calls]), rows, columns, stream)
        for key in (1, 2)
        for calls in (0, 1)
        for stream in (0, 1)
    ]
    assert all((one != two).all() for place, one in enumerate(drawn) for two in drawn[:place])


# The random Hadamard transform.


def test_the_matrix_is_orthogonal() -> None:
    """Exactly, and entry by entry that of TransformerEngine."""
    found = hadamard_matrix().numpy()
    assert np.array_equal(found, statement.hadamard())
    assert np.array_equal(found @ found.T, np.eye(16))
    assert np.array_equal(found.T @ found, np.eye(16))


def test_rows_are_transformed_by_sixteens() -> None:
    """Of the transpose; rows that are missing are zeros, and bfloat16 stays bfloat16."""
    x = torch.randn((40, 6), generator=torch.Generator().manual_seed(1)).bfloat16()
    full = np.zeros((48, 6))
    full[:40] = x.double().numpy()
    wanted = statement.transformed(full, np.float32)
    found = transpose_operand(x, transform=True)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, torch.from_numpy(wanted).bfloat16())
    assert torch.equal(transpose_operand(x.float(), transform=True), torch.from_numpy(wanted))
    assert torch.equal(transpose_operand(x, transform=False).t()[:40], x)


def test_float16_does_not_overflow() -> None:
    """Sixteen large numbers add up to more than float16 has."""
    found = transpose_operand(torch.full((16, 1), 60000.0).half(), transform=True)
    assert found.dtype == torch.float32
    assert found.isfinite().all()
