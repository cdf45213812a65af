"""Translation of tensors that several names hold: copies must be equal, or the difference is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.axes.apply import Store, arange, carried, fill, law, only, same, translated
from tests.axes.toy import CONFIG, TOY, equal, model, only_refusal, packed
from tests.some import a
from transaxle.axes.layout.relayout import Copier, Target
from transaxle.axes.translation import translate as module
from transaxle.axes.translation.holdings import AlikePart
from transaxle.axes.translation.translate import Translation
from transaxle.errors import TransaxleError

TIED = {**CONFIG, "tied": True}


def test_a_tie_is_stored_once_and_written_where_the_target_wants_both() -> None:
    hf = model(head=None)
    store = Store(hf)
    view = translated(TOY, "hf", "both", store, TIED)
    assert view.refusals == ()
    assert view.checks == ()
    assert view.aliases == {"head": "embed"}
    assert fill(store, view.targets["head"]).tolist() == hf["embed"].tolist()
    assert "head" not in translated(TOY, "hf", "hf", store, TIED).targets
    assert "output" not in translated(TOY, "hf", "packed", store, TIED).targets
    store.put("optim/embed/exp_avg", hf["embed"] + 1)
    view = translated(TOY, "hf", "both", store, TIED)
    assert view.aliases == {"head": "embed", "optim/head/exp_avg": "optim/embed/exp_avg"}


@pytest.mark.parametrize("target", ["hf", "both", "packed", "stacked"])
def test_a_tie_that_is_stored_twice_is_checked_wherever_it_goes(target: str) -> None:
    hf = model()
    store = Store(hf)
    view = translated(TOY, "hf", target, store, TIED)
    assert view.refusals == ()
    assert view.kept_names == ()
    assert equal(view, store) == [False]
    assert "hold the same tensor" in view.checks[0].why
    store.put("head", hf["embed"])
    assert equal(view, store) == [True]


def test_without_the_tie_nothing_is_compared() -> None:
    for config in (CONFIG, {key: value for key, value in CONFIG.items() if key != "tied"}):
        assert translated(TOY, "hf", "both", Store(model()), config).checks == ()


def test_a_tie_of_different_sizes_or_dtypes_cannot_pass() -> None:
    config = {key: value for key, value in TIED.items() if key != "words"}
    view = translated(TOY, "both", "hf", Store(model(head=arange(9, 4))), config)
    refusal = only_refusal(view, "SHAPE_MISMATCH")
    assert refusal.message == "axis n has several sizes: 7 in embed; but 9 in head"
    store = Store(model())
    store.put("head", store.chunks["embed", 0].reshape(7, 4), dtype="F64")
    view = translated(TOY, "both", "hf", store, TIED)
    (check,) = view.checks
    assert {check.first.dtype, check.second.dtype} == {"I64", "F64"}


CHAIN = only("""
family chain
  axes l=layers d=width
  first  : d
  second : d
  third  : d
  w      : l d
  tie first = second when near
  tie second = third when far
dialect each
  first.w  = first[d]
  second.w = second[d]
  third.w  = third[d]
  {l}.w    = w[d]
dialect last
  one   = third[d]
  {l}.w = w[d]
""")
BOTH = {"layers": 1, "width": 3, "near": True, "far": True}


@pytest.mark.parametrize("stored", [("third",), ("third", "second"), ("third", "first"), ("third", "first", "second")])
def test_chains_of_ties_are_followed(stored: tuple[str, ...]) -> None:
    value = arange(3, start=7)
    store = Store({"0.w": arange(3), **{f"{name}.w": value for name in stored}})
    view = translated(CHAIN, "each", "each", store, BOTH)
    assert view.refusals == ()
    wanted = {"0.w": arange(3), **{f"{name}.w": value for name in ("first", "second", "third")}}
    same({name: fill(store, target) for name, target in view.targets.items()}, wanted)
    assert dict(view.aliases) == {"first.w": "third.w", "second.w": "third.w"}
    assert len(view.checks) == len(stored) - 1
    assert all(equal(view, store))
    to_one = translated(CHAIN, "each", "last", store, BOTH)
    assert (to_one.refusals, to_one.kept_names, set(to_one.targets)) == ((), (), {"one", "0.w"})


@pytest.mark.parametrize(
    ("different", "wrong"), [("first", [False, True]), ("second", [False, False]), ("third", [True, False])]
)
def test_each_of_a_chain_is_compared_with_the_next(different: str, wrong: list[bool]) -> None:
    store = Store({"0.w": arange(3), **{f"{n}.w": arange(3, start=7) for n in ("first", "second", "third")}})
    store.put(f"{different}.w", arange(3, start=9))
    view = translated(CHAIN, "each", "last", store, BOTH)
    assert view.refusals == ()
    assert equal(view, store) == wrong


def test_the_last_of_a_chain_must_be_stored_and_a_tie_that_does_not_hold_ends_it() -> None:
    store = Store({"0.w": arange(3), "second.w": arange(3)})
    assert "third" in only_refusal(translated(CHAIN, "each", "each", store, BOTH), "MISSING_TENSOR").message
    for tie, lacking in (("near", "first"), ("far", "second")):
        store = Store({"0.w": arange(3), "third.w": arange(3)})
        view = translated(CHAIN, "each", "each", store, {**BOTH, tie: False})
        assert lacking in only_refusal(view, "MISSING_TENSOR").message


TWICE = only("""
family twice
  axes l=layers e=experts d=width f r=ranks
  norm : l d
  up : l e f d
