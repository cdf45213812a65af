"""Computes the checksums of a checkpoint's byte ranges while these are read, and compares them with the checksums in
its files.

A zip archive contains the CRC-32 of each of its records (files inside the archive). A record may be read in several
parts, in any order; the CRC-32 of each part is added to the record's checksum. Bytes of a record that nothing else
reads are read at the end, only for the checksum.

`copier.c` computes a CRC-32 in a third of zlib's time on processors with carry-less multiplication, which is every
x86-64 processor of the last ten years; on older processors zlib computes the same number.
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
from transaxle.formats.storage.copier import Steps, compiled_function, read_address
from transaxle.formats.storage.storage import Overlay, Storage

_BLOCK = 1 << 20
_MAX_PARTS = 4096
"""Maximum number of separate parts of one byte range whose checksums are remembered; the checksums of further parts are
dropped, and these parts are read again at the end."""
_POLYNOMIAL, _ONES = 0xEDB88320, 0xFFFFFFFF
_HINT = "Copy or download the file again; `transaxle verify SRC` finds everything that is damaged."

SummedRange = tuple[int, int, int]
"""A part of a byte range with its checksum: `(first byte in the file, offset after the last byte, CRC-32 of the
bytes)`."""


class Tally(msgspec.Struct):
    """How much of the checksum of one byte range of a file has been computed."""

    parts: list[SummedRange] = msgspec.field(default_factory=list)
    """Parts of the range with known checksums, in order and without overlaps; adjacent parts are merged."""
    read: int = 0
    """Number of bytes of the range that were read so far; a byte that was read twice counts twice."""
    shared: int = 0
    """Number of bytes that were read as short runs and whose contribution to the range's checksum (in `share`) is
    known."""
    share: int = 0
    """XOR of the contributions of short runs to the range's checksum (see `copier.c`); bytes that were read twice
    cancel out."""
    cover: int = 0
    """Value that `share` would have if each byte were 255; it shows which bytes `share` includes."""

    def add(self, summed: SummedRange) -> None:
        """Add a part of the range with its checksum, unless it overlaps an earlier part or there are too many parts."""
        at = bisect_left(self.parts, summed)
        previous = self.parts[at - 1] if at else None
        following = self.parts[at] if at < len(self.parts) else None
        if (previous and previous[1] > summed[0]) or (following and following[0] < summed[1]):
            return
        first, last = at, at
        if previous and previous[1] == summed[0]:
            summed, first = merge_parts(previous, summed), at - 1
        if following and following[0] == summed[1]:
            summed, last = merge_parts(summed, following), at + 1
        if first < last or len(self.parts) < _MAX_PARTS:
            self.parts[first:last] = [summed]

    def gaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the byte ranges in `[start, stop)` whose checksums are not known yet."""
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
    """A storage that compares byte ranges with their stored checksums while these ranges are read. Several threads can
    use one `Witness` at the same time.

    Args:
        below: the storage that reads the files.
        checksums: stored checksums of byte ranges of the files; no two of the ranges overlap.
        entries: the tensors of the checkpoint; an error uses them to name the tensor in a damaged range.
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
        self._results: dict[Checksum, bool] = {}
        self._wrong: dict[Checksum, int] = {}
        """Range that does not match its checksum -> CRC-32 of its bytes."""
        self._lock = Lock()

    def add_read(
        self, steps: Steps, name: str, offset: int, view: memoryview, width: int = 0, loops: Sequence[Loop] = ()
    ) -> None:
        """Add a read as `Storage.add_read` does; bytes that have a checksum are read by separate steps, which also
        compute their CRC-32.
        """
        if loops:
            self._add_strided_read(steps, name, offset, view, width, loops)
            return
        end, at = offset + view.nbytes, offset
        for checksum in self._ranges_in(name, offset, end):
            start, stop = max(offset, checksum.offset), min(end, checksum.end)
            whole = stop - start == checksum.size and checksum not in self._tallies and checksum not in self._results
            for first, last in [(start, stop)] if whole else self._count_read(checksum, start, stop):
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

    def _add_strided_read(
        self, steps: Steps, name: str, offset: int, view: memoryview, width: int, loops: Sequence[Loop]
    ) -> None:
        """Add a strided read of short runs; if all runs are in one range with a checksum, also compute what they
        contribute to it.
        """
        self.below.add_read(steps, name, offset, view, width, loops)
        total, end = _extent(offset, width, loops)
        touched = [*self._ranges_in(name, offset, end)]
        inside = len(touched) == 1 and touched[0].offset <= offset and end <= touched[0].end
        result = steps.add_crc_share(view, [crc_shift(step) for _, step, _ in loops]) if inside and total else None
        for checksum in touched:
            if result is None:
                steps.then(partial(self._count_runs, checksum, total))
            else:
                cover = _cover(width, tuple([(count, step) for count, step, _ in loops]))
                steps.then(partial(self._count_shared, checksum, total, end, result, cover))

    def recheck(self) -> None:
        """Check that no file has changed, then read the rest of each partly read range, and compare the range with its
        checksum.

        Raises:
            Refused: with the code CORRUPT for each range whose bytes do not match its checksum.
            StorageError: with the code IO if a file cannot be read.
        """
        super().recheck()
        self.check_rest(self.open())
        self.refuse_wrong()

    def mark_read(self, file: str, offset: int, size: int) -> None:
        """Record that a different reader has read these bytes, so that `recheck` checks the ranges around them."""
        for checksum in self._ranges_in(file, offset, offset + size):
            with self._lock:
                self._tally(checksum)

    def open(self) -> list[Checksum]:
        """Return the ranges that were partly read and whose checksums are not checked yet."""
        with self._lock:
            return list(self._tallies)

    def take_tallies(self) -> dict[Checksum, Tally]:
        """Return, and clear, the progress of this rank in the ranges that it has read only partly; the caller combines
        it with the progress of the other ranks.

        If at least half of a range was read, its rest is read now, and the range is checked instead.

        Raises:
            Refused: with the code CORRUPT for each range whose bytes do not match its checksum.
            StorageError: with the code IO if a file cannot be read.
        """
        self.check_rest([each for each in self.open() if 2 * self.tally(each).read >= each.size])
        self.refuse_wrong()
        with self._lock:
            tallies, self._tallies = self._tallies, {}
        return tallies

    def tally(self, checksum: Checksum) -> Tally:
        """Return the progress of a range whose checksum is not checked yet; the tally is empty if nothing of the range
        was read.
        """
        return self._tallies.get(checksum, Tally())

    def count(self, checksum: Checksum, parts: Sequence[SummedRange]) -> None:
        """Add parts with their checksums to a range, and check the range once the parts cover it."""
        with self._lock:
            tally = self._tally(checksum)
            if tally is None:
                return
            for summed in parts:
                tally.add(summed)
            start, stop = checksum.offset, checksum.end
            if len(tally.parts) == 1 and tally.parts[0][:2] == (start, stop):
                self._settle(checksum, tally.parts[0][2])

    def combine_tallies(self, checksum: Checksum, tallies: Sequence[Tally]) -> None:
        """Combine the progress of several ranks in reading one range, and check the range if all of its bytes were
        read.

        Args:
            checksum: the byte range with its stored checksum.
            tallies: the progress of each rank in this range, including the calling rank.
        """
        self.count(checksum, [part for tally in tallies for part in tally.parts])
        share, cover = (reduce(xor, each) for each in zip(*((each.share, each.cover) for each in tallies), strict=True))
        with self._lock:
            self._check_share(checksum, sum(tally.shared for tally in tallies), share, cover)

    def check_rest(self, checksums: Collection[Checksum]) -> None:
        """Read the bytes of ranges that no reader has read yet, and check the ranges' checksums.

        Raises:
            TransaxleError: if a read fails.
        """
        buffer = bytearray(min(_BLOCK, max((checksum.size for checksum in checksums), default=0)))
        with Steps() as steps:
            for checksum in checksums:
                if checksum in self._results:
                    continue
                for first, last in self.tally(checksum).gaps(checksum.offset, checksum.end):
                    self.count(checksum, [(first, last, self._crc_of(checksum.file, first, last, buffer, steps))])

    def is_right(self, checksum: Checksum) -> bool | None:
        """Return whether a range matches its checksum; None if the range is not checked yet."""
        return self._results.get(checksum) if checksum.size else checksum.crc32 == 0

    def refuse_wrong(self, places: Iterable[tuple[str, int, int]] | None = None) -> None:
        """Refuse ranges that were found not to match their checksums.

        Args:
            places: `(file, first byte, number of bytes)` of the byte ranges that may be refused; None means all ranges.

        Raises:
            Refused: with the code CORRUPT for each range that is refused.
        """
        with self._lock:
            wrong = dict.fromkeys(self._wrong)
        if wrong and places is not None:
            touched = (checksum for file, at, size in places for checksum in self._ranges_in(file, at, at + size))
            wrong = {checksum: None for checksum in touched if checksum in wrong}
        if wrong:
            raise gathered([self.problem(checksum) for checksum in wrong])

    def problem(self, checksum: Checksum) -> Refusal:
        """Return the refusal of a range that does not match its checksum."""
        message = f"{checksum.what}: its bytes do not match the checksum in the file"
        if checksum in self._wrong:
            message += f": CRC-32 {self._wrong[checksum]:08x}, expected {checksum.crc32:08x}"
        return Refusal("CORRUPT", message, Where(checksum.file, self._tensor_in(checksum)), _HINT)

    def _count_read(self, checksum: Checksum, start: int, stop: int) -> list[tuple[int, int]]:
        """Count bytes of a range as read, and return their sub-ranges whose checksums are not known yet."""
        with self._lock:
            tally = self._tally(checksum)
            if tally is None:
                return []
            tally.read += stop - start
            return tally.gaps(start, stop)

    def _check_whole(self, checksum: Checksum, crc: c_uint32) -> None:
        """Check a range that was read as a whole by one step, and whose checksum `crc` has been computed."""
        with self._lock:
            if checksum not in self._results:
                self._settle(checksum, crc.value)

    def _settle(self, checksum: Checksum, crc: int) -> None:
        """Compare a range's CRC-32 with its stored checksum; the caller holds the lock."""
        self._results[checksum] = crc == checksum.crc32
        if not self._results[checksum]:
            self._wrong[checksum] = crc
        self._tallies.pop(checksum, None)

    def _count_one(self, checksum: Checksum, first: int, last: int, crc: c_uint32) -> None:
        """Count a part of a range that was read and whose checksum has been computed."""
        self.count(checksum, [(first, last, crc.value)])

    def _count_runs(self, checksum: Checksum, total: int) -> None:
        """Count the bytes of short runs that were read without computing their checksum."""
        with self._lock:
            tally = self._tally(checksum)
            if tally is not None:
                tally.read += total

    def _count_shared(self, checksum: Checksum, total: int, end: int, result: array[int], cover: int) -> None:
        """Count the bytes of short runs whose contribution to the range's checksum was computed; `result` comes from
        `Steps.add_crc_share`.
        """
        self._count_runs(checksum, total)
        with self._lock:
            tally = self._tally(checksum)
            if tally is None or not result[1]:
                return
            beyond = crc_shift(checksum.end - end)
            tally.shared += total
            tally.share ^= _times(beyond, result[0])
            tally.cover ^= _times(beyond, cover)
            self._check_share(checksum, tally.shared, tally.share, tally.cover)

    def _check_share(self, checksum: Checksum, shared: int, share: int, cover: int) -> None:
        """Check a range by the contributions of its short runs, if these include each byte of the range exactly once.

        If a byte was read twice and a different byte never, the range stays unchecked and is read again later. The
        contributions in `share` alone cannot show whether bytes are missing: zero bytes contribute nothing, and the
        contributions of a byte that was read twice cancel out.
        """
        if shared != checksum.size or checksum in self._results or cover != _cover(checksum.size, ()):
            return
        zeros = _times(crc_shift(checksum.size), _ONES) ^ _ONES
        if share ^ zeros == checksum.crc32:
            self._results[checksum] = True
            self._tallies.pop(checksum, None)

    def _crc_of(self, file: str, first: int, last: int, buffer: bytearray, steps: Steps) -> int:
        """Read bytes `[first, last)` of a file, and return their CRC-32."""
        crc = c_uint32()
        with memoryview(buffer) as block:
            for at in range(first, last, len(block)):
                view = block[: last - at]
                self.below.add_read(steps, file, at, view)
                steps.sum(view, crc, crc32)
            steps.run()
        return crc.value

    def _ranges_in(self, file: str, start: int, stop: int) -> Iterator[Checksum]:
        """Yield the byte ranges with a checksum that overlap `[start, stop)` of a file."""
        ranges = self._ranges.get(file)
        if ranges is None:
            return
        at = max(bisect_right(self._starts[file], start) - 1, 0)
        while at < len(ranges) and ranges[at].offset < stop:
            if ranges[at].offset + ranges[at].size > start:
                yield ranges[at]
            at += 1

    def _tally(self, checksum: Checksum) -> Tally | None:
        """Return the progress of a byte range; None if the range is already checked."""
        return None if checksum in self._results else self._tallies.setdefault(checksum, Tally())

    def _tensor_in(self, checksum: Checksum) -> str | None:
        """Return the name of the first tensor in a byte range."""
        start, stop = checksum.offset, checksum.end
        places = self._places.get(checksum.file, [])
        at = bisect_left(places, (start, ""))
        return places[at][1] if at < len(places) and places[at][0] < stop else None

    @cached_property
    def _places(self) -> dict[str, list[tuple[int, str]]]:
        """Return file name -> the file's tensors, as a sorted list of `(offset, tensor name)`."""
        places_by_file: dict[str, list[tuple[int, str]]] = {}
        for name, entry in self._entries.items():
            for extent in entry.extents:
                places_by_file.setdefault(extent.file, []).append((extent.offset, name))
        return {file: sorted(places) for file, places in places_by_file.items()}


