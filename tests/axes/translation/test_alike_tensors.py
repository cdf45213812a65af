"""Alike tensors: a look at every tensor finds what follows from the numbers, and only what is read is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.axes.apply import Store, arange, bound_to, fill, law, only, translated
from tests.axes.toy import CONFIG, TOY, model
from transaxle.axes.layout.relayout import Copier, Target
from transaxle.axes.notation.family import Sizes
from transaxle.axes.translation import translate as module
from transaxle.axes.translation.holdings import AlikePart, Grid, grids
from transaxle.axes.translation.translate import Translation
from transaxle.errors import TransaxleError

NAMES = sorted(model())
STATES = {"exp_avg": (), "step": (1,)}
FOUR = only("""
family four
  axes l=layers e=experts d=width
  up   : l e d
  each : l d
  copy : l d
dialect hf
  {l}.{e}.up   = up[d]
  {l}.{e}.each = each[d]
  {l}.copy     = copy[d]
dialect experts
  {l}.up   = up[e d]
  {l}.each = each[d]
  {l}.copy = copy[d]
dialect layers
  up.{e}   = up[l d]
  {l}.each = each[d]
  {l}.copy = copy[d]
dialect turned
  {e}.{l}.up = up[d]
  {l}.each   = each[d]
  {l}.copy   = copy[d]
dialect whole
  up   = up[l e d]
  each = each[l d]
  copy = copy[l d]
""")
DIALECTS = ("experts", "layers", "turned", "whole", "hf")


def _side(target: Target) -> tuple[Any, ...]:
    parts = [
        (part.component, part.arithmetic, [(o.name, o.component, o.layout, [*o.index.items()]) for o in part.origins])
        for part in target.parts
    ]
    plain = target.name, target.dtype, target.layout, [*target.index.items()], target.rule, target.component
    return (*plain, target.encoding, parts)


def _data(view: Translation) -> tuple[Any, ...]:
    """Everything that a translation says, in its order."""
    targets = [(name, _side(target)) for name, target in view.targets.items()]
    checks = [(_side(check.first), _side(check.second), check.why) for check in view.checks]
    return targets, checks, view.kept_names, view.ignored, dict(view.aliases), view.refusals, dict(view.axes)


def _said(target: str, store: Store, config: Mapping[str, Any]) -> Any:
    try:
        return _data(translated(TOY, "hf", target, store, config))
    except TransaxleError as error:
        return error.refusals


def _four(layers: Sequence[int], experts: Sequence[int]) -> dict[str, Any]:
    """Tensors with numbers of their own; `each` has copies for every expert."""
    numbers = [*product(layers, experts)]
    found = {f"{a}.{b}.up": arange(2, start=1000 * a + 10 * b) for a, b in numbers}
    found |= {f"{a}.{b}.each": arange(2, start=7000 + 10 * a) for a, b in numbers}
    return found | {f"{a}.copy": arange(2, start=9000 + 10 * a) for a in layers}


@law
@given(
    st.lists(st.sampled_from(NAMES), max_size=3),
    st.lists(st.sampled_from(NAMES), max_size=1),
    st.lists(st.sampled_from(NAMES), max_size=1),
    st.sampled_from(["", *STATES]),
    st.lists(st.sampled_from(NAMES), max_size=2),
    st.sampled_from(["packed", "stacked", "hf", "both"]),
    st.sampled_from([{}, {"layers": 3}, {"experts": 4}, {"tied": True}, {"first": 1}]),
)
def test_a_look_at_every_tensor_finds_the_same(
    lost: list[str],
    longer: list[str],
    other: list[str],
    state: str,
    stateless: list[str],
    to: str,
    more: dict[str, Any],
) -> None:
    """Whatever lacks or differs: targets, sources, checks, names that stay, and refusals, in their order."""
    store = Store({name: tensor for name, tensor in model().items() if name not in lost})
    for name in (name for name in longer if name in store.entries):
        store.put(name, arange(6, *store.entries[name].shape[1:]))
    for name in (name for name in other if name in store.entries):
        store.put(name, arange(*store.entries[name].shape), dtype="F32")
    for name in [name for name in store.entries if state and name not in stateless]:
        store.put(f"optim/{name}/{state}", arange(*(STATES[state] or store.entries[name].shape)))
    config = {**CONFIG, **more}
    quick = _said(to, store, config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "grids", lambda *_: {})
        assert _said(to, store, config) == quick


@pytest.mark.parametrize("to", DIALECTS)
@pytest.mark.parametrize(
    ("layers", "experts"), [((0, 1, 2), (0, 1)), ((1, 2), (0, 1, 2)), ((0, 2), (0, 1)), ((1,), (0,))]
)
def test_numbers_with_gaps_and_copies(
    to: str, layers: tuple[int, ...], experts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense layers before, and between, those with experts; a tensor that every expert has a copy of."""
    config = {"layers": max(layers) + 1, "experts": len(experts)}
    quick = _data(translated(FOUR, "hf", to, Store(_four(layers, experts)), config))
    monkeypatch.setattr(module, "grids", lambda *_: {})
    assert _data(translated(FOUR, "hf", to, Store(_four(layers, experts)), config)) == quick


def test_only_what_is_read_is_made() -> None:
    """One layer's first two experts of 6 x 8: no other stored tensor is looked at."""
    store = Store(_four(range(6), range(8)))
    target = translated(FOUR, "hf", "experts", store).targets["4.up"]
    (part,) = target.parts
    origins = part.origins
    assert isinstance(origins, AlikePart)
    before = len(origins.tensors.made)
    rows = fill(store, target, [[(0, 2)], [(0, 2)]], Copier(store.entries))
    np.testing.assert_array_equal(rows, [[4000, 4001], [4010, 4011]])
    assert len(origins.tensors.made) <= before + 4
    assert (origins[-1].name, [o.name for o in origins[1:3]]) == ("4.7.up", ["4.1.up", "4.2.up"])
    assert origins[0] is origins[-8], "made once"
    for place in (8, -9):
        with pytest.raises(IndexError):
            origins[place]


def test_a_grid_has_every_combination_of_its_numbers() -> None:
    grid = Grid(((0, 2), (1, 3, 4)))
    assert list(grid) == [(0, 1), (0, 3), (0, 4), (2, 1), (2, 3), (2, 4)]
    assert len(grid) == 6
    assert (2, 3) in grid
    assert [each in grid for each in [(1, 1), (0, 2), (0,), "01"]] == [False] * 4


def test_lines_with_gaps_or_two_shapes_are_no_grids() -> None:
    store = Store(_four((0, 1), (0, 1)))
    del store.entries["1.1.up"]
    store.put("0.1.each", arange(3))
    found = grids(bound_to(FOUR, "hf", store, Sizes(FOUR, {}, {})), store.entries)
    assert [line.text.split()[0] for line, _ in found] == ["{l}.copy"]
