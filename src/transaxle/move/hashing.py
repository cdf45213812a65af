"""Hash items: while their bytes stream into files, or as they lie there."""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import accumulate

import numpy as np
import xxhash

from transaxle.move.endpoint import Bytes, Readable, Sink, Writable
from transaxle.move.strided_fill import Scratch, produce, scatter
from transaxle.move.transfer import Transfer, active, clip
from transaxle.move.workers import Progress, unwatched
from transaxle.spans import span

_BLOCK = 1 << 20
"""Bytes hashed at once: so few that they come from the processor's own memory."""
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
    """The hash of an item whose bytes come in order.

    Args:
        span_size: bytes of a span; None: `SPAN`.
    """

    def __init__(self, span_size: int | None = None) -> None:
        self._size = span_size or SPAN
        self._left = self._size
        self._open = xxhash.xxh3_128()
        self._hashes: list[str] = []

    def update(self, data: memoryview) -> None:
        """Take the bytes that come next."""
        while len(data) > self._left:  # a span that is full ends only where more bytes come
            self._open.update(data[: self._left])
            self._hashes.append(self._open.hexdigest())
            data, self._open, self._left = data[self._left :], xxhash.xxh3_128(), self._size
        self._open.update(data)
        self._left -= len(data)

    def hexdigest(self) -> str:
        """Return the hash of all bytes that came."""
        return joined([*self._hashes, self._open.hexdigest()])


class HashingFiles(Sink):
    """Files that take items, each at its places, and hash them on the way.

    Several threads may lay one item's bytes; only the hash must follow them in order.

    Args:
        files: where the bytes go; None: nowhere, they are only hashed.
        places: for each item, by key, where its bytes go, as the transfers that would read them back (see
            `PlannedTensor.everywhere`).
        hashed: keys of the items whose bytes all come here, in order.
        progress: told the number of bytes that were just taken.
        finish: told the key and the hash of each item that came whole.
        span_size: bytes of the spans in which items are hashed; None: `SPAN`.
    """

    in_turns = True

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
        self._finish = finish or self.digests.__setitem__
        self._files = files
        self._places = places
        self._hashed = hashed
        self._progress = progress
        self._span_size = span_size
        self._open: dict[int, ItemHash] = {}
        self._found: dict[int, Places] = {}

    def take(self, key: int, start: int, data: memoryview) -> None:
        """See `Sink`."""
        self.lay(key, start, data)
        self.follow(key, start, data)

    def lay(self, key: int, start: int, data: memoryview) -> None:
        """See `Sink`."""
        if self._files is not None:
            with span("write", len(data)):
                for file, offset, part in self.laid(key, start, data):
                    self._files.pwrite(file, offset, part)

    def follow(self, key: int, _start: int, data: memoryview) -> None:
        """See `Sink`."""
        if key in self._hashed:
            with span("hash", len(data)):
                self._hash_of(key).update(data)
        self._progress(len(data))

    def laid(self, key: int, start: int, data: memoryview) -> Iterator[tuple[str, int, memoryview]]:
        """Yield where bytes of an item lie: file, offset, and the bytes as they lie there."""
        places = self._found.get(key)
        if places is None:
            places = self._found[key] = Places(self._places[key])
        return places.laid(start, data)

    def end(self, key: int) -> None:
        """See `Sink`."""
        self._found.pop(key, None)
        if key in self._hashed:
            hashed = self._hash_of(key)
            del self._open[key]
            self._finish(key, hashed.hexdigest())

    def _hash_of(self, key: int) -> ItemHash:
        if key not in self._open:
            self._open[key] = ItemHash(self._span_size)
        return self._open[key]


class Places:
    """Where an item's bytes lie in files; a tensor of all experts has a place for each of them.

    Args:
        places: as transfers that would read the item, in any order.
    """

    def __init__(self, places: Sequence[Transfer]) -> None:
        self._places = sorted(places, key=lambda place: place.target)
        self._starts = [place.target for place in self._places]
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
        scatter(held, Transfer(part.file, 0, 0, part.width, turned), together, 0)
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


def digest_in(storage: Readable, places: Sequence[Transfer]) -> str:
    """Return the hash of an item as it lies in files."""
    hashed = ItemHash()
    block: Bytes = np.empty(_BLOCK, np.uint8)
    scratch = Scratch(2 * _BLOCK)
    size = sum(place.size for place in places)
    ends = [*range(_BLOCK, size, _BLOCK), size] if size else []
    for start, stop, parts in active(places, ends):
        produce(storage, parts, start, block[: stop - start], scratch)
        hashed.update(block[: stop - start].data)
    return hashed.hexdigest()
