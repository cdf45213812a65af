"""Expressions: layouts are parsed, printed and checked, and so are those of computed tensors."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.axes import walking
from tests.axes.apply import arange, law
from tests.some import some
from transaxle.axes.notation.computed import apply_steps, inverse, round_to, simplify
from transaxle.axes.notation.computed import parse as parse_computed
from transaxle.axes.notation.expression import Expression, Layout, Merge, parse, size
from transaxle.errors import Refused

Parts = dict[str, torch.Tensor]


def gathered(layout: Layout, component: str, flat: torch.Tensor) -> dict[walking.Index, int]:
    """Element -> the number found where the layout says it is."""
    dims = list(zip(layout.shares[component], torch.empty(layout.shape).stride(), strict=True))
    offset = sum(share.offset * step for share, step in dims)
    axes = [(axis, count, stride * step) for share, step in dims for axis, count, stride in share.axes]
    found = {}
    for index in product(*(range(count) for _, count, _ in axes)):
        place = offset + sum(i * stride for i, (_, _, stride) in zip(index, axes, strict=True))
        key = tuple(sorted((axis, i) for i, (axis, _, _) in zip(index, axes, strict=True)))
        found[key] = int(flat[place])
    return found


@law
@given(walking.expressions(), walking.sizes(least=0))
def test_layout_is_the_plain_walk(expression: Expression, sizes: dict[str, int]) -> None:
    layout = expression.layout(sizes)
    assert layout.shape == walking.shape(expression, sizes)
    assert set(layout.shares) == set(expression.components)
    flat = torch.arange(int(np.prod(layout.shape)))
    for component in expression.components:
        assert gathered(layout, component, flat) == walking.places(expression, sizes, component)


SIZES = {"g": 2, "r": 3, "c": 4, "t": 2, "h": 2, "d": 5, "e": 3, "f": 4, "i": 6, "n": 7, "p": 2}

CASES: list[tuple[str, dict[str, str], Callable[[Parts], torch.Tensor]]] = [
    ("x[f d]", {"x": "f d"}, lambda t: t["x"]),
    ("x[d f]", {"x": "f d"}, lambda t: t["x"].T),
    ("x[(f d)]", {"x": "f d"}, lambda t: t["x"].reshape(-1)),
    ("x[1 f (1 d)]", {"x": "f d"}, lambda t: t["x"].unsqueeze(0)),
    ("x[]", {"x": ""}, lambda t: t["x"]),
    ("[[x: | y:]]", {"x": "", "y": ""}, lambda t: torch.stack([t["x"], t["y"]])),
    ("q[(g r c) d]", {"q": "g r c d"}, lambda t: t["q"].reshape(-1, 5)),
    ("q[d (r g) c]", {"q": "g r c d"}, lambda t: t["q"].permute(3, 1, 0, 2).reshape(5, 6, 4)),
    # blocked and interleaved, in either dim
    ("[[x:f | y:f] d]", {"x": "f d", "y": "f d"}, lambda t: torch.cat([t["x"], t["y"]])),
    ("[d [x:f | y:f]]", {"x": "f d", "y": "f d"}, lambda t: torch.cat([t["x"].T, t["y"].T], 1)),
    ("[(f [x: | y:]) d]", {"x": "f d", "y": "f d"}, lambda t: torch.stack([t["x"], t["y"]], 1).reshape(8, 5)),
    ("[d (f [x: | y:])]", {"x": "f d", "y": "f d"}, lambda t: torch.stack([t["x"].T, t["y"].T], 2).reshape(5, 8)),
    ("[e [x:f | y:f] d]", {"x": "e f d", "y": "e f d"}, lambda t: torch.cat([t["x"], t["y"]], 1)),
    # unequal sums, of different axes
    ("[[x:f | y:i] d]", {"x": "f d", "y": "i d"}, lambda t: torch.cat([t["x"], t["y"]])),
    ("[[q:(g r c) | k:(g c) | v:(g c)] d]", {"q": "g r c d", "k": "g c d", "v": "g c d"},
     lambda t: torch.cat([t[name].reshape(-1, 5) for name in "qkv"])),
    # grouped, with more query heads than key heads
    ("[(g [q:(r c) | k:c | v:c]) d]", {"q": "g r c d", "k": "g c d", "v": "g c d"},
     lambda t: torch.cat([t["q"], t["k"][:, None], t["v"][:, None]], 1).reshape(-1, 5)),
    # grouped, with a gate beside each query head
    ("[(g [q:(r c) | s:(r c) | k:c | v:c]) d]", {"q": "g r c d", "s": "g r c d", "k": "g c d", "v": "g c d"},
     lambda t: torch.cat([t["q"], t["s"], t["k"][:, None], t["v"][:, None]], 1).reshape(-1, 5)),
    ("[(g r [q:c | s:c]) d]", {"q": "g r c d", "s": "g r c d"},
     lambda t: torch.stack([t["q"], t["s"]], 2).reshape(-1, 5)),
    # two halves of a head taken in turn, as rotary embeddings have it
    ("q[(g h t) d]", {"q": "g t h d"}, lambda t: t["q"].transpose(1, 2).reshape(-1, 5)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "axes", "built"), CASES, ids=[text for text, _, _ in CASES])
def test_layout_is_what_torch_builds(text: str, axes: dict[str, str], built: Callable[[Parts], torch.Tensor]) -> None:
    parts: Parts = {}
    start = 0
    for name, own in axes.items():
        parts[name] = arange(*(SIZES[axis] for axis in own.split()), start=start)
        start += parts[name].numel()
    stored = built(parts)
    layout = parse(text).layout(SIZES)
    assert layout.shape == tuple(stored.shape)
    for name, tensor in parts.items():
        names = axes[name].split()
        found = gathered(layout, name, stored.reshape(-1))
        assert len(found) == tensor.numel()
        for index, number in found.items():
            at = dict(index)
            assert number == int(tensor[tuple(at[axis] for axis in names)])


def test_components_axes_and_padding_axes() -> None:
    grouped = parse("[(g [q:(r c) | k:c | 0:p]) d]")
    assert grouped.components == ("q", "k")
    assert grouped.axes == set("grcpd")
    assert grouped.padding == {"p"}
    assert grouped.axes_of("q") == ("g", "r", "c", "d")
    assert grouped.axes_of("k") == ("g", "c", "d")
    assert size(grouped.dims[0], SIZES) == 2 * (3 * 4 + 4 + 2)


def test_rewrite_meets_every_merge_with_its_owners() -> None:
    seen = []

    def change(merge: Merge, owners: tuple[str, ...]) -> Merge:
        seen.append((len(merge.parts), owners))
        return merge

    expression = parse("[(g [q:(r c) | k:c]) (d 1)]")
    assert expression.rewrite(change).dims == expression.dims
    assert seen == [(2, ("q",)), (2, ("q", "k")), (0, ("q", "k")), (2, ("q", "k"))]


@pytest.mark.parametrize(
    ("text", "column", "expected"),
    [
        ("", 1, "'['"),
        ("x", 2, "'['"),
        ("x[a", 4, "an axis, '1', '(', '[' or ']'"),
        ("x[a)", 4, "an axis, '1', '(', '[' or ']'"),
        ("x[(a]", 5, "an axis, '1', '(', '[' or ')'"),
        ("x[a] b", 6, "the end of the expression"),
        ("x[a 3]", 5, "'1' or an axis"),
        ("x[a 0]", 5, "'1' or an axis"),
        ("x[é]", 3, "an axis"),
        ("[[a | b:c]]", 5, "':'"),
        ("[[1:a | b:c]]", 3, "'tensor:'"),
        ("[[x:a b | y:a]]", 7, "'|' or ']'"),
        ("[[x:a | ]]", 9, "'tensor:'"),
        ("[[x:a y:b]]", 7, "'|' or ']'"),
        ("[a b]", 1, "exactly one sum"),
        ("[[x:a] [x:b]]", 1, "exactly one sum"),
        ("x[[y:a | z:b]]", 1, "no sum inside the dims of one tensor"),
        ("x[[0:a] b]", 1, "no sum inside the dims of one tensor"),
        ("[[x:[y:a] | z:a]]", 1, "no sum inside a sum"),
        ("[[0:a] b]", 1, "a logical tensor beside the padding"),
        ("[[x:a | x:b]]", 1, "each logical tensor once; 'x'"),
        ("x[a (b a)]", 1, "each axis of 'x' once; 'a'"),
        ("[a [x:a | y:b]]", 1, "each axis of 'x' once; 'a'"),
        ("x[" + "(" * 17 + "a" + ")" * 17 + "]", 19, "at most 16 brackets"),
    ],
)
def test_errors_show_the_column_and_what_was_expected(text: str, column: int, expected: str) -> None:
    with pytest.raises(Refused) as caught:
        parse(text)
    assert caught.value.code == "CORRUPT"
    message = caught.value.refusals[0].message
    assert f"column {column}: expected {expected}" in message
    assert message.startswith(text + "\n")
    with pytest.raises(Refused, match=f"column {column + 8}: expected"):
        parse(text, start=8)
    caret = message.splitlines()[1]
    assert caret.strip() != "^" or caret.index("^") == column - 1


# Issue 17, arithmetic: steps with an inverse, computed in float64 and rounded once.

FORMS = {
    "norm - 1": lambda x: x - 1,
    "2 * norm + 0.5": lambda x: 2 * x + 0.5,
    "-exp(A_log)": lambda x: -np.exp(x),
    "1 - x / 4": lambda x: 1 - x / 4,
    "3 + log(exp(x) * 2 + 1)": lambda x: 3 + np.log(np.exp(x) * 2 + 1),
    "-(2 - x) * (1 + 1)": lambda x: -(2 - x) * 2,
    "x": lambda x: x,
}


@pytest.mark.parametrize("text", FORMS)
def test_steps_give_the_formula_and_their_inverse_gives_it_back(text: str) -> None:
    steps = some(parse_computed(text))
    x = np.linspace(-3, 3, 41)
    stored = apply_steps(x, steps)
    assert np.allclose(stored, FORMS[text](x), rtol=1e-14)
    assert np.allclose(apply_steps(stored, inverse(steps)), x, rtol=1e-12, atol=1e-12)
    both = simplify((*inverse(steps), *steps))
    assert both == () or np.allclose(apply_steps(stored, both), stored)
    doubled = some(parse_computed("2 * exp(x)"))
    assert simplify((*doubled, *inverse(doubled))) == ()


@pytest.mark.parametrize(
    "text",
    ["", "x + y", "x * x", "0 * x", "x +", "1 / x", "sin(x)", "exp(x, x)", "exp(2)", "x / 0", "x ** 2", "7",
     "1e999 * x", "exp(base=x)", "'x' * 2", "True * x", "x - 1j", "(" * 500 + "x" + ")" * 500, "-" * 3000 + "x"],
)  # fmt: skip
def test_what_has_no_inverse_or_is_no_arithmetic_is_refused(text: str) -> None:
    assert parse_computed(text) is None


def test_values_without_a_result_are_refused_but_not_those_that_are_not_finite_before() -> None:
    steps = some(parse_computed("-exp(x)"))
    with pytest.raises(ValueError, match=r"^0\.5$"):
        apply_steps(np.array([-1.0, 0.5]), inverse(steps))
    with pytest.raises(ValueError, match=r"^100\.0$"):
        apply_steps(np.array([100.0], np.float16), steps)
    assert np.isnan(apply_steps(np.array([np.nan], np.float32), steps)).all()
    assert apply_steps(np.array([-np.inf]), steps).tolist() == [0.0]


def test_a_value_beside_the_middle_of_two_is_not_rounded_to_the_middle_first() -> None:
    middle = 1 + 2.0**-8
    values = np.array([middle, middle + 2.0**-40, middle - 2.0**-40, -middle - 2.0**-40, 3.3e38, 1e39, -1e-45, 0.0])
    found = round_to(values, np.dtype(ml_dtypes.bfloat16)).astype(np.float64)
    assert found[:4].tolist() == [1.0, 1 + 2.0**-7, 1.0, -1 - 2.0**-7]
    assert found[5] == np.inf


@given(st.floats(width=64, allow_nan=False, min_value=-1e38, max_value=1e38))
def test_bfloat16_is_the_nearest(value: float) -> None:
    with np.errstate(all="ignore"):
        found = round_to(np.array([value]), np.dtype(ml_dtypes.bfloat16))
        bits = int(found.view(np.uint16)[0])
        neighbours = np.array([bits - 1, bits, bits + 1], np.int64).clip(0, 0xFFFF).astype(np.uint16)
        others = neighbours.view(ml_dtypes.bfloat16).astype(np.float64)
        distances = np.abs(others[np.isfinite(others)] - value)
    assert abs(float(found[0]) - value) == distances.min()
