"""Stencils: an archive is recognised by its skeleton, everything in it but the tensor, checksums and serial number.

An archive that equals one read before, byte for byte outside of these, describes the same tensor. The blanked bytes
describe no place, and both copies of the tensor's checksum must still agree.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from transaxle.formats.dcp.metadata import Payload
from transaxle.formats.storage.compiled import read_strided
from transaxle.formats.storage.storage import NearReads, Storage
from transaxle.formats.torch_file.archive import (
    CENTRAL_FORM,
    END_FORM,
    HAS_DESCRIPTOR,
    MAX16,
    MAX32,
    Archive,
    FileWindow,
    read_archive,
)
from transaxle.formats.torch_file.saved import DATA

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
        self._room: NDArray[np.uint8] = np.empty(0, np.uint8)

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
                for match in _matches(self._skeletons(file, length, some, arrangement), arrangement, known):
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

    def _skeletons(
        self, file: str, length: int, offsets: Sequence[int], arrangement: _Arrangement
    ) -> NDArray[np.uint8]:
        """Return the skeletons of archives, one a row."""
        if length > _WHOLE:
            return self._distant_skeletons(file, length, offsets, arrangement)
        head, tail = arrangement.head, arrangement.tail
        rows = np.empty((len(offsets), length - (tail - head)), np.uint8)
        places = np.array(offsets, np.int64)
        gaps = np.diff(places) - length
        ends = [*(((gaps < 0) | (gaps > length)).nonzero()[0] + 1).tolist(), len(places)]
        first = 0
        while first < len(places):
            begin, stop = offsets[first], ends[bisect_right(ends, first)]
            stop = first + int(places[first:stop].searchsorted(begin + _BLOCK))
            size = offsets[stop - 1] + length - begin
            if size > len(self._room):  # the same memory for all: the system gives new memory by the page
                self._room = np.empty(size, np.uint8)
            data = self._room[:size]
            self._storage.read_into(file, begin, data.data)
            archives = _cut_out(data, length, places[first:stop] - begin)
            rows[first:stop, :head], rows[first:stop, head:] = archives[:, :head], archives[:, tail:]
            first = stop
        return rows

    def _distant_skeletons(
        self, file: str, length: int, offsets: Sequence[int], arrangement: _Arrangement
    ) -> NDArray[np.uint8]:
        """Return the skeletons of archives too long to be read whole; those at even steps are few calls."""
        head, tail = arrangement.head, arrangement.tail
        width = length - (tail - head)
        rows = np.empty((len(offsets), width), np.uint8)
        for first, count, step in _progressions(offsets):
            room = rows[first : first + count].reshape(-1).data
            begin, end = offsets[first], offsets[first + count - 1]
            reads = [(begin, 0, head, count), (begin + tail, head, length - tail, count)]
            if step == length:  # a tail and the next head lie side by side, in the file and here
                middle = (begin + tail, head, width, count - 1)
                reads = [(begin, 0, head, 1), middle, (end + tail, (count - 1) * width + head, length - tail, 1)]
            for offset, place, size, times in reads:
                read_strided(self._storage, file, offset, room[place:], size, ((times, step, width),))
        return rows


def _cut_out(data: NDArray[np.uint8], length: int, offsets: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return so many bytes from each of these offsets, one a row; those at even steps are not copied."""
    steps = np.diff(offsets)
    if (steps == steps[:1]).all():
        return np.ndarray((len(offsets), length), np.uint8, data, strides=(int(steps[0]) if len(steps) else length, 1))
    return sliding_window_view(data, length)[offsets]


def _progressions(offsets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the stretches of numbers that grow by even steps: the first one's position, how many, and the step."""
    first = 0
    while first < len(offsets):
        stop = first + 1
        step = max(offsets[stop] - offsets[first], 0) if stop < len(offsets) else 0
        while step and stop < len(offsets) and offsets[stop] - offsets[stop - 1] == step:
            stop += 1
        yield first, stop - first, step
        first = stop


def _matches(
    skeletons: NDArray[np.uint8], arrangement: _Arrangement, known: dict[bytes, Result]
) -> Iterator[Matches[Result]]:
    """Find out which skeletons, one a row, are those of contents that are known."""
    agree = np.ones(len(skeletons), bool)
    for first, second in arrangement.checksums:
        agree &= _numbers(skeletons, first) == _numbers(skeletons, second)
    has_checksum = arrangement.tail > arrangement.head and bool(arrangement.checksums)
    left = agree
    for _ in range(_FEW):
        if not left.any():
            return
        one = skeletons[int(left.argmax())]
        alike = left.copy()
        if not _are_all(skeletons, one, arrangement):
            for start, stop in arrangement.kept:
                alike &= (skeletons[:, start:stop] == one[start:stop]).all(axis=1)
        result = known.get(_blanked(one.tobytes(), arrangement))
        which = alike.nonzero()[0]
        if result is not None:
            crc32 = _numbers(skeletons, arrangement.checksums[0][0])[which] if has_checksum else None
            yield Matches(result, which, crc32)
        left = left & ~alike


def _numbers(skeletons: NDArray[np.uint8], at: int) -> NDArray[np.uint32]:
    """Return the number of a checksum's size that begins at a byte of each skeleton."""
    return np.ndarray(len(skeletons), "<u4", skeletons, at, skeletons.strides[:1])


def _are_all(skeletons: NDArray[np.uint8], one: NDArray[np.uint8], arrangement: _Arrangement) -> bool:
    """Tell whether all skeletons are like one of them. Comparing bytes takes a tenth of the time of arrays."""
    filled = skeletons.copy()
    for (_, start), (stop, _) in pairwise(arrangement.kept):
        filled[:, start:stop] = one[start:stop]
    return filled.tobytes() == one.tobytes() * len(filled)


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
