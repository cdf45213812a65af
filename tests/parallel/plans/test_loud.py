"""What would take a part for the whole without a word: refused, or pickled as the ordinary tensor that it is."""

from __future__ import annotations

import io
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW

from tests.live.ranks import run
from tests.parallel.models import CONFIGS, EVEN, build
from transaxle.errors import TransaxleError
from transaxle.parallel.tensor_parallel import tensor_parallel
from transaxle.torch_tensors import local_of

TAKEN = "part of a parameter, which torch's checkpoint would take for the whole"


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


def _torch_asks(rank: int, world: int, config: dict[str, Any], dtensor: bool, out: str) -> list[str]:
    """What torch's functions say of a cut model and its optimizer; what they do not refuse is right."""
    mesh = init_device_mesh("cpu", (world,))
    model = tensor_parallel(build(config), mesh, dtensor=dtensor)
    model = deepcopy(model)
    optimizer = AdamW(model.parameters())
    calls: dict[str, Callable[[], Any]] = {
        "weights": lambda: get_model_state_dict(model),
        "optimizer": lambda: get_optimizer_state_dict(model, optimizer),
        "both": lambda: get_state_dict(model, optimizer),
        "full": lambda: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)),
    }
    for method, words in (("save_pretrained", out), ("resize_token_embeddings", 128)):
        with pytest.raises(TransaxleError, match=f"{method} would take this rank's part"):
            getattr(model, method)(words)
    said = []
    for name, call in calls.items():
        try:
            call()
        except TransaxleError as error:
            said.append(f"{name}: {error}")
    if not any(each.startswith("weights") for each in said):
        dcp_save(get_model_state_dict(model), checkpoint_id=out)
        other = tensor_parallel(build(config, 1), mesh)
        state = get_model_state_dict(other)
        dcp_load(state, checkpoint_id=out)
        set_model_state_dict(other, state)
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        assert all(torch.equal(local_of(one), local_of(two)) for one, two in pairs)
    return said


def test_state_that_torch_would_take_for_the_whole(tmp_path: Path) -> None:
    """Nothing of an even model, the optimizer's state of one that has parts, all of a model for DeepSpeed."""
    lacking = {}
    for kind, config, dtensor in (
        ("even", EVEN, True),
        ("parts", CONFIGS["phi3"], True),
        ("deepspeed", CONFIGS["llama"], False),
    ):
        answers = run(2, _torch_asks, config, dtensor, str(tmp_path / kind))
        assert answers[0] == answers[1]
        assert all("its moments, for the whole" in said and "model." in said for said in answers[0]), answers
        lacking[kind] = [said.partition(":")[0] for said in answers[0]]
    assert lacking == {
        "even": [],
        "parts": ["optimizer", "both", "full"],
        "deepspeed": ["weights", "optimizer", "both", "full"],
    }
