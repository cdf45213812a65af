from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.axes import walking
from tests.axes.apply import law, only
from transaxle.axes.layout.relayout import Shape, fill, solve, unify, with_products
from transaxle.axes.notation.expression import Axis, Expression, parse, walk
from transaxle.axes.notation.family import Sizes
from transaxle.errors import Refused, UsageError


@law
@given(walking.expressions(), walking.sizes(), st.data())
def test_fill_finds_what_it_is_not_told(expression: Expression, sizes: dict[str, int], data: st.DataObject) -> None:
    """Where one axis of each dim is left out the shape tells it; where more are, it is refused or found."""
    shape = walking.shape(expression, sizes)
    told = {axis: sizes[axis] for axis in sizes if data.draw(st.booleans(), axis)}
    hidden = [{n.name for n in walk(dim) if isinstance(n, Axis) and n.name not in told} for dim in expression.dims]
    if any(len(names) > 1 for names in hidden):
        with pytest.raises(UsageError, match="UNKNOWN_AXIS"):
            fill(expression, shape, told)
        return
    found = fill(expression, shape, told)
    assert {axis: found[axis] for axis in expression.axes} == {axis: sizes[axis] for axis in expression.axes}


@pytest.mark.parametrize(
    ("text", "shape", "told", "why"),
    [
        ("x[f d]", (4,), {}, "expected 2 dims, got [4]"),
        ("x[f d]", (4, 5), {"d": 6}, "expected [4, 6] (d=6, f=4), got [4, 5]"),
        ("x[(f d)]", (20,), {"f": 3}, "a size of d that makes a dim of 20"),
        ("[[x:f | y:f]]", (7,), {}, "a size of f that makes a dim of 7"),
        ("[[x:n | 0:p]]", (6,), {"n": 7}, "a size of p that makes a dim of 6"),
        ("x[1 f]", (2, 3), {}, "expected [1, 3] (f=3), got [2, 3]"),
        ("x[(f d)]", (5,), {"f": 0}, "a size of d that makes a dim of 5"),
    ],
)
def test_fill_refuses_shapes_that_the_rule_does_not_explain(
    text: str, shape: Shape, told: dict[str, int], why: str
) -> None:
    with pytest.raises(Refused) as caught:
        fill(parse(text), shape, told)
    assert caught.value.code == "SHAPE_MISMATCH"
    assert caught.value.refusals[0].message.startswith(text)
    assert why in caught.value.refusals[0].message


@pytest.mark.parametrize(("text", "shape"), [("x[(f d)]", (20,)), ("[[x:n | 0:p]]", (9,))])
def test_fill_never_guesses(text: str, shape: Shape) -> None:
    with pytest.raises(UsageError) as caught:
        fill(parse(text), shape, {})
    assert caught.value.code == "UNKNOWN_AXIS"
    assert "--axis" in caught.value.hint
    assert str(list(shape)) in caught.value.refusals[0].message


def test_products_of_known_factors() -> None:
    one, other = parse("q[(g r c) d]"), parse("q[d (g r c)]")
    rewritten = unify([one, other]).rewrite(one)
    assert with_products({"g": 2, "r": 3, "c": 4}, rewritten)["g*r*c"] == 24
    assert "g*r*c" not in with_products({"g": 2, "r": 3}, rewritten)
    assert fill(rewritten, (24, 5), {})["g*r*c"] == 24


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


def test_solve_goes_on_with_what_it_found() -> None:
    equations: dict[str, dict[Shape, int]] = {"x[(f d)]": {(20,): 0}, "y[d]": {(5,): 0}, "w[(f c)]": {(12,): 0}}
    assert solved(equations, {}) == {"d": 5, "f": 4, "c": 3}


def test_solve_leaves_open_what_varies() -> None:
    assert solved({"x[f d]": {(4, 5): 0, (6, 5): 1}}, {}) == {"d": 5}


def test_solve_never_overrules_what_is_given_or_configured() -> None:
    assert solved({"x[f d]": {(4, 5): 0}}, {"width": 7}, f=9) == {"f": 9}


def test_solve_leaves_open_what_no_size_explains() -> None:
    assert solved({"[[x:f | y:f]]": {(7,): 0}, "w[d]": {(5,): 0}}, {}) == {"d": 5}


def test_solve_skips_shapes_of_other_ranks() -> None:
    assert solved({"x[f d]": {(4,): 0, (4, 5): 1}}, {}) == {"f": 4, "d": 5}
