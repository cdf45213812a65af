"""From safetensors to DCP and back, between dialects: bit for bit, and as the frameworks themselves would have it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

import transaxle as tx
from tests import checkpoints
from tests.engine.peers import compared as peers
from tests.formats.dcp.conftest import Saved
from tests.formats.dcp.peers.truth import CODES, truth_of
from tests.formats.dcp.peers.world import CHECKPOINT, octets
from tests.oracles import MISSING, cases
from transaxle.formats.detect import open_container

needs_peers = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
FAMILIES = ("qwen3_moe", "llama")
VARIANT = "asymmetric"
HF, TITAN, AUTOMODEL = "hf", "torchtitan", "automodel"
SMALL = 500
"""Bytes of a file that cut the larger tensors of the tiny models."""


def load(into: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_loader.load(into, checkpoint_id=folder)


def save(state: Mapping[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_saver.save(dict(state), checkpoint_id=folder)


@pytest.mark.parametrize("shard_size", [10**9, SMALL])
def test_there_and_back(tmp_path: Path, shard_size: int) -> None:
    source = checkpoints.tiny(tmp_path / "source", shards=2)
    report = tx.convert(source, tmp_path / TITAN, to=f"dcp:{TITAN}", shard_size=shard_size)
    assert (report.format, report.carried) == ("dcp", ("config.json",))
    tx.convert(tmp_path / TITAN, tmp_path / AUTOMODEL, to=f"safetensors:{AUTOMODEL}")
    tx.convert(tmp_path / AUTOMODEL, tmp_path / HF, to=HF)
    assert checkpoints.same(source, tmp_path / HF)
    with tx.open(tmp_path / TITAN) as checkpoint:
        assert checkpoint.dialect == f"{TITAN}@0.3"
        assert tx.verify(checkpoint).against == "manifest"
        assert tx.verify(source, checkpoint).equal
        held = {name: torch.ones_like(tensor.torch()) for name, tensor in checkpoint.items()}
        load(held, tmp_path / TITAN)
        assert {name: octets(tensor) for name, tensor in held.items()} == {
            n: t.tobytes() for n, t in checkpoint.items()
        }
        cut = [entry for entry in checkpoint.container.entries.values() if len(entry.extents) > 1]
        assert bool(cut) == (shard_size == SMALL)


@pytest.mark.oracle
@pytest.mark.parametrize("case", ["sharded", "meshed", "two_dimensional", "titan"])
def test_what_torch_cut_comes_out_whole(saved: Saved, tmp_path: Path, case: str) -> None:
    place = saved(4) / case
    tx.convert(place / CHECKPOINT, tmp_path / "whole", to="safetensors:identity")
    truth = truth_of(place)
    files = (tmp_path / "whole").rglob("*.safetensors")
    held = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert {name: octets(tensor) for name, tensor in held.items()} == {n: octets(t) for n, t in truth.items()}
    tx.convert(place / CHECKPOINT, tmp_path / "again", to="dcp:identity", shard_size=40)
    with tx.open(tmp_path / "again") as checkpoint:
        assert {name: (t.dtype, t.shape, t.tobytes()) for name, t in checkpoint.items()} == {
            name: (CODES[t.dtype], tuple(t.shape), octets(t)) for name, t in truth.items()
        }


@pytest.mark.parametrize(("world", "case"), [(4, "hf_shards"), (1, "hf_whole")])
def test_notes_of_parts_are_not_taken_over(saved: Saved, tmp_path: Path, world: int, case: str) -> None:
    """What describes the parts must not stand in the header of the whole: torch would believe it."""
    source = saved(world) / case / CHECKPOINT
    assert open_container(str(source)).metadata == {"format": "pt"}
    tx.convert(source, tmp_path / "whole", to="safetensors:identity")
    assert open_container(str(tmp_path / "whole")).metadata == {"format": "pt"}


@needs_peers
@pytest.mark.peers
@pytest.mark.parametrize("family", FAMILIES)
def test_torchtitan_finds_its_own_state_dict(tmp_path: Path, family: str) -> None:
    """Its names and shapes, loaded by plain torch from what we made of the Hugging Face tensors."""
    case = cases.case(family, VARIANT)
    source = peers.store(tmp_path / "source", case.dialects[HF], case.config)
    tx.convert(source, tmp_path / TITAN, to=f"dcp:{TITAN}", shard_size=SMALL)
    theirs = case.dialects[TITAN]
    held = {name: torch.zeros_like(tensor) for name, tensor in theirs.items()}
    load(held, tmp_path / TITAN)
    assert peers.bits(held) == peers.bits(theirs)


@needs_peers
@pytest.mark.peers
@pytest.mark.parametrize("family", FAMILIES)
def test_what_torchtitan_saves_becomes_hf(tmp_path: Path, family: str) -> None:
    case = cases.case(family, VARIANT)
    save(case.dialects[TITAN], tmp_path / TITAN)
    tx.convert(tmp_path / TITAN, tmp_path / HF, to=HF, config=case.config)
    assert peers.load(tmp_path / HF) == peers.bits(case.dialects[HF])
