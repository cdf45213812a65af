"""Which parameters every flat buffer holds: pipeline stages, and the model chunks of each, share out the model.

Groups of data-parallel ranks are numbered: tensor-parallel ranks first, then expert-parallel ones, then stages. A
stage's model chunks are consecutive parts of the model, the first chunks of all stages coming before the second ones.
How many layers each has is not stored, and the sizes of its buffers tell it: every buffer must hold exactly its
parameters, and nothing may be left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from transaxle.formats.megatron.flat_buckets.bucket_layout import FlatBuffer, Placed, laid_out
from transaxle.formats.megatron.flat_buckets.parameter_order import Order
from transaxle.formats.megatron.flat_buckets.rank_parameters import LocalParameter, Model

_GAP = 64
"""Elements of a gap between two parameters at most."""
Groups = Mapping[int, Sequence[FlatBuffer]]
"""Number of a group of data-parallel ranks -> its buffers, in the order in which ranks have them."""


class Held(NamedTuple):
    """What a buffer holds."""

    buffer: FlatBuffer
    rank: int
    """Of the ranks among which its parameters are cut."""
    placed: Sequence[Placed]


class NoFitError(Exception):
    """Says which buffers hold something else than the parameters that they should."""


@dataclass
class _Unread:
    """Buffers of each group that are still to be read."""

    groups: Groups
    taken: dict[int, int] = field(default_factory=dict)

    def next(self, group: int, number: int) -> Sequence[FlatBuffer]:
        """Return the next buffers of a group, at most as many."""
        at = self.taken.get(group, 0)
        return self.groups.get(group, ())[at : at + number]

    def take(self, group: int, number: int) -> None:
        """Go on to the buffers after those."""
        self.taken[group] = self.taken.get(group, 0) + number

    def left(self) -> FlatBuffer | None:
        """Return the first buffer that was not read."""
        rest = (
            buffer for group, listed in sorted(self.groups.items()) for buffer in listed[self.taken.get(group, 0) :]
        )
        return next(rest, None)


def shared_out(model: Model, order: Order, dense: Groups, experts: Groups) -> list[Held]:
    """Find out what every buffer holds.

    Args:
        model: the parameters.
        order: in which modules register them.
        dense: groups with the parameters that expert-parallel ranks have alike; of experts too, where none are apart.
        experts: groups of expert-parallel ranks.

    Raises:
        NoFitError: the buffers hold something else.
        UnknownOrderError: see `parameter_order.key`.
    """
    ranks = model.ranks[False]
    stages, rest = divmod(len(dense), ranks)
    if rest or sorted(dense) != list(range(len(dense))):
        raise NoFitError(f"there are {len(dense)} groups of ranks, and parameters are cut among {ranks}")
    among = False if experts else None
    if among is None and model.experts and model.ranks[True] != ranks:
        raise NoFitError(
            "experts are cut among other ranks than the rest of the model, and have no buffers of their own"
        )
    held: list[Held] = []
    chunks = list(_chunks(model, order, dense, stages, among, held))
    if not experts:
        return held
    problem = NoFitError("no number of expert-parallel ranks fits")
    for parallel in _divisors(model.experts):
        try:
            return [*held, *_of_experts(model, order, experts, chunks, stages, parallel)]
        except NoFitError as error:
            problem = error
    raise problem


class _Chunk(NamedTuple):
    """Consecutive parts of the model that a stage has."""

    stage: int
    run: range


def _chunks(
    model: Model, order: Order, dense: Groups, stages: int, among: bool | None, held: list[Held]
) -> Iterator[_Chunk]:
    """Yield the model chunks of all stages in the order of the model, and add what the buffers of each hold."""
    unread, ranks = _Unread(dense), model.ranks[False]
    first = 0
    while first < len(model.items):
        begun = first
        for stage in range(stages):
            groups = range(stage * ranks, (stage + 1) * ranks)
            if not unread.next(groups[0], 1):
                continue
            stop, found = _fitting(model, order, first, groups, unread, among)
            held.extend(found)
            yield _Chunk(stage, range(first, stop))
            first = stop
        if first == begun and unread.left() is None:
            break
    if first < len(model.items) and any(_has(model, order, at, among) for at in range(first, len(model.items))):
        raise NoFitError(f"no buffer holds the parameters of the {model.items[first].kind} part of the model")
    left = unread.left()
    if left is not None:
        raise NoFitError(f"{left.key} holds more than the model has")


def _has(model: Model, order: Order, at: int, among: bool | None) -> bool:
    return bool(model.local(range(at, at + 1), order, among=among))


def _fitting(
    model: Model, order: Order, first: int, groups: range, unread: _Unread, among: bool | None
) -> tuple[int, list[Held]]:
    """Return how far the parts go that the next model chunk of a stage has, and what its buffers hold.

    Raises:
        NoFitError: no number of parts is what they hold.
    """
    head = unread.next(groups[0], 1)[0]
    elements = parameters = 0
    for stop in range(first + 1, len(model.items) + 1):
        added = model.local(range(stop - 1, stop), order, among=among)
        elements += sum(each.size for each in added if each.stored.entry.dtype == head.dtype)
        parameters += len(added)
        if elements > head.size:
            break
        # Where an embedding is copied from another stage, it is not among these.
        if elements + parameters * _GAP < head.size and not model.items[stop - 1].may_copy:
            continue
        found = _fit(model.local(range(first, stop), order, among=among), groups, unread)
        if found is not None:
            while not first and stop < len(model.items) and not model.items[stop].parameters:
                stop += 1  # an output that is tied to the embedding of this very stage
            return stop, found
    raise NoFitError(f"{head.key} does not hold consecutive parts of the model from number {first} on")


def _fit(parameters: Sequence[LocalParameter], groups: range, unread: _Unread) -> list[Held] | None:
    """Return what the next buffers of ranks hold that have the same parameters, and take them; None if others."""
    by_dtype: dict[str, list[LocalParameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.stored.entry.dtype, []).append(parameter)
    held: list[Held] = []
    for rank, group in enumerate(groups):
        buffers = unread.next(group, len(by_dtype))
        if sorted(buffer.dtype for buffer in buffers) != sorted(by_dtype):
            return None
        for buffer in buffers:
            placed = laid_out(by_dtype[buffer.dtype], buffer)
            if placed is None:
                return None
            held.append(Held(buffer, rank, placed))
    for group in groups:
        unread.take(group, len(by_dtype))
    return held


def _of_experts(
    model: Model, order: Order, groups: Groups, chunks: Sequence[_Chunk], stages: int, parallel: int
) -> list[Held]:
    """Return what the buffers of experts hold, if so many ranks share them out.

    Raises:
        NoFitError: they hold something else.
    """
    unread, ranks = _Unread(groups), model.ranks[True]
    if max(groups) >= ranks * parallel * stages:
        raise NoFitError(f"there are {max(groups) + 1} groups of ranks for experts")
    each = model.experts // parallel
    held: list[Held] = []
    for stage, run in chunks:
        for number in range(parallel):
            first = ranks * (number + parallel * stage)
            experts = range(number * each, (number + 1) * each)
            parameters = model.local(run, order, experts, among=True)
            found = _fit(parameters, range(first, first + ranks), unread)
            if found is None:
                raise NoFitError(f"the buffers of experts {experts.start} to {experts.stop - 1} hold something else")
            held.extend(found)
    left = unread.left()
    if left is not None:
        raise NoFitError(f"{left.key} holds more than the model's experts")
    return held


def _divisors(number: int) -> Iterator[int]:
    return (each for each in range(1, number + 1) if not number % each)
