"""Archives of single chunks: what `torch.save` makes of one tensor, laid out before the tensor's bytes are known.

Everything around the tensor depends on its dtype and shape alone, so thousands of chunks share a few such frames.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from transaxle.axes.geometry.strided import row_major
from transaxle.formats.pickled.allowed_globals.allowed import STORAGES
from transaxle.formats.pickled.descriptors import DType, Persistent, StorageType, TensorRef
from transaxle.formats.pickled.writer import write_pickle
from transaxle.formats.torch_file.saved import BYTE_ORDER, DATA, LITTLE, PICKLE, VERSION
from transaxle.formats.torch_file.zip.layout import ALIGNMENT, ZipItem, lay_out

LARGEST = 1 << 30
"""Cap on the bytes of a tensor in one archive: torch reads an archive whole, whatever part of it is wanted."""

_FOLDER = "archive"
"""Name of the archive's folder where torch writes to a stream, as DCP does."""
_KEY = "0"
_TYPED = frozenset(STORAGES.values())
"""Types that have a storage class; torch writes the newer ones as untyped bytes."""


class ArchiveFrame(NamedTuple):
    """An archive without its tensor."""

    head: bytes
    """Bytes before the tensor."""
    tail: bytes
    """Bytes after it."""


@lru_cache(256)
def frame(dtype: DType, shape: tuple[int, ...], size: int) -> ArchiveFrame:
    """Return the archive around one row-major tensor.

    Args:
        dtype: its type.
        shape: its shape, as torch gives it.
        size: bytes of the tensor.

    Post-condition: the tensor begins at a multiple of `ALIGNMENT`, counted from the archive's first byte.
    """
    typed = dtype.name in _TYPED
    storage = StorageType(dtype if typed else None)
    storage_id = Persistent(("storage", storage, _KEY, "cpu", math.prod(shape) if typed else size))
    pickle = write_pickle(TensorRef(storage_id, None if typed else dtype, 0, shape, row_major(shape)))
    items = [
        ZipItem(PICKLE, len(pickle), pickle),
        *(ZipItem(name, len(data), data) for name, data in _NOTES.items()),
        ZipItem(f"{DATA}{_KEY}", size, None if size else b""),
        ZipItem(VERSION, len(_VERSION), _VERSION),
    ]
    known_pieces = [data for _, data in lay_out(_FOLDER, items).known]
    return ArchiveFrame(known_pieces[0], known_pieces[1]) if size else ArchiveFrame(b"", known_pieces[0])


_NOTES = {".format_version": b"1", ".storage_alignment": str(ALIGNMENT).encode(), BYTE_ORDER: LITTLE}
_VERSION = b"3\n"
