"""Transfers against the obvious: move one byte at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine import law
from tests.move.filling import PlainFiles, fill
from transaxle.axes.geometry import Loop
from transaxle.formats.storage.copier import Steps, read_strided
from transaxle.move.transfer import Scratch, Transfer, clip, clip_blocks, lower

FILE = "source"
BASE = 3
"""The source's bytes do not begin at the file's beginning."""
Bytes = npt.NDArray[np.uint8]


class Memory(PlainFiles):
    """A file in memory that counts what is read of it."""

    def __init__(self, size: int) -> None:
        self.content = np.random.default_rng(size).integers(0, 256, size, np.uint8)
        self.calls: list[tuple[int, int]] = []

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        assert name == FILE
        assert view.nbytes > 0
        assert offset + view.nbytes <= len(self.content), "beyond the end of the file"
        self.calls.append((offset, view.nbytes))
        view[:] = self.content.data[offset : offset + view.nbytes]

    @property
    def octets(self) -> int:
        return sum(size for _, size in self.calls)


def positions(transfer: Transfer) -> Iterator[tuple[int, int]]:
    """Every (source byte, target byte), in the order of the loops."""
    for index in product(*(range(count) for count, _, _ in transfer.loops)):
        source = transfer.source + sum(i * step for i, (_, step, _) in zip(index, transfer.loops, strict=True))
        target = transfer.target + sum(i * step for i, (_, _, step) in zip(index, transfer.loops, strict=True))
        yield from ((source + byte, target + byte) for byte in range(transfer.width))


@st.composite
def transfers(draw: st.DrawFn) -> Transfer:
    """A copy between two permutations of one box, each with gaps; sometimes a broadcast along one axis."""
    counts = draw(st.lists(st.integers(2, 5), max_size=4))
    width = draw(st.integers(1, 12))
    order = draw(st.permutations(list(range(len(counts)))))
    gaps = st.integers(0, 40)

    def steps(axes: list[int]) -> dict[int, int]:
        found: dict[int, int] = {}
        span = width
        for axis in reversed(axes):
            found[axis] = span + draw(gaps)
            span += (counts[axis] - 1) * found[axis]
        return found

    target, source = steps(list(range(len(counts)))), steps(list(order))
    broadcast = draw(st.booleans())
    if counts and broadcast:
        source[draw(st.sampled_from(range(len(counts))))] = 0
    loops = tuple((count, source[axis], target[axis]) for axis, count in enumerate(counts))
    return Transfer(FILE, BASE + draw(gaps), draw(gaps), width, loops)


def expected(transfer: Transfer, memory: Memory, start: int, stop: int) -> Bytes:
    out = np.zeros(stop - start, np.uint8)
    for source, target in positions(transfer):
        if start <= target < stop:
            out[target - start] = memory.content[source]
    return out


def memory_of(transfer: Transfer) -> Memory:
    return Memory(transfer.source + transfer.source_span)


@given(transfers())
@law
def test_sizes_and_ends(transfer: Transfer) -> None:
    moved = list(positions(transfer))
    assert transfer.size == len(moved)
    assert transfer.target_end == max(target for _, target in moved) + 1
    assert transfer.source_span == max(source for source, _ in moved) + 1 - transfer.source
    assert [target for _, target in moved] == sorted({target for _, target in moved}), "target order, none twice"
    first = transfer.source
    assert transfer.is_dense == ([source for source, _ in moved] == list(range(first, first + len(moved))))


@given(transfers(), st.integers(0, 300), st.integers(0, 300))
@law
def test_clip_moves_exactly_the_bytes_that_land_in_the_range(transfer: Transfer, start: int, length: int) -> None:
    found = [move for part in clip(transfer, start, start + length) for move in positions(part)]
    assert found == [move for move in positions(transfer) if start <= move[1] < start + length]


@given(transfers(), st.sampled_from([1, 2, 7, 16, 64, 1000, 100_000]), st.sampled_from([1.0, 4.0]), st.integers(0, 30))
@law
def test_fill_with_a_scratch_of_any_size(transfer: Transfer, buffer: int, waste: float, gap: int) -> None:
    memory = memory_of(transfer)
    out = np.zeros(transfer.target_end - transfer.target, np.uint8)
    fill(memory, transfer, out, transfer.target, Scratch(buffer, waste, gap))
    np.testing.assert_array_equal(out, expected(transfer, memory, transfer.target, transfer.target_end))


@given(transfers(), st.sampled_from([1, 64, 100_000]))
@law
def test_a_scratch_that_allows_no_waste_reads_nothing_else(transfer: Transfer, buffer: int) -> None:
    memory = memory_of(transfer)
    out = np.zeros(transfer.target_end, np.uint8)
    fill(memory, transfer, out, 0, Scratch(buffer, waste=1.0, gap=0))
    wanted = {source for source, _ in positions(transfer)}
    assert {byte for offset, size in memory.calls for byte in range(offset, offset + size)} == wanted


@given(st.lists(transfers(), max_size=4), st.sampled_from([1, 3, 64, 4096]))
@law
def test_blocks_hold_each_byte_once(several: list[Transfer], block: int) -> None:
    """Blocks smaller than a run, as long as a row, and larger than the target."""
    placed, end = [], 0
    for transfer in several:
        moved = Transfer(FILE, transfer.source, end + transfer.target, transfer.width, transfer.loops)
        placed.append(moved)
        end = moved.target_end
    size = end + 5
    memory = Memory(max((t.source + t.source_span for t in placed), default=1))
    whole = np.zeros(size, np.uint8)
    for transfer in placed:
        for source, target in positions(transfer):
            whole[target] = memory.content[source]
    out = np.zeros(size, np.uint8)
    scratch, seen, before = Scratch(16), 0, 0
    for start, stop, parts in clip_blocks(placed, [*range(block, size, block), size] if size else []):
        assert start == before
        assert stop - start <= block
        held = np.zeros(stop - start, np.uint8)
        for part in parts:
            assert start <= part.target < part.target_end <= stop
            fill(memory, part, held, start, scratch)
            seen += part.size
        out[start:stop] = held
        before = stop
    assert before == size
    assert seen == sum(transfer.size for transfer in placed)
    np.testing.assert_array_equal(out, whole)


@given(st.sampled_from([1, 2, 4, 8]), st.integers(2, 5), st.integers(2, 5), st.booleans())
@law
def test_lowering_multiplies_everything_by_the_item_size(item: int, rows: int, columns: int, transposed: bool) -> None:
    loops = ((rows, 1, columns), (columns, rows, 1)) if transposed else ((rows, columns, columns), (columns, 1, 1))
    found = lower(FILE, BASE, item, 2, 1, loops)
    elements = [
        (2 + i * loops[0][1] + j * loops[1][1], 1 + i * loops[0][2] + j * loops[1][2])
        for i in range(rows)
        for j in range(columns)
    ]
    assert list(positions(found)) == [
        (BASE + source * item + byte, target * item + byte) for source, target in elements for byte in range(item)
    ]
    assert found.width == (item if transposed else item * columns)


def test_close_runs_are_read_together_and_distant_ones_are_not() -> None:
    close = Transfer(FILE, 0, 0, 8, ((10, 16, 8),))
    memory = Memory(1000)
    fill(memory, close, np.zeros(80, np.uint8), 0, Scratch(1 << 16))
    assert memory.calls == [(0, 9 * 16 + 8)]
    distant = Transfer(FILE, 0, 0, 8, ((10, 100_000, 8),))
    memory = Memory(1_000_000)
    fill(memory, distant, np.zeros(80, np.uint8), 0, Scratch(1 << 16))
    assert memory.calls == [(100_000 * i, 8) for i in range(10)]


@pytest.mark.parametrize("buffer", [1 << 8, 1 << 12, 1 << 20])
def test_a_transpose_reads_whole_stretches(buffer: int) -> None:
    """Rows of a source become columns: every byte is read once, however small the scratch."""
    rows, columns = 64, 48
    memory = Memory(BASE + rows * columns * 2)
    moves = lower(FILE, BASE, 2, 0, 0, ((columns, 1, rows), (rows, columns, 1)))
    out = np.zeros(rows * columns * 2, np.uint8)
    fill(memory, moves, out, 0, Scratch(buffer))
    source = memory.content[BASE:].view(np.uint16).reshape(rows, columns)
    np.testing.assert_array_equal(out.view(np.uint16).reshape(columns, rows), source.T)
    assert memory.octets == rows * columns * 2
    assert min(size for _, size in memory.calls) >= min(buffer // 4, columns * 2)


class Strides(Memory):
    """One that reads many runs at once."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.at_once: list[int] = []

    def add_read(
        self, steps: Steps, name: str, offset: int, view: memoryview, width: int = 0, loops: Sequence[Loop] = ()
    ) -> None:
        def read() -> None:
            before = len(self.calls)
            read_strided(partial(self.read_into, name), offset, view, width, loops)
            if loops:
                self.at_once.append(len(self.calls) - before)

        steps.call(read)


