"""A witness of what is read: the checksums that files keep, held against the bytes on their way to a reader.

A zip archive gives the CRC-32 of each record. Whoever copies a record has its bytes in hand, so they are summed up as
they pass, part by part and in any order, and only what was never read is read for it alone.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import prod
from threading import Lock

from transaxle.axes.geometry.strided import Loop
from transaxle.errors import Refusal, Where, gathered
from transaxle.formats.catalog.catalog import Checksum, Container, Entry
from transaxle.formats.storage.storage import Overlay, Storage, layer
from transaxle.formats.storage.strided_reads import read_strided

_BLOCK = 1 << 20
_MOST_PARTS = 4096
"""Parts of one range that are kept; a read that would be one more is not counted, and made again in the end."""
_POLYNOMIAL = 0xEDB88320
_HINT = "Copy or download the file again; `transaxle verify` finds everything that is damaged."

Part = tuple[int, int, int]
"""First byte in the file, one past the last, and the CRC-32 of what lies between."""


@dataclass(slots=True)
class Tally:
    """What is known of one range."""

    parts: list[Part] = field(default_factory=list)
    """What was summed up, in order, without overlaps; neighbours are one."""
    read: int = 0
    """Bytes that were read of it, those read twice counted twice."""

    def add(self, part: Part) -> None:
        """Sum up one more part; one that overlaps another, or is one too many, is left out."""
        at = bisect_left(self.parts, part)
        before = self.parts[at - 1] if at else None
        after = self.parts[at] if at < len(self.parts) else None
        if (before and before[1] > part[0]) or (after and after[0] < part[1]):
            return
        first, last = at, at
        if before and before[1] == part[0]:
            part, first = joined(before, part), at - 1
        if after and after[0] == part[1]:
            part, last = joined(part, after), at + 1
        if first < last or len(self.parts) < _MOST_PARTS:
            self.parts[first:last] = [part]

    def gaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return what is not summed up between two bytes."""
        found = []
        at = max(bisect_right(self.parts, (start, start, 0)) - 1, 0)
        for first, last, _ in self.parts[at:]:
            if first >= stop:
                break
            if first > start:
                found.append((start, first))
            start = max(start, last)
        return [*found, (start, stop)] if start < stop else found


