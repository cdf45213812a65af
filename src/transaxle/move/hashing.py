"""Hash items: while their bytes stream into files, or as they lie there."""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import cast

import numpy as np
import xxhash

from transaxle.formats.storage.copier import WRITING, Bytes, Running, Steps, new_hash, scatter
from transaxle.move.endpoint import NotingWritable, Readable, Scratch, Sink, Writable, note_parts
from transaxle.move.transfer import Transfer, active, clip
from transaxle.move.workers import Progress, unwatched

_BLOCK = 1 << 20
"""Bytes hashed at once: so few that they come from the processor's own memory."""
_BATCH = 1 << 24
"""Bytes read in one call, about."""
SPAN = 1 << 28
"""An item of more bytes is hashed in spans of so many, so that several workers can share it."""

WHOLE = sys.maxsize
"""A span that is longer than any item: for files, which are hashed from end to end."""


def span_ends(size: int) -> list[int]:
    """Return where the spans end in which an item of so many bytes is hashed."""
    return [*range(SPAN, size, SPAN), size]


def joined(hashes: Sequence[str]) -> str:
    """Return the hash of an item from those of its spans: of a single one it is that, else the hash of their text."""
    return hashes[0] if len(hashes) == 1 else digest("".join(hashes).encode())


class ItemHash:
    """The hash of an item whose spans come in any order, and the bytes of each in theirs.

    Args:
        span_size: bytes of a span; None: `SPAN`.
    """

    def __init__(self, span_size: int | None = None) -> None:
        self._size = span_size or SPAN
        self._spans: dict[int, Running] = {}

    def update(self, start: int, data: memoryview) -> None:
        """Take the bytes from `start` on."""
        for running, part in self._parts(start, data):
            running.update(part)

    def note(self, steps: Steps, start: int, data: memoryview) -> None:
        """List that the bytes from `start` on are taken."""
        for running, part in self._parts(start, data):
            steps.hash(running, part)

    def hexdigest(self) -> str:
        """Return the hash of all bytes that came."""
        found = [self._spans[number].hexdigest() for number in sorted(self._spans)]
        return joined(found or [digest(b"")])

    def _parts(self, start: int, data: memoryview) -> Iterator[tuple[Running, memoryview]]:
        """Cut bytes where spans end."""
        while len(data):
            number, inside = divmod(start, self._size)
            part = data[: self._size - inside]
            running = self._spans.get(number)
            if running is None:
                running = self._spans[number] = new_hash()
            yield running, part
            start, data = start + len(part), data[len(part) :]


class HashingFiles(Sink):
    """Files that take items, each at its places, and hash them on the way.

    Args:
        files: where the bytes go; None: nowhere, they are only hashed.
        places: for each item, by key, where its bytes go, as the transfers that would read them back (see
            `PlannedTensor.everywhere`).
        hashed: keys of the items whose bytes all come here.
        progress: told the number of bytes that were just taken.
        finish: told the key and the hash of each item that came whole.
        span_size: bytes of the spans in which items are hashed; None: `SPAN`.
    """

    def __init__(
        self,
        files: Writable | None,
        places: Sequence[Sequence[Transfer]],
        hashed: Container[int],
        progress: Progress = unwatched,
        finish: Callable[[int, str], None] | None = None,
        span_size: int | None = None,
    ) -> None:
        self.digests: dict[int, str] = {}
        """Hashes of the items that came whole, by key; they are not kept where `finish` is told them."""
        self.span = span_size or SPAN
        self.takes_notes = files is None or hasattr(files, "note_write")
        self._finish = finish or self.digests.__setitem__
        self._files = files
        self._places = places
        self._hashed = hashed
        self._progress = progress
        self._open: dict[int, ItemHash] = {}
        self._found: dict[int, Places] = {}

    def take(self, key: int, start: int, data: memoryview) -> None:
        """See `Sink`."""
        with Steps() as steps:
            self.note(steps, key, start, data)
            steps.run()

    def note(self, steps: Steps, key: int, start: int, data: memoryview) -> None:
        """See `Sink`."""
        if key in self._hashed:
            self._hash_of(key).note(steps, start, data)
        if self._files is not None and steps.most and self._places_of(key).are_plain and self.takes_notes:
            for file, offset, part in self.laid(key, start, data):
                cast("NotingWritable", self._files).note_write(steps, file, offset, part)
        elif self._files is not None:
            steps.call(partial(self._write, key, start, data), WRITING, len(data))
        steps.then(partial(self._progress, len(data)))

    def _write(self, key: int, start: int, data: memoryview) -> None:
        """Write bytes of an item that lie apart in files, go to another machine, or are alone in their list."""
        for file, offset, part in self.laid(key, start, data):
            cast("Writable", self._files).pwrite(file, offset, part)

    def laid(self, key: int, start: int, data: memoryview) -> Iterator[tuple[str, int, memoryview]]:
        """Yield where bytes of an item lie: file, offset, and the bytes as they lie there."""
        return self._places_of(key).laid(start, data)

    def end(self, key: int) -> None:
        """See `Sink`."""
        self._found.pop(key, None)
        if key in self._hashed:
            hashed = self._hash_of(key)
            del self._open[key]
            self._finish(key, hashed.hexdigest())

    def _places_of(self, key: int) -> Places:
        places = self._found.get(key)
        if places is None:
            places = self._found[key] = Places(self._places[key])
        return places

    def _hash_of(self, key: int) -> ItemHash:
        hashed = self._open.get(key)
        return self._open.setdefault(key, ItemHash(self.span)) if hashed is None else hashed


