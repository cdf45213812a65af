"""The bias of torchtitan's routers in live states: zeros where the other side has none, and never lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import transaxle as tx
from tests import checkpoints
from transaxle.errors import TransaxleError

BIAS = "layers.{}.moe.expert_bias_E"
Tensors = dict[str, torch.Tensor]


def _hub() -> Tensors:
    return {name: torch.from_numpy(array.astype("float32")) for name, array in checkpoints.tensors().items()}


def _titan(bias: float) -> Tensors:
    state = tx.state_dict_as(_hub(), "torchtitan", config=checkpoints.CONFIG)
    for layer in range(2):
        assert not state[BIAS.format(layer)].any()
        state[BIAS.format(layer)] = torch.full((8,), bias)
    return state


def _pushed(source: Tensors, target: Tensors) -> None:
    with tx.Refit(source, target, config=checkpoints.CONFIG) as refit:
        refit.push()


WAYS: dict[str, Callable[[Tensors], object]] = {
    "state_dict_as": lambda state: tx.state_dict_as(state, "hf", config=checkpoints.CONFIG),
    "reshard": lambda state: tx.reshard(state, _hub(), config=checkpoints.CONFIG),
    "Refit": lambda state: _pushed(state, _hub()),
    "named_tensors": lambda state: list(tx.refit.named_tensors(state, config=checkpoints.CONFIG)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_bias_that_has_moved_is_refused_by_name(way: str) -> None:
    WAYS[way](_titan(0.0))
    with pytest.raises(TransaxleError, match=r"layers\.0\.moe\.expert_bias_E") as caught:
        WAYS[way](_titan(0.25))
    assert {refusal.code for refusal in caught.value.refusals} == {"UNEXPECTED_TENSOR"}


def test_what_is_filled_from_the_hub_has_no_bias() -> None:
    state = _titan(0.25)
    given, give_back = tx.loadable_as(state, "hf", config=checkpoints.CONFIG)
    assert given.keys() == _hub().keys()
    give_back()
    assert not any(state[BIAS.format(layer)].any() for layer in range(2))


def test_a_bias_that_the_state_has_no_place_for_is_refused() -> None:
    state = _hub()
    given, give_back = tx.loadable_as(state, "torchtitan", config=checkpoints.CONFIG)
    give_back()
    given[BIAS.format(1)].fill_(0.5)
    with pytest.raises(TransaxleError, match="the state has no such tensor"):
        give_back()