class Witness(Overlay):
    """A storage that sums up what is read of the ranges that its files give checksums of. Safe to share.

    Args:
        below: the files.
        checksums: what they say of their bytes; no two ranges overlap.
        entries: the tensors, to name those that lie in a range.
    """

    def __init__(self, below: Storage, checksums: Sequence[Checksum], entries: Mapping[str, Entry]) -> None:
        super().__init__(below)
        self._entries = entries
        self._ranges: dict[str, list[Checksum]] = {}
        for checksum in sorted(checksums, key=lambda each: (each.file, each.offset)):
            if checksum.size:
                self._ranges.setdefault(checksum.file, []).append(checksum)
        self._starts = {file: [each.offset for each in ranges] for file, ranges in self._ranges.items()}
        self._tallies: dict[Checksum, Tally] = {}
        self._settled: dict[Checksum, bool] = {}
        self._lock = Lock()

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """See `Storage`."""
        self.below.read_into(name, offset, view)
        end = offset + view.nbytes
        for checksum in self._touched(name, offset, end):
            start, stop = max(offset, checksum.offset), min(end, checksum.offset + checksum.size)
            with self._lock:
                tally = self._tally(checksum)
                gaps = tally.gaps(start, stop) if tally else []
                if tally:
                    tally.read += stop - start
            for first, last in gaps:
                with view.cast("B") as octets:
                    found = zlib.crc32(octets[first - offset : last - offset])
                self.count(checksum, [(first, last, found)])

    def read_strided(self, name: str, offset: int, view: memoryview, width: int, loops: Sequence[Loop]) -> None:
        """See `formats.strided.read_strided`; such runs are too short to be summed up one by one."""
        read_strided(self.below, name, offset, view, width, loops)
        total = width * prod(count for count, _, _ in loops)
        last = offset + width + sum((count - 1) * step for count, step, _ in loops)
        for checksum in self._touched(name, offset, last):
            with self._lock:
                tally = self._tally(checksum)
                if tally:
                    tally.read += total

    def recheck(self) -> None:
        """Check that no file has changed, and every range of which something was read: the rest of it is read now.

        Raises:
            Refused: CORRUPT, for each range whose bytes do not have their checksum.
            StorageError: IO.
        """
        super().recheck()
        self.settle(self.open())
        self.judge()

    def expect(self, file: str, offset: int, size: int) -> None:
        """Take note of bytes that somebody else has read: `recheck` checks the ranges that they lie in."""
        for checksum in self._touched(file, offset, offset + size):
            with self._lock:
                self._tally(checksum)

    def open(self) -> list[Checksum]:
        """Return the ranges of which something was read and that have not been checked."""
        with self._lock:
            return list(self._tallies)

    def tally(self, checksum: Checksum) -> Tally:
        """Return what is known of a range that has not been checked."""
        return self._tallies.get(checksum, Tally())

    def count(self, checksum: Checksum, parts: Sequence[Part]) -> None:
        """Sum up parts of a range; once they are all of it, it is checked."""
        with self._lock:
            tally = self._tally(checksum)
            if tally is None:
                return
            for part in parts:
                tally.add(part)
            start, stop = checksum.offset, checksum.offset + checksum.size
            if len(tally.parts) == 1 and tally.parts[0][:2] == (start, stop):
                self._settled[checksum] = tally.parts[0][2] == checksum.crc32
                del self._tallies[checksum]

    def settle(self, checksums: Collection[Checksum]) -> None:
        """Read what was not read of ranges, so that they are checked.

        Raises:
            TransaxleError: what reading raises.
        """
        buffer = bytearray(min(_BLOCK, max((checksum.size for checksum in checksums), default=0)))
        for checksum in checksums:
            if checksum in self._settled:
                continue
            for first, last in self.tally(checksum).gaps(checksum.offset, checksum.offset + checksum.size):
                self._sum_up(checksum, first, last, buffer)

    def is_right(self, checksum: Checksum) -> bool | None:
        """Tell whether a range has the checksum that the file gives; None where that is not known."""
        return self._settled.get(checksum) if checksum.size else checksum.crc32 == 0

    def judge(self, places: Iterable[tuple[str, int, int]] | None = None) -> None:
        """Refuse the ranges that were checked and found wrong.

        Args:
            places: only those that lie there: file, first byte, number of bytes; None: all.

        Raises:
            Refused: CORRUPT, for each of them.
        """
        with self._lock:
            wrong = {checksum: None for checksum, right in self._settled.items() if not right}
        if wrong and places is not None:
            there = (each for file, at, size in places for each in self._touched(file, at, at + size))
            wrong = {checksum: None for checksum in there if checksum in wrong}
        if wrong:
            raise gathered([self.problem(checksum) for checksum in wrong])

    def problem(self, checksum: Checksum) -> Refusal:
        """Say that a range does not have its checksum."""
        message = f"{checksum.what}: its bytes do not have the checksum that the file gives"
        return Refusal("CORRUPT", message, Where(checksum.file, self._tensor_in(checksum)), _HINT)

    def _sum_up(self, checksum: Checksum, first: int, last: int, buffer: bytearray) -> None:
        found, at = 0, first
        while at < last:
            with memoryview(buffer)[: min(len(buffer), last - at)] as view:
                self.below.read_into(checksum.file, at, view)
                found = zlib.crc32(view, found)
                at += len(view)
        self.count(checksum, [(first, last, found)])

    def _touched(self, file: str, start: int, stop: int) -> Iterator[Checksum]:
        """Yield the ranges of a file that have bytes between two places."""
        ranges = self._ranges.get(file)
        if ranges is None:
            return
        at = max(bisect_right(self._starts[file], start) - 1, 0)
        while at < len(ranges) and ranges[at].offset < stop:
            if ranges[at].offset + ranges[at].size > start:
                yield ranges[at]
            at += 1

    def _tally(self, checksum: Checksum) -> Tally | None:
        """Return what is known of a range; None if it has been checked."""
        return None if checksum in self._settled else self._tallies.setdefault(checksum, Tally())

    def _tensor_in(self, checksum: Checksum) -> str | None:
        """Return the first tensor that lies in a range."""
        start, stop = checksum.offset, checksum.offset + checksum.size
        places = self._places.get(checksum.file, [])
        at = bisect_left(places, (start, ""))
        return places[at][1] if at < len(places) and places[at][0] < stop else None

    @cached_property
    def _places(self) -> dict[str, list[tuple[int, str]]]:
        """Where tensors begin, by file."""
        found: dict[str, list[tuple[int, str]]] = {}
        for name, entry in self._entries.items():
            for extent in entry.extents:
                found.setdefault(extent.file, []).append((extent.offset, name))
        return {file: sorted(places) for file, places in found.items()}


def witnessed(container: Container) -> Container:
    """Return a container whose storage sums up what is read, if its files give checksums."""
    if not container.checksums:
        return container
    return replace(container, storage=Witness(container.storage, container.checksums, container.entries))


def witness_of(storage: Storage) -> Witness | None:
    """Return what sums up what is read from a storage; None where files give no checksums."""
    return layer(storage, Witness)


def joined(first: Part, second: Part) -> Part:
    """Return two neighbouring parts as one.

    The CRC-32 of A and B together is that of A, moved on by the length of B, xor that of B: CRCs are polynomials
    modulo a fixed one, and moving on by a byte multiplies by x**8 (zlib's `crc32_combine`, which Python lacks).
    """
    return first[0], second[1], _times(_moved(second[1] - second[0]), first[2]) ^ second[2]


@lru_cache(1024)
def _moved(size: int) -> int:
    """Return x**(8 * size) modulo the polynomial, its lowest power in the highest bit."""
    power, square = 1 << 31, 1 << 23
    while size:
        if size & 1:
            power = _times(square, power)
        square = _times(square, square)
        size >>= 1
    return power


def _times(one: int, other: int) -> int:
    """Return the product of two polynomials modulo the polynomial."""
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            product ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return product
