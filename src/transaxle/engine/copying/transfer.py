"""Transfers: box copies in bytes, from a place in a file to a place in a tensor; and the buffers that carry them out.

A transfer knows nothing of axes. `clip` cuts it by a byte range of the target, so a tensor of any size is produced in
order, block by block, in fixed memory; `fill` carries a clipped transfer out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from transaxle.axes.geometry.strided import Loop, lexicographic_boxes, rank
from transaxle.formats.storage.strided_reads import read_strided

Bytes = npt.NDArray[np.uint8]
"""One-dimensional."""


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


class Reader(Protocol):
    """What transfers read from (`formats.Storage`)."""

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes of a file from `offset`."""


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


class Scratch:
    """A reused buffer for strided reads; one per worker.

    Gaps between the runs of a transfer are read along where that is faster than leaving them out.

    Args:
        size: bytes.
        waste: bytes that may be read for each byte wanted.
        gap: bytes between two runs that may be read along however many they are in all.
    """

    def __init__(self, size: int, waste: float = 4.0, gap: int = 1 << 14) -> None:
        self.array: Bytes = np.empty(size, np.uint8)
        self.waste = waste
        self.gap = gap

    def takes(self, transfer: Transfer) -> bool:
        """Tell whether to read everything between a transfer's first and last byte: it fits, and wastes little."""
        span = transfer.source_span
        if span > len(self.array):
            return False
        wanted = transfer.width * prod(count for count, step, _ in transfer.loops if step)
        return span <= wanted * self.waste or _widest_gap(transfer) <= self.gap

    def apart(self, transfer: Transfer) -> bool:
        """Tell whether each run is best read alone, straight into place: it is wanted once, and not next to another."""
        times, step, into = min(transfer.loops, key=lambda loop: loop[1])
        if not step:
            return False
        near = min(times, (len(self.array) - transfer.width) // step + 1)
        return near < 2 or not self.takes(Transfer(transfer.file, 0, 0, transfer.width, ((near, step, into),)))


def _widest_gap(transfer: Transfer) -> int:
    """Return the most bytes that lie unread between two runs of a transfer."""
    gap, span = 0, transfer.width
    for count, step, _ in sorted(transfer.loops, key=lambda loop: loop[1]):
        gap = max(gap, step - span)
        span += (count - 1) * step
    return gap


def fill(reader: Reader, transfer: Transfer, out: Bytes, start: int, scratch: Scratch) -> None:
    """Carry a transfer out into a buffer that holds the target's bytes from `start` on.

    Args:
        reader: the source files.
        transfer: it must lie inside the buffer.
        out: the buffer.
        start: byte of the target at which `out` begins.
        scratch: room for strided reads; what does not fit at once is done in parts.

    Raises:
        TransaxleError: what the reader raises.
    """
    at = transfer.target - start
    if not transfer.loops:
        reader.read_into(transfer.file, transfer.source, out.data[at : at + transfer.width])
        return
    if scratch.takes(transfer):
        held = scratch.array[: transfer.source_span]
        reader.read_into(transfer.file, transfer.source, held.data)
        scatter(held, transfer, out, at)
        return
    if scratch.apart(transfer):
        end = transfer.target_end - start
        read_strided(reader, transfer.file, transfer.source, out.data[at:end], transfer.width, transfer.loops)
        return
    widest = max(range(len(transfer.loops)), key=lambda i: transfer.loops[i][1])
    count, step, into = transfer.loops[widest]
    before, after = transfer.loops[:widest], transfer.loops[widest + 1 :]

    def part(first: int, taken: int) -> Transfer:
        loops = (*before, (taken, step, into), *after) if taken > 1 else before + after
        source, target = transfer.source + first * step, transfer.target + first * into
        return Transfer(transfer.file, source, target, transfer.width, loops)

    one, room = part(0, 1), len(scratch.array)
    span = one.source_span
    at_once = min(count, (room - span) // step + 1) if step else 1
    if at_once > 1 and scratch.takes(part(0, at_once)):
        for first in range(0, count, at_once):
            fill(reader, part(first, min(at_once, count - first)), out, start, scratch)
    elif one.loops and scratch.takes(one):
        for first in range(0, count, room // span):
            taken = min(room // span, count - first)
            loops = (*before, (taken, span, into), *after)
            side_by_side = Transfer(one.file, 0, one.target + first * into, one.width, loops)
            for slot in range(taken):
                view = scratch.array.data[slot * span : (slot + 1) * span]
                reader.read_into(one.file, one.source + (first + slot) * step, view)
            scatter(scratch.array[: taken * span], side_by_side, out, side_by_side.target - start)
    else:
        for first in range(count):
            fill(reader, part(first, 1), out, start, scratch)


_WORDS: dict[int, np.dtype[Any]] = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


def scatter(held: Bytes, transfer: Transfer, out: Bytes, at: int) -> None:
    """Copy the runs of a transfer from one buffer to the other: one at once, several as the widest words that fit.

    Args:
        held: the source's bytes from the transfer's first one on.
        transfer: its loops and width.
        out: the target buffer.
        at: where the transfer's first byte goes.
    """
    width = transfer.width
    if not transfer.loops:
        out[at : at + width] = held[:width]
        return
    steps = [at, width, *(value for _, source, target in transfer.loops for value in (source, target))]
    word = next(size for size in (8, 4, 2, 1) if all(step % size == 0 for step in steps))
    shape = [count for count, _, _ in transfer.loops]
    sources = [source for _, source, _ in transfer.loops]
    targets = [target for _, _, target in transfer.loops]
    if width > word:
        shape.append(width // word)
        sources.append(word)
        targets.append(word)
    kind = _WORDS[word]
    view: npt.NDArray[Any] = np.ndarray(shape, kind, held.data, 0, sources)
    into: npt.NDArray[Any] = np.ndarray(shape, kind, out.data, at, targets)
    into[...] = view


def landing(blocks: Iterable[memoryview], places: Iterable[Transfer]) -> Iterator[tuple[str, int, memoryview]]:
    """Cut the bytes of a tensor, which come block by block, where the places that they go to end.

    Args:
        blocks: the tensor's bytes in order.
        places: consecutive runs of them, see `PlannedTensor.places`; together as long as the blocks.

    Yields:
        `(file, offset in the file, bytes)`.
    """
    runs = iter(places)
    file, offset, left = "", 0, 0
    for block in blocks:
        while len(block):
            while not left:
                run = next(runs)
                file, offset, left = run.file, run.source, run.width
            taken = min(left, len(block))
            yield file, offset, block[:taken]
            block = block[taken:]
            offset, left = offset + taken, left - taken


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