def _extent(offset: int, width: int, loops: Sequence[Loop]) -> tuple[int, int]:
    """Return the total number of bytes of strided runs, and the file offset at which the last run ends."""
    total = width * prod(count for count, _, _ in loops)
    return total, offset + width + sum((count - 1) * step for count, step, _ in loops)


@lru_cache(1024)
def _cover(width: int, loops: tuple[tuple[int, int], ...]) -> int:
    """Return what runs would contribute to a checksum if all their bytes were 255; `loops` are `(count, step in the
    file)`.
    """
    octet = zlib.crc32(b"\xff") ^ zlib.crc32(b"\0")
    share = _geometric_sum(octet, crc_shift(1), width)
    for count, step in reversed(loops):
        share = _geometric_sum(share, crc_shift(step), count)
    return share


def _geometric_sum(share: int, power: int, count: int) -> int:
    """Return the polynomial `share` times the sum of `power**i` for i in `range(count)`."""
    total = 0
    # `power` to the n-th, where n is the number of terms summed so far; at first n is 0, so this is the polynomial 1.
    upto = 1 << 31
    for bit in f"{count:b}":
        total ^= _times(upto, total)
        upto = _times(upto, upto)
        if bit == "1":
            total ^= _times(upto, share)
            upto = _times(upto, power)
    return total


