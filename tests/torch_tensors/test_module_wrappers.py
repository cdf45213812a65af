"""Wrapped modules: the model below what torch puts around it, and its tensors by their own names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.oracles.quiet import quiet
from transaxle.axes.notation.name import CHECKPOINTED, COMPILED, FSDP1, own_name
from transaxle.live.load import load
from transaxle.live.model.state_tensors import leaves, own_config
from transaxle.torch_tensors import innermost, unwrap


class _Configured(nn.Linear):
    config = None


class _Config:
    def to_dict(self) -> dict[str, int]:
        return {"hidden_size": 2}


def _compiled(model: nn.Module) -> nn.Module:
    with quiet():
        compiled: nn.Module = torch.compile(model)  # type: ignore[assignment]
    return compiled


def test_torch_keeps_the_module_where_we_look_for_it() -> None:
    """The attributes are also the segments that wrappers put into names."""
    model = nn.Linear(2, 2)
    assert _compiled(model)._modules[COMPILED] is model
    assert checkpoint_wrapper(model)._modules[CHECKPOINTED] is model
    assert own_name(f"{COMPILED}.a.{CHECKPOINTED}.b.{FSDP1}.c") == "a.b.c"


def test_a_compiled_model_is_the_model() -> None:
    """Nothing is left of compilation; the checkpoint wrapper goes where only the class is asked for."""
    model = nn.Sequential(nn.Linear(2, 2))
    compiled = _compiled(model)
    wrapped = checkpoint_wrapper(compiled)
    assert unwrap(compiled) is model
    assert unwrap(wrapped) is wrapped
    assert innermost(wrapped) is model
    assert innermost(nn.Sequential()) is not None
    assert leaves(compiled).tensors.keys() == leaves(model).tensors.keys()


def test_the_class_of_the_model_is_its_architecture_whatever_is_around_it() -> None:
    """A wrapper's class is not what config.json names."""
    model = _Configured(2, 2)
    model.config = _Config()  # type: ignore[assignment]
    for module in (model, _compiled(model), checkpoint_wrapper(model)):
        assert own_config(module) == {"hidden_size": 2, "architectures": ["_Configured"]}


def _net(kind: str, seed: int) -> nn.Module:
    """A model of no known family, with wrappers around some of its modules."""
    torch.manual_seed(seed)
    inner = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    if kind == "inside":
        inner[0] = checkpoint_wrapper(_compiled(inner[0]))
    return nn.Sequential(nn.Linear(3, 4), _compiled(inner) if kind == "inner" else inner)


@pytest.mark.oracle
@pytest.mark.parametrize("before", ["", "module.", "_orig_mod.module."])
@pytest.mark.parametrize("stored", ["", "inner", "inside"])
def test_a_state_dict_is_loaded_whatever_wrappers_either_side_has(stored: str, before: str, tmp_path: Path) -> None:
    """Into models and into state dicts, of a family that no table knows."""
    source = _net(stored, 0)
    truth = list(source.parameters())
    torch.save({before + name: tensor for name, tensor in source.state_dict().items()}, tmp_path / "model.pt")
    for kind in ("", "inner", "inside"):
        model, compiled, state = _net(kind, 1), _compiled(_net(kind, 2)), _net(kind, 3).state_dict()
        for target in (model, compiled, state):
            load(target, tmp_path / "model.pt")
        for values in (model.parameters(), compiled.parameters(), state.values()):
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(values, truth, strict=True))
