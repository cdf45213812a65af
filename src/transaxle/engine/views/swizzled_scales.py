"""Compact scales: scales that torchao stores in the order of a matrix-multiply kernel, read in the order of rows.

The kernel wants tiles of 128 x 4 scales, padded, and within a tile four rows of 32 side by side (cuBLAS, "1-D block
scaling factors layout"). The tiles follow the order of the tensor's rows. Where such a tensor is decoded or moved to
another dialect, its scales are read from a virtual file whose bytes are reordered on the fly. Under its own name it
stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache

import msgspec
from msgspec.structs import replace

from transaxle.encodings.conventions.torchao_convention import Swizzled, swizzled
from transaxle.engine.copying.source import Source
from transaxle.formats.catalog import ITEM_BITS, Container, Entry, Extent
from transaxle.formats.storage.copier import Bytes
from transaxle.formats.storage.storage import VirtualFiles

_ROWS, _COLUMNS, _LANES = 128, 4, 32
"""Rows and columns of one kernel tile, and how many of its rows lie one below the other."""
_KEPT = 8
"""Reordered buffers that are cached, so that reading one piece by piece reorders it once."""
_FILE = "\0compact "
"""What the name of a file that does not exist begins with."""


class _CompactScales(msgspec.Struct, frozen=True):
    """One buffer in the kernel's order, readable as a file in compact order."""

    source: Entry
    """As it is stored."""
    shape: tuple[int, int]
    """Scales along both dims, padding left out."""
    compact: Callable[[str], Bytes]
    """Returns a stored buffer in compact order, by its name."""

    @property
    def nbytes(self) -> int:
        """See `VirtualFile`."""
        return self.shape[0] * self.shape[1]

    def read_into(self, offset: int, view: memoryview) -> None:
        """See `VirtualFile`."""
        view.cast("B")[:] = self.compact(self.source.name)[offset : offset + view.nbytes].data


def ordered(stored: Bytes, shape: tuple[int, int]) -> Bytes:
    """Return scales in compact order, flat.

    Args:
        stored: one byte each, in the kernel's order, padding included.
        shape: scales along both dims without padding.

    Post-condition: scale `(r, c)` was at `512 t + 16 (r % 32) + 4 (r % 128 // 32) + c % 4`, with `t` its tile.
    """
    import numpy as np

    rows, columns = (-(-size // step) for size, step in zip(shape, (_ROWS, _COLUMNS), strict=True))
    tiles = stored.reshape(rows, columns, _LANES, _ROWS // _LANES, _COLUMNS)
    padded = tiles.transpose(0, 3, 2, 1, 4).reshape(rows * _ROWS, columns * _COLUMNS)
    return np.ascontiguousarray(padded[: shape[0], : shape[1]]).reshape(-1)


def ordering(container: Container) -> Container:
    """Return the same container, which can also read torchao's scales in compact order; see `compacted`."""
    entries = container.entries
    described = {
        name: (tensor, shape)
        for name, tensor in swizzled(container.metadata).items()
        if (shape := _shape(entries, tensor))
    }
    if not described:
        return container
    scales = {tensor.scale: shape for tensor, shape in described.values()}
    source = Source(container, {name: entries[name] for name in scales})
    reordered = lru_cache(_KEPT)(lambda name: ordered(source.read(name), scales[name]))
    files = {_FILE + name: _CompactScales(entries[name], shape, reordered) for name, shape in scales.items()}
    compact = {
        tensor.source.name: replace(tensor.source, shape=tensor.shape, extents=(Extent((0, 0), tensor.shape, file, 0),))
        for file, tensor in files.items()
    }
    notes = {name: json.dumps(tensor.compact) for name, (tensor, _) in described.items()}
    recoding = replace(container.recoding, compact=compact, compact_notes=notes)
    return replace(container, storage=VirtualFiles(container.storage, files), recoding=recoding)


def compacted(container: Container) -> Container:
    """Return a container with compact scales, as tables need them; see `ordering`."""
    compact, notes = container.recoding.compact, container.recoding.compact_notes
    if not compact:
        return container
    entries = {name: compact.get(name, entry) for name, entry in container.entries.items()}
    metadata = {key: notes.get(key, value) for key, value in container.metadata.items()}
    return replace(container, entries=entries, metadata=metadata)


def _shape(entries: Mapping[str, Entry], description: Swizzled) -> tuple[int, int] | None:
    """Return the number of scales along both dims; None if the stored ones do not fill the kernel's tiles."""
    codes, scale = entries.get(description.codes), entries.get(description.scale)
    if codes is None or scale is None or len(codes.shape) != 2 or ITEM_BITS.get(scale.dtype) != 8:
        return None
    shape = codes.shape[0], -(-codes.shape[1] * description.per_byte // description.block)
    tiles = -(-shape[0] // _ROWS) * -(-shape[1] // _COLUMNS)
    return shape if scale.nbytes == tiles * _ROWS * _COLUMNS and scale.nbytes else None
