"""A container's catalog turned into transfers: the one place where copies in elements become copies in bytes.

Targets that differ only in which layer or expert of stored tensors they are have the same transfers. Where an axis of
the target's name is a whole dim of the stored tensors, and each chunk holds one index of it, all targets are filled
alike: from the same places of other chunks. So the transfers of the first one are computed the long way, and those of
every other follow from where its chunks begin (`Stamps`).

The same bytes may be described under another dtype and shape, as `view` does it for arrays. A file keeps codes of four
bits as bytes, in as many dims as its convention likes (`U8 [E, 2F, D/32, 16]`), and a scale of a whole tensor as `[1]`
or `[]`. The tables and the tiles count elements: `F4 [E, 2F, D]`, one scale per tile. Both describe the same row-major
bytes, so nothing is moved: only positions are translated (`redescribed`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
from operator import itemgetter
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from transaxle.axes.geometry import BoxCopy, Interval, Loop
from transaxle.axes.layout.relayout import Copier, Target, TargetPart, identity_target, is_one_run
from transaxle.axes.notation.expression import Layout
from transaxle.axes.translation.holdings import AlikePart
from transaxle.errors import Code, TransaxleError, refuse
from transaxle.formats.catalog import ITEM_BITS, Container, Entry, Extent, Shape, nbytes
from transaxle.formats.storage.copier import Bytes
from transaxle.move.transfer import Scratch, Transfer, lower, produce

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


Intervals = Sequence[Sequence[Interval]]
_Group = tuple[tuple[int, ...], int | None]
"""Dims of the one description that are one dim of the other; None where they are all of size 1 and have none there."""


@lru_cache(maxsize=4096)
def _unit(dtype: str, other: str) -> int:
    """Return how many elements of the second type one element of the first is."""
    return ITEM_BITS.get(dtype, 8) // ITEM_BITS.get(other, 8)


@lru_cache(maxsize=4096)
def _groups(stored: Shape, shape: Shape) -> tuple[_Group, ...] | None:
    """Pair the dims of a shape with those of another one that merges some of them; sizes of 1 come and go.

    Returns:
        Groups in order; None where the first shape would have to be split.
    """
    found: list[_Group] = []
    waiting = [dim for dim, size in enumerate(stored) if size != 1]
    for dim, size in enumerate(shape):
        if size == 1:
            continue
        taken: list[int] = []
        while waiting and (not taken or prod(stored[d] for d in taken) < size):
            taken.append(waiting.pop(0))
        if prod(stored[d] for d in taken) != size:
            return None
        found.append((tuple(taken), dim))
    alone = tuple(dim for dim, size in enumerate(stored) if size == 1)
    return None if waiting else (*found, (alone, None))


def _paired(name: str, stored: Shape, shape: Shape) -> tuple[_Group, ...]:
    found = _groups(stored, shape)
    if found is None:
        message = f"{list(stored)} elements cannot be viewed as {list(shape)} when only a part of them is read"
        raise refuse("UNSUPPORTED", message, tensor=name)
    return found


def _scaled(shape: Shape, unit: int) -> Shape:
    """Count the last dim in smaller elements."""
    return (*shape[:-1], shape[-1] * unit) if shape else shape


def redescribed(entry: Entry, name: str, dtype: str, shape: Shape) -> Entry:
    """Describe a stored tensor by another dtype and shape of the same bytes.

    Args:
        entry: as it is stored.
        name: what it is called now.
        dtype: safetensors code, of elements that are no larger.
        shape: elements along each dim.

    Raises:
        Refused: SHAPE_MISMATCH where the two are not the same number of bytes; UNSUPPORTED where it is stored in chunks
            or strides that this shape has no boxes for.
    """
    unit = _unit(entry.dtype, dtype)
    stored = _scaled(entry.shape, unit)
    if prod(stored) != prod(shape):
        message = f"{entry.dtype} {list(entry.shape)} and {dtype} {list(shape)} do not have the same number of bytes"
        raise refuse("SHAPE_MISMATCH", message, tensor=entry.name)
    if stored == shape and unit == 1:
        return replace(entry, name=name, dtype=dtype)
    whole = len(entry.extents) == 1 and entry.extents[0].shape == entry.shape and entry.extents[0].strides is None
    if whole or not prod(shape):
        extents = tuple(
            msgspec.structs.replace(e, start=(0,) * len(shape), shape=shape, strides=None) for e in entry.extents[:1]
        )
    else:
        groups = _paired(entry.name, stored, shape)
        extents = tuple(_extent(entry.name, extent, unit, stored, shape, groups) for extent in entry.extents)
    return Entry(name, dtype, shape, extents)


def _extent(name: str, extent: Extent, unit: int, stored: Shape, shape: Shape, groups: Sequence[_Group]) -> Extent:
    """Describe one chunk: it must be a box in both shapes, and its strides those of a box."""
    first, sizes = _scaled(extent.start, unit), _scaled(extent.shape, unit)
    steps = None
    if extent.strides is not None:
        steps = tuple(step * unit for step in extent.strides)
        if unit > 1 and (extent.strides[-1:] == (1,) or extent.shape[-1:] == (1,)):
            steps = (*steps[:-1], 1)
    start, held, strides = [0] * len(shape), [1] * len(shape), [1] * len(shape)
    for dims, dim in groups:
        if dim is None:
            if any(sizes[d] == 0 for d in dims):
                held = [0] * len(shape)
            continue
        at, count, step = 0, 1, None
        whole = True
        for d in reversed(dims):
            inner = prod(stored[e] for e in dims if e > d)
            fits = whole or sizes[d] == 1
            if steps is not None and sizes[d] > 1:
                fits = fits and (step is None or steps[d] == step * count)
                step = steps[d] if step is None else step
            if not fits or (unit > 1 and d == len(stored) - 1 and steps is not None and steps[d] != 1):
                message = f"its chunk of {list(extent.shape)} at {list(extent.start)} is not a box of {list(shape)}"
                raise refuse("UNSUPPORTED", message, tensor=name)
            at += first[d] * inner
            count *= sizes[d]
            whole = whole and sizes[d] == stored[d]
        start[dim], held[dim], strides[dim] = at, count, 1 if step is None else step
    return Extent(tuple(start), tuple(held), extent.file, extent.offset, None if steps is None else tuple(strides))


def positions(
    name: str, intervals: Intervals, dtype: str, stored: Shape, target: str, shape: Shape
) -> list[list[Interval]] | None:
    """Translate a box of a stored tensor into the positions of another description of it.

    Args:
        name: the tensor, for errors.
        intervals: per stored dim the positions wanted, in order.
        dtype: type of the stored elements.
        stored: elements along each stored dim.
        target: type of the other description's elements, no larger ones.
        shape: elements along each of its dims.

    Returns:
        Per dim of the other description, the same elements in the same order; None where there are none.

    Raises:
        Refused: UNSUPPORTED where the other description has no such positions.
    """
    if not all(any(start < stop for start, stop in held) for held in intervals):
        return None
    unit = _unit(dtype, target)
    scaled = [list(held) for held in intervals]
    if scaled:
        scaled[-1] = [(start * unit, stop * unit) for start, stop in scaled[-1]]
    sizes = _scaled(stored, unit)
    found: list[list[Interval]] = [[(0, 1)] for _ in shape]
    for dims, dim in _paired(name, sizes, shape):
        if dim is not None:
            found[dim] = list(_merged([scaled[d] for d in dims], [sizes[d] for d in dims]))
    return found


def _merged(intervals: Sequence[Sequence[Interval]], sizes: Sequence[int]) -> Iterator[Interval]:
    """Yield the positions of several dims counted as one."""
    *outer, held = intervals
    if not outer:
        yield from held
        return
    size = sizes[-1]
    for first, last in _merged(outer, sizes[:-1]):
        if list(held) == [(0, size)]:
            yield first * size, last * size
        else:
            yield from ((at * size + start, at * size + stop) for at in range(first, last) for start, stop in held)


_SCRATCH = 1 << 20
_CHUNKS = 4
"""With fewer of them, there is nothing that many targets have in common."""
_ABSENT: Code = "INCOMPLETE"


class Source:
    """What targets are made of.

    Args:
        container: the files.
        entries: the tensors that targets are made of, by the names that their origins have; None: those stored.
    """

    def __init__(self, container: Container, entries: Mapping[str, Entry] | None = None) -> None:
        self.container = container
        self.entries = container.entries if entries is None else entries
        self._copier = Copier(self.entries)
        self._stamps: Stamps | None = None
        self._alike_stamps = AlikeStamps(self.entries)

    def transfers(self, target: Target, intervals: Intervals | None = None) -> list[Transfer]:
        """Return the transfers that fill a target tensor, or a chunk of it, sorted by where they land.

        Raises:
            Refused: INCOMPLETE; UNSUPPORTED where packed elements would have to be taken apart.
        """
        if intervals is None:
            return list(self.whole_transfers(target))
        return [transfer for _, _, transfer in self._found(target, intervals)]

    def whole_transfers(self, target: Target) -> tuple[Transfer, ...]:
        """Return the transfers that fill a target tensor, as `transfers` does: the usual call, made very many times.

        Raises:
            Refused: see `transfers`.
        """
        stamped = (self._stamps and self._stamps.filled(target)) or self._alike_stamps.filled(target)
        if stamped:
            return stamped
        found = self._found(target, None)
        self._alike_stamps.learn(target, found)
        if found and len(self.entries[found[0].source].extents) >= _CHUNKS:
            self._stamps = self._stamps or Stamps(self.entries)
            self._stamps.learn(target, found)
        return tuple([transfer for _, _, transfer in found])

    def _found(self, target: Target, intervals: Intervals | None) -> list[Found]:
        """Return the transfers that fill a target tensor, or a chunk of it, found the long way."""
        whole = target.whole_source if intervals is None or _are_all(intervals, target.shape) else None
        if whole is not None and is_one_run(self.entries[whole]):
            (extent,) = self.entries[whole].extents
            size = nbytes(target.dtype, target.shape)
            return [Found(whole, 0, Transfer(extent.file, extent.offset, 0, size))] if size else []
        bits = ITEM_BITS.get(target.dtype, 8)
        found = []
        for copy in self._copier.copies(target, intervals):
            move = copy.move
            if move.size == 0:
                continue
            entry = self.entries[copy.source]
            extent = entry.extents[copy.chunk]
            if bits < 8:
                move = _in_bytes(entry, bits, move)
            base, item = extent.offset, max(bits // 8, 1)
            transfer = lower(extent.file, base, item, move.source_offset, move.target_offset, move.loops)
            found.append(Found(copy.source, copy.chunk, transfer))
        found.sort(key=_landing)
        return found

    def covers(self, target: Target) -> bool:
        """Tell whether everything is there that a target consists of."""
        try:
            self.transfers(target)
        except TransaxleError as error:
            if error.code != _ABSENT:
                raise
            return False
        return True

    def read(self, name: str) -> Bytes:
        """Return the row-major bytes of an entry as it lies; worth it for small ones."""
        entry = self.entries[name]
        out = np.empty(entry.nbytes, np.uint8)
        produce(self.container.storage, self.transfers(identity_target(name, entry)), 0, out, Scratch(_SCRATCH))
        return out


def _are_all(intervals: Intervals, shape: tuple[int, ...]) -> bool:
    """Tell whether intervals hold every position of a tensor, in order."""
    return all(len(spans) == 1 and tuple(spans[0]) == (0, size) for spans, size in zip(intervals, shape, strict=True))


def _landing(found: Found) -> int:
    return found.transfer.target


def _in_bytes(entry: Entry, bits: int, move: BoxCopy) -> BoxCopy:
    """Turn a copy of elements smaller than a byte into one of bytes: it must not take any of them apart."""
    loops = move.loops or ((1, 1, 1),)
    *outer, (count, source, target) = loops
    edges = [move.source_offset, move.target_offset, count, *(step for _, *steps in outer for step in steps)]
    if (source, target) != (1, 1) or any(edge * bits % 8 for edge in edges):
        raise refuse(
            "UNSUPPORTED",
            f"{entry.dtype} elements have {bits} bits, and this layout would split a byte between two tensors",
            tensor=entry.name,
            hint="Choose a layout that keeps the rows whole, or decode the tensor:  --decode bf16.",
        )
    scaled = [(n, s * bits // 8, t * bits // 8) for n, s, t in outer]
    run = (count * bits // 8, 1, 1)
    return BoxCopy(move.source_offset * bits // 8, move.target_offset * bits // 8, (*scaled, run))


class _AlikeStamp(NamedTuple):
    """The transfers of many targets that take alike tensors."""

    target: Target
    """The first of them: held, as identities of what it is made of are the key."""
    axes: tuple[str, ...]
    """Those of the targets' names."""
    forms: Sequence[_Form]
    """Of each stored tensor that the target takes."""
    moves: Sequence[tuple[int, int, int, int, tuple[Loop, ...]]]
    """Number of a chunk among all chunks of these tensors, and a transfer from the beginning of that chunk."""


