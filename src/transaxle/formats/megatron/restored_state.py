"""From flat buckets to the state of every parameter, or the reason why that is not possible.

The optimizer's state by parameter, put together from flat buckets.

Which elements of a bucket are a parameter's is known from the layout; which box of the stored tensor they are, from the
chunks of the weights. Parameters that several ranks keep alike become copies that must be equal. And a weight must be
what its full-precision copy rounds to, bit by bit: that every weight is proves the order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from transaxle.axes.geometry import lexicographic_boxes
from transaxle.errors import Refusal, Where
from transaxle.formats.catalog import BITS, Container, Entry, Extent, Shape, Twin, numpy_dtype
from transaxle.formats.megatron.bucket_layout import FlatBuffer, Placed
from transaxle.formats.megatron.pipeline_stages import (
    GATHERED,
    Chain,
    Groups,
    Held,
    NoFitError,
    Objects,
    chains,
    gathered,
    is_bucket,
    shared_out,
)
from transaxle.formats.megatron.rank_parameters import Box, Model, StoredParameter, UnknownOrderError, model_of, orders
from transaxle.formats.storage.storage import Storage
from transaxle.formats.training_state import MASTER, OPTIMIZER

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
        objects: what the groups of ranks have besides, see `pipeline_stages.gathered`.
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
