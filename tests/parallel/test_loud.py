"""What would take a part for the whole without a word: refused, or pickled as the ordinary tensor that it is."""

from __future__ import annotations

import io
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh

from tests.live.ranks import run
from tests.parallel.models import CONFIGS, build
from transaxle.parallel.tensor_parallel import tensor_parallel

TAKEN = "part of a parameter, and torch's checkpoint takes it for the whole"


def _state(rank: int, world: int, out: str) -> dict[str, str]:
    model = tensor_parallel(build(CONFIGS["llama"]), init_device_mesh("cpu", (world,)), dtensor=False)
    state = model.state_dict()
    dcp_save({name: torch.ones(value.shape) for name, value in state.items()}, checkpoint_id=f"{out}/whole")
    said = {}
    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: dcp_save(state, checkpoint_id=f"{out}/saved"),
        "clones": lambda: dcp_save({k: v.cpu().clone() for k, v in state.items()}, checkpoint_id=f"{out}/clones"),
        "load": lambda: dcp_load(state, checkpoint_id=f"{out}/whole"),
        "async": lambda: dcp_async(state, checkpoint_id=f"{out}/later").result(),  # type: ignore[union-attr]
    }
    for name, call in calls.items():
        with pytest.raises(CheckpointException) as caught:
            call()
        said[name] = str(caught.value)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    again = torch.load(file, weights_only=True)
    for name, value in model.named_parameters():
        assert type(again[name]) is torch.Tensor
        assert torch.equal(again[name], value.detach())
        assert torch.equal(deepcopy(state[name]), value.detach())
    model.load_state_dict({name: value + 1 for name, value in again.items()})
    assert all(torch.equal(value.detach(), again[name] + 1) for name, value in model.named_parameters())
    return said


def test_state_dict_of_a_model_for_deepspeed(tmp_path: object) -> None:
    for said in run(2, _state, str(tmp_path)):
        assert all(TAKEN in message for message in said.values()), said
