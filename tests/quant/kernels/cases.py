"""What the kernels are tried on, and what must come out: the codec, and the nearest value searched for in a table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from transaxle.encodings.arithmetic import codec
from transaxle.encodings.encoding import FLOAT8, FLOAT8_BLOCK, MXFP4, MXFP8, NVFP4, Encoding, Wide
from transaxle.quant.kernels import Components

WEIGHTS = (16, 16)
"""Elements of an nvfp4 weight that share an amax."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CODES: dict[torch.dtype, Wide] = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
TABLES = {
    "F8_E4M3": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e5m2),
    "F4": np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn),
}

GROUPS = ([5, 5, 37], [37], [0, 0, 1, 1], [0, 0, 0], [3, 4, 20, 30, 36])
"""Where groups of 37 rows end; the last rows may belong to none."""


@dataclass(frozen=True)
class Case:
    """An encoding and how it is asked for."""

    encoding: Encoding
    over: tuple[int, int] | None = None


CASES = {
    "float8": Case(FLOAT8),
    "float8, E5M2": Case(replace(FLOAT8, code="F8_E5M2")),
    "float8, powers of two": Case(replace(FLOAT8, power_of_two=True)),
    "float8_block": Case(FLOAT8_BLOCK),
    "float8_block, any scale": Case(replace(FLOAT8_BLOCK, power_of_two=False)),
    "float8_block, 1x128": Case(replace(FLOAT8_BLOCK, tile=(1, 128))),
    "mxfp8": Case(MXFP8),
    "mxfp8, columns": Case(replace(MXFP8, tile=(32, 1))),
    "mxfp4": Case(MXFP4),
    "nvfp4": Case(NVFP4),
    "nvfp4, 16x16": Case(NVFP4, WEIGHTS),
    "nvfp4, columns": Case(replace(NVFP4, tile=(16, 1))),
    "nvfp4, 256": Case(replace(NVFP4, scale_max=256)),
}


def array(tensor: torch.Tensor) -> NDArray[Any]:
    """A copy for numpy; types of eight bits as bytes."""
    held = tensor.detach().cpu()
    if held.dtype == torch.bfloat16:
        return held.contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return (held.view(torch.uint8) if held.dtype.itemsize == 1 else held).numpy()


def bits(values: torch.Tensor | NDArray[Any] | None) -> NDArray[Any]:
    """The bits of values, which unlike the values can be compared: NaN with NaN, and zero with its negative."""
    assert values is not None
    plain = array(values) if isinstance(values, torch.Tensor) else values
    return plain.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[plain.dtype.itemsize])


def ordinary(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normal numbers whose size differs from row to row and from place to place, some of them subnormal or zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float32)
    span = 12 if dtype == torch.float16 else 60
    x *= torch.exp2(torch.randint(-span, span // 2, (shape[0], 1), generator=generator).float())
    x *= torch.exp2(torch.randint(-6, 2, shape, generator=generator).float())
    return (x * (torch.rand(shape, generator=generator) > 0.1)).to(dtype)


def strange(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bit patterns at all in the first half of the rows, and rows with one special value each in the rest."""
    x = ordinary(shape, dtype, seed)
    whole = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    generator = torch.Generator().manual_seed(seed + 1)
    info, half = torch.iinfo(whole), shape[0] // 2
    x[:half] = torch.randint(info.min, info.max, (half, shape[1]), generator=generator).to(whole).view(dtype)
    special = torch.tensor([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 448.0, -448.0, 464.0, 6.0, 5.0, 0.25])
    for row in range(half, shape[0]):
        x[row, (row * 37) % shape[1]] = special[row % len(special)].to(dtype)
    if shape[0] > 2:
        x[-1], x[-2] = 0, torch.finfo(dtype).smallest_normal / 2
    return x


def encoded(case: Case, x: torch.Tensor, most: float | None = None) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Codes and scales as the codec's numpy path makes them."""
    if most is None and case.encoding.has_global:
        most = float(codec.amax(array(x), path="numpy"))
    return codec.encode_rows(case.encoding, array(x), amax=most, over=case.over, path="numpy")


def blocked(scales: torch.Tensor) -> torch.Tensor:
    """Scales [rows, columns], one by one, where cuBLAS's documentation has them: blocks of 128 x 4, 512 bytes each."""
    rows, columns = scales.shape
    high, wide = -(-rows // 128), -(-columns // 4)
    made = torch.zeros(high * wide * 512, dtype=torch.uint8)
    for row in range(rows):
        for column in range(columns):
            block = row // 128 * wide + column // 4
            made[block * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = scales[row, column]
    return made


def nearest(values: NDArray[np.float32], code: str) -> NDArray[np.uint8]:
    """Codes of the nearest value of a table, found by search: ties to the even code, no infinity, NaN left as 255."""
    table = TABLES[code].astype(np.float64)
    positive = table[: len(table) // 2]
    positive = positive[np.isfinite(positive)]
    size = np.minimum(np.abs(values.astype(np.float64)), positive[-1])
    above = np.searchsorted(positive, size).clip(1, len(positive) - 1)
    low, high = size - positive[above - 1], positive[above] - size
    found = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    found = found + np.signbit(values) * (len(table) // 2)
    return np.where(np.isnan(values), 255, found).astype(np.uint8)


def alone(made: Components, encoding: Encoding, offsets: list[int], group: int) -> dict[str, torch.Tensor]:
    """The buffers of one of several groups of rows, cut out by hand."""
    ends = [0, *offsets]
    start, stop = ends[group : group + 2]
    found = {}
    for name, buffer in made.present().items():
        if name in ("data", "columnwise_data"):
            found[name] = buffer[start:stop]
        elif name == "amax" or encoding.tile == (0, 0):
            found[name] = buffer[group : group + 1]
        else:
            high = encoding.tile[1] if name.startswith("columnwise") else encoding.tile[0]
            tiles = [-(-(last - first) // high) for first, last in pairwise(ends)]
            found[name] = buffer[sum(tiles[:group]) :][: tiles[group]]
    return found
