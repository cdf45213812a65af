"""Stencils: an archive is recognised by its skeleton, everything in it but the tensor, checksums and serial number.

An archive that equals one read before, byte for byte outside of these, describes the same tensor. The blanked bytes
describe no place, and both copies of the tensor's checksum must still agree.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from transaxle.formats.dcp.metadata import Payload
from transaxle.formats.storage.near_reads import NearReads
from transaxle.formats.storage.storage import Storage
from transaxle.formats.torch_file.saved import DATA
from transaxle.formats.torch_file.zip.archive import (
    CENTRAL_FORM,
    END_FORM,
    HAS_DESCRIPTOR,
    MAX16,
    MAX32,
    Archive,
    read_archive,
)
from transaxle.formats.torch_file.zip.window import FileWindow

_SERIAL = ".data/serialization_id"
_MOST = 10_000
"""Cap on the skeletons that are remembered; a checkpoint has a few hundred."""
_MOST_ALIKE = 8
"""Cap on the arrangements of one length that are tried."""
_WHOLE = 1 << 14
"""Archives up to this size are read in one piece."""
_BLOCK = 1 << 18
"""Bytes read at a time of archives that follow one another, and bytes of skeletons that are compared at a time."""
_FEW = 4
"""Contents that are looked for among many archives at a time; others are recognised one by one."""
_CRC = struct.Struct("<I")
_CRC_IN_CENTRAL, _CRC_IN_LOCAL, _CRC_IN_DESCRIPTOR = 16, 14, 4

Result = TypeVar("Result")


class _Arrangement(NamedTuple):
    """Positions of the parts of an archive, in the skeleton (head and tail joined)."""

    head: int
    """Bytes before the tensor."""
    tail: int
    """First byte after it, in the archive."""
    kept: tuple[tuple[int, int], ...]
    """Spans that may not differ."""
    checksums: tuple[tuple[int, int], ...]
    """Positions of checksums that occur twice; the tensor's comes first."""


class Match(NamedTuple, Generic[Result]):
    """An archive that was recognised."""

    result: Result
    """The contents of the archive that it equals."""
    crc32: int
    """Checksum of its own tensor; 0 if it has no tensor or no checksum."""


class Matches(NamedTuple, Generic[Result]):
    """Archives that were recognised, and equal the same one."""

    result: Result
    """The contents of that."""
    which: NDArray[np.intp]
    """Their positions among those that were looked at."""
    crc32: NDArray[np.uint32] | None
    """Checksum of each one's own tensor; None if they have no tensor or no checksum."""


