"""Axes of size 0 in names: no dense layers, zero experts. What they number is nowhere, and nothing lacks."""

from __future__ import annotations

import pytest
import torch

from tests.axes.apply import Store, arange, carried, only, same, translated
from tests.axes.toy import only_refusal

ZERO = only("""
family zero
  axes l=layers m=dense e=experts d=width f=inner
  norm : l d
  mlp  : m f d
  up   : l e f d
  gate : l e f d
dialect hf
  layers.{l}.norm             = norm[d]
  dense.{m}.mlp               = mlp[f d]
  layers.{l}.experts.{e}.up   = up[f d]
  layers.{l}.experts.{e}.gate = gate[f d]
dialect packed
  norm.{l}     = norm[d]
  mlp          = mlp[m f d]
  layers.{l}.w = [e [gate:f | up:f] d]
dialect stacked
  norm = norm[l d]
  m.{m} = mlp[f d]
  e.{e} = [l [gate:f | up:f] d]
""")
CONFIG = {"layers": 2, "dense": 0, "experts": 0, "width": 3, "inner": 2}
NORMS = {f"layers.{i}.norm": arange(3, start=3 * i) for i in range(2)}
PACKED = {f"norm.{i}": NORMS[f"layers.{i}.norm"] for i in range(2)}
EMPTY = {"mlp": arange(0, 2, 3), "layers.0.w": arange(0, 4, 3), "layers.1.w": arange(0, 4, 3)}
EXPERTS = {f"layers.{i}.experts.0.{n}": arange(2, 3, start=50 + 9 * i) for i in range(2) for n in ("up", "gate")}


def test_what_an_empty_axis_numbers_does_not_lack() -> None:
    same(carried(ZERO, "hf", "packed", Store(NORMS), CONFIG), PACKED)
    same(carried(ZERO, "packed", "hf", Store(PACKED), CONFIG), NORMS)
    same(carried(ZERO, "hf", "stacked", Store(NORMS), CONFIG), {"norm": torch.stack(list(NORMS.values()))})
    one = carried(ZERO, "hf", "packed", Store({**NORMS, **EXPERTS}), {**CONFIG, "experts": 1})
    assert set(one) == {*PACKED, "layers.0.w", "layers.1.w"}


@pytest.mark.parametrize("config", [CONFIG, {}])
@pytest.mark.parametrize("target", ["hf", "stacked"])
def test_an_empty_stack_is_left_out_where_its_axis_is_in_names(config: dict[str, int], target: str) -> None:
    states = {f"optim/{name}/exp_avg": tensor for name, tensor in EMPTY.items()}
    steps = {f"optim/{name}/step": arange(1).reshape(()) for name in EMPTY}
    view = translated(ZERO, "packed", target, Store({**PACKED, **EMPTY, **states, **steps}), config)
    assert view.refusals == ()
    assert view.kept_names == ()
    assert set(view.ignored) == {*EMPTY, *states, *steps}
    assert set(view.targets) == ({"norm"} if target == "stacked" else set(NORMS))


def test_an_empty_stack_stays_one() -> None:
    same(carried(ZERO, "packed", "packed", Store({**PACKED, **EMPTY}), CONFIG), {**PACKED, **EMPTY})


def test_an_axis_of_another_size_than_zero_still_lacks() -> None:
    refusal = only_refusal(translated(ZERO, "hf", "packed", Store(NORMS), {**CONFIG, "dense": 1}), "MISSING_TENSOR")
    assert "mlp (in no layer)" in refusal.message
    refusal = only_refusal(
        translated(ZERO, "hf", "packed", Store(NORMS), {"layers": 2, "experts": 0}), "MISSING_TENSOR"
    )
    assert "mlp (in no layer)" in refusal.message
    assert translated(ZERO, "hf", "packed", Store(NORMS), {"layers": 2, "experts": 0}, {"m": 0}).refusals == ()


def test_a_stack_that_is_not_empty_is_never_left_out() -> None:
    full = {**PACKED, "layers.0.w": arange(1, 4, 3), "layers.1.w": arange(1, 4, 3)}
    refused = translated(ZERO, "packed", "hf", Store(full), CONFIG).refusals
    assert {each.code for each in refused} == {"SHAPE_MISMATCH"}
