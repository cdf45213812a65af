"""Turns copies of tensor elements into transfers (copies of byte ranges), using the places of stored tensors in a
container's catalog.

Targets that differ only in a layer or expert index have the same transfers, but at different offsets. If an axis of the
target's name is a whole dim of the stored tensors, and each chunk has a single index of that dim, then the targets of
all indices read the same regions of different chunks. So transfers are computed from boxes only for the first target;
the transfers of all other targets follow from the offsets of their chunks (`Stamps`).

The same bytes may also be described with a different dtype and shape, as `view` does for arrays. A file stores 4-bit
codes as bytes, with the dims that its convention prescribes (`U8 [E, 2F, D/32, 16]`), and the scale of a whole tensor
as `[1]` or `[]`. Tables and tiles count elements instead: `F4 [E, 2F, D]`, with one scale per tile. The description as
bytes and the description as elements refer to the same row-major bytes, so no bytes are moved; only positions are
translated (`redescribe`).
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

_BUFFER = "\0"
"""Character that only internal names of the buffers of encoded tensors have, such as scales; see `buffer_name`."""
_NOWHERE = -1
"""An index that no chunk of a tensor has."""


class PlacedTransfer(NamedTuple):
    """A transfer computed from boxes, together with the stored chunk that it reads."""

    source: str
    """Name of the stored tensor that the transfer reads."""
    chunk: int
    """Index of the chunk in the stored tensor's extents."""
    transfer: Transfer
    """The transfer (read of byte ranges) itself."""


class _Fill(NamedTuple):
    """One transfer of a `_Stamp`, which is the same for many targets except for its offset."""

    chunks: Mapping[Shape, Extent]
    """The target's indices along the stamp's axes -> the chunk that the transfer reads."""
    begin: int
    """Offset in bytes in the chunk at which the transfer begins."""
    target: int
    """Offset in bytes in the target at which the transfer begins, as in `Transfer`."""
    width: int
    """Number of bytes in each contiguous run, as in `Transfer`."""
    loops: tuple[Loop, ...]
    """Loops over the runs, as in `Transfer`."""


class _Stamp(NamedTuple):
    """The transfers of many similar targets, with the properties that these targets share."""

    parts: tuple[TargetPart, ...]
    """The `TargetPart` objects that these targets share; they are kept alive because their identity (`id`) is the key
    of the cache.
    """
    target: Layout
    dtype: str
    axes: tuple[str, ...]
    """Axes of the target's name, in the order of the stored tensors' dims."""
    fills: Sequence[_Fill]
    """The transfers of each of these targets, sorted by target offset; the target's index determines which chunks they
    read.
    """


