"""Cuts, pieces and runs of positions: against NumPy, torch and plain walks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.axes import walking
from tests.axes.apply import Intervals, arange, law, move, take
from tests.some import some
from transaxle.axes.geometry import (
    BoxCopy,
    MeshCut,
    PerComponent,
    Piece,
    PieceOverlap,
    Replicated,
    Shard,
    StridedShard,
    Widths,
    axes_in,
    coalesce,
    count_positions,
    cut,
    lexicographic_boxes,
    local_sizes,
    pieces,
    place,
    positions,
    row_major,
    segment_sizes,
    whole,
)
from transaxle.axes.geometry import Intervals as Positions
from transaxle.axes.geometry import rank as rank_of
from transaxle.axes.geometry import take as taken
from transaxle.axes.notation.expression import Expression, Share, parse
from transaxle.errors import Refused

NO_INDEX: Mapping[str, int] = {}


def meet(
    source: Piece, target: Piece, source_index: Mapping[str, int] = NO_INDEX, target_index: Mapping[str, int] = NO_INDEX
) -> BoxCopy | None:
    """Return the copy from one piece into another."""
    meeting = PieceOverlap(source, target, source_index, target_index)
    move = meeting.at(source_index)
    assert move is None or meeting.size == move.size
    return move


@st.composite
def shares(draw: st.DrawFn) -> Share:
    """The share of one dim: nested axes with gaps, somewhere in the dim."""
    axes: list[tuple[str, int, int]] = []
    reach = 1
    for name in "abc"[: draw(st.integers(0, 3))]:
        size, stride = draw(st.integers(0, 4)), reach + draw(st.integers(0, 2))
        axes.insert(0, (name, size, stride))
        reach = max(size * stride, 1)
    return Share(draw(st.integers(0, 5)), tuple(axes))


def stored(share: Share) -> list[tuple[tuple[int, ...], int]]:
    """Every element of a share: its indices, and its position."""
    return [
        (index, share.offset + sum(i * stride for i, (_, _, stride) in zip(index, share.axes, strict=True)))
        for index in product(*(range(size) for _, size, _ in share.axes))
    ]


@law
@given(shares(), st.integers(-2, 60), st.integers(0, 60))
def test_a_cut_is_exactly_what_lies_in_the_interval(share: Share, start: int, length: int) -> None:
    stop = start + length
    found = []
    boxes = cut(share, start, stop)
    for box, first in boxes:
        inside = [index for index, _ in stored(share) if all(a <= i < b for i, (a, b) in zip(index, box, strict=True))]
        assert dict(stored(share))[tuple(a for a, _ in box)] == first
        found.extend(inside)
    assert found == [index for index, position in stored(share) if start <= position < stop]
    assert len(boxes) <= max(1, 2 * len(share.axes) - 1)


@st.composite
def holdings(draw: st.DrawFn, shape: tuple[int, ...]) -> Intervals:
    """Per dim, some positions in ascending order."""
    held = []
    for size in shape:
        points = sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=6)))
        held.append([(a, b) for a, b in zip(points[::2], points[1::2], strict=False) if a < b])
    return held


def elements(piece: Piece) -> dict[walking.Index, int]:
    """Element of the logical tensor -> where the piece keeps it in its chunk."""
    axes = sorted(piece.box)
    return {
        tuple(zip(axes, index, strict=True)): piece.offset
        + sum((i - piece.box[axis][0]) * piece.strides[axis] for axis, i in zip(axes, index, strict=True))
        for index in product(*(range(*piece.box[axis]) for axis in axes))
    }


@law
@given(walking.expressions(), walking.sizes(least=0), st.data())
def test_pieces_of_a_chunk_are_disjoint_and_all_it_holds(
    expression: Expression, sizes: dict[str, int], data: st.DataObject
) -> None:
    layout = expression.layout(sizes)
    held = data.draw(st.none() | holdings(layout.shape))
    whole = np.arange(prod(layout.shape)).reshape(layout.shape)
    chunk = whole.reshape(-1) if held is None else take(whole, held).reshape(-1)
    for component in expression.components:
        found: dict[walking.Index, int] = {}
        for piece in pieces(layout, component, held):
            assert piece.size == len(elements(piece)) > 0
            for index, position in elements(piece).items():
                assert index not in found
                found[index] = int(chunk[position])
        wanted = walking.places(expression, sizes, component)
        assert found == {index: place for index, place in wanted.items() if place in set(chunk.tolist())}


@law
@given(st.data(), walking.sizes())
def test_what_meets_is_copied_and_nothing_else(data: st.DataObject, sizes: dict[str, int]) -> None:
    """Any two layouts of one tensor, both cut anyhow: the moves are those of a walk, element by element."""
    source, target = (data.draw(walking.expressions(["x"])) for _ in range(2))
    here, there = source.layout(sizes), target.layout(sizes)
    mine, yours = (data.draw(st.none() | holdings(layout.shape)) for layout in (here, there))

    full = np.full(prod(here.shape), -1)
    for index, position in walking.places(source, sizes, "x").items():
        full[position] = walking.ravel(index, sizes)
    wanted = np.full(prod(there.shape), -1)
    for index, position in walking.places(target, sizes, "x").items():
        wanted[position] = walking.ravel(index, sizes)
    chunk = full if mine is None else take(full.reshape(here.shape), mine).reshape(-1)
    wanted = wanted if yours is None else take(wanted.reshape(there.shape), yours).reshape(-1)
    wanted = np.where(np.isin(wanted, chunk), wanted, -1)

    found = np.full(len(wanted), -1)
    moved = 0
    for piece in pieces(there, "x", yours):
        for other in pieces(here, "x", mine):
            step = meet(other, piece)
            if step is not None:
                move(chunk, found, step)
                moved += step.size
    np.testing.assert_array_equal(found, wanted)
    assert moved == np.count_nonzero(wanted >= 0)


STACKED, SINGLE = parse("x[e (d f)]").layout({"e": 3, "d": 2, "f": 4}), parse("x[f d]").layout({"d": 2, "f": 4})


def test_axes_in_names() -> None:
    (stack,) = pieces(STACKED, "x")
    (one,) = pieces(SINGLE, "x")
    for e in range(3):
        out = meet(stack, one, target_index={"e": e})
        back = meet(one, stack, source_index={"e": e})
        assert out is not None
        assert back is not None
        assert (out.source_offset, out.target_offset) == (8 * e, 0)
        assert (back.source_offset, back.target_offset) == (0, 8 * e)
        assert out.loops == ((4, 1, 2), (2, 4, 1))
        assert back.loops == ((2, 1, 4), (4, 2, 1))
    assert meet(stack, one, target_index={"e": 3}) is None
    assert meet(one, stack, source_index={"e": 3}) is None
    assert meet(one, one, {"e": 1}, {"e": 1}) is not None
    assert meet(one, one, {"e": 1}, {"e": 2}) is None


def test_an_axis_that_only_the_target_has_is_broadcast() -> None:
    (few,) = pieces(parse("k[(g c)]").layout({"g": 2, "c": 3}), "k")
    (many,) = pieces(parse("k[(g n c)]").layout({"g": 2, "n": 2, "c": 3}), "k")
    step = some(meet(few, many))
    out = np.full(12, -1)
    move(np.arange(6), out, step)
    assert out.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5]
    (last,) = pieces(parse("k[g n c]").layout({"g": 2, "n": 3, "c": 3}), "k", [[(0, 2)], [(2, 3)], [(0, 3)]])
    step = some(meet(few, last))
    assert step.size == 6


def rows(held: Positions) -> list[int]:
    return [i for start, stop in held for i in range(start, stop)]


@st.composite
def held(draw: st.DrawFn) -> Positions:
    """Some positions, as the ranks before may have left them: ascending, with gaps."""
    points = sorted(draw(st.lists(st.integers(0, 30), max_size=8, unique=True)))
    return tuple(zip(points[::2], points[1::2], strict=False))


@law
@given(held(), st.integers(0, 40), st.integers(0, 40))
def test_take_is_a_slice_of_the_local_tensor(some: Positions, start: int, stop: int) -> None:
    found = taken(some, start, stop)
    assert rows(found) == rows(some)[start:stop]
    assert all(a < b for a, b in found)
    assert count_positions(found) == len(rows(found))


@law
@given(held(), st.integers(1, 9))
def test_shard_is_torch_chunk(some: Positions, parts: int) -> None:
    chunks = torch.tensor(rows(some), dtype=torch.int64).chunk(parts)
    for rank in range(parts):
        wanted = chunks[rank].tolist() if rank < len(chunks) else []
        assert rows(Shard()(some, parts, rank)) == wanted


@law
@given(held(), st.integers(1, 4), st.integers(1, 4))
def test_strided_shard_is_what_torch_splits(some: Positions, split: int, parts: int) -> None:
    local = torch.tensor(rows(some), dtype=torch.int64)
    wanted, _ = _StridedShard(0, split_factor=split)._split_tensor(local, parts, with_padding=False)
    for rank in range(parts):
        found = StridedShard(split)(some, parts, rank)
        assert rows(found) == wanted[rank].tolist()
        assert all(a < b for a, b in found)


@contextmanager
def mesh(shape: Sequence[int], rank: int) -> Iterator[DeviceMesh]:
    """The mesh as one of its ranks sees it; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=prod(shape))
    try:
        yield init_device_mesh("cpu", tuple(shape))
    finally:
        dist.destroy_process_group()


