"""`check` against trainers: it finds what their own loading does with the same files."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

import transaxle as tx
from tests.oracles import automodel_peer, torchtitan_peer
from tests.oracles.quiet import quiet
from tests.readers.conftest import served
from tests.readers.planted import GLM4_MOE, QWEN3_MOE, config_of, make, retensor

EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
BIAS = "model.layers.0.self_attn.q_proj.bias"
Tensors = dict[str, torch.Tensor]

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    python, folder = Path(sys.executable), tmp_path_factory.mktemp("cache")
    (folder / "automodel").mkdir()
    with served(python, "of_torchtitan", folder), served(python, "of_automodel", folder / "automodel"):
        yield


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "qwen"
    make(QWEN3_MOE, folder)
    return folder


@pytest.fixture
def spoil(hub: Path, tmp_path: Path) -> Callable[[Callable[[Tensors], object]], Path]:
    def spoilt(change: Callable[[Tensors], object]) -> Path:
        shutil.copytree(hub, tmp_path / "spoilt")
        retensor(tmp_path / "spoilt", change)
        return tmp_path / "spoilt"

    return spoilt


def kinds(verdict: tx.Check) -> dict[str, tuple[str, ...]]:
    return {finding.kind: finding.names for finding in verdict.findings if finding.wrong}


def load_with_torchtitan(folder: Path) -> Tensors:
    """What its `dcp_load` does with hub files."""
    config: dict[str, Any] = config_of(folder)
    adapter = torchtitan_peer.adapter(config)
    state = {
        name: torch.full_like(value, torch.nan, device="cpu")
        for name, value in torchtitan_peer.module(config).state_dict().items()
    }
    with quiet():
        asked = adapter.to_hf(state)
        load(asked, storage_reader=adapter.get_hf_storage_reader(str(folder)))
        made: Tensors = adapter.from_hf(asked)
    return made


def test_torchtitan_loads_hub_files_and_its_own(hub: Path, tmp_path: Path) -> None:
    assert tx.check(hub, "torchtitan").ok
    assert all(value.isfinite().all() for value in load_with_torchtitan(hub).values())
    tx.convert(hub, tmp_path / "own", to="dcp:torchtitan")
    assert tx.check(tmp_path / "own", "torchtitan").ok
    tx.convert(hub, tmp_path / "older", to="dcp:torchtitan@0.2")
    older = kinds(tx.check(tmp_path / "older", "torchtitan"))
    assert "layers.0.moe.routed_experts.inner_experts.w1_EFD" in older["missing"]
    assert "layers.0.moe.experts.w1" in older["dropped"]


def test_torchtitan_stops_at_a_lost_tensor_and_never_looks_at_others(
    spoil: Callable[[Callable[[Tensors], object]], Path],
) -> None:
    def change(tensors: Tensors) -> None:
        tensors[BIAS] = tensors.pop(EXPERT)[0]

    folder = spoil(change)
    verdict = tx.check(folder, "torchtitan")
    assert kinds(verdict) == {"missing": (EXPERT,), "dropped": (BIAS,), "absent": (EXPERT,)}
    assert "1 parameter, and stops" in str(verdict)
    assert BIAS in load_file(folder / "model.safetensors")
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict"):
        load_with_torchtitan(folder)


def test_a_model_that_torchtitan_cannot_be_given_is_refused(tmp_path: Path) -> None:
    make(GLM4_MOE, tmp_path / "glm")
    with pytest.raises(tx.TransaxleError, match="torchtitan has no way from a config"):
        tx.check(tmp_path / "glm", "torchtitan")


def load_with_automodel(folder: Path) -> Tensors:
    """What its own model holds, once it has loaded what its adapter makes of hub files."""
    return automodel_peer.held(config_of(folder), load_file(folder / "model.safetensors"), None)


def test_automodel_loads_hub_files_through_its_adapter(
    hub: Path, spoil: Callable[[Callable[[Tensors], object]], Path]
) -> None:
    assert tx.check(hub, "automodel").ok
    assert all(value.isfinite().all() for value in load_with_automodel(hub).values())

    def change(tensors: Tensors) -> None:
        tensors[BIAS] = tensors.pop(EXPERT)[0]

    folder = spoil(change)
    assert kinds(tx.check(folder, "automodel")) == {"missing": (EXPERT,), "dropped": (BIAS,), "absent": (EXPERT,)}
    with pytest.raises(RuntimeError, match="expert"):
        load_with_automodel(folder)


def test_a_model_that_automodel_takes_from_transformers_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    make({"model_type": "phi", "architectures": ["PhiForCausalLM"], "vocab_size": 64, **sizes}, tmp_path / "phi")
    with pytest.raises(tx.TransaxleError, match="Automodel has no model of its own for PhiForCausalLM"):
        tx.check(tmp_path / "phi", "automodel")
