"""Reads each parameter's optimizer state out of flat buckets (1-dim tensors with the elements of many parameters).

    chained_1.optimizer.distributed.dp_group_idx_3.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg
    chained_1.optimizer.distributed.dp_group_idx_3.per_bucket_numel/shard_0_1          elements with padding
    chained_1.optimizer.distributed.dp_group_idx_3.optimizer/shard_0_1                 settings

The distributed optimizer stores such buckets for each group of data-parallel ranks. The groups are numbered:
tensor-parallel ranks fastest, then expert-parallel ranks, then pipeline stages. Experts of expert-parallel ranks have a
separate optimizer, the last of the chained optimizers.

- A stage's model chunks are consecutive parts of the model, the first chunks of all stages before the second chunks of
  all stages. A chunk's number of layers follows from the sizes of its buffers, which contain exactly its parameters.
- In a bucket the last parameters are stored first, each at a multiple of 64 elements. A bucket ends when it is full, as
  its stored size shows, and before an embedding of which a second stage has a copy. A rank saved one stored chunk for
  each parameter and each gap, so each chunk begins at a parameter, a gap, or the next rank's share.
- The stored chunks of the weights show which box of the stored tensor the elements are. Copies on several ranks must be
  equal, and each weight must be its rounded full-precision copy, bit by bit; this proves the order.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from math import prod
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from transaxle.axes.geometry import lexicographic_boxes
from transaxle.errors import Refusal, Where
from transaxle.formats.catalog import BITS, Container, Entry, Extent, Shape, Twin, numpy_dtype
from transaxle.formats.megatron.rank_parameters import (
    Box,
    LocalParameter,
    Model,
    Order,
    StoredParameter,
    UnknownOrderError,
    model_of,
    orders,
)
from transaxle.formats.pickled.descriptors import CODES, DType, Key, TensorRef
from transaxle.formats.storage.storage import Storage
from transaxle.formats.torch_file.saved import StoredStorage, ViewFault, place
from transaxle.formats.training_state import MASTER, OPTIMIZER

_ALIGNMENT = 64
"""A parameter in a flat bucket begins at a multiple of this number of elements."""


@dataclass(frozen=True)
class Bucket:
    """A flat bucket: part of the buffer of a group of data-parallel ranks, as a 1-dim tensor per optimizer state."""

    states: Mapping[str, Entry]
    """Name of the optimizer state -> 1-dim tensor with the elements of all parameters in the bucket."""
    padded: int
    """Number of elements with the padding at the bucket's end, which is not stored; ranks have equal shares of it."""

    @property
    def size(self) -> int:
        """Return the number of stored elements, without the padding at the bucket's end."""
        return next(iter(self.states.values())).shape[0]

    @cached_property
    def starts(self) -> frozenset[int]:
        """Return the first element of each stored chunk, counted from the beginning of the bucket."""
        return frozenset(extent.start[0] for extent in next(iter(self.states.values())).extents)


@dataclass(frozen=True)
class GroupBuffer:
    """The buckets with the parameters of one dtype, in one model chunk on a group of data-parallel ranks."""

    key: str
    """Common prefix of the names of the buffer's stored tensors."""
    dtype: str
    """Safetensors dtype code of the parameters."""
    buckets: tuple[Bucket, ...]
    full: int | None = None
    """Size in elements at which a bucket ended, if all buckets are stored as one without padding; otherwise None."""

    @property
    def size(self) -> int:
        """Return the number of stored elements in all buckets."""
        return sum(bucket.size for bucket in self.buckets)


class BucketPlace(NamedTuple):
    """Where a parameter is in a buffer."""

    parameter: LocalParameter
    bucket: int
    """Index of the parameter's bucket in the buffer."""
    start: int
    """First element of the parameter, counted from the beginning of the bucket."""


