"""The compiled kernel: `kernel.c`, built when the package is installed, where there is a compiler.

The library is next to this module, and is used only if it was built from the source next to it. Calls release the GIL,
so threads encode and decode in parallel.
"""

from __future__ import annotations

import ctypes
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transaxle.encodings.arithmetic.minifloat import MINIFLOATS, Minifloat, wide_code
from transaxle.encodings.arithmetic.vectorised import Tiling, sizes
from transaxle.encodings.encoding import WIDE, Error

SOURCE = Path(__file__).with_name("kernel.c")
LIBRARY = Path(__file__).with_name("libkernel.so")

_TYPES = {code: number for number, code in enumerate(WIDE)}
_CODES = {code: number for number, code in enumerate(MINIFLOATS)}


class _Grid(ctypes.Structure):
    """The struct `grid` of kernel.c."""

    _fields_ = tuple(
        (name, ctypes.c_ssize_t)
        for name in ("rows", "columns", "row_phase", "column_phase", "tile_rows", "tile_columns")
    )


_AT, _LONG, _GRID, _KIND = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.POINTER(_Grid), ctypes.c_int
_MATRIX = (_AT, _LONG)
_OPERATIONS: dict[str, tuple[Any, ...]] = {
    "largest": (*_MATRIX, _GRID, _AT, _KIND),
    "cast": (*_MATRIX, _GRID, _AT, *_MATRIX, _KIND, _KIND),
    "value": (*_MATRIX, _GRID, _AT, *_MATRIX, _KIND, _KIND),
    "error": (*_MATRIX, *_MATRIX, _GRID, _AT, _AT, _AT, _KIND, _KIND),
}


class Kernel:
    """The compiled operations of `vectorised`. Rows of arrays may have gaps between them, elements of a row may not."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, arguments in _OPERATIONS.items():
            function = library[f"transaxle_{name}"]
            function.argtypes, function.restype = arguments, None
            setattr(self, f"_{name}", function)

    _largest: Any
    _cast: Any
    _value: Any
    _error: Any

    def largest(self, values: NDArray[Any], tiles: Tiling) -> NDArray[np.float32]:
        """See `vectorised.largest`."""
        amax_bits = np.zeros(tiles.grid, np.uint32)
        self._largest(*_matrix(values), _grid(tiles), amax_bits.ctypes.data, _TYPES[wide_code(values.dtype)])
        return sizes(amax_bits, values.dtype)

    def cast(
        self,
        values: NDArray[Any],
        tiles: Tiling,
        multiplier: NDArray[np.float32],
        kind: Minifloat,
        out: NDArray[np.uint8],
    ) -> None:
        """See `vectorised.cast`."""
        by = np.ascontiguousarray(multiplier)
        types = _TYPES[wide_code(values.dtype)], _CODES[kind.code]
        self._cast(*_matrix(values), _grid(tiles), by.ctypes.data, *_matrix(out), *types)

    def value(
        self,
        codes: NDArray[np.uint8],
        tiles: Tiling,
        scale: NDArray[np.float32],
        kind: Minifloat,
        out: NDArray[Any],
        wide: str,
    ) -> None:
        """See `vectorised.value`."""
        by = np.ascontiguousarray(scale)
        self._value(*_matrix(codes), _grid(tiles), by.ctypes.data, *_matrix(out), _TYPES[wide], _CODES[kind.code])

    def encode_error(
        self,
        values: NDArray[Any],
        codes: NDArray[np.uint8],
        tiles: Tiling,
        scale: NDArray[np.float32],
        kind: Minifloat,
    ) -> Error:
        """See `vectorised.encode_error`."""
        types = _TYPES[wide_code(values.dtype)], _CODES[kind.code]
        return self._sum_errors(_matrix(values), codes, tiles, np.ascontiguousarray(scale), None, types)

    def decode_error(
        self,
        codes: NDArray[np.uint8],
        tiles: Tiling,
        scale: NDArray[np.float32],
        exact: NDArray[np.float64],
        kind: Minifloat,
        wide: str,
    ) -> Error:
        """See `vectorised.decode_error`."""
        by, wider = np.ascontiguousarray(scale), np.ascontiguousarray(exact)
        return self._sum_errors((None, 0), codes, tiles, by, wider, (_TYPES[wide], _CODES[kind.code]))

    def _sum_errors(
        self,
        values: tuple[int | None, int],
        codes: NDArray[np.uint8],
        tiles: Tiling,
        by: NDArray[np.float32],
        exact: NDArray[np.float64] | None,
        types: tuple[int, int],
    ) -> Error:
        # The kernel writes the largest difference, the sum of squares, and the number of unequal values.
        sums = np.zeros(3)
        wider = None if exact is None else exact.ctypes.data
        self._error(*values, *_matrix(codes), _grid(tiles), by.ctypes.data, wider, sums.ctypes.data, *types)
        return Error(float(sums[0]), float(sums[1]), tiles.shape[0] * tiles.shape[1], int(sums[2]))


def _matrix(array: NDArray[Any]) -> tuple[int, int]:
    """Return the address of an array, and the bytes from one row to the next."""
    return array.ctypes.data, array.strides[0]


def _grid(tiles: Tiling) -> Any:
    return ctypes.byref(_Grid(*tiles.shape, *tiles.phase, *tiles.tile))


@cache
def load() -> Kernel | None:
    """Load the kernel; None where it was not built, cannot be loaded here, or does not match the source."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        stamp = library.transaxle_stamp
        stamp.restype = ctypes.c_uint32
        return Kernel(library) if stamp() == zlib.crc32(SOURCE.read_bytes()) else None
    except (OSError, AttributeError):
        return None