dialect sparse
  {l}.attention.norm = norm[d] when up
  {l}.mlp.norm       = norm[d] when not up
  {l}.up             = up[e f d]
dialect plain
  {l}.norm    = norm[d]
  {l}.up.{e}  = up[f d]
dialect all
  norm        = norm[l d]
  {l}.up      = up[e f d]
dialect named
  {l}.norm.{r} = norm[d]
  {l}.up      = up[e f d]
dialect wide
  {l}.norm    = norm[(r d)]
  {l}.up      = up[e f d]
dialect redundant
  {l}.up      = up[e f d]
  {l}.up.{e}  = up[f d]
  {l}.norm    = norm[d]
""")
TWO = {"layers": 3, "experts": 2, "width": 4, "ranks": 2}


def test_two_lines_may_complete_each_other() -> None:
    """A tensor that is stored under other names in other layers, brought together and taken apart again."""
    norms, ups = arange(3, 4), arange(3, 2, 5, 4, start=100)
    source = {
        "0.mlp.norm": norms[0],
        **{f"{layer}.attention.norm": norms[layer] for layer in (1, 2)},
        **{f"{layer}.up": ups[layer] for layer in (1, 2)},
    }
    store = Store(source)
    view = translated(TWICE, "sparse", "all", store, TWO)
    assert [r.code for r in view.refusals] == ["MISSING_TENSOR"]
    assert view.refusals[0].message.splitlines()[1:] == ["0.up"]
    assert view.checks == ()
    assert fill(store, view.targets["norm"]).tolist() == norms.tolist()
    same({n: fill(store, t) for n, t in translated(TWICE, "sparse", "sparse", store, TWO).targets.items()}, source)


def redundant() -> dict[str, torch.Tensor]:
    ups = arange(3, 2, 5, 4, start=100)
    return {
        **{f"{layer}.norm": arange(4, start=4 * layer) for layer in range(3)},
        **{f"{layer}.up": ups[layer] for layer in range(3)},
        **{f"{layer}.up.{e}": ups[layer, e] for layer in range(3) for e in range(2)},
    }


def test_what_two_lines_hold_is_taken_once_and_checked() -> None:
    held = redundant()
    store = Store(held)
    view = translated(TWICE, "redundant", "plain", store, TWO)
    assert view.refusals == ()
    assert view.kept_names == ()
    assert equal(view, store) == [True] * 3
    wanted = {name: tensor for name, tensor in held.items() if name.count(".") != 1 or name.endswith("norm")}
    same({name: fill(store, target) for name, target in view.targets.items()}, wanted)
    store.put("1.up.1", held["1.up.1"] + 1)
    assert equal(view, store).count(False) == 1
    backwards = translated(TWICE, "redundant", "all", store, TWO)
    assert equal(backwards, store).count(False) == 1


def plain() -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in redundant().items() if not name.endswith("up")}


def test_copies_under_further_names_are_written_and_checked() -> None:
    single = plain()
    found = carried(TWICE, "plain", "named", Store(single), TWO)
    assert {name: array.tolist() for name, array in found.items() if "norm" in name} == {
        f"{layer}.norm.{r}": single[f"{layer}.norm"].tolist() for layer in range(3) for r in range(2)
    }
    store = Store(found)
    back = translated(TWICE, "named", "plain", store, TWO)
    same({name: fill(store, target) for name, target in back.targets.items()}, single)
    assert equal(back, store) == [True] * 3
    store.put("2.norm.1", np.zeros(4, np.int64))
    assert equal(back, store).count(False) == 1
    same(carried(TWICE, "named", "named", Store(found), TWO), {n: torch.from_numpy(a) for n, a in found.items()})


def test_copies_along_a_dim_are_written_and_checked() -> None:
    single = plain()
    found = carried(TWICE, "plain", "wide", Store(single), TWO)
    for layer in range(3):
        assert found[f"{layer}.norm"].tolist() == single[f"{layer}.norm"].repeat(2).tolist()
    for cut in (None, [((0, 3),), ((3, 8),)]):
        store = Store(found)
        if cut is not None:
            store.put("2.norm", found["2.norm"], cut)
        back = translated(TWICE, "wide", "plain", store, TWO)
        same({name: fill(store, target) for name, target in back.targets.items()}, single)
        assert equal(back, store) == [True] * 3
        wrong = found["2.norm"].copy()
        wrong[6] += 1
        store.put("2.norm", wrong, cut)
        assert equal(back, store).count(False) == 1


def test_moments_follow_their_parameter_and_steps_become_one() -> None:
    hf = model()
    store = Store(hf)
    for name, tensor in hf.items():
        for state in ("exp_avg", "exp_avg_sq"):
            store.put(f"optim/{name}/{state}", tensor + 1000 * len(state))
        store.put(f"optim/{name}/step", np.array(5))
    view = translated(TOY, "hf", "packed", store, CONFIG)
    assert view.refusals == ()
    wanted = packed(hf)
    for name, tensor in wanted.items():
        for state in ("exp_avg", "exp_avg_sq"):
            assert fill(store, view.targets[f"optim/{name}/{state}"]).tolist() == (tensor + 1000 * len(state)).tolist()
        step = view.targets[f"optim/{name}/step"]
        assert step.shape == ()
        assert fill(store, step).item() == 5
    assert len(view.targets) == 4 * len(wanted)
    assert len(view.checks) == 2 * 5  # six matrices become one, twice
    assert equal(view, store) == [True] * 10
    store.put("optim/layers.1.experts.2.up/step", np.array(6))
    assert equal(view, store).count(False) == 1
    assert all("one number would have to stand for all of them" in check.why for check in view.checks)


def test_one_step_goes_to_many() -> None:
    hf = model()
    store = Store(packed(hf))
    store.put("optim/blocks.1.w/step", np.array([3]))
    view = translated(TOY, "packed", "hf", store, CONFIG)
    assert view.refusals == ()
    assert view.checks == ()
    for e, name in product(range(3), ("gate", "up")):
        target = view.targets[f"optim/layers.1.experts.{e}.{name}/step"]
        assert target.shape == (1,)
        assert fill(store, target).tolist() == [3]


def test_states_of_neither_shape_are_refused() -> None:
    store = Store(model())
    store.put("optim/embed/row", arange(7))
    refusal = only_refusal(translated(TOY, "hf", "packed", store, CONFIG), "SHAPE_MISMATCH")
    assert refusal.where.tensor == "optim/embed/row"


def test_steps_and_moments_do_not_mix() -> None:
    store = Store(model())
    for layer, e in product(range(2), range(3)):
        store.put(f"optim/layers.{layer}.experts.{e}.gate/odd", np.array(1))
        store.put(f"optim/layers.{layer}.experts.{e}.up/odd", arange(5, 4))
    found = translated(TOY, "hf", "packed", store, CONFIG).refusals
    assert [(r.code, r.where.tensor) for r in found] == [
        ("SHAPE_MISMATCH", f"optim/blocks.{layer}.w/odd") for layer in range(2)
    ]


# Alike tensors: a look at every tensor finds what follows from the numbers, and only what is read is made.

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
    lost: list[str], longer: list[str], other: list[str], state: str, plain: list[str], to: str, more: dict[str, Any]
) -> None:
    """Whatever lacks or differs: targets, sources, checks, names that stay, and refusals, in their order."""
    store = Store({name: tensor for name, tensor in model().items() if name not in lost})
    for name in (name for name in longer if name in store.entries):
        store.put(name, arange(6, *store.entries[name].shape[1:]))
    for name in (name for name in other if name in store.entries):
        store.put(name, arange(*store.entries[name].shape), dtype="F32")
    for name in [name for name in store.entries if state and name not in plain]:
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
    origins = a(AlikePart, part.origins)
    before = len(origins.tensors.made)
    rows = fill(store, target, [[(0, 2)], [(0, 2)]], Copier(store.entries))
    np.testing.assert_array_equal(rows, [[4000, 4001], [4010, 4011]])
    assert len(origins.tensors.made) <= before + 4
    assert (origins[-1].name, [o.name for o in origins[1:3]]) == ("4.7.up", ["4.1.up", "4.2.up"])
    assert origins[0] is origins[-8], "made once"
    for place in (8, -9):
        with pytest.raises(IndexError):
            origins[place]
