"""Parameter groups follow their parameters into every dialect and container, or are refused or listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import transaxle as tx
from tests import checkpoints
from transaxle.axes.layout.bind import split_slot
from transaxle.formats.training_state import KEPT

GROUPS = "param_groups"
NAMES = list(checkpoints.tensors())
EXPERTS = "model.layers.{}.mlp.experts."


def wide(name: str) -> bool:
    return checkpoints.tensors()[name].ndim > 1


def groups(second: list[str]) -> list[dict[str, Any]]:
    """Two groups; `second` is the other one's parameters."""
    return [
        {"lr": 0.1, "betas": (0.9, 0.95), "fused": None, "params": [name for name in NAMES if name not in second]},
        {"lr": 1, "betas": (0.9, 0.95), "fused": None, "params": second},
    ]


def store(folder: Path, held: list[dict[str, Any]]) -> Path:
    """The tiny model, each weight and moment filled with the number of its group, and a step for every parameter."""
    numbers = {name: number for number, name in enumerate(NAMES)}
    listed = [
        {**group, "params": [numbers[n] for n in group["params"]], "param_names": group["params"]} for group in held
    ]
    group_of = {name: number for number, group in enumerate(held) for name in group["params"]}
    model = {name: torch.full(array.shape, group_of[name]).bfloat16() for name, array in checkpoints.tensors().items()}
    state = {numbers[name]: {"step": torch.tensor(3.0), "exp_avg": weight} for name, weight in model.items()}
    folder.mkdir()
    torch.save({"model": model, "optimizer": {"state": state, GROUPS: listed}}, folder / "pytorch_model.bin")
    checkpoints.write(folder / "config", {}, config=checkpoints.CONFIG)
    (folder / "config.json").write_bytes((folder / "config" / "config.json").read_bytes())
    return folder


@pytest.mark.parametrize(
    ("container", "dialect"), [("safetensors", "automodel"), ("torch", "torchtitan"), ("dcp", "megatron")]
)
def test_names_follow_the_tensors(tmp_path: Path, container: str, dialect: str) -> None:
    """Each parameter of the target is in the group of what it is made of: its own values tell which one."""
    norms = [name for name in NAMES if not wide(name)]
    held = groups(norms)
    source = store(tmp_path / "source", held)
    tx.convert(source, tmp_path / "out", to=f"{container}:{dialect}", sync=False)
    with tx.open(tmp_path / "out") as out, tx.open(source) as checkpoint:
        found = out.metadata[GROUPS]
        assert checkpoint.as_dialect(dialect).metadata[GROUPS] == found
        moments = [name for name in out if name.endswith("/exp_avg")]
        values = {split_slot(name)[0]: set(out[name].read().astype(int).flat) for name in moments}
    assert [{k: v for k, v in group.items() if k != "params"} for group in found] == [
        {"lr": 0.1, "betas": (0.9, 0.95), "fused": None},
        {"lr": 1, "betas": (0.9, 0.95), "fused": None},
    ]
    assert [type(group["lr"]) for group in found] == [float, int]
    assert {name: {number} for number, group in enumerate(found) for name in group["params"]} == values
    tx.convert(tmp_path / "out", tmp_path / "back", to="torch:hf", sync=False)
    with tx.open(tmp_path / "back") as back:
        assert [{**group, "params": set(group["params"])} for group in back.metadata[GROUPS]] == [
            {**group, "params": set(group["params"])} for group in held
        ]


def test_parts_of_different_groups_do_not_become_one_parameter(tmp_path: Path) -> None:
    gate = next(name for name in NAMES if EXPERTS.format(0) in name)
    source = store(tmp_path / "source", groups([gate]))
    with pytest.raises(tx.TransaxleError, match="different settings") as caught:
        tx.convert(source, tmp_path / "out", to="dcp:automodel")
    assert {refusal.code for refusal in caught.value.refusals} == {"UNSUPPORTED"}
    assert "--no-optimizer" in str(caught.value.refusals[0].hint)
    assert not (tmp_path / "out").exists()
    tx.convert(source, tmp_path / "out", to="dcp:automodel", optimizer=False, sync=False)
    tx.convert(source, tmp_path / "same", to="dcp:hf", sync=False)


def test_a_model_for_a_hub_leaves_them_behind(tmp_path: Path) -> None:
    source = store(tmp_path / "source", groups([NAMES[0]]))
    report = tx.convert(source, tmp_path / "out", to="hf", sync=False)
    assert GROUPS in report.ignored
    with tx.open(tmp_path / "out") as checkpoint:
        assert GROUPS not in checkpoint.metadata
    with tx.open(source, optimizer=False) as checkpoint:
        assert GROUPS not in checkpoint.metadata


def test_one_of_several_files_holds_them(tmp_path: Path) -> None:
    held = groups([NAMES[0]])
    source = store(tmp_path / "source", held)
    report = tx.convert(source, tmp_path / "out", to="torch", shard_size=10_000, sync=False)
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(files) > 4
    assert report.bytes_written < 200_000
    with tx.open(tmp_path / "out") as checkpoint:
        assert checkpoint.metadata[GROUPS] == held
    holding = [path.parent.name for path in files if KEPT.encode() in path.read_bytes()]
    assert holding == ["optimizer"]


def test_what_is_no_plain_setting_is_listed(tmp_path: Path) -> None:
    weight = torch.zeros(2, 3)
    settings = {"lr": 0.1, "where": torch.device("cpu"), "table": weight, "params": [0]}
    torch.save({"state": {0: {"m": weight}}, GROUPS: [settings]}, tmp_path / "a.pt")
    with tx.open(tmp_path / "a.pt") as checkpoint:
        assert checkpoint.metadata[GROUPS] == [{"lr": 0.1, "params": ["#0"]}]
        assert set(checkpoint.metadata["left_behind"]) == {"param_groups.0.where", "param_groups.0.table"}
    report = tx.convert(tmp_path / "a.pt", tmp_path / "out", to="dcp", sync=False)
    assert {"param_groups.0.where", "param_groups.0.table"} <= set(report.ignored)
