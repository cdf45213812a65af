"""Which bytes of a checkpoint each rank reads, for itself and for others; and how many it has read."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod

from transaxle.axes.geometry.strided import Loop
from transaxle.engine.checkpoint.checkpoint import StoredTensor
from transaxle.formats.dtype import nbytes
from transaxle.formats.storage.storage import Overlay, Storage
from transaxle.formats.storage.strided_reads import read_strided
from transaxle.live.sharding.global_tensors import Census
from transaxle.move.runs import Item
from transaxle.torch_tensors.placement import local_shape


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
        """See `formats.storage.strided_reads.read_strided`."""
        read_strided(self.below, name, offset, view, width, loops)
        with self._lock:
            self.count += width * prod(count for count, _, _ in loops)


def reads(wanted: Census, stored: Mapping[str, StoredTensor], *, once: bool) -> tuple[list[Item], list[str]]:
    """Return what all ranks read, the same on every rank: each part of a tensor that ranks hold.

    Args:
        wanted: the tensors to be loaded, as all ranks hold them.
        stored: the source's tensors by the same names.
        once: let one rank read what several need: of those that hold it, the one that reads least so far.

    Returns:
        the parts, and for each the name of its local tensor.

    Post-condition: the parts that a rank takes are its shards.
    """
    items, names = list[Item](), list[str]()
    for name, tensor in wanted.items():
        source = stored[name]
        for held, ranks in tensor.boxes.items():
            needed = tensor.within(held, source.shape)
            size = nbytes(source.dtype, local_shape(needed))
            for group in [ranks] if once else [(rank,) for rank in ranks]:
                items.append(Item(len(items), size, partial(source.transfers, needed), group, group))
                names.append(tensor.part_name(held))
    return items, names
