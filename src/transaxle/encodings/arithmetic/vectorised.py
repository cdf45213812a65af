"""Encoding and decoding in numpy, for machines where the compiled C kernel was not built.

Rows are processed in groups that fit the processor's cache. Each function computes in numpy what `kernel.c` computes in
C, with identical bits.

**Tiling**: where the boundaries of tiles (blocks of elements with one scale) are in a matrix, which may be some rows of
a larger matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from transaxle.encodings.arithmetic.codes import CodeTable, int4_codes, int4_scales, split_halves
from transaxle.encodings.arithmetic.minifloat import F32_NAN, Minifloat, narrow, widen, without_sign
from transaxle.encodings.encoding import WHOLE, Encoding, Error
from transaxle.errors import refuse


class Tiling(msgspec.Struct, frozen=True):
    """Boundaries of the tiles in a matrix that may be cut out of a larger matrix. Along a dim, position `i` is in tile
    `(phase + i) // tile`.
    """

    shape: tuple[int, int]
    """Number of rows and columns of the matrix, in elements."""
    tile: tuple[int, int]
    """Number of rows and columns of a tile."""
    phase: tuple[int, int] = (0, 0)
    """Position of the matrix's first element inside the tile that contains it: row and column."""

    @property
    def grid(self) -> tuple[int, int]:
        """Number of tiles, along rows and columns, that have elements in the matrix."""
        rows, columns = (
            -(-(phase + size) // tile) if size else 0
            for size, tile, phase in zip(self.shape, self.tile, self.phase, strict=True)
        )
        return rows, columns


def tiling(encoding: Encoding, shape: tuple[int, int], phase: tuple[int, int] = (0, 0)) -> Tiling:
    """Return the tiling of a matrix for an encoding; a tile of size `WHOLE` covers the whole dim.

    Raises:
        Refused: with the code UNSUPPORTED if the encoding's tiles have more than two dims, or `phase` lies outside a
            tile.
    """
    if len(encoding.tile) > 2:
        raise refuse("UNSUPPORTED", f"{encoding.name}: tiles over {len(encoding.tile)} dims")
    matrix_tile = (1,) * (2 - len(encoding.tile)) + encoding.tile
    rows, columns = (
        max(phase_along + size, 1) if step == WHOLE else step
        for step, size, phase_along in zip(matrix_tile, shape, phase, strict=True)
    )
    if not (0 <= phase[0] < rows and 0 <= phase[1] < columns):
        raise refuse("UNSUPPORTED", f"{encoding.name}: element {phase} of a tile of {rows} x {columns}")
    return Tiling(shape, (rows, columns), phase)


_GROUP = 1 << 16
"""Approximate number of elements that are processed at once, so that they stay in the processor's cache."""


def largest(values: NDArray[Any], tiles: Tiling) -> NDArray[np.float32]:
    """Return the largest absolute value of each tile, or NaN if the tile has a NaN. The first row must be the first of
    a tile.
    """
    grid = tiles.grid
    amax_bits = np.zeros(grid, np.uint32)
    if values.size:
        starts = np.arange(grid[1]) * tiles.tile[1]
        for row in range(grid[0]):
            band = slice(row * tiles.tile[0], (row + 1) * tiles.tile[0])
            for rows in _groups(values[band].shape):
                column = np.maximum.reduce(without_sign(values[band][rows]), axis=0)
                amax_bits[row] = np.maximum(amax_bits[row], np.maximum.reduceat(column, starts))
    return sizes(amax_bits, values.dtype)


def sizes(bits: NDArray[np.uint32], dtype: np.dtype[Any]) -> NDArray[np.float32]:
    """Return float32 values for the bits of non-negative numbers of a wide dtype (BF16, F16 or F32)."""
    return widen(bits.astype(np.uint16).view(dtype) if dtype.itemsize == 2 else bits.view(dtype))


def cast(
    values: NDArray[Any], tiles: Tiling, multiplier: NDArray[np.float32], kind: Minifloat, out: NDArray[np.uint8]
) -> None:
    """Multiply values by the multiplier of their tile, and write the codes; each code has the sign of its value."""
    with np.errstate(all="ignore"):
        for rows in _groups(tiles.shape):
            wide = widen(values[rows])
            codes = kind.rounded(np.copysign(wide * _spread(multiplier, tiles, rows), wide))
            out[rows] = codes[:, 0::2] | codes[:, 1::2] << 4 if kind.bits == 4 else codes


def int4(values: NDArray[Any], tiles: Tiling, out: NDArray[np.uint8]) -> NDArray[Any]:
    """Write packed 4-bit integer codes, and return the scales in the dtype of the values; tiles are one row high."""
    group, scales = tiles.tile[1], np.empty(tiles.grid, values.dtype)
    for rows in _groups(values.shape) if values.size else ():
        part = values[rows]
        scale = int4_scales(part, largest(part, Tiling((len(part), values.shape[1]), tiles.tile)), group)
        one_each = int4_codes(part, widen(scale).repeat(group, axis=1)[:, : values.shape[1]])
        np.bitwise_or(one_each[:, 0::2], one_each[:, 1::2] << 4, out=out[rows])
        scales[rows] = scale
    return scales


def value(
    codes: NDArray[np.uint8],
    tiles: Tiling,
    scale: NDArray[np.float32],
    kind: Minifloat | CodeTable,
    out: NDArray[Any],
    wide: str,
    zero: NDArray[np.float32] | None = None,
) -> None:
    """Multiply codes by the scale of their tile in float32, round to the wide dtype, and write the values.

    Args:
        codes: codes of the matrix, with two 4-bit codes per byte.
        tiles: tiles of the matrix.
        scale: scale of each tile.
        kind: type of the codes.
        out: array for the values.
        wide: safetensors code of the dtype of the values.
        zero: zero point of each tile, which is subtracted from the codes; None if the zero points are 0.
    """
    for rows in _groups(tiles.shape):
        out[rows] = narrow(_multiply(codes, tiles, scale, kind, rows, zero), wide)


def encode_error(
    values: NDArray[Any],
    codes: NDArray[np.uint8],
    tiles: Tiling,
    scale: NDArray[np.float32],
    kind: Minifloat | CodeTable,
) -> Error:
    """Return the encoding error: decoded codes, in float32, against the values that were encoded."""
    total = Error()
    for rows in _groups(tiles.shape):
        total += _compare(_multiply(codes, tiles, scale, kind, rows), widen(values[rows]))
    return total


def decode_error(
    codes: NDArray[np.uint8],
    tiles: Tiling,
    scale: NDArray[np.float32],
    exact: NDArray[np.float64],
    kind: Minifloat | CodeTable,
    wide: str,
    zero: NDArray[np.float32] | None = None,
) -> Error:
    """Return the decoding error: decoded values against the double-precision product of code and scale."""
    total = Error()
    for rows in _groups(tiles.shape):
        decoded = widen(narrow(_multiply(codes, tiles, scale, kind, rows, zero), wide))
        with np.errstate(all="ignore"):
            exact_product = _factors(codes, tiles, kind, rows, zero).astype(np.float64) * _spread(exact, tiles, rows)
        total += _compare(decoded, exact_product)
    return total


def _groups(shape: tuple[int, ...]) -> Iterator[slice]:
    """Yield slices of consecutive rows, each with about `_GROUP` elements."""
    rows, columns = shape
    step = max(1, _GROUP // max(1, columns))
    for first in range(0, rows if columns else 0, step):
        yield slice(first, min(rows, first + step))


def _spread(numbers: NDArray[Any], tiles: Tiling, rows: slice) -> NDArray[Any]:
    """Repeat a number that exists once per tile (such as a scale) for every element of some rows."""
    (row_tile, column_tile), (row_phase, column_phase) = tiles.tile, tiles.phase
    down = (row_phase + np.arange(rows.start, rows.stop)) // row_tile
    along = (column_phase + np.arange(tiles.shape[1])) // column_tile
    spread: NDArray[Any] = numbers[down][:, along]
    return spread


def _unpack(codes: NDArray[np.uint8], kind: Minifloat | CodeTable) -> NDArray[np.uint8]:
    """Return the codes one per byte; bytes that contain two 4-bit codes are split."""
    return split_halves(codes) if kind.bits == 4 else codes


def _factors(
    codes: NDArray[np.uint8],
    tiles: Tiling,
    kind: Minifloat | CodeTable,
    rows: slice,
    zero: NDArray[np.float32] | None,
) -> NDArray[np.float32]:
    """Return the numbers by which scales are multiplied: the values of codes, minus the zero points."""
    factors: NDArray[np.float32] = kind.values[_unpack(codes[rows], kind)]
    return factors if zero is None else factors - _spread(zero, tiles, rows)


def _multiply(
    codes: NDArray[np.uint8],
    tiles: Tiling,
    scale: NDArray[np.float32],
    kind: Minifloat | CodeTable,
    rows: slice,
    zero: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """Return float32 products of codes and scales; a NaN gets the sign of its code and no payload bits."""
    factors = _factors(codes, tiles, kind, rows, zero)
    with np.errstate(all="ignore"):
        product: NDArray[np.float32] = factors * _spread(scale, tiles, rows)
    nan = np.isnan(product)
    if nan.any():
        product.view(np.uint32)[nan] = np.uint32(F32_NAN) | np.signbit(factors[nan]).astype(np.uint32) << 31
    return product


def _compare(decoded: NDArray[np.float32], reference: NDArray[Any]) -> Error:
    """Return the summed differences of two arrays; the class `Error` documents how NaN and infinities count."""
    with np.errstate(all="ignore"):
        distance = np.abs(decoded.astype(np.float64) - reference.astype(np.float64))
        distance[np.isnan(distance)] = np.inf
        distance[(decoded == reference) | (np.isnan(decoded) & np.isnan(reference))] = 0
        return Error(
            float(distance.max(initial=0)), float((distance * distance).sum()), distance.size, int((distance > 0).sum())
        )
