"""Work items: a plan divided into parts of about equally many bytes, each of which one worker does alone.

A tensor is divided only into the spans in which it is hashed, and only where it is copied as it is; the buffers that
one tensor is encoded as stay together. What may refuse a conversion comes first: copies that must be equal, values that
may become infinite.

An item says by numbers what it does of the plan. The moves behind the numbers are kept beside the draft, a range of one
file for each item, so that a worker reads those of its items and plans nothing. An item has their hash.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from transaxle.arguments import read_count
from transaxle.encodings.value_steps import MEASURED_BY_READING, Recoded
from transaxle.engine.copying.duplicate_checks import PlannedCheck
from transaxle.engine.plan.planned import Plan, PlannedTensor
from transaxle.formats.dtype import nbytes
from transaxle.formats.parts.part_layout import LEAST
from transaxle.formats.storage.storage import Storage
from transaxle.move.hashing import digest
from transaxle.move.transfer import Transfer

_USUAL = 1 << 30
"""Bytes of an item where nobody says how many there are."""
_MOST = 4096
"""Items at most where nobody says how many there are."""

Ranges = tuple[tuple[int, int], ...]
"""First number and one past the last, of each range."""
_Piece = tuple[int, str, Sequence[int]]
"""Bytes, kind and numbers of what is not divided further."""
_LITTLE = 8
"""What is less than one part in so many of an item is little beside it."""


class WorkItem(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a plan that one worker does alone."""

    number: int
    """Its place among the items."""
    nbytes: int
    """Bytes that it moves, or reads to compare and to measure."""
    tensors: Ranges = ()
    """Which units of the plan it writes: tensors, and spans of large ones."""
    checks: Ranges = ()
    """Which of the plan's copies it compares."""
    measures: Ranges = ()
    """Of which recoded tensors of the plan it measures the error."""
    files: tuple[str, ...] = ()
    """Target files that it writes into."""
    sources: tuple[str, ...] = ()
    """Source files that it reads, those first of which it reads most."""
    begin: int = 0
    """First byte of its moves in the file that holds those of all items."""
    size: int = 0
    """Bytes of its moves."""
    key: str = ""
    """Hash of its moves; empty where the file has none, and a worker must plan the whole conversion."""

    @property
    def magnitude(self) -> int:
        """A number that items of about one size share, those of the usual size among them."""
        return (3 * self.nbytes).bit_length()


class Moves(msgspec.Struct, frozen=True, kw_only=True):
    """What an item does, in full."""

    versions: tuple[tuple[str, str], ...] = ()
    """The source files that it reads, and the version of each that was planned for."""
    tensors: tuple[PlannedTensor, ...] = ()
    """What it writes."""
    checks: tuple[PlannedCheck, ...] = ()
    """What it compares."""
    measures: tuple[Recoded, ...] = ()
    """Of what it measures the error."""

    @property
    def band(self) -> int:
        """See `Plan.band`."""
        return max((tensor.step.band for tensor in self.tensors if tensor.step is not None), default=0)

    @property
    def text(self) -> bytes:
        """The moves as bytes; `parse_moves` reads them."""
        return msgspec.msgpack.encode(self)


def parse_moves(text: bytes, item: WorkItem) -> Moves | None:
    """Read the moves of an item; None where they are not those that were planned."""
    if not item.key or digest(text) != item.key:
        return None
    return msgspec.msgpack.decode(text, type=Moves)


def moves_of(plan: Plan, item: WorkItem, storage: Storage | None = None) -> Moves:
    """Return what an item of a plan does.

    Args:
        plan: the plan.
        item: the item.
        storage: the source, for the versions of its files; None: they are left out.

    Raises:
        TransaxleError: a file of the source cannot be read.
    """
    return Moves(
        versions=() if storage is None else tuple((name, storage.version(name)) for name in item.sources),
        tensors=tuple(plan.units[number] for number in numbers(item.tensors)),
        checks=tuple(plan.checks[number] for number in numbers(item.checks)),
        measures=tuple(plan.recoded[number] for number in numbers(item.measures)),
    )


def keyed(plan: Plan, items: Iterable[WorkItem], storage: Storage) -> tuple[WorkItem, ...]:
    """Return the items of a plan with the places and hashes of their moves; raises as `moves_of`."""
    found, at = [], 0
    for item in items:
        text = moves_of(plan, item, storage).text
        found.append(msgspec.structs.replace(item, begin=at, size=len(text), key=digest(text)))
        at += len(text)
    return tuple(found)


def numbers(ranges: Ranges) -> Iterator[int]:
    """Yield the numbers in ranges."""
    for first, stop in ranges:
        yield from range(first, stop)


