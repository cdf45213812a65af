"""Optimizer state without its parameter, or without a part that others have: refused, or told of, for every target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import transaxle as tx
from tests import checkpoints

WEIGHTS = {name: torch.zeros(array.shape) for name, array in checkpoints.tensors().items()}
FIRST, *_ = NAMES = sorted(WEIGHTS)
NARROW = [name for name in NAMES if WEIGHTS[name].ndim == 1]
TARGETS = ["dcp:automodel", "hf", "deepspeed-universal"]
Change = Callable[[dict[str, Any], dict[str, Any]], None]


def store(folder: Path, change: Change, trained: list[str] = NAMES) -> Path:
    """The tiny model with AdamW's state of some parameters, after a change of both."""
    state: dict[str, Any] = {
        name: {
            "step": torch.tensor(2.0),
            **{kind: torch.ones_like(WEIGHTS[name]) for kind in ("exp_avg", "exp_avg_sq")},
        }
        for name in trained
        if name in WEIGHTS
    }
    model: dict[str, Any] = dict(WEIGHTS)
    change(model, state)
    group = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "params": trained}
    checkpoints.write(folder, {}, config=checkpoints.CONFIG)
    (folder / "model.safetensors").unlink(missing_ok=True)
    torch.save({"model": model, "optimizer": {"state": state, "param_groups": [group]}}, folder / "pytorch_model.bin")
    return folder


def unchanged(model: dict[str, Any], state: dict[str, Any]) -> None:
    """Leave everything as it is."""


def stranger(model: dict[str, Any], state: dict[str, Any]) -> None:
    state["model.layers.0.extra.weight"] = {"exp_avg": torch.ones(3)}


def halved(model: dict[str, Any], state: dict[str, Any]) -> None:
    del state[FIRST]["exp_avg_sq"]


def fresh(model: dict[str, Any], state: dict[str, Any]) -> None:
    del state[NARROW[0]]


def refused(source: Path, out: Path, to: str) -> tx.TransaxleError:
    with pytest.raises(tx.TransaxleError) as caught:
        tx.convert(source, out, to=to, optimizer=True, sync=False)
    assert not out.exists()
    return caught.value


@pytest.mark.parametrize("to", TARGETS)
def test_state_without_values_is_refused(tmp_path: Path, to: str) -> None:
    source = store(tmp_path / "source", stranger)
    error = refused(source, tmp_path / "out", to)
    assert error.code == "MISSING_TENSOR"
    assert error.where.tensor == "model.layers.0.extra.weight"
    assert "--no-optimizer (optimizer=False)" in (error.hint or "")
    tx.convert(source, tmp_path / "out", to=to, optimizer=False, sync=False)


@pytest.mark.parametrize("to", TARGETS)
def test_a_part_that_others_have_is_missed(tmp_path: Path, to: str) -> None:
    error = refused(store(tmp_path / "source", halved), tmp_path / "out", to)
    assert {refusal.code for refusal in error.refusals} <= {"INCOMPLETE", "MISSING_TENSOR"}
    assert "exp_avg_sq" in str(error) or "needs" in str(error)


@pytest.mark.parametrize("to", ["dcp:automodel", "dcp"])
def test_parameters_without_any_state_are_told_of(tmp_path: Path, to: str) -> None:
    """Torch makes state with the first gradient; who is in no group is not trained."""
    report = tx.convert(store(tmp_path / "one", fresh), tmp_path / "out", to=to, optimizer=True, sync=False)
    assert any("without a gradient so far" in note for note in report.notes)
    frozen = store(tmp_path / "two", unchanged, [name for name in NAMES if name not in NARROW])
    report = tx.convert(frozen, tmp_path / "other", to=to, optimizer=True, sync=False)
    assert not any("without a gradient" in note for note in report.notes)


def in_memory(model: dict[str, Any], state: dict[str, Any]) -> None:
    """Give experts the state of transformers' stacks, whose elements are all different."""
    for name in [name for name in state if ".experts." in name]:
        del state[name]
    count, wide, narrow = (checkpoints.SIZES[k] for k in ("num_experts", "hidden_size", "moe_intermediate_size"))
    for layer in range(checkpoints.SIZES["num_hidden_layers"]):
        for stack, shape in (("gate_up_proj", (count, 2 * narrow, wide)), ("down_proj", (count, wide, narrow))):
            values = torch.arange(float(count * shape[1] * shape[2])).reshape(shape) + 1e5 * layer
            of_stack = {"step": torch.tensor(2.0), "exp_avg": values, "exp_avg_sq": -values}
            state[f"model.layers.{layer}.mlp.experts.{stack}"] = of_stack


@pytest.mark.oracle
@pytest.mark.parametrize("to", [*TARGETS, "dcp:hf"])
def test_state_may_have_names_of_another_dialect_than_the_weights(tmp_path: Path, to: str) -> None:
    trained = [name for name in NAMES if ".experts." not in name]
    stacks: dict[str, Any] = {}
    in_memory({}, stacks)
    source = store(tmp_path / "source", in_memory, [*trained, *stacks])
    report = tx.convert(source, tmp_path / "out", to=to, optimizer=True, verify=True, sync=False)
    assert "the optimizer's state has the names of transformers, the weights those of hf" in report.notes
    tx.convert(tmp_path / "out", tmp_path / "back", to="dcp:hf", optimizer=True, sync=False)
    with tx.open(tmp_path / "back") as back:
        assert {name.split("/")[1] for name in back if name.endswith("/exp_avg")} == set(NAMES)
        for stack, of_stack in stacks.items():
            stem, _, kind = stack.rpartition(".")
            parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            for key in ("exp_avg", "exp_avg_sq"):
                for expert, values in enumerate(of_stack[key]):
                    for part, expected in zip(parts, values.chunk(len(parts)), strict=True):
                        found = back[f"optim/{stem}.{expert}.{part}.weight/{key}"].read()
                        assert torch.equal(torch.from_numpy(found.copy()), expected)


def test_state_that_no_single_dialect_reads_is_refused(tmp_path: Path) -> None:
    """Some experts have it under the hub's names, others in stacks, and one has it twice."""

    def both(model: dict[str, Any], state: dict[str, Any]) -> None:
        kept = {name: of for name, of in state.items() if ".experts.3." in name}
        in_memory(model, state)
        state |= kept

    source = store(tmp_path / "source", both)
    assert refused(source, tmp_path / "out", "dcp:torchtitan").code == "INCOMPLETE"
