"""Stamps: transfers of targets that differ only in which layer or expert of one stored tensor they are.

Where an axis of the target's name is a whole dim of the stored tensor, and each chunk holds one index of it, all
targets are filled alike: from the same place of another chunk. So the transfer of the first one is found the long way,
and that of every other follows from where its chunk begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from transaxle.axes.layout.relayout import Copy, Origin, Target
from transaxle.axes.notation.expression import Layout
from transaxle.formats.catalog.catalog import Entry, Extent
from transaxle.formats.dtype import Shape
from transaxle.move.transfer import Transfer


class _Stamp(NamedTuple):
    """The transfer of one target, with what must be the same of another."""

    target: Layout
    """Held, as its identity is the key; as is the origin."""
    origin: Origin
    pinned: tuple[tuple[int, str], ...]
    """Dims of the stored tensor that are an axis of the target's name."""
    start: Shape
    """First index of the chunk."""
    shape: Shape
    """Elements of the chunk."""
    strides: Shape | None
    base: int
    """Byte offset of the chunk."""
    transfer: Transfer
    chunks: Mapping[Shape, Extent]
    """The chunks of the stored tensor, by their first index."""
    leading: tuple[str, ...] | None
    """The axes of the target's name, where they are the first dims of the stored tensor, in order."""


class Stamps:
    """The transfers that were found the long way.

    Args:
        entries: the stored tensors.
    """

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries
        self._stamps: dict[tuple[int, int, str], _Stamp] = {}
        self._chunks: dict[str, dict[Shape, Extent]] = {}

    def transfer(self, target: Target) -> Transfer | None:
        """Return the one transfer that fills a target; None where it must be found the long way."""
        parts, index = target.parts, target.index
        if len(parts) != 1 or len(parts[0].origins) != 1:
            return None
        origin = parts[0].origins[0]
        stamp = self._stamps.get((id(target.layout), id(origin), target.dtype))
        if stamp is None or len(stamp.pinned) != len(index):
            return None
        try:
            if stamp.leading is not None:
                start = (*[index[axis] for axis in stamp.leading], *stamp.start[len(stamp.leading) :])
            else:
                starts = list(stamp.start)
                for dim, axis in stamp.pinned:
                    starts[dim] = index[axis]
                start = tuple(starts)
        except KeyError:
            return None
        chunk = stamp.chunks.get(start)
        if chunk is None or chunk.shape != stamp.shape or chunk.strides != stamp.strides:
            return None
        transfer = stamp.transfer
        source = chunk.offset + transfer.source - stamp.base
        return Transfer(chunk.file, source, transfer.target, transfer.width, transfer.loops)

    def learn(self, target: Target, copies: Sequence[Copy], transfers: Sequence[Transfer]) -> None:
        """Remember the transfers of a target, if others may be like it.

        Args:
            target: a target, filled wholly.
            copies: the copies that fill it.
            transfers: the same in bytes.
        """
        origin = _only_origin(target)
        if origin is None or len(copies) != 1 or len(transfers) != 1:
            return
        chunk = self._entries[origin.name].extents[copies[0].chunk]
        pinned = _pinned(target, origin, chunk)
        if not pinned:
            return
        if origin.name not in self._chunks:
            extents = self._entries[origin.name].extents
            chunks = {extent.start: extent for extent in extents}
            if len(chunks) != len(extents):  # some are empty, and begin where others do
                return
            self._chunks[origin.name] = chunks
        leading = tuple(axis for _, axis in pinned) if all(at == dim for at, (dim, _) in enumerate(pinned)) else None
        self._stamps[id(target.layout), id(origin), target.dtype] = _Stamp(
            target.layout, origin, pinned, chunk.start, chunk.shape, chunk.strides, chunk.offset, transfers[0],
            self._chunks[origin.name], leading,
        )  # fmt: skip


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
