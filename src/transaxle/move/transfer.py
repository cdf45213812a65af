"""Transfers: box copies in bytes, from a place in a file to a place in a tensor.

A transfer knows nothing of axes. `clip` cuts it by a byte range of the target, so a tensor of any size is produced in
order, block by block, in fixed memory; `endpoint.note_parts` says how clipped transfers are carried out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from transaxle.axes.geometry.strided import Loop, lexicographic_boxes, rank


class Transfer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One box copy from a file into a tensor, in bytes."""

    file: str
    """Source file inside its container."""
    source: int
    """Byte offset in the file of the first element."""
    target: int
    """Byte offset in the target tensor (or chunk) of the first element."""
    width: int
    """Bytes of the smallest contiguous run; everything below moves runs of this width."""
    loops: tuple[Loop, ...] = ()
    """`(count, source stride, target stride)` in bytes, in target order, outermost first."""

    @property
    def size(self) -> int:
        """Bytes moved."""
        count = self.width
        for loop in self.loops:
            count *= loop[0]
        return count

    @property
    def target_end(self) -> int:
        """One past the last byte written."""
        end = self.target + self.width
        for count, _, step in self.loops:
            end += (count - 1) * step
        return end

    @property
    def source_span(self) -> int:
        """Bytes between the first and one past the last byte read."""
        span = self.width
        for count, step, _ in self.loops:
            span += (count - 1) * step
        return span

    @property
    def is_dense(self) -> bool:
        """Whether the runs follow one another in the file without gaps, in the order of the target."""
        span = self.width
        for count, step, _ in reversed(self.loops):
            if step != span:
                return False
            span *= count
        return True

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON data, with a name for each number."""
        loops = [dict(zip(("count", "source_stride", "target_stride"), loop, strict=True)) for loop in self.loops]
        return {**{name: getattr(self, name) for name in self.__struct_fields__}, "loops": loops}


def lower(file: str, base: int, itemsize: int, source: int, target: int, loops: Sequence[Loop]) -> Transfer:
    """Turn a copy in elements into a transfer in bytes.

    Args:
        file: the file that holds the source chunk.
        base: byte offset of the chunk's first element.
        itemsize: bytes per element.
        source: first element in the chunk.
        target: first element in the target.
        loops: coalesced loops in elements.
    """
    scaled = [(count, step * itemsize, into * itemsize) for count, step, into in loops]
    width = itemsize
    if scaled and scaled[-1][1] == width and scaled[-1][2] == width:
        width *= scaled.pop()[0]
    return Transfer(file, base + source * itemsize, target * itemsize, width, tuple(scaled))


def clip(transfer: Transfer, start: int, stop: int) -> Iterator[Transfer]:
    """Cut a transfer by the byte range `[start, stop)` of the target.

    Post-condition: the results are disjoint and move exactly the bytes that land in the range.
    """
    if start <= transfer.target and transfer.target_end <= stop:
        yield transfer
        return
    if not transfer.loops:
        low, high = max(start, transfer.target), min(stop, transfer.target_end)
        if low < high:
            source = transfer.source + low - transfer.target
            yield Transfer(transfer.file, source, low, high - low)
        return
    loops = [(count, step) for count, _, step in transfer.loops]
    first = rank([*loops, (transfer.width, 1)], start - transfer.target)
    last = rank([*loops, (transfer.width, 1)], stop - transfer.target)
    for box in lexicographic_boxes([*(count for count, _ in loops), transfer.width], first, last):
        *outer, (low, high) = box
        source, target = transfer.source + low, transfer.target + low
        kept = []
        for (begin, end), (_, step, into) in zip(outer, transfer.loops, strict=True):
            source += begin * step
            target += begin * into
            if end - begin > 1:
                kept.append((end - begin, step, into))
        yield Transfer(transfer.file, source, target, high - low, tuple(kept))


def active(transfers: Sequence[Transfer], ends: Iterable[int]) -> Iterator[tuple[int, int, list[Transfer]]]:
    """Walk a target block by block, in order.

    Args:
        transfers: sorted by their first target byte.
        ends: where the blocks end, in bytes of the target; the first one begins at 0.

    Yields:
        `(start, stop, the transfers' parts in that range)`.
    """
    running: list[Transfer] = []
    coming = start = 0
    for stop in ends:
        running = [transfer for transfer in running if transfer.target_end > start]
        while coming < len(transfers) and transfers[coming].target < stop:
            running.append(transfers[coming])
            coming += 1
        yield start, stop, [part for transfer in running for part in clip(transfer, start, stop)]
        start = stop
