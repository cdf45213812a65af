"""Stamps: transfers of targets that differ only in which layer or expert of one stored tensor they are.

Where an axis of the target's name is a whole dim of the stored tensor, and each chunk holds one index of it, all
targets are filled alike: from the same place of another chunk. So the transfer of the first one is found the long way,
and that of every other follows from where its chunk begins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import repeat
from operator import itemgetter
from typing import NamedTuple

from msgspec.structs import astuple

from transaxle.axes.layout.relayout import Origin, Target, TargetPart
from transaxle.axes.notation.expression import Layout
from transaxle.formats.catalog.catalog import Entry, Extent
from transaxle.formats.dtype import Shape
from transaxle.move.transfer import Transfer

_NOWHERE = -1
"""An index that no chunk has."""


class Found(NamedTuple):
    """A transfer that was found the long way."""

    source: str
    """The stored tensor that it reads."""
    chunk: int
    """Number of its extent."""
    transfer: Transfer
    """The transfer."""


class _Stamp(NamedTuple):
    """The transfers of many targets, with what must be the same of each."""

    parts: tuple[TargetPart, ...]
    """Held, as their identity is the key."""
    target: Layout
    dtype: str
    axes: tuple[str, ...]
    """The axes of the target's name, in the order of the stored tensor's dims."""
    filled: Mapping[Shape, tuple[Transfer]]
    """What fills the first target, and each that differs from it in its index of these axes alone, by that index."""


class Stamps:
    """The transfers that were found the long way.

    Args:
        entries: the stored tensors.
    """

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries
        self._stamps: dict[int, _Stamp] = {}  # by the identity of the parts, which targets that are alike share
        self._chunks: dict[tuple[str, tuple[int, ...]], dict[Hashable, dict[Shape, Extent]]] = {}

    def filled(self, target: Target) -> tuple[Transfer] | None:
        """Return the one transfer that fills a target; None where it must be found the long way."""
        stamp = self._stamps.get(id(target.parts))
        if stamp is None or stamp.target is not target.layout or stamp.dtype != target.dtype:
            return None
        index = target.index
        if tuple(index) == stamp.axes:
            return stamp.filled.get(tuple(index.values()))
        if len(index) == len(stamp.axes):
            return stamp.filled.get(tuple([index.get(axis, _NOWHERE) for axis in stamp.axes]))
        return None

    def learn(self, target: Target, found: Found) -> None:
        """Remember the transfer of a target, if others may be like it.

        Args:
            target: a target, filled wholly.
            found: the one transfer that fills it.
        """
        origin = _only_origin(target)
        if origin is None:
            return
        chunk = self._entries[origin.name].extents[found.chunk]
        pinned = _pinned(target, origin, chunk)
        if not pinned:
            return
        chunks = self._alike(origin.name, chunk, tuple(dim for dim, _ in pinned))
        axes = tuple(axis for _, axis in pinned)
        _, source, place, width, loops = astuple(found.transfer)
        begins = [other.offset + source - chunk.offset for other in chunks.values()]
        files = (other.file for other in chunks.values())
        fills = zip(map(Transfer, files, begins, repeat(place), repeat(width), repeat(loops)), strict=False)
        filled = dict(zip(chunks, fills, strict=True))
        self._stamps[id(target.parts)] = _Stamp(target.parts, target.layout, target.dtype, axes, filled)

    def _alike(self, name: str, chunk: Extent, dims: tuple[int, ...]) -> dict[Shape, Extent]:
        """Return the chunks that differ from one in their index of some dims alone, by that index."""
        dims_left = [dim for dim in range(len(chunk.start)) if dim not in dims]
        place, others = _picked(dims), _picked(dims_left)
        sets = self._chunks.get((name, dims))
        if sets is None:
            sets = self._chunks[name, dims] = defaultdict(dict)
            for extent in self._entries[name].extents:
                start = extent.start
                sets[others(start), extent.shape, extent.strides][place(start)] = extent
        return sets[others(chunk.start), chunk.shape, chunk.strides]


def _picked(dims: Sequence[int]) -> Callable[[Shape], Shape]:
    """Return what takes some dims out of an index; `dims` ascend."""
    if not dims or dims[-1] - dims[0] == len(dims) - 1:
        return itemgetter(slice(dims[0], dims[-1] + 1) if dims else slice(0))
    return lambda index: tuple([index[dim] for dim in dims])


def _only_origin(target: Target) -> Origin | None:
    """Return the one stored tensor that a target is made of."""
    if len(target.parts) != 1 or len(target.parts[0].origins) != 1:
        return None
    return target.parts[0].origins[0]


def _pinned(target: Target, origin: Origin, chunk: Extent) -> tuple[tuple[int, str], ...]:
    """Return the dims of a stored tensor that are axes of the target's name; none where not all of these are dims.

    Such a dim is the axis and nothing else, and the chunk holds the target's index of it alone. Then the chunk of
    another index differs in nothing but its place.
    """
    (part,) = target.parts
    inside = {axis for share in target.layout.shares[part.component] for axis, _, _ in share.axes}
    found = []
    for dim, share in enumerate(origin.layout.shares[origin.component]):
        size = origin.layout.shape[dim]
        for axis, *_ in share.axes:
            if axis not in target.index:
                continue
            is_whole_dim = share.axes == ((axis, size, 1),) and share.offset == 0
            if not is_whole_dim or axis in inside or (chunk.start[dim], chunk.shape[dim]) != (target.index[axis], 1):
                return ()
            found.append((dim, axis))
    return tuple(found) if len(found) == len(target.index) else ()