def with_checks(container: Container) -> Container:
    """Return the opened checkpoint with a storage that checks the checksums of byte ranges during reads."""
    return replace(container, storage=Witness(container.storage, container.checksums, container.entries))


def merge_parts(first: SummedRange, second: SummedRange) -> SummedRange:
    """Merge two adjacent parts of a byte range, and their checksums.

    The CRC-32 of A followed by B is the CRC of A, shifted by the length of B, XOR the CRC of B. A CRC is a polynomial
    modulo a fixed polynomial, and a shift by one byte multiplies it by x**8. zlib has this as `crc32_combine`, which
    Python lacks.
    """
    return first[0], second[1], _times(crc_shift(second[1] - second[0]), first[2]) ^ second[2]


@lru_cache(1024)
def crc_shift(size: int) -> int:
    """Return x**(8 * size) modulo the CRC polynomial; the highest bit of the result is the coefficient of the lowest
    power.
    """
    power, square = 1 << 31, 1 << 23
    while size:
        if size & 1:
            power = _times(square, power)
        square = _times(square, square)
        size >>= 1
    return power


def _times(first: int, second: int) -> int:
    """Return the product of two polynomials modulo the CRC polynomial."""
    # Carry-less multiplication: bits are coefficients, and the highest bit belongs to the lowest power.
    product = 0
    for bit in range(31, -1, -1):
        if first >> bit & 1:
            product ^= second
        second = second >> 1 ^ (_POLYNOMIAL if second & 1 else 0)
    return product


_MIN_BYTES = 1 << 12
"""Minimum number of bytes for which the compiled CRC-32 function is called."""
_CRC = ctypes.c_uint32


def crc32(data: memoryview, crc: int = 0) -> int:
    """Return the CRC-32 of `data`, continuing the checksum `crc`.

    Args:
        data: the bytes to add, contiguous in memory.
        crc: CRC-32 of the preceding bytes.
    """
    compiled = load_crc32() if data.nbytes >= _MIN_BYTES else None
    if compiled is None:
        return zlib.crc32(data, crc)
    octets, result = data.cast("B"), _CRC(crc)
    added = compiled(read_address(octets), len(octets), ctypes.byref(result))
    return zlib.crc32(octets[added:], result.value)


@cache
def load_crc32() -> Callable[..., int] | None:
    """Return the compiled CRC-32 function; None if it was not built, or does not match its source."""
    return compiled_function("transaxle_crc32", (ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(_CRC)), ctypes.c_int64)
