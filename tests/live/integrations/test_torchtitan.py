"""The examples for torchtitan: a checkpoint manager, which resumes elsewhere and rotates, and a reader of any files."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import transaxle as tx
from tests.journeys import titan, titan_hub
from tests.journeys.test_titan import store
from tests.live.ranks import run
from tests.live.topologies import full
from tests.oracles.quiet import quiet

pytestmark = pytest.mark.peers
EXAMPLES = Path(__file__).parents[3] / "examples"
WIDTH = 8


class _Progress:
    """What torchtitan's trainer itself puts among the states."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def _example(module: str = "titan_checkpoints", name: str = "TransaxleManager") -> Any:
    sys.path.insert(0, str(EXAMPLES))
    try:
        with quiet():
            return getattr(import_module(module), name)
    finally:
        sys.path.remove(str(EXAMPLES))


def _trained(rank: int, world: int, folder: str, until: int) -> dict[str, torch.Tensor]:
    """Train from the newest checkpoint up to a step, as torchtitan's trainer does; return weights and state."""
    manager_class = _example()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    progress = _Progress()
    config = manager_class.Config(enable=True, folder=folder, interval=1, keep_latest_k=3, last_save_model_only=False)
    manager = config.build(
        dataloader=None, model_parts=[model], optimizers=optimizer, lr_schedulers=schedule,
        states={"train_state": progress}, sd_adapter=None,
    )  # fmt: skip
    resumed = manager.load(-1)
    assert resumed == (progress.step > 0)
    while progress.step < until:
        rows = torch.arange(4.0 * WIDTH).reshape(4, WIDTH).sin() + progress.step
        model(rows).square().mean().backward()  # the same rows on every rank: their mean is what one rank has
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        progress.step += 1
        manager.save(progress.step, last_step=progress.step == until)
        manager.maybe_wait_for_staging()
    manager.close()
    found = {name: full(each) for name, each in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        found |= {f"{name}/{key}": full(each) for key, each in optimizer.state[parameter].items()}
    return {**found, "rate": torch.tensor(schedule.get_last_lr()), "step": torch.tensor(progress.step)}


def test_a_run_of_torchtitan_resumes_on_other_ranks_and_keeps_three(tmp_path: Path) -> None:
    straight, *_ = run(1, _trained, str(tmp_path / "straight"), 6)
    run(2, _trained, str(tmp_path / "run"), 4)
    (tmp_path / "run" / "step-9").mkdir()  # what a run that was killed might leave: it is no checkpoint
    found, *_ = run(1, _trained, str(tmp_path / "run"), 6)
    torch.testing.assert_close(found, straight, rtol=1e-5, atol=1e-6)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"step-4", "step-5", "step-6", "step-9"}
    assert all(tx.verify(tmp_path / "run" / f"step-{step}").ok for step in (4, 5, 6))


def _begun(rank: int, world: int, folder: str) -> None:
    """Begin in every way that torchtitan's options name."""
    manager_class, place = _example(), Path(folder)

    def model() -> tuple[nn.Linear, torch.optim.Optimizer, _Progress]:
        net = nn.Linear(2, 2)
        return net, torch.optim.SGD(net.parameters(), lr=0.5), _Progress()

    def loads(run: str, assets: Path | None = None, **said: Any) -> tuple[bool, float, int, bool]:
        net, optimizer, progress = model()
        optimizer.param_groups[0]["lr"] = 0.25
        config = manager_class.Config(enable=True, folder=str(place / run), **said)
        manager = config.build(
            dataloader=None, model_parts=[net], optimizers=optimizer, lr_schedulers=None,
            states={"train_state": progress}, sd_adapter=SimpleNamespace(hf_assets_path=assets and str(assets)),
        )  # fmt: skip
        found = manager.load()
        return found, optimizer.param_groups[0]["lr"], progress.step, torch.equal(net.weight, saved.weight)

    saved, optimizer, progress = model()
    progress.step = 7
    for name in ("run", "converted"):
        (place / name).mkdir()
    tx.save(saved, place / "weights", to="safetensors:identity")
    tx.save(saved, place / "run" / "step-7", to="dcp:identity", optimizer=optimizer, extra={"train_state": progress})
    tx.save(saved, place / "converted" / "step-0", to="dcp:identity")
    assert loads("run") == (True, 0.5, 7, True)
    assert loads("run", exclude_from_loading=["optimizer"]) == (True, 0.25, 7, True)
    assert loads("run", exclude_from_loading=["train_state"]) == (True, 0.5, 0, True)
    assert loads("converted") == (True, 0.25, 0, True), "torchtitan takes the model alone from step 0"
    assert loads("new") == (False, 0.25, 0, False)
    assert loads("new", initial_load_path=str(place / "weights")) == (True, 0.25, 0, True)
    assert loads("new", place / "weights", initial_load_in_hf=True) == (True, 0.25, 0, True)
    whole: dict[str, Any] = {"initial_load_path": str(place / "run" / "step-7"), "initial_load_model_only": False}
    assert loads("new", **whole) == (True, 0.5, 7, True)
    assert loads("new", **whole, exclude_from_loading=["train_state"]) == (True, 0.5, 0, True)
    with pytest.raises(ValueError, match="no such states: schedule"):
        loads("run", exclude_from_loading=["schedule"])
    with pytest.raises(ValueError, match="initial_load_in_hf needs"):
        loads("new", initial_load_in_hf=True)


def test_a_run_of_torchtitan_begins_with_what_its_options_say(tmp_path: Path) -> None:
    run(1, _begun, str(tmp_path))


def test_torchtitans_own_manager_begins_with_any_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the example of a reader: what torchtitan's adapter loads from hub files comes from any files."""
    specification = titan.specification("qwen3 debugmodel_moe")
    hub_folder = tmp_path / "hub"
    store(titan_hub.config("qwen3", specification.model), hub_folder)
    tx.convert(hub_folder, tmp_path / "megatron", to="torch_dist")
    tx.convert(hub_folder, tmp_path / "zero", to="deepspeed-universal:transformers")
    tx.convert(hub_folder, tmp_path / "half", to="hf", dtype="bf16")
    loading: dict[str, Any] = {"initial_load_in_hf": True}
    with titan.plain():
        own = titan.Run(specification, tmp_path / "own", initial_load_path=str(hub_folder), **loading)
        assert own.checkpoints.load()
        monkeypatch.setattr(
            "torchtitan.components.checkpoint.CheckpointManager", _example("titan_reader", "AnyCheckpoint")
        )
        runs = []
        for name in ("megatron", "zero", "half"):
            run = titan.Run(specification, tmp_path / name / "run", initial_load_path=str(tmp_path / name), **loading)
            runs.append(run)
            assert run.checkpoints.load()
            for key, value in own.model.named_parameters():
                expected = value.to(torch.bfloat16).to(value.dtype) if name == "half" else value
                assert torch.equal(dict(run.model.named_parameters())[key], expected), (name, key)
        runs[-1].save()
        resumed = titan.Run(specification, tmp_path / "half" / "run")
        assert resumed.checkpoints.load()
        state = runs[-1].state()
        assert resumed.state().keys() == state.keys()
        assert all(torch.equal(value, state[key]) for key, value in resumed.state().items())
