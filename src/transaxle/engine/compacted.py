"""Compact scales: those that torchao stores in the order of a matrix-multiply kernel, read in the order of rows.

The kernel wants tiles of 128 x 4 scales, padded, and within a tile four rows of 32 side by side (cuBLAS, "1-D block
scaling factors layout"). The tiles of a tensor are in the order of its rows; so, where it is decoded or moved to
another dialect, such a buffer is a file that does not exist, whose bytes are put in order when they are read. Under its
own name it stays what it is.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from transaxle.axes.relayout import unchanged
from transaxle.encodings.torchao import Swizzled, swizzled
from transaxle.engine.source import Source
from transaxle.engine.transfer import Scratch, fill
from transaxle.formats.catalog import Container, Entry, Extent
from transaxle.formats.dtype import ITEM_BITS
from transaxle.formats.storage import Overlay

_ROWS, _COLUMNS, _LANES = 128, 4, 32
"""Scales of one tile of the kernel along both dims, and how many of its rows lie one below the other."""
_SCRATCH = 1 << 20
_KEPT = 8
"""Buffers in compact order that are kept, so that reading one piece by piece orders it once."""
_FILE = "\0compact "
"""What the name of a file that does not exist begins with."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Scales:
    """One buffer in the kernel's order."""

    source: Entry
    """As it is stored."""
    shape: tuple[int, int]
    """Scales along both dims, padding left out."""


class CompactedStorage(Overlay):
    """The files of a checkpoint, and beside them one for each buffer that is put in order when it is read."""

    def __init__(self, container: Container, scales: Mapping[str, _Scales], notes: Mapping[str, str]) -> None:
        super().__init__(container.storage)
        self._scales = scales
        self.notes = notes
        """What the header would say of the tensors, were their scales compact."""
        self.entries = {
            one.source.name: replace(one.source, shape=one.shape, extents=(Extent((0, 0), one.shape, file, 0),))
            for file, one in scales.items()
        }
        """The buffers in compact order, by stored name."""
        self._source = Source(container, {one.source.name: one.source for one in scales.values()})
        self._kept: dict[str, Bytes] = {}
        self._lock = threading.Lock()

    def size(self, name: str) -> int:
        """See `Storage`."""
        found = self._scales.get(name)
        return super().size(name) if found is None else found.shape[0] * found.shape[1]

    def version(self, name: str) -> str:
        """See `Storage`; the buffer changes with the file that it comes from."""
        return "" if name in self._scales else super().version(name)

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """See `Storage`."""
        if name in self._scales:
            octets = view.cast("B")
            octets[:] = self._ordered(name)[offset : offset + len(octets)].data
        else:
            super().read_into(name, offset, view)

    def _ordered(self, name: str) -> Bytes:
        """Return a buffer in compact order."""
        with self._lock:
            found = self._kept.get(name)
        if found is not None:
            return found
        one = self._scales[name]
        stored = np.empty(one.source.nbytes, np.uint8)
        scratch = Scratch(_SCRATCH)
        for transfer in self._source.transfers(unchanged(one.source.name, one.source)):
            fill(self.below, transfer, stored, 0, scratch)
        found = ordered(stored, one.shape)
        with self._lock:
            while len(self._kept) >= _KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[name] = found
        return found


def ordered(stored: Bytes, shape: tuple[int, int]) -> Bytes:
    """Return scales in compact order, flat.

    Args:
        stored: one byte each, in the kernel's order, padding included.
        shape: scales along both dims without padding.

    Post-condition: scale `(r, c)` was at `512 t + 16 (r % 32) + 4 (r % 128 // 32) + c % 4`, with `t` its tile.
    """
    rows, columns = (-(-size // step) for size, step in zip(shape, (_ROWS, _COLUMNS), strict=True))
    tiles = stored.reshape(rows, columns, _LANES, _ROWS // _LANES, _COLUMNS)
    whole = tiles.transpose(0, 3, 2, 1, 4).reshape(rows * _ROWS, columns * _COLUMNS)
    return np.ascontiguousarray(whole[: shape[0], : shape[1]]).reshape(-1)


def ordering(container: Container) -> Container:
    """Return the same container, whose storage can read torchao's scales in compact order too."""
    scales: dict[str, _Scales] = {}
    notes: dict[str, str] = {}
    for name, said in swizzled(container.metadata).items():
        found = _scales(container.entries, said)
        if found is not None:
            scales[_FILE + found.source.name] = found
            notes[name] = json.dumps(said.compact)
    return replace(container, storage=CompactedStorage(container, scales, notes)) if scales else container


def compacted(container: Container) -> Container:
    """Return a container whose scales are compact, as tables need them; see `ordering`."""
    storage = container.storage
    while isinstance(storage, Overlay):
        if isinstance(storage, CompactedStorage):
            entries = {name: storage.entries.get(name, entry) for name, entry in container.entries.items()}
            notes = {key: storage.notes.get(key, value) for key, value in container.metadata.items()}
            return replace(container, entries=entries, metadata=notes)
        storage = storage.below
    return container


def _scales(entries: Mapping[str, Entry], said: Swizzled) -> _Scales | None:
    """Return the scales of a tensor, if they are as many as its codes need in the kernel's order."""
    codes, scale = entries.get(said.codes), entries.get(said.scale)
    if codes is None or scale is None or len(codes.shape) != 2 or ITEM_BITS.get(scale.dtype) != 8:
        return None
    rows, bytes_ = codes.shape
    shape = rows, -(-bytes_ * said.per_byte // said.block)
    tiles = -(-shape[0] // _ROWS) * -(-shape[1] // _COLUMNS)
    return _Scales(scale, shape) if scale.nbytes == tiles * _ROWS * _COLUMNS and scale.nbytes else None
