"""Element types, named by their safetensors code.

A type that safetensors has no code for is named as torch names it, in capitals (`COMPLEX32`); sinks that
cannot hold it refuse it. F4 and F6 count *elements* in shapes; their bytes are packed along the last dim.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from transaxle.errors import refuse

if TYPE_CHECKING:
    import numpy as np

BITS: dict[str, int] = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""Bits per element of every safetensors code, in the order of the library's own list: its writer sorts by it."""

ITEM_BITS: dict[str, int] = BITS | {
    "COMPLEX32": 32, "COMPLEX128": 128, "QINT8": 8, "QUINT8": 8, "QINT32": 32, "QUINT4X2": 8, "QUINT2X4": 8,
    "BITS8": 8, "BITS16": 16, "BITS1X8": 8, "BITS2X4": 8, "BITS4X2": 8,
    **{f"{sign}INT{bits}": 8 for sign in ("", "U") for bits in range(1, 8)},
}  # fmt: skip
"""Bits per element of every type that may be stored; torch counts a whole byte for each element of its packed ones."""

Shape = tuple[int, ...]


@cache
def _numpy() -> Mapping[str, np.dtype]:
    """Return the numpy types by code; `ml_dtypes` is imported by the first who reads values."""
    import ml_dtypes
    import numpy as np

    return {
        "BOOL": np.dtype(np.bool_), "U8": np.dtype("u1"), "I8": np.dtype("i1"), "I16": np.dtype("<i2"),
        "U16": np.dtype("<u2"), "I32": np.dtype("<i4"), "U32": np.dtype("<u4"), "I64": np.dtype("<i8"),
        "U64": np.dtype("<u8"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4"), "F64": np.dtype("<f8"),
        "C64": np.dtype("<c8"), "BF16": np.dtype(ml_dtypes.bfloat16), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
        "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2), "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
        "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz), "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
        "COMPLEX32": np.dtype([("real", "<f2"), ("imag", "<f2")]), "COMPLEX128": np.dtype("<c16"),
        "QINT8": np.dtype("i1"), "QINT32": np.dtype("<i4"), "BITS16": np.dtype("<u2"),
    }  # fmt: skip


def numpy_dtype(code: str) -> np.dtype:
    """Return the numpy type for reading: the real one, or U8 for packed types (F4, F6) and for bare bits."""
    import numpy as np

    return _numpy().get(code, np.dtype("u1"))


@cache
def _codes() -> Mapping[np.dtype, str]:
    return {dtype: code for code, dtype in reversed(list(_numpy().items()))}


def is_scalar(value: object) -> bool:
    """Tell whether something is one of numpy's scalars; numpy is not imported for that."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def scalar(data: bytes, code: str) -> np.generic:
    """Return the numpy scalar of these bytes."""
    import numpy as np

    found: np.generic = np.frombuffer(data, numpy_dtype(code))[0]
    return found


def code_of(dtype: np.dtype) -> str:
    """Return the code of a numpy type.

    Raises:
        KeyError: where there is none.
    """
    return _codes()[dtype]


def stored_number(data: bytes, code: str) -> float:
    """Return the number that the bytes of one element mean, such as an optimizer's step; integers stay exact."""
    value: float = scalar(data, code).item()
    return value


PACKED = {"F4": 2}
"""Codes of which torch counts several elements as one, along the last dim."""


def logical(counts: Shape, code: str) -> Shape:
    """Return torch's counts along each dim as ours: elements, also of packed types."""
    packed = PACKED.get(code, 1)
    return counts if packed == 1 or not counts else (*counts[:-1], counts[-1] * packed)


def packed_width(code: str, width: int) -> int:
    """Return the bytes that `width` consecutive elements of one row take.

    Raises:
        Refused: SHAPE_MISMATCH where packed elements do not fill whole bytes.
    """
    bits = ITEM_BITS[code] * width
    if bits % 8:
        raise refuse("SHAPE_MISMATCH", f"{width} elements of {code} do not fill whole bytes")
    return bits // 8


@lru_cache(maxsize=4096)
def nbytes(code: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a dense tensor; see `packed_width`. Cached, as models have few shapes."""
    count = 1
    for size in shape:
        count *= size
    return packed_width(code, count)
