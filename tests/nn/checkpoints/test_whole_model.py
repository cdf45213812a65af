"""A state dict of a whole model: all of it is loaded, or nothing, on one rank and on several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import transaxle as tx
from tests.live.ranks import run
from tests.nn.layers import SINGLE
from transaxle.errors import TransaxleError, refuse
from transaxle.quant import MXFP8
from transaxle.quant.entries import entries

State = dict[str, Any]


def model(seed: int) -> nn.Module:
    """Three grouped layers, one of them quantized, between others that torch loads by itself."""
    torch.manual_seed(seed)
    grouped = tx.nn.GroupedLinear
    layers = nn.Sequential(
        nn.Linear(32, 32), grouped(4, 32, 32), grouped(4, 32, 64, recipe=MXFP8()), nn.BatchNorm1d(8),
        grouped(4, 64, 32, **SINGLE),
    )  # fmt: skip
    with torch.no_grad():
        for buffer in layers.buffers():
            buffer.add_(seed)
    return layers


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def values(made: nn.Module) -> State:
    """Copies of all that a model holds, codes and scales too."""
    found: State = {}
    for name, tensor in (*made.named_parameters(), *made.named_buffers()):
        parts = entries(tensor) if isinstance(local(tensor), tx.quant.QuantizedTensor) else {"": tensor}
        found |= {f"{name}{rest}": local(part.detach()).clone() for rest, part in parts.items()}
    return found


def equal(one: State, two: State) -> bool:
    """Whether the same names have the same bytes."""
    return one.keys() == two.keys() and all(
        torch.equal(one[name].reshape(-1).view(torch.uint8), two[name].reshape(-1).view(torch.uint8))
        for name in one
    )  # fmt: skip


def conflicting(state: State) -> None:
    """Give the last layer both forms of a weight, which differ."""
    for expert in range(4):
        state[f"4.weight{expert}"] = torch.zeros(32, 64)


def of_other_shape(state: State) -> None:
    """Give the last layer a bias that is too long."""
    state["4.bias"] = torch.zeros(4, 33)


def lacking(state: State) -> None:
    """Leave out a tensor of the last layer."""
    del state["4.weight"]


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("spoil", [conflicting, of_other_shape, lacking])
def test_what_the_last_layer_refuses_changes_no_layer(spoil: Callable[[State], None], assign: bool) -> None:
    made, state = model(1), dict(model(2).state_dict())
    spoil(state)
    before, objects = values(made), dict(made.named_parameters())
    with pytest.raises((TransaxleError, RuntimeError)) as found:
        tx.nn.load_state_dict(made, state, assign=assign)
    assert "4." in str(found.value)
    assert equal(values(made), before)
    assert all(parameter is objects[name] for name, parameter in made.named_parameters())
    # torch's own has changed the layers before by then.
    with pytest.raises((TransaxleError, RuntimeError)):
        made.load_state_dict(state, assign=assign)
    assert not equal(values(made), before)


@pytest.mark.parametrize("assign", [False, True])
def test_it_loads_what_the_module_loads(assign: bool) -> None:
    made, other = model(1), model(2)
    found = tx.nn.load_state_dict(made, other.state_dict(), assign=assign)
    assert (found.missing_keys, found.unexpected_keys) == ([], [])
    assert equal(values(made), values(other))
    state = {name: tensor for name, tensor in model(3).state_dict().items() if not name.startswith("0.")}
    found = tx.nn.load_state_dict(made, {**state, "other": torch.zeros(1)}, strict=False, assign=assign)
    assert (found.missing_keys, found.unexpected_keys) == (["0.weight", "0.bias"], ["other"])
    assert torch.equal(made.get_parameter("0.weight"), other.get_parameter("0.weight"))


def _one_rank_refuses(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    made, other = model(1), model(2)
    for layers in (made, other):
        for layer in (layers[0], layers[1], layers[4]):  # type: ignore[index]
            fully_shard(layer, mesh=mesh)
    state, before = dict(other.state_dict()), values(made)
    whole = dict(state)
    if rank == world - 1:
        del state["4.weight"]
    with pytest.raises(RuntimeError, match=r"4\.weight") as found:
        tx.nn.load_state_dict(made, state)
    assert f"This is rank {world - 1}" in str(found.value.__notes__)
    assert equal(values(made), before)
    tx.nn.load_state_dict(made, whole)
    assert equal(values(made), values(other))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather_object", "broadcast_object_list"):  # these unpickle
            patch.setattr(dist, name, None)
        if rank == world - 1:

            def refused(*_: object, **__: object) -> None:
                raise refuse("IO", "no such disk", file="x", tensor="4.weight", hint="Wait.")

            patch.setattr(made, "load_state_dict", refused)
        with pytest.raises(tx.TransaxleError, match="no such disk") as other_found:
            tx.nn.load_state_dict(made, whole)
    said = other_found.value
    assert (said.code, str(said.where), said.hint) == ("IO", "x · 4.weight", "Wait.")


def test_what_one_rank_refuses_no_rank_loads() -> None:
    run(2, _one_rank_refuses)
