"""Which parameters every flat buffer holds: pipeline stages, and the model chunks of each, share out the model.

Groups of data-parallel ranks are numbered: tensor-parallel ranks first, then expert-parallel ones, then stages. A
stage's model chunks are consecutive parts of the model, the first chunks of all stages coming before the second ones.
How many layers each has is not stored, and the sizes of its buffers tell it: every buffer must hold exactly its
parameters, and nothing may be left.

The flat buckets that a folder holds, by the names of its items.

    chained_1.optimizer.distributed.dp_group_idx_3.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg
    chained_1.optimizer.distributed.dp_group_idx_3.per_bucket_numel/shard_0_1          elements with padding
    chained_1.optimizer.distributed.dp_group_idx_3.optimizer/shard_0_1                 settings

Where a rank has experts that are not on every rank, their optimizer is the last of those that are chained; a rank
without any has one optimizer, and no `chained_` before its items.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from transaxle.formats.catalog import Entry
from transaxle.formats.megatron.bucket_layout import Bucket, FlatBuffer, Placed, laid_out
from transaxle.formats.megatron.rank_parameters import LocalParameter, Model, Order, UnknownOrderError
from transaxle.formats.pickled.descriptors import CODES, DType, Key, TensorRef
from transaxle.formats.torch_file.saved import StoredStorage, ViewFault, place

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


_GROUP = r"(?:chained_(?P<chain>\d{1,4})\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d{1,7})\."
_BUCKET = re.compile(
    rf"(?P<buffer>{_GROUP}gbuf_idx_(?P<number>\d{{1,5}})\.dtype_\(torch\.(?P<dtype>\w+), torch\.\w+\))"
    r"\.bucket_idx_(?P<bucket>\d{1,7})\.(?P<state>\w+)"
)
_OBJECT = re.compile(rf"{_GROUP}(?P<what>\w+)/shard_0_1")
_PADDED, _UNPADDED = "per_bucket_numel", "per_bucket_numel_unpadded"
GATHERED = "param_state"
"""What a group calls the state of its buffers where it is in one object."""
_COALESCED, _COUNT = "buckets_coalesced", "numel_unpadded"
_LEAST_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000

Objects = Mapping[tuple[int, int, str], Any]
"""What groups have besides buckets: optimizer, group and name -> value, as the interpreter describes it."""


@dataclass(frozen=True)
class Chain:
    """One of the optimizers that ranks chain."""

    number: int
    groups: Groups


def is_of_groups(key: str) -> bool:
    """Tell whether an item belongs to one group of data-parallel ranks: a bucket, sizes, settings."""
    return re.match(_GROUP, key) is not None


def gathered(objects: Objects, files: Mapping[tuple[int, int, str], str], arguments: Mapping[str, Any]) -> list[Chain]:
    """Return the buffers of every optimizer where one rank gathered all of a group's (`dp_zero_gather_scatter`).

    They are tensors in a pickled object, without anything between the buckets of a buffer.

    Args:
        objects: what groups have.
        files: where each object is.
        arguments: of the run.

    Raises:
        UnknownOrderError: an object is not such a state.
    """
    ranks = (arguments.get(each) for each in ("data_parallel_size", "context_parallel_size"))
    usual = max(_LEAST_BUCKET, _BUCKET_PER_RANK * prod(count for count in ranks if isinstance(count, int)))
    given = arguments.get("ddp_bucket_size")
    full = given if isinstance(given, int) and given > 0 else usual
    found: dict[int, dict[int, list[FlatBuffer]]] = {}
    for (chain, group, what), value in sorted(objects.items()):
        if what != GATHERED:
            continue
        name = f"the gathered state of group {group} of optimizer {chain}"
        buffers = {number: each for number, each in value.items() if type(number) is int} if type(value) is dict else {}
        if sorted(buffers) != list(range(len(buffers))) or not buffers or value.get(_COALESCED) is not True:
            raise UnknownOrderError(f"{name} is not in the form of megatron-core 0.12 and later")
        found.setdefault(chain, {})[group] = [
            _gathered(f"buffer {number} of {name}", buffers[number], files[chain, group, what], full)
            for number in sorted(buffers)
        ]
    return [Chain(number, groups) for number, groups in sorted(found.items())]


def _gathered(name: str, value: object, file: str, full: int) -> FlatBuffer:
    ((key, states),) = value.items() if isinstance(value, dict) and len(value) == 1 else ((None, None),)
    dtypes = key.value if isinstance(key, Key) else None
    if not isinstance(dtypes, tuple) or not dtypes or not isinstance(dtypes[0], DType) or not isinstance(states, dict):
        raise UnknownOrderError(f"{name} is malformed")
    entries = {state: _vector(f"{name}, {state}", tensor, file) for state, tensor in states.items() if state != _COUNT}
    if len({entry.shape for entry in entries.values()}) != 1:
        raise UnknownOrderError(f"the states in {name} have different sizes")
    bucket = Bucket(entries, next(iter(entries.values())).shape[0])
    return FlatBuffer(name, dtypes[0].code, (bucket,), full)


def _vector(name: str, tensor: object, file: str) -> Entry:
    """Return a tensor of one dim in a pickled object."""
    if not isinstance(tensor, TensorRef) or len(tensor.shape) != 1 or not isinstance(tensor.storage, StoredStorage):
        raise UnknownOrderError(f"{name} is no tensor of one dim")
    try:
        return place(name, tensor, file)[0]
    except ViewFault as fault:
        raise UnknownOrderError(f"{name}: {fault.message}") from None


def object_name(key: str) -> tuple[int, int, str] | None:
    """Return optimizer, group and name of an object that a group has; None for any other item."""
    match = _OBJECT.fullmatch(key)
    return None if match is None else (int(match["chain"] or 0), int(match["group"]), match["what"])


def is_bucket(key: str) -> bool:
    """Tell whether an item is one state of a bucket."""
    return _BUCKET.fullmatch(key) is not None


def chains(entries: Mapping[str, Entry], objects: Objects) -> list[Chain]:
    """Return the buffers of every optimizer.

    Args:
        entries: the tensors of a folder; others than buckets are left aside.
        objects: what groups have besides.

    Raises:
        UnknownOrderError: buckets are missing, or contradict the sizes beside them.
    """
    states: dict[tuple[int, int, int], dict[int, dict[str, Entry]]] = {}
    about: dict[tuple[int, int, int], tuple[str, str]] = {}
    for name, entry in entries.items():
        match = _BUCKET.fullmatch(name)
        if match is None:
            continue
        at = int(match["chain"] or 0), int(match["group"]), int(match["number"])
        if about.setdefault(at, (match["buffer"], match["dtype"])) != (match["buffer"], match["dtype"]):
            raise UnknownOrderError(f"{match['buffer']} and {about[at][0]} are one buffer")
        states.setdefault(at, {}).setdefault(int(match["bucket"]), {})[match["state"]] = entry
    found: dict[int, dict[int, list[FlatBuffer]]] = {}
    for at, buckets in sorted(states.items()):
        chain, group, number = at
        listed = found.setdefault(chain, {}).setdefault(group, [])
        name, dtype = about[at]
        if number != len(listed):
            raise UnknownOrderError(f"{name} is there, but not the buffer before it")
        sizes = [_sizes(objects.get((chain, group, what)), number) for what in (_PADDED, _UNPADDED)]
        listed.append(FlatBuffer(name, CODES.get(dtype, dtype), _buckets(name, buckets, *sizes)))
    return [Chain(number, groups) for number, groups in sorted(found.items())]


def _buckets(
    name: str, states: Mapping[int, Mapping[str, Entry]], padded: list[int] | None, stored: list[int] | None
) -> tuple[Bucket, ...]:
    """Return the buckets of a buffer, once their sizes are what the objects beside them say.

    Raises:
        UnknownOrderError: they are not, or buckets are missing.
    """
    if padded is None or stored is None:
        raise UnknownOrderError(f"the sizes of the buckets of {name} are missing")
    if sorted(states) != list(range(len(padded))) or len(stored) != len(padded):
        raise UnknownOrderError(f"{name} has the buckets {sorted(states)}, and sizes for {len(padded)}")
    kinds = {tuple(sorted(states[number])) for number in states}
    if len(kinds) > 1:
        raise UnknownOrderError(f"the buckets of {name} hold different states: {sorted(kinds)}")
    found = []
    for number, (elements, with_padding) in enumerate(zip(stored, padded, strict=True)):
        layouts = {(entry.shape, tuple(each.start for each in entry.extents)) for entry in states[number].values()}
        dense = all(each.strides is None for entry in states[number].values() for each in entry.extents)
        if len(layouts) > 1 or not dense or next(iter(layouts))[0] != (elements,) or with_padding < elements:
            message = f"bucket {number} of {name} is not the {elements} elements that the sizes beside it say"
            raise UnknownOrderError(message)
        found.append(Bucket(states[number], with_padding))
    return tuple(found)


def _sizes(value: Any, number: int) -> list[int] | None:
    """Return the sizes of the buckets of one buffer: of each there is a list, in a dict by its dtypes."""
    if not isinstance(value, list) or number >= len(value) or not isinstance(value[number], dict):
        return None
    (sizes,) = value[number].values() if len(value[number]) == 1 else (None,)
    if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
        return None
    return sizes
