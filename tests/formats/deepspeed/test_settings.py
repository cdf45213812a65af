"""Settings of the optimizer on their way through other containers: DeepSpeed finds the ones that it saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import transaxle as tx
from tests.formats.refusals import refuses
from tests.oracles.deepspeed_peer.farm import Farm
from transaxle.formats.deepspeed import keys
from transaxle.formats.deepspeed.keys import CheckedValue
from transaxle.formats.deepspeed.rank_files import plain

pytestmark = pytest.mark.peers


def told(universal: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What DeepSpeed will read: by group (ZeRO-1 and 2), and of the first group (ZeRO-3)."""
    import torch

    (file,) = universal.glob(f"*/{keys.ZERO_FOLDER}/{keys.OPTIMIZER_FILE}")
    held = torch.load(file, weights_only=False)
    return held[keys.GROUPS], held[keys.STATE][keys.GROUPS][0]


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["z1-bf16-w2", "z3-fp32-w2", "tp2-z3"])
@pytest.mark.parametrize("way", ["dcp", "torch", "safetensors"])
def test_by_way_of_another_container(farm: Farm, tmp_path: Path, way: str, name: str) -> None:
    source, facts = farm.checkpoint(name), farm.facts(name)
    tx.convert(source, tmp_path / "between", to=way, sync=False)
    tx.convert(source, tmp_path / "direct", to=keys.UNIVERSAL, sync=False)
    tx.convert(tmp_path / "between", tmp_path / "around", to=keys.UNIVERSAL, sync=False)
    groups, first = told(tmp_path / "around")
    assert (groups, first) == told(tmp_path / "direct")
    for group, want in zip(groups, facts["settings"], strict=False):
        assert {key: list(group[key]) if key == "betas" else group[key] for key in want} == want
    assert "weight_decay" not in first  # the groups differ in it, and ZeRO-3 would give all of them this one
    with tx.open(source) as one, tx.open(tmp_path / "around") as other:
        assert [g["params"] for g in one.metadata[keys.GROUPS]] == [g["params"] for g in other.metadata[keys.GROUPS]]


def test_a_list_that_is_shared_again_and_again_is_refused() -> None:
    wide: object = [0] * 1000
    for _ in range(2):
        wide = [wide] * 1000
    with refuses("CORRUPT", "more than 1000000 values"):
        plain(CheckedValue({"client": wide}, "file"))