class Stamps:
    """A cache of transfers for targets that consist of the same parts and differ only in an index.

    Args:
        entries: the stored tensors.
    """

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries
        self._stamps: dict[int, _Stamp] = {}  # the key is the identity (`id`) of the parts, which similar targets share
        self._chunks: dict[tuple[str, tuple[int, ...]], dict[Hashable, dict[Shape, Extent]]] = {}

    def transfers(self, target: Target) -> tuple[Transfer, ...] | None:
        """Return the transfers that fill a target; None if they are not cached."""
        stamp = self._stamps.get(id(target.parts))
        if stamp is None or stamp.target is not target.layout or stamp.dtype != target.dtype:
            return None
        index = target.index
        if tuple(index) == stamp.axes:
            position = tuple(index.values())
        else:
            position = tuple([index.get(axis, _NOWHERE) for axis in stamp.axes])
        if len(stamp.fills) == 1:  # the most frequent case is an expert's matrix in one chunk
            ((chunks, begin, target_offset, width, loops),) = stamp.fills
            chunk = chunks.get(position)
            return None if chunk is None else (Transfer(chunk.file, chunk.offset + begin, target_offset, width, loops),)
        filled = []
        for chunks, begin, target_offset, width, loops in stamp.fills:
            chunk = chunks.get(position)
            if chunk is None:
                return None
            filled.append(Transfer(chunk.file, chunk.offset + begin, target_offset, width, loops))
        return tuple(filled)

    def learn(self, target: Target, placed_transfers: Sequence[PlacedTransfer]) -> None:
        """Store the transfers of a target in the cache, if later targets may have the same transfers.

        Args:
            target: a target that stored tensors fill completely.
            placed_transfers: the target's transfers.
        """
        pinned = _name_axis_dims(target)
        if pinned is None:
            return
        dims_by_name, axes = pinned
        position = tuple([target.index[axis] for axis in axes])
        fills = []
        for name, number, transfer in placed_transfers:
            dims, chunk = dims_by_name[name], self._entries[name].extents[number]
            # If each chunk has a single index, chunks of different indices differ only in their offset.
            if any((chunk.start[dim], chunk.shape[dim]) != (at, 1) for dim, at in zip(dims, position, strict=True)):
                return
            begin = transfer.source - chunk.offset
            fills.append(
                _Fill(self._similar_chunks(name, chunk, dims), begin, transfer.target, transfer.width, transfer.loops)
            )
        self._stamps[id(target.parts)] = _Stamp(target.parts, target.layout, target.dtype, axes, fills)

    def _similar_chunks(self, name: str, chunk: Extent, dims: tuple[int, ...]) -> dict[Shape, Extent]:
        """Return index -> chunk, for chunks that differ from the given chunk only in their index along some dims."""
        dims_left = [dim for dim in range(len(chunk.start)) if dim not in dims]
        index_of, other_dims_of = _dims_getter(dims), _dims_getter(dims_left)
        sets = self._chunks.get((name, dims))
        if sets is None:
            sets = self._chunks[name, dims] = defaultdict(dict)
            for extent in self._entries[name].extents:
                start = extent.start
                sets[other_dims_of(start), extent.shape, extent.strides][index_of(start)] = extent
        return sets[other_dims_of(chunk.start), chunk.shape, chunk.strides]


def _dims_getter(dims: Sequence[int]) -> Callable[[Shape], Shape]:
    """Return a function that selects some dims of an index; `dims` must be in ascending order."""
    if not dims or dims[-1] - dims[0] == len(dims) - 1:
        return itemgetter(slice(dims[0], dims[-1] + 1) if dims else slice(0))
    return lambda index: tuple([index[dim] for dim in dims])


def _name_axis_dims(target: Target) -> tuple[dict[str, tuple[int, ...]], tuple[str, ...]] | None:
    """Return stored tensor name -> the dims whose axes are indices in the target's name, together with these axes in
    the order of the dims.

    A dim is included only if it consists of a single axis. The result is None unless every axis of the name is a dim of
    every stored tensor, in the same order.
    """
    index = target.index
    dims_by_name: dict[str, tuple[int, ...]] = {}
    axes: tuple[str, ...] = ()
    for part in target.parts:
        shape_axes = {axis for share in target.layout.shares[part.component] for axis, _, _ in share.axes}
        for origin in part.origins:
            pinned_dims = []
            for dim, share in enumerate(origin.layout.shares[origin.component]):
                name_axes = [axis for axis, *_ in share.axes if axis in index]
                if not name_axes:
                    continue
                if (
                    share.axes != ((name_axes[0], origin.layout.shape[dim], 1),)
                    or share.offset
                    or name_axes[0] in shape_axes
                ):
                    return None
                pinned_dims.append((dim, name_axes[0]))
            dims, names = tuple([dim for dim, _ in pinned_dims]), tuple([axis for _, axis in pinned_dims])
            if (
                len(pinned_dims) != len(index)
                or names != (axes or names)
                or dims_by_name.get(origin.name, dims) != dims
            ):
                return None
            dims_by_name[origin.name], axes = dims, names
    return (dims_by_name, axes) if axes else None


