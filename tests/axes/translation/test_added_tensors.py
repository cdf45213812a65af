"""What programs add on their own account: zeros are the same as none, and all else is carried or refused."""

from __future__ import annotations

import pytest
import torch

from tests.axes.apply import Store, arange, fill, only, translated
from transaxle.errors import TransaxleError

TOY = only("""
family toy
  axes l=layers d=width e=experts
  router : l e d         when l >= first
  shift  : l e           when balanced and router
  own    : l e           when False
  bias   : l d           when biased
  seldom : l d           when False
  added shift when router
  added own when router
dialect hub
  layers.{l}.router = router[e d]
  layers.{l}.shift  = shift[e]
  layers.{l}.bias   = bias[d]
  layers.{l}.seldom = seldom[d]
dialect always
  blocks.{l}.gate  = router[e d]
  blocks.{l}.shift = shift[e] else zeros
  blocks.{l}.own   = own[e] else zeros
  blocks.{l}.bias  = bias[d]
  blocks.{l}.rare  = seldom[d]
dialect sometimes
  stages.{l}.gate  = router[e d]
  stages.{l}.shift = shift[e]
  also stages.{l}.own = own[e]
""")
CONFIG = {"layers": 3, "width": 4, "experts": 5, "first": 1, "balanced": False, "biased": False}
ROUTERS = {f"layers.{layer}.router": arange(5, 4, start=100 * layer) for layer in (1, 2)}
GATES = {f"blocks.{layer}.gate": ROUTERS[f"layers.{layer}.router"] for layer in (1, 2)}


def _of(name: str, *layers: int) -> dict[str, torch.Tensor]:
    return {name.format(layer): arange(5, start=10 * layer) for layer in layers}


def test_zeros_are_written_where_a_program_always_has_a_tensor() -> None:
    view = translated(TOY, "hub", "always", Store(ROUTERS), CONFIG)
    zeros = {f"blocks.{layer}.{name}" for layer in (1, 2) for name in ("shift", "own")}
    assert view.refusals == ()
    assert set(view.targets) == zeros | set(GATES)
    assert {(view.targets[name].shape, view.targets[name].dtype, view.targets[name].parts) for name in zeros} == {
        ((5,), "F32", ())
    }
    assert [note.partition(": ")[2] for note in view.notes] == [
        "blocks.{l}.shift = shift[e]",
        "blocks.{l}.own = own[e]",
    ]


def test_no_zeros_are_written_where_a_program_may_have_a_tensor() -> None:
    view = translated(TOY, "hub", "sometimes", Store(ROUTERS), CONFIG)
    assert (set(view.targets), view.notes) == ({"stages.1.gate", "stages.2.gate"}, ())


def test_values_are_carried_where_there_is_a_place() -> None:
    store = Store({f"stages.{layer}.gate": GATES[f"blocks.{layer}.gate"] for layer in (1, 2)})
    for name, values in _of("stages.{}.own", 1, 2).items():
        store.put(name, values)
    view = translated(TOY, "sometimes", "always", store, CONFIG)
    assert (view.refusals, view.checks, view.kept_names) == ((), (), ())
    assert fill(store, view.targets["blocks.2.own"]).tolist() == [20, 21, 22, 23, 24]
    both = Store(GATES | _of("blocks.{}.own", 1, 2) | _of("blocks.{}.shift", 1, 2))
    for target in ("hub", "sometimes"):
        view = translated(TOY, "always", target, both, {**CONFIG, "balanced": True})
        (name,) = (name for name in view.targets if name.endswith("2.shift"))
        assert fill(both, view.targets[name]).tolist() == [20, 21, 22, 23, 24]
        assert {check.first.name for check in view.checks} == {"blocks.1.own", "blocks.2.own"}


def test_without_a_place_they_must_be_zero() -> None:
    store = Store(GATES | _of("blocks.{}.own", 1, 2) | _of("blocks.{}.shift", 1, 2))
    view = translated(TOY, "always", "hub", store, CONFIG)
    names = [f"blocks.{layer}.{name}" for name in ("shift", "own") for layer in (1, 2)]
    assert (view.refusals, view.kept_names, view.ignored) == ((), (), tuple(view.ignored))
    assert sorted(view.ignored) == sorted(names)
    assert sorted((check.first.name, check.zero) for check in view.checks) == sorted((name, True) for name in names)
    assert all(check.refusal.code == "UNEXPECTED_TENSOR" for check in view.checks)
    assert len(view.notes) == 2


def test_they_are_whole_or_absent() -> None:
    """A program has one in every layer with a router, or in none."""
    view = translated(TOY, "always", "hub", Store(GATES | _of("blocks.{}.own", 1)), CONFIG)
    (refusal,) = view.refusals
    assert (refusal.code, "blocks.2.own" in refusal.message) == ("MISSING_TENSOR", True)


def test_in_its_own_dialect_nothing_changes() -> None:
    store = Store(GATES | _of("blocks.{}.own", 1, 2))
    view = translated(TOY, "always", "always", store, CONFIG)
    assert (view.refusals, view.checks, view.kept_names, view.ignored) == ((), (), (), ())


@pytest.mark.parametrize("name", ["shift", "bias"])
def test_what_the_config_rules_out_is_refused(name: str) -> None:
    values = {"shift": _of("layers.{}.shift", 1, 2), "bias": {f"layers.{layer}.bias": arange(4) for layer in range(3)}}
    (refusal,) = translated(TOY, "hub", "always", Store(ROUTERS | values[name]), CONFIG).refusals
    said = {"shift": "balanced: false", "bias": "biased: false"}
    assert (refusal.code, said[name] in refusal.message) == ("UNEXPECTED_TENSOR", True)
    assert refusal.where.tensor in values[name]
    there = {**CONFIG, "balanced": name == "shift", "biased": name == "bias"}
    assert translated(TOY, "hub", "always", Store(ROUTERS | values[name]), there).refusals == ()
    assert translated(TOY, "hub", "hub", Store(ROUTERS | values[name]), CONFIG).refusals == ()


def test_what_no_key_of_the_config_decides_is_not_ruled_out() -> None:
    """`when False` means that only the names tell which models have a tensor."""
    store = Store(ROUTERS | {"layers.1.seldom": arange(4)})
    view = translated(TOY, "hub", "always", store, CONFIG)
    assert view.refusals == ()
    assert fill(store, view.targets["blocks.1.rare"]).tolist() == [0, 1, 2, 3]


def test_else_zeros_is_only_for_what_is_added() -> None:
    with pytest.raises(TransaxleError, match="'else zeros' only of tensors that are 'added'"):
        only("family toy\n  axes d=width\n  bias : d\ndialect hub\n  bias = bias[d] else zeros\n")
    with pytest.raises(TransaxleError, match="'added TENSOR'"):
        only("family toy\n  axes d=width\n  bias : d\n  added shift\ndialect hub\n  bias = bias[d]\n")
