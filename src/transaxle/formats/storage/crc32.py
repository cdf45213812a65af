"""The CRC-32 of bytes, as zip archives keep it: `runs.c` takes a third of zlib's time where the processor multiplies
without carries, which is every x86-64 of the last ten years; elsewhere zlib computes it, to the same number.
"""

from __future__ import annotations

import ctypes
import zlib
from array import array
from collections.abc import Callable, Sequence
from functools import cache

from transaxle.formats.storage.compiled import address, address_to_read, compiled_function

_FEWEST = 1 << 12
"""Bytes that are worth the call."""
_CRC = ctypes.c_uint32


def crc32(data: memoryview, crc: int = 0) -> int:
    """Return the CRC-32 of bytes.

    Args:
        data: the bytes, contiguous.
        crc: of the bytes before them.
    """
    compiled = load_crc32() if data.nbytes >= _FEWEST else None
    if compiled is None:
        return zlib.crc32(data, crc)
    octets, result = data.cast("B"), _CRC(crc)
    added = compiled(address_to_read(octets), len(octets), ctypes.byref(result))
    return zlib.crc32(octets[added:], result.value)


def crc32_each(pieces: Sequence[memoryview]) -> list[int]:
    """Return the CRC-32 of each of many pieces, summed while the interpreter lock is given away once.

    Args:
        pieces: each writable, contiguous and not empty.
    """
    compiled = load_crc32_each() if len(pieces) > 1 else None
    if compiled is None:
        return [crc32(piece) for piece in pieces]
    stretches = array("q", [number for piece in pieces for number in (address(piece), piece.nbytes)])
    sums = array("I", bytes(4 * len(pieces)))
    summed = compiled(stretches.buffer_info()[0], len(pieces), sums.buffer_info()[0])
    return sums.tolist() if summed == len(pieces) else [crc32(piece) for piece in pieces]


@cache
def load_crc32_each() -> Callable[..., int] | None:
    """Return the compiled function for many pieces; otherwise as `load_crc32`."""
    arguments = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    return compiled_function("transaxle_crc32_each", arguments, ctypes.c_int64)


@cache
def load_crc32() -> Callable[..., int] | None:
    """Return the compiled function; None if it was not built, cannot be loaded, or was built from another source."""
    return compiled_function("transaxle_crc32", (ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(_CRC)), ctypes.c_int64)