def cuts(placements: Sequence[Placement], shape: Sequence[int], coordinate: Sequence[int]) -> list[MeshCut]:
    """The same placements in our words."""
    found = []
    for placement, parts, rank in zip(placements, shape, coordinate, strict=True):
        if isinstance(placement, _StridedShard):
            found.append(MeshCut(placement.dim, parts, rank, StridedShard(int(placement.split_factor))))
        elif isinstance(placement, TorchShard):
            found.append(MeshCut(placement.dim, parts, rank))
        else:
            assert isinstance(placement, Replicate)
            found.append(MeshCut(None, parts, rank))
    return found


S, R = TorchShard, Replicate()


def strided(dim: int, split: int) -> Placement:
    return _StridedShard(dim, split_factor=split)


MESHES: list[tuple[tuple[int, ...], list[tuple[Placement, ...]]]] = [
    ((3,), [(S(0),), (S(1),), (S(-1),), (S(-2),), (R,), (strided(0, 2),), (strided(1, 3),)]),
    ((2, 3), [(S(0), S(1)), (S(1), S(0)), (S(0), S(0)), (S(-1), S(1)), (R, S(0)), (S(1), R), (strided(0, 3), S(0)),
        (strided(1, 3), S(1)), (strided(1, 2), S(0)), (S(0), strided(1, 2)), (strided(0, 2), strided(1, 2))]),
    ((2, 2, 2),
     [(S(0), S(1), S(0)), (strided(0, 2), S(1), S(0)), (strided(0, 4), strided(0, 2), S(0)), (R, S(1), S(1))]),
]  # fmt: skip
SHAPES = [(12, 12), (7, 10), (10, 7), (5, 3), (1, 9), (2, 0)]


