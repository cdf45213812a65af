"""A torch file as a value: the saved object, with the place of every storage; the same for both file formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from transaxle.formats.catalog import DIGITS, Checksum, Seal, seal_of
from transaxle.formats.pickled.allowed_globals.allowed import ALLOWED, Names
from transaxle.formats.pickled.interpreter import Bounds, read_pickle
from transaxle.formats.storage.storage import Storage
from transaxle.formats.torch_file.legacy import read_legacy
from transaxle.formats.torch_file.stored_storage import Storages, StoredStorage
from transaxle.formats.torch_file.zip.archive import LOCAL, Archive, read_archive
from transaxle.formats.torch_file.zip.window import FileWindow, window

PICKLE, DATA, BYTE_ORDER, VERSION = "data.pkl", "data/", "byteorder", "version"
FORMAT_VERSION, ALIGNED = ".format_version", ".storage_alignment"
SEALED = ".data/transaxle_digests"
"""Record with the digests of all bytes of the file; torch ignores it."""
LITTLE = b"little"
_BIG = b"big"
_SCRIPT = "constants.pkl"
_LFS_POINTER = b"version https://git-lfs"
_TAR, _TAR_AT = b"ustar", 257
_LONGEST_NOTE = 64
_WIDEST = 1 << 30
_PICKLE_BEGINS = b"\x80"


class Saved(msgspec.Struct, frozen=True):
    """The result of one call of `torch.save`."""

    value: Any
    """The object, as plain values and descriptors; the storage of each tensor is a `StoredStorage`."""
    storages: Mapping[str, StoredStorage]
    """All storages by key; their offsets count from the beginning of the file."""
    checksums: tuple[Checksum, ...]
    """Checksums of the archive's records; a legacy file has none."""
    seal: Seal | None = None
    """Where the file keeps digests of its bytes."""


def read_saved(
    storage: Storage, file: str, start: int = 0, size: int | None = None, *, allowed: Names = ALLOWED
) -> Saved:
    """Read a torch file, or one that lies in a range of another file; no storage is read.

    Args:
        storage: where the file is.
        file: its name.
        start: first byte of the range.
        size: bytes of the range; None: up to the end of the file.
        allowed: names that its pickle may use.

    Raises:
        Refused: UNSAFE_PICKLE, CORRUPT, PATH_ESCAPE, UNSUPPORTED.
        StorageError: IO.
    """
    area = window(storage, file, start, size)
    begin = area.read(0, min(len(_LFS_POINTER), area.size))
    if begin.startswith(LOCAL):
        value, storages, checksums, seal = _read_zip(area, allowed)
    elif begin.startswith(_PICKLE_BEGINS):
        value, storages = read_legacy(area)
        checksums, seal = (), None
    else:
        raise _no_torch_file(area, begin)
    storages.settle(start)
    return Saved(value, storages.by_key, checksums, seal)


def _no_torch_file(area: FileWindow, begin: bytes) -> Exception:
    if begin == _LFS_POINTER:
        hint = "This is a Git LFS pointer, not the file itself: run `git lfs pull`."
        return area.unsupported("not a torch file", hint)
    if not area.size:
        return area.corrupt("the file is empty")
    if area.size > _TAR_AT + len(_TAR) and area.read(_TAR_AT, len(_TAR)) == _TAR:
        return area.unsupported(
            "this is the tar format of torch before 0.1.10", "Load it with torch and save it again."
        )
    return area.unsupported("not a torch file: neither a zip archive nor a pickle")


def _read_zip(area: FileWindow, allowed: Names) -> tuple[Any, Storages, tuple[Checksum, ...], Seal | None]:
    archive = read_archive(area)
    records = archive.records
    if _SCRIPT in records:
        hint = "Save its state_dict with torch.save."
        raise area.unsupported("this is a TorchScript archive, which contains code", hint)
    if PICKLE not in records:
        raise area.corrupt(f"the archive has no record {PICKLE}")
    _check_notes(area, archive)
    bounds = Bounds()
    if records[PICKLE].size > bounds.size:
        raise area.corrupt(f"record {PICKLE} has {records[PICKLE].size} bytes; at most {bounds.size} are read")
    storages = Storages(legacy=False)
    data = archive.read(PICKLE)
    pickled = read_pickle(data, file=area.file, record=PICKLE, persistent=storages.refer, allowed=allowed)
    if pickled.end != len(data):
        raise area.corrupt(f"record {PICKLE}: {len(data) - pickled.end} bytes follow the pickle")
    for key, stored in storages.by_key.items():
        record = records.get(DATA + key)
        if record is None:
            raise area.corrupt(f"tensors use the record {DATA}{key}, which is missing")
        if record.size != stored.nbytes:
            expected = f"{stored.count} elements of {stored.dtype.name}, {stored.nbytes} bytes"
            raise area.corrupt(f"record {DATA}{key} has {record.size} bytes; the pickle says {expected}")
        stored.offset = record.offset
    for name in records:
        if name.startswith(DATA) and name.removeprefix(DATA) not in storages.by_key:
            raise area.corrupt(f"no tensor uses the record {name}")
    return pickled.value, storages, archive.checksums(), _seal(area, archive)


def _seal(area: FileWindow, archive: Archive) -> Seal | None:
    """Return where a file keeps digests; None if it keeps none.

    Only files that we wrote have them; their storages are one tensor each, in the order of the records.

    Raises:
        Refused: CORRUPT where some of them are missing.
    """
    record = archive.records.get(SEALED)
    if record is None:
        return None
    tensor_offsets = [
        stored.offset for name, stored in archive.records.items() if name.startswith(DATA) and stored.size
    ]
    count = record.size // DIGITS - 1
    if record.size % DIGITS or not 0 <= count <= len(
        tensor_offsets
    ):  # settings of an optimizer are storages too, and last
        raise area.corrupt("the record of the digests is incomplete")
    first = area.start + record.offset
    return seal_of(area.file, first, first + DIGITS, (area.start + offset for offset in tensor_offsets[:count]))


def _check_notes(area: FileWindow, archive: Archive) -> None:
    """Check the small records that say how the others are to be read."""
    order, version = (_note(area, archive, name) for name in (BYTE_ORDER, VERSION))
    if order == _BIG:
        raise area.unsupported(
            "the file was written on a big-endian machine", "Load and save it again on a little-endian machine."
        )
    if order not in (None, LITTLE):
        raise area.corrupt(f"record {BYTE_ORDER}: {order!r} is not a byte order")
    for name, version_text in ((VERSION, version), (FORMAT_VERSION, _note(area, archive, FORMAT_VERSION))):
        if version_text is not None and not version_text.strip().isdigit():
            raise area.corrupt(f"record {name}: {version_text!r} is not a version")
    aligned = _note(area, archive, ALIGNED)
    if aligned is not None and not (aligned.isdigit() and 0 < int(aligned) <= _WIDEST):
        raise area.corrupt(f"record {ALIGNED}: {aligned!r} is not an alignment of storages in bytes")


def _note(area: FileWindow, archive: Archive, name: str) -> bytes | None:
    record = archive.records.get(name)
    if record is None:
        return None
    if record.size > _LONGEST_NOTE:
        raise area.corrupt(f"record {name} has {record.size} bytes; at most {_LONGEST_NOTE} are read")
    return archive.read(name)
