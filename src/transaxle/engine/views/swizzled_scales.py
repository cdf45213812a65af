"""Compact scales: those that torchao stores in the order of a matrix-multiply kernel, read in the order of rows.

The kernel wants tiles of 128 x 4 scales, padded, and within a tile four rows of 32 side by side (cuBLAS, "1-D block
scaling factors layout"). The tiles of a tensor are in the order of its rows; so, where it is decoded or moved to
another dialect, such a buffer is a file that does not exist, whose bytes are put in order when they are read. Under its
own name it stays what it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from transaxle.encodings.conventions.torchao_convention import Swizzled, swizzled
from transaxle.engine.copying.source import Source
from transaxle.formats.catalog.catalog import Container, Entry, Extent
from transaxle.formats.dtype import ITEM_BITS
from transaxle.formats.storage.storage import Beside, layer
from transaxle.move.endpoint import Bytes

_ROWS, _COLUMNS, _LANES = 128, 4, 32
"""Scales of one tile of the kernel along both dims, and how many of its rows lie one below the other."""
_KEPT = 8
"""Buffers in compact order that are kept, so that reading one piece by piece orders it once."""
_FILE = "\0compact "
"""What the name of a file that does not exist begins with."""


@dataclass(frozen=True, slots=True)
class _Scales:
    """One buffer in the kernel's order; as a file, in compact order."""

    source: Entry
    """As it is stored."""
    shape: tuple[int, int]
    """Scales along both dims, padding left out."""
    compact: Callable[[str], Bytes]
    """Gives a stored buffer in compact order, by its name."""

    @property
    def nbytes(self) -> int:
        """See `Virtual`."""
        return self.shape[0] * self.shape[1]

    def read_into(self, offset: int, view: memoryview) -> None:
        """See `Virtual`."""
        view.cast("B")[:] = self.compact(self.source.name)[offset : offset + view.nbytes].data


class CompactedStorage(Beside):
    """The files of a checkpoint, and beside them one for each buffer that is put in order when it is read."""

    def __init__(self, container: Container, said: Mapping[str, Swizzled]) -> None:
        entries = container.entries
        shapes = {name: (entries[one.scale], shape) for name, one in said.items() if (shape := _shape(entries, one))}
        source = Source(container, {entry.name: entry for entry, _ in shapes.values()})
        by_name = {entry.name: shape for entry, shape in shapes.values()}
        kept = lru_cache(_KEPT)(lambda name: ordered(source.read(name), by_name[name]))
        files = {_FILE + entry.name: _Scales(entry, shape, kept) for entry, shape in shapes.values()}
        super().__init__(container.storage, files)
        self.notes = {name: json.dumps(said[name].compact) for name in shapes}
        """What the header would say of the tensors, were their scales compact."""
        self.entries = {
            one.source.name: replace(one.source, shape=one.shape, extents=(Extent((0, 0), one.shape, file, 0),))
            for file, one in files.items()
        }
        """The buffers in compact order, by stored name."""


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
    said = swizzled(container.metadata)
    return replace(container, storage=CompactedStorage(container, said)) if said else container


def compacted(container: Container) -> Container:
    """Return a container whose scales are compact, as tables need them; see `ordering`."""
    storage = layer(container.storage, CompactedStorage)
    if storage is None:
        return container
    entries = {name: storage.entries.get(name, entry) for name, entry in container.entries.items()}
    notes = {key: storage.notes.get(key, value) for key, value in container.metadata.items()}
    return replace(container, entries=entries, metadata=notes)


def _shape(entries: Mapping[str, Entry], said: Swizzled) -> tuple[int, int] | None:
    """Return how many scales a tensor has along both dims, if those stored are as many as the kernel's order needs."""
    codes, scale = entries.get(said.codes), entries.get(said.scale)
    if codes is None or scale is None or len(codes.shape) != 2 or ITEM_BITS.get(scale.dtype) != 8:
        return None
    shape = codes.shape[0], -(-codes.shape[1] * said.per_byte // said.block)
    tiles = -(-shape[0] // _ROWS) * -(-shape[1] // _COLUMNS)
    return shape if scale.nbytes == tiles * _ROWS * _COLUMNS and scale.nbytes else None
