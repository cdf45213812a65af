from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.axes import walking
from tests.axes.apply import HOLE, Entry, Extent, Intervals, Store, arange, fill, law, move, take
from transaxle.axes.geometry import Interval, MeshCut, StridedShard, place
from transaxle.axes.layout.relayout import Copier, Origin, Target, TargetPart, identity_target
from transaxle.axes.notation.expression import parse
from transaxle.errors import Refused

SIZES = {"e": 6, "f": 4, "d": 5}
STACKED, SINGLE, FLIPPED = (parse(text).layout(SIZES) for text in ("x[e f d]", "x[f d]", "x[e d f]"))


def target(layout: object, *origins: Origin, **index: int) -> Target:
    from transaxle.axes.notation.expression import Layout

    assert isinstance(layout, Layout)
    return Target("out", "I64", layout, index, (TargetPart("x", origins),), "out = x[…]")


def experts(*numbers: int) -> tuple[Origin, ...]:
    return tuple(Origin(f"x.{e}", "x", SINGLE, {"e": e}) for e in numbers)


def tilings(shape: tuple[int, ...]) -> st.SearchStrategy[list[tuple[Interval, ...]]]:
    """Boxes that tile a shape, in any order: those of a grid, of which some have no elements, or cuts within cuts."""

    def grid(points: list[list[int]]) -> list[tuple[Interval, ...]]:
        edges = [[0, *sorted(inner), size] for inner, size in zip(points, shape, strict=True)]
        return list(product(*(list(pairwise(along)) for along in edges)))

    def cuts(draws: list[tuple[int, int, int]]) -> list[tuple[Interval, ...]]:
        boxes: list[tuple[Interval, ...]] = [tuple((0, size) for size in shape)]
        for which, dim, point in draws if shape else ():
            box = boxes.pop(which % len(boxes))
            dim %= len(shape)
            low, high = box[dim]
            edge = low + point % (high - low + 1)
            boxes += [(*box[:dim], part, *box[dim + 1 :]) for part in ((low, edge), (edge, high)) if part[0] < part[1]]
        return boxes

    inner = [st.lists(st.integers(0, size), max_size=3) for size in shape]
    draws = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9), st.integers(0, 99)), max_size=8)
    grids = st.tuples(*inner).map(list).map(grid)
    odd = draws.map(cuts).filter(bool) if all(shape) else grids
    return st.one_of(grids, odd).flatmap(st.permutations).map(list)


@law
@given(st.data(), walking.sizes())
def test_sources_may_be_in_chunks(data: st.DataObject, sizes: dict[str, int]) -> None:
    """Whatever chunks hold the source, and whatever chunk of the target is asked for."""
    source, wanted = (data.draw(walking.expressions(["x"])) for _ in range(2))
    here, there = source.layout(sizes), wanted.layout(sizes)
    full = np.full(here.shape, HOLE)
    for index, at in walking.places(source, sizes, "x").items():
        full.reshape(-1)[at] = walking.ravel(index, sizes)
    expected = np.full(there.shape, HOLE)
    for index, at in walking.places(wanted, sizes, "x").items():
        expected.reshape(-1)[at] = walking.ravel(index, sizes)
    store = Store()
    store.put("in", full, data.draw(tilings(here.shape)))
    copier = Copier(store.entries)
    one = target(there, Origin("in", "x", here, {}))
    np.testing.assert_array_equal(fill(store, one, copier=copier), expected)
    for parts, rank in ((2, 0), (2, 1)):
        for dim in range(len(there.shape)):
            held = place(there.shape, [MeshCut(dim, parts, rank, StridedShard(2))])
            np.testing.assert_array_equal(fill(store, one, held, copier), take(expected, held))


def test_a_rank_reads_only_the_layers_and_experts_it_holds() -> None:
    """So it is with two axes in the names, whichever of the two a rank has a part of."""
    layout, single = parse("x[l e d]").layout({"l": 5, "e": 4, "d": 3}), parse("x[d]").layout({"d": 3})
    stack = arange(5, 4, 3)
    singles = Store({f"x.{one}.{e}": stack[one, e] for one, e in product(range(5), range(4))})
    origins = [Origin(f"x.{one}.{e}", "x", single, {"l": one, "e": e}) for one, e in product(range(5), range(4))]
    asked: list[str] = []

    class Asked(dict[str, Entry]):
        def __getitem__(self, name: str) -> Entry:
            asked.append(name)
            return super().__getitem__(name)

    for layers, some in (((1, 3), (2, 4)), ((4, 5), (0, 4)), ((0, 5), (3, 4)), ((2, 2), (0, 4))):
        asked.clear()
        held: Intervals = [[layers], [some], [(0, 3)]]
        list(Copier(Asked(singles.entries)).copies(target(layout, *origins), held))
        assert set(asked) == {f"x.{one}.{e}" for one, e in product(range(*layers), range(*some))}
        np.testing.assert_array_equal(fill(singles, target(layout, *origins), held), take(stack, held))


