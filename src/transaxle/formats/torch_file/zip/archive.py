"""The zip archive around a torch file, read more strictly than any zip library does.

A zip says everything twice, in its central directory and before each record, and readers differ in which they believe:
one file, two contents. Here both must agree, the records must fill the file from its first byte to the directory, none
may be compressed, and no two names may be taken for each other.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from transaxle.errors import TransaxleError, refuse
from transaxle.formats.catalog import Checksum
from transaxle.formats.storage.storage import checked_parts
from transaxle.formats.torch_file.zip.window import FileWindow

LOCAL, CENTRAL, DESCRIPTOR = b"PK\x03\x04", b"PK\x01\x02", b"PK\x07\x08"
END, END64, LOCATOR = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
LOCAL_FORM = struct.Struct("<4s10sIIIHH")
CENTRAL_FORM = struct.Struct("<4sH10sIIIHHHHHII")
END_FORM = struct.Struct("<4sHHHHIIH")
END64_FORM = struct.Struct("<4sQHHIIQQQQ")
LOCATOR_FORM = struct.Struct("<4sIQI")
HAS_DESCRIPTOR, UTF8 = 1 << 3, 1 << 11
ZIP64 = 1
"""Id of the extra field that holds what does not fit into 32 bits."""
MAX16, MAX32 = 0xFFFF, 0xFFFFFFFF

_KNOWN_FLAGS = HAS_DESCRIPTOR | UTF8 | 0b110
_ENCRYPTED = 1
_DESCRIPTORS = {16: struct.Struct("<4sIII"), 24: struct.Struct("<4sIQQ")}
_MAX_DIRECTORY = 1 << 28
_AHEAD = 512
"""Bytes read at once around a local header; its padding is at most 64."""


class ZipRecord(msgspec.Struct, frozen=True):
    """One file in the archive."""

    name: str
    """Its name below the archive's one folder."""
    offset: int
    """Its first byte, from the beginning of the window."""
    size: int
    """Its bytes."""
    crc32: int
    """Its checksum; 0 if the writer computed none, as torch may be told to."""


class Archive(msgspec.Struct, frozen=True):
    """The records of a torch file."""

    window: FileWindow
    records: Mapping[str, ZipRecord]
    """By name, in file order."""

    def read(self, name: str) -> bytes:
        """Return a small record, its checksum checked.

        Raises:
            Refused: CORRUPT.
        """
        record = self.records[name]
        data = self.window.read(record.offset, record.size)
        if record.crc32 and zlib.crc32(data) != record.crc32:
            raise self.window.corrupt(f"record {name}: its bytes do not match the checksum in the archive")
        return data

    def checksums(self) -> tuple[Checksum, ...]:
        """Return the checksums of all records that have one."""
        file, start = self.window.file, self.window.start
        return tuple(
            Checksum(file, start + record.offset, record.size, record.crc32, f"record {record.name}")
            for record in self.records.values()
            if record.crc32
        )


class _DirectoryEntry(NamedTuple):
    """A record as the central directory describes it."""

    path: bytes
    fixed: bytes
    """Version, flags, method and time, which both headers repeat."""
    flags: int
    crc32: int
    size: int
    header: int
    """Where its local header lies."""


def read_archive(window: FileWindow) -> Archive:
    """Read the directory of an archive, and check every record's own header against it.

    Raises:
        Refused: CORRUPT; PATH_ESCAPE for a name that leads elsewhere; UNSUPPORTED for compressed or encrypted records.
        StorageError: IO.
    """
    begin, size, count = _directory(window)
    listed = sorted(_entries(window, begin, size, count), key=lambda entry: entry.header)
    records: dict[str, ZipRecord] = {}
    folded: set[str] = set()
    folder = ""
    at = 0
    for number, entry in enumerate(listed):
        parts = _parts(window, entry.path)
        folder = folder or parts[0]
        name = "/".join(parts[1:])
        if parts[0] != folder or not name:
            raise window.corrupt(f"record {'/'.join(parts)!r} is outside the archive's folder {folder!r}")
        # miniz, by which torch reads, takes upper and lower case for one.
        if name.lower() in folded:
            raise window.corrupt(f"record {name}: the archive has this name twice")
        folded.add(name.lower())
        if entry.header != at:
            raise window.corrupt(f"record {name} begins at {entry.header}; the one before it ends at {at}")
        data = _data_offset(window, name, entry, begin)
        end = data + entry.size
        following = listed[number + 1].header if number + 1 < len(listed) else begin
        if end > following:
            raise window.corrupt(f"record {name} of {entry.size} bytes overlaps the next one at {following}")
        _check_descriptor(window, name, entry, end, following - end)
        records[name] = ZipRecord(name, data, entry.size, entry.crc32)
        at = following
    if not listed:
        raise window.corrupt("the archive has no records")
    return Archive(window, records)


