"""Relayout: targets filled from stored tensors, the cuts of their chunks, and the sizes that layouts leave open."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.axes import walking
from tests.axes.apply import (
    HOLE,
    Entry,
    Extent,
    Intervals,
    Store,
    arange,
    carried,
    fill,
    law,
    move,
    only,
    same,
    take,
    translated,
)
from tests.axes.toy import equal, only_refusal
from transaxle.axes.geometry import Interval, MeshCut, StridedShard, place
from transaxle.axes.layout.relayout import (
    Copier,
    Origin,
    Shape,
    Target,
    TargetPart,
    chunk_cuts,
    factors,
    identity_target,
    solve,
    unify,
)
from transaxle.axes.layout.relayout import fill as solve_fill
from transaxle.axes.layout.tile import grid, scales
from transaxle.axes.notation.expression import Axis, Expression, Layout, parse, walk
from transaxle.axes.notation.family import Sizes
from transaxle.errors import Refused, UsageError

SIZES = {"e": 6, "f": 4, "d": 5}
STACKED, SINGLE, FLIPPED = (parse(text).layout(SIZES) for text in ("x[e f d]", "x[f d]", "x[e d f]"))


def target(layout: Layout, *origins: Origin, **index: int) -> Target:
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
    store.put("number", np.array(7))
    store.entries["number"] = Entry("I64", (), (Extent((), (), ()),))
    assert fill(store, identity_target("number", store.entries["number"])).item() == 7


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


@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4), (2, 3)])
def test_unchanged(shape: tuple[int, ...]) -> None:
    store = Store({"any name": arange(*shape)})
    same = identity_target("any name", store.entries["any name"])
    assert (same.name, same.dtype, same.shape, same.component) == ("any name", "I64", shape, "")
    np.testing.assert_array_equal(fill(store, same), arange(*shape))
    if shape == (2, 3):
        np.testing.assert_array_equal(fill(store, same, [[(1, 2)], [(0, 1), (2, 3)]]), arange(2, 3)[1:, ::2])


# Chunks of a tensor of several layers or experts: what one module of one layer holds, and no less.

SIZES_CHUNK_CUTS = {"l": 2, "e": 3, "h": 4, "i": 5}
NUMBERED = {"router": {"l"}, "gate": {"l", "e"}, "up": {"l", "e"}, "down": {"l", "e"}}


def target_of(text: str) -> Target:
    return Target("x", "BF16", parse(text).layout(SIZES_CHUNK_CUTS), {}, (), "")


def test_what_each_module_holds() -> None:
    targets = {
        "router": target_of("router[l e h]"),
        "fc1": target_of("[l e [gate:i | up:i] h]"),
        "fc2": target_of("down[l e h i]"),
        "norm": target_of("norm[h]"),
    }
    assert chunk_cuts(targets, NUMBERED) == {
        # A router has a row for each expert, and is one module.
        "router": ((0, 1), (0,)),
        "fc1": ((0, 1), (0, 1, 2), (0, 5)),
        "fc2": ((0, 1), (0, 1, 2), (0,)),
    }


@law
@given(walking.expressions(), walking.sizes(), st.data())
def test_fill_finds_what_it_is_not_told(expression: Expression, sizes: dict[str, int], data: st.DataObject) -> None:
    """Where one axis of each dim is left out the shape tells it; where more are, it is refused or found."""
    shape = walking.shape(expression, sizes)
    told = {axis: sizes[axis] for axis in sizes if data.draw(st.booleans(), axis)}
    hidden = [{n.name for n in walk(dim) if isinstance(n, Axis) and n.name not in told} for dim in expression.dims]
    if any(len(names) > 1 for names in hidden):
        with pytest.raises(UsageError, match="UNKNOWN_AXIS"):
            solve_fill(expression, shape, told)
        return
    found = solve_fill(expression, shape, told)
    assert {axis: found[axis] for axis in expression.axes} == {axis: sizes[axis] for axis in expression.axes}


@pytest.mark.parametrize(("text", "shape", "told", "why"), [
    ("x[f d]", (4,), {}, "expected 2 dims, got [4]"),
    ("x[f d]", (4, 5), {"d": 6}, "expected [4, 6] (d=6, f=4), got [4, 5]"),
    ("x[(f d)]", (20,), {"f": 3}, "a size of d that makes a dim of 20"),
    ("[[x:f | y:f]]", (7,), {}, "a size of f that makes a dim of 7"),
    ("[[x:n | 0:p]]", (6,), {"n": 7}, "a size of p that makes a dim of 6"),
    ("x[1 f]", (2, 3), {}, "expected [1, 3] (f=3), got [2, 3]"),
    ("x[(f d)]", (5,), {"f": 0}, "a size of d that makes a dim of 5"),
])  # fmt: skip
def test_fill_refuses_shapes_that_the_rule_does_not_explain(
    text: str, shape: Shape, told: dict[str, int], why: str
) -> None:
    with pytest.raises(Refused) as caught:
        solve_fill(parse(text), shape, told)
    assert caught.value.code == "SHAPE_MISMATCH"
    assert caught.value.refusals[0].message.startswith(text)
    assert why in caught.value.refusals[0].message


TOY = only("""
family toy
  axes l=layers d=width f g c=head r=heads[l]/g p
  x : l f d
  q : l g r c d
