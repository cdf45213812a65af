"""The parts in which several workers send a file, cut where the bytes of one worker end and those of the next begin.

Services take parts of unequal lengths, but none below a least one, except the last. So what one item of work writes
without a gap is cut into parts that only this item sends. Where it writes less, or where bytes stand that are known at
the very end, a part is shared: each item leaves its bytes of it as an object beside the target, and the driver joins
them. A tensor is never divided between workers.

A worker sends several parts at once, and has nothing left for the first that is over while the others still go. So an
item's parts are about as many as fill all its connections to the end.

Some services want parts of one length. Where one process sends all, and joins little, all parts but the last have it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Self

import msgspec
import xxhash

from transaxle.errors import refuse

LEAST = 5 << 20
"""Bytes that every part but the last must have."""
LARGEST = 5 << 30
"""Bytes that no part may have more of."""
MOST = 10_000
"""Parts of a file at most."""

Extent = tuple[int, int, int]
"""First byte of a file, one past the last, and the number of the item that writes them."""


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of a file."""

    start: int
    """First byte."""
    stop: int
    """One past the last."""
    item: int | None
    """The item that has all its bytes and sends it; None: it is joined at the commit."""


class FileParts(msgspec.Struct, frozen=True):
    """How a file is sent."""

    parts: tuple[Part, ...]
    """In order; the first one has number 1."""
    extents: tuple[Extent, ...]
    """What the items write, in order; all the rest is known to the driver."""

    def of_item(self, item: int) -> Iterator[tuple[int, Part]]:
        """Yield the parts with numbers that an item sends."""
        return ((number, part) for number, part in enumerate(self.parts, 1) if part.item == item)

    @property
    def joined(self) -> Iterator[tuple[int, Part]]:
        """The parts with numbers that are joined at the commit."""
        return ((number, part) for number, part in enumerate(self.parts, 1) if part.item is None)

    def shares(self, part: Part) -> Iterator[Extent]:
        """Yield what items write of a part, in order."""
        for start, stop, item in self.extents:
            if start < part.stop and part.start < stop:
                yield max(start, part.start), min(stop, part.stop), item


class SentPart(msgspec.Struct, frozen=True, array_like=True):
    """A part that the service has taken."""

    file: str
    """File of the target."""
    number: int
    """Its number, from 1."""
    etag: str
    """What the service tagged it with."""
    size: int
    """Its bytes."""
    hash: str
    """xxh3-128 of them."""


class KeptShare(msgspec.Struct, frozen=True, array_like=True):
    """What an item wrote of a part that others write too, kept as an object beside the target."""

    file: str
    """File of the target."""
    number: int
    """Number of the part."""
    name: str
    """The object."""
    hash: str
    """xxh3-128 of its bytes."""


