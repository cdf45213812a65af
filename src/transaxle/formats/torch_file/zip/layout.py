"""Laying out the zip archive of a torch file before a byte of its storages is known.

The bytes are those that torch's own writer gives for the same records, padding included, so whatever relies on its
layout (mapping, computing offsets) works on these files too. One thing differs: a storage's checksum is 0, as it would
have to be written before the bytes that it covers. torch too writes 0 when told not to compute any, and its reader
never checks.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable

import msgspec

from transaxle.formats.torch_file.zip.archive import (
    CENTRAL,
    CENTRAL_FORM,
    DESCRIPTOR,
    END,
    END64,
    END64_FORM,
    END_FORM,
    HAS_DESCRIPTOR,
    LOCAL,
    LOCAL_FORM,
    LOCATOR,
    LOCATOR_FORM,
    MAX16,
    MAX32,
    UTF8,
    ZIP64,
)

ALIGNMENT = 64
"""Every record's bytes begin at a multiple of this."""
_FILLER, _FILLER_HEAD = 0x4246, struct.Struct("<HH")
_MADE_BY, _NEEDED = 0x031E, 0x002D
"""Versions in the zip64 end record, as miniz writes them."""


class ZipItem(msgspec.Struct, frozen=True):
    """A record to be written."""

    name: str
    """Its name below the archive's folder."""
    size: int
    """Its bytes."""
    data: bytes | None = None
    """Its bytes; None for a storage, whose bytes come later."""
    room: bool = False
    """Whether it reserves space for data that is known last, and so has no checksum."""


class ZipLayout(msgspec.Struct, frozen=True):
    """Positions of everything in an archive."""

    offsets: tuple[int, ...]
    """First byte of each record."""
    known: tuple[tuple[int, bytes], ...]
    """Bytes outside storages, with their offsets."""
    size: int
    """Bytes of the archive."""
    room: int | None = None
    """First byte of the space reserved for digests, if there is one."""


def lay_out(folder: str, items: Iterable[ZipItem]) -> ZipLayout:
    """Lay out an archive.

    Args:
        folder: the archive's one folder.
        items: its records, in order.
    """
    known_pieces: list[tuple[int, bytes]] = []
    pending, begin = bytearray(), 0
    offsets: list[int] = []
    directory = bytearray()
    count = 0
    for count, item in enumerate(items, 1):  # noqa: B007 - it is used below
        path = f"{folder}/{item.name}".encode()
        header = begin + len(pending)
        crc32 = 0 if item.data is None or item.room else zlib.crc32(item.data)
        pending += _local(path, item.size, header)
        offsets.append(begin + len(pending))
        if item.data is not None:
            pending += item.data
        elif item.size:
            known_pieces.append((begin, bytes(pending)))
            begin, pending = offsets[-1] + item.size, bytearray()
        pending += _descriptor(item.size, crc32, wide=item.size >= MAX32 or header >= MAX32)
        directory += _central(path, item.size, crc32, header)
    at = begin + len(pending)
    pending += directory
    pending += _end(at, len(directory), count)
    known_pieces.append((begin, bytes(pending)))
    return ZipLayout(tuple(offsets), tuple(known_pieces), begin + len(pending))


def _fixed(size: int) -> bytes:
    """Return version, flags, method and time; torch gives empty records no descriptor."""
    return struct.pack("<HHHI", 0, UTF8 | (HAS_DESCRIPTOR if size else 0), 0, 0)


def _wide(*numbers: int) -> bytes:
    """Return the zip64 field of these numbers; nothing for none."""
    data = struct.pack(f"<{len(numbers)}Q", *numbers)
    return struct.pack("<HH", ZIP64, len(data)) + data if numbers else b""


def _local(path: bytes, size: int, at: int) -> bytes:
    """Return a record's header, filled up so that its bytes begin aligned."""
    extra = _wide(*((size, 0) if size >= MAX32 else ()), *((at,) if at >= MAX32 else ()))
    start = at + LOCAL_FORM.size + len(path) + len(extra) + _FILLER_HEAD.size
    filler = -start % ALIGNMENT
    extra += _FILLER_HEAD.pack(_FILLER, filler) + b"Z" * filler
    return LOCAL_FORM.pack(LOCAL, _fixed(size), 0, 0, 0, len(path), len(extra)) + path + extra


def _descriptor(size: int, crc32: int, *, wide: bool) -> bytes:
    """Return what follows a record's bytes."""
    return struct.pack("<4sIQQ" if wide else "<4sIII", DESCRIPTOR, crc32, size, size) if size else b""


def _central(path: bytes, size: int, crc32: int, at: int) -> bytes:
    """Return a record's entry in the directory."""
    extra = _wide(*((size, size) if size >= MAX32 else ()), *((at,) if at >= MAX32 else ()))
    short = min(size, MAX32)
    head = CENTRAL_FORM.pack(
        CENTRAL, 0, _fixed(size), crc32, short, short, len(path), len(extra), 0, 0, 0, 0, min(at, MAX32)
    )
    return head + path + extra


def _end(at: int, size: int, count: int) -> bytes:
    """Return what follows the directory; torch always writes the zip64 form as well."""
    length = END64_FORM.size - 12
    wide = END64_FORM.pack(END64, length, _MADE_BY, _NEEDED, 0, 0, count, count, size, at)
    wide += LOCATOR_FORM.pack(LOCATOR, 0, at + size, 1)
    short = min(count, MAX16)
    return wide + END_FORM.pack(END, 0, 0, short, short, min(size, MAX32), min(at, MAX32), 0)