def lay_into_buckets(parameters: Sequence[LocalParameter], buffer: GroupBuffer) -> list[BucketPlace] | None:
    """Place parameters in the buckets of a buffer; return None if parameters and buffer do not fit exactly.

    Args:
        parameters: the parameters, in the order in which the model registers them.
        buffer: the buffer, with the sizes of its buckets and the first elements of the buckets' stored chunks.
    """
    if buffer.full is not None:
        tries = (_lay_end_to_end(parameters, full, apart) for full in (None, buffer.full) for apart in (False, True))
        return next((places for places, size in tries if size == buffer.size), None)
    sizes = [bucket.size for bucket in buffer.buckets]
    places: list[BucketPlace] = []
    number = at = 0
    for parameter in reversed(parameters):
        at = _align(at)
        if number < len(sizes) and parameter.shared and at == sizes[number]:
            number, at = number + 1, 0
        if number == len(sizes) or at + parameter.size > sizes[number]:
            return None
        places.append(BucketPlace(parameter, number, at))
        at += parameter.size
        if at == sizes[number]:
            number, at = number + 1, 0
    if number < len(sizes) or at:
        return None
    places_by_bucket: dict[int, list[BucketPlace]] = {}
    for bucket_place in places:
        places_by_bucket.setdefault(bucket_place.bucket, []).append(bucket_place)
    is_explained = all(
        _explains_chunks(buffer.buckets[number], bucket_places) for number, bucket_places in places_by_bucket.items()
    )
    return places if is_explained else None


def _lay_end_to_end(
    parameters: Sequence[LocalParameter], full: int | None, apart: bool
) -> tuple[list[BucketPlace], int]:
    """Place parameters in buckets that are stored as one; also return the total number of elements.

    Args:
        parameters: the parameters, in the order in which the model registers them.
        full: number of elements at which a bucket ends; None for a single bucket.
        apart: whether embeddings have separate buckets.
    """
    places: list[BucketPlace] = []
    base = at = 0
    for parameter in reversed(parameters):
        at = _align(at)
        has_own_bucket = apart and parameter.shared
        if has_own_bucket and at:
            base, at = base + at, 0
        places.append(BucketPlace(parameter, 0, base + at))
        at += parameter.size
        if has_own_bucket or (full is not None and at >= full):
            base, at = base + at, 0
    return places, base + at


