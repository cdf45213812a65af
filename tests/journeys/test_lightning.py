"""PyTorch Lightning: its default checkpoints of one process, and those of ModelParallelStrategy with FSDP2."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor

import transaxle as tx
from tests.journeys import trained_models as models
from tests.journeys.fsdp_on_cpus import check_training_state, fsdp1_on_cpus, whole_training_state
from tests.journeys.record import Journey
from tests.live.ranks import run
from tests.oracles.quiet import quiet

PEER = "pytorch-lightning"
pytestmark = pytest.mark.peers

RUN = "run"


def _module(hub: Path) -> Any:
    """A module as users write it: a model of transformers in an attribute."""
    from pytorch_lightning import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = models.loaded(hub)

        def configure_model(self) -> None:
            from torch.distributed.fsdp import fully_shard

            if self.device_mesh is None or isinstance(next(self.model.parameters()), DTensor):
                return
            mesh = self.device_mesh["data_parallel"]
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

        def training_step(self, batch: models.Tensors) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            return loss

        def train_dataloader(self) -> Any:
            rows: Any = [{key: torch.tensor(value) for key, value in row.items()} for row in models.rows()]
            return torch.utils.data.DataLoader(rows, batch_size=4)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=models.LR)

    return Module()


def _plain_module(hub: Path) -> Any:
    """A module whose strategy shards it."""
    module = _module(hub)
    module.configure_model = lambda: None
    return module


def _fitted(world: int, out: Path, steps: int, module: Any, resume: str = "") -> Any:
    """A Trainer with its defaults, after it has trained."""
    from pytorch_lightning import Trainer
    from pytorch_lightning.strategies import ModelParallelStrategy

    trainer = Trainer(
        accelerator="cpu", devices=world, max_steps=steps, default_root_dir=out, logger=False,
        strategy=ModelParallelStrategy(world, 1) if world > 1 else "auto", enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, ckpt_path=resume or None)
    return trainer


def _join(rank: int, world: int) -> None:
    """Let Lightning use the process group that is there; one process has none."""
    if world > 1:
        os.environ |= {**models.launched_as(rank, world), "TORCHELASTIC_RUN_ID": "tests"}


def _train(rank: int, world: int, folder: str) -> tuple[models.Tensors, torch.Tensor]:
    """Train, and save in our way, too; return what the model has, and logits."""
    out = Path(folder)
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _join(rank, world)
        module = _module(out / "hub")
        trainer = _fitted(world, out / RUN, models.STEPS, module)
        tx.save(module.model, out / "live", to="hf", optimizer=trainer.optimizers[0], sync=False)
        return models.whole(module.model), models.logits(module.model)


def _step(rank: int, world: int, folder: str, own: str, ours: str) -> models.Tensors:
    """Make one more step, resumed from Lightning's own checkpoint or from ours."""
    out = Path(folder)
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _join(rank, world)
        module = _module(out / "hub")
        module.training_step = lambda _: module.model(**models.batch()).loss  # ranks deal out the data anew
        if ours:
            module.on_train_start = lambda: tx.load(module.model, ours, optimizer=module.trainer.optimizers[0])
        trainer = _fitted(world, out / "again", models.STEPS + 1 if own else 1, module, own)
        assert trainer.global_step == (models.STEPS + 1 if own else 1)
        return models.whole(module.model)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen3_moe"])
def test_default_checkpoints(journey: Journey, model_type: str, world: int, tmp_path: Path) -> None:
    hub = models.hub_folder(model_type, tmp_path / "hub")
    values, wanted = run(world, _train, str(tmp_path))[0]
    (checkpoint,) = (tmp_path / RUN).rglob("*.ckpt")
    assert checkpoint.is_dir() == (world > 1)
    models.returns_to_the_hub(journey, tmp_path, values, wanted, checkpoint)
    own = run(world, _step, str(tmp_path), str(checkpoint), "")[0]
    for to in ("hf", "dcp", "deepspeed-universal"):
        there = tmp_path / f"to-{to}"
        tx.convert(tmp_path / "live", there, to=to, optimizer=True, sync=False)
        journey.passed("optimizer")
        found = run(world, _step, str(tmp_path), "", str(there))[0]
        assert models.unmoved(own, found) == list(own)
        journey.passed("resume")
    models.carried(journey, checkpoint, tmp_path / "live", tmp_path / "with-optimizer", config=hub / "config.json")


def _train_fsdp1(rank: int, world: int, folder: str) -> tuple[models.Tensors, models.Tensors]:
    """Train under FSDPStrategy, which Lightning permits on GPUs only; return whole weights and optimizer state."""
    from pytorch_lightning import Trainer
    from pytorch_lightning.loggers import CSVLogger
    from pytorch_lightning.strategies import FSDPStrategy
    from pytorch_lightning.trainer.connectors.accelerator_connector import _AcceleratorConnector

    out = Path(folder)
    on_gpus = patch.object(_AcceleratorConnector, "_check_strategy_and_fallback")
    with quiet(), warnings.catch_warnings(), on_gpus, fsdp1_on_cpus():
        warnings.simplefilter("ignore")
        _join(rank, world)
        module = _plain_module(out / "hub")
        layer = type(module.model.model.layers[0])
        trainer = Trainer(
            accelerator="cpu", devices=world, max_steps=models.STEPS, logger=CSVLogger(out / RUN),
            strategy=FSDPStrategy(state_dict_type="sharded", auto_wrap_policy={layer}, process_group_backend="gloo"),
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module)
        return whole_training_state(trainer.strategy.model, trainer.optimizers[0])


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_a_sharded_run_as_it_lies(journey: Journey, model_type: str, tmp_path: Path) -> None:
    """Given the folder of the run, the DCP folder `epoch=….ckpt` in it is opened, whose `meta.pt` has the progress."""
    hub = models.hub_folder(model_type, tmp_path / "hub")
    truth = run(2, _train_fsdp1, str(tmp_path))[0]
    journey.passed("load", "train", "save")
    (checkpoint,) = (tmp_path / RUN).rglob("*.ckpt")
    assert {file.name for file in checkpoint.iterdir()} >= {".metadata", "meta.pt"}
    inner = str(checkpoint.relative_to(tmp_path / RUN))
    assert inner.startswith("lightning_logs/version_0/checkpoints/epoch=")
    check_training_state(journey, tmp_path / RUN, inner, truth, hub, tmp_path, attribute="model.")