Intervals = Sequence[Sequence[Interval]]
_Group = tuple[tuple[int, ...], int | None]
"""The dims of one shape that correspond to one dim of a second shape; None for dims of size 1 that the second shape
lacks.
"""


@lru_cache(maxsize=4096)
def _unit(dtype: str, smaller: str) -> int:
    """Return how many elements of the smaller dtype have the same size as one element of the larger dtype."""
    return ITEM_BITS.get(dtype, 8) // ITEM_BITS.get(smaller, 8)


@lru_cache(maxsize=4096)
def _match_dims(stored: Shape, shape: Shape) -> tuple[_Group, ...] | None:
    """Match the dims of a stored shape with the dims of a shape that merges some of them. Dims of size 1 are ignored.

    Returns:
        Groups of stored dims, in order; None if a dim of the stored shape would have to be split.
    """
    groups: list[_Group] = []
    remaining = [dim for dim, size in enumerate(stored) if size != 1]
    for dim, size in enumerate(shape):
        if size == 1:
            continue
        merged: list[int] = []
        while remaining and (not merged or prod(stored[d] for d in merged) < size):
            merged.append(remaining.pop(0))
        if prod(stored[d] for d in merged) != size:
            return None
        groups.append((tuple(merged), dim))
    unit_dims = tuple(dim for dim, size in enumerate(stored) if size == 1)
    return None if remaining else (*groups, (unit_dims, None))


def _require_match(name: str, stored: Shape, shape: Shape) -> tuple[_Group, ...]:
    groups = _match_dims(stored, shape)
    if groups is None:
        message = f"{list(stored)} elements cannot be viewed as {list(shape)} when only a part of them is read"
        raise refuse("UNSUPPORTED", message, tensor=name)
    return groups


def _scale_last_dim(shape: Shape, unit: int) -> Shape:
    """Return a shape whose last dim counts smaller elements: `unit` of them make up one element."""
    return (*shape[:-1], shape[-1] * unit) if shape else shape


