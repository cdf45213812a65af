from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.axes import walking
from tests.axes.apply import Store, arange, carried, law, only, same, translated
from transaxle.axes.layout.relayout import factors, unify
from transaxle.axes.notation.expression import Expression, parse
from transaxle.families import builtin


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


@pytest.mark.parametrize(
    ("texts", "wanted"),
    [
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
    ],
)
def test_axes_that_are_never_separated_are_one(texts: tuple[str, ...], wanted: list[str]) -> None:
    assert joined(*texts) == wanted


def test_tied_tensors_are_one() -> None:
    assert joined("x[(n d)]", "y[n d]") == ["n*d", "d n"]
    assert joined("x[(n d)]", "y[n d]", tied={"y": "x"}) == ["d n", "d n"]
    assert joined("x[(n d)]", "y[(n d)]", tied={"y": "x"}) == ["n*d", "n*d"]


def qwen3(layers: int, groups: int, repeats: int, head: int, width: int) -> Store:
    """The attention of a Qwen3."""
    store = Store()
    start = 0
    for layer in range(layers):
        for name, rows in (("q", groups * repeats * head), ("k", groups * head), ("v", groups * head)):
            store.put(f"model.layers.{layer}.self_attn.{name}_proj.weight", arange(rows, width, start=start))
            start += rows * width
    return store


def test_only_axes_that_a_conversion_separates_are_needed() -> None:
    """hf and torchtitan store Qwen3's heads alike; Megatron groups them."""
    store = qwen3(2, 2, 3, 4, 5)
    free = translated(builtin()["qwen3"], "hf", "torchtitan", store)
    assert {refusal.code for refusal in free.refusals} == {"MISSING_TENSOR"}
    assert free.targets["layers.1.attention.qkv_linear.wq.weight"].shape == (24, 5)

    grouped = translated(builtin()["qwen3"], "hf", "megatron", store)
    needed = [refusal for refusal in grouped.refusals if refusal.code == "UNKNOWN_AXIS"]
    assert len(needed) == 3
    assert all("--axis g=N" in refusal.hint and "--config FILE" in refusal.hint for refusal in needed)
    assert {refusal.where.tensor for refusal in needed} == {
        f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"
    }
    assert all("[(g" in refusal.message and "the size of axis g is needed" in refusal.message for refusal in needed)

    told = translated(builtin()["qwen3"], "hf", "megatron", store, given={"g": 2})
    assert {refusal.code for refusal in told.refusals} == {"MISSING_TENSOR"}
    assert told.targets["decoder.layers.1.self_attention.linear_qkv.weight"].shape == (40, 5)


TIED = """
family tied
  axes n=words d=width
  embed : n d
  head : n d
  tie head = embed when tied
dialect flat
  embed = embed[(n d)]
dialect both
  embed = embed[(n d)]
  head = head[n d]
"""


def test_a_tied_tensor_is_read_in_the_axes_of_its_original() -> None:
    """The original is flat on both sides, its alias is not: their axes must still be the same."""
    embed = arange(3, 2)
    family = only(TIED)
    config = {"tied": True, "words": 3, "width": 2}
    found = carried(family, "flat", "both", Store({"embed": embed.reshape(-1)}), config)
    same(found, {"embed": embed.reshape(-1), "head": embed})