dialect hf
  x.{l} = x[f d]
  q.{l} = q[(g r c) d]
""")


def solved(equations: Mapping[str, Mapping[Shape, int]], config: dict[str, object], **given: int) -> dict[str, int]:
    expressions = {
        parse(text): {shape: {"l": layer} for shape, layer in shapes.items()} for text, shapes in equations.items()
    }
    return dict(solve(expressions, Sizes(TOY, config, given)).overrides)


def test_solve_finds_what_all_equations_agree_on() -> None:
    assert solved({"x[f d]": {(4, 5): 0}}, {}) == {"f": 4, "d": 5}
    assert solved({"x[f d]": {(4, 5): 0}}, {"width": 5}) == {"f": 4}
    assert solved({"[[x:f | y:f] d]": {(8, 5): 0}}, {}) == {"f": 4, "d": 5}
    # It goes on with what it found, and passes over shapes of other ranks.
    equations: dict[str, dict[Shape, int]] = {"x[(f d)]": {(20,): 0}, "y[d]": {(5,): 0}, "w[(f c)]": {(12,): 0}}
    assert solved(equations, {}) == {"d": 5, "f": 4, "c": 3}
    assert solved({"x[f d]": {(4,): 0, (4, 5): 1}}, {}) == {"f": 4, "d": 5}


def test_solve_leaves_open_what_varies_and_what_no_size_explains() -> None:
    assert solved({"x[f d]": {(4, 5): 0, (6, 5): 1}}, {}) == {"d": 5}
    assert solved({"[[x:f | y:f]]": {(7,): 0}, "w[d]": {(5,): 0}}, {}) == {"d": 5}
    assert solved({"x[f d]": {(4, 5): 0}}, {"width": 7}, f=9) == {"f": 9}, "what is given or configured stays"


def joined(*texts: str, tied: dict[str, str] | None = None) -> list[str]:
    """The axes of each expression after unification, in stored order."""
    expressions = [parse(text) for text in texts]
    basis = unify(expressions, tied or {})
    return [" ".join(sorted(basis.rewrite(expression).axes)) for expression in expressions]


def with_products(sizes: dict[str, int], expression: Expression) -> dict[str, int]:
    return sizes | {axis: prod(sizes[factor] for factor in factors(axis)) for axis in expression.axes}


@law
@given(st.lists(walking.expressions(), min_size=1, max_size=4), walking.sizes())
def test_rewriting_moves_no_element(expressions: list[Expression], sizes: dict[str, int]) -> None:
    basis = unify(expressions)
    for expression in expressions:
        rewritten = basis.rewrite(expression)
        known = with_products(sizes, rewritten)
        assert walking.shape(rewritten, known) == walking.shape(expression, sizes)
        for component in expression.components:
            before = walking.places(expression, sizes, component)
            after = {
                tuple(sorted((factor, i) for axis, number in index for factor, i in unraveled(axis, number, sizes))): at
                for index, at in walking.places(rewritten, known, component).items()
            }
            assert after == before


def unraveled(axis: str, number: int, sizes: dict[str, int]) -> list[tuple[str, int]]:
    names = factors(axis)
    indices = list(product(*(range(sizes[name]) for name in names)))[number]
    return list(zip(names, indices, strict=True))


@law
@given(st.lists(walking.expressions(), min_size=1, max_size=4))
def test_every_expression_of_a_tensor_keeps_the_same_axes(expressions: list[Expression]) -> None:
    basis = unify(expressions)
    for component in walking.TENSORS:
        kept = [
            sorted(basis.rewrite(expression).axes_of(component))
            for expression in expressions
            if component in expression.components
        ]
        assert all(axes == kept[0] for axes in kept)


@pytest.mark.parametrize(("texts", "wanted"), [
    (("q[(g r c) d]", "q[d (g r c)]"), ["d g*r*c", "d g*r*c"]),
    (("q[(g r c) d]", "q[g r c d]"), ["c d g r", "c d g r"]),
    (("q[(g r c) d]", "q[g (r c) d]"), ["d g r*c", "d g r*c"]),
    (("q[(g r c) d]", "q[(g (r c)) d]"), ["d g r*c", "d g r*c"]),
    (("q[(g r c) d]", "q[(r g c) d]"), ["c d g r", "c d g r"]),
    (("q[(g 1 c) d]", "q[(g c) d]"), ["c d g", "c d g"]),
    # what lives in a name somewhere is separated there
    (("q[(g r c)]", "q[(r c)]"), ["g r*c", "r*c"]),
    (("q[(g r c) d]", "[(g [q:(r c) | k:c]) d]", "k[(g c) d]"), ["d g r*c", "c d g r*c", "c d g"]),
    (("[[q:(g c) | k:(g c)] d]", "q[(g c) d]", "k[(g c) d]"), ["d g*c", "d g*c", "d g*c"]),
    # axes that both have are only joined where both allow it
    (("[(g c) [q: | k:]]", "q[(g c)]", "k[g c]"), ["c g", "c g", "c g"]),
    (("[(g c) [q: | k:]]", "q[(g c)]", "k[(g c)]"), ["g*c", "g*c", "g*c"]),
    # an axis of one tensor says nothing about another of the same name
    (("[[q:(n c) | k:c]]", "k[c]", "q[(n c)]"), ["c n*c", "c", "n*c"]),
    # copies along an axis that the tensor does not have
    (("k[(g c)]", "k[(g n c)]"), ["c g", "c g n"]),
])  # fmt: skip
def test_axes_that_are_never_separated_are_one(texts: tuple[str, ...], wanted: list[str]) -> None:
    assert joined(*texts) == wanted


def test_tied_tensors_are_one() -> None:
    assert joined("x[(n d)]", "y[n d]") == ["n*d", "d n"]
    assert joined("x[(n d)]", "y[n d]", tied={"y": "x"}) == ["d n", "d n"]
    assert joined("x[(n d)]", "y[(n d)]", tied={"y": "x"}) == ["n*d", "n*d"]


# Sums that source and target keep alike are moved whole: no size of a part is asked for.

FUSED = only("""
family fused
  axes l=layers d=width g=groups r=ranks c=head f=inner p copy=copies
  q    : l g r c d  optional
  k    : l g c d    optional
  v    : l g c d    optional
  gate : l f d      optional
  up   : l f d      optional
  head : f d        optional
