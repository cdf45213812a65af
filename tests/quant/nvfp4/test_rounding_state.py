"""The state of random rounding: counted, saved and loaded with the codes, so that a run goes on as it would have."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import transaxle as tx
from tests.quant.nvfp4.test_products import drawn, key_of
from tests.some import some
from transaxle.nn import GroupedLinear
from transaxle.quant import NVFP4BlockScaling, quantize_, quantized_init

WIDTH = 32


def _model(seed: int = 0, **options: Any) -> nn.Module:
    """Two layers, of which the second is frozen, as the base of an adapter is."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    model[1].requires_grad_(False)
    quantize_(model, NVFP4BlockScaling(seed=seed, **options))
    return model


def _calls(model: nn.Module, calls: range) -> list[torch.Tensor]:
    """Gradients of the input, which go through both layers, and of the first weight."""
    found = []
    for call in calls:
        x = drawn(20, WIDTH, seed=call, dtype=torch.float32).requires_grad_()
        model.zero_grad()
        model(x).backward(drawn(20, WIDTH, seed=call + 50, dtype=torch.float32))
        weight: Any = model[0].weight  # type: ignore[index]
        found += [some(x.grad), weight.grad.clone()]
    return found


def _same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


def _states(model: nn.Module) -> dict[str, list[int]]:
    return {name: each.tolist() for name, each in model.state_dict().items() if name.endswith("_rounding_state")}


@pytest.mark.parametrize("way", ["state_dict", "torch.save", "tx.save", "tx.save, dcp"])
def test_a_run_goes_on_between_any_two_calls(way: str, tmp_path: Path) -> None:
    """Also within a step, for frozen weights, and in a model of another seed: the checkpoint's state counts."""
    model = _model()
    _calls(model, range(3))
    other = _model(seed=99)
    if way == "state_dict":
        other.load_state_dict(copy.deepcopy(model.state_dict()))
    elif way == "torch.save":
        torch.save(model.state_dict(), tmp_path / "model.pt")
        other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    else:
        tx.save(model, tmp_path / "saved", to="dcp:identity" if "dcp" in way else "identity")
        assert tx.load(other, tmp_path / "saved", dialect="identity").converted == ()
    keys = {f"{place}.weight_rounding_state": [key_of(0, f"{place}.weight"), 3] for place in range(2)}
    assert _states(other) == _states(model) == keys
    following = _calls(model, range(3, 5))
    assert _same(_calls(other, range(3, 5)), following)
    assert not _same(_calls(_model(), range(3, 5)), following)


def test_the_seed_decides() -> None:
    """Equal seeds give equal bits, others not; without random rounding there is no state."""
    first = _calls(_model(seed=1), range(2))
    assert _same(_calls(_model(seed=1), range(2)), first)
    assert not _same(_calls(_model(seed=2), range(2)), first)
    assert _states(_model(disable_stochastic_rounding=True)) == {}


def test_copies_count_for_themselves() -> None:
    """Deep copies and pickles go on from where the model is, and do not count for each other."""
    model = _model()
    _calls(model, range(2))
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]  # noqa: S301 - made above
    following = _calls(model, range(2, 4))
    for each in copies:
        assert all(state[1] == 2 for state in _states(each).values())
        assert _same(_calls(each, range(2, 4)), following)


def test_recomputed_forwards_do_not_count() -> None:
    """Activation checkpointing: the same bits as without, since only backward draws."""
    model, other = _model(), _model()
    x, y = (drawn(20, WIDTH, seed=1, dtype=torch.float32).requires_grad_() for _ in range(2))
    model(x).square().sum().backward()
    checkpoint(other, y, use_reentrant=False).square().sum().backward()
    assert torch.equal(some(x.grad), some(y.grad))
    assert _states(model) == _states(other)


@pytest.mark.parametrize("single", [False, True])
def test_offloaded_weights_count(single: bool) -> None:
    """Backward has copies of what was kept; the parameters count, also where forwards come before the backwards."""
    made, other = (
        GroupedLinear(2, WIDTH, WIDTH, bias=False, single_grouped_weight=single, recipe=NVFP4BlockScaling())
        for _ in range(2)
    )
    other.load_state_dict(copy.deepcopy(made.state_dict()))
    inputs = [drawn(20, WIDTH, seed=call, dtype=torch.float32) for call in range(2)]
    with torch.autograd.graph.save_on_cpu():
        outputs = [made(x, [12, 8]) for x in inputs]
    for output, x in zip(outputs, inputs, strict=True):
        output.square().sum().backward()
        other(x, [12, 8]).square().sum().backward()
    assert _states(made) == _states(other)
    for one, two in zip(made.parameters(), other.parameters(), strict=True):
        assert torch.equal(some(one.grad), some(two.grad))


def test_values_that_are_loaded_keep_the_key(tmp_path: Path) -> None:
    """A plain checkpoint has no state: calls begin at 0, keys stay those of the names; on the meta device too."""
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    tx.save(plain, tmp_path / "plain", to="identity")
    fresh = _states(_model())
    loaded = _model()
    _calls(loaded, range(2))
    tx.load(loaded, tmp_path / "plain", dialect="identity")
    assert _states(loaded) == fresh
    _calls(loaded, range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded.load_state_dict(plain.state_dict())
    assert _states(loaded) == fresh
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    quantize_(empty, NVFP4BlockScaling())
    tx.load(empty.to_empty(device="cpu"), tmp_path / "plain", dialect="identity")
    assert _states(empty) == fresh


def test_experts_have_their_numbers() -> None:
    """However they are packed, and when they were built under `quantized_init`."""
    keys = [key_of(7, "experts.weight", expert) for expert in range(3)]
    for single in (False, True):
        model = nn.Module()
        model.experts = GroupedLinear(3, WIDTH, WIDTH, bias=False, single_grouped_weight=single)
        quantize_(model, NVFP4BlockScaling(seed=7))
        states = _states(model)
        names = [f"experts.weight{expert}_rounding_state" for expert in range(3)]
        found: Any = states["experts.weight_rounding_state"] if single else [states[name] for name in names]
        assert found == [[key, 0] for key in keys]
    with quantized_init(NVFP4BlockScaling(seed=7)):
        built = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    assert [state[0] for state in _states(built).values()] == [key_of(7, f"{place}.weight") for place in range(2)]


def test_microbatches_of_kept_weights() -> None:
    """`is_first_microbatch` keeps codes; each backward counts, also where gradients of weights are delayed."""
    recipe = NVFP4BlockScaling()
    made = GroupedLinear(2, WIDTH, WIDTH, bias=False, recipe=recipe)
    delayed = GroupedLinear(2, WIDTH, WIDTH, bias=False, recipe=recipe, delay_wgrad_compute=True)
    delayed.load_state_dict(made.state_dict())
    for first in (True, False):
        x = drawn(20, WIDTH, seed=int(first), dtype=torch.float32)
        for layer in (made, delayed):
            layer(x, [12, 8], is_first_microbatch=first).square().sum().backward()
    delayed.backward_dw()
    delayed.backward_dw()
    assert _states(made) == _states(delayed)
    assert [state[1] for state in _states(made).values()] == [2, 2]
    for one, other in zip(made.parameters(), delayed.parameters(), strict=True):
        assert torch.equal(some(one.grad), some(other.grad))
