"""Lightning's trainer with our `CheckpointIO`: held against Lightning's own, on one rank and under each strategy."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import transaxle as tx
from tests.cli.running import flip
from tests.live.ranks import run
from tests.live.refusals import refused
from tests.live.topologies import full, same
from tests.oracles.quiet import quiet
from transaxle.live.integrations.lightning_io import take_part

pytestmark = pytest.mark.peers
ROWS, WIDTH, WIDER = 8, 4, 6
KEPT = 3
NOTES = "notes.txt"
ONE, DDP, FSDP, TP = "auto", "ddp", "fsdp2", "tp"


def _module(kind: str = ONE) -> Any:
    """A module with weights of seed 1, whose ranks shard it by themselves under Lightning's ModelParallelStrategy."""
    from pytorch_lightning import LightningModule

    class Module(LightningModule):
        passes: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(WIDTH, WIDER), nn.Tanh(), nn.Linear(WIDER, 1))
            self.register_buffer("passes", torch.zeros(()))

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
            self.passes += 1
            loss: torch.Tensor = self.net(batch).square().mean()
            return loss

        def train_dataloader(self) -> Any:
            rows: Any = torch.arange(float(ROWS * WIDTH)).reshape(ROWS, WIDTH).sin()
            return torch.utils.data.DataLoader(rows, batch_size=2)

        def validation_step(self, batch: torch.Tensor) -> None:
            self.log("loss", self.net(batch).square().mean(), sync_dist=True)

        val_dataloader = train_dataloader

        def configure_optimizers(self) -> Any:
            first, *others = self.net.parameters()
            groups: list[dict[str, Any]] = [{"params": [first], "lr": 0.05}, {"params": others, "weight_decay": 0.1}]
            optimizer = torch.optim.AdamW(groups, lr=0.02)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    return Module()


def _strategy(kind: str, world: int) -> Any:
    from pytorch_lightning.strategies import ModelParallelStrategy

    if kind not in (FSDP, TP):
        return kind
    return ModelParallelStrategy(*((world, 1) if kind == FSDP else (1, world)))


def _trainer(
    folder: str | Path, *, strategy: Any = ONE, world: int = 1, callbacks: Sequence[Any] = (), **more: Any
) -> Any:
    from pytorch_lightning import Trainer

    return Trainer(
        accelerator="cpu", devices=world, strategy=strategy, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[*callbacks], default_root_dir=str(folder), num_sanity_val_steps=0,
        **more,
    )  # fmt: skip


