"""What values tensors have: extremes, moments, zeros, channels that stand out; they are read once, in blocks."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from functools import partial

import numpy as np

from transaxle.engine.checkpoint.checkpoint import Checkpoint, StoredTensor
from transaxle.engine.facts.tally import Doubles, Moments, tally_of
from transaxle.formats.catalog import ITEM_BITS, numpy_dtype
from transaxle.move.workers import Limits, Progress, Worker, share, unwatched

_WIDEST = "fp32"
"""What encoded tensors are decoded to."""
_OUTSTANDING = 6.0
"""How many times as large as the median's a channel's largest value must be to stand out."""


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

    # The largest first, so that no worker is left alone with it at the end.
    largest_first = sorted(names, key=lambda name: -seen[name].nbytes)
    share(largest_first, limit.jobs, partial(Worker, seen.container.storage, limit), look)
    kept = {name: found[name] for name in names}
    return CheckpointValues(kept, tuple(name for name in seen if name not in kept), seen)


def _has_numbers(tensor: StoredTensor) -> bool:
    kind = numpy_dtype(tensor.dtype)
    return ITEM_BITS.get(tensor.dtype, 8) >= 8 and kind.kind in "fiuVb" and not kind.names  # complex halves have names


def _measured(tensor: StoredTensor, worker: Worker, progress: Progress) -> TensorValues:
    kind = numpy_dtype(tensor.dtype)
    width = tensor.shape[-1] if len(tensor.shape) > 1 else 0
    tally = tally_of(kind, width if width * kind.itemsize <= worker.room else 0)
    for block in worker.blocks(tensor.transfers(), tensor.nbytes):
        tally.add(block)
        progress(len(block))
    return _of(tally.found(), tally.channels())


def _of(found: Moments, channels: Doubles) -> TensorValues:
    finite = found.elements - found.nans - found.infinite
    mean, rms = (found.total / finite, math.sqrt(found.squares / finite)) if finite else (math.nan, math.nan)
    odd = found.zeros, found.nans, found.infinite
    outstanding, times = _outstanding(channels)
    return TensorValues(found.elements, found.least, found.largest, mean, rms, *odd, len(channels), outstanding, times)


def _outstanding(largest: Doubles) -> tuple[tuple[int, ...], float]:
    """Return the channels that stand out, and how far the largest does."""
    if not len(largest):
        return (), math.nan
    order = np.argsort(-largest, kind="stable")
    ranked = largest[order]
    # As `np.median`, which imports numpy's masked arrays for it.
    median = float(ranked[(len(ranked) - 1) // 2] + ranked[len(ranked) // 2]) / 2
    found = order[ranked > _OUTSTANDING * median] if median else order[:0]
    return tuple(found.tolist()), float(largest.max()) / median if median else math.nan
