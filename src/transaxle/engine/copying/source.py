"""A container's catalog turned into transfers: the one place where copies in elements become copies in bytes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from transaxle.axes.geometry.piece import Move
from transaxle.axes.geometry.strided import Loop
from transaxle.axes.layout.relayout import Copier, Target, is_one_run, unchanged
from transaxle.axes.translation.holdings import AlikePart
from transaxle.engine.copying.bitcast import Intervals
from transaxle.engine.copying.stamps import Found, Stamps
from transaxle.errors import Code, TransaxleError, refuse
from transaxle.formats.catalog import Container, Entry, Extent
from transaxle.formats.dtype import ITEM_BITS, Shape, nbytes
from transaxle.move.endpoint import Bytes
from transaxle.move.strided_fill import Scratch, produce
from transaxle.move.transfer import Transfer, lower

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
        whole = target.moved_whole if intervals is None or _are_all(intervals, target.shape) else None
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
        import numpy as np

        entry = self.entries[name]
        out = np.empty(entry.nbytes, np.uint8)
        produce(self.container.storage, self.transfers(unchanged(name, entry)), 0, out, Scratch(_SCRATCH))
        return out


def _are_all(intervals: Intervals, shape: tuple[int, ...]) -> bool:
    """Tell whether intervals hold every position of a tensor, in order."""
    return all(len(spans) == 1 and tuple(spans[0]) == (0, size) for spans, size in zip(intervals, shape, strict=True))


def _landing(found: Found) -> int:
    return found.transfer.target


def _in_bytes(entry: Entry, bits: int, move: Move) -> Move:
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
    return Move(move.source_offset * bits // 8, move.target_offset * bits // 8, (*scaled, run))


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