def ranges_of(found: Iterable[int]) -> Ranges:
    """Inverse of `numbers`, for numbers in any order."""
    ranges: list[list[int]] = []
    for number in sorted(found):
        if ranges and ranges[-1][1] == number:
            ranges[-1][1] += 1
        else:
            ranges.append([number, number + 1])
    return tuple((first, stop) for first, stop in ranges)


def in_order(items: Iterable[WorkItem]) -> list[WorkItem]:
    """Return items in the order in which they should begin: what may refuse the conversion, then the large ones.

    A large item that is begun last would leave all others waiting. Items of about one size stay in the order of the
    files, so those that are done at the same time read and write near each other.
    """
    return sorted(items, key=lambda item: (not (item.checks or item.measures), -item.magnitude))


def divide(plan: Plan, count: int | None = None) -> tuple[WorkItem, ...]:
    """Divide a plan into work items.

    Args:
        plan: what is to be done.
        count: how many items; some are empty where there are not so many units. None: one for each GiB.

    Raises:
        TypeError: `count` is no number.
        ValueError: it is less than one.
    """
    pieces = list(_pieces(plan))
    total = sum(size for size, _, _ in pieces)
    if count is None:
        count = max(1, min(_MOST, len(pieces), -(-total // _USUAL)))
    count = read_count("items", count)
    shares: list[dict[str, list[int]]] = [{} for _ in range(count)]
    sizes = [0] * count
    for (size, kind, found), number in zip(pieces, _numbered(plan, pieces, count, total), strict=True):
        shares[number].setdefault(kind, []).extend(found)
        sizes[number] += size
    return tuple(
        _item(plan, number, size, share) for number, (size, share) in enumerate(zip(sizes, shares, strict=True))
    )


def _numbered(plan: Plan, pieces: Sequence[_Piece], count: int, total: int) -> list[int]:
    """Return the item of each piece: that in whose share of all bytes the middle of the piece lies.

    What an item would have of a file beside its neighbour is the neighbour's where it is less than services take as a
    part, and little beside an item: nobody could send it alone.
    """
    items, at = [], 0
    for size, _, _ in pieces:
        items.append(min(count - 1, (at + size // 2) * count // total) if total else 0)
        at += size
    little = min(LEAST, total // (_LITTLE * count))
    for file, group in itertools.groupby(range(len(pieces)), key=lambda at: _file(plan, pieces[at])):
        inside = list(group)
        for ordered, beyond in ((inside, inside[0] - 1), (inside[::-1], inside[-1] + 1)):
            item = items[ordered[0]]
            first = next((at for at in ordered if items[at] != item), None)  # of the neighbour
            if not file or first is None or not 0 <= beyond < len(items) or items[beyond] != item:
                continue
            stray = ordered[: ordered.index(first)]
            if sum(pieces[at][0] for at in stray) < little:
                for at in stray:
                    items[at] = items[first]
    return items


def _file(plan: Plan, piece: _Piece) -> str:
    """Return the file that a piece is written to; empty where it is no tensor."""
    _, kind, found = piece
    return plan.units[found[0]].places[0].file if kind == "tensors" and plan.units[found[0]].places else ""


def _item(plan: Plan, number: int, size: int, share: dict[str, list[int]]) -> WorkItem:
    tensors = share.get("tensors", [])
    files = dict.fromkeys(place.file for each in tensors for place in plan.units[each].everywhere)
    reads: dict[str, int] = {}
    for transfer in _reads(plan, share):
        reads[transfer.file] = reads.get(transfer.file, 0) + transfer.size
    return WorkItem(
        number=number,
        nbytes=size,
        tensors=ranges_of(tensors),
        checks=ranges_of(share.get("checks", ())),
        measures=ranges_of(share.get("measures", ())),
        files=tuple(files),
        sources=tuple(sorted(reads, key=lambda file: -reads[file])),
    )


def _reads(plan: Plan, share: dict[str, list[int]]) -> Iterator[Transfer]:
    for each in share.get("tensors", ()):
        yield from plan.units[each].transfers
    for each in share.get("checks", ()):
        yield from plan.checks[each].first
        yield from plan.checks[each].second


def _pieces(plan: Plan) -> Iterator[_Piece]:
    """Yield what is not divided further."""
    for number, check in enumerate(plan.checks):
        yield 2 * check.nbytes, "checks", [number]
    for number, each in enumerate(plan.recoded):
        if each.action in MEASURED_BY_READING:
            yield nbytes(each.dtype, each.shape), "measures", [number]
    together: dict[str, list[int]] = {}
    for number, tensor in enumerate(plan.units):
        if tensor.step is not None:
            together.setdefault(tensor.step.tensor, []).append(number)
    for number, tensor in enumerate(plan.units):
        group = [number] if tensor.step is None else together[tensor.step.tensor]
        if group[0] == number:
            yield sum(plan.units[each].nbytes for each in group), "tensors", group
