"""The compiled kernel that encodes and decodes: `kernel.c` is built at installation if there is a C compiler.

The library file is in the folder of this module. The library is used only if it was built from the `kernel.c` beside
this module. Calls into the library release the GIL, so threads encode and decode in parallel.
"""

from __future__ import annotations

import ctypes
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transaxle.encodings.arithmetic.codes import KINDS, CodeTable
from transaxle.encodings.arithmetic.minifloat import Minifloat, wide_code
from transaxle.encodings.arithmetic.vectorised import Tiling, sizes
from transaxle.encodings.encoding import WIDE, Error

SOURCE = Path(__file__).with_name("kernel.c")
LIBRARY = Path(__file__).with_name("libkernel.so")

_TYPES = {code: number for number, code in enumerate(WIDE)}
_CODES = {code: number for number, code in enumerate(KINDS)}


class _Grid(ctypes.Structure):
    """Counterpart of the C struct `grid` in kernel.c."""

    _fields_ = tuple(
        (name, ctypes.c_ssize_t)
        for name in ("rows", "columns", "row_phase", "column_phase", "tile_rows", "tile_columns")
    )


_AT, _LONG, _GRID, _KIND = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.POINTER(_Grid), ctypes.c_int
_MATRIX = (_AT, _LONG)
_OPERATIONS: dict[str, tuple[Any, ...]] = {
    "largest": (*_MATRIX, _GRID, _AT, _KIND),
    "cast": (*_MATRIX, _GRID, _AT, *_MATRIX, _KIND, _KIND),
    "value": (*_MATRIX, _GRID, _AT, _AT, *_MATRIX, _KIND, _KIND),
    "int4": (*_MATRIX, _GRID, _AT, *_MATRIX, _AT, _KIND),
    "error": (*_MATRIX, *_MATRIX, _GRID, _AT, _AT, _AT, _AT, _KIND, _KIND),
}


class Kernel:
    """The functions of the module `vectorised`, compiled. Arrays may have gaps between rows, but not inside a row."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, arguments in _OPERATIONS.items():
            function = library[f"transaxle_{name}"]
            function.argtypes, function.restype = arguments, None
            setattr(self, f"_{name}", function)

    _largest: Any
    _cast: Any
    _value: Any
    _int4: Any
    _error: Any

    def largest(self, values: NDArray[Any], tiles: Tiling) -> NDArray[np.float32]:
        """Return the largest absolute value of each tile, as `vectorised.largest` does."""
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
        """Multiply values by the multiplier of their tile, and write codes, as `vectorised.cast` does."""
        by = np.ascontiguousarray(multiplier)
        types = _TYPES[wide_code(values.dtype)], _CODES[kind.code]
        self._cast(*_matrix(values), _grid(tiles), by.ctypes.data, *_matrix(out), *types)

    def int4(self, values: NDArray[Any], tiles: Tiling, out: NDArray[np.uint8]) -> NDArray[Any]:
        """Write 4-bit integer codes, and return the scales, as `vectorised.int4` does."""
        scales = np.empty(tiles.grid, values.dtype)
        row_values = np.empty(tiles.shape[1], np.float32)
        places = *_matrix(values), _grid(tiles), scales.ctypes.data, *_matrix(out), row_values.ctypes.data
        self._int4(*places, _TYPES[wide_code(values.dtype)])
        return scales

    def value(
        self,
        codes: NDArray[np.uint8],
        tiles: Tiling,
        scale: NDArray[np.float32],
        kind: Minifloat | CodeTable,
        out: NDArray[Any],
        wide: str,
        zero: NDArray[np.float32] | None = None,
    ) -> None:
        """Multiply codes by the scale of their tile, and write values, as `vectorised.value` does."""
        by, zeros = np.ascontiguousarray(scale), None if zero is None else np.ascontiguousarray(zero)
        types = _TYPES[wide], _CODES[kind.code]
        self._value(*_matrix(codes), _grid(tiles), by.ctypes.data, _address(zeros), *_matrix(out), *types)

    def encode_error(
        self,
        values: NDArray[Any],
        codes: NDArray[np.uint8],
        tiles: Tiling,
        scale: NDArray[np.float32],
        kind: Minifloat | CodeTable,
    ) -> Error:
        """Compare decoded codes with the values that were encoded, as `vectorised.encode_error` does."""
        types = _TYPES[wide_code(values.dtype)], _CODES[kind.code]
        return self._sum_errors(_matrix(values), codes, tiles, np.ascontiguousarray(scale), None, None, types)

    def decode_error(
        self,
        codes: NDArray[np.uint8],
        tiles: Tiling,
        scale: NDArray[np.float32],
        exact: NDArray[np.float64],
        kind: Minifloat | CodeTable,
        wide: str,
        zero: NDArray[np.float32] | None = None,
    ) -> Error:
        """Compare decoded values with the exact products, as `vectorised.decode_error` does."""
        by, wider = np.ascontiguousarray(scale), np.ascontiguousarray(exact)
        return self._sum_errors((None, 0), codes, tiles, by, zero, wider, (_TYPES[wide], _CODES[kind.code]))

    def _sum_errors(
        self,
        values: tuple[int | None, int],
        codes: NDArray[np.uint8],
        tiles: Tiling,
        by: NDArray[np.float32],
        zero: NDArray[np.float32] | None,
        exact: NDArray[np.float64] | None,
        types: tuple[int, int],
    ) -> Error:
        # The kernel writes three numbers: the largest difference, the sum of squares, and the number of unequal values.
        sums = np.zeros(3)
        zeros = None if zero is None else np.ascontiguousarray(zero)
        pointers = by.ctypes.data, _address(zeros), _address(exact), sums.ctypes.data
        self._error(*values, *_matrix(codes), _grid(tiles), *pointers, *types)
        return Error(float(sums[0]), float(sums[1]), tiles.shape[0] * tiles.shape[1], int(sums[2]))


def _matrix(array: NDArray[Any]) -> tuple[int, int]:
    """Return the memory address of an array, and the number of bytes from one row to the next."""
    return array.ctypes.data, array.strides[0]


def _address(array: NDArray[Any] | None) -> int | None:
    return None if array is None else array.ctypes.data


def _grid(tiles: Tiling) -> Any:
    return ctypes.byref(_Grid(*tiles.shape, *tiles.phase, *tiles.tile))


@cache
def load() -> Kernel | None:
    """Load the kernel; None if it was not built, cannot be loaded on this machine, or was built from a different
    source.
    """
    try:
        library = ctypes.CDLL(str(LIBRARY))
        stamp = library.transaxle_stamp
        stamp.restype = ctypes.c_uint32
        return Kernel(library) if stamp() == zlib.crc32(SOURCE.read_bytes()) else None
    except (OSError, AttributeError):
        return None