dialect hf
  layers.{l}.qkv = [(g [q:(r c) | k:c | v:c]) d]
  layers.{l}.glu = [[gate:f | up:f] d]
  also old.{l}.qkv = [(g [q:(r c) | k:c | v:c]) d]
  also older.{l}.qkv = [[q:(g r c) | k:(g c) | v:(g c)] d]
  head = [[head:f | 0:p] d]
dialect renamed
  blocks.{l}.attn.w = [(g [q:(r c) | k:c | v:c]) d]
  blocks.{l}.mlp.w = [[gate:f | up:f] d]
  head.w = [[head:f | 0:p] d]
dialect blocked
  blocks.{l}.attn.w = [[q:(g r c) | k:(g c) | v:(g c)] d]
dialect copied
  blocks.{l}.attn.w = [(g [q:(r c) | k:c | v:c]) copy d]
dialect apart
  blocks.{l}.qkv = [(g [q:(r c) | k:c | v:c]) d]
  blocks.{l}.q   = q[(g r c) d]
""")


def stored(rows: int = 24, columns: int = 3, *, prefix: str = "layers") -> dict[str, torch.Tensor]:
    return {f"{prefix}.{i}.qkv": arange(rows, columns, start=1000 * i) for i in range(2)}


@law
@given(st.integers(0, 12), st.integers(0, 4), st.integers(1, 3), st.integers(1, 3))
def test_chunks_states_and_rows_of_any_number(rows: int, columns: int, down: int, across: int) -> None:
    """Nothing says that rows are whole groups, so none are asked for; every element is where it was."""
    store = Store()
    for name, array in stored(rows, columns).items():
        edges = [
            [size * i // parts for i in range(parts + 1)]
            for size, parts in zip((rows, columns), (down, across), strict=True)
        ]
        spans = [[pair for pair in pairwise(dim) if pair[0] < pair[1]] for dim in edges]
        store.put(name, array, list(product(*spans)) or None)
        store.put(f"optim/{name}/exp_avg", array + 7)
        store.put(f"optim/{name}/step", arange(1).reshape(()))
    found = carried(FUSED, "hf", "renamed", store)
    wanted = {f"blocks.{i}.attn.w": array for i, array in enumerate(stored(rows, columns).values())}
    states = {f"optim/{name}/exp_avg": array + 7 for name, array in wanted.items()}
    steps = {f"optim/{name}/step": arange(1).reshape(()) for name in wanted}
    same(found, wanted | states | steps)


def test_sizes_that_are_known_are_still_held_against_shapes() -> None:
    source = Store(stored())
    view = translated(FUSED, "hf", "renamed", source, {"width": 4})
    assert {each.code for each in view.refusals} == {"SHAPE_MISMATCH"}
    view = translated(FUSED, "hf", "renamed", source, {"groups": 2, "ranks": 3, "head": 4, "width": 3})
    assert {each.code for each in view.refusals} == {"SHAPE_MISMATCH"}
    assert translated(FUSED, "hf", "renamed", source, {"groups": 2, "ranks": 1, "head": 4}).refusals == ()


def test_where_a_line_takes_it_apart_sizes_are_asked_for() -> None:
    """A line of the target, or another layout in the source; and padding is not moved blindly."""
    both = {**stored(), **{f"older.{i}.qkv": arange(24, 3) for i in range(2)}}
    for target, tensors in (("blocked", stored()), ("apart", stored()), ("renamed", both)):
        assert {each.code for each in translated(FUSED, "hf", target, Store(tensors)).refusals} == {"UNKNOWN_AXIS"}
    view = translated(FUSED, "hf", "renamed", Store({"head": arange(8, 3)}))
    assert only_refusal(view, "UNKNOWN_AXIS").message.startswith("[[head:f | 0:p] d]")


def test_copies_under_two_names_are_compared_whole() -> None:
    source = stored()
    store = Store({**source, **stored(prefix="old")})
    view = translated(FUSED, "hf", "renamed", store)
    assert view.refusals == ()
    assert all(equal(view, store))
    store.put("old.1.qkv", arange(24, 3, start=5))
    assert not all(equal(view, store))


@pytest.mark.parametrize(("rows", "tile"), [(24, (4, 2)), (22, (5, 3)), (24, (24, 3)), (7, (1, 1))])
def test_scales_of_blocks_stay_where_they_are(rows: int, tile: tuple[int, int]) -> None:
    source = stored(rows)
    view = translated(FUSED, "hf", "renamed", Store(source))
    for i, name in enumerate(source):
        shape = grid((rows, 3), tile)
        scale = arange(*shape, start=50 * i)
        tiles = dict.fromkeys(source, tile)
        moved = scales(view.targets[f"blocks.{i}.attn.w"], tile, tiles, scale_name="{}_scale".format, dtype="F32")
        assert fill(Store({f"{name}_scale": scale}), moved.target).tolist() == scale.tolist()
