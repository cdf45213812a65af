"""Which bytes of a checkpoint each rank reads, for itself and for others; and how many it has read."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

from transaxle.axes.geometry.strided import Loop
from transaxle.engine.checkpoint.checkpoint import StoredTensor
from transaxle.formats.dtype import nbytes
from transaxle.formats.storage.compiled import FileRange, StepBatch, read_ranges, read_strided
from transaxle.formats.storage.storage import Overlay, Storage
from transaxle.live.sharding.global_tensors import Census, Global
from transaxle.move.runs import Item
from transaxle.torch_tensors.placement import Held, local_shape


class Counting(Overlay):
    """A storage that counts the bytes read from it; safe to share between threads."""

    def __init__(self, below: Storage) -> None:
        super().__init__(below)
        self._lock = threading.Lock()
        self.count = 0

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """See `Storage`."""
        super().read_into(name, offset, view)
        self._add(view.nbytes)

    def note_read(self, batch: StepBatch, name: str, offset: int, view: memoryview) -> None:
        """See `Storage`."""
        self.below.note_read(batch, name, offset, view)
        batch.then(partial(self._add, view.nbytes))

    def note_strided(
        self, batch: StepBatch, name: str, offset: int, view: memoryview, width: int, loops: Sequence[Loop]
    ) -> None:
        """See `Storage`."""
        self.below.note_strided(batch, name, offset, view, width, loops)
        batch.then(partial(self._add, width * prod(count for count, _, _ in loops)))

    def read_strided(self, name: str, offset: int, view: memoryview, width: int, loops: Sequence[Loop]) -> None:
        """See `formats.storage.compiled.read_strided`."""
        read_strided(self.below, name, offset, view, width, loops)
        self._add(width * prod(count for count, _, _ in loops))

    def read_ranges(self, ranges: Sequence[FileRange]) -> None:
        """See `formats.storage.compiled.read_ranges`."""
        read_ranges(self.below, ranges)
        self._add(sum(view.nbytes for _, _, view in ranges))

    def _add(self, size: int) -> None:
        with self._lock:
            self.count += size


@dataclass(frozen=True)
class Reads:
    """What one rank reads, and what ranks read for one another."""

    items: list[Item]
    """Parts of tensors that this rank holds, or several ranks do; of these, the same on every rank."""
    names: list[str]
    """For each of them, the name of its local tensor."""
    elsewhere: Mapping[int, int]
    """Rank -> bytes that it alone needs, of ranks other than this one."""


@dataclass
class _Alike:
    """Tensors of one type and shape that all ranks hold alike."""

    here: list[tuple[Held, Held, int, tuple[int, ...]]]
    """What a rank holds, the positions of it that the source has, their bytes and the ranks that read them: parts that
    this rank takes part in, or several."""
    elsewhere: Mapping[int, int]
    """Rank -> bytes of one tensor that it alone needs."""
    count: int = 0
    """How many there are."""


def reads(wanted: Census, stored: Mapping[str, StoredTensor], rank: int, *, once: bool) -> Reads:
    """Return what a rank reads; what other ranks read for themselves alone is only counted.

    Args:
        wanted: the tensors to be loaded, as all ranks hold them.
        stored: the source's tensors by the same names.
        rank: this rank.
        once: let one rank read what several need: of those that hold it, the one that reads least so far.

    Post-condition: the parts that a rank takes are its shards.
    """
    items, names = list[Item](), list[str]()
    kinds: dict[tuple[int, bool, bool, tuple[int, ...], str], _Alike] = {}
    for name, tensor in wanted.items():
        source = stored[name]
        # Tensors on one mesh share what the ranks hold of them, so each of a few kinds is looked at once for all ranks.
        key = id(tensor.held), tensor.apart, tensor.padded, source.shape, source.dtype
        kind = kinds.get(key)
        if kind is None:
            kind = kinds[key] = _parts(tensor, source, rank, once=once)
        kind.count += 1
        for held, needed, size, ranks in kind.here:
            items.append(Item(len(items), size, partial(source.transfers, needed), ranks, ranks))
            names.append(tensor.part_name(held))
    elsewhere: Counter[int] = Counter()
    for kind in kinds.values():
        for other, size in kind.elsewhere.items():
            elsewhere[other] += kind.count * size
    return Reads(items, names, elsewhere)


def _parts(tensor: Global, source: StoredTensor, rank: int, *, once: bool) -> _Alike:
    """Return the parts of a tensor that ranks hold."""
    here, elsewhere = list[tuple[Held, Held, int, tuple[int, ...]]](), Counter[int]()
    for held, ranks in tensor.boxes.items():
        needed = tensor.within(held, source.shape)
        size = nbytes(source.dtype, local_shape(needed))
        for group in [ranks] if once else [(each,) for each in ranks]:
            if len(group) == 1 and group[0] != rank:
                elsewhere[group[0]] += size
            else:
                here.append((held, needed, size, group))
    return _Alike(here, elsewhere)
