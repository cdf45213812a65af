"""Hash items: while their bytes stream into files, or as they lie there."""

from __future__ import annotations

import ctypes
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Iterator, Sequence
from functools import cache, partial
from importlib import import_module
from itertools import accumulate
from typing import Protocol, cast

import xxhash

from transaxle.formats.storage.compiled import StepBatch, address_to_read
from transaxle.move.endpoint import Bytes, NotingWritable, Readable, Sink, Writable
from transaxle.move.strided_fill import Scratch, produce, scatter
from transaxle.move.transfer import Transfer, active, clip
from transaxle.move.workers import Progress, unwatched
from transaxle.spans import span

_BLOCK = 1 << 20
"""Bytes hashed at once: so few that they come from the processor's own memory."""
SPAN = 1 << 28
"""An item of more bytes is hashed in spans of so many, so that several workers can share it."""

_PROBE = bytes(range(251)) * 9
"""Bytes that tell whether the library hashes as its package does."""
WHOLE = sys.maxsize
"""A span that is longer than any item: for files, which are hashed from end to end."""


def span_ends(size: int) -> list[int]:
    """Return where the spans end in which an item of so many bytes is hashed."""
    return [*range(SPAN, size, SPAN), size]


def joined(hashes: Sequence[str]) -> str:
    """Return the hash of an item from those of its spans: of a single one it is that, else the hash of their text."""
    return hashes[0] if len(hashes) == 1 else digest("".join(hashes).encode())


class Running(Protocol):
    """A hash of the bytes so far."""

    def update(self, data: memoryview, /) -> None:
        """Take the bytes that come next."""

    def hexdigest(self) -> str:
        """Return the hash, in hex."""


class _Digest(ctypes.Structure):
    _fields_ = (("low", ctypes.c_uint64), ("high", ctypes.c_uint64))


class _Library:
    """The C library inside the `xxhash` package, so that `runs.c` can hash what it has just read.

    Raises:
        AttributeError: a build of the package hides its functions.
        ImportError, OSError: it has no such library, or one that cannot be loaded again.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(import_module("xxhash._xxhash").__file__)
        self.create, self.free = library.XXH3_createState, library.XXH3_freeState
        self.reset = library.XXH3_128bits_reset
        # The second one takes the widest registers of this processor, where it is there.
        self.update = getattr(library, "XXH3_128bits_update_dispatch", None) or library.XXH3_128bits_update
        self.digest = library.XXH3_128bits_digest
        self.create.argtypes, self.create.restype = (), ctypes.c_void_p
        self.free.argtypes = self.reset.argtypes = (ctypes.c_void_p,)
        self.update.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
        self.digest.argtypes, self.digest.restype = (ctypes.c_void_p,), _Digest
        self.address_of_update: int = ctypes.cast(self.update, ctypes.c_void_p).value or 0


class Batched:
    """A hash that a batch can take bytes into."""

    def __init__(self, library: _Library) -> None:
        self._library = library
        self._state = library.create()
        if not self._state:
            raise MemoryError
        library.reset(self._state)

    def __del__(self) -> None:
        self._library.free(self._state)

    def update(self, data: memoryview) -> None:
        """Take the bytes that come next."""
        if data.nbytes:
            self._library.update(self._state, address_to_read(data), data.nbytes)

    def note(self, batch: StepBatch, data: memoryview) -> None:
        """Take the bytes that come next when a batch is carried out: writable, contiguous and not empty."""
        batch.hash(self._state, self._library.address_of_update, data, lambda: self.update(data))

    def hexdigest(self) -> str:
        """Return the hash, in hex."""
        found = self._library.digest(self._state)
        return f"{found.high:016x}{found.low:016x}"


@cache
def _library() -> _Library | None:
    """Return the library, if it is there and hashes as the package does."""
    try:
        found = _Library()
    except (AttributeError, ImportError, OSError):
        return None
    probe = Batched(found)
    for part in (_PROBE[:7], _PROBE[7:]):
        probe.update(memoryview(bytearray(part)))
    return found if probe.hexdigest() == xxhash.xxh3_128_hexdigest(_PROBE) else None


def _new_hash() -> Running:
    """Return the hash of no bytes: for batches, where the library is to be had."""
    library = _library()
    return xxhash.xxh3_128() if library is None else Batched(library)


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
        for span_hash, part in self._parts(start, data, xxhash.xxh3_128):
            span_hash.update(part)

    def note(self, batch: StepBatch, start: int, data: memoryview) -> None:
        """Take the bytes from `start` on when a batch is carried out."""
        for span_hash, part in self._parts(start, data, _new_hash):
            if isinstance(span_hash, Batched):
                span_hash.note(batch, part)
            else:
                batch.run()
                span_hash.update(part)

    def hexdigest(self) -> str:
        """Return the hash of all bytes that came."""
        found = [self._spans[number].hexdigest() for number in sorted(self._spans)]
        return joined(found or [digest(b"")])

    def _parts(self, start: int, data: memoryview, new: Callable[[], Running]) -> Iterator[tuple[Running, memoryview]]:
        """Cut bytes where spans end."""
        while len(data):
            number, inside = divmod(start, self._size)
            part = data[: self._size - inside]
            span_hash = self._spans.get(number)
            if span_hash is None:
                span_hash = self._spans[number] = new()
            yield span_hash, part
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
        if self._files is not None:
            with span("write", len(data)):
                for file, offset, part in self.laid(key, start, data):
                    self._files.pwrite(file, offset, part)
        if key in self._hashed:
            with span("hash", len(data)):
                self._hash_of(key).update(start, data)
        self._progress(len(data))

    def note(self, batch: StepBatch, key: int, start: int, data: memoryview) -> None:
        """See `Sink`."""
        files = cast("NotingWritable | None", self._files)
        if files is not None and not self._places_of(key).are_plain:
            batch.run()
            self.take(key, start, data)
            return
        if key in self._hashed:
            self._hash_of(key).note(batch, start, data)
        if files is not None:
            for file, offset, part in self.laid(key, start, data):
                files.note_write(batch, file, offset, part)
        batch.then(partial(self._progress, len(data)))

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
    import numpy as np

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


def digest_in(storage: Readable, places: Sequence[Transfer], span_size: int | None = None) -> str:
    """Return the hash of an item as it lies in files, of spans of so many bytes; None: `SPAN`."""
    import numpy as np

    hashed = ItemHash(span_size)
    block: Bytes = np.empty(_BLOCK, np.uint8)
    scratch = Scratch(2 * _BLOCK)
    size = sum(place.size for place in places)
    ends = [*range(_BLOCK, size, _BLOCK), size] if size else []
    for start, stop, parts in active(places, ends):
        produce(storage, parts, start, block[: stop - start], scratch)
        hashed.update(start, block[: stop - start].data)
    return hashed.hexdigest()