@given(transfers(), st.sampled_from([1, 16, 64, 100_000]), st.sampled_from([1.0, 4.0]), st.integers(0, 30))
@law
def test_runs_read_at_once_are_the_same_reads(transfer: Transfer, buffer: int, waste: float, gap: int) -> None:
    """A reader that takes many runs in one call is asked for the bytes that any other one is asked for."""
    memories = Memory(transfer.source + transfer.source_span), Strides(transfer.source + transfer.source_span)
    outs = [np.zeros(transfer.size + 7 * 512, np.uint8) for _ in memories]
    for memory, out in zip(memories, outs, strict=True):
        for part in clip(transfer, transfer.target, transfer.target + len(out)):
            fill(memory, part, out, transfer.target, Scratch(buffer, waste, gap))
    np.testing.assert_array_equal(outs[0], outs[1])
    np.testing.assert_array_equal(
        outs[0], expected(transfer, memories[0], transfer.target, transfer.target + len(outs[0]))
    )
    assert memories[0].calls == memories[1].calls


def test_a_cut_of_columns_is_one_call() -> None:
    """Three blocks of rows, whose columns 5 to 10 of 100 are wanted: distant runs in two loops."""
    memory = Strides(20_000)
    out = np.zeros(3 * 20 * 5, np.uint8)
    columns = Transfer(FILE, 5, 0, 5, ((3, 5000, 100), (20, 100, 5)))
    fill(memory, columns, out, 0, Scratch(1 << 16, waste=1.4, gap=64))
    assert memory.at_once == [60]
    blocks = memory.content[:15_000].reshape(3, 50, 100)[:, :20, 5:10]
    np.testing.assert_array_equal(out.reshape(3, 20, 5), blocks)


def test_runs_that_are_wanted_twice_are_read_once() -> None:
    """A broadcast of distant runs is spread from a buffer."""
    memory = Strides(20_000)
    out = np.zeros(4 * 10 * 5, np.uint8)
    fill(memory, Transfer(FILE, 5, 0, 5, ((4, 0, 50), (10, 1000, 5))), out, 0, Scratch(1 << 12, waste=1.4, gap=64))
    assert memory.octets == 10 * 5
    runs = memory.content[:10_000].reshape(10, 1000)[:, 5:10]
    np.testing.assert_array_equal(out.reshape(4, 10, 5), np.broadcast_to(runs, (4, 10, 5)))
