"""Units of reading: runs of bytes of one shard, each read by one rank and wanted by one or several."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from transaxle.axes.geometry.strided import Loop
from transaxle.engine.checkpoint.checkpoint import StoredTensor
from transaxle.formats.dtype import nbytes
from transaxle.formats.storage.storage import Overlay, Storage
from transaxle.formats.storage.strided_reads import read_strided
from transaxle.live.sharding.global_tensors import Census
from transaxle.move.endpoint import Readable
from transaxle.move.strided_fill import Scratch, fill
from transaxle.move.transfer import Transfer, clip
from transaxle.torch_tensors.placement import local_shape
from transaxle.torch_tensors.tensor_bytes import Bytes

UNIT = 8 << 20
"""Bytes that are read, or sent, at once."""


class Counting(Overlay):
    """A storage that counts the bytes read from it; safe to share between threads."""

    def __init__(self, below: Storage) -> None:
        super().__init__(below)
        self._lock = threading.Lock()
        self.count = 0

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """See `Storage`."""
        super().read_into(name, offset, view)
        with self._lock:
            self.count += view.nbytes

    def read_strided(self, name: str, offset: int, view: memoryview, width: int, loops: Sequence[Loop]) -> None:
        """See `formats.strided.read_strided`."""
        read_strided(self.below, name, offset, view, width, loops)
        with self._lock:
            self.count += width * prod(count for count, _, _ in loops)


@dataclass(frozen=True, slots=True)
class Unit:
    """A run of bytes of one shard, and the ranks that need it."""

    name: str
    """Tensor."""
    transfers: Callable[[], Sequence[Transfer]]
    """Gives what fills the whole shard; asked for only where it is read."""
    start: int
    """First byte in the row-major shard."""
    stop: int
    """One past the last byte."""
    reader: int
    """Rank that reads it."""
    ranks: tuple[int, ...]
    """Ranks that need it."""

    def read(self, reader: Readable, out: Bytes, scratch: Scratch) -> None:
        """Read the run into a buffer of its size."""
        parts = [part for transfer in self.transfers() for part in clip(transfer, self.start, self.stop)]
        if sum(part.size for part in parts) != len(out):
            out[:] = 0  # padding: bytes that no transfer fills
        for part in parts:
            fill(reader, part, out, self.start, scratch)


class _Once:
    """Transfers of one shard, computed when they are first wanted."""

    def __init__(self, make: Callable[[], list[Transfer]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._found: list[Transfer] | None = None

    def __call__(self) -> list[Transfer]:
        with self._lock:
            if self._found is None:
                self._found = self._make()
            return self._found


def units(wanted: Census, stored: Mapping[str, StoredTensor], *, once: bool) -> list[Unit]:
    """Divide what all ranks need into units, the same on every rank.

    Args:
        wanted: the tensors to be loaded, as all ranks hold them.
        stored: the source's tensors by the same names.
        once: let one rank read what several need: of those that hold it, the one that reads least so far.

    Post-condition: the units of a rank, those it reads itself or receives, are disjoint and together its shards.
    """
    found: list[Unit] = []
    load: dict[int, int] = {}
    for name, tensor in wanted.items():
        source = stored[name]
        for held, ranks in tensor.boxes.items():
            size = nbytes(source.dtype, local_shape(held))
            transfers = _Once(lambda source=source, held=held: source.transfers(held))  # type: ignore[misc]
            for start in range(0, size, UNIT):
                stop = min(start + UNIT, size)
                for group in [ranks] if once else [(rank,) for rank in ranks]:
                    reader = min(group, key=lambda rank: (load.get(rank, 0), rank))
                    load[reader] = load.get(reader, 0) + stop - start
                    found.append(Unit(name, transfers, start, stop, reader, group))
    return found
