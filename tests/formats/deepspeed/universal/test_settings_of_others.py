"""Settings that another framework's optimizer has otherwise than DeepSpeed: they are written as DeepSpeed has them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import transaxle as tx
from tests.live.ranks import run, stop_all
from tests.oracles.deepspeed_peer.uncompiled import gloo_alone
from tests.oracles.quiet import quiet


def trained(folder: Path, updates: dict[str, int], groups: list[list[str]]) -> Path:
    """Save weights after so many updates of each, as those have that get no gradients at times."""
    weights = torch.nn.ParameterDict({name: torch.randn(4, 4) for name in updates})
    optimizer = torch.optim.AdamW([{"params": [weights[name] for name in group]} for group in groups], lr=0.001)
    for round_number in range(max(updates.values())):
        for name, count in updates.items():
            weights[name].grad = torch.randn(4, 4) if round_number < count else None
        optimizer.step()
    tx.save(weights, folder, to="dcp", optimizer=optimizer)
    return folder


def test_parameters_of_a_group_that_were_updated_less_often_are_refused(tmp_path: Path) -> None:
    """DeepSpeed has one step for a group: ZeRO-3 would count all of them as the first one."""
    source = trained(tmp_path / "run", {"seldom": 2, "w": 3}, [["seldom", "w"]])
    with pytest.raises(tx.TransaxleError) as told:
        tx.convert(source, tmp_path / "out", to="deepspeed-universal")
    (refusal,) = told.value.refusals
    assert (refusal.code, refusal.where.tensor) == ("UNSUPPORTED", "optim/w/step")
    assert refusal.message.startswith("it was updated 3 times, seldom 2 times")
    assert not (tmp_path / "out").exists()
    tx.convert(source, tmp_path / "out", to="deepspeed-universal", optimizer=False)


@pytest.mark.parametrize(("seldom", "common"), [(3, {"step"}), (2, set[str]())])
def test_steps_of_groups_are_kept_where_deepspeed_has_places_for_them(
    tmp_path: Path, seldom: int, common: set[str]
) -> None:
    """ZeRO-1 and 2 take each from the files of its parameters, ZeRO-3 one for all from the settings."""
    source = trained(tmp_path / "run", {"seldom": seldom, "w": 3}, [["seldom"], ["w"]])
    tx.convert(source, tmp_path / "out", to="deepspeed-universal")
    steps = {path.parent.name: torch.load(path).item() for path in (tmp_path / "out").rglob("step.pt")}
    (file,) = (tmp_path / "out").rglob("optimizer_state.pt")
    settings = torch.load(file, weights_only=False)["optimizer_state_dict"]["state"][0]
    assert steps == {"seldom": seldom, "w": 3}
    assert settings.keys() == common


def _from_weights_alone(rank: int, world: int, folder: str) -> list[list[Any] | str]:
    """Load a universal checkpoint at each stage; return what DeepSpeed's optimizer then holds, or what it raises."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "DS_ACCELERATOR": "cpu"}
    found: list[list[Any] | str] = []
    with quiet():
        import deepspeed

        gloo_alone()
        deepspeed.init_distributed(dist_backend="gloo", rank=rank, world_size=world)
        for stage in (1, 2, 3):
            model = torch.nn.Linear(4, 4)
            config = {
                "train_batch_size": 1, "zero_optimization": {"stage": stage}, "checkpoint": {"load_universal": True},
                "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
                "zero_force_ds_cpu_optimizer": False,
            }  # fmt: skip
            engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
            try:
                assert engine.load_checkpoint(folder)[0] is not None
            except KeyError as error:
                found.append(repr(error))
                continue
            assert all(bool((weight == 1).all()) for weight in engine.module.parameters())
            found.append([state for state in engine.optimizer.optimizer.state.values() if state])
    return found


@pytest.mark.oracle
@pytest.mark.peers
def test_from_weights_alone_deepspeed_begins_anew_or_fails_as_the_note_says(tmp_path: Path) -> None:
    tx.save({"weight": torch.ones(4, 4), "bias": torch.ones(4)}, tmp_path / "weights", to="safetensors")
    report = tx.convert(tmp_path / "weights", tmp_path / "out", to="deepspeed-universal")
    (note,) = (note for note in report.notes if "optimizer" in note)
    assert "new optimizer at ZeRO-1 and 2, and fails at ZeRO-3" in note
    assert run(1, _from_weights_alone, str(tmp_path / "out")) == [[[], [], "KeyError('step')"]]
    stop_all()  # DeepSpeed keeps groups of processes