@pytest.mark.parametrize(("shape", "placements"), MESHES, ids=["1d", "2d", "3d"])
def test_place_is_what_distribute_tensor_does(shape: tuple[int, ...], placements: list[tuple[Placement, ...]]) -> None:
    """Even and uneven, every rank, every placement: torch decides."""
    for rank, coordinate in enumerate(product(*map(range, shape))):
        with mesh(shape, rank) as devices:
            assert tuple(devices.get_coordinate() or ()) == coordinate
            for size, placement in product(SHAPES, placements):
                tensor = arange(*size)
                local = distribute_tensor(tensor, devices, placement, src_data_rank=None).to_local()
                found = take(tensor, place(size, cuts(placement, shape, coordinate)))
                assert found.tolist() == local.tolist(), (size, placement, coordinate)


WIDTHS, HALVES = Widths((126, 0, 125)), PerComponent((6, 6), (Shard(), Shard()))


def test_rows_are_those_that_a_rule_names() -> None:
    assert [WIDTHS(whole(251), 3, rank) for rank in range(3)] == [((0, 126),), (), ((126, 251),)]
    assert rows(Widths((1, 3))(((2, 4), (8, 10)), 2, 1)) == [3, 8, 9]
    assert all(Replicated()(((2, 5), (9, 12)), 3, rank) == ((2, 5), (9, 12)) for rank in range(3))


