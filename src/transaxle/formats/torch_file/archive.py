"""The zip archive of a torch file: a strict reader, and a writer that reproduces torch's layout.

A zip archive contains all metadata twice, in its central directory and before each record (file inside the archive).
Programs differ in which of the two they read, so two programs may see different contents. The reader in this module
requires that the two agree, that the records fill the file from its first byte to the directory, that no record is
compressed, and that no name occurs twice. An archive is read through a `FileWindow`: usually a whole file, sometimes a
range of a file that contains many archives.

A new archive is laid out before the bytes of its storages are known. The bytes of the archive equal those of torch's
own writer for the same records, including padding, so code that relies on the layout (by mapping files, or by computing
offsets) also works on files of this writer. The only difference is the checksum of a storage, which is 0 in files of
this writer, because it would have to be written before the bytes that it covers.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from transaxle.errors import TransaxleError, refuse
from transaxle.formats.catalog import Checksum
from transaxle.formats.storage.storage import Storage, split_name


class FileWindow(msgspec.Struct, frozen=True):
    """A byte range of a file, which is read by offsets that count from its beginning."""

    storage: Storage
    file: str
    start: int
    """Offset of the range in the file."""
    size: int
    """Size of the range in bytes."""

    def read(self, offset: int, size: int) -> bytes:
        """Read bytes of the range; raise `Refused` (CORRUPT) if offset or size reach beyond the range."""
        if offset < 0 or size < 0 or offset + size > self.size:
            raise self.corrupt(f"bytes {offset} to {offset + size} lie outside its {self.size} bytes")
        return self.storage.read(self.file, self.start + offset, size)

    def corrupt(self, message: str) -> TransaxleError:
        """Return the error for a damaged or misleading file."""
        return refuse("CORRUPT", message, file=self.file)

    def unsupported(self, message: str, hint: str = "") -> TransaxleError:
        """Return the error for a file of a kind that Transaxle cannot read."""
        return refuse("UNSUPPORTED", message, file=self.file, hint=hint)


def window(storage: Storage, file: str, start: int = 0, size: int | None = None) -> FileWindow:
    """Return the `FileWindow` of a whole file, or of a range of the file.

    Raises:
        Refused: with the code CORRUPT if the range is not inside the file.
        StorageError: with the code IO if the file's size cannot be read.
    """
    file_size = storage.size(file)
    size = file_size - start if size is None else size
    if start < 0 or size < 0 or start + size > file_size:
        raise refuse("CORRUPT", f"bytes {start} to {start + size} lie outside its {file_size} bytes", file=file)
    return FileWindow(storage, file, start, size)


LOCAL, CENTRAL, DESCRIPTOR = b"PK\x03\x04", b"PK\x01\x02", b"PK\x07\x08"
END, END64, LOCATOR = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
LOCAL_FORM = struct.Struct("<4s10sIIIHH")
CENTRAL_FORM = struct.Struct("<4sH10sIIIHHHHHII")
END_FORM = struct.Struct("<4sHHHHIIH")
END64_FORM = struct.Struct("<4sQHHIIQQQQ")
LOCATOR_FORM = struct.Struct("<4sIQI")
HAS_DESCRIPTOR, UTF8 = 1 << 3, 1 << 11
ZIP64 = 1
"""Id of the zip extra field for numbers that do not fit into 32 bits."""
MAX16, MAX32 = 0xFFFF, 0xFFFFFFFF

_KNOWN_FLAGS = HAS_DESCRIPTOR | UTF8 | 0b110
_ENCRYPTED = 1
_DESCRIPTORS = {16: struct.Struct("<4sIII"), 24: struct.Struct("<4sIQQ")}
_MAX_DIRECTORY = 1 << 28
_AHEAD = 512
"""Number of bytes that are read together for a local header, whose padding has at most 64 bytes."""


class ZipRecord(msgspec.Struct, frozen=True):
    """A record: one file inside the zip archive."""

    name: str
    """Name of the record, without the name of the archive's only folder."""
    offset: int
    """Offset of the record's first byte, counted from the beginning of the `FileWindow`."""
    size: int
    """Size of the record in bytes."""
    crc32: int
    """CRC-32 of the record; 0 if the program that wrote the file did not compute it."""


class Archive(msgspec.Struct, frozen=True):
    """The records of a torch file, which are the files inside its zip archive."""

    window: FileWindow
    records: Mapping[str, ZipRecord]
    """Record name -> record, in file order."""

    def read(self, name: str) -> bytes:
        """Read a small record, and compare it with its checksum.

        Raises:
            Refused: with the code CORRUPT if the record does not match its checksum.
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
    """Entry of a record in the zip archive's central directory."""

    path: bytes
    fixed: bytes
    """Version, flags, method and time, which must equal the same fields in the record's local header."""
    flags: int
    crc32: int
    size: int
    header: int
    """Offset of the record's local header."""


def read_archive(window: FileWindow) -> Archive:
    """Read the directory of an archive, and check that each record's local header agrees with it.

    Raises:
        Refused: with the code CORRUPT for a malformed archive; with the code PATH_ESCAPE for a name that leads outside;
            with the code UNSUPPORTED for compressed or encrypted records.
        StorageError: with the code IO if the file cannot be read.
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
        # torch reads zip archives with miniz, which ignores the case of names
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
    """Return `(offset, size, number of entries)` of the archive's central directory."""
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
        for short, long, overflow in zip((count, size, begin), wide, (MAX16, MAX32, MAX32), strict=True):
            if short not in (overflow, long):
                raise window.corrupt(f"the archive's two end records differ: {short} and {long}")
        count, size, begin = wide
    if begin + size != end:
        raise window.corrupt(f"the directory at {begin} with {size} bytes does not end at {end}, where it should")
    if size > _MAX_DIRECTORY:
        raise window.corrupt(f"the directory has {size} bytes; at most {_MAX_DIRECTORY} are read")
    return begin, size, count


