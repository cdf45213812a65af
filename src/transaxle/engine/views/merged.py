"""Merged adapters: weights seen with the low-rank changes of an adapter added, computed when they are read.

Everything is summed in float64 and then rounded to the weight's type, through float32 as torch's `.to` does. The terms
are added in the order of the ranks, so a value has the same bits in whatever pieces a tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transaxle.axes.layout.relayout import Target
from transaxle.encodings.arithmetic.minifloat import widened
from transaxle.engine.copying.source import Source
from transaxle.engine.views.cast import BAND, Caster
from transaxle.engine.views.decoded import RowMajorBytes
from transaxle.formats.catalog import Entry, numpy_dtype
from transaxle.move.endpoint import Readable

Wide = NDArray[np.float64]
_ITEM = np.dtype(np.float64).itemsize


def wide(entry: Entry, values: NDArray[Any]) -> Wide:
    """Return the stored numbers of a plain tensor in float64: every type of an adapter is exact there."""
    typed = values.view(numpy_dtype(entry.dtype))
    return typed if typed.dtype == np.float64 else widened(typed).astype(np.float64)


def added(values: Wide, change: Wide) -> Wide:
    """Return values with a change added; a zero that stays keeps its sign."""
    with np.errstate(all="ignore"):
        return np.where(change == 0, values, values + change)


@dataclass(frozen=True, slots=True)
class Factors:
    """The change of a weight: for each matrix of a stack, scaling times `left @ right`."""

    left: Wide
    """`[matrices, rows, rank]`."""
    right: Wide
    """`[matrices, rank, columns]`."""
    scaling: float
    """What every sum of products is multiplied with."""

    def same_as(self, other: Factors) -> bool:
        """Tell whether another change has the same factors, and so the same values."""
        pairs = (self.left, other.left), (self.right, other.right)
        return self.scaling == other.scaling and all(np.array_equal(*pair) for pair in pairs)

    def rows(self, matrix: int, first: int, last: int) -> Wide:
        """Return rows of the change of one matrix."""
        left, right = self.left[matrix, first:last], self.right[matrix]
        total = np.zeros((last - first, right.shape[1]))
        for rank in range(len(right)):
            total += left[:, rank, None] * right[rank]
        return total * self.scaling


@dataclass(frozen=True, slots=True)
class Change:
    """A file of the float64 values by which a weight changes.

    Attributes:
        shape: of the weight; the kernels of a convolution are rows.
        factors: reads the factors.
    """

    shape: tuple[int, ...]
    factors: Callable[[], Factors]

    @property
    def nbytes(self) -> int:
        """See `VirtualFile`."""
        return prod(self.shape) * _ITEM

    def read_into(self, offset: int, view: memoryview) -> None:
        """See `VirtualFile`."""
        out, (rows, columns) = view.cast("B"), self.shape[-2:]
        width, factors = columns * _ITEM, self.factors()
        while out:
            row, inside = divmod(offset, width)
            matrix, first = divmod(row, rows)
            last = min(rows, first + max(1, BAND // columns), first + -(-(inside + len(out)) // width))
            values = factors.rows(matrix, first, last).reshape(-1).view(np.uint8).data[inside:]
            taken = min(len(values), len(out))
            out[:taken] = values[:taken]
            out, offset = out[taken:], offset + taken


@dataclass(frozen=True, slots=True)
class Replacement:
    """A file of the float64 values of a tensor that an adapter has instead of the model's.

    Attributes:
        entry: the tensor.
        rows: its bytes.
    """

    entry: Entry
    rows: RowMajorBytes

    @property
    def nbytes(self) -> int:
        """See `VirtualFile`."""
        return prod(self.entry.shape) * _ITEM

    def read_into(self, offset: int, view: memoryview) -> None:
        """See `VirtualFile`."""
        item, out = numpy_dtype(self.entry.dtype).itemsize, view.cast("B")
        while out:
            first = offset // _ITEM
            last = min(first + BAND, -(-(offset + len(out)) // _ITEM))
            values = wide(self.entry, self.rows.read(first * item, last * item)).view(np.uint8).data
            taken = values[offset - first * _ITEM :][: len(out)]
            out[: len(taken)] = taken
            out, offset = out[len(taken) :], offset + len(taken)


@dataclass(frozen=True, slots=True)
class Rebased:
    """A file of the float64 sums of a change and of the weight that the adapter has for it.

    Attributes:
        base: the weight.
        change: what is added to it.
    """

    base: Replacement
    change: Change

    @property
    def nbytes(self) -> int:
        """See `VirtualFile`."""
        return self.base.nbytes

    def read_into(self, offset: int, view: memoryview) -> None:
        """See `VirtualFile`."""
        out, first = view.cast("B"), offset // _ITEM
        last = -(-(offset + len(out)) // _ITEM)
        while first < last:
            stop = min(last, first + BAND)
            base, change = np.empty(stop - first), np.empty(stop - first)
            self.base.read_into(first * _ITEM, base.data)
            self.change.read_into(first * _ITEM, change.data)
            start, end = max(offset, first * _ITEM), min(offset + len(out), stop * _ITEM)
            total = added(base, change).view(np.uint8)[start - first * _ITEM : end - first * _ITEM]
            out[start - offset : end - offset] = total.data
            first = stop


@dataclass(frozen=True, slots=True)
class Zeros:
    """A file of the values by which a tensor without an adapter changes."""

    nbytes: int
    """See `VirtualFile`."""

    def read_into(self, offset: int, view: memoryview) -> None:  # noqa: ARG002 - they are all the same
        """See `VirtualFile`."""
        np.frombuffer(view, np.uint8)[:] = 0


class Merger(Caster):
    """One weight with its adapter merged, as the row-major bytes of its values.

    Args:
        entry: the weight.
        source: turns it into transfers.
        reader: reads the files.
        change: where its change lies, or its new values, in float64.
        replaced: whether these are new values.
    """

    action = "merged"

    def __init__(
        self, entry: Entry, source: Source, reader: Readable, change: tuple[Target, Source], *, replaced: bool
    ) -> None:
        super().__init__(entry, source, reader, entry.dtype)  # type: ignore[arg-type]  # plain, as merging requires
        target, changes = change
        self._change = RowMajorBytes(changes.container.storage, changes.transfers(target))
        self._replaced = replaced

    def _values(self, start: int, stop: int) -> NDArray[Any]:
        change = self._change.read(start * _ITEM, stop * _ITEM).view(np.float64)
        if self._replaced:
            return change
        return added(wide(self.entry, super()._values(start, stop)), change)
