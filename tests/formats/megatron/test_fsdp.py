"""Checkpoints of Megatron-FSDP: gate and up put together, the optimizer's state by parameter, arguments in items."""

from __future__ import annotations

import argparse
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

import transaxle as tx
from tests.formats.dcp.damage import MARKER, Evil
from tests.oracles import hub
from transaxle.errors import Refused

SIZES = {
    "model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 20,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "num_experts": 3, "num_experts_per_tok": 2,
    "moe_intermediate_size": 12, "mlp_only_layers": [1], "vocab_size": 50,
}  # fmt: skip
ARGS = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 6,
        "ffn_hidden_size": 20, "num_experts": 3, "moe_ffn_hidden_size": 12, "moe_layer_freq": [1, 0], "vocab_size": 50,
        "untie_embeddings_and_output_weights": True, "consumed_train_samples": 56}  # fmt: skip
Tensors = dict[str, torch.Tensor]
GATE = "module.decoder.layers.1.mlp.linear_fc1.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hub folder."""
    folder = tmp_path_factory.mktemp("hub")
    config, tensors = hub.make(SIZES, 0)
    Path(folder, "config.json").write_text(json.dumps(config))
    save_file({name: value.float() for name, value in tensors.items()}, folder / hub.WEIGHTS)
    return folder


def _halves(name: str, value: Any) -> dict[str, Any]:
    """As Megatron-FSDP stores the parameter of a gated MLP: gate and up apart."""
    if ".linear_fc1.weight" not in name:
        return {name: value}
    parts = value.chunk(2) if isinstance(value, torch.Tensor) else [_split(value, 0), _split(value, 1)]
    return {f"{name}_w": parts[0], f"{name}_v": parts[1]}


def _split(states: dict[str, torch.Tensor], half: int) -> dict[str, torch.Tensor]:
    return {key: state.chunk(2)[half] if state.dim() else state for key, state in states.items()}


def _state(held: Tensors) -> dict[str, Any]:
    model: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    for name, value in held.items():
        states = {"step": torch.tensor(7.0), "exp_avg": value * 2, "exp_avg_sq": value * value}
        model |= {f"module.{key}": part for key, part in _halves(name, value).items()}
        optimizer |= {f"module.module.module.{key}": part for key, part in _halves(name, states).items()}
    settings = {f"module.module.module.{name}": {"lr": 1e-3, "betas": (0.9, 0.95)} for name in held}
    return {
        "model": model,
        "optimizer": {"state": optimizer, "param_to_group_meta": settings},
        "args": argparse.Namespace(**ARGS),
        "iteration": 7,
        "checkpoint_version": 3.0,
        "opt_param_scheduler": {"max_lr": 1e-3, "lr_decay_style": "cosine"},
    }


def _write(run: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings(action="ignore"):
        save(state, storage_writer=FileSystemWriter(run / "iter_0000007"), no_dist=True)
    (run / "latest_checkpointed_iteration.txt").write_text("7")


@pytest.fixture(scope="module")
def held(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    """What the model's parameters hold, by Megatron's names."""
    folder = tmp_path_factory.mktemp("held")
    tx.convert(source, folder / "out", to="safetensors:megatron")
    return load_file(folder / "out" / hub.WEIGHTS)


@pytest.fixture
def run(held: Tensors, tmp_path: Path) -> Path:
    """What a job saves."""
    _write(tmp_path / "run", _state(held))
    return tmp_path / "run"


def test_weights_and_moments_become_the_hubs(run: Path, source: Path, tmp_path: Path) -> None:
    tx.convert(run, tmp_path / "out", to="hf", optimizer=True)
    found, expected = load_file(tmp_path / "out" / hub.WEIGHTS), load_file(source / hub.WEIGHTS)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    state = load_file(tmp_path / "out/optimizer/optimizer.safetensors")
    for name, value in expected.items():
        assert torch.equal(state[f"optim/{name}/exp_avg"], value * 2)
        assert torch.equal(state[f"optim/{name}/exp_avg_sq"], value * value)
        assert state[f"optim/{name}/step"] == 7


def test_the_run_is_told(run: Path) -> None:
    with tx.open(run) as checkpoint:
        assert (checkpoint.family, checkpoint.config["mlp_only_layers"]) == ("qwen3_moe", [1])
        told = checkpoint.metadata["megatron"]
        assert (told["iteration"], told["counters"]) == (7, {"consumed_train_samples": 56})
        assert told["opt_param_scheduler"] == {"max_lr": 1e-3, "lr_decay_style": "cosine"}
        assert "optimizer.param_to_group_meta" not in checkpoint.metadata["left_behind"]
        (group,) = checkpoint.metadata["param_groups"]
        assert (group["lr"], group["betas"]) == (1e-3, (0.9, 0.95))
        trained = {name.removeprefix("optim/").rpartition("/")[0] for name in checkpoint if name.startswith("optim/")}
        assert set(group["params"]) == trained


def test_a_parameter_without_settings_is_refused_with_its_state(held: Tensors, tmp_path: Path) -> None:
    state = _state(held)
    del state["optimizer"]["param_to_group_meta"][f"module.module.{GATE}"]
    _write(tmp_path / "run", state)
    with pytest.raises(Refused, match=r"(?s)INCOMPLETE.*decoder.layers.1.mlp.linear_fc1.weight.*no settings"):
        tx.convert(tmp_path / "run", tmp_path / "out", to="hf", optimizer=True)
    tx.convert(tmp_path / "run", tmp_path / "out", to="hf", optimizer=False)


def test_the_iteration_itself_has_megatrons_names_too(run: Path, tmp_path: Path) -> None:
    """Only the tracker tells that a plain DCP folder is Megatron's; without it, names stay as they are stored."""
    shutil.rmtree(tmp_path / "alone", ignore_errors=True)
    shutil.copytree(run / "iter_0000007", tmp_path / "alone")
    with tx.open(tmp_path / "alone") as checkpoint:
        assert checkpoint.format == "dcp"
        assert any(name.endswith("linear_fc1.weight_w") for name in checkpoint)


def test_halves_that_do_not_fit_are_refused(held: Tensors, tmp_path: Path) -> None:
    state = _state(held)
    state["model"].pop(f"{GATE}_v")
    _write(tmp_path / "one", state)
    with pytest.raises(Refused, match=r"(?s)INCOMPLETE.*linear_fc1.weight_v, is missing"):
        tx.open(tmp_path / "one")
    state = _state(held)
    state["model"][f"{GATE}_v"] = torch.ones(20, 17)
    _write(tmp_path / "other", state)
    with pytest.raises(Refused, match="SHAPE_MISMATCH"):
        tx.open(tmp_path / "other")
    state = _state(held)
    state["optimizer"]["state"][f"module.module.{GATE}_v"]["step"] = torch.tensor(8.0)
    _write(tmp_path / "steps", state)
    with pytest.raises(Refused, match="UNEQUAL_COPIES"):
        tx.convert(tmp_path / "steps", tmp_path / "out", to="hf", optimizer=True)


def test_nothing_runs(held: Tensors, tmp_path: Path) -> None:
    for key in ("args", "iteration"):
        _write(tmp_path / key, {**_state(held), key: Evil(tmp_path)})
        for marker in tmp_path.rglob(MARKER):
            marker.unlink()  # saving may have pickled it, and torch may have looked at it
        with pytest.raises(Refused, match="UNSAFE_PICKLE"):
            tx.open(tmp_path / key)
    assert not list(tmp_path.rglob(MARKER))