def _directory64(window: FileWindow, locator: int) -> tuple[int, tuple[int, int, int]]:
    """Return the offset of the zip64 end record, and `(entries, size, offset)` of the directory, as this record states
    them.
    """
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
    """Return the 64-bit numbers in a record's zip64 extra field."""
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
    """Return a 32-bit field of a record, or the 64-bit number that replaces it if all bits of the field are set."""
    if field != MAX32:
        return field
    if not wide:
        raise window.corrupt(f"record {path!r} lacks its zip64 field")
    return wide.pop(0)


def _parts(window: FileWindow, path: bytes) -> tuple[str, ...]:
    """Split the path of a record in the archive into its components."""
    try:
        return split_name(path.decode())
    except UnicodeDecodeError:
        raise window.corrupt(f"the name {path!r} of a record is not UTF-8") from None
    except TransaxleError as error:
        raise refuse(error.code, f"record {path!r} has a name outside the archive's folder", file=window.file) from None


def _data_offset(window: FileWindow, name: str, entry: _DirectoryEntry, directory: int) -> int:
    """Return the offset of a record's bytes, after comparing its local header with the directory."""
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
    """Check that a record is followed by its data descriptor (size and checksum), or directly by the next record."""
    if not entry.flags & HAS_DESCRIPTOR:
        if size:
            raise window.corrupt(f"record {name}: {size} bytes after it belong to no record")
        return
    form = _DESCRIPTORS.get(size)
    if form is None:
        raise window.corrupt(f"record {name}: the {size} bytes after it are not a data descriptor")
    if form.unpack(window.read(at, size)) != (DESCRIPTOR, entry.crc32, entry.size, entry.size):
        raise window.corrupt(f"record {name}: its descriptor and the archive's directory differ")


ALIGNMENT = 64
"""The bytes of each record begin at a multiple of this number."""
_FILLER, _FILLER_HEAD = 0x4246, struct.Struct("<HH")
_MADE_BY, _NEEDED = 0x031E, 0x002D
"""Version numbers that miniz writes into the zip64 end record."""


class ZipItem(msgspec.Struct, frozen=True):
    """A record to be written into a new archive."""

    name: str
    """Name of the record, without the name of the archive's folder."""
    size: int
    """Size of the record in bytes."""
    data: bytes | None = None
    """Bytes of the record; None for a storage, whose bytes are not known yet."""
    room: bool = False
    """Whether the record reserves space for digests, which are written last; such a record gets no checksum."""


class ZipLayout(msgspec.Struct, frozen=True):
    """The layout of a new archive."""

    offsets: tuple[int, ...]
    """Offset of each record's bytes in the file."""
    fragments: tuple[tuple[int, bytes], ...]
    """`(offset, bytes)` of all bytes of the file outside the storages."""
    size: int
    """Size of the archive in bytes."""
    room: int | None = None
    """Offset of the space that is reserved for digests; None if the archive has no such space."""


def lay_out(folder: str, items: Iterable[ZipItem]) -> ZipLayout:
    """Lay out an archive: compute the offsets of its records and all bytes around them.

    Args:
        folder: name of the archive's only folder.
        items: the records to write, in order.
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
    """Return the fields version, flags, method and time; as in torch, an empty record has no data descriptor."""
    return struct.pack("<HHHI", 0, UTF8 | (HAS_DESCRIPTOR if size else 0), 0, 0)


def _wide_field(*numbers: int) -> bytes:
    """Return the zip64 extra field that contains the given numbers; empty if there are no numbers."""
    data = struct.pack(f"<{len(numbers)}Q", *numbers)
    return struct.pack("<HH", ZIP64, len(data)) + data if numbers else b""


def _local(path: bytes, size: int, at: int) -> bytes:
    """Return a record's local header, padded so that the record's bytes are aligned."""
    extra = _wide_field(*((size, 0) if size >= MAX32 else ()), *((at,) if at >= MAX32 else ()))
    start = at + LOCAL_FORM.size + len(path) + len(extra) + _FILLER_HEAD.size
    filler = -start % ALIGNMENT
    extra += _FILLER_HEAD.pack(_FILLER, filler) + b"Z" * filler
    return LOCAL_FORM.pack(LOCAL, _fixed(size), 0, 0, 0, len(path), len(extra)) + path + extra


def _descriptor(size: int, crc32: int, *, wide: bool) -> bytes:
    """Return the data descriptor that follows a record's bytes."""
    return struct.pack("<4sIQQ" if wide else "<4sIII", DESCRIPTOR, crc32, size, size) if size else b""


def _central(path: bytes, size: int, crc32: int, at: int) -> bytes:
    """Return a record's entry in the central directory."""
    extra = _wide_field(*((size, size) if size >= MAX32 else ()), *((at,) if at >= MAX32 else ()))
    short = min(size, MAX32)
    head = CENTRAL_FORM.pack(
        CENTRAL, 0, _fixed(size), crc32, short, short, len(path), len(extra), 0, 0, 0, 0, min(at, MAX32)
    )
    return head + path + extra


def _end(at: int, size: int, count: int) -> bytes:
    """Return the end records, which follow the directory; as in torch, they always include the zip64 end records."""
    length = END64_FORM.size - 12
    wide = END64_FORM.pack(END64, length, _MADE_BY, _NEEDED, 0, 0, count, count, size, at)
    wide += LOCATOR_FORM.pack(LOCATOR, 0, at + size, 1)
    short = min(count, MAX16)
    return wide + END_FORM.pack(END, 0, 0, short, short, min(size, MAX32), min(at, MAX32), 0)
