"""A container's catalog turned into transfers: the one place where copies in elements become copies in bytes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from transaxle.axes.geometry.piece import Move
from transaxle.axes.layout.relayout import Copier, Target, is_one_run, unchanged
from transaxle.engine.copying.bitcast import Intervals
from transaxle.engine.copying.stamps import Stamps
from transaxle.errors import Code, TransaxleError, refuse
from transaxle.formats.catalog.catalog import Container, Entry
from transaxle.formats.dtype import ITEM_BITS, nbytes
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

    def transfers(self, target: Target, intervals: Intervals | None = None) -> list[Transfer]:
        """Return the transfers that fill a target tensor, or a chunk of it, sorted by where they land.

        Raises:
            Refused: INCOMPLETE; UNSUPPORTED where packed elements would have to be taken apart.
        """
        if intervals is None and self._stamps is not None and (stamped := self._stamps.filled(target)):
            return list(stamped)
        return self._found(target, intervals)

    def whole_transfers(self, target: Target) -> tuple[Transfer, ...]:
        """Return the transfers that fill a target tensor, as `transfers` does: the usual call, made very many times.

        Raises:
            Refused: see `transfers`.
        """
        return (self._stamps and self._stamps.filled(target)) or tuple(self._found(target, None))

    def _found(self, target: Target, intervals: Intervals | None) -> list[Transfer]:
        """Return the transfers that fill a target tensor, or a chunk of it, found the long way."""
        whole = target.moved_whole if intervals is None or _are_all(intervals, target.shape) else None
        if whole is not None and is_one_run(self.entries[whole]):
            (extent,) = self.entries[whole].extents
            size = nbytes(target.dtype, target.shape)
            return [Transfer(extent.file, extent.offset, 0, size)] if size else []
        stamps = self._stamps_of(target) if intervals is None else None
        bits = ITEM_BITS.get(target.dtype, 8)
        found = []
        copies = list(self._copier.copies(target, intervals))
        for copy in copies:
            move = copy.move
            if move.size == 0:
                continue
            entry = self.entries[copy.source]
            extent = entry.extents[copy.chunk]
            if bits < 8:
                move = _in_bytes(entry, bits, move)
            item = max(bits // 8, 1)
            found.append(lower(extent.file, extent.offset, item, move.source_offset, move.target_offset, move.loops))
        found.sort(key=_landing)
        if stamps is not None:
            stamps.learn(target, copies, found)
        return found

    def _stamps_of(self, target: Target) -> Stamps | None:
        """Return the stamps, for a target that is part of one tensor of many chunks; None for any other."""
        if len(target.parts) != 1 or len(target.parts[0].origins) != 1:
            return None
        if len(self.entries[target.parts[0].origins[0].name].extents) < _CHUNKS:
            return None
        if self._stamps is None:
            self._stamps = Stamps(self.entries)
        return self._stamps

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
        produce(self.container.storage, self.transfers(unchanged(name, entry)), 0, out, Scratch(_SCRATCH))
        return out


def _are_all(intervals: Intervals, shape: tuple[int, ...]) -> bool:
    """Tell whether intervals hold every position of a tensor, in order."""
    return all(len(spans) == 1 and tuple(spans[0]) == (0, size) for spans, size in zip(intervals, shape, strict=True))


def _landing(transfer: Transfer) -> int:
    return transfer.target


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