class Fitting(msgspec.Struct, frozen=True):
    """How the parts of an item fit the connections over which they are sent at once: those sent last end together."""

    size: int
    """Bytes of a usual part."""
    before: int = 0
    """What the item has written before."""

    @classmethod
    def of(cls, size: int, usual: int, together: int) -> Self:
        """Return that of an item.

        Args:
            size: bytes that it writes.
            usual: bytes of a part at most, unless some would be too small.
            together: parts that are sent at once.
        """
        rounds = max(1, min(-(-size // (together * usual)), size // (together * LEAST)))
        return cls(max(LEAST, -(-size // (together * rounds))))

    def after(self, size: int) -> Self:
        """Return it for what follows more bytes."""
        return msgspec.structs.replace(self, before=self.before + size)

    def count(self, size: int) -> int:
        """Return how many parts come of the bytes that follow."""
        return round((self.before + size) / self.size) - round(self.before / self.size)


def laid_out(
    size: int,
    extents: Iterable[Extent],
    unknown: Sequence[tuple[int, int]],
    usual: int,
    *,
    file: str,
    least: int = LEAST,
    fitting: Mapping[int, Fitting] | None = None,
    even: bool = False,
) -> FileParts:
    """Divide a file into parts.

    Args:
        size: bytes of the file.
        extents: what the items write, in any order; each byte belongs to one item.
        unknown: ranges that only the driver knows, and only at the end; what else no item writes is known to all.
        usual: bytes of a usual part.
        file: name of the file, for errors.
        least: bytes that every part but the last must have.
        fitting: item -> how its parts fit its connections; without, they are of the usual size or larger.
        even: all parts but the last have one length.

    Raises:
        Refused: UNSUPPORTED where two items write one byte, or a part would be too large.
    """
    own = _joined(sorted(extents))
    for (_, stop, _), (start, _, _) in itertools.pairwise(own):
        if start < stop:
            raise refuse("UNSUPPORTED", f"two items of work write byte {start}", file=file, hint="Use one worker.")
    least = max(least, -(-size // MOST))
    usual = max(usual, least)
    runs = _runs(size, own, sorted(unknown))
    parts = tuple(_even_parts(runs, size, usual) if even else _parts(runs, size, usual, least, fitting or {}))
    if any(part.stop - part.start > LARGEST for part in parts):
        message = f"a part would have more than the {LARGEST:,} bytes that services take"
        raise refuse("UNSUPPORTED", message, file=file, hint="Write smaller files: --shard-size (shard_size=).")
    return FileParts(parts, tuple(own))


def _joined(extents: Iterable[Extent]) -> list[Extent]:
    """Join neighbours of one item."""
    joined: list[Extent] = []
    for start, stop, item in extents:
        if joined and joined[-1][1] == start and joined[-1][2] == item:
            joined[-1] = joined[-1][0], stop, item
        elif start < stop:
            joined.append((start, stop, item))
    return joined


def _runs(size: int, own: Sequence[Extent], unknown: Sequence[tuple[int, int]]) -> list[tuple[int, int, int | None]]:
    """Cover a file with runs that an item can send, or nobody (None): what all know goes to a neighbour."""
    runs: list[tuple[int, int, int | None]] = []
    at = 0
    nobody = [(start, stop, None) for start, stop in unknown]
    for start, stop, item in sorted([*own, *nobody], key=lambda each: each[:2]):
        # Known bytes before a run are sent by whoever sends the run.
        start = at if item is not None or not runs else start
        if runs and at < start:
            runs[-1] = runs[-1][0], start, runs[-1][2]
        if runs and runs[-1][2] == item:
            runs[-1] = runs[-1][0], stop, item
        else:
            runs.append((start, stop, item))
        at = stop
    if runs:
        runs[-1] = runs[-1][0], size, runs[-1][2]
    return runs


def _parts(
    runs: Iterable[tuple[int, int, int | None]], size: int, usual: int, least: int, fitting: Mapping[int, Fitting]
) -> Iterator[Part]:
    begun = 0
    """Where the part begins that is not complete yet."""
    items: set[int | None] = set()
    """Whose bytes are in it."""
    fitting = dict(fitting)
    for start, stop, item in runs:
        if items and start - begun < least:
            borrowed = min(stop, begun + least)
            if stop - borrowed < least and stop < size:
                borrowed = stop
            items.add(item)
        else:
            borrowed = start
        if items and borrowed - begun >= least:
            yield _of(begun, borrowed, items)
            begun, items = borrowed, set()
        if items or borrowed == stop:
            continue
        if item is None or (stop - begun < least and stop < size):
            items = {item}
            continue
        count = (stop - begun) // usual
        if item in fitting:
            count = min(fitting[item].count(stop - begun), (stop - begun) // least)
            fitting[item] = fitting[item].after(stop - begun)
        yield from _cut(begun, stop, item, count)
        begun = stop
    if items:
        yield _of(begun, size, items)


def _even_parts(runs: Sequence[tuple[int, int, int | None]], size: int, usual: int) -> Iterator[Part]:
    first = 0
    for start in range(0, size, usual):
        stop = min(size, start + usual)
        while runs[first][1] <= start:
            first += 1
        last = first
        while runs[last][1] < stop:
            last += 1
        yield _of(start, stop, {item for _, _, item in runs[first : last + 1]})


def _of(start: int, stop: int, items: set[int | None]) -> Part:
    return Part(start, stop, next(iter(items)) if len(items) == 1 else None)


def _cut(start: int, stop: int, item: int, count: int) -> Iterator[Part]:
    """Cut what one item sends into about equal parts."""
    count = max(1, count)
    cuts = [start + (stop - start) * number // count for number in range(count + 1)]
    for first, last in itertools.pairwise(cuts):
        yield Part(first, last, item)


def layout_digest(layout: Mapping[str, FileParts]) -> str:
    """Return a hash that is the same for equal layouts only."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode({name: layout[name] for name in sorted(layout)}))
