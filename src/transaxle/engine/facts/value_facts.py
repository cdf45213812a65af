"""What values tensors have: extremes, moments, zeros, channels that stand out; they are read once, in blocks."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from transaxle.engine.checkpoint.checkpoint import Checkpoint, StoredTensor
from transaxle.formats.dtype import ITEM_BITS, numpy_dtype
from transaxle.move.workers import Limits, Progress, Worker, share, unwatched

_WIDEST = "fp32"
"""What encoded tensors are decoded to."""
_OUTSTANDING = 6.0
"""How many times as large as the median's a channel's largest value must be to stand out."""
_COUNTED = 2
"""Bytes of the types of which every value is counted: what follows from the counts is exact."""
Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TensorValues:
    """The values of one tensor. NaN and infinite values do not enter into its numbers."""

    elements: int
    """How many it has."""
    least: float
    """The smallest finite value; NaN where there is none."""
    largest: float
    """The largest finite value."""
    mean: float
    """Their mean."""
    rms: float
    """Root of the mean of their squares."""
    zeros: int
    """Elements that are 0 or -0."""
    nans: int
    """Elements that are NaN."""
    infinite: int
    """Elements that are infinite."""
    channels: int
    """Channels, which are the positions along the last dim; 0 where they were not looked at."""
    outstanding: tuple[int, ...]
    """Channels whose largest value is more than six times that of the median channel, the largest first."""
    times: float
    """How many times as large it is in the first of them, or in the largest; NaN where the median is 0."""

    @property
    def absmax(self) -> float:
        """The largest absolute value of a finite element."""
        return max(-self.least, self.largest)


@dataclass(frozen=True)
class CheckpointValues:
    """The values of a checkpoint's tensors."""

    tensors: dict[str, TensorValues]
    """Name -> its values, in the order of the checkpoint."""
    unmeasured: tuple[str, ...]
    """Tensors of types that have no numbers of whole bytes."""
    seen: Checkpoint
    """The view whose tensors they are: quantized ones are decoded."""


def measure_values(checkpoint: Checkpoint, limit: Limits, progress: Progress = unwatched) -> CheckpointValues:
    """Read every tensor once and measure its values.

    Args:
        checkpoint: as it is stored; quantized tensors are decoded.
        limit: workers and memory.
        progress: told the bytes of each block.

    Raises:
        TransaxleError: what reading raises.
    """
    seen = checkpoint.decode(_WIDEST) if checkpoint.catalog.encoded else checkpoint
    names = [name for name, tensor in seen.items() if _has_numbers(tensor)]
    found: dict[str, TensorValues] = {}
    lock = threading.Lock()

    def look(worker: Worker, name: str) -> None:
        values = _measured(seen[name], worker, progress)
        with lock:
            found[name] = values

    share(names, limit.jobs, partial(Worker, seen.container.storage, limit), look)
    kept = {name: found[name] for name in names}
    return CheckpointValues(kept, tuple(name for name in seen if name not in kept), seen)


def _has_numbers(tensor: StoredTensor) -> bool:
    return ITEM_BITS.get(tensor.dtype, 8) >= 8 and numpy_dtype(tensor.dtype).kind in "fiuVb"


def _measured(tensor: StoredTensor, worker: Worker, progress: Progress) -> TensorValues:
    kind = numpy_dtype(tensor.dtype)
    width = tensor.shape[-1] if len(tensor.shape) > 1 else 0
    row = width * kind.itemsize
    whole_rows = worker.room // row * row if row and row <= worker.room else None
    values = _Counted(kind) if kind.itemsize <= _COUNTED else _Summed(kind)
    channels = _Channels(width) if whole_rows else None
    for block in worker.blocks(tensor.transfers(), tensor.nbytes, length=whole_rows):
        values.add(block)
        if channels is not None:
            if len(block) % row:  # a block may end within a row where the transfers do
                channels = None
            else:
                channels.add(np.frombuffer(block, kind))
        progress(len(block))
    return values.found(channels)


class _Channels:
    """The largest finite absolute value of each channel."""

    def __init__(self, width: int) -> None:
        self.largest: Array = np.zeros(width)

    def add(self, values: npt.NDArray[np.generic]) -> None:
        """Add whole rows."""
        with np.errstate(invalid="ignore"):  # NaN of the kind that signals
            self._add(values.reshape(-1, len(self.largest)), values.dtype)

    def _add(self, rows: npt.NDArray[np.generic], kind: np.dtype[np.generic]) -> None:
        if kind.kind in "fV" and kind.itemsize == _COUNTED:
            codes = rows.view(np.uint16) & np.uint16(0x7FFF)  # as large as they are, as whole numbers
            largest = np.abs(codes.max(0).view(kind).astype(np.float64))
        else:
            largest = np.abs(rows.astype(np.float64)).max(0) if kind.itemsize < 4 else _absolute(rows)
        if not np.isfinite(largest).all():
            finite = np.abs(rows.astype(np.float64))
            largest = np.where(np.isfinite(finite), finite, 0.0).max(0)
        np.maximum(self.largest, largest, out=self.largest)

    def outstanding(self) -> tuple[tuple[int, ...], float]:
        """Return the channels that stand out, and how far the largest does."""
        if not len(self.largest):
            return (), math.nan
        median = float(np.median(self.largest))
        order = np.argsort(-self.largest, kind="stable")
        found = order[self.largest[order] > _OUTSTANDING * median] if median else order[:0]
        return tuple(found.tolist()), float(self.largest.max()) / median if median else math.nan


