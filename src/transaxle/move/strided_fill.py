"""Carry a transfer out: read its bytes from an endpoint and lay them into a buffer, runs of a stride and all."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from math import gcd, prod
from typing import TYPE_CHECKING, Any

from transaxle.axes.geometry.strided import Loop
from transaxle.formats.storage.compiled import FileRange, StepBatch, of_transpose, read_ranges, read_strided, transposed
from transaxle.move.endpoint import Bytes, NotingFiles, Readable
from transaxle.move.transfer import Transfer

if TYPE_CHECKING:
    import numpy.typing as npt

_WIDE = 16
"""Bytes of a run that is copied as such; numpy is faster with shorter ones."""
_TOGETHER = 1 << 20
"""Bytes that are read side by side into the scratch, of several transfers: no more than stays in the cache."""


class Noting:
    """Files whose reads are noted in a batch, and so is what becomes of the bytes, as far as it can be.

    Args:
        files: what is read.
        batch: where it is noted.
    """

    def __init__(self, files: NotingFiles, batch: StepBatch) -> None:
        self.batch = batch
        self._files = files

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """See `Readable`."""
        self._files.note_read(self.batch, name, offset, view)

    def read_ranges(self, ranges: Sequence[FileRange]) -> None:
        """See `formats.storage.compiled.read_ranges`."""
        for name, offset, view in ranges:
            self._files.note_read(self.batch, name, offset, view)

    def read_strided(self, name: str, offset: int, view: memoryview, width: int, loops: Sequence[Loop]) -> None:
        """See `formats.storage.compiled.read_strided`."""
        self._files.note_strided(self.batch, name, offset, view, width, loops)

    def lays(self, held: Bytes, transfer: Transfer, out: Bytes, at: int) -> bool:
        """Note that the runs of a transfer are copied as `scatter` does; if that cannot be noted, do what is."""
        width, loops, again = transfer.width, transfer.loops, partial(scatter, held, transfer, out, at)
        found = of_transpose(held, out, at, width, loops)
        if found is not None:
            self.batch.transpose(*found, again)
            return True
        ends = [width + sum((loop[0] - 1) * loop[side] for loop in loops) for side in (1, 2)]
        if width >= _WIDE and ends[0] <= len(held) and 0 <= at <= len(out) - ends[1] and held.flags.c_contiguous:
            self.batch.copy(held.ctypes.data, out.ctypes.data + at, width, loops, again)
            return True
        self.batch.run()
        return False


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
    # Parts never overlap, so their sizes show whether there is padding. Zeroing only then saves a pass over the buffer.
    if sum(part.size for part in parts) != len(out):
        if isinstance(reader, Noting):
            reader.batch.run()
        out[:] = 0
    if len(parts) < 2 or getattr(reader, "lend", None) is not None:
        for part in parts:
            fill(reader, part, out, start, scratch)
        return
    # What needs one read is read together: straight into place, or side by side into the scratch.
    ranges: list[FileRange] = []
    spread: list[tuple[Bytes, Transfer]] = []
    used = 0
    for part in parts:
        at, size = part.target - start, part.source_span
        if not part.loops:
            ranges.append((part.file, part.source, out.data[at : at + size]))
            continue
        if used + size > min(_TOGETHER, len(scratch.array)) or not scratch.takes(part):
            _read_and_scatter(reader, ranges, spread, out, start)
            used = 0
        if scratch.takes(part):
            held = scratch.array[used : used + size]
            used += size
            ranges.append((part.file, part.source, held.data))
            spread.append((held, part))
        else:
            fill(reader, part, out, start, scratch)
    _read_and_scatter(reader, ranges, spread, out, start)


def _read_and_scatter(
    reader: Readable, ranges: list[FileRange], spread: list[tuple[Bytes, Transfer]], out: Bytes, start: int
) -> None:
    """Read ranges, and scatter those of them that a transfer spreads over the target; both lists are emptied."""
    read_ranges(reader, ranges)
    for held, transfer in spread:
        _lay(reader, held, transfer, out, transfer.target - start)
    ranges.clear()
    spread.clear()


def fill(reader: Readable, transfer: Transfer, out: Bytes, start: int, scratch: Scratch) -> None:
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
    # Memory needs no read: the runs are copied straight from where they lie.
    lend = getattr(reader, "lend", None)
    if lend is not None:
        scatter(lend(transfer.file, transfer.source, transfer.source_span), transfer, out, at)
        return
    if scratch.takes(transfer):
        held = scratch.array[: transfer.source_span]
        reader.read_into(transfer.file, transfer.source, held.data)
        _lay(reader, held, transfer, out, at)
        return
    if scratch.apart(transfer):
        end = transfer.target_end - start
        read_strided(reader, transfer.file, transfer.source, out.data[at:end], transfer.width, transfer.loops)
        return
    # The whole transfer does not fit the scratch. Take the loop with the widest source step apart, and read as many of
    # its rounds at once as fit.
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
    # Rounds cannot be read together, as they lie too far apart. Each is read alone, but several are laid side by side
    # in the scratch, so that one scatter serves them all.
    elif one.loops and scratch.takes(one):
        for first in range(0, count, room // span):
            taken = min(room // span, count - first)
            loops = (*before, (taken, span, into), *after)
            side_by_side = Transfer(one.file, 0, one.target + first * into, one.width, loops)
            for slot in range(taken):
                view = scratch.array.data[slot * span : (slot + 1) * span]
                reader.read_into(one.file, one.source + (first + slot) * step, view)
            _lay(reader, scratch.array[: taken * span], side_by_side, out, side_by_side.target - start)
    else:
        for first in range(count):
            fill(reader, part(first, 1), out, start, scratch)


def _lay(reader: Readable, held: Bytes, transfer: Transfer, out: Bytes, at: int) -> None:
    """Copy the runs of a transfer that is read, as `scatter`."""
    if not (isinstance(reader, Noting) and reader.lays(held, transfer, out, at)):
        scatter(held, transfer, out, at)


_WORDS = frozenset({1, 2, 4, 8})
"""Bytes of the words that elements can be copied as."""


def scatter(held: Bytes, transfer: Transfer, out: Bytes, at: int) -> None:
    """Copy the runs of a transfer from one buffer to the other: one at once, several as the widest words that fit.

    Args:
        held: the source's bytes from the transfer's first one on.
        transfer: its loops and width.
        out: the target buffer.
        at: where the transfer's first byte goes.
    """
    import numpy as np

    width = transfer.width
    if not transfer.loops:
        out[at : at + width] = held[:width]
        return
    if width in _WORDS and len(transfer.loops) > 1 and transposed(held, out, at, width, transfer.loops):
        return
    shape = [count for count, _, _ in transfer.loops]
    sources = [source for _, source, _ in transfer.loops]
    targets = [target for _, _, target in transfer.loops]
    # Every offset, width and step is a multiple of the word; then numpy moves 8 bytes at a time instead of one.
    word = gcd(8, at, width, *sources, *targets)
    if width > word:
        shape.append(width // word)
        sources.append(word)
        targets.append(word)
    kind = np.dtype(f"u{word}")
    view: npt.NDArray[Any] = np.ndarray(shape, kind, held.data, 0, sources)
    into: npt.NDArray[Any] = np.ndarray(shape, kind, out.data, at, targets)
    into[...] = view
