"""The codec: quantizes matrices of values to codes and scales, and decodes them.

All functions of this module take matrices. A tensor with more dims is a list of matrices, because tiles (blocks of
elements with one scale) cover the last two dims. There are two implementations, one compiled and one in numpy, with
bitwise equal results.

**Decode**: `value = code x scale`, where the scale of a tile is its stored scale times the tensor's factor, multiplied
in double precision and rounded once to float32. The product `code x scale` is rounded to float32 and then to the
requested dtype. torchao, compressed-tensors and transformers round in the same order. A decoded NaN has the sign of its
code and no payload bits.

**Encode**: the module `scaling` computes the scale of a tile and a float32 multiplier. Values are multiplied by the
multiplier and rounded to codes: to nearest, ties to even, saturating.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from transaxle.encodings.arithmetic import kernel, vectorised
from transaxle.encodings.arithmetic.codes import KINDS, CodeTable
from transaxle.encodings.arithmetic.minifloat import (
    E4M3,
    LARGEST,
    Minifloat,
    power_of_two,
    wide_code,
    wide_dtype,
    widen,
)
from transaxle.encodings.arithmetic.scaling import scales
from transaxle.encodings.arithmetic.vectorised import Tiling, tiling
from transaxle.encodings.encoding import Encoding, Error, Wide
from transaxle.errors import refuse

__all__ = ["Path", "active", "amax", "decode_box", "decode_error", "encode_error", "encode_rows", "scale_values"]

Path = Literal["compiled", "numpy"]
"""Name of one of the two implementations, whose results are bitwise equal."""

Bytes = NDArray[np.uint8]


class _Implementation(Protocol):
    """Functions that both implementations (the compiled kernel and numpy) have; the module `vectorised`
    documents them.
    """

    def largest(self, values: NDArray[Any], tiles: Tiling) -> NDArray[np.float32]: ...
    def cast(
        self, values: NDArray[Any], tiles: Tiling, multiplier: NDArray[np.float32], kind: Minifloat, out: Bytes
    ) -> None: ...
    def int4(self, values: NDArray[Any], tiles: Tiling, out: Bytes) -> NDArray[Any]: ...
    def value(
        self,
        codes: Bytes,
        tiles: Tiling,
        scale: NDArray[np.float32],
        kind: Minifloat | CodeTable,
        out: NDArray[Any],
        wide: str,
        zero: NDArray[np.float32] | None,
    ) -> None: ...
    def encode_error(
        self, values: NDArray[Any], codes: Bytes, tiles: Tiling, scale: NDArray[np.float32], kind: Minifloat | CodeTable
    ) -> Error: ...
    def decode_error(
        self,
        codes: Bytes,
        tiles: Tiling,
        scale: NDArray[np.float32],
        exact: NDArray[np.float64],
        kind: Minifloat | CodeTable,
        wide: str,
        zero: NDArray[np.float32] | None,
    ) -> Error: ...


def active() -> Path:
    """Return the name of the default implementation: the compiled one if the kernel was built, else numpy."""
    return "numpy" if kernel.load() is None else "compiled"


def amax(values: NDArray[Any], *, path: Path | None = None) -> np.float32:
    """Return the largest absolute value of a matrix, as float32: NaN if the matrix contains a NaN, 0 if it is empty."""
    matrix = _matrix(values)
    if not matrix.size:
        return np.float32(0)
    tile_amaxes = _arithmetic(path).largest(matrix, Tiling(_shape(matrix), _shape(matrix)))
    return np.float32(tile_amaxes[0, 0])


def encode_rows(
    encoding: Encoding,
    values: NDArray[Any],
    *,
    amax: float | None = None,
    over: tuple[int, int] | None = None,
    codes_out: Bytes | None = None,
    path: Path | None = None,
) -> tuple[Bytes, NDArray[Any]]:
    """Encode some rows of a matrix. The first row must be the first row of a tile; the last tile along each dim may be
    partial.

    Args:
        encoding: the encoding to quantize to.
        values: the rows, an array `[R, C]` of BF16, F16 or F32.
        amax: largest absolute value of the whole tensor. The amax is required for a global scale; for an encoding with
            one tile per matrix, the amax replaces the largest value in these rows.
        over: shape of the blocks that share an amax, a multiple of the encoding's tile, such as `(16, 16)` for nvfp4
            weights, where sixteen rows get equal scales. By default each tile has its own amax.
        codes_out: array to write the codes into; by default a new one.
        path: name of the implementation to use; by default the fastest one available.

    Returns:
        The codes, `u8[R, C]` or `u8[R, C / 2]`, and the scales, one per tile: float32, u8 with the bits of 8-bit
            scales, or for 4-bit integers the dtype of the values.

    Raises:
        Refused: with the code SHAPE_MISMATCH if a row of 4-bit codes does not fill whole bytes; with the code
            DTYPE_MISMATCH if the values have another dtype; with the code UNSUPPORTED if the encoding's scales can only
            be read.
        ValueError: if `amax` is missing or not allowed, `over` is no multiple of the tile, or `codes_out` has the wrong
            shape.
    """
    matrix, arithmetic = _matrix(values), _arithmetic(path)
    shape = _shape(matrix)
    tiles = tiling(encoding, shape)
    if encoding.is_integer:
        return _encode_integers(encoding, matrix, tiles, arithmetic, codes_out)
    kind = _kind(encoding)
    if isinstance(kind, CodeTable):
        raise refuse("UNSUPPORTED", f"{encoding.name}: codes {encoding.code} can be read, but not written")
    amax_tiles = tiles if over is None else _tiles_of_blocks(tiles, over)
    codes = _codes_of(shape, kind, codes_out)
    tile_amaxes = arithmetic.largest(matrix, amax_tiles)
    if amax is not None and not encoding.has_global:
        if tile_amaxes.size > 1:
            raise ValueError(f"{encoding.name} has {tile_amaxes.size} tiles, not one, and each has its own amax")
        tile_amaxes[...] = amax
    tile_scales = scales(encoding, tile_amaxes, widest=LARGEST[wide_code(matrix.dtype)], tensor=amax)
    arithmetic.cast(matrix, amax_tiles, tile_scales.multiplier, kind, codes)
    return codes, _repeat(tile_scales.stored, amax_tiles, tiles)


def _encode_integers(
    encoding: Encoding, matrix: NDArray[Any], tiles: Tiling, arithmetic: _Implementation, out: Bytes | None
) -> tuple[Bytes, NDArray[Any]]:
    """Encode some rows of a matrix to symmetric 4-bit integers; see `codes.int4_scales`."""
    if encoding.code != "I4" or encoding.zero_rows or tiles.tile[0] != 1:
        message = f"{encoding.name}: integers {encoding.code} with these scales and zero points cannot be written"
        raise refuse("UNSUPPORTED", message, hint="Encode to int4.")
    codes = _codes_of(tiles.shape, _kind(encoding), out)
    return codes, arithmetic.int4(matrix, tiles, codes)


def decode_box(
    encoding: Encoding,
    codes: NDArray[Any],
    scale: NDArray[Any],
    *,
    phase: tuple[int, int] = (0, 0),
    factor: float = 1.0,
    dtype: Wide = "BF16",
    zero: NDArray[np.float32] | None = None,
    out: NDArray[Any] | None = None,
    path: Path | None = None,
) -> NDArray[Any]:
    """Decode a rectangular part (box) of a quantized matrix.

    Args:
        encoding: encoding of the codes.
        codes: codes of the box, `[R, C]`, or `[R, C / 2]` with two codes per byte, as u8 or as the dtype of the codes.
        scale: scales of all tiles with elements in the box, `[gr, gc]`, in their stored dtype, or 8-bit scales as u8.
        phase: position of the box's first element inside its tile: row and column.
        factor: number by which all values are multiplied; it follows from the tensor's global scale and its convention.
        dtype: dtype of the decoded values.
        zero: zero points of all tiles with elements in the box, `[gr, gc]`, as integers; None if there are none.
        out: array `[R, C]` to write the values into, without gaps between elements of a row; by default a new one.
        path: name of the implementation to use; by default the fastest one available.

    Returns:
        The values, `[R, C]`.

    Raises:
        Refused: with the code SHAPE_MISMATCH if there is not one scale per tile; with the code UNSUPPORTED if no
            encoding has scales of this dtype.
        ValueError: if `out` has the wrong shape, dtype or strides.
    """
    matrix, tiles, kind = _code_bytes(encoding, codes, phase)
    single, _ = _scale(encoding, scale, tiles, factor)
    values = _out(tiles.shape, wide_dtype(dtype), out)
    _arithmetic(path).value(matrix, tiles, single, kind, values, dtype, zero)
    return values


def encode_error(
    encoding: Encoding,
    values: NDArray[Any],
    codes: NDArray[Any],
    scale: NDArray[Any],
    *,
    factor: float = 1.0,
    path: Path | None = None,
) -> Error:
    """Return the quantization error: the codes, decoded to F32, against the values that were encoded.

    Args:
        encoding: encoding of the codes.
        values: the values that were passed to `encode_rows`.
        codes: the codes that `encode_rows` returned.
        scale: the scales that `encode_rows` returned.
        factor: number by which all decoded values are multiplied, as for `decode_box`.
        path: name of the implementation to use; by default the fastest one available.
    """
    values_in = _matrix(values)
    matrix, tiles, kind = _code_bytes(encoding, codes, (0, 0))
    if values_in.shape != tiles.shape:
        raise ValueError(f"codes of {tiles.shape} for values of {values_in.shape}")
    single, _ = _scale(encoding, scale, tiles, factor)
    return _arithmetic(path).encode_error(values_in, matrix, tiles, single, kind)


def decode_error(
    encoding: Encoding,
    codes: NDArray[Any],
    scale: NDArray[Any],
    *,
    phase: tuple[int, int] = (0, 0),
    factor: float = 1.0,
    dtype: Wide = "BF16",
    zero: NDArray[np.float32] | None = None,
    path: Path | None = None,
) -> Error:
    """Return the rounding error of decoding: decoded values against the exact product of code, scale and factor.

    The product is computed in double precision. The product is exact if code, scale and factor together have at most 53
    significant bits; otherwise the product's relative error is at most 2**-53. The arguments are the same as those of
    `decode_box`.
    """
    matrix, tiles, kind = _code_bytes(encoding, codes, phase)
    single, double = _scale(encoding, scale, tiles, factor)
    return _arithmetic(path).decode_error(matrix, tiles, single, double, kind, dtype, zero)


def _arithmetic(path: Path | None) -> _Implementation:
    compiled = None if path == "numpy" else kernel.load()
    if path == "compiled" and compiled is None:
        raise ValueError("the kernel is not built: install the package on a machine with a C compiler")
    return vectorised if compiled is None else compiled


def _kind(encoding: Encoding) -> Minifloat | CodeTable:
    if encoding.code not in KINDS:
        raise refuse("UNSUPPORTED", f"{encoding.name}: unknown codes {encoding.code}; known: {', '.join(KINDS)}")
    return KINDS[encoding.code]


def _matrix(values: NDArray[Any]) -> NDArray[Any]:
    """Return a matrix of floating-point values without gaps between elements of a row, copied only if necessary."""
    wide_code(values.dtype)
    return _adjacent(values)


def _adjacent(array: NDArray[Any]) -> NDArray[Any]:
    """Return a matrix without gaps between elements of a row, copied only if necessary."""
    if array.ndim != 2:
        raise ValueError(f"{array.ndim} dims; encodings need matrices")
    strided_rows = array.shape[1] > 1 and array.strides[1] != array.itemsize
    misaligned = array.strides[0] % array.itemsize or not array.flags.aligned
    return np.ascontiguousarray(array) if strided_rows or misaligned else array


def _shape(matrix: NDArray[Any]) -> tuple[int, int]:
    return matrix.shape[0], matrix.shape[1]


def _code_bytes(
    encoding: Encoding, codes: NDArray[Any], phase: tuple[int, int]
) -> tuple[Bytes, Tiling, Minifloat | CodeTable]:
    """Return the codes as bytes, their tiling, and the floating-point type of the codes."""
    kind = _kind(encoding)
    matrix = _adjacent(codes.view(np.uint8) if codes.dtype.itemsize == 1 else codes)
    if matrix.dtype != np.uint8:
        raise refuse("DTYPE_MISMATCH", f"{encoding.name}: codes must be bytes, not {matrix.dtype}")
    rows, width = _shape(matrix)
    return matrix, tiling(encoding, (rows, width * 8 // kind.bits), phase), kind


def _codes_of(shape: tuple[int, int], kind: Minifloat | CodeTable, out: Bytes | None) -> Bytes:
    """Return the array to write codes into: `out` if it is not None, else a new array."""
    rows, columns = shape
    if columns * kind.bits % 8:
        raise refuse("SHAPE_MISMATCH", f"rows of {columns} codes of {kind.code}, two to a byte, do not fill bytes")
    return _out((rows, columns * kind.bits // 8), np.dtype(np.uint8), out)


def _out(shape: tuple[int, int], dtype: np.dtype[Any], out: NDArray[Any] | None) -> NDArray[Any]:
    if out is None:
        return np.empty(shape, dtype)
    if out.shape != shape or out.dtype != dtype or _adjacent(out) is not out or not out.flags.writeable:
        raise ValueError(f"out is {out.dtype}{list(out.shape)}; expected a contiguous {dtype}{list(shape)}")
    return out


def _tiles_of_blocks(tiles: Tiling, over: tuple[int, int]) -> Tiling:
    if any(size % step for size, step in zip(over, tiles.tile, strict=True)):
        raise ValueError(f"an amax over {over} does not cover whole tiles of {tiles.tile}")
    return Tiling(tiles.shape, over)


def _repeat(stored: NDArray[Any], shared: Tiling, tiles: Tiling) -> NDArray[Any]:
    """Expand scales that several tiles share, so that the result has one scale per tile."""
    if shared is tiles:
        return stored
    rows, columns = (size // step for size, step in zip(shared.tile, tiles.tile, strict=True))
    full = stored.repeat(rows, axis=0).repeat(columns, axis=1)
    return np.ascontiguousarray(full[: tiles.grid[0], : tiles.grid[1]])


def _scale(
    encoding: Encoding, scale: NDArray[Any], tiles: Tiling, factor: float
) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Return, for each tile, the product of scale and factor, rounded to float32, and also in double precision."""
    if scale.shape != tiles.grid:
        raise refuse(
            "SHAPE_MISMATCH",
            f"{encoding.name}: {list(tiles.shape)} elements from {list(tiles.phase)} on touch {list(tiles.grid)} "
            f"tiles of {list(tiles.tile)}, but there are {list(scale.shape)} scales",
        )
    plain = scale_values(encoding, scale)
    with np.errstate(all="ignore"):
        double = plain.astype(np.float64) * float(factor)
        return (plain if factor == 1 else double.astype(np.float32)), double


def scale_values(encoding: Encoding, scale: NDArray[Any]) -> NDArray[np.float32]:
    """Return stored scales, in their stored dtype or 8-bit scales as u8, as float32 numbers.

    Raises:
        Refused: with the code DTYPE_MISMATCH if no encoding has scales of this dtype.
    """
    if encoding.scale == "F8_E8M0":
        return power_of_two(_bits(scale))
    if encoding.scale == E4M3.code:
        values: NDArray[np.float32] = E4M3.values[_bits(scale)]
        return values
    wide_code(scale.dtype)
    return widen(scale)


def _bits(scale: NDArray[Any]) -> Bytes:
    if scale.dtype.itemsize != 1:
        raise refuse("DTYPE_MISMATCH", f"8-bit scales must be bytes, not {scale.dtype}")
    return scale.view(np.uint8)