@pytest.mark.parametrize(("share", "words"), [
    (lambda: place((4, 5), [MeshCut(2, 2, 0)]), "dim 2 is split, but the shape is [4, 5]"),
    (lambda: place((4, 5), [MeshCut(-3, 2, 0)]), "dim -3 is split, but the shape is [4, 5]"),
    (lambda: WIDTHS(whole(250), 3, 0), "[126, 0, 125] over 3 ranks do not sum to 250 rows"),
    (lambda: WIDTHS(whole(251), 2, 0), "[126, 0, 125] over 2 ranks do not sum to 251 rows"),
    (lambda: HALVES(whole(11), 2, 0), "components [6, 6] do not sum to 11 rows"),
])  # fmt: skip
def test_a_rule_that_does_not_fit_the_dim_is_refused(share: Callable[[], object], words: str) -> None:
    with pytest.raises(Refused, match=re.escape(words)) as caught:
        share()
    assert caught.value.code == "SHAPE_MISMATCH"


def test_components_are_cut_again_by_the_next_mesh_dim() -> None:
    gate, up = arange(6), arange(6, start=100)
    for first, second in product(range(2), range(3)):
        local = torch.cat([gate.chunk(2)[first], up.chunk(2)[first]]).chunk(3)[second]
        held = place((12,), [MeshCut(0, 2, first, HALVES), MeshCut(0, 3, second)])
        assert rows(held[0]) == [i % 100 + (6 if i >= 100 else 0) for i in local.tolist()]


# Positions of some indices of a dim's axes, against numpy's own slicing of numbered elements.

SIZES = {"g": 3, "r": 4, "c": 5, "f": 7, "d": 2}
Q = np.arange(60).reshape(3, 4, 5)
K = np.arange(60, 75).reshape(3, 5)
V = np.arange(75, 90).reshape(3, 5)


def _flat(*parts: np.ndarray) -> list[int]:
    return [int(number) for part in parts for number in part.reshape(-1)]


GROUPED = np.arange(90).reshape(3, 30)
"""`(g [q:(r c) | k:c | v:c])`: 20 of q, 5 of k, 5 of v in each group."""


@pytest.mark.parametrize(("text", "ranges", "wanted"), [
    ("q[(g r c) d]", {"g": (1, 3)}, _flat(Q[1:])),
    ("q[(g r c) d]", {"g": (2, 3), "r": (1, 3)}, _flat(Q[2, 1:3])),
    ("q[(g r c) d]", {"r": (1, 3)}, _flat(Q[:, 1:3])),
    ("q[(g r c) d]", {}, _flat(Q)),
    ("[[q:(g r c) | k:(g c) | v:(g c)] d]", {"g": (1, 2)}, _flat(Q[1], K[1], V[1])),
    ("[[q:(g r c) | k:(g c) | v:(g c)] d]", {"g": (1, 2), "r": (0, 3)}, _flat(Q[1, :3], K[1], V[1])),
    ("[(g [q:(r c) | k:c | v:c]) d]", {"g": (1, 3)}, _flat(GROUPED[1:])),
    ("[(g [q:(r c) | k:c | v:c]) d]", {"g": (2, 3), "r": (3, 4)}, _flat(GROUPED[2, 15:20], GROUPED[2, 20:])),
    ("[(f [gate: | up:]) d]", {"f": (2, 5)}, list(range(4, 10))),
    ("[[gate:f | up:f] d]", {"f": (2, 5)}, [2, 3, 4, 9, 10, 11]),
])  # fmt: skip
def test_they_are_those_that_slicing_gives(text: str, ranges: dict[str, tuple[int, int]], wanted: list[int]) -> None:
    node = parse(text).dims[0]
    found = positions(node, SIZES, ranges)
    assert rows(found) == wanted
    assert all(stop < start for (_, stop), (start, _) in pairwise(found))  # merged, in order


