"""Checksums that files keep of their bytes, compared with the bytes on their way to a reader.

A zip archive keeps the CRC-32 of each record. Whoever copies a record has its bytes in hand, so they are summed as they
pass, piece by piece and in any order; only what nobody read is read for the checksum alone.

`copier.c` computes a CRC-32 in a third of zlib's time where the processor multiplies without carries, which is every
x86-64 of the last ten years; elsewhere zlib computes it, to the same number.
"""

from __future__ import annotations

import ctypes
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from ctypes import c_uint32
from functools import cache, cached_property, lru_cache, partial, reduce
from math import prod
from operator import xor
from threading import Lock

import msgspec
from msgspec.structs import replace

from transaxle.axes.geometry import Loop
from transaxle.errors import Refusal, Where, gathered
from transaxle.formats.catalog import Checksum, Container, Entry
from transaxle.formats.storage.copier import Steps, address_to_read, compiled_function
from transaxle.formats.storage.storage import Overlay, Storage

_BLOCK = 1 << 20
_MOST_PARTS = 4096
"""Cap on the summed pieces of one range; a piece beyond it is not counted, and is read again at the end."""
_POLYNOMIAL, _ONES = 0xEDB88320, 0xFFFFFFFF
_HINT = "Copy or download the file again; `transaxle verify` finds everything that is damaged."

SummedRange = tuple[int, int, int]
"""First byte in the file, one past the last, and the CRC-32 of the bytes between."""


