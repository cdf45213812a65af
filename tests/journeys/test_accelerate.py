"""accelerate's save_state and load_state: one process, and FSDP2 on two ranks, in both of its forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import transaxle as tx
from tests.journeys import trained_models as models
from tests.journeys.fsdp_on_cpus import check_training_state, launched, whole_training_state
from tests.journeys.record import Journey
from tests.live.ranks import run
from tests.oracles.quiet import quiet

PEER = "accelerate"
pytestmark = pytest.mark.peers

STATE = "state"
ALONE, FULL, SHARDED = "alone", "FULL_STATE_DICT", "SHARDED_STATE_DICT"


def _prepared(hub: Path, saved: str) -> tuple[Any, Any, Any]:
    """An accelerator with a model and its optimizer, as a script of its users has them."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    model = models.loaded(hub)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=saved) if saved != ALONE else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=models.LR))


def _step(accelerator: Any, model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    accelerator.backward(model(**models.batch()).loss)
    optimizer.step()


def _train(rank: int, world: int, folder: str, saved: str) -> tuple[models.Tensors, torch.Tensor, models.Tensors]:
    """Train and save; return what the model has, logits, and what a resumed run has after one more step."""
    out = Path(folder)
    with quiet(), launched(rank, world):
        accelerator, model, optimizer = _prepared(out / "hub", saved)
        for _ in range(models.STEPS):
            _step(accelerator, model, optimizer)
        accelerator.save_state(str(out / STATE))
        tx.save(model, out / "live", to="hf", optimizer=optimizer, sync=False)
        values, said = models.whole(model), models.logits(model)
        _step(accelerator, model, optimizer)  # what it has now is not what it has saved
        accelerator.load_state(str(out / STATE))
        _step(accelerator, model, optimizer)
        return values, said, models.whole(model)


def _resume(rank: int, world: int, folder: str, saved: str, source: str) -> models.Tensors:
    with quiet(), launched(rank, world):
        accelerator, model, optimizer = _prepared(Path(folder, "hub"), saved)
        tx.load(model, source, optimizer=optimizer)
        _step(accelerator, model, optimizer)
        return models.whole(model)


CASES = [
    ("llama", ALONE), ("qwen3", ALONE), ("mixtral", ALONE), ("gemma3_text", ALONE), ("llama", FULL),
    ("qwen3_moe", FULL), ("llama", SHARDED), ("qwen3", SHARDED), ("qwen3_moe", SHARDED), ("gpt_oss", SHARDED),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "saved"), CASES)
def test_save_state(journey: Journey, model_type: str, saved: str, tmp_path: Path) -> None:
    hub = models.hub_folder(model_type, tmp_path / "hub")
    world = 1 if saved == ALONE else 2
    values, wanted, step = run(world, _train, str(tmp_path), saved)[0]
    models.returns_to_the_hub(journey, tmp_path, values, wanted, tmp_path / STATE)
    config = hub / "config.json"  # accelerate writes none
    models.carried(journey, tmp_path / STATE, tmp_path / "live", tmp_path / "with-optimizer", config=config)

    for to in ("dcp", "deepspeed-universal", "hf"):
        there = tmp_path / f"to-{to}"
        tx.convert(tmp_path / "live", there, to=to, optimizer=True, sync=False)
        journey.passed("optimizer")
        found = run(world, _resume, str(tmp_path), saved, str(there))[0]
        assert models.unmoved(step, found) == list(step)
        journey.passed("resume")


def _train_in_project(rank: int, world: int, folder: str, version: int) -> tuple[models.Tensors, models.Tensors]:
    """Train, and save into the project's folder; return whole copies of the weights and of the optimizer's state."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import ProjectConfiguration

    out = Path(folder)
    project = ProjectConfiguration(str(out / "project"), automatic_checkpoint_naming=True)
    with quiet(), launched(rank, world):
        model = models.loaded(out / "hub")
        layers = type(model.model.layers[0]).__name__
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=version, state_dict_type=SHARDED, use_orig_params=True if version == 1 else None,
            auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=[layers],
        )  # fmt: skip
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, project_config=project)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=models.LR))
        for _ in range(models.STEPS):
            _step(accelerator, model, optimizer)
        accelerator.save_state()
        return whole_training_state(model, optimizer.optimizer)


@pytest.mark.parametrize("version", [1, 2], ids=["FSDP1", "FSDP2"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_a_sharded_project_as_it_lies(journey: Journey, model_type: str, version: int, tmp_path: Path) -> None:
    """Given the project's folder, `checkpoints/checkpoint_0` is opened; FSDP1 and FSDP2 save other tensors there."""
    hub = models.hub_folder(model_type, tmp_path / "hub")
    weights, state = run(2, _train_in_project, str(tmp_path), version)[0]
    project = tmp_path / "project"
    journey.passed("load", "train", "save")
    check_training_state(journey, project, "checkpoints/checkpoint_0", (weights, state), hub, tmp_path)
