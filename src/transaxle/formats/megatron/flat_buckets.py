"""The state of an optimizer by parameter, put together from flat buckets, or the reason why that is not possible.

    chained_1.optimizer.distributed.dp_group_idx_3.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg
    chained_1.optimizer.distributed.dp_group_idx_3.per_bucket_numel/shard_0_1          elements with padding
    chained_1.optimizer.distributed.dp_group_idx_3.optimizer/shard_0_1                 settings

Groups of data-parallel ranks are numbered: tensor-parallel ranks first, then expert-parallel ones, then stages. Where a
rank has experts that are not on every rank, their optimizer is the last of those that are chained.

- A stage's model chunks are consecutive parts of the model, the first chunks of all stages before the second ones. How
  many layers each has is not stored, and the sizes of its buffers tell it: every buffer holds exactly its parameters.
- In a bucket last parameters come first, each at a multiple of 64 elements. It ends when it is full, which its stored
  size tells, and before an embedding that another stage has too. What a rank saved is a chunk for each parameter and
  each gap, so every beginning of a chunk must be explained: by a parameter, a gap, or the share of the next rank.
- Which box of the stored tensor the elements are, the chunks of the weights tell. Copies on several ranks must be
  equal, and a weight must be what its full-precision copy rounds to, bit by bit: that every weight is proves the order.
"""

from __future__ import annotations

import re
from bisect import bisect_right
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

_ALIGNED = 64
"""Elements at whose multiples parameters begin."""


@dataclass(frozen=True)
class Bucket:
    """A flat bucket of one group of data-parallel ranks."""

    states: Mapping[str, Entry]
    """State -> the elements of all parameters in it, as a tensor of one dim."""
    padded: int
    """Elements with the padding at its end, which is not stored; ranks have equal shares of them."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return next(iter(self.states.values())).shape[0]

    @cached_property
    def starts(self) -> frozenset[int]:
        """First elements of its chunks."""
        return frozenset(extent.start[0] for extent in next(iter(self.states.values())).extents)


@dataclass(frozen=True)
class FlatBuffer:
    """The parameters of one dtype that a group of data-parallel ranks has, of one model chunk."""

    key: str
    """First part of the names of its tensors."""
    dtype: str
    """Safetensors code of the parameters."""
    buckets: tuple[Bucket, ...]
    full: int | None = None
    """Where all buckets are stored as one, without the padding after each: elements after which a bucket ended, in
    those stages where a bucket did not hold all.
    """

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(bucket.size for bucket in self.buckets)


class Placed(NamedTuple):
    """A parameter's place in a buffer."""

    parameter: LocalParameter
    bucket: int
    """Number of the bucket."""
    start: int
    """First element in it."""


def laid_out(parameters: Sequence[LocalParameter], buffer: FlatBuffer) -> list[Placed] | None:
    """Lay parameters into the buckets of a buffer; None if these are not what it holds.

    Args:
        parameters: in the order in which the model registers them.
        buffer: with the sizes of its buckets, and where their chunks begin.
    """
    if buffer.full is not None:
        tries = (_laid_end_to_end(parameters, full, apart) for full in (None, buffer.full) for apart in (False, True))
        return next((placed for placed, size in tries if size == buffer.size), None)
    sizes = [bucket.size for bucket in buffer.buckets]
    placed: list[Placed] = []
    number = at = 0
    for parameter in reversed(parameters):
        at = _aligned(at)
        if number < len(sizes) and parameter.shared and at == sizes[number]:
            number, at = number + 1, 0
        if number == len(sizes) or at + parameter.size > sizes[number]:
            return None
        placed.append(Placed(parameter, number, at))
        at += parameter.size
        if at == sizes[number]:
            number, at = number + 1, 0
    if number < len(sizes) or at:
        return None
    of_bucket: dict[int, list[Placed]] = {}
    for each in placed:
        of_bucket.setdefault(each.bucket, []).append(each)
    is_explained = all(_explained(buffer.buckets[number], listed) for number, listed in of_bucket.items())
    return placed if is_explained else None


def _laid_end_to_end(parameters: Sequence[LocalParameter], full: int | None, apart: bool) -> tuple[list[Placed], int]:
    """Lay parameters into buckets that are stored as one; also return the elements of it all.

    Args:
        parameters: in the order in which the model registers them.
        full: elements after which a bucket ends; None: one holds all.
        apart: whether embeddings have buckets of their own.
    """
    placed: list[Placed] = []
    base = at = 0
    for parameter in reversed(parameters):
        at = _aligned(at)
        alone = apart and parameter.shared
        if alone and at:
            base, at = base + at, 0
        placed.append(Placed(parameter, 0, base + at))
        at += parameter.size
        if alone or (full is not None and at >= full):
            base, at = base + at, 0
    return placed, base + at


