"""Divisions: what a table and the shards' shapes say of a cut, held against numpy slicing along the named axes."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.some import some
from transaxle.axes.geometry import whole
from transaxle.axes.layout.divide import Division, divide, rank_shares, share_out
from transaxle.axes.notation import tables
from transaxle.axes.notation.expression import Expression, parse
from transaxle.axes.notation.family import Cuttable
from transaxle.errors import TransaxleError

SIZES = {"g": 3, "r": 2, "c": 4, "d": 5, "f": 7, "n": 9, "x": 2, "p": 3}
TP = "tp"


def cuttable(*axes: str, of: str = "") -> Cuttable:
    return Cuttable(TP, axes, frozenset(of.split()) or None)


def split(full: np.ndarray, axis: int, widths: list[int]) -> list[np.ndarray]:
    return np.split(full, np.cumsum(widths)[:-1], axis)


def fused(widths: list[int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """All of q, then k, then v, and the shards of a cut of each along its groups; in one tensor of `[rows, d]`."""
    g, r, c, d = (SIZES[axis] for axis in "grcd")
    parts = [
        np.arange(prod(shape)).reshape(shape) + 1000 * n for n, shape in enumerate([(g, r, c, d), *[(g, c, d)] * 2])
    ]
    cut = [[part.reshape(-1, d) for part in split(each, 0, widths)] for each in parts]
    shards = [np.concatenate([each[rank] for each in cut]) for rank in range(len(widths))]
    return np.concatenate([part.reshape(-1, d) for part in parts]), shards


def check(division: Division, full: np.ndarray, shards: list[np.ndarray]) -> None:
    assert division.shape == full.shape
    for rank, shard in enumerate(shards):
        got = full
        if division.dim is not None:
            held = division.rule(whole(full.shape[division.dim]), len(shards), rank)
            got = full.take([row for start, stop in held for row in range(start, stop)], division.dim)
        np.testing.assert_array_equal(got, shard)


@pytest.mark.parametrize("widths", [[1, 2], [3, 0], [1, 0, 2], [1, 1, 1]])
def test_parts_are_cut_each_by_itself(widths: list[int]) -> None:
    full, shards = fused(widths)
    rule = parse("[[q:(g r c) | k:(g c) | v:(g c)] d]")
    check(divide(rule, [cuttable("g")], SIZES, [s.shape for s in shards]), full, shards)


def test_a_part_that_is_not_named_is_whole_on_every_rank() -> None:
    """Few kv heads, held by all ranks: only q is cut, although k and v have the same axis."""
    full, _ = fused([3])
    g, r, c, d = (SIZES[axis] for axis in "grcd")
    q, kv = full[: g * r * c], full[g * r * c :]
    shards = [np.concatenate([part.reshape(-1, d), kv]) for part in split(q.reshape(g, r * c, d), 0, [2, 1])]
    rule = parse("[[q:(g r c) | k:(g c) | v:(g c)] d]")
    check(divide(rule, [cuttable("g", of="q")], SIZES, [s.shape for s in shards]), full, shards)


@given(st.lists(st.integers(0, 7), min_size=1, max_size=4), st.integers(0, 1))
def test_a_plain_cut_has_any_widths(widths: list[int], dim: int) -> None:
    sizes = SIZES | {"f": sum(widths)}
    full = np.arange(sum(widths) * 5).reshape((-1, 5) if dim == 0 else (5, -1))
    if not full.size:
        full = full.reshape((0, 5) if dim == 0 else (5, 0))
    shards = split(full, dim, widths)
    rule = parse("up[f d]" if dim == 0 else "up[d f]")
    check(divide(rule, [cuttable("f")], sizes, [s.shape for s in shards]), full, shards)


def test_an_outermost_axis_may_be_cut_finer_than_its_own_steps() -> None:
    full = np.arange(24 * 5).reshape(24, 5)
    shards = split(full, 0, [5, 19])
    check(divide(parse("q[(g r c) d]"), [cuttable("g")], SIZES, [s.shape for s in shards]), full, shards)


def test_an_inner_axis_gives_each_rank_several_runs() -> None:
    full = np.arange(14 * 5).reshape(14, 5)
    shards = [part.reshape(-1, 5) for part in split(full.reshape(2, 7, 5), 1, [4, 3])]
    check(divide(parse("w[(x f) d]"), [cuttable("f")], SIZES, [s.shape for s in shards]), full, shards)


def test_axes_that_are_counted_as_one() -> None:
    """Each rank takes the next elements of both axes together, and has as many of the outer one as the whole."""
    full = np.arange(2 * 2 * 6).reshape(2, 2, 6)  # (x [a:f | b:f])
    a, b = (full[:, part].reshape(12) for part in (0, 1))
    shards = []
    for start in (0, 6):  # six elements for each rank, as two times three
        mine = np.stack([a[start : start + 6].reshape(2, 3), b[start : start + 6].reshape(2, 3)], 1)
        shards.append(mine.reshape(-1))
    rule = parse("[(x [a:f | b:f])]")
    got = divide(rule, [cuttable("x", "f")], SIZES | {"f": 6}, [s.shape for s in shards])
    check(got, full.reshape(-1), shards)


def test_what_every_rank_holds_is_not_cut() -> None:
    full = np.arange(5.0)
    check(divide(parse("norm[d]"), [cuttable("g")], SIZES, [(5,), (5,)]), full, [full, full])
    assert divide(parse("q[(g r c) d]"), [cuttable("g")], SIZES, [(24, 5), (24, 5)]).dim is None


def test_the_whole_shape_says_which_dim_was_cut() -> None:
    rule, cuts = parse("embed[n d]"), [cuttable("n"), cuttable("d", of="embed")]
    assert divide(rule, cuts, SIZES, [(5, 5), (4, 5)]).dim == 0
    assert divide(rule, cuts, SIZES, [(9, 3), (9, 2)]).dim == 1


def refused(rule: Expression, cuts: list[Cuttable], shards: list[tuple[int, ...]], **sizes: int) -> TransaxleError:
    with pytest.raises(TransaxleError) as caught:
        divide(rule, cuts, sizes or SIZES, shards)
    return caught.value


@pytest.mark.parametrize(("rule", "shards"), [
    ("q[(g r c) d]", [(8, 5), (8, 5)]),  # a rank is missing
    ("q[(g r c) d]", [(24, 5), (24, 4)]),
    ("[[q:(g r c) | k:(g c) | v:(g c)] d]", [(20, 5), (28, 5)]),  # a cut inside a group
    ("o[d (g r c)]", [(3, 24), (2, 24)]),  # cut along an axis that is not named
    ("norm[d]", [(3,), (2,)]),
    ("norm[d]", [(5,), (5, 1)]),
])  # fmt: skip
def test_shapes_that_no_cut_gives_are_refused(rule: str, shards: list[tuple[int, ...]]) -> None:
    error = refused(parse(rule), [cuttable("g")], shards)
    assert error.code == "SHAPE_MISMATCH"
    assert rule in str(error)


def test_two_readings_are_refused() -> None:
    error = refused(parse("[[a:(x f) | b:(f x)] d]"), [cuttable("f"), cuttable("x")], [(4, 5), (4, 5)], x=2, f=2, d=5)
    assert error.code == "AMBIGUOUS"
    assert "split along f or x" in str(error)
    assert "cut tp =" in error.hint


def test_a_size_that_is_needed_is_asked_for() -> None:
    error = refused(parse("head[n d]"), [cuttable("n")], [(4, 5), (5, 5)], d=5)
    assert error.code == "UNKNOWN_AXIS"
    assert "--axis n=N" in error.hint
    assert refused(parse("[[embed:n | 0:p] d]"), [cuttable("n")], [(6, 5), (6, 5)]).code == "UNSUPPORTED"
    assert divide(parse("norm[d]"), [cuttable("n")], {}, [(5,), (5,)]).shape == (5,)


TOY = "family toy\n  axes l g c d\n  q : l g c d\n  k : l g c d\n"


@pytest.mark.parametrize(("statement", "said"), [
    ("cut tp", "'cut tp = AXIS"),
    ("cut tp = ()", "'cut tp = AXIS"),
    ("cut pp = g", "'cut tp = AXIS"),
    ("cut tp = g of", "'of' is not in 'axes'"),
    ("cut tp = z", "'z' is not in 'axes'"),
    ("cut tp = g of z", "'z' is none"),
    ("cut tp = " + "a" * 900 + "!", "'cut tp = AXIS"),
])  # fmt: skip
def test_mistakes_in_cut_statements_are_shown(statement: str, said: str) -> None:
    with pytest.raises(TransaxleError) as caught:
        tables.read(f"{TOY}  {statement}")
    assert said in str(caught.value)
    assert "line 5" in str(caught.value)


def test_the_first_statement_that_applies_shares_out() -> None:
    rule = parse("up[f d]")
    cuts = [cuttable("g"), cuttable("d", of="down"), cuttable("f"), cuttable("d")]
    assert share_out(rule, cuts, SIZES, 7) == (0, tuple(((n, n + 1),) for n in range(7)))
    assert share_out(rule, cuts[:2], SIZES, 2) is None


def test_a_group_may_be_shared_by_ranks() -> None:
    """Fewer kv heads than ranks: the rows of a group are cut, as its ranks have them."""
    sizes = SIZES | {"g": 2, "r": 2, "c": 4}
    found = share_out(parse("[(g [q:(r c) | k:c | v:c]) d]"), [cuttable("g")], sizes, 4)
    assert found == (0, (((0, 8),), ((8, 16),), ((16, 24),), ((24, 32),)))


@pytest.mark.parametrize(
    ("rule", "axis"), [("up[f d]", "f"), ("[[gate:f | up:f] d]", "f"), ("[[embed:n | 0:p] d]", "n")]
)
def test_what_does_not_divide_is_refused(rule: str, axis: str) -> None:
    with pytest.raises(TransaxleError, match=r"does not divide over 2|its padding is split"):
        share_out(parse(rule), [cuttable(axis)], SIZES, 2)


FAMILY = """
family toy
  axes n d f g r c e m y w p
  embed : n d
  norm  : g c
  q     : g r c d
  k     : g c d
  v     : g c d
  gate  : e f d
  up    : e f d
  down  : e d f
  bias  : e d
  x     : m w d
  b     : y w d
  cut tp = n
  cut tp = g
  cut tp = r within g
  cut tp = f
  cut tp@engine = none of norm
  cut tp@engine = d of bias
  cut tp@engine = m y
  cut ep = e of gate up down bias
