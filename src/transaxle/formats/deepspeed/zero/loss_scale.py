"""Parameters that every rank stores multiplied by a number: divided again, where that reproduces exactly what was
stored.

Row-parallel layers divide a bias that all ranks hold by their number, so that the sum of their outputs has it once.
Such a parameter is small; it is read and divided when the checkpoint is opened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transaxle.axes.geometry.strided import row_major
from transaxle.errors import refuse
from transaxle.formats.catalog import Entry, Extent, NumbersInMemory, numpy_dtype

if TYPE_CHECKING:
    import numpy as np

_LARGEST = 64 << 20


def unscaled(entry: Entry, factor: float, inline: NumbersInMemory) -> Entry:
    """Return a tensor divided by a number.

    Raises:
        Refused: LOSSY where multiplying it again would not give what is stored; UNSUPPORTED for a large tensor, or one
            that is no floating-point numbers.
    """
    import numpy as np

    dtype = numpy_dtype(entry.dtype)
    if entry.nbytes > _LARGEST or entry.dtype not in ("F32", "F16", "BF16", "F64"):
        message = f"it is stored multiplied by {factor}; {entry.nbytes} bytes of {entry.dtype} cannot be divided again"
        raise refuse("UNSUPPORTED", message, tensor=entry.name)
    stored = _values(entry, dtype, inline)
    with np.errstate(all="ignore"):
        # In extended precision, then rounded to the stored dtype.
        divided = (stored.astype(np.longdouble) / np.longdouble(factor)).astype(dtype)
        rescaled = (divided.astype(np.longdouble) * np.longdouble(factor)).astype(dtype)
        # Rounding back to the same bits is not enough: the division itself must have been exact.
        exact = divided.astype(np.longdouble) * np.longdouble(factor) == stored.astype(np.longdouble)
    if rescaled.tobytes() != stored.tobytes() or not bool(np.all(exact | np.isnan(stored.astype(np.float64)))):
        count = int(np.count_nonzero(~exact))
        message = f"it is stored multiplied by {factor}, and dividing would round {count} of its values"
        raise refuse("LOSSY", message, tensor=entry.name)
    place = inline.add(divided.tobytes())
    extent = Extent((0,) * len(entry.shape), entry.shape, place.file, place.offset)
    return Entry(entry.name, entry.dtype, entry.shape, (extent,))


def _values(entry: Entry, kind: np.dtype, inline: NumbersInMemory) -> np.ndarray:
    """Read a small tensor whole."""
    import numpy as np

    out = np.zeros(entry.shape, kind)
    for extent in entry.extents:
        box = tuple(slice(s, s + n) for s, n in zip(extent.start, extent.shape, strict=True))
        strides = extent.strides or row_major(extent.shape)
        out[box] = _strided(extent, strides, kind, inline)
    return out


def _strided(extent: Extent, strides: tuple[int, ...], kind: np.dtype, inline: NumbersInMemory) -> np.ndarray:
    import numpy as np

    span = 1 + sum((size - 1) * step for size, step in zip(extent.shape, strides, strict=True))
    data = inline.read(extent.file, extent.offset, span * kind.itemsize)
    steps = [step * kind.itemsize for step in strides]
    return np.ndarray(extent.shape, kind, data, 0, steps)
