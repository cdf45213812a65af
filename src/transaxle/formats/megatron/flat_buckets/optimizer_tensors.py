"""The optimizer's state by parameter, put together from flat buckets.

Which elements of a bucket are a parameter's is known from the layout; which box of the stored tensor they are, from the
chunks of the weights. Parameters that several ranks keep alike become copies that must be equal. And a weight must be
what its full-precision copy rounds to, bit by bit: that every weight is proves the order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from transaxle.axes.geometry.strided import lexicographic_boxes
from transaxle.formats.catalog import BITS, Entry, Extent, Shape, Twin
from transaxle.formats.megatron.flat_buckets.bucket_layout import Placed
from transaxle.formats.megatron.flat_buckets.pipeline_stages import Held
from transaxle.formats.megatron.flat_buckets.rank_parameters import Box, StoredParameter
from transaxle.formats.training_state.state import OPTIMIZER

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