class Places:
    """Where an item's bytes lie in files; a tensor of all experts has a place for each of them.

    Args:
        places: as transfers that would read the item, in any order.
    """

    def __init__(self, places: Sequence[Transfer]) -> None:
        self._places = sorted(places, key=lambda place: place.target)
        self._starts = [place.target for place in self._places]
        self.are_plain = not any(place.loops for place in places)
        """Whether each place is one range of a file."""
        # Running maxima, as places may overlap: what several ranks hold has several.
        self._ends = list(accumulate((place.target_end for place in self._places), max))

    def laid(self, start: int, data: memoryview) -> Iterator[tuple[str, int, memoryview]]:
        """Yield where the bytes from `start` on lie: file, offset, and the bytes as they lie there."""
        stop = start + len(data)
        for place in self._places[bisect_right(self._ends, start) : bisect_left(self._starts, stop)]:
            if not place.loops:
                low, high = max(start, place.target), min(stop, place.target_end)
                if low < high:
                    yield place.file, place.source + low - place.target, data[low - start : high - start]
            elif place.target < stop and start < place.target_end:
                for part in clip(place, start, stop):
                    yield from _gathered(part, start, data)


def _gathered(part: Transfer, start: int, data: memoryview) -> Iterator[tuple[str, int, memoryview]]:
    """Yield the bytes of a transfer whose runs are next to each other in the file as one; otherwise run by run."""
    if part.source_span == part.size:
        held: Bytes = np.frombuffer(data, np.uint8)[part.target - start : part.target_end - start]
        together: Bytes = np.empty(part.size, np.uint8)
        turned = tuple((count, target, source) for count, source, target in part.loops)
        scatter(held, together, 0, part.width, turned)
        yield part.file, part.source, together.data
        return
    (count, source, target), *inner = part.loops
    for number in range(count):
        one = Transfer(
            part.file, part.source + number * source, part.target + number * target, part.width, tuple(inner)
        )
        if one.loops:
            yield from _gathered(one, start, data)
        else:
            yield one.file, one.source, data[one.target - start :][: one.width]


def digest(data: bytes | memoryview) -> str:
    """Return the xxh3-128 of bytes, in hex."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_in(storage: Readable, places: Sequence[Transfer], span_size: int | None = None) -> str:
    """Return the hash of an item as it lies in files, of spans of so many bytes; None: `SPAN`."""
    hashed = ItemHash(span_size)
    block: Bytes = np.empty(_BLOCK, np.uint8)
    scratch = Scratch(2 * _BLOCK)
    size = sum(place.size for place in places)
    ends = [*range(_BLOCK, size, _BLOCK), size] if size else []
    with Steps(_BATCH) as steps:
        for start, stop, parts in active(places, ends):
            note_parts(steps, storage, parts, start, block[: stop - start], scratch)
            hashed.note(steps, start, block[: stop - start].data)
            steps.breathe()
        steps.run()
    return hashed.hexdigest()