def in_bytes(entry: Entry) -> Entry:
    """Return an entry of 4-bit floating-point codes counted in bytes; other entries are returned unchanged.

    Raises:
        Refused: with the code UNSUPPORTED if a chunk does not consist of whole bytes.
    """
    if entry.dtype != "F4":
        return entry
    extents = []
    for extent in entry.extents:
        if extent.strides is not None or extent.start[-1] % 2 or extent.shape[-1] % 2:
            raise refuse("UNSUPPORTED", "a chunk does not consist of whole bytes", tensor=entry.name)
        start, shape = ((*each[:-1], each[-1] // 2) for each in (extent.start, extent.shape))
        extents.append(replace(extent, start=start, shape=shape))
    return Entry(entry.name, "U8", (*entry.shape[:-1], entry.shape[-1] // 2), tuple(extents))


def redescribe(entry: Entry, name: str, dtype: str, shape: Shape) -> Entry:
    """Describe the bytes of a stored tensor with a different dtype and shape.

    Args:
        entry: the stored tensor, as an entry of the catalog.
        name: name of the new description.
        dtype: safetensors code of the new dtype; its elements must not be larger than the stored elements.
        shape: number of elements of the new dtype along each dim.

    Raises:
        Refused: with code SHAPE_MISMATCH, if the new shape has a different size in bytes; with code UNSUPPORTED, if
            chunks or strides of the stored tensor are not boxes in the new shape.
    """
    unit = _unit(entry.dtype, dtype)
    stored = _scale_last_dim(entry.shape, unit)
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
        groups = _require_match(entry.name, stored, shape)
        extents = tuple(_redescribe_extent(entry.name, extent, unit, stored, shape, groups) for extent in entry.extents)
    return Entry(name, dtype, shape, extents)


def _redescribe_extent(
    name: str, extent: Extent, unit: int, stored: Shape, shape: Shape, groups: Sequence[_Group]
) -> Extent:
    """Describe one chunk with a different shape; the chunk must be a box with strides in both shapes."""
    first, sizes = _scale_last_dim(extent.start, unit), _scale_last_dim(extent.shape, unit)
    steps = None
    if extent.strides is not None:
        steps = tuple(step * unit for step in extent.strides)
        if unit > 1 and (extent.strides[-1:] == (1,) or extent.shape[-1:] == (1,)):
            steps = (*steps[:-1], 1)
    start, lengths, strides = [0] * len(shape), [1] * len(shape), [1] * len(shape)
    for dims, dim in groups:
        if dim is None:
            if any(sizes[d] == 0 for d in dims):
                lengths = [0] * len(shape)
            continue
        position, count, step = 0, 1, None
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
            position += first[d] * inner
            count *= sizes[d]
            whole = whole and sizes[d] == stored[d]
        start[dim], lengths[dim], strides[dim] = position, count, 1 if step is None else step
    return Extent(tuple(start), tuple(lengths), extent.file, extent.offset, None if steps is None else tuple(strides))


def translate_box(
    name: str, intervals: Intervals, dtype: str, stored: Shape, target: str, shape: Shape
) -> list[list[Interval]] | None:
    """Translate a box of a stored tensor into positions in a second description (dtype and shape) of the same bytes.

    Args:
        name: name of the tensor, for errors.
        intervals: for each dim of the stored tensor, the selected positions, in order.
        dtype: dtype of the stored elements.
        stored: number of elements along each stored dim.
        target: dtype of the second description; its elements must not be larger than the stored elements.
        shape: number of elements along each dim of the second description.

    Returns:
        For each dim of the second description, the positions of the same elements in the same order; None if the box is
        empty.

    Raises:
        Refused: with code UNSUPPORTED, if the box is not a box in the second description.
    """
    if not all(any(start < stop for start, stop in ranges) for ranges in intervals):
        return None
    unit = _unit(dtype, target)
    scaled = [list(ranges) for ranges in intervals]
    if scaled:
        scaled[-1] = [(start * unit, stop * unit) for start, stop in scaled[-1]]
    sizes = _scale_last_dim(stored, unit)
    result: list[list[Interval]] = [[(0, 1)] for _ in shape]
    for dims, dim in _require_match(name, sizes, shape):
        if dim is not None:
            result[dim] = list(_merge_dims([scaled[d] for d in dims], [sizes[d] for d in dims]))
    return result


def _merge_dims(intervals: Sequence[Sequence[Interval]], sizes: Sequence[int]) -> Iterator[Interval]:
    """Yield the positions in a dim that merges several dims."""
    *outer, inner = intervals
    if not outer:
        yield from inner
        return
    size = sizes[-1]
    for first, last in _merge_dims(outer, sizes[:-1]):
        if list(inner) == [(0, size)]:
            yield first * size, last * size
        else:
            yield from (
                (index * size + start, index * size + stop) for index in range(first, last) for start, stop in inner
            )


_SCRATCH = 1 << 20
_CHUNKS = 4
"""The transfers of a tensor with at least this number of chunks are cached by chunk."""
_ABSENT: Code = "INCOMPLETE"


class Source:
    """The source tensors from which target tensors are composed; it turns target tensors into transfers (reads of byte
    ranges).

    Args:
        container: the container with the source's files.
        entries: name by which targets refer to a source tensor -> the source tensor; None means the stored tensors.
    """

    def __init__(self, container: Container, entries: Mapping[str, Entry] | None = None) -> None:
        self.container = container
        self.entries = container.entries if entries is None else entries
        self._copier = Copier(self.entries)
        self._stamps: Stamps | None = None
        self._similar_stamps = SimilarStamps(self.entries)

    def transfers(self, target: Target, intervals: Intervals | None = None) -> list[Transfer]:
        """Return the transfers that fill a target tensor, or the region of it that `intervals` selects, sorted by
        target offset.

        Raises:
            Refused: with code INCOMPLETE, if elements of the target are not stored; with code UNSUPPORTED, if packed
                elements would be split.
        """
        if intervals is None:
            return list(self.whole_transfers(target))
        return [transfer for _, _, transfer in self._compute_transfers(target, intervals)]

    def whole_transfers(self, target: Target) -> tuple[Transfer, ...]:
        """Return the transfers that fill a whole target tensor; this function is optimized for very many calls.

        Raises:
            Refused: as for `transfers`.
        """
        cached = (self._stamps and self._stamps.transfers(target)) or self._similar_stamps.transfers(target)
        if cached:
            return cached
        placed_transfers = self._compute_transfers(target, None)
        self._similar_stamps.learn(target, placed_transfers)
        if placed_transfers and len(self.entries[placed_transfers[0].source].extents) >= _CHUNKS:
            self._stamps = self._stamps or Stamps(self.entries)
            self._stamps.learn(target, placed_transfers)
        return tuple([transfer for _, _, transfer in placed_transfers])

    def _compute_transfers(self, target: Target, intervals: Intervals | None) -> list[PlacedTransfer]:
        """Compute from boxes the transfers that fill a target tensor, or the region of it that `intervals` selects."""
        whole = target.whole_source if intervals is None or _select_all(intervals, target.shape) else None
        if whole is not None and is_one_run(self.entries[whole]):
            (extent,) = self.entries[whole].extents
            size = nbytes(target.dtype, target.shape)
            return [PlacedTransfer(whole, 0, Transfer(extent.file, extent.offset, 0, size))] if size else []
        bits = ITEM_BITS.get(target.dtype, 8)
        placed_transfers = []
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
            placed_transfers.append(PlacedTransfer(copy.source, copy.chunk, transfer))
        placed_transfers.sort(key=_target_offset)
        return placed_transfers

    def covers(self, target: Target) -> bool:
        """Return whether all elements of a target are stored."""
        try:
            self.transfers(target)
        except TransaxleError as error:
            if error.code != _ABSENT:
                raise
            return False
        return True

    def read(self, name: str) -> Bytes:
        """Return the row-major bytes of a whole source tensor, which should be small."""
        entry = self.entries[name]
        out = np.empty(entry.nbytes, np.uint8)
        produce(self.container.storage, self.transfers(identity_target(name, entry)), 0, out, Scratch(_SCRATCH))
        return out


def _select_all(intervals: Intervals, shape: tuple[int, ...]) -> bool:
    """Return whether intervals select every position of a tensor, in order."""
    return all(len(spans) == 1 and tuple(spans[0]) == (0, size) for spans, size in zip(intervals, shape, strict=True))


def _target_offset(placed: PlacedTransfer) -> int:
    return placed.transfer.target


def _in_bytes(entry: Entry, bits: int, move: BoxCopy) -> BoxCopy:
    """Convert a copy of elements smaller than a byte into a copy of bytes. The copy must not split a byte."""
    loops = move.loops or ((1, 1, 1),)
    *outer, (count, source, target) = loops
    edges = [move.source_offset, move.target_offset, count, *(step for _, *steps in outer for step in steps)]
    if (source, target) != (1, 1) or any(edge * bits % 8 for edge in edges):
        raise refuse(
            "UNSUPPORTED",
            f"{entry.dtype} elements have {bits} bits, and this layout would split a byte between two tensors",
            tensor=entry.name,
            hint="Choose a layout that keeps the rows whole, or all names:  --to safetensors:identity.",
        )
    scaled = [(n, s * bits // 8, t * bits // 8) for n, s, t in outer]
    run = (count * bits // 8, 1, 1)
    return BoxCopy(move.source_offset * bits // 8, move.target_offset * bits // 8, (*scaled, run))


class _SimilarStamp(NamedTuple):
    """The transfers of targets that read the same regions of similar tensors."""

    target: Target
    """The first of these targets; it is kept alive because the identities (`id`) of its parts are the key of the
    cache.
    """
    axes: tuple[str, ...]
    """Axes of the target's name."""
    forms: Sequence[_Form]
    """Chunk layout of each stored tensor that the target reads."""
    moves: Sequence[tuple[int, int, int, int, tuple[Loop, ...]]]
    """For each transfer: (chunk number counted over all tensors, offset in the chunk, target offset, width of a run,
    loops).
    """


_Form = tuple[tuple[Shape, Shape, Shape | None], ...]
"""Start, shape and strides of each chunk of a stored tensor; these determine its transfers except for offsets."""


class SimilarStamps:
    """A cache of transfers for targets that read the same regions of similar tensors with different indices.

    A target may be one expert or join all experts. In both cases, every layer is filled in the same way, from the same
    regions of the tensors with the layer's index. So transfers are computed from boxes only for the first target. The
    transfers of later targets follow from the offsets of their tensors' chunks, if the chunks have the same layout.

    Args:
        entries: the stored tensors.
    """

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries
        self._stamps: dict[Hashable, _SimilarStamp] = {}

    def transfers(self, target: Target) -> tuple[Transfer, ...] | None:
        """Return the transfers that fill a target; None if they are not cached."""
        stamp = self._stamps.get(alike_key(target))
        if stamp is None or stamp.target.dtype != target.dtype or stamp.axes != tuple(target.index):
            return None
        chunks: list[Extent] = []
        for name, form in zip(origin_names(target), stamp.forms, strict=True):
            extents = self._entries[name].extents
            if len(extents) != len(form):
                return None
            for chunk, (start, shape, strides) in zip(extents, form, strict=True):
                if chunk.start != start or chunk.shape != shape or chunk.strides != strides:
                    return None
            chunks += extents
        return tuple(
            [
                Transfer(chunks[number].file, chunks[number].offset + source, at, width, loops)
                for number, source, at, width, loops in stamp.moves
            ]
        )

    def learn(self, target: Target, placed_transfers: Sequence[PlacedTransfer]) -> None:
        """Store the transfers of a target in the cache, if later targets may have the same transfers.

        Args:
            target: a target that stored tensors fill completely.
            placed_transfers: the target's transfers.
        """
        key = alike_key(target)
        if key is None:
            return
        first: dict[str, int] = {}
        chunks: list[Extent] = []
        forms: list[_Form] = []
        for name in origin_names(target):
            extents = self._entries[name].extents
            first[name] = len(chunks)
            chunks += extents
            forms.append(tuple([(chunk.start, chunk.shape, chunk.strides) for chunk in extents]))
        moves = []
        for name, chunk, move in placed_transfers:
            number = first[name] + chunk
            moves.append((number, move.source - chunks[number].offset, move.target, move.width, move.loops))
        self._stamps[key] = _SimilarStamp(target, tuple(target.index), forms, moves)


def alike_key(target: Target) -> Hashable:
    """Return a key that targets share if they read the same regions of tensors that are alike, so that what is computed
    for one of them is true of all, under the names of `origin_names`; None if no target is known to be like this one.

    The key contains identities (`id`): it is valid as long as its target exists.
    """
    index = target.index
    key: list[Hashable] = [id(target.layout)]
    for part in target.parts:
        origins = part.origins
        if type(origins) is AlikePart:
            if origins.common is not index and origins.common != index:
                return None
            key += (part.component, id(origins.tensors))
        elif index or not all(_BUFFER in origin.name for origin in origins):
            return None  # most tensors outside of layers are like no other
        else:
            key.append(part.component)
            key += [(id(origin.layout), origin.component, *origin.index.items()) for origin in origins]
    return tuple(key)


def origin_names(target: Target) -> list[str]:
    """Return the names of the stored tensors that a target reads, part by part; tensors of equal `alike_key` have as
    many of them, in the same order.
    """
    return [
        name
        for part in target.parts
        for name in (
            part.origins.names if isinstance(part.origins, AlikePart) else [origin.name for origin in part.origins]
        )
    ]