def _aligned(at: int) -> int:
    return -(-at // _ALIGNED) * _ALIGNED


def _explained(bucket: Bucket, placed: Sequence[Placed]) -> bool:
    """Tell whether chunks begin where parameters and gaps do, and otherwise only where the share of a rank does."""
    starts, size = bucket.starts, bucket.size
    begins = {each.start for each in placed}
    ends = {each.start + each.parameter.size for each in placed} - {size}
    if not begins | ends <= starts:
        return False
    others = starts - begins - ends
    if not others:
        return True
    least = min(others)
    for ranks in count(2):
        share, rest = divmod(bucket.padded, ranks)
        if share < 1 or -(-size // share) - 1 > len(starts):
            return False
        if not rest and not least % share and _shared_out(starts, others, share, size):
            return True
    return False


def _shared_out(starts: frozenset[int], others: frozenset[int], share: int, size: int) -> bool:
    """Tell whether some chunks begin where the shares of ranks do, and whether every share begins a chunk."""
    return not any(other % share for other in others) and all(at in starts for at in range(share, size, share))


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


_COPIED = "several ranks keep this state of {} alike, in flat buckets of their own"
_ROUNDED = "{} must be its full-precision copy in the flat buckets, rounded: that proves the order of their parameters"


class _Piece(NamedTuple):
    """A box of a stored tensor whose elements lie in one chunk of a bucket without gaps."""

    start: Shape
    shape: Shape
    chunk: int
    """Number of the chunk."""
    at: int
    """First element in it."""


@dataclass
class _States:
    """All states of a stored tensor."""

    stored: StoredParameter
    dtypes: dict[str, str] = field(default_factory=dict)
    """State -> safetensors code."""
    copies: list[dict[str, list[Extent]]] = field(default_factory=list)
    """State -> chunks: of the tensor, and of each further copy of it."""
    seen: dict[tuple[Shape, Box], int] = field(default_factory=dict)
    """How often each box of a layer and expert was met."""

    def add(self, placed: Placed, boxes: Sequence[Box], states: Mapping[str, Entry], starts: Sequence[int]) -> None:
        """Add the elements of one parameter of one rank.

        Args:
            placed: the parameter, with its place in a bucket.
            boxes: what the rank has of the stored tensor.
            states: of the bucket; their chunks begin at the same elements.
            starts: where these begin.
        """
        slot, at = placed.parameter.slot, placed.start
        for box in boxes:
            number = self.seen.get((slot, box), 0)
            self.seen[slot, box] = number + 1
            if number == len(self.copies):
                self.copies.append({state: [] for state in states})
            pieces = list(_pieces(slot, box, starts, at))
            for state, entry in states.items():
                self.dtypes.setdefault(state, entry.dtype)
                self.copies[number][state].extend(_extents(pieces, entry))
            at += prod(box.shape)

    def entries(self, name: str, state: str) -> list[Entry]:
        """Return one state as a tensor, and each further copy of it."""
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
    """Yield the elements of a box, which lie row-major in a bucket, as boxes that lie in one chunk each.

    Args:
        slot: layer and expert.
        box: along the other axes.
        starts: first elements of the bucket's chunks, in order.
        first: first element of the box in the bucket.
    """
    single = (1,) * len(slot)
    stop = first + prod(box.shape)
    number = bisect_right(starts, first) - 1
    if number + 1 == len(starts) or stop <= starts[number + 1]:  # by far most of them
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
    held: Sequence[Held], ranks: Mapping[bool, int], names: Mapping[str, str], master: str
) -> tuple[dict[str, Entry], list[Twin]]:
    """Return the optimizer's tensors under `optim/<parameter>/<state>`, and what must be equal.

    Args:
        held: what every buffer holds.
        ranks: see `rank_parameters.Model`.
        names: state as buckets call it -> its name.
        master: name of the state that is the full-precision copy of the weight.
    """
    found: dict[str, _States] = {}
    for buffer, rank, placed in held:
        starts = [[extent.start[0] for extent in _first(bucket.states).extents] for bucket in buffer.buckets]
        for each in placed:
            stored = each.parameter.stored
            states = found.setdefault(stored.name, _States(stored))
            boxes = stored.held(rank, ranks[stored.is_expert])
            states.add(each, boxes, buffer.buckets[each.bucket].states, starts[each.bucket])
    entries: dict[str, Entry] = {}
    twins: list[Twin] = []
    for weight, states in found.items():
        for state in states.dtypes:
            name = f"{OPTIMIZER}{weight}/{names.get(state, state)}"
            first, *others = states.entries(name, state)
            entries[name] = first
            twins.extend(Twin(first, other, _COPIED.format(weight), replica=True) for other in others)
            if names.get(state) == master:
                twins.append(Twin(first, states.stored.entry, _ROUNDED.format(weight), rounded=True))
    return entries, twins


def _first(states: Mapping[str, Entry]) -> Entry:
    return next(iter(states.values()))


_SAMPLE = 64
"""Elements at the beginning of a tensor by which orders are tried."""
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
    """Return a container with the optimizer's state of every parameter in place of flat buckets.

    Where the order of the parameters in them is not known, the container says why, and has neither.

    Args:
        container: with buckets under their own names.
        objects: what the groups of ranks have besides, see `stored_buckets`.
        files: where each of these is.
        arguments: of the run.
    """
    buckets = {name: entry for name, entry in container.entries.items() if is_bucket(name)}
    in_objects = any(what == GATHERED for _, _, what in objects)
    if not buckets and not in_objects:
        return container
    others = {name: entry for name, entry in container.entries.items() if name not in buckets}
    weights = [entry for name, entry in others.items() if not name.startswith(OPTIMIZER)]
    try:
        optimizers = chains(buckets, objects) if buckets else gathered(objects, files, arguments)
        entries, twins = _by_parameter(container.storage, weights, optimizers, arguments)
    except (UnknownOrderError, NoFitError) as error:
        refusal = Refusal("UNSUPPORTED", _WHY.format(error), Where(container.path), _HINT)
        return replace(container, entries=others, unread=(*container.unread, refusal))
    return replace(container, entries={**others, **entries}, twins=(*container.twins, *twins))


def _by_parameter(
    storage: Storage, weights: Sequence[Entry], optimizers: Sequence[Chain], arguments: Mapping[str, Any]
) -> tuple[dict[str, Entry], list[Twin]]:
    """Return the state of every parameter, and what must be equal.

    Where several orders fit, samples of the weights choose. That they are all right is proved later, by `twins`.

    Raises:
        NoFitError: the buckets do not hold what the model's parameters make of them in any known order.
        UnknownOrderError: the order of the parameters is not known.
    """
    kept = {
        bucket.states[_STORED_MASTER].dtype if _STORED_MASTER in bucket.states else "missing"
        for chain in optimizers
        for buffers in chain.groups.values()
        for buffer in buffers
        for bucket in buffer.buckets
    }
    if kept != {"F32"}:
        raise UnknownOrderError(f"the full-precision copies of the weights are {', '.join(sorted(kept))}, not F32")
    model = model_of(weights)
    first: tuple[dict[str, Entry], list[Twin]] | None = None
    for held in _fits(model, optimizers, arguments):
        found = tensors_by_parameter(held, model.ranks, {_STORED_MASTER: MASTER}, MASTER)
        if all(_samples_agree(storage, twin) for twin in found[1] if twin.rounded):
            return found
        first = first or found
    assert first is not None
    return first


def _samples_agree(storage: Storage, twin: Twin) -> bool:
    """Tell whether the first elements of two tensors are equal, as far as they lie together in both."""
    one, other = twin.first.extents[0], twin.second.extents[0]
    count = min(one.shape[-1:], other.shape[-1:], (_SAMPLE,))[0] if one.shape else 1
    master, weight = (
        np.frombuffer(storage.read(extent.file, extent.offset, count * BITS[code] // 8), numpy_dtype(code))
        for extent, code in ((one, twin.first.dtype), (other, twin.second.dtype))
    )
    with np.errstate(all="ignore"):
        return master.astype(weight.dtype).tobytes() == weight.tobytes()


def _fits(model: Model, optimizers: Sequence[Chain], arguments: Mapping[str, Any]) -> Iterator[list[Held]]:
    """Yield what every buffer holds, for each order in which all fit.

    Raises:
        NoFitError: they fit in none; what is said is of the first.
    """
    problem: NoFitError | None = None
    fits = False
    for order in orders(arguments):
        for dense, experts in _splits(model, optimizers):
            try:
                held = shared_out(model, order, dense, experts)
            except NoFitError as error:
                problem = problem or error
                continue
            fits = True
            yield held
    if not fits and problem is not None:
        raise problem


def _splits(model: Model, optimizers: Sequence[Chain]) -> Iterator[tuple[Groups, Groups]]:
    """Yield which groups may be of all ranks, and which of expert-parallel ranks; the likely case comes first."""
    if model.experts and len(optimizers) > 1:
        yield _merged(optimizers[:-1]), optimizers[-1].groups
    yield _merged(optimizers), {}


def _merged(optimizers: Sequence[Chain]) -> Groups:
    """Return the groups of several optimizers: one for each model chunk."""
    merged: dict[int, list[FlatBuffer]] = {}
    for chain in optimizers:
        for group, buffers in chain.groups.items():
            merged.setdefault(group, []).extend(buffers)
    return merged
