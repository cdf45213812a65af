"""`check` of readers that are not run: what the tables and the config say of good and of spoilt checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import transaxle as tx
from tests.readers.planted import EXPERTS, GLM4_MOE, LLAMA, QWEN3_MOE, config_of, make, retensor
from tests.readers.reported import UNRUN, qwen3_5_int4
from transaxle.readers import checking

pytestmark = pytest.mark.peers

EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
BIAS = "model.layers.0.self_attn.q_proj.bias"
NORM = "model.layers.1.self_attn.q_norm.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "qwen"
    make(QWEN3_MOE, folder)
    return folder


def kinds(verdict: tx.Check) -> dict[str, tuple[str, ...]]:
    return {finding.kind: finding.names for finding in verdict.findings if finding.wrong}


def change(tensors: Tensors) -> None:
    """Lose a tensor, cut one, and add two: one in a layer, and one of which no table knows anything."""
    tensors[BIAS] = tensors.pop(EXPERT)[0]
    tensors[NORM] = tensors[NORM][:8].clone()
    tensors["visual.patch.weight"] = torch.ones(3)


def test_sglang_is_compared_by_the_names_of_hub_files(hub: Path, tmp_path: Path) -> None:
    verdict = tx.check(hub, "sglang")
    assert verdict.ok
    assert verdict.traced == "tables"
    assert "SGLang was not run" in str(verdict)
    shutil.copytree(hub, tmp_path / "spoilt")
    retensor(tmp_path / "spoilt", change)
    spoilt = tx.check(tmp_path / "spoilt", "sglang")
    assert kinds(spoilt) == {"absent": (EXPERT,), "dropped": (BIAS,), "shape": (NORM,)}
    assert [finding.names for finding in spoilt.findings if finding.kind == "note"][1] == ("visual.patch.weight",)
    tx.convert(hub, tmp_path / "stacked", to="safetensors:transformers")
    assert "sglang takes names of hf, and these are those of transformers" in str(
        tx.check(tmp_path / "stacked", "sglang")
    )


@pytest.fixture(scope="module")
def qwen3_5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int4") / "qwen3_5"
    qwen3_5_int4(folder)
    return folder


@pytest.mark.parametrize("case", UNRUN)
def test_what_sglang_was_reported_to_drop_is_named(case: str, qwen3_5: Path, tmp_path: Path) -> None:
    """SGLang is not run: its reports, and its code, say what it drops."""
    assert tx.check(qwen3_5, "sglang").ok
    spoil, dropped = UNRUN[case]
    shutil.copytree(qwen3_5, tmp_path / "spoilt")
    spoil(tmp_path / "spoilt")
    spoilt = tx.check(tmp_path / "spoilt", "sglang")
    assert {kind: {*names} for kind, names in kinds(spoilt).items()} == {"dropped": dropped}
    tx.convert(tmp_path / "spoilt", tmp_path / "mended", to="hf", decode="bf16", sync=False)
    assert tx.check(tmp_path / "mended", "sglang").ok


@pytest.mark.parametrize("to", ["torch_dist", "megatron_torch:megatron", "megatron_torch:te"])
@pytest.mark.parametrize("config", [LLAMA, QWEN3_MOE, GLM4_MOE], ids=lambda config: str(config["model_type"]))
def test_megatron_takes_its_own_names(config: dict[str, object], to: str, tmp_path: Path) -> None:
    make(config, tmp_path / "hub")
    if to.endswith(":te") and config is LLAMA:
        to = "torch_dist:megatron_layers"
    tx.convert(tmp_path / "hub", tmp_path / "own", to=to)
    assert tx.check(tmp_path / "own", "megatron").ok
    biased = tx.check(tmp_path / "own", "megatron", config={**config_of(tmp_path / "hub"), "attention_bias": True})
    assert kinds(biased).keys() == {"absent"}
    assert any(name.endswith("linear_qkv.bias") for name in kinds(biased)["absent"])
    assert all(name.endswith(".bias") for name in kinds(biased)["absent"])


def test_deepspeed_takes_names_of_transformers(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not installed."""
    monkeypatch.setattr(checking, "reader_versions", lambda *_: {})
    own = tmp_path / "own"
    tx.convert(hub, own, to="deepspeed-universal")
    assert tx.check(own, "deepspeed", config=hub).ok
    lost = next(path for path in own.rglob("*q_norm*") if path.is_dir() and "layers.1" in path.name)
    shutil.rmtree(lost)
    assert kinds(tx.check(own, "deepspeed", config=hub)) == {"absent": (NORM,)}
    with pytest.raises(tx.TransaxleError, match="deepspeed does not open safetensors"):
        tx.check(hub, "deepspeed")


def test_llama_cpp_maps_names_by_the_tables_of_gguf(hub: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    assert tx.check(hub, "llama.cpp").ok
    shutil.copytree(hub, tmp_path / "spoilt")
    retensor(tmp_path / "spoilt", change)
    retensor(tmp_path / "spoilt", lambda tensors: tensors.update({f"{NORM}s": torch.ones(2)}))
    spoilt = tx.check(tmp_path / "spoilt", "llama.cpp")
    assert f"joins {EXPERTS} experts to one tensor" in str(spoilt)
    assert EXPERT in kinds(spoilt)["absent"]
    assert {f"{NORM}s", "visual.patch.weight"} & set(kinds(spoilt)["dropped"]) == {f"{NORM}s"}
