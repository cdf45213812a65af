"""Hash items: while their bytes stream into files, or as they lie there."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence

import xxhash

from transaxle.move.endpoint import Readable, Sink, Writable
from transaxle.move.transfer import Transfer
from transaxle.move.workers import Progress, unwatched

_BLOCK = 1 << 20
"""Bytes hashed at once: so few that they come from the processor's own memory."""


class HashingFiles(Sink):
    """Files that take items, each at its places, and hash them on the way.

    Args:
        files: where the bytes go; None: nowhere, they are only hashed.
        places: for each item, by key, the consecutive runs of it and where these lie (see `PlannedTensor.places`).
        hashed: keys of the items whose bytes all come here, in order.
        progress: told the number of bytes that were just taken.
        finish: told the key and the hash of each item that came whole.
    """

    def __init__(
        self,
        files: Writable | None,
        places: Sequence[Sequence[Transfer]],
        hashed: Container[int],
        progress: Progress = unwatched,
        finish: Callable[[int, str], None] | None = None,
    ) -> None:
        self.digests: dict[int, str] = {}
        """xxh3-128 of the items that came whole, by key; they are not kept where `finish` is told them."""
        self._finish = finish or self.digests.__setitem__
        self._files = files
        self._places = places
        self._hashed = hashed
        self._progress = progress
        self._open: dict[int, xxhash.xxh3_128] = {}

    def take(self, key: int, start: int, data: memoryview) -> None:
        """See `Sink`."""
        if self._files is not None:
            for place in within(self._places[key], start, start + len(data)):
                self._files.pwrite(place.file, place.source, data[place.target - start :][: place.width])
        if key in self._hashed:
            self._open.setdefault(key, xxhash.xxh3_128()).update(data)
        self._progress(len(data))

    def end(self, key: int) -> None:
        """See `Sink`."""
        if key in self._hashed:
            self._finish(key, self._open.pop(key, xxhash.xxh3_128()).hexdigest())


def within(places: Iterable[Transfer], start: int, stop: int) -> Iterator[Transfer]:
    """Yield the parts of an item's places that hold its bytes `[start, stop)`."""
    for place in places:
        low, high = max(start, place.target), min(stop, place.target_end)
        if low < high:
            yield Transfer(place.file, place.source + low - place.target, low, high - low)


def digest(data: bytes | memoryview) -> str:
    """Return the xxh3-128 of bytes, in hex."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_in(storage: Readable, places: Iterable[Transfer]) -> str:
    """Return the hash of an item as it lies in files."""
    hashed = xxhash.xxh3_128()
    block = memoryview(bytearray(_BLOCK))
    for place in places:
        for start in range(0, place.width, _BLOCK):
            view = block[: min(_BLOCK, place.width - start)]
            storage.read_into(place.file, place.source + start, view)
            hashed.update(view)
    return hashed.hexdigest()