def _absolute(rows: npt.NDArray[np.generic]) -> Array:
    largest: Array = np.maximum(rows.max(0).astype(np.float64), -rows.min(0).astype(np.float64))
    return largest


class _Values(Protocol):
    """What is known of a tensor's values so far."""

    def add(self, block: memoryview) -> None:
        """Add a block."""

    def found(self, channels: _Channels | None) -> TensorValues:
        """Return what was found."""


@cache
def _every(kind: np.dtype[np.generic]) -> Array:
    """Return the value of every code of a small type."""
    codes = np.arange(1 << 8 * kind.itemsize, dtype=f"u{kind.itemsize}")
    with np.errstate(invalid="ignore"):  # NaN of the kind that signals
        values: Array = (codes != 0 if kind.kind == "b" else codes.view(kind)).astype(np.float64)
    return values


class _Counted:
    """Values of small types, of each of which it is counted how often there is one."""

    def __init__(self, kind: np.dtype[np.generic]) -> None:
        self._codes = f"u{kind.itemsize}"
        self._values = _every(kind)
        self._counts = np.zeros(len(self._values), np.int64)

    def add(self, block: memoryview) -> None:
        """See `_Values`."""
        self._counts += np.bincount(np.frombuffer(block, self._codes), minlength=len(self._counts))

    def found(self, channels: _Channels | None) -> TensorValues:
        """See `_Values`."""
        there = self._counts > 0
        values, counts = self._values[there], self._counts[there]
        nans, infinite = int(counts[np.isnan(values)].sum()), int(counts[np.isinf(values)].sum())
        finite = np.isfinite(values)
        values, counts = values[finite], counts[finite]
        sums = float((values * counts).sum()), float((np.square(values) * counts).sum())
        extremes = (float(values.min()), float(values.max())) if len(values) else (math.nan, math.nan)
        zeros = int(counts[values == 0].sum())
        return _of(int(self._counts.sum()), extremes, sums, (zeros, nans, infinite), channels)


class _Summed:
    """Values of larger types, which are summed."""

    def __init__(self, kind: np.dtype[np.generic]) -> None:
        self._kind = kind
        self._elements = self._zeros = self._nans = self._infinite = 0
        self._sum = self._squares = 0.0
        self._least, self._largest = math.inf, -math.inf

    def add(self, block: memoryview) -> None:
        """See `_Values`."""
        with np.errstate(invalid="ignore"):
            values = np.frombuffer(block, self._kind).astype(np.float64)
        self._elements += values.size
        finite = np.isfinite(values)
        if not finite.all():
            nans = int(np.isnan(values).sum())
            self._nans += nans
            self._infinite += values.size - int(finite.sum()) - nans
            values = values[finite]
        self._zeros += values.size - int(np.count_nonzero(values))
        with np.errstate(over="ignore"):
            self._sum += float(values.sum())
            self._squares += float(np.square(values).sum())
        self._least = min(self._least, float(values.min(initial=math.inf)))
        self._largest = max(self._largest, float(values.max(initial=-math.inf)))

    def found(self, channels: _Channels | None) -> TensorValues:
        """See `_Values`."""
        finite = self._elements - self._nans - self._infinite
        extremes = (self._least, self._largest) if finite else (math.nan, math.nan)
        odd = self._zeros, self._nans, self._infinite
        return _of(self._elements, extremes, (self._sum, self._squares), odd, channels)


def _of(
    elements: int,
    extremes: tuple[float, float],
    sums: tuple[float, float],
    odd: tuple[int, int, int],
    channels: _Channels | None,
) -> TensorValues:
    zeros, nans, infinite = odd
    finite = elements - nans - infinite
    mean, rms = (sums[0] / finite, math.sqrt(sums[1] / finite)) if finite else (math.nan, math.nan)
    outstanding, times = ((), math.nan) if channels is None else channels.outstanding()
    width = 0 if channels is None else len(channels.largest)
    return TensorValues(elements, *extremes, mean, rms, zeros, nans, infinite, width, outstanding, times)
