"""Stamps: transfers of targets that differ only in which layer or expert of stored tensors they are.

Where an axis of the target's name is a whole dim of the stored tensors, and each chunk holds one index of it, all
targets are filled alike: from the same places of other chunks. So the transfers of the first one are found the long
way, and those of every other follow from where its chunks begin.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from transaxle.axes.geometry.strided import Loop
from transaxle.axes.layout.relayout import Target, TargetPart
from transaxle.axes.notation.expression import Layout
from transaxle.formats.catalog import Entry, Extent
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


class _Fill(NamedTuple):
    """One of the transfers of many targets."""

    chunks: Mapping[Shape, Extent]
    """The chunks that it reads, by the target's index of the stamp's axes."""
    begin: int
    """Where it begins in each chunk."""
    target: int
    """Where it lands, as `Transfer` says; and so the others."""
    width: int
    """See there."""
    loops: tuple[Loop, ...]
    """See there."""


class _Stamp(NamedTuple):
    """The transfers of many targets, with what must be the same of each."""

    parts: tuple[TargetPart, ...]
    """Held, as their identity is the key."""
    target: Layout
    dtype: str
    axes: tuple[str, ...]
    """The axes of the target's name, in the order of the stored tensors' dims."""
    fills: Sequence[_Fill]
    """What fills each of the targets, sorted by where it lands."""


class Stamps:
    """The transfers that were found the long way.

    Args:
        entries: the stored tensors.
    """

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries
        self._stamps: dict[int, _Stamp] = {}  # by the identity of the parts, which targets that are alike share
        self._chunks: dict[tuple[str, tuple[int, ...]], dict[Hashable, dict[Shape, Extent]]] = {}

    def filled(self, target: Target) -> tuple[Transfer, ...] | None:
        """Return the transfers that fill a target; None where they must be found the long way."""
        stamp = self._stamps.get(id(target.parts))
        if stamp is None or stamp.target is not target.layout or stamp.dtype != target.dtype:
            return None
        index = target.index
        if tuple(index) == stamp.axes:
            place = tuple(index.values())
        else:
            place = tuple([index.get(axis, _NOWHERE) for axis in stamp.axes])
        if len(stamp.fills) == 1:  # an expert's matrix in one chunk, of very many
            ((chunks, begin, at, width, loops),) = stamp.fills
            chunk = chunks.get(place)
            return None if chunk is None else (Transfer(chunk.file, chunk.offset + begin, at, width, loops),)
        filled = []
        for chunks, begin, at, width, loops in stamp.fills:
            chunk = chunks.get(place)
            if chunk is None:
                return None
            filled.append(Transfer(chunk.file, chunk.offset + begin, at, width, loops))
        return tuple(filled)

    def learn(self, target: Target, found: Sequence[Found]) -> None:
        """Remember the transfers of a target, if others may be like it.

        Args:
            target: a target, filled wholly.
            found: the transfers that fill it.
        """
        pinned = _pinned(target)
        if pinned is None:
            return
        dims_by_name, axes = pinned
        place = tuple([target.index[axis] for axis in axes])
        fills = []
        for name, number, transfer in found:
            dims, chunk = dims_by_name[name], self._entries[name].extents[number]
            # The chunk of another index differs in nothing but its place only if it holds one index.
            if any((chunk.start[dim], chunk.shape[dim]) != (at, 1) for dim, at in zip(dims, place, strict=True)):
                return
            begin = transfer.source - chunk.offset
            fills.append(_Fill(self._alike(name, chunk, dims), begin, transfer.target, transfer.width, transfer.loops))
        self._stamps[id(target.parts)] = _Stamp(target.parts, target.layout, target.dtype, axes, fills)

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


def _pinned(target: Target) -> tuple[dict[str, tuple[int, ...]], tuple[str, ...]] | None:
    """Return the dims of each stored tensor that are axes of the target's name, and these axes in their order.

    Such a dim is the axis and nothing else. None where not all axes of the name are such dims of each stored tensor, in
    one order.
    """
    index = target.index
    dims_by_name: dict[str, tuple[int, ...]] = {}
    axes: tuple[str, ...] = ()
    for part in target.parts:
        inside = {axis for share in target.layout.shares[part.component] for axis, _, _ in share.axes}
        for origin in part.origins:
            found = []
            for dim, share in enumerate(origin.layout.shares[origin.component]):
                named = [axis for axis, *_ in share.axes if axis in index]
                if not named:
                    continue
                if share.axes != ((named[0], origin.layout.shape[dim], 1),) or share.offset or named[0] in inside:
                    return None
                found.append((dim, named[0]))
            dims, names = tuple([dim for dim, _ in found]), tuple([axis for _, axis in found])
            if len(found) != len(index) or names != (axes or names) or dims_by_name.get(origin.name, dims) != dims:
                return None
            dims_by_name[origin.name], axes = dims, names
    return (dims_by_name, axes) if axes else None
