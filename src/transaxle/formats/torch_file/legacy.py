"""Torch files before 1.6: five pickles in a row, then the storages, each after its number of elements.

Nothing states the length of the pickles. So they are parsed from the beginning of the file, and if they extend beyond
what was read, more of the file is read.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from transaxle.formats.pickled.descriptors import Persistent
from transaxle.formats.pickled.interpreter import Bounds, PersistentId, PickleEnds, read_pickle
from transaxle.formats.torch_file.stored_storage import Storages
from transaxle.formats.torch_file.zip.window import FileWindow

MAGIC = 0x1950A86A20F9469CFC6C
"""What the first pickle holds."""
_PROTOCOL = 1001
_LITTLE = "little_endian"
_COUNT = struct.Struct("<q")
_FIRST_READ = 1 << 20
_GROWTH = 4


class Head(NamedTuple):
    """The contents of a legacy file's pickles."""

    value: Any
    """The saved object."""
    storages: Storages
    """The storages that it refers to."""
    keys: Any
    """The storages in the order of their bytes."""
    end: int
    """First byte after the pickles."""


def read_legacy(window: FileWindow) -> tuple[Any, Storages]:
    """Read a legacy file.

    Returns:
        The saved object, and its storages with the place of their bytes.

    Raises:
        Refused: UNSAFE_PICKLE, CORRUPT, UNSUPPORTED.
        StorageError: IO.
    """
    most = Bounds().size
    size = min(_FIRST_READ, window.size)
    while True:
        complete = size == window.size or size >= most
        try:
            head = _head(window, window.read(0, size), complete=complete)
        except PickleEnds:
            size = min(size * _GROWTH, window.size, most)
        else:
            _place(window, head)
            return head.value, head.storages


def _head(window: FileWindow, data: bytes, *, complete: bool) -> Head:
    """Parse the pickles; PickleEnds if they extend beyond the data."""
    at = 0

    def following(record: str, persistent: PersistentId = Persistent) -> Any:
        nonlocal at
        pickled = read_pickle(data, file=window.file, record=record, start=at, complete=complete, persistent=persistent)
        at = pickled.end
        return pickled.value

    if following("magic number") != MAGIC:
        hint = "Load it with the program that wrote it, and save its tensors with torch.save or as safetensors."
        raise window.unsupported("the file is a pickle, but not one that torch wrote", hint)
    if following("protocol version") != _PROTOCOL:
        raise window.corrupt(f"the protocol version is not {_PROTOCOL}")
    system = following("system")
    if not isinstance(system, dict) or type(system.get(_LITTLE)) is not bool:
        raise window.corrupt("the file does not say which system wrote it")
    if not system[_LITTLE]:
        raise window.unsupported(
            "the file was written on a big-endian machine", "Load and save it again on a little-endian machine."
        )
    storages = Storages(legacy=True)
    value = following("object", storages.refer)
    return Head(value, storages, following("storage keys"), at)


def _place(window: FileWindow, head: Head) -> None:
    """Locate the bytes of every storage; the file must hold those that are referred to, and nothing else."""
    storages, keys = head.storages.by_key, head.keys
    if not isinstance(keys, list) or any(type(key) is not str for key in keys):
        raise window.corrupt("the list of storages is malformed")
    if len(set(keys)) != len(keys):
        raise window.corrupt("the list of storages has one twice")
    for key in keys:
        if key not in storages:
            raise window.corrupt(f"the file holds the storage {key[:80]!r}, which no tensor uses")
    if head.storages.clash:
        raise window.corrupt(f"{head.storages.clash!r} is both a storage and a view of one")
    missing = storages.keys() - set(keys)
    if missing:
        raise window.corrupt(f"tensors use the storage {min(missing)!r}, which the file does not hold")
    at = head.end
    for key in keys:
        stored = storages[key]
        (count,) = _COUNT.unpack(window.read(at, _COUNT.size))
        if count != stored.count:
            message = f"storage {key!r} has {count} elements; the pickle says {stored.count}"
            raise window.corrupt(message)
        stored.offset = at + _COUNT.size
        at = stored.offset + stored.nbytes
        if at > window.size:
            raise window.corrupt(f"the file is truncated: storage {key!r} ends at {at}, the file at {window.size}")
    if at != window.size:
        raise window.corrupt(f"the last {window.size - at} bytes of the file belong to no storage")
