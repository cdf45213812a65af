"""Lightning on several ranks: what each strategy saves and resumes, and that no rank is left alone with an error."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import transaxle as tx
from tests.live.ranks import run
from tests.oracles.quiet import quiet
from transaxle.live.integrations.lightning_io import take_part

pytestmark = pytest.mark.peers
WIDTH, WIDER = 4, 6
NOTES = "notes.txt"
ONE, DDP, FSDP, TP = "auto", "ddp", "fsdp2", "tp"


def _module(kind: str) -> Any:
    """A module with weights of seed 1, whose ranks shard it by themselves under Lightning's ModelParallelStrategy."""
    from pytorch_lightning import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(WIDTH, WIDER), nn.Tanh(), nn.Linear(WIDER, 1))

        def configure_model(self) -> None:
            from torch.distributed.fsdp import fully_shard
            from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

            mesh = self.device_mesh
            if mesh is None or isinstance(self.net[0].weight, DTensor):
                return  # it is called for each `fit` and `validate`
            if kind == FSDP:
                fully_shard(self.net, mesh=mesh["data_parallel"])
            elif kind == TP:
                plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
                parallelize_module(self.net, mesh["tensor_parallel"], plan)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch).square().mean()
            return loss

        def train_dataloader(self) -> Any:
            rows: Any = torch.arange(float(8 * WIDTH)).reshape(8, WIDTH).sin()
            return torch.utils.data.DataLoader(rows, batch_size=2)

        def validation_step(self, batch: torch.Tensor) -> None:
            self.log("loss", self.net(batch).square().mean(), sync_dist=True)

        val_dataloader = train_dataloader

        def configure_optimizers(self) -> Any:
            first, *others = self.net.parameters()
            groups: list[dict[str, Any]] = [{"params": [first], "lr": 0.05}, {"params": others}]
            optimizer = torch.optim.AdamW(groups, lr=0.02)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    return Module()


def _strategy(kind: str, world: int) -> Any:
    from pytorch_lightning.strategies import ModelParallelStrategy

    if kind not in (FSDP, TP):
        return kind
    return ModelParallelStrategy(*((world, 1) if kind == FSDP else (1, world)))


def _trainer(module: Any, kind: str, world: int, folder: str, **told: Any) -> Any:
    """A trainer with a checkpoint an epoch, of which the newest stays."""
    from pytorch_lightning import Trainer
    from pytorch_lightning.callbacks import ModelCheckpoint

    rotation = ModelCheckpoint(folder, "{epoch}", save_top_k=1, monitor="epoch", mode="max", save_last="link")
    plugins: Any = told.pop("plugins", None) or [tx.LightningCheckpoints(module, background=kind == FSDP)]
    return Trainer(
        accelerator="cpu", devices=world, strategy=_strategy(kind, world), logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[rotation, *told.pop("callbacks", ())], default_root_dir=folder,
        plugins=plugins, num_sanity_val_steps=0, **told,
    )  # fmt: skip


def _values(trainer: Any, module: Any) -> dict[str, torch.Tensor]:
    """Copies of weights, moments, rates and progress, whole."""
    (optimizer,) = trainer.optimizers
    found = dict(module.state_dict())
    for name, parameter in module.named_parameters():
        found |= {f"{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    found["rates"] = torch.tensor([group["lr"] for group in optimizer.param_groups])
    found["step"] = torch.tensor(trainer.global_step)
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in found.items()
    }


def _join(rank: int, world: int) -> None:
    """Let Lightning use the process group that is there."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "localhost"}
    os.environ |= {"MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "tests", "LOCAL_WORLD_SIZE": str(world)}


def _fit(
    rank: int, world: int, kind: str, folder: str, epochs: int, resume: str | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train; return the values at the beginning, if it resumes, and at the end."""
    _join(rank, world)
    module, begin = _module(kind), dict[str, torch.Tensor]()
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = _trainer(module, kind, world, folder, max_epochs=epochs)
        if resume:
            module.on_train_start = lambda: begin.update(_values(trainer, module))
        trainer.fit(module, ckpt_path=resume)
        end = _values(trainer, module)
        trainer.validate(module, ckpt_path="best")
        trainer.save_checkpoint(f"{folder}/manual")
        trainer.validate(module, ckpt_path=f"{folder}/manual")
    return begin, end


def _alike(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], each) for name, each in wanted.items())


@pytest.mark.oracle
@pytest.mark.parametrize("kind", [DDP, FSDP, TP])
def test_ranks_resume_as_if_they_had_never_stopped(tmp_path: Path, kind: str) -> None:
    wanted = run(2, _fit, kind, str(tmp_path / "whole"), 4)
    run(2, _fit, kind, str(tmp_path / "halves"), 2)
    found = run(2, _fit, kind, str(tmp_path / "halves"), 4, "last")
    assert all(_alike(end, whole) for (_, end), (_, whole) in zip(found, wanted, strict=True))
    for folder in ("whole", "halves"):
        assert {path.name for path in (tmp_path / folder).iterdir()} == {"epoch=3.ckpt", "last.ckpt", "manual"}
        assert tx.verify(tmp_path / folder / "manual").ok


