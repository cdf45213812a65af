"""Results of what frameworks write, read back: options of the source and dialects that names alone do not show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import transaxle as tx
from tests.cli.running import flip
from tests.formats.deepspeed import made
from tests.oracles import tiny_models
from transaxle.engine.plan.conversion import make_plan
from transaxle.engine.read_back import read_back
from transaxle.engine.verification import Verification
from transaxle.families import builtin
from transaxle.move.workers import limits


@pytest.mark.parametrize("options", [{"weights": "lp"}, {"weights": "fp32"}, {"average": True}], ids=str)
def test_options_of_the_source_alone_are_none_of_the_result(options: dict[str, Any], tmp_path: Path) -> None:
    """Which weights a run's files give, and what becomes of replicas: what is written has no choice any more."""
    to, place = "torch:identity", "out.pt"
    source = made.save(tmp_path / "run", {"a.weight": [torch.randn(8, 4)], "b.weight": [torch.randn(6)]}, None)
    report = tx.convert(source, tmp_path / place, to=to, verify=True, **options)
    assert report.verification
    with tx.open(source, **options) as read:
        expected = read["a.weight"].tobytes()
    with tx.open(tmp_path / place) as written:
        assert written["a.weight"].tobytes() == expected


@pytest.mark.parametrize(("model_type", "place"), [("gemma3", "out.pt"), ("qwen2_5_vl", "out.safetensors")])
def test_one_file_is_read_back_in_the_dialect_of_its_target(model_type: str, place: str, tmp_path: Path) -> None:
    """Its names fit several tables equally well, and no config says which is right."""
    tiny_models.made(model_type, {}, tmp_path)
    form = "torch" if place.endswith(".pt") else "safetensors"
    with tx.open(tmp_path / "saved") as source:
        labels = builtin()[str(source.family)].labels
    for dialect in ("transformers", "megatron", "vllm"):
        if dialect in labels:
            target = tmp_path / f"{dialect}-{place}"
            report = tx.convert(tmp_path / "saved", target, to=f"{form}:{dialect}", verify=True)
            assert report.verification is not None
            assert report.verification.comparison is not None
            assert report.verification.comparison.dialect == dialect
            flip(target, -1 if form == "safetensors" else target.stat().st_size // 2)
            assert not read_back_of(tmp_path / "saved", target, f"{form}:{dialect}")


def read_back_of(source: Path, target: Path, to: str) -> Verification:
    """Return what reading a target back finds that is there already."""
    with tx.open(source) as checkpoint:
        return read_back(make_plan(checkpoint, to, target=str(target)), str(target), {}, limits())
