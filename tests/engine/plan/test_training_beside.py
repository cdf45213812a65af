"""What trainers save beside a model: a hub gets none of it, trainers get it, and it is listed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import transaxle as tx
from tests import checkpoints

MODEL = {name: torch.from_numpy(array.astype(np.float32)) for name, array in checkpoints.tensors().items()}
AVERAGES = {name: tensor + 1 for name, tensor in MODEL.items()}
BYTES = torch.arange(8, dtype=torch.uint8)
OPTIMIZER = {"state": {0: {"exp_avg": torch.arange(3.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
SAVED: Mapping[str, Mapping[str, Any]] = {
    "Lightning": {
        "epoch": 3,
        "global_step": 17,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": {f"model.{name}": tensor for name, tensor in MODEL.items()},
        "loops": {"fit_loop": {"epoch_progress": {"total": {"ready": 3, "done": 2}}, "seen": torch.tensor(2.0)}},
        "callbacks": {"ModelCheckpoint{'monitor': 'loss'}": {"best_model_score": torch.tensor(0.5), "dirpath": "x"}},
        "optimizer_states": [OPTIMIZER],
        "lr_schedulers": [{"last_epoch": 3, "base_lrs": [0.1]}],
        "hyper_parameters": {"lr": 0.1, "dim": 32, "weights": torch.arange(2.0)},
        "datamodule_hyper_parameters": {"batch_size": 4},
        "MixedPrecision": {"scale": 65536.0, "growth_factor": 2.0},
        "native_amp_scaling_state": {"scale": 2.0},
    },
    "nanoGPT": {
        "model": MODEL,
        "optimizer": OPTIMIZER,
        "model_args": {"n_layer": 2, "bias": False},
        "iter_num": 100,
        "best_val_loss": torch.tensor(2.5),
        "config": {"learning_rate": 6e-4, "out_dir": "out"},
    },
    "flat names": {
        **MODEL,
        "iter_num": 100,
        "model_args": {"n_layer": 2},
        "hyper_parameters": {"t": torch.tensor(1.0)},
    },
    "DeepSpeed": {
        "module": MODEL,
        "global_steps": 4,
        "client_state": {"a": 3, "t": torch.tensor(2.0)},
        "lr_scheduler": {"last_batch_iteration": 4},
    },
    "Megatron": {
        "args": None,
        "checkpoint_version": 3.0,
        "model": MODEL,
        "opt_param_scheduler": {"max_lr": 0.1, "num_steps": 160},
        "rng_state": [{"random_rng_state": 3, "torch_rng_state": BYTES}],
    },
    "averages": {"model": MODEL, "ema": AVERAGES, "model_ema": AVERAGES, "ema_updates": 3},
    "averages in a list": {
        "state_dict": MODEL,
        "ema_state_dict": {"decay": 0.9, "shadow_params": [*AVERAGES.values()]},
    },
    "a loop of one's own": {"model": MODEL, "loss": torch.tensor(0.3), "notes": {"seen": 3, "deep": {"er": 2.0}}},
}
"""Trainer -> what it saves."""


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("trainer", "stored"),
    [
        *((trainer, "torch") for trainer in SAVED),
        *((trainer, "dcp") for trainer in ("Lightning", "nanoGPT", "averages")),
    ],
)
def test_a_hub_gets_the_model_alone(trainer: str, stored: str, tmp_path: Path) -> None:
    state = dict(SAVED[trainer])
    source = tmp_path / ("run.pt" if stored == "torch" else "run")
    if stored == "torch":
        torch.save(state, source)
    else:
        with warnings.catch_warnings(action="ignore"):  # that there is one process
            save(state, checkpoint_id=source, no_dist=True)
    report = tx.convert(source, tmp_path / "hub", to="hf", config=checkpoints.CONFIG, sync=False)
    with tx.open(tmp_path / "hub") as hub:
        assert set(hub) == set(MODEL)
        assert all(np.array_equal(hub[name].read(), tensor.numpy()) for name, tensor in MODEL.items())
    with tx.open(source, config=checkpoints.CONFIG, optimizer=False) as run:
        beside = set(run) - {before + name for name in MODEL for before in ("", "model.")}
        assert beside <= set(report.ignored)
        assert run.parameters == sum(tensor.numel() for tensor in MODEL.values())
        assert run.metadata["training_state"]
    tx.convert(source, tmp_path / "titan", to="dcp:megatron", config=checkpoints.CONFIG, optimizer=False, sync=False)
    with tx.open(tmp_path / "titan") as titan:
        assert beside <= set(titan)


@pytest.mark.parametrize(
    ("form", "name"),
    [("safetensors", "model.layers.0.self_attn._extra_state"), ("torch", "model.norm._extra_state/shard_0_2")],
)
def test_the_extra_state_of_modules_is_not_a_hub_s(form: str, name: str, tmp_path: Path) -> None:
    held = checkpoints.tensors() | {name: BYTES.numpy()}
    source = checkpoints.write(tmp_path / "source", held, config=checkpoints.CONFIG)
    if form == "torch":
        source = tmp_path / "model.pt"
        torch.save({**MODEL, name: BYTES}, source)
    report = tx.convert(source, tmp_path / "hub", to="hf", config=checkpoints.CONFIG, sync=False)
    with tx.open(tmp_path / "hub") as hub:
        assert set(hub) == set(MODEL)
    assert name in report.ignored
    tx.convert(source, tmp_path / "run", to="dcp:megatron", config=checkpoints.CONFIG, sync=False)
    with tx.open(tmp_path / "run") as run:
        assert run[name].tobytes() == bytes(range(8))


@pytest.mark.parametrize(
    "state", [{"ema": MODEL}, {"model": {"ema": {"w": BYTES}, "norm": BYTES}}, {"step": 3, "head.weight": BYTES}]
)
def test_what_may_be_the_model_is_no_training_state(state: Mapping[str, Any], tmp_path: Path) -> None:
    """Averages alone, modules that are called so, and tensors with dotted names."""
    torch.save(state, tmp_path / "model.pt")
    with tx.open(tmp_path / "model.pt") as checkpoint:
        assert not [name for name in checkpoint.container.beside if name != "step"]


PLAIN: Mapping[str, Any] = {
    "lr_scheduler": {"last_epoch": 3, "rates": [0.5, 0.25], "lambdas": [None], "is_initial": False, "factor": 0.5},
    "dataloader": {"dp_rank_0": b"\x80\x04K\x01.", "world_size": 1, "name": "c4", "at": (1, "b")},
    "train_state": {
        "step": torch.tensor(3, dtype=torch.int32),
        "ntokens_seen": torch.tensor(7),
        "epoch": 2,
        "best": 0.5,
    },
}


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("source", ["dcp", "torch"])
def test_plain_data_stays_plain_data_in_a_folder_of_torch(tmp_path: Path, source: str) -> None:
    """torch's own load takes the target's items for what they were: there is no tensor in place of a number."""
    checkpoints.write(tmp_path / "source", {}, config=checkpoints.CONFIG)
    (tmp_path / "source/model.safetensors").unlink(missing_ok=True)
    if source == "dcp":
        save({**MODEL, **PLAIN}, checkpoint_id=tmp_path / "source")
    else:
        torch.save({**MODEL, **PLAIN}, tmp_path / "source/pytorch_model.bin")
    report = tx.convert(tmp_path / "source", tmp_path / "between", to="dcp:torchtitan", verify=True, sync=False)
    tx.convert(tmp_path / "between", tmp_path / "out", to="dcp:hf", verify=True, sync=False)
    assert not any(name.startswith(tuple(PLAIN)) for name in report.ignored)
    items = FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    wanted: dict[str, dict[str, Any]] = {
        "lr_scheduler": dict.fromkeys(PLAIN["lr_scheduler"]),
        "dataloader": dict.fromkeys(PLAIN["dataloader"]),
        "train_state": {key: torch.zeros_like(torch.as_tensor(value)) for key, value in PLAIN["train_state"].items()},
    }
    wanted["train_state"] |= {"epoch": 0, "best": 0.0}
    named = [f"{top}.{key}" for top, of in PLAIN.items() for key in of if not isinstance(of[key], torch.Tensor)]
    assert [name for name in named if not isinstance(items[name], BytesStorageMetadata)] == []
    state: dict[str, Any] = {name: torch.zeros_like(value) for name, value in MODEL.items()} | wanted
    load(state, checkpoint_id=tmp_path / "out")
    assert all(torch.equal(state[name], value) for name, value in MODEL.items())
    assert {key: state[key] for key in PLAIN} == PLAIN
    with tx.open(tmp_path / "out") as out:
        assert (out["train_state.epoch"].dtype, out["train_state.best"].dtype) == ("I64", "F64")
    assert tx.verify(tmp_path / "out").ok
    assert tx.diff(tmp_path / "source", tmp_path / "out").equal