def _values(trainer: Any, module: Any) -> dict[str, torch.Tensor]:
    """Copies of weights, buffers, moments, rates and progress, whole."""
    (optimizer,) = trainer.optimizers
    found = {name: each for name, each in module.state_dict().items() if isinstance(each, torch.Tensor)}
    for name, parameter in module.named_parameters():
        found |= {f"{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    found["rates"] = torch.tensor([group["lr"] for group in optimizer.param_groups])
    found["step"] = torch.tensor(trainer.global_step)
    return {name: full(each) for name, each in found.items()}


def _fit(
    folder: Path, epochs: int, io: bool, resume: str | None = None, more: Sequence[Any] = (), **said: Any
) -> tuple[Any, Any]:
    """Train, with a checkpoint an epoch, and more callbacks; return trainer and module."""
    from pytorch_lightning.callbacks import ModelCheckpoint

    module = _module()
    said.pop("change", id)(module)
    precision = said.pop("precision", None)
    rotation = ModelCheckpoint(str(folder), "{epoch}", save_top_k=KEPT, monitor="epoch", mode="max")
    plugins: Any = [tx.LightningCheckpoints(module, **said)] if io else []
    with quiet():
        trainer = _trainer(folder, callbacks=[*more, rotation], max_epochs=epochs, plugins=plugins, precision=precision)
        trainer.fit(module, ckpt_path=resume)
    return trainer, module


@pytest.mark.parametrize("background", [pytest.param(False, marks=pytest.mark.oracle), True])
def test_a_run_resumes_as_with_lightnings_own_checkpoints(tmp_path: Path, background: bool) -> None:
    _fit(tmp_path / "own", 2, False)
    wanted = _values(*_fit(tmp_path / "own", 4, False, str(tmp_path / "own" / "epoch=1.ckpt")))
    _fit(tmp_path / "ours", 2, True, background=background)
    checkpoint = tmp_path / "ours" / "epoch=1.ckpt"
    assert tx.verify(checkpoint).ok
    found = _values(*_fit(tmp_path / "ours", 4, True, str(checkpoint), background=background))
    assert same(found, wanted)
    module = _module()
    tx.load(module, tmp_path / "ours" / "epoch=3.ckpt")  # what anybody else reads there
    assert all(torch.equal(tensor, found[name]) for name, tensor in module.state_dict().items())
    kept = {path.name for path in (tmp_path / "ours").iterdir()}
    assert kept == {path.name for path in (tmp_path / "own").iterdir()} == {f"epoch={n}.ckpt" for n in (1, 2, 3)}


def test_a_damaged_state_of_an_optimizer_is_refused(tmp_path: Path) -> None:
    _fit(tmp_path, 1, True)
    checkpoint = tmp_path / "epoch=0.ckpt"
    with tx.open(checkpoint) as stored:
        name = next(name for name in stored if name.endswith("exp_avg"))
        (extent,) = stored.container.entries[name].extents
    flip(checkpoint / extent.file, extent.offset + 2)
    with refused("CORRUPT", tensors=[name]):
        tx.LightningCheckpoints(_module()).load_checkpoint(checkpoint)


class _Counting(nn.Module):
    """Keeps a number beside its tensors."""

    passed = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.passed += 1
        return rows + self.passed

    def get_extra_state(self) -> dict[str, int]:
        return {"passed": self.passed}

    def set_extra_state(self, state: Any) -> None:
        self.passed = state["passed"]


def _counting(module: Any) -> None:
    module.net.append(_Counting())


@pytest.mark.oracle
@pytest.mark.parametrize(("change", "precision"), [(_counting, "32-true"), (_counting, "bf16-true")])
def test_wrapped_modules_extra_states_and_other_types_resume_as_with_lightnings_own(
    tmp_path: Path, change: Any, precision: str
) -> None:
    """Lightning casts the module to bfloat16 only after it has loaded a checkpoint."""
    found = {}
    for name in ("own", "ours"):
        told = {"change": change, "precision": precision}
        _fit(tmp_path / name, 1, name == "ours", **told)
        found[name] = _values(*_fit(tmp_path / name, 2, name == "ours", str(tmp_path / name / "epoch=0.ckpt"), **told))
    assert same(found["ours"], found["own"])


def test_a_module_may_have_further_weights_if_loading_is_not_strict(tmp_path: Path) -> None:
    _, trained = _fit(tmp_path, 1, True)
    module = _module()
    module.more = nn.Linear(2, 2)
    io = tx.LightningCheckpoints(module)
    with refused("MISSING_TENSOR", "more.weight"):
        io.load_checkpoint(tmp_path / "epoch=0.ckpt")
    module.strict_loading = False
    found = io.load_checkpoint(tmp_path / "epoch=0.ckpt")["state_dict"]
    assert same(found, trained.state_dict())


def test_only_our_replaced_checkpoints_are_deleted(tmp_path: Path) -> None:
    trainer, module = _fit(tmp_path / "run", 1, True)
    io = tx.LightningCheckpoints(module, background=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    noted = tmp_path / "run" / "epoch=0.ckpt"
    for place in (tmp_path / "other", noted):
        (place / "notes.txt").write_text("mine")
        with refused("EXISTS"):
            io.remove_checkpoint(place)
        assert (place / "notes.txt").exists()
    (noted / "notes.txt").unlink()
    assert tx.verify(noted).ok
    module.trainer = trainer
    dumped = trainer._checkpoint_connector.dump_checkpoint()
    io.save_checkpoint(dumped, tmp_path / "other")  # it fails in the background
    with pytest.raises(tx.TransaxleError, match=r"notes\.txt|does not hold a checkpoint"):
        io.remove_checkpoint(noted)
    assert tx.verify(noted).ok, "the newer one was never complete"
    io = tx.LightningCheckpoints(module)
    io.remove_checkpoint(noted)
    assert not noted.exists()
    io.remove_checkpoint(noted)  # as Lightning's own: what is not there needs no deleting


@pytest.mark.parametrize("background", [False, pytest.param(True, marks=pytest.mark.oracle)])
def test_weight_averages_resume_as_with_lightnings_own_checkpoints(tmp_path: Path, background: bool) -> None:
    from pytorch_lightning.callbacks import EMAWeightAveraging

    def averaged(name: str, epochs: int, resume: str | None = None) -> dict[str, torch.Tensor]:
        ours = name != "own"
        said = {"background": background} if ours else {}
        fitted = _fit(tmp_path / name, epochs, ours, resume, [EMAWeightAveraging(decay=0.5)], **said)
        return _values(*fitted)  # the averages, which the callback leaves in the module

    averaged("own", 2)
    wanted = averaged("own", 4, str(tmp_path / "own" / "epoch=1.ckpt"))
    averaged("ours", 2)
    assert same(averaged("ours", 4, str(tmp_path / "ours" / "epoch=1.ckpt")), wanted)
    for number in (1, 3):
        own = torch.load(tmp_path / "own" / f"epoch={number}.ckpt", weights_only=False)
        with tx.open(tmp_path / "ours" / f"epoch={number}.ckpt") as ours:
            for before, key in (("", "state_dict"), ("current_model_state.", "current_model_state")):
                for name, tensor in own[key].items():
                    assert ours[before + name].tobytes() == tensor.numpy().tobytes(), (number, name)
            moments = own["optimizer_states"][0]["state"][0]["exp_avg"].numpy()
            assert ours["optim/current_model_state.net.0.weight/exp_avg"].tobytes() == moments.tobytes()


def test_a_callback_that_replaces_the_weights_is_refused(tmp_path: Path) -> None:
    from pytorch_lightning import Callback

    class Zeros(Callback):
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            weights = checkpoint["state_dict"]
            checkpoint["state_dict"] = {name: torch.zeros_like(each) for name, each in weights.items()}

    with pytest.raises(tx.TransaxleError) as found:
        _fit(tmp_path, 1, True, more=[Zeros()])
    assert (found.value.code, found.value.refusals[0].where.tensor) == ("UNSUPPORTED", "passes")
    assert list(tmp_path.iterdir()) == []


# On several ranks: what each strategy saves and resumes, and that no rank is left alone with an error.


def _trainer_of_rank(module: Any, kind: str, world: int, folder: str, **more: Any) -> Any:
    """A trainer with a checkpoint an epoch, of which the newest stays."""
    from pytorch_lightning.callbacks import ModelCheckpoint

    rotation = ModelCheckpoint(folder, "{epoch}", save_top_k=1, monitor="epoch", mode="max", save_last="link")
    more.setdefault("plugins", [tx.LightningCheckpoints(module, background=kind == FSDP)])
    callbacks = [rotation, *more.pop("callbacks", ())]
    return _trainer(folder, strategy=_strategy(kind, world), world=world, callbacks=callbacks, **more)


def _join(rank: int, world: int) -> None:
    """Let Lightning use the process group that is there."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "localhost"}
    os.environ |= {"MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "tests", "LOCAL_WORLD_SIZE": str(world)}


def _fit_on_rank(
    rank: int, world: int, kind: str, folder: str, epochs: int, resume: str | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train; return the values at the beginning, if it resumes, and at the end."""
    _join(rank, world)
    module, begin = _module(kind), dict[str, torch.Tensor]()
    with quiet():
        trainer = _trainer_of_rank(module, kind, world, folder, max_epochs=epochs)
        if resume:
            module.on_train_start = lambda: begin.update(_values(trainer, module))
        trainer.fit(module, ckpt_path=resume)
        end = _values(trainer, module)
        trainer.validate(module, ckpt_path="best")
        trainer.save_checkpoint(f"{folder}/manual")
        trainer.validate(module, ckpt_path=f"{folder}/manual")
    return begin, end


@pytest.mark.oracle
@pytest.mark.parametrize("kind", [DDP, FSDP, TP])
def test_ranks_resume_as_if_they_had_never_stopped(tmp_path: Path, kind: str) -> None:
    wanted = run(2, _fit_on_rank, kind, str(tmp_path / "whole"), 4)
    run(2, _fit_on_rank, kind, str(tmp_path / "halves"), 2)
    found = run(2, _fit_on_rank, kind, str(tmp_path / "halves"), 4, "last")
    assert all(same(end, whole) for (_, end), (_, whole) in zip(found, wanted, strict=True))
    for folder in ("whole", "halves"):
        assert {path.name for path in (tmp_path / folder).iterdir()} == {"epoch=3.ckpt", "last.ckpt", "manual"}
        assert tx.verify(tmp_path / folder / "manual").ok


@pytest.mark.oracle
@pytest.mark.parametrize("kind", [DDP, FSDP, TP])
def test_any_strategy_resumes_what_another_one_saved(tmp_path: Path, kind: str) -> None:
    (_, saved), _ = run(2, _fit_on_rank, kind, str(tmp_path), 1)
    for world, other in [(1, ONE), (1, FSDP), (2, DDP), (2, FSDP), (2, TP)]:
        target = str(tmp_path / f"{other}-{world}")
        for begin, _ in run(world, _fit_on_rank, other, target, 2, str(tmp_path / "epoch=0.ckpt")):
            assert same(begin, saved), (world, other)


def _start(module: Any, kind: str, world: int, folder: str, **told: Any) -> None:
    with quiet():
        _trainer_of_rank(module, kind, world, folder, **told).fit(module)


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
def test_a_refused_deletion_is_raised_on_every_rank(tmp_path: Path, kind: str) -> None:
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
def test_a_refused_save_is_raised_on_every_rank(tmp_path: Path, kind: str) -> None:
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
def test_incompatible_plugins_and_callbacks_are_refused_when_a_run_begins(
    tmp_path: Path, kind: str, what: str, why: str
) -> None:
    assert all(why in refusal for refusal in run(2, _begin, kind, what, str(tmp_path)))
    assert list(tmp_path.iterdir()) == []
