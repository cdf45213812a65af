"""Lightning's trainer with our `CheckpointIO`, held against the same run with Lightning's own."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import transaxle as tx
from tests.oracles.quiet import quiet

pytestmark = pytest.mark.peers
ROWS, WIDTH = 8, 4
KEPT = 3


def _module() -> Any:
    """A module with weights of seed 1, dropout, an optimizer with two groups and a schedule."""
    from pytorch_lightning import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 1))

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch).square().mean()
            self.log("loss", loss)
            return loss

        def train_dataloader(self) -> Any:
            rows: Any = torch.arange(float(ROWS * WIDTH)).reshape(ROWS, WIDTH).sin()
            return torch.utils.data.DataLoader(rows, batch_size=4)

        def configure_optimizers(self) -> Any:
            first, *others = self.net.parameters()
            groups = [{"params": [first], "lr": 0.05}, {"params": others, "weight_decay": 0.1}]
            optimizer = torch.optim.AdamW(groups, lr=0.02)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    return Module()


def _fit(
    folder: Path, epochs: int, io: bool, resume: str | None = None, more: Sequence[Any] = (), **said: Any
) -> tuple[Any, Any]:
    """Train, with a checkpoint an epoch, and more callbacks; return trainer and module."""
    from pytorch_lightning import Trainer
    from pytorch_lightning.callbacks import ModelCheckpoint

    module = _module()
    said.pop("change", id)(module)
    precision = said.pop("precision", None)
    rotation = ModelCheckpoint(said.pop("place", str(folder)), "{epoch}", save_top_k=KEPT, monitor="epoch", mode="max")
    plugins: Any = [tx.LightningCheckpoints(module, **said)] if io else []
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[*more, rotation], default_root_dir=str(folder),
            plugins=plugins, precision=precision,
        )  # fmt: skip
        trainer.fit(module, ckpt_path=resume)
    return trainer, module


def _values(trainer: Any, module: Any) -> dict[str, torch.Tensor]:
    """Copies of weights, buffers, moments and rates."""
    (optimizer,) = trainer.optimizers
    tensors = {name: each for name, each in module.state_dict().items() if isinstance(each, torch.Tensor)}
    found = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    for name, parameter in module.named_parameters():
        found |= {f"{name}/{key}": value.clone() for key, value in optimizer.state[parameter].items()}
    rates = [group["lr"] for group in optimizer.param_groups]
    return {**found, "rates": torch.tensor(rates), "step": torch.tensor(trainer.global_step)}


def _alike(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], each) for name, each in wanted.items())


@pytest.mark.parametrize("background", [pytest.param(False, marks=pytest.mark.oracle), True])
def test_a_run_resumes_as_with_lightnings_own_checkpoints(tmp_path: Path, background: bool) -> None:
    _fit(tmp_path / "own", 2, False)
    wanted = _values(*_fit(tmp_path / "own", 4, False, str(tmp_path / "own" / "epoch=1.ckpt")))
    _fit(tmp_path / "ours", 2, True, background=background)
    checkpoint = tmp_path / "ours" / "epoch=1.ckpt"
    assert tx.verify(checkpoint).ok
    found = _values(*_fit(tmp_path / "ours", 4, True, str(checkpoint), background=background))
    assert _alike(found, wanted)
    module = _module()
    tx.load(module, tmp_path / "ours" / "epoch=3.ckpt")  # what anybody else reads there
    assert all(torch.equal(tensor, found[name]) for name, tensor in module.state_dict().items())
    kept = {path.name for path in (tmp_path / "ours").iterdir()}
    assert kept == {path.name for path in (tmp_path / "own").iterdir()} == {f"epoch={n}.ckpt" for n in (1, 2, 3)}


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
    assert _alike(found["ours"], found["own"])


def test_a_module_may_have_weights_that_a_checkpoint_lacks_where_loading_is_not_strict(tmp_path: Path) -> None:
    _, trained = _fit(tmp_path, 1, True)
    module = _module()
    module.more = nn.Linear(2, 2)
    io = tx.LightningCheckpoints(module)
    with pytest.raises(tx.TransaxleError, match=r"more\.weight") as refused:
        io.load_checkpoint(tmp_path / "epoch=0.ckpt")
    assert refused.value.code == "MISSING_TENSOR"
    module.strict_loading = False
    found = io.load_checkpoint(tmp_path / "epoch=0.ckpt")["state_dict"]
    assert _alike(found, trained.state_dict())


def test_only_what_is_ours_and_replaced_is_deleted(tmp_path: Path) -> None:
    trainer, module = _fit(tmp_path / "run", 1, True)
    io = tx.LightningCheckpoints(module, background=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    noted = tmp_path / "run" / "epoch=0.ckpt"
    for place in (tmp_path / "other", noted):
        (place / "notes.txt").write_text("mine")
        with pytest.raises(tx.TransaxleError) as refused:
            io.remove_checkpoint(place)
        assert refused.value.code == "EXISTS"
        assert (place / "notes.txt").exists()
    (noted / "notes.txt").unlink()
    assert tx.verify(noted).ok
    module.trainer = trainer
    io.save_checkpoint(
        trainer._checkpoint_connector.dump_checkpoint(), tmp_path / "other"
    )  # it fails in the background
    with pytest.raises(tx.TransaxleError, match=r"notes\.txt|does not hold a checkpoint"):
        io.remove_checkpoint(noted)
    assert tx.verify(noted).ok, "the newer one was never complete"
    io = tx.LightningCheckpoints(module)
    io.remove_checkpoint(noted)
    assert not noted.exists()
    io.remove_checkpoint(noted)  # as Lightning's own: what is not there needs no deleting


@pytest.mark.parametrize("background", [False, pytest.param(True, marks=pytest.mark.oracle)])
def test_averages_and_weights_resume_as_with_lightnings_own_checkpoints(tmp_path: Path, background: bool) -> None:
    """A callback gives Lightning averages to save in the place of the module's weights, which it keeps beside them."""
    from pytorch_lightning.callbacks import EMAWeightAveraging

    def averaged(name: str, epochs: int, resume: str | None = None) -> dict[str, torch.Tensor]:
        ours = name != "own"
        said = {"background": background} if ours else {}
        fitted = _fit(tmp_path / name, epochs, ours, resume, [EMAWeightAveraging(decay=0.5)], **said)
        return _values(*fitted)  # the averages, which the callback leaves in the module

    averaged("own", 2)
    wanted = averaged("own", 4, str(tmp_path / "own" / "epoch=1.ckpt"))
    averaged("ours", 2)
    assert _alike(averaged("ours", 4, str(tmp_path / "ours" / "epoch=1.ckpt")), wanted)
    for number in (1, 3):
        own = torch.load(tmp_path / "own" / f"epoch={number}.ckpt", weights_only=False)
        with tx.open(tmp_path / "ours" / f"epoch={number}.ckpt") as ours:
            for before, key in (("", "state_dict"), ("current_model_state.", "current_model_state")):
                for name, tensor in own[key].items():
                    assert ours[before + name].tobytes() == tensor.numpy().tobytes(), (number, name)
            moments = own["optimizer_states"][0]["state"][0]["exp_avg"].numpy()
            assert ours["optim/current_model_state.net.0.weight/exp_avg"].tobytes() == moments.tobytes()


def test_other_values_in_the_place_of_weights_are_refused(tmp_path: Path) -> None:
    from pytorch_lightning import Callback

    class Zeros(Callback):
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            weights = checkpoint["state_dict"]
            checkpoint["state_dict"] = {name: torch.zeros_like(each) for name, each in weights.items()}

    with pytest.raises(tx.TransaxleError) as found:
        _fit(tmp_path, 1, True, more=[Zeros()])
    assert (found.value.code, found.value.refusals[0].where.tensor) == ("UNSUPPORTED", "net.0.weight")
    assert list(tmp_path.iterdir()) == []