"""
ENGINE_SIZES = dict(zip("ndfgrcemywp", (60, 6, 8, 2, 4, 3, 10, 8, 4, 2, 4), strict=True))


def shares(rule: str, *, dialect: str = "engine", **degrees: int) -> tuple[int, list[list[int]]] | None:
    """The dim that is shared out, and every rank's rows of it, one by one."""
    (family,) = tables.read(FAMILY)
    found = rank_shares(parse(rule), family, dialect, ENGINE_SIZES, **degrees)
    if found is None:
        return None
    dim, positions = found
    return dim, [[row for start, stop in intervals for row in range(start, stop)] for intervals in positions]


def test_a_fused_dim_is_cut_in_each_component() -> None:
    heads = [*range(12), 24, 25, 26, 30, 31, 32], [*range(12, 24), 27, 28, 29, 33, 34, 35]
    assert shares("[[q:(g r c) | k:(g c) | v:(g c)] d]", tp=2) == (0, [*heads])
    assert shares("[e [gate:f | up:f] d]", tp=4) == (1, [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]])
    assert shares("[e (f [gate: | up:]) d]", tp=4) == (1, [[*range(4 * rank, 4 * rank + 4)] for rank in range(4)])


def test_padding_with_the_axis_is_cut_like_a_component() -> None:
    assert shares("[[q:(g r c) | 0:(g c)] d]", tp=2) == (0, [[*range(12), 24, 25, 26], [*range(12, 24), 27, 28, 29]])
    assert shares("[[q:(g r c) | 0:(g c)] d]", tp=4) == shares("[[q:(g r c) | k:(g c)] d]", tp=4)