class Tally(msgspec.Struct):
    """The progress of one range."""

    parts: list[SummedRange] = msgspec.field(default_factory=list)
    """Summed pieces, in order, without overlaps; adjacent ones are joined."""
    read: int = 0
    """Bytes read of the range; bytes read twice count twice."""
    shared: int = 0
    """Of these, bytes of short runs whose share in the checksum is known."""
    share: int = 0
    """The share of all of them: see `copier.c`; that of bytes read twice is 0."""
    cover: int = 0
    """What the share would be if each byte were 255: tells which bytes are in it."""

    def add(self, summed: SummedRange) -> None:
        """Add one summed piece; one that overlaps another, or exceeds the cap, is dropped."""
        at = bisect_left(self.parts, summed)
        previous = self.parts[at - 1] if at else None
        following = self.parts[at] if at < len(self.parts) else None
        if (previous and previous[1] > summed[0]) or (following and following[0] < summed[1]):
            return
        first, last = at, at
        if previous and previous[1] == summed[0]:
            summed, first = joined(previous, summed), at - 1
        if following and following[0] == summed[1]:
            summed, last = joined(summed, following), at + 1
        if first < last or len(self.parts) < _MOST_PARTS:
            self.parts[first:last] = [summed]

    def gaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the ranges between two bytes that are not summed yet."""
        gaps = []
        at = max(bisect_right(self.parts, (start, start, 0)) - 1, 0)
        for first, last, _ in self.parts[at:]:
            if first >= stop:
                break
            if first > start:
                gaps.append((start, first))
            start = max(start, last)
        return [*gaps, (start, stop)] if start < stop else gaps


class Witness(Overlay):
    """A storage that sums what is read of the ranges with checksums. Safe to share between threads.

    Args:
        below: the files.
        checksums: their checksums; no two ranges overlap.
        entries: the tensors, to name the one in a damaged range.
    """

    def __init__(self, below: Storage, checksums: Sequence[Checksum], entries: Mapping[str, Entry]) -> None:
        super().__init__(below)
        self._entries = entries
        self._ranges: dict[str, list[Checksum]] = {}
        for checksum in sorted(checksums, key=lambda checksum: (checksum.file, checksum.offset)):
            if checksum.size:
                self._ranges.setdefault(checksum.file, []).append(checksum)
        self._starts = {file: [checksum.offset for checksum in ranges] for file, ranges in self._ranges.items()}
        self._tallies: dict[Checksum, Tally] = {}
        self._settled: dict[Checksum, bool] = {}
        self._lock = Lock()

    def add_read(
        self, steps: Steps, name: str, offset: int, view: memoryview, width: int = 0, loops: Sequence[Loop] = ()
    ) -> None:
        """See `Storage`; bytes that are summed up are read by themselves, so that this can be done piece by piece."""
        if loops:
            self._note_runs(steps, name, offset, view, width, loops)
            return
        end, at = offset + view.nbytes, offset
        for checksum in self._touched(name, offset, end):
            start, stop = max(offset, checksum.offset), min(end, checksum.end)
            whole = stop - start == checksum.size and checksum not in self._tallies and checksum not in self._settled
            for first, last in [(start, stop)] if whole else self._unsummed(checksum, start, stop):
                if at < first:
                    self.below.add_read(steps, name, at, view[at - offset : first - offset])
                crc, part = c_uint32(), view[first - offset : last - offset]
                self.below.add_read(steps, name, first, part)
                steps.sum(part, crc, crc32)
                if whole:
                    steps.then(partial(self._check_whole, checksum, crc))
                else:
                    steps.then(partial(self._count_one, checksum, first, last, crc))
                at = last
        if at < end:
            self.below.add_read(steps, name, at, view[at - offset :])

    def _note_runs(
        self, steps: Steps, name: str, offset: int, view: memoryview, width: int, loops: Sequence[Loop]
    ) -> None:
        """List that runs are read and, where they lie in one range, summed up on their way."""
        self.below.add_read(steps, name, offset, view, width, loops)
        total, end = _extent(offset, width, loops)
        touched = [*self._touched(name, offset, end)]
        inside = len(touched) == 1 and touched[0].offset <= offset and end <= touched[0].end
        found = steps.share(view, [_moved(step) for _, step, _ in loops]) if inside and total else None
        for checksum in touched:
            if found is None:
                steps.then(partial(self._count_runs, checksum, total))
            else:
                cover = _cover(width, tuple([(count, step) for count, step, _ in loops]))
                steps.then(partial(self._count_shared, checksum, total, end, found, cover))

    def recheck(self) -> None:
        """Check that no file has changed, and the checksum of every range that was read in part: its rest is read now.

        Raises:
            Refused: CORRUPT, for each range whose bytes do not match its checksum.
            StorageError: IO.
        """
        super().recheck()
        self.settle(self.open())
        self.judge()

    def expect(self, file: str, offset: int, size: int) -> None:
        """Note bytes that somebody else has read: `recheck` checks the ranges around them."""
        for checksum in self._touched(file, offset, offset + size):
            with self._lock:
                self._tally(checksum)

    def open(self) -> list[Checksum]:
        """Return the ranges that were read in part and are not checked yet."""
        with self._lock:
            return list(self._tallies)

    def hand_over(self) -> dict[Checksum, Tally]:
        """Return the ranges that were read in part, with their progress, and leave them to whoever puts them together.

        A range that was mostly read here is read to its end first, and judged.

        Raises:
            Refused: CORRUPT, for each range whose bytes do not match its checksum.
            StorageError: IO.
        """
        self.settle([each for each in self.open() if 2 * self.tally(each).read >= each.size])
        self.judge()
        with self._lock:
            tallies, self._tallies = self._tallies, {}
        return tallies

    def tally(self, checksum: Checksum) -> Tally:
        """Return the progress of a range that is not checked yet."""
        return self._tallies.get(checksum, Tally())

    def count(self, checksum: Checksum, parts: Sequence[SummedRange]) -> None:
        """Add summed pieces of a range; once they cover it, it is checked."""
        with self._lock:
            tally = self._tally(checksum)
            if tally is None:
                return
            for summed in parts:
                tally.add(summed)
            start, stop = checksum.offset, checksum.end
            if len(tally.parts) == 1 and tally.parts[0][:2] == (start, stop):
                self._settled[checksum] = tally.parts[0][2] == checksum.crc32
                del self._tallies[checksum]

    def put_together(self, checksum: Checksum, tallies: Sequence[Tally]) -> None:
        """Add what several ranks have read of a range; once it covers the range, that is checked.

        Args:
            checksum: the range.
            tallies: theirs, and that of this one.
        """
        self.count(checksum, [part for tally in tallies for part in tally.parts])
        share, cover = (reduce(xor, each) for each in zip(*((each.share, each.cover) for each in tallies), strict=True))
        with self._lock:
            self._check_share(checksum, sum(tally.shared for tally in tallies), share, cover)

    def settle(self, checksums: Collection[Checksum]) -> None:
        """Read the unread parts of ranges, so that they are checked.

        Raises:
            TransaxleError: what reading raises.
        """
        buffer = bytearray(min(_BLOCK, max((checksum.size for checksum in checksums), default=0)))
        with Steps() as steps:
            for checksum in checksums:
                if checksum in self._settled:
                    continue
                for first, last in self.tally(checksum).gaps(checksum.offset, checksum.end):
                    self.count(checksum, [(first, last, self._summed(checksum.file, first, last, buffer, steps))])

    def is_right(self, checksum: Checksum) -> bool | None:
        """Tell whether a range matches its checksum; None if it is not checked yet."""
        return self._settled.get(checksum) if checksum.size else checksum.crc32 == 0

    def judge(self, places: Iterable[tuple[str, int, int]] | None = None) -> None:
        """Refuse the ranges that were checked and do not match.

        Args:
            places: judge only the ranges there: file, first byte, number of bytes; None: all.

        Raises:
            Refused: CORRUPT, for each of them.
        """
        with self._lock:
            wrong = {checksum: None for checksum, right in self._settled.items() if not right}
        if wrong and places is not None:
            touched = (checksum for file, at, size in places for checksum in self._touched(file, at, at + size))
            wrong = {checksum: None for checksum in touched if checksum in wrong}
        if wrong:
            raise gathered([self.problem(checksum) for checksum in wrong])

    def problem(self, checksum: Checksum) -> Refusal:
        """Say that a range does not have its checksum."""
        message = f"{checksum.what}: its bytes do not match the checksum in the file"
        return Refusal("CORRUPT", message, Where(checksum.file, self._tensor_in(checksum)), _HINT)

    def _unsummed(self, checksum: Checksum, start: int, stop: int) -> list[tuple[int, int]]:
        """Note that bytes of a range are read, and return those that are not summed up yet."""
        with self._lock:
            tally = self._tally(checksum)
            if tally is None:
                return []
            tally.read += stop - start
            return tally.gaps(start, stop)

    def _check_whole(self, checksum: Checksum, crc: c_uint32) -> None:
        """Check a range that was read and summed up whole."""
        with self._lock:
            self._settled.setdefault(checksum, crc.value == checksum.crc32)
            self._tallies.pop(checksum, None)

    def _count_one(self, checksum: Checksum, first: int, last: int, crc: c_uint32) -> None:
        """Count a piece of a range that was read and summed up."""
        self.count(checksum, [(first, last, crc.value)])

    def _count_runs(self, checksum: Checksum, total: int) -> None:
        """Count runs that are read, and not summed up."""
        with self._lock:
            tally = self._tally(checksum)
            if tally is not None:
                tally.read += total

    def _count_shared(self, checksum: Checksum, total: int, end: int, found: array[int], cover: int) -> None:
        """Count runs that are read and summed up; `found`: what `Steps.share` returned."""
        self._count_runs(checksum, total)
        with self._lock:
            tally = self._tally(checksum)
            if tally is None or not found[1]:
                return
            beyond = _moved(checksum.end - end)
            tally.shared += total
            tally.share ^= _times(beyond, found[0])
            tally.cover ^= _times(beyond, cover)
            self._check_share(checksum, tally.shared, tally.share, tally.cover)

    def _check_share(self, checksum: Checksum, shared: int, share: int, cover: int) -> None:
        """Check a range of which as many bytes are shared as it has, if these are its bytes, each once.

        Otherwise, as where one was read twice and another not at all, it stays open, and is read for its checksum. The
        share alone does not tell: zeros have none, and whatever is read twice has none.
        """
        if shared != checksum.size or checksum in self._settled or cover != _cover(checksum.size, ()):
            return
        zeros = _times(_moved(checksum.size), _ONES) ^ _ONES
        if share ^ zeros == checksum.crc32:
            self._settled[checksum] = True
            self._tallies.pop(checksum, None)

    def _summed(self, file: str, first: int, last: int, buffer: bytearray, steps: Steps) -> int:
        """Return the CRC-32 of bytes that are read for it alone."""
        crc = c_uint32()
        with memoryview(buffer) as block:
            for at in range(first, last, len(block)):
                view = block[: last - at]
                self.below.add_read(steps, file, at, view)
                steps.sum(view, crc, crc32)
            steps.run()
        return crc.value

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
        """Return the progress of a range; None if it has been checked."""
        return None if checksum in self._settled else self._tallies.setdefault(checksum, Tally())

    def _tensor_in(self, checksum: Checksum) -> str | None:
        """Return the first tensor that lies in a range."""
        start, stop = checksum.offset, checksum.end
        places = self._places.get(checksum.file, [])
        at = bisect_left(places, (start, ""))
        return places[at][1] if at < len(places) and places[at][0] < stop else None

    @cached_property
    def _places(self) -> dict[str, list[tuple[int, str]]]:
        """Where tensors begin, by file."""
        places_by_file: dict[str, list[tuple[int, str]]] = {}
        for name, entry in self._entries.items():
            for extent in entry.extents:
                places_by_file.setdefault(extent.file, []).append((extent.offset, name))
        return {file: sorted(places) for file, places in places_by_file.items()}


def _extent(offset: int, width: int, loops: Sequence[Loop]) -> tuple[int, int]:
    """Return how many bytes runs have, and where the last one ends in the file."""
    total = width * prod(count for count, _, _ in loops)
    return total, offset + width + sum((count - 1) * step for count, step, _ in loops)


@lru_cache(1024)
def _cover(width: int, loops: tuple[tuple[int, int], ...]) -> int:
    """Return the share of runs whose bytes are all 255; `loops`: count and step in the file."""
    octet = zlib.crc32(b"\xff") ^ zlib.crc32(b"\0")
    share = _repeated(octet, _moved(1), width)
    for count, step in reversed(loops):
        share = _repeated(share, _moved(step), count)
    return share


def _repeated(share: int, power: int, count: int) -> int:
    """Return the sum of a polynomial's products with the powers of another one, from 0 up to the count."""
    found = 0
    upto = 1 << 31  # the power that the next product would have
    for bit in f"{count:b}":
        found ^= _times(upto, found)
        upto = _times(upto, upto)
        if bit == "1":
            found ^= _times(upto, share)
            upto = _times(upto, power)
    return found


