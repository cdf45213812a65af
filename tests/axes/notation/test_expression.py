from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given

from tests.axes import walking
from tests.axes.apply import arange, law
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


@law
@given(walking.expressions(), walking.sizes())
def test_shares_are_nested(expression: Expression, sizes: dict[str, int]) -> None:
    for shares in expression.layout(sizes).shares.values():
        for share in shares:
            reach = 1
            for _, count, stride in reversed(share.axes):
                assert stride >= reach
                reach = stride * count


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
    (
        "[[q:(g r c) | k:(g c) | v:(g c)] d]",
        {"q": "g r c d", "k": "g c d", "v": "g c d"},
        lambda t: torch.cat([t[name].reshape(-1, 5) for name in "qkv"]),
    ),
    # grouped, with more query heads than key heads
    (
        "[(g [q:(r c) | k:c | v:c]) d]",
        {"q": "g r c d", "k": "g c d", "v": "g c d"},
        lambda t: torch.cat([t["q"], t["k"][:, None], t["v"][:, None]], 1).reshape(-1, 5),
    ),
    # grouped, with a gate beside each query head
    (
        "[(g [q:(r c) | s:(r c) | k:c | v:c]) d]",
        {"q": "g r c d", "s": "g r c d", "k": "g c d", "v": "g c d"},
        lambda t: torch.cat([t["q"], t["s"], t["k"][:, None], t["v"][:, None]], 1).reshape(-1, 5),
    ),
    (
        "[(g r [q:c | s:c]) d]",
        {"q": "g r c d", "s": "g r c d"},
        lambda t: torch.stack([t["q"], t["s"]], 2).reshape(-1, 5),
    ),
    # two halves of a head taken in turn, as rotary embeddings have it
    ("q[(g h t) d]", {"q": "g t h d"}, lambda t: t["q"].transpose(1, 2).reshape(-1, 5)),
]


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


def test_padding_belongs_to_nothing() -> None:
    layout = parse("[[0:p | x:n] d]").layout(SIZES)
    assert layout.shape == (9, 5)
    assert list(layout.shares) == ["x"]
    assert layout.shares["x"][0].offset == SIZES["p"]


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
    caret = message.splitlines()[1]
    assert caret.strip() != "^" or caret.index("^") == column - 1


@pytest.mark.parametrize(("text", "found"), [("x[a", "found the end"), ("x[a)", "found ')'"), ("x[2]", "found '2'")])
def test_errors_show_what_was_found(text: str, found: str) -> None:
    with pytest.raises(Refused) as caught:
        parse(text)
    assert caught.value.refusals[0].message.endswith(found)


def test_the_column_is_that_of_the_line() -> None:
    with pytest.raises(Refused, match="column 13: expected '1'"):
        parse("x[a 3]", start=8)