@pytest.mark.oracle
@pytest.mark.parametrize("kind", [DDP, FSDP, TP])
def test_any_strategy_resumes_what_another_one_saved(tmp_path: Path, kind: str) -> None:
    (_, saved), _ = run(2, _fit, kind, str(tmp_path), 1)
    for world, other in [(1, ONE), (1, FSDP), (2, DDP), (2, FSDP), (2, TP)]:
        for begin, _ in run(world, _fit, other, str(tmp_path / f"{other}-{world}"), 2, str(tmp_path / "epoch=0.ckpt")):
            assert _alike(begin, saved), (world, other)


def _start(module: Any, kind: str, world: int, folder: str, **told: Any) -> None:
    """Train."""
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _trainer(module, kind, world, folder, **told).fit(module)


def _refused_rotation(rank: int, world: int, kind: str, folder: str) -> str:
    """Train where somebody puts notes into a checkpoint; return what this rank raised."""
    _join(rank, world)
    module = _module(kind)
    module.on_train_epoch_start = lambda: [
        Path(each, NOTES).write_text("mine") for each in Path(folder).glob("epoch=1*") if rank == 0
    ]
    with pytest.raises(tx.TransaxleError, match=NOTES) as refused:
        _start(module, kind, world, folder, max_epochs=4)
    return refused.value.code


@pytest.mark.parametrize("kind", [DDP, pytest.param(FSDP, marks=pytest.mark.oracle)])
def test_what_the_first_rank_may_not_delete_every_rank_raises(tmp_path: Path, kind: str) -> None:
    assert run(2, _refused_rotation, kind, str(tmp_path)) == ["EXISTS", "EXISTS"]
    assert (tmp_path / "epoch=1.ckpt" / NOTES).read_text() == "mine"
    assert (tmp_path / "epoch=2.ckpt").is_dir()


def _refused_save(rank: int, world: int, kind: str, folder: str) -> str:
    """Train where the first rank cannot save; return what this rank raised."""
    _join(rank, world)
    module = _module(kind)
    module.on_save_checkpoint = lambda checkpoint: checkpoint.update({"seen": object()} if rank == 0 else {})
    with pytest.raises(tx.TransaxleError, match="not plain data") as refused:
        _start(module, kind, world, folder, max_epochs=1)
    return refused.value.code


@pytest.mark.parametrize("kind", [pytest.param(DDP, marks=pytest.mark.oracle), FSDP])
def test_what_the_first_rank_cannot_save_every_rank_raises(tmp_path: Path, kind: str) -> None:
    assert run(2, _refused_save, kind, str(tmp_path)) == ["UNSUPPORTED", "UNSUPPORTED"]
    assert list(tmp_path.iterdir()) == []


def _own_ways() -> dict[str, Callable[[], Any]]:
    from pytorch_lightning.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

    class Spawning(DDPStrategy):
        @property
        def launcher(self) -> Any:
            return type("_MultiProcessingLauncher", (), {})()

    return {
        "FSDPStrategy": FSDPStrategy,
        "DeepSpeedStrategy": DeepSpeedStrategy,
        "spawned": Spawning,
        "save_distributed_checkpoint": lambda: ModelParallelStrategy(save_distributed_checkpoint=False),
    }


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy", "spawned", "save_distributed_checkpoint"])
def test_strategies_that_save_in_another_way_are_refused(name: str) -> None:
    module = _module(ONE)
    trainer = SimpleNamespace(strategy=_own_ways()[name](), callbacks=[])
    with pytest.raises(tx.TransaxleError, match=name) as refused:
        take_part(trainer, tx.LightningCheckpoints(module))
    assert refused.value.code == "UNSUPPORTED"


def _begin(rank: int, world: int, kind: str, what: str, folder: str) -> str:
    """Begin a run with something that cannot be combined; return the refusal."""
    from pytorch_lightning.callbacks import WeightAveraging
    from pytorch_lightning.plugins.io import AsyncCheckpointIO

    _join(rank, world)
    module = _module(kind)
    checkpoints: Any = tx.LightningCheckpoints(module)
    told: dict[str, Any] = {"plugins": [AsyncCheckpointIO(checkpoints)]}
    if what == "averages":
        told = {"callbacks": [WeightAveraging()]}
    with pytest.raises(tx.TransaxleError) as refused:
        _start(module, kind, world, folder, max_epochs=1, **told)
    assert refused.value.code == "UNSUPPORTED"
    return str(refused.value)


@pytest.mark.parametrize(("kind", "what", "why"), [(FSDP, "averages", "WeightAveraging"), (DDP, "thread", "a thread")])
def test_what_does_not_go_together_is_refused_when_a_run_begins(tmp_path: Path, kind: str, what: str, why: str) -> None:
    assert all(why in refusal for refusal in run(2, _begin, kind, what, str(tmp_path)))
    assert list(tmp_path.iterdir()) == []