_Form = tuple[tuple[Shape, Shape, Shape | None], ...]
"""The start, shape and strides of each chunk of a stored tensor: all that its transfers depend on but for its place."""


class AlikeStamps:
    """The transfers of targets that take the same of alike tensors with other numbers.

    The layers of a model are filled alike, whether a target takes one expert or joins all of them: from the same places
    of the tensors that have its number. So the transfers of the first target are found the long way, and those of every
    other follow from where its tensors begin, or their chunks, if these are cut alike.

    Args:
        entries: the stored tensors.
    """

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries
        self._stamps: dict[Hashable, _AlikeStamp] = {}

    def filled(self, target: Target) -> tuple[Transfer, ...] | None:
        """Return the transfers that fill a target; None where they must be found the long way."""
        stamp = self._stamps.get(_key(target))
        if stamp is None or stamp.target.dtype != target.dtype or stamp.axes != tuple(target.index):
            return None
        chunks: list[Extent] = []
        for name, form in zip(_names(target), stamp.forms, strict=True):
            held = self._entries[name].extents
            if len(held) != len(form):
                return None
            for chunk, (start, shape, strides) in zip(held, form, strict=True):
                if chunk.start != start or chunk.shape != shape or chunk.strides != strides:
                    return None
            chunks += held
        return tuple(
            [
                Transfer(chunks[number].file, chunks[number].offset + source, at, width, loops)
                for number, source, at, width, loops in stamp.moves
            ]
        )

    def learn(self, target: Target, found: Sequence[Found]) -> None:
        """Remember the transfers of a target, if others may be like it.

        Args:
            target: a target, filled wholly.
            found: what fills it.
        """
        key = _key(target)
        if key is None:
            return
        first: dict[str, int] = {}
        chunks: list[Extent] = []
        forms: list[_Form] = []
        for name in _names(target):
            held = self._entries[name].extents
            first[name] = len(chunks)
            chunks += held
            forms.append(tuple([(chunk.start, chunk.shape, chunk.strides) for chunk in held]))
        moves = []
        for name, chunk, move in found:
            number = first[name] + chunk
            moves.append((number, move.source - chunks[number].offset, move.target, move.width, move.loops))
        self._stamps[key] = _AlikeStamp(target, tuple(target.index), forms, moves)


def _key(target: Target) -> Hashable:
    """Return what the targets have in common that are filled alike; None where nothing is known of others."""
    index = target.index
    key: list[Hashable] = [id(target.layout)]
    for part in target.parts:
        origins = part.origins
        if type(origins) is not AlikePart or (origins.common is not index and origins.common != index):
            return None
        key += (part.component, id(origins.tensors))
    return tuple(key)


def _names(target: Target) -> list[str]:
    """Return the stored tensors that a target takes, if they are alike."""
    return [name for part in target.parts if isinstance(part.origins, AlikePart) for name in part.origins.names]