def test_chunks_that_do_not_touch_the_target_are_not_looked_at() -> None:
    store = Store()
    store.put("x", arange(6, 4, 5), [((e, e + 1), (f, f + 2), (0, 5)) for e in range(6) for f in (0, 2)])
    seen: list[int] = []

    class Seen(tuple[Extent, ...]):
        __slots__ = ()

        def __getitem__(self, number: object) -> Extent:  # type: ignore[override]
            assert isinstance(number, int)
            seen.append(number)
            return super().__getitem__(number)

    entry = store.entries["x"]
    store.entries["x"] = Entry(entry.dtype, entry.shape, Seen(entry.extents))
    copier = Copier(store.entries)
    one = target(SINGLE, Origin("x", "x", STACKED, {}), e=4)
    list(copier.copies(one))
    seen.clear()
    copies = list(copier.copies(one))
    assert [copy.chunk for copy in copies] == [8, 9]
    assert set(seen) <= {8, 9}


def test_chunks_of_a_source_may_have_strides_of_their_own() -> None:
    stack = arange(4, 6)
    store = Store()
    store.entries["x"] = Entry("I64", (4, 6), (Extent((0, 0), (4, 3), (1, 4)), Extent((0, 3), (4, 3))))
    store.chunks["x", 0] = np.ascontiguousarray(stack[:, :3].T.numpy()).reshape(-1)
    store.chunks["x", 1] = np.ascontiguousarray(stack[:, 3:].numpy()).reshape(-1)
    layout = parse("x[f d]").layout({"f": 4, "d": 6})
    np.testing.assert_array_equal(fill(store, target(layout, Origin("x", "x", layout, {}))), stack)
    store.entries["y"] = Entry("I64", (4, 6), (Extent((0, 0), (4, 6), (1, 4)),))
    store.chunks["y", 0] = np.ascontiguousarray(stack.T.numpy()).reshape(-1)
    np.testing.assert_array_equal(fill(store, target(layout, Origin("y", "x", layout, {}))), stack)


def test_the_target_may_have_strides_of_its_own() -> None:
    stack = arange(4, 5)
    store = Store({"x": stack})
    out = np.full(40, HOLE)
    one = target(SINGLE, Origin("x", "x", SINGLE, {}))
    for copy in Copier(store.entries).copies(one, strides=(2, 8)):
        move(store.chunks[copy.source, copy.chunk], out, copy.move)
    np.testing.assert_array_equal(out[::2].reshape(5, 4).T, stack)
    assert (out[1::2] == HOLE).all()


@pytest.mark.parametrize("missing", [0, 3, 5])
def test_a_hole_is_refused(missing: int) -> None:
    singles = Store({f"x.{e}": arange(4, 5) for e in range(6)})
    some = target(STACKED, *experts(*(e for e in range(6) if e != missing)))
    with pytest.raises(Refused) as caught:
        fill(singles, some)
    assert caught.value.code == "INCOMPLETE"
    assert caught.value.where.tensor == "out"
    assert "x needs 120 elements here, but the source has 100" in caught.value.refusals[0].message
    others: Intervals = [[(e, e + 1) for e in range(6) if e != missing], [(0, 4)], [(0, 5)]]
    assert fill(singles, some, others).shape == (5, 4, 5)


def test_a_number_alone_may_have_strides() -> None:
    store = Store({"x": np.array(7)})
    store.entries["x"] = Entry("I64", (), (Extent((), (), ()),))
    assert fill(store, identity_target("x", store.entries["x"])).item() == 7


@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4), (2, 3)])
def test_unchanged(shape: tuple[int, ...]) -> None:
    store = Store({"any name": arange(*shape)})
    same = identity_target("any name", store.entries["any name"])
    assert (same.name, same.dtype, same.shape, same.component) == ("any name", "I64", shape, "")
    np.testing.assert_array_equal(fill(store, same), arange(*shape))
    if shape == (2, 3):
        np.testing.assert_array_equal(fill(store, same, [[(1, 2)], [(0, 1), (2, 3)]]), arange(2, 3)[1:, ::2])