def witnessed(container: Container) -> Container:
    """Return a container whose storage checks the checksums of its files while these are read."""
    return replace(container, storage=Witness(container.storage, container.checksums, container.entries))


def joined(first: SummedRange, second: SummedRange) -> SummedRange:
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


def _times(first: int, second: int) -> int:
    """Return the product of two polynomials modulo the polynomial."""
    # Carry-less multiplication: bits are coefficients, the lowest power in the highest bit.
    product = 0
    for bit in range(31, -1, -1):
        if first >> bit & 1:
            product ^= second
        second = second >> 1 ^ (_POLYNOMIAL if second & 1 else 0)
    return product


_FEWEST = 1 << 12
"""Bytes that are worth the call."""
_CRC = ctypes.c_uint32


def crc32(data: memoryview, crc: int = 0) -> int:
    """Return the CRC-32 of bytes.

    Args:
        data: the bytes, contiguous.
        crc: of the bytes before them.
    """
    compiled = load_crc32() if data.nbytes >= _FEWEST else None
    if compiled is None:
        return zlib.crc32(data, crc)
    octets, result = data.cast("B"), _CRC(crc)
    added = compiled(address_to_read(octets), len(octets), ctypes.byref(result))
    return zlib.crc32(octets[added:], result.value)


@cache
def load_crc32() -> Callable[..., int] | None:
    """Return the compiled function; None if it was not built, cannot be loaded, or was built from another source."""
    return compiled_function("transaxle_crc32", (ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(_CRC)), ctypes.c_int64)