def _directory(window: FileWindow) -> tuple[int, int, int]:
    """Return where the central directory lies, its size, and the number of its entries."""
    end = window.size - END_FORM.size
    if end < 0:
        raise window.corrupt(f"the file is truncated: a zip archive has more than {window.size} bytes")
    sign, disk, first, entries_on_disk, count, size, begin, comment = END_FORM.unpack(window.read(end, END_FORM.size))
    if sign != END or comment:
        message = "the file does not end like a zip archive: it is truncated, or bytes were appended"
        raise window.corrupt(message)
    if disk or first or entries_on_disk != count:
        raise window.corrupt("the archive claims to be one part of several")
    locator = end - LOCATOR_FORM.size
    if locator >= 0 and window.read(locator, len(LOCATOR)) == LOCATOR:
        end, wide = _directory64(window, locator)
        for short, long, most in zip((count, size, begin), wide, (MAX16, MAX32, MAX32), strict=True):
            if short not in (most, long):
                raise window.corrupt(f"the archive's two end records differ: {short} and {long}")
        count, size, begin = wide
    if begin + size != end:
        raise window.corrupt(f"the directory at {begin} with {size} bytes does not end at {end}, where it should")
    if size > _MAX_DIRECTORY:
        raise window.corrupt(f"the directory has {size} bytes; at most {_MAX_DIRECTORY} are read")
    return begin, size, count


def _directory64(window: FileWindow, locator: int) -> tuple[int, tuple[int, int, int]]:
    """Return where the zip64 end record lies, and its count, size and offset of the directory."""
    _, disk, at, disks = LOCATOR_FORM.unpack(window.read(locator, LOCATOR_FORM.size))
    if disk or disks != 1 or at != locator - END64_FORM.size:
        raise window.corrupt("the zip64 locator points to the wrong place")
    sign, length, _, _, disk, first, entries_on_disk, count, size, begin = END64_FORM.unpack(
        window.read(at, END64_FORM.size)
    )
    if sign != END64 or length != END64_FORM.size - 12 or disk or first or entries_on_disk != count:
        raise window.corrupt("the zip64 end record is malformed")
    return at, (count, size, begin)


def _entries(window: FileWindow, begin: int, size: int, count: int) -> Iterator[_DirectoryEntry]:
    """Yield the entries of the central directory."""
    text = window.read(begin, size)
    at = entry_count = 0
    while at < size:
        if at + CENTRAL_FORM.size > size:
            raise window.corrupt("the directory ends in the middle of an entry")
        (sign, _, fixed, crc32, packed, plain, name, extra, comment, disk, _, _, header) = CENTRAL_FORM.unpack_from(
            text, at
        )
        at += CENTRAL_FORM.size
        if sign != CENTRAL or at + name + extra > size or comment or disk:
            raise window.corrupt("an entry of the directory is malformed")
        path = text[at : at + name]
        wide = _wide(window, path, text[at + name : at + name + extra])
        plain, packed, header = (_widened(window, path, field, wide) for field in (plain, packed, header))
        if wide:
            raise window.corrupt(f"record {path!r} gives zip64 sizes that it does not need")
        at += name + extra
        flags = int.from_bytes(fixed[2:4], "little")
        _check_method(window, path, flags, int.from_bytes(fixed[4:6], "little"))
        if packed != plain:
            raise window.corrupt(f"record {path!r} is stored in {packed} bytes, but has {plain}")
        yield _DirectoryEntry(path, fixed, flags, crc32, plain, header)
        entry_count += 1
    if entry_count != count:
        raise window.corrupt(f"the directory has {entry_count} entries; the archive says {count}")