def _align(at: int) -> int:
    return -(-at // _ALIGNMENT) * _ALIGNMENT


def _explains_chunks(bucket: Bucket, places: Sequence[BucketPlace]) -> bool:
    """Return whether parameters, gaps and rank shares explain all chunks' starts, and each parameter starts a chunk."""
    starts, size = bucket.starts, bucket.size
    begins = {each.start for each in places}
    ends = {each.start + each.parameter.size for each in places} - {size}
    if not begins | ends <= starts:
        return False
    unexplained = starts - begins - ends
    if not unexplained:
        return True
    first_unexplained = min(unexplained)
    for ranks in count(2):
        share, remainder = divmod(bucket.padded, ranks)
        if share < 1 or -(-size // share) - 1 > len(starts):
            return False
        if not remainder and not first_unexplained % share and _are_rank_shares(starts, unexplained, share, size):
            return True
    return False


def _are_rank_shares(starts: frozenset[int], unexplained: frozenset[int], share: int, size: int) -> bool:
    """Return whether every unexplained chunk begins where a rank's share begins, and every rank's share begins with a
    chunk.
    """
    return not any(other % share for other in unexplained) and all(at in starts for at in range(share, size, share))


_GAP = 64
"""Maximum gap between two parameters, in elements."""
BuffersByGroup = Mapping[int, Sequence[GroupBuffer]]
"""Number of a group of data-parallel ranks -> buffers of the group, in the order that they have on the ranks."""


class BufferContents(NamedTuple):
    """A buffer, with the parameters that it contains."""

    buffer: GroupBuffer
    rank: int
    """Number of the rank that has the buffer, among the ranks over which the parameters are cut."""
    placed: Sequence[BucketPlace]


class NoFitError(Exception):
    """Some buffers do not fit the model's parameters; the error message states which."""


@dataclass
class _BufferQueue:
    """The buffers of each group of ranks, with a position up to which they have been assigned to parameters."""

    groups: BuffersByGroup
    positions: dict[int, int] = field(default_factory=dict)

    def next(self, group: int, number: int) -> Sequence[GroupBuffer]:
        """Return the next unassigned buffers of a group of ranks, at most `number`."""
        at = self.positions.get(group, 0)
        return self.groups.get(group, ())[at : at + number]

    def take(self, group: int, number: int) -> None:
        """Advance a group's position by `number` buffers."""
        self.positions[group] = self.positions.get(group, 0) + number

    def first_unassigned(self) -> GroupBuffer | None:
        """Return the first buffer that has not been assigned to parameters; None if all buffers have been assigned."""
        unread_buffers = (
            buffer for group, listed in sorted(self.groups.items()) for buffer in listed[self.positions.get(group, 0) :]
        )
        return next(unread_buffers, None)


def assign_buffers(model: Model, order: Order, dense: BuffersByGroup, experts: BuffersByGroup) -> list[BufferContents]:
    """Assign the model's parameters to the buffers.

    Args:
        model: the parameters of the model.
        order: the order in which modules register the parameters.
        dense: buffers of groups with parameters that expert-parallel ranks replicate, also of experts in such groups.
        experts: buffers of the groups of expert-parallel ranks.

    Raises:
        NoFitError: if the buffers do not fit the parameters.
        UnknownOrderError: if a segment of a parameter's name is unknown.
    """
    ranks = model.ranks[False]
    stages, remainder = divmod(len(dense), ranks)
    if remainder or sorted(dense) != list(range(len(dense))):
        raise NoFitError(f"there are {len(dense)} groups of ranks, and parameters are cut among {ranks}")
    experts_only = False if experts else None
    if experts_only is None and model.experts and model.ranks[True] != ranks:
        raise NoFitError("experts are cut among other ranks than the rest, and have no buffers of their own")
    contents: list[BufferContents] = []
    chunks = list(_chunks(model, order, dense, stages, experts_only, contents))
    if not experts:
        return contents
    last_problem = NoFitError("no number of expert-parallel ranks fits")
    for parallel in filter(lambda count: not model.experts % count, range(1, model.experts + 1)):
        try:
            return [*contents, *_assign_expert_buffers(model, order, experts, chunks, stages, parallel)]
        except NoFitError as error:
            last_problem = error
    raise last_problem


class _Chunk(NamedTuple):
    """A model chunk: consecutive parts of the model on one pipeline stage."""

    stage: int
    parts: range


def _chunks(
    model: Model,
    order: Order,
    dense: BuffersByGroup,
    stages: int,
    experts_only: bool | None,
    contents: list[BufferContents],
) -> Iterator[_Chunk]:
    """Yield the model chunks of all stages, in model order; append the contents of their buffers to `contents`."""
    unread, ranks = _BufferQueue(dense), model.ranks[False]
    first = 0
    while first < len(model.items):
        round_start = first
        for stage in range(stages):
            groups = range(stage * ranks, (stage + 1) * ranks)
            if not unread.next(groups[0], 1):
                continue
            stop, buffers = _fit_chunk(model, order, first, groups, unread, experts_only)
            contents.extend(buffers)
            yield _Chunk(stage, range(first, stop))
            first = stop
        if first == round_start and unread.first_unassigned() is None:
            break
    if first < len(model.items) and any(_has(model, order, at, experts_only) for at in range(first, len(model.items))):
        raise NoFitError(f"no buffer holds the parameters of the {model.items[first].kind} part of the model")
    unread_buffer = unread.first_unassigned()
    if unread_buffer is not None:
        raise NoFitError(f"{unread_buffer.key} holds more than the model has")


def _has(model: Model, order: Order, at: int, experts_only: bool | None) -> bool:
    return bool(model.local(range(at, at + 1), order, experts_only=experts_only))


def _fit_chunk(
    model: Model, order: Order, first: int, groups: range, unread: _BufferQueue, experts_only: bool | None
) -> tuple[int, list[BufferContents]]:
    """Find a stage's next model chunk; return the end of the chunk's range of model parts, and its buffers' contents.

    Raises:
        NoFitError: if no number of model parts fits the buffers.
    """
    head = unread.next(groups[0], 1)[0]
    elements = parameters = 0
    for stop in range(first + 1, len(model.items) + 1):
        added = model.local(range(stop - 1, stop), order, experts_only=experts_only)
        elements += sum(each.size for each in added if each.stored.entry.dtype == head.dtype)
        parameters += len(added)
        if elements > head.size:
            break
        # `elements` and `parameters` do not count the copy of an embedding that belongs to a different stage.
        if elements + parameters * _GAP < head.size and not model.items[stop - 1].may_copy:
            continue
        contents = _fit(model.local(range(first, stop), order, experts_only=experts_only), groups, unread)
        if contents is not None:
            while not first and stop < len(model.items) and not model.items[stop].parameters:
                stop += 1  # skips model parts without parameters, such as an output tied to the embedding
            return stop, contents
    raise NoFitError(f"{head.key} does not hold consecutive parts of the model from number {first} on")


def _fit(parameters: Sequence[LocalParameter], groups: range, unread: _BufferQueue) -> list[BufferContents] | None:
    """Place parameters in the next unassigned buffers of the groups of ranks; return None if that is impossible."""
    by_dtype: dict[str, list[LocalParameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.stored.entry.dtype, []).append(parameter)
    contents: list[BufferContents] = []
    for rank, group in enumerate(groups):
        buffers = unread.next(group, len(by_dtype))
        if sorted(buffer.dtype for buffer in buffers) != sorted(by_dtype):
            return None
        for buffer in buffers:
            places = lay_into_buckets(by_dtype[buffer.dtype], buffer)
            if places is None:
                return None
            contents.append(BufferContents(buffer, rank, places))
    for group in groups:
        unread.take(group, len(by_dtype))
    return contents


def _assign_expert_buffers(
    model: Model, order: Order, groups: BuffersByGroup, chunks: Sequence[_Chunk], stages: int, parallel: int
) -> list[BufferContents]:
    """Return the contents of the experts' buffers, assuming `parallel` expert-parallel ranks.

    Raises:
        NoFitError: if the buffers do not fit.
    """
    unread, ranks = _BufferQueue(groups), model.ranks[True]
    if max(groups) >= ranks * parallel * stages:
        raise NoFitError(f"there are {max(groups) + 1} groups of ranks for experts")
    experts_per_rank = model.experts // parallel
    contents: list[BufferContents] = []
    for stage, parts in chunks:
        for number in range(parallel):
            first = ranks * (number + parallel * stage)
            experts = range(number * experts_per_rank, (number + 1) * experts_per_rank)
            parameters = model.local(parts, order, experts, experts_only=True)
            rank_contents = _fit(parameters, range(first, first + ranks), unread)
            if rank_contents is None:
                raise NoFitError(f"the buffers of experts {experts.start} to {experts.stop - 1} hold something else")
            contents.extend(rank_contents)
    unread_buffer = unread.first_unassigned()
    if unread_buffer is not None:
        raise NoFitError(f"{unread_buffer.key} holds more than the model's experts")
    return contents


_GROUP = r"(?:chained_(?P<chain>\d{1,4})\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d{1,7})\."
_BUCKET = re.compile(
    rf"(?P<buffer>{_GROUP}gbuf_idx_(?P<number>\d{{1,5}})\.dtype_\(torch\.(?P<dtype>\w+), torch\.\w+\))"
    r"\.bucket_idx_(?P<bucket>\d{1,7})\.(?P<state>\w+)"
)
_OBJECT = re.compile(rf"{_GROUP}(?P<what>\w+)/shard_0_1")
_PADDED, _UNPADDED = "per_bucket_numel", "per_bucket_numel_unpadded"
GATHERED = "param_state"
"""Name of the object with the optimizer state of all a group's buffers, if one rank of the group gathered it."""
_COALESCED, _COUNT = "buckets_coalesced", "numel_unpadded"
_LEAST_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000

Objects = Mapping[tuple[int, int, str], Any]
"""Unpickled objects of groups of ranks, by (number of the optimizer, number of the group, name of the object)."""


@dataclass(frozen=True)
class ChainedOptimizer:
    """One of the run's chained optimizers, with its flat buffers."""

    number: int
    groups: BuffersByGroup


def is_of_groups(key: str) -> bool:
    """Return whether a key belongs to an item (a bucket, sizes or settings) of a group of data-parallel ranks."""
    return re.match(_GROUP, key) is not None


def read_gathered(
    objects: Objects, files: Mapping[tuple[int, int, str], str], arguments: Mapping[str, Any]
) -> list[ChainedOptimizer]:
    """Return every optimizer's buffers, if one rank of each group gathered them (`dp_zero_gather_scatter`).

    Gathered buffers are tensors in a pickled object, without padding between the buckets of a buffer.

    Args:
        objects: the unpickled objects of groups of ranks.
        files: name of the file that contains each object.
        arguments: Megatron's training arguments of the run.

    Raises:
        UnknownOrderError: if an object does not contain gathered buffers.
    """
    ranks = (arguments.get(each) for each in ("data_parallel_size", "context_parallel_size"))
    default_size = max(_LEAST_BUCKET, _BUCKET_PER_RANK * prod(count for count in ranks if isinstance(count, int)))
    bucket_argument = arguments.get("ddp_bucket_size")
    bucket_size = bucket_argument if isinstance(bucket_argument, int) and bucket_argument > 0 else default_size
    buffers_by_group: dict[int, dict[int, list[GroupBuffer]]] = {}
    for (chain, group, kind), value in sorted(objects.items()):
        if kind != GATHERED:
            continue
        name = f"the gathered state of group {group} of optimizer {chain}"
        buffers = {number: each for number, each in value.items() if type(number) is int} if type(value) is dict else {}
        if sorted(buffers) != list(range(len(buffers))) or not buffers or value.get(_COALESCED) is not True:
            raise UnknownOrderError(f"{name} is not in the form of megatron-core 0.12 and later")
        buffers_by_group.setdefault(chain, {})[group] = [
            _gathered_buffer(f"buffer {number} of {name}", buffers[number], files[chain, group, kind], bucket_size)
            for number in sorted(buffers)
        ]
    return [ChainedOptimizer(number, groups) for number, groups in sorted(buffers_by_group.items())]


def _gathered_buffer(name: str, value: object, file: str, full: int) -> GroupBuffer:
    ((key, states),) = value.items() if isinstance(value, dict) and len(value) == 1 else ((None, None),)
    dtypes = key.value if isinstance(key, Key) else None
    if not isinstance(dtypes, tuple) or not dtypes or not isinstance(dtypes[0], DType) or not isinstance(states, dict):
        raise UnknownOrderError(f"{name} is malformed")
    entries = {state: _vector(f"{name}, {state}", tensor, file) for state, tensor in states.items() if state != _COUNT}
    if len({entry.shape for entry in entries.values()}) != 1:
        raise UnknownOrderError(f"the states in {name} have different sizes")
    bucket = Bucket(entries, next(iter(entries.values())).shape[0])
    return GroupBuffer(name, dtypes[0].code, (bucket,), full)


def _vector(name: str, tensor: object, file: str) -> Entry:
    """Return a tensor of a pickled object; the tensor must have one dim."""
    if not isinstance(tensor, TensorRef) or len(tensor.shape) != 1 or not isinstance(tensor.storage, StoredStorage):
        raise UnknownOrderError(f"{name} is no tensor of one dim")
    try:
        return place(name, tensor, file)[0]
    except ViewFault as fault:
        raise UnknownOrderError(f"{name}: {fault.message}") from None


def object_name(key: str) -> tuple[int, int, str] | None:
    """Return (number of optimizer, number of group, name) of a group's object, from its key; else None."""
    match = _OBJECT.fullmatch(key)
    return None if match is None else (int(match["chain"] or 0), int(match["group"]), match["what"])


def is_bucket(key: str) -> bool:
    """Return whether an item's key shows that the item is one optimizer state of a bucket."""
    return _BUCKET.fullmatch(key) is not None


def optimizers_of(entries: Mapping[str, Entry], objects: Objects) -> list[ChainedOptimizer]:
    """Return the buffers of every optimizer.

    Args:
        entries: the tensors of a folder; only flat buckets are used.
        objects: the unpickled objects of groups of ranks, which contain the sizes of buckets.

    Raises:
        UnknownOrderError: if buckets are missing, or contradict the sizes in the objects.
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
    buffers_by_group: dict[int, dict[int, list[GroupBuffer]]] = {}
    for at, buckets in sorted(states.items()):
        chain, group, number = at
        listed = buffers_by_group.setdefault(chain, {}).setdefault(group, [])
        name, dtype = about[at]
        if number != len(listed):
            raise UnknownOrderError(f"{name} is there, but not the buffer before it")
        sizes = [_sizes(objects.get((chain, group, what)), number) for what in (_PADDED, _UNPADDED)]
        listed.append(GroupBuffer(name, CODES.get(dtype, dtype), _buckets(name, buckets, *sizes)))
    return [ChainedOptimizer(number, groups) for number, groups in sorted(buffers_by_group.items())]


def _buckets(
    name: str, states: Mapping[int, Mapping[str, Entry]], padded: list[int] | None, stored: list[int] | None
) -> tuple[Bucket, ...]:
    """Return the buckets of a buffer, after comparing the buckets' sizes with the sizes in the objects.

    Raises:
        UnknownOrderError: if the sizes differ, or buckets are missing.
    """
    if padded is None or stored is None:
        raise UnknownOrderError(f"the sizes of the buckets of {name} are missing")
    if sorted(states) != list(range(len(padded))) or len(stored) != len(padded):
        raise UnknownOrderError(f"{name} has the buckets {sorted(states)}, and sizes for {len(padded)}")
    kinds = {tuple(sorted(states[number])) for number in states}
    if len(kinds) > 1:
        raise UnknownOrderError(f"the buckets of {name} hold different states: {sorted(kinds)}")
    result = []
    for number, (elements, with_padding) in enumerate(zip(stored, padded, strict=True)):
        layouts = {(entry.shape, tuple(each.start for each in entry.extents)) for entry in states[number].values()}
        dense = all(each.strides is None for entry in states[number].values() for each in entry.extents)
        if len(layouts) > 1 or not dense or next(iter(layouts))[0] != (elements,) or with_padding < elements:
            message = f"bucket {number} of {name} is not the {elements} elements that the sizes beside it say"
            raise UnknownOrderError(message)
        result.append(Bucket(states[number], with_padding))
    return tuple(result)


def _sizes(value: Any, number: int) -> list[int] | None:
    """Return the sizes of a buffer's buckets, from a dict with a list for each pair of dtypes, or None."""
    if not isinstance(value, list) or number >= len(value) or not isinstance(value[number], dict):
        return None
    (sizes,) = value[number].values() if len(value[number]) == 1 else (None,)
    is_valid = isinstance(sizes, list) and all(type(size) is int and size > 0 for size in sizes)
    return sizes if is_valid else None


_COPIED = "several ranks keep this state of {} alike, in flat buckets of their own"
_ROUNDED = "{} must be its full-precision copy in the flat buckets, rounded: that proves the order of their parameters"


class _Piece(NamedTuple):
    """A box of a stored tensor whose elements are contiguous in one stored chunk of a bucket."""

    start: Shape
    shape: Shape
    chunk: int
    """Index of the stored chunk in the bucket."""
    at: int
    """First element of the box, counted from the beginning of the chunk."""


@dataclass
class _ParameterStates:
    """The optimizer states of one stored parameter, collected from all buckets."""

    stored: StoredParameter
    dtypes: dict[str, str] = field(default_factory=dict)
    """Name of the optimizer state -> safetensors dtype code."""
    copies: list[dict[str, list[Extent]]] = field(default_factory=list)
    """Optimizer state -> extents: a dict for the tensor itself, and one for each copy on a further rank."""
    box_counts: Counter[tuple[Shape, Box]] = field(default_factory=Counter)
    """(index of layer and expert, box) -> number of times that this box has occurred."""

    def add(self, place: BucketPlace, boxes: Sequence[Box], states: Mapping[str, Entry], starts: Sequence[int]) -> None:
        """Add the elements of one parameter on one rank.

        Args:
            place: the parameter, and its place in a bucket.
            boxes: the rank's boxes of the stored tensor.
            states: the bucket's tensor for each optimizer state; all these tensors have the same stored chunks.
            starts: first element of each stored chunk, counted from the beginning of the bucket.
        """
        slot, at = place.parameter.slot, place.start
        for box in boxes:
            number = self.box_counts[slot, box]
            self.box_counts[slot, box] += 1
            if number == len(self.copies):
                self.copies.append({state: [] for state in states})
            pieces = list(_pieces(slot, box, starts, at))
            for state, entry in states.items():
                self.dtypes.setdefault(state, entry.dtype)
                self.copies[number][state].extend(_extents(pieces, entry))
            at += prod(box.shape)

    def entries(self, name: str, state: str) -> list[Entry]:
        """Return one optimizer state of the parameter as a tensor, followed by its further copies as tensors."""
        return [
            Entry(
                name,
                self.dtypes[state],
                self.stored.entry.shape,
                tuple(sorted(copy[state], key=lambda extent: extent.start)),
            )
            for copy in self.copies
        ]


def _extents(pieces: Sequence[_Piece], bucket: Entry) -> Iterator[Extent]:
    item = BITS[bucket.dtype] // 8
    for start, shape, number, at in pieces:
        chunk = bucket.extents[number]
        yield Extent(start, shape, chunk.file, chunk.offset + at * item)


def _pieces(slot: Shape, box: Box, starts: Sequence[int], first: int) -> Iterator[_Piece]:
    """Split a box, which is row-major in a bucket, into boxes that are each inside one stored chunk.

    Args:
        slot: index of the layer and the expert along the stacked dims.
        box: first index and shape of the box in all dims except the stacked dims.
        starts: first element of each stored chunk of the bucket, in order.
        first: first element of the box, counted from the beginning of the bucket.
    """
    single = (1,) * len(slot)
    stop = first + prod(box.shape)
    number = bisect_right(starts, first) - 1
    if number + 1 == len(starts) or stop <= starts[number + 1]:  # in the usual case the box is inside one stored chunk
        yield _Piece(slot + box.start, single + box.shape, number, first - starts[number])
        return
    at = first
    while at < stop:
        end = min(stop, starts[number + 1]) if number + 1 < len(starts) else stop
        inside = at - starts[number]
        for piece in lexicographic_boxes(box.shape, at - first, end - first):
            begin = tuple(low + base for (low, _), base in zip(piece, box.start, strict=True))
            shape = tuple(high - low for low, high in piece)
            yield _Piece(slot + begin, single + shape, number, inside)
            inside += prod(shape)
        at, number = end, number + 1


def tensors_by_parameter(
    contents: Sequence[BufferContents], ranks: Mapping[bool, int], names: Mapping[str, str], master: str
) -> tuple[dict[str, Entry], list[Twin]]:
    """Return the optimizer's tensors as `optim/<parameter>/<state>`, and the pairs of tensors that must be equal.

    Args:
        contents: the contents of all flat buffers.
        ranks: number of ranks over which parameters are cut; see `rank_parameters.Model`.
        names: name of an optimizer state in buckets -> name of this state in the result.
        master: name of the optimizer state that is the full-precision copy of the weight.
    """
    states_by_weight: dict[str, _ParameterStates] = {}
    for buffer, rank, places in contents:
        starts = [
            [extent.start[0] for extent in next(iter(bucket.states.values())).extents] for bucket in buffer.buckets
        ]
        for bucket_place in places:
            stored = bucket_place.parameter.stored
            states = states_by_weight.setdefault(stored.name, _ParameterStates(stored))
            boxes = stored.rank_boxes(rank, ranks[stored.is_expert])
            number = bucket_place.bucket
            states.add(bucket_place, boxes, buffer.buckets[number].states, starts[number])
    entries: dict[str, Entry] = {}
    twins: list[Twin] = []
    for weight, states in states_by_weight.items():
        for state in states.dtypes:
            name = f"{OPTIMIZER}{weight}/{names.get(state, state)}"
            first, *copies = states.entries(name, state)
            entries[name] = first
            twins.extend(Twin(first, other, _COPIED.format(weight), replica=True) for other in copies)
            if names.get(state) == master:
                twins.append(Twin(first, states.stored.entry, _ROUNDED.format(weight), rounded=True))
    return entries, twins


_SAMPLE = 64
"""Number of elements of each weight that are compared to choose between possible orders of parameters."""
_STORED_MASTER = "param"
_WHY = "the flat buckets of its distributed optimizer cannot be read: {}"
LEAVE_OUT = "--no-optimizer leaves the optimizer's state out."
_HINT = (
    f"{LEAVE_OUT} Megatron itself writes it by parameter if it loads this "
    "checkpoint and saves it with --dist-ckpt-optim-fully-reshardable."
)


def with_state_of_parameters(
    container: Container, objects: Objects, files: Mapping[tuple[int, int, str], str], arguments: Mapping[str, Any]
) -> Container:
    """Replace the flat buckets in an opened checkpoint by the optimizer state of every parameter.

    If the order of parameters in the buckets is unknown, the result has a refusal in place of the optimizer state.

    Args:
        container: an opened checkpoint in which each bucket is a tensor under Megatron's name.
        objects: the unpickled objects of groups of ranks.
        files: name of the file that contains each object.
        arguments: Megatron's training arguments of the run.
    """
    buckets = {name: entry for name, entry in container.entries.items() if is_bucket(name)}
    in_objects = any(what == GATHERED for _, _, what in objects)
    if not buckets and not in_objects:
        return container
    other_entries = {name: entry for name, entry in container.entries.items() if name not in buckets}
    weights = [entry for name, entry in other_entries.items() if not name.startswith(OPTIMIZER)]
    try:
        optimizers = optimizers_of(buckets, objects) if buckets else read_gathered(objects, files, arguments)
        entries, twins = _by_parameter(container.storage, weights, optimizers, arguments)
    except (UnknownOrderError, NoFitError) as error:
        refusal = Refusal("UNSUPPORTED", _WHY.format(error), Where(container.path), _HINT)
        return replace(container, entries=other_entries, unread=(*container.unread, refusal))
    return replace(container, entries={**other_entries, **entries}, twins=(*container.twins, *twins))


def _by_parameter(
    storage: Storage, weights: Sequence[Entry], optimizers: Sequence[ChainedOptimizer], arguments: Mapping[str, Any]
) -> tuple[dict[str, Entry], list[Twin]]:
    """Return the optimizer state of every parameter, and the pairs of tensors that must be equal.

    If several orders of parameters fit, samples of the weights decide; comparing the pairs later proves the choice.

    Raises:
        NoFitError: if the buckets do not fit the parameters in any known order.
        UnknownOrderError: if the order of the parameters is unknown.
    """
    master_dtypes = {
        bucket.states[_STORED_MASTER].dtype if _STORED_MASTER in bucket.states else "missing"
        for chain in optimizers
        for buffers in chain.groups.values()
        for buffer in buffers
        for bucket in buffer.buckets
    }
    if master_dtypes != {"F32"}:
        raise UnknownOrderError(
            f"the full-precision copies of the weights are {', '.join(sorted(master_dtypes))}, not F32"
        )
    model = model_of(weights)
    first_result: tuple[dict[str, Entry], list[Twin]] | None = None
    for contents in _fits(model, optimizers, arguments):
        result = tensors_by_parameter(contents, model.ranks, {_STORED_MASTER: MASTER}, MASTER)
        if all(_samples_agree(storage, twin) for twin in result[1] if twin.rounded):
            return result
        first_result = first_result or result
    assert first_result is not None
    return first_result


def _samples_agree(storage: Storage, twin: Twin) -> bool:
    """Return whether the first contiguous elements of a weight equal those of its rounded full-precision copy."""
    first, second = twin.first.extents[0], twin.second.extents[0]
    count = min(first.shape[-1:], second.shape[-1:], (_SAMPLE,))[0] if first.shape else 1
    master, weight = (
        np.frombuffer(storage.read(extent.file, extent.offset, count * BITS[code] // 8), numpy_dtype(code))
        for extent, code in ((first, twin.first.dtype), (second, twin.second.dtype))
    )
    with np.errstate(all="ignore"):
        return master.astype(weight.dtype).tobytes() == weight.tobytes()


def _fits(
    model: Model, optimizers: Sequence[ChainedOptimizer], arguments: Mapping[str, Any]
) -> Iterator[list[BufferContents]]:
    """Yield the contents of all buffers, once for each order of parameters in which all buffers fit.

    Raises:
        NoFitError: if no order fits; the message describes the first order that was tried.
    """
    problems: list[NoFitError] = []
    fits = False
    for order in orders(arguments):
        for dense, experts in _splits(model, optimizers):
            try:
                contents = assign_buffers(model, order, dense, experts)
            except NoFitError as error:
                problems.append(error)
            else:
                fits = True
                yield contents
    if problems and not fits:
        raise problems[0]


def _splits(model: Model, optimizers: Sequence[ChainedOptimizer]) -> Iterator[tuple[BuffersByGroup, BuffersByGroup]]:
    """Yield the possible divisions of groups of ranks into dense and expert groups, the most likely division first."""
    if model.experts and len(optimizers) > 1:
        yield _merge_groups(optimizers[:-1]), optimizers[-1].groups
    yield _merge_groups(optimizers), {}


def _merge_groups(optimizers: Sequence[ChainedOptimizer]) -> BuffersByGroup:
    """Merge the groups of ranks that the optimizers of all model chunks have."""
    merged: dict[int, list[GroupBuffer]] = {}
    for chain in optimizers:
        for group, buffers in chain.groups.items():
            merged.setdefault(group, []).extend(buffers)
    return merged