class Stencils(Generic[Result]):
    """The skeletons of archives that were read, with their contents."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._read = NearReads(storage).read
        self._by_length: dict[int, list[tuple[_Arrangement, dict[bytes, Result]]]] = {}
        self._count = 0

    def match(self, payload: Payload) -> Match[Result] | None:
        """Recognise an archive; None if it must be read."""
        for arrangement, known in self._by_length.get(payload.length, ()):
            skeleton = self._skeleton(payload, arrangement)
            result = known.get(_blanked(skeleton, arrangement))
            if result is None:
                continue
            for first, second in arrangement.checksums:
                if skeleton[first : first + _CRC.size] != skeleton[second : second + _CRC.size]:
                    break
            else:
                has_checksum = arrangement.tail > arrangement.head and arrangement.checksums
                return Match(result, _CRC.unpack_from(skeleton, arrangement.checksums[0][0])[0] if has_checksum else 0)
        return None

    def matches(self, file: str, length: int, offsets: Sequence[int]) -> Iterator[Matches[Result]]:
        """Recognise archives of one length, together; those that are not among the matches are unlike the others.

        Args:
            file: its name.
            length: bytes of each archive.
            offsets: where they begin.
        """
        for arrangement, known in self._by_length.get(length, ())[:1]:
            width = length - (arrangement.tail - arrangement.head)
            rows = max(_BLOCK // max(width, 1), 1)
            for begin in range(0, len(offsets), rows):
                some = offsets[begin : begin + rows]
                skeletons = np.frombuffer(self._skeletons(file, length, some, arrangement), np.uint8)
                for match in _matches(skeletons.reshape(len(some), width), arrangement, known):
                    yield match._replace(which=match.which + begin)

    def learn(self, payload: Payload, result: Result) -> None:
        """Remember an archive that was read without any problem."""
        archive = read_archive(FileWindow(self._storage, payload.file, payload.offset, payload.length))
        arrangement = _arranged(archive)
        if arrangement is None:
            return
        if self._count >= _MOST:
            self._by_length.clear()
            self._count = 0
        alike = self._by_length.setdefault(payload.length, [])
        known = next((known for other, known in alike if other == arrangement), None)
        if known is None:
            known = {}
            alike.insert(0, (arrangement, known))
            del alike[_MOST_ALIKE:]
        known[_blanked(self._skeleton(payload, arrangement), arrangement)] = result
        self._count += 1

    def _skeleton(self, payload: Payload, arrangement: _Arrangement) -> bytes:
        file, offset, length = payload
        head, tail = arrangement.head, arrangement.tail
        if length <= _WHOLE:
            data = self._read(file, offset, length)
            return data[:head] + data[tail:]
        read = self._read
        return read(file, offset, head) + read(file, offset + tail, length - tail)

    def _skeletons(self, file: str, length: int, offsets: Sequence[int], arrangement: _Arrangement) -> bytes:
        """Return the skeletons of archives, joined."""
        head, tail = arrangement.head, arrangement.tail
        parts: list[bytes] = []
        if length > _WHOLE:
            for offset in offsets:
                parts += (
                    self._storage.read(file, offset, head),
                    self._storage.read(file, offset + tail, length - tail),
                )
            return b"".join(parts)
        data, begin, end = b"", 0, 0
        for number, offset in enumerate(offsets):
            if not begin <= offset <= offset + length <= end:
                begin, end, following = offset, offset + length, number + 1
                while following < len(offsets) and 0 <= offsets[following] - end <= length and end - begin < _BLOCK:
                    end = offsets[following] + length
                    following += 1
                data = self._storage.read(file, begin, end - begin)
            at = offset - begin
            parts += (data[at : at + head], data[at + tail : at + length])
        return b"".join(parts)


def _matches(
    skeletons: NDArray[np.uint8], arrangement: _Arrangement, known: dict[bytes, Result]
) -> Iterator[Matches[Result]]:
    """Find out which skeletons, one a row, are those of contents that are known."""
    agree = np.ones(len(skeletons), bool)
    for first, second in arrangement.checksums:
        agree &= (skeletons[:, first : first + _CRC.size] == skeletons[:, second : second + _CRC.size]).all(axis=1)
    has_checksum = arrangement.tail > arrangement.head and bool(arrangement.checksums)
    left = agree
    for _ in range(_FEW):
        if not left.any():
            return
        one = skeletons[int(left.argmax())]
        alike = left.copy()
        for start, stop in arrangement.kept:
            equal = skeletons[:, start:stop] == one[start:stop]
            if not equal.all():  # row by row takes five times as long
                alike &= equal.all(axis=1)
        result = known.get(_blanked(one.tobytes(), arrangement))
        which = alike.nonzero()[0]
        if result is not None:
            at = arrangement.checksums[0][0] if has_checksum else 0
            crc32 = (
                np.ascontiguousarray(skeletons[which, at : at + _CRC.size]).view("<u4")[:, 0] if has_checksum else None
            )
            yield Matches(result, which, crc32)
        left = left & ~alike


def _blanked(skeleton: bytes, arrangement: _Arrangement) -> bytes:
    """Return what is left of a skeleton without the spans that may differ: these have their places in all of them."""
    return b"".join([skeleton[start:stop] for start, stop in arrangement.kept])


def _arranged(archive: Archive) -> _Arrangement | None:
    """Return the arrangement of an archive; None if it has several storages, or needs zip64."""
    tensors = [record for name, record in archive.records.items() if name.startswith(DATA)]
    if len(tensors) > 1:
        return None
    size = archive.window.size
    head, tail = (tensors[0].offset, tensors[0].offset + tensors[0].size) if tensors else (size, size)

    def inside(position: int) -> int:
        return position if position < tail else position - (tail - head)

    entries = list(_directory(archive))
    if not entries:
        return None
    blanks: list[tuple[int, int]] = []
    checksums: list[tuple[int, int]] = []
    serial = archive.records.get(_SERIAL)
    for record in (*tensors, *([serial] if serial else [])):
        for name, central, header, flags in entries:
            if name == record.name:
                descriptor_checksum = record.offset + record.size + _CRC_IN_DESCRIPTOR
                pair = (
                    inside(central),
                    inside(descriptor_checksum if flags & HAS_DESCRIPTOR else header + _CRC_IN_LOCAL),
                )
                blanks.extend((at, at + _CRC.size) for at in pair)
                checksums.append(pair)
    if serial:
        blanks.append((inside(serial.offset), inside(serial.offset) + serial.size))
    edges = sorted(blanks)
    kept = zip([0, *(stop for _, stop in edges)], [*(start for start, _ in edges), size - (tail - head)], strict=True)
    return _Arrangement(head, tail, tuple(kept), tuple(checksums))


def _directory(archive: Archive) -> Iterator[tuple[str, int, int, int]]:
    """Yield name, position of the checksum, position of the header, and flags of each entry of the directory."""
    area = archive.window
    *_, count, size, begin, _ = END_FORM.unpack(area.read(area.size - END_FORM.size, END_FORM.size))
    if MAX32 in (size, begin) or count == MAX16:
        return
    text = area.read(begin, size)
    at = 0
    for _ in range(count):
        fields = CENTRAL_FORM.unpack_from(text, at)
        fixed, length, extra, header = fields[2], fields[6], fields[7], fields[-1]
        path = text[at + CENTRAL_FORM.size : at + CENTRAL_FORM.size + length].decode()
        yield path.partition("/")[2], begin + at + _CRC_IN_CENTRAL, header, int.from_bytes(fixed[2:4], "little")
        at += CENTRAL_FORM.size + length + extra