def test_ranks_that_share_a_kv_head_hold_copies_of_it() -> None:
    found = some(shares("[[q:(g r c) | k:(g c)] d]", tp=4))
    assert found[1] == [
        [*range(6 * rank, 6 * rank + 6), *range(24 + rank // 2 * 3, 27 + rank // 2 * 3)] for rank in range(4)
    ]
    assert shares("q[d (g r c)]", tp=8) == (1, [[*range(3 * rank, 3 * rank + 3)] for rank in range(8)])


def test_padding_is_cut_as_it_is() -> None:
    assert shares("[[embed:n | 0:p] d]", tp=4) == (0, [[*range(16 * rank, 16 * rank + 16)] for rank in range(4)])
    assert shares("[e [bias:d | 0:w]]", tp=2) == (1, [[0, 1, 2, 3], [4, 5, 6, 7]])
    with pytest.raises(TransaxleError, match="64 does not divide over 3 ranks"):
        shares("[[embed:n | 0:p] d]", tp=3)


def test_experts_are_shared_out_unevenly_but_all() -> None:
    rows = [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert shares("[e [gate:f | up:f] d]", tp=4, ep=4) == (0, rows)
    assert shares("down[e d f]", tp=4, ep=4) == (0, rows)
    assert shares("q[(g r c) d]", tp=2, ep=2) == shares("q[(g r c) d]", tp=2)


def test_what_a_dialect_says_goes_before_what_all_have() -> None:
    assert shares("norm[(g c)]", tp=2) is None
    assert shares("norm[(g c)]", tp=2, dialect="other") == (0, [[0, 1, 2], [3, 4, 5]])
    assert shares("x[(m w) d]", tp=2, dialect="other") is None


def test_components_without_the_axis_step_with_it_or_are_shared() -> None:
    halves = [*range(8), *range(16, 20)], [*range(8, 16), *range(20, 24)]
    assert shares("[[x:(m w) | b:(y w)] d]", tp=2) == (0, [*halves])
    found = some(shares("[[x:(m w) | b:(y w)] d]", tp=8))
    assert found[1] == [[2 * r, 2 * r + 1, 16 + r // 2 * 2, 17 + r // 2 * 2] for r in range(8)]


def test_what_does_not_divide_over_an_engine_is_refused() -> None:
    for rule, ranks in (("q[(g r c) d]", 3), ("q[(g r c) d]", 16), ("down[e d f]", 3), ("[[x:(m w) | b:(y w)] d]", 16)):
        with pytest.raises(TransaxleError, match=f"does not divide over {ranks} ranks"):
            shares(rule, tp=ranks)


def test_a_size_that_is_not_known_is_asked_for() -> None:
    (family,) = tables.read(FAMILY)
    sizes = {axis: count for axis, count in ENGINE_SIZES.items() if axis != "f"}
    with pytest.raises(TransaxleError, match="the size of axis f is needed") as caught:
        rank_shares(parse("[e [gate:f | up:f] d]"), family, "engine", sizes, tp=2)
    assert caught.value.code == "UNKNOWN_AXIS"