def _check_method(window: FileWindow, path: bytes, flags: int, method: int) -> None:
    if flags & _ENCRYPTED:
        raise window.unsupported(f"record {path!r} is encrypted")
    if method:
        raise window.unsupported(f"record {path!r} is compressed; torch never compresses records")
    if flags & ~_KNOWN_FLAGS:
        raise window.corrupt(f"record {path!r} has flags {flags:#x}, which torch never sets")


def _wide(window: FileWindow, path: bytes, extra: bytes) -> list[int]:
    """Return the 64-bit numbers in a record's extra fields."""
    numbers: list[int] | None = None
    for kind, data in _fields(window, path, extra):
        if kind == ZIP64:
            if numbers is not None or len(data) % 8:
                raise window.corrupt(f"record {path!r} has a malformed zip64 field")
            numbers = list(struct.unpack(f"<{len(data) // 8}Q", data))
    return numbers or []


def _fields(window: FileWindow, path: bytes, extra: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(extra):
        kind, size = struct.unpack_from("<HH", extra, at) if at + 4 <= len(extra) else (0, len(extra))
        at += 4 + size
        if at > len(extra):
            raise window.corrupt(f"record {path!r} has malformed extra fields")
        yield kind, extra[at - size : at]


def _widened(window: FileWindow, path: bytes, field: int, wide: list[int]) -> int:
    """Return a 32-bit field, or the 64-bit number that replaces it."""
    if field != MAX32:
        return field
    if not wide:
        raise window.corrupt(f"record {path!r} lacks its zip64 field")
    return wide.pop(0)


def _parts(window: FileWindow, path: bytes) -> tuple[str, ...]:
    """Return the parts of a record's name."""
    try:
        return checked_parts(path.decode())
    except UnicodeDecodeError:
        raise window.corrupt(f"the name {path!r} of a record is not UTF-8") from None
    except TransaxleError as error:
        raise refuse(error.code, f"record {path!r} has a name outside the archive's folder", file=window.file) from None


def _data_offset(window: FileWindow, name: str, entry: _DirectoryEntry, directory: int) -> int:
    """Return where a record's bytes begin; its local header must say what the directory says."""
    at = entry.header
    head = window.read(at, min(_AHEAD + len(entry.path), directory - at) if at < directory else 0)
    if len(head) < LOCAL_FORM.size:
        raise window.corrupt(f"record {name} has no header at {at}")
    sign, fixed, crc32, packed, plain, length, extra = LOCAL_FORM.unpack_from(head)
    after = LOCAL_FORM.size + length
    if sign != LOCAL or fixed != entry.fixed or head[LOCAL_FORM.size : after] != entry.path:
        raise window.corrupt(f"record {name}: its header and the archive's directory differ")
    if at + after + extra > directory:
        raise window.corrupt(f"record {name}: its header reaches into the directory")
    fields = head[after : after + extra] if after + extra <= len(head) else window.read(at + after, extra)
    later = bool(entry.flags & HAS_DESCRIPTOR)
    if later and (crc32, packed, plain) == (0, 0, 0):
        list(_fields(window, entry.path, fields))
    else:
        wide = _wide(window, entry.path, fields)
        plain, packed = (_widened(window, entry.path, field, wide) for field in (plain, packed))
        if (crc32, packed, plain) != (entry.crc32, entry.size, entry.size):
            raise window.corrupt(f"record {name}: its header and the archive's directory differ in size or checksum")
    return int(at + after + extra)


def _check_descriptor(window: FileWindow, name: str, entry: _DirectoryEntry, at: int, size: int) -> None:
    """Check the bytes between a record and the next one: its sizes and checksum once more, or nothing."""
    if not entry.flags & HAS_DESCRIPTOR:
        if size:
            raise window.corrupt(f"record {name}: {size} bytes after it belong to no record")
        return
    form = _DESCRIPTORS.get(size)
    if form is None:
        raise window.corrupt(f"record {name}: the {size} bytes after it are not a data descriptor")
    if form.unpack(window.read(at, size)) != (DESCRIPTOR, entry.crc32, entry.size, entry.size):
        raise window.corrupt(f"record {name}: its descriptor and the archive's directory differ")
