"""Carry a transfer out: read its bytes from an endpoint and lay them into a buffer, runs of a stride and all."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from math import prod

from transaxle.formats.storage.copier import READING, Bytes, Steps, scatter
from transaxle.move.endpoint import Readable
from transaxle.move.transfer import Transfer

_TOGETHER = 1 << 20
"""Bytes that are read side by side into the scratch, of several transfers: no more than stays in the cache."""


class Scratch:
    """A reused buffer for strided reads; one per worker.

    Gaps between the runs of a transfer are read along where that is faster than leaving them out.

    Args:
        size: bytes.
        waste: bytes that may be read for each byte wanted.
        gap: bytes between two runs that may be read along however many they are in all.
        few: so many runs are read one by one, for which no gap is worth reading.
    """

    def __init__(self, size: int, waste: float = 4.0, gap: int = 1 << 14, few: int = 0) -> None:
        import numpy as np

        self.array: Bytes = np.empty(size, np.uint8)
        self.waste = waste
        self.gap = gap
        self.few = few

    def takes(self, transfer: Transfer) -> bool:
        """Tell whether to read everything between a transfer's first and last byte: it fits, and wastes little."""
        span = transfer.source_span
        if span > len(self.array):
            return False
        # A loop with source step 0 reads the same bytes again, so it adds nothing to the bytes wanted.
        runs = prod(count for count, step, _ in transfer.loops if step)
        wanted = transfer.width * runs
        if runs <= self.few and span > wanted:
            return False
        return span <= wanted * self.waste or _widest_gap(transfer) <= self.gap

    def apart(self, transfer: Transfer) -> bool:
        """Tell whether each run is best read alone, straight into place: it is wanted once, and not next to another."""
        # The innermost loop in the source decides: if even two neighbouring runs are too far apart to read together,
        # none are near.
        times, step, into = min(transfer.loops, key=lambda loop: loop[1])
        if not step:
            return False
        # As many neighbouring runs as the scratch can span.
        near = min(times, (len(self.array) - transfer.width) // step + 1)
        return near < 2 or not self.takes(Transfer(transfer.file, 0, 0, transfer.width, ((near, step, into),)))


def _widest_gap(transfer: Transfer) -> int:
    """Return the most bytes that lie unread between two runs of a transfer."""
    gap, span = 0, transfer.width
    # From the innermost loop outwards, `span` is the extent of all loops so far, and the next step beyond it is a gap.
    for count, step, _ in sorted(transfer.loops, key=lambda loop: loop[1]):
        gap = max(gap, step - span)
        span += (count - 1) * step
    return gap


def produce(reader: Readable, parts: Collection[Transfer], start: int, out: Bytes, scratch: Scratch) -> None:
    """Make the bytes of a target from `start` on: what no transfer fills is padding, and zero.

    Args:
        reader: the source files.
        parts: the transfers that land in the buffer, and nowhere else; no two in the same place.
        start: byte of the target at which `out` begins.
        out: the buffer.
        scratch: room for strided reads.

    Raises:
        TransaxleError: what the reader raises.
    """
    with Steps() as steps:
        note_parts(steps, reader, parts, start, out, scratch)
        steps.run()


def note_parts(
    steps: Steps, reader: Readable, parts: Collection[Transfer], start: int, out: Bytes, scratch: Scratch
) -> None:
    """List what makes the bytes of a target from `start` on; otherwise as `produce`."""
    # Parts never overlap, so their sizes show whether there is padding. Zeroing only then saves a pass over the buffer.
    if sum(part.size for part in parts) != len(out):
        steps.call(partial(out.fill, 0))
    # What needs one read is read together: straight into place, or side by side into the scratch.
    spread: list[tuple[Bytes, Transfer]] = []
    used = 0
    for part in parts:
        size = part.source_span
        if not part.loops or hasattr(reader, "lend"):
            note_fill(steps, reader, part, out, start, scratch)
            continue
        fits = scratch.takes(part)
        if used + size > min(_TOGETHER, len(scratch.array)) or not fits:
            _spread(steps, spread, out, start)
            used = 0
        if not fits:
            note_fill(steps, reader, part, out, start, scratch)
            continue
        held = scratch.array[used : used + size]
        used += size
        reader.note_read(steps, part.file, part.source, held.data)
        spread.append((held, part))
    _spread(steps, spread, out, start)


def _spread(steps: Steps, spread: list[tuple[Bytes, Transfer]], out: Bytes, start: int) -> None:
    """List that what is read side by side goes to its places in the target; the list is emptied."""
    for held, part in spread:
        steps.lay(held, out, part.target - start, part.width, part.loops)
    spread.clear()


def note_fill(steps: Steps, reader: Readable, transfer: Transfer, out: Bytes, start: int, scratch: Scratch) -> None:
    """List what carries a transfer out into a buffer that holds the target's bytes from `start` on.

    Args:
        steps: the list.
        reader: the source files.
        transfer: it must lie inside the buffer.
        out: the buffer.
        start: byte of the target at which `out` begins.
        scratch: room for strided reads; what does not fit at once is done in parts.
    """
    file, at, width, loops = transfer.file, transfer.target - start, transfer.width, transfer.loops
    # Memory needs no read: the runs are copied straight from where they lie.
    lend = getattr(reader, "lend", None)
    if lend is not None:
        steps.call(lambda: scatter(lend(file, transfer.source, transfer.source_span), out, at, width, loops), READING)
        return
    if not loops:
        reader.note_read(steps, file, transfer.source, out.data[at : at + width])
        return
    if scratch.takes(transfer):
        held = scratch.array[: transfer.source_span]
        reader.note_read(steps, file, transfer.source, held.data)
        steps.lay(held, out, at, width, loops)
        return
    if scratch.apart(transfer):
        end = transfer.target_end - start
        reader.note_read(steps, file, transfer.source, out.data[at:end], width, loops)
        return
    # The whole transfer does not fit the scratch. Take the loop with the widest source step apart, and read as many of
    # its rounds at once as fit.
    widest = max(range(len(loops)), key=lambda i: loops[i][1])
    count, step, into = loops[widest]
    before, after = loops[:widest], loops[widest + 1 :]

    def part(first: int, taken: int) -> Transfer:
        taken_loops = (*before, (taken, step, into), *after) if taken > 1 else before + after
        return Transfer(file, transfer.source + first * step, transfer.target + first * into, width, taken_loops)

    one, room = part(0, 1), len(scratch.array)
    span = one.source_span
    at_once = min(count, (room - span) // step + 1) if step else 1
    if at_once > 1 and scratch.takes(part(0, at_once)):
        for first in range(0, count, at_once):
            note_fill(steps, reader, part(first, min(at_once, count - first)), out, start, scratch)
    # Rounds cannot be read together, as they lie too far apart. Each is read alone, but several are laid side by side
    # in the scratch, so that one step puts them all into place.
    elif one.loops and scratch.takes(one):
        for first in range(0, count, room // span):
            taken = min(room // span, count - first)
            for slot in range(taken):
                view = scratch.array.data[slot * span : (slot + 1) * span]
                reader.note_read(steps, file, one.source + (first + slot) * step, view)
            side_by_side = (*before, (taken, span, into), *after)
            steps.lay(scratch.array[: taken * span], out, at + first * into, width, side_by_side)
    else:
        for first in range(count):
            note_fill(steps, reader, part(first, 1), out, start, scratch)