def test_what_a_dim_consists_of() -> None:
    node = parse("[[q:(g r c) | k:(g c) | v:(g c)] d]").dims[0]
    assert axes_in(node) == {"g", "r", "c"}
    assert segment_sizes(node, SIZES) == (60, 15, 15)
    assert segment_sizes(node, local_sizes(SIZES, {"g": (0, 1), "r": (1, 3)})) == (10, 5, 5)
    assert segment_sizes(parse("gate[f d]").dims[0], SIZES) == (7,)


counts = st.lists(st.integers(0, 4), max_size=4)


@st.composite
def nested(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Nested loops, outermost first, with gaps."""
    loops: list[tuple[int, int]] = []
    reach = 1
    for size in draw(counts):
        stride = reach + draw(st.integers(0, 3))
        loops.insert(0, (size, stride))
        reach = max(size * stride, 1)
    return loops


def loop_positions(loops: list[tuple[int, int]]) -> list[int]:
    return [sum(i * stride for i, (_, stride) in zip(index, loops, strict=True)) for index in walk(loops)]


def walk(loops: list[tuple[int, int]]) -> list[tuple[int, ...]]:
    return list(product(*(range(size) for size, _ in loops)))


@law
@given(nested(), st.integers(-3, 400))
def test_rank_counts_the_positions_before(loops: list[tuple[int, int]], position: int) -> None:
    assert rank_of(loops, position) == sum(q < position for q in loop_positions(loops))


@law
@given(counts, st.data())
def test_boxes_are_the_range_in_order(shape: list[int], data: st.DataObject) -> None:
    total = prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(0, total))
    boxes = list(lexicographic_boxes(shape, start, stop))
    found = [index for box in boxes for index in product(*(range(*span) for span in box))]
    assert found == list(product(*map(range, shape)))[start:stop]
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(a < b for box in boxes for a, b in box)


@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 5), (4, 0, 2), (1, 1)])
def test_row_major_is_what_numpy_says(shape: tuple[int, ...]) -> None:
    dense = np.empty(shape, np.int64)
    assert dense.size == 0 or tuple(step * dense.itemsize for step in row_major(shape)) == dense.strides


@law
@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from([0, 1, 2, 3, 6, 9]), st.integers(0, 2)), max_size=4))
def test_coalesce_keeps_the_pairs(drawn: list[tuple[int, int, int]]) -> None:
    loops = []
    reach = 1
    for size, source, gap in drawn:
        loops.append((size, source, reach + gap))
        reach = (reach + gap) * size

    def pairs(some: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
        sides = [[(size, loop[side]) for size, *loop in some] for side in (0, 1)]
        return list(zip(*map(loop_positions, sides), strict=True))

    joined = coalesce(loops)
    assert sorted(pairs(joined)) == sorted(pairs(loops))
    assert [target for _, target in pairs(joined)] == sorted(target for _, target in pairs(loops))
    assert all(size > 1 for size, _, _ in joined)


def test_coalesce_joins_what_is_one_run_on_both_sides() -> None:
    assert coalesce([(2, 12, 12), (3, 4, 4), (4, 1, 1)]) == ((24, 1, 1),)
    assert coalesce([(2, 12, 12), (3, 1, 4), (4, 3, 1)]) == ((2, 12, 12), (3, 1, 4), (4, 3, 1))
    assert coalesce([(5, 0, 2), (2, 0, 1)]) == ((10, 0, 1),)
