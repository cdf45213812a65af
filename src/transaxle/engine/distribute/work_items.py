"""Work items: a plan divided into parts of about equally many bytes, each of which one worker does alone.

A tensor is never divided, as its hash is taken in order; the buffers that one tensor is encoded as stay together. What
may refuse a conversion comes first: copies that must be equal, values that may become infinite.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from transaxle.arguments import read_count
from transaxle.engine.plan.planned import Plan
from transaxle.formats.dtype import nbytes

_USUAL = 1 << 30
"""Bytes of an item where nobody says how many there are."""
_MOST = 4096
"""Items at most where nobody says how many there are."""

Ranges = tuple[tuple[int, int], ...]
"""First number and one past the last, of each range."""


class WorkItem(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a plan that one worker does alone."""

    number: int
    """Its place among the items."""
    nbytes: int
    """Bytes that it moves, or reads to compare and to measure."""
    tensors: Ranges = ()
    """Which tensors of the plan it writes."""
    checks: Ranges = ()
    """Which of the plan's copies it compares."""
    measures: Ranges = ()
    """Of which recoded tensors of the plan it measures the error."""
    files: tuple[str, ...] = ()
    """Target files that it writes into."""


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


def divide(plan: Plan, count: int | None = None) -> tuple[WorkItem, ...]:
    """Divide a plan into work items.

    Args:
        plan: what is to be done.
        count: how many items; some are empty where there are not so many tensors. None: one for each GiB.

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
    at = 0
    for size, kind, found in pieces:
        # The item in whose share of all bytes the middle of the piece lies.
        middle = at + size // 2
        number = min(count - 1, middle * count // total) if total else 0
        shares[number].setdefault(kind, []).extend(found)
        sizes[number] += size
        at += size
    return tuple(
        _item(plan, number, size, share) for number, (size, share) in enumerate(zip(sizes, shares, strict=True))
    )


def _item(plan: Plan, number: int, size: int, share: dict[str, list[int]]) -> WorkItem:
    tensors = share.get("tensors", [])
    files = dict.fromkeys(place.file for each in tensors for place in plan.tensors[each].everywhere)
    ranges = {kind: ranges_of(found) for kind, found in share.items()}
    return WorkItem(number=number, nbytes=size, files=tuple(files), **ranges)


def _pieces(plan: Plan) -> Iterator[tuple[int, str, Sequence[int]]]:
    """Yield what is not divided further: its bytes, its kind and its numbers."""
    for number, check in enumerate(plan.checks):
        yield 2 * check.nbytes, "checks", [number]
    for number, each in enumerate(plan.recoded):
        if each.action in ("cast", "decoded"):
            yield nbytes(each.dtype, each.shape), "measures", [number]
    together: dict[str, list[int]] = {}
    for number, tensor in enumerate(plan.tensors):
        if tensor.step is not None:
            together.setdefault(tensor.step.tensor, []).append(number)
    for number, tensor in enumerate(plan.tensors):
        group = [number] if tensor.step is None else together[tensor.step.tensor]
        if group[0] == number:
            yield sum(plan.tensors[each].nbytes for each in group), "tensors", group
