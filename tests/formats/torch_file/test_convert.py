"""Conversions between torch files and safetensors, through the public interface."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import transaxle as tx
from tests.formats.refusals import refuses
from tests.formats.torch_file.test_reader import raw
from transaxle.errors import TransaxleError

WHOLE = "pytorch_model.bin"
SAFE = "model.safetensors"
STATE = "optimizer/optimizer.safetensors"
CONFIG = {
    "model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "num_experts": 3, "moe_intermediate_size": 6, "vocab_size": 16,
    "tie_word_embeddings": False,
}  # fmt: skip


def model() -> dict[str, torch.Tensor]:
    """A tiny Qwen3-MoE under the names of Hugging Face; every element differs."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (16, 8), "model.norm.weight": (8,), "lm_head.weight": (16, 8)}  # fmt: skip
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for name, shape in {
            "self_attn.q_proj.weight": (16, 8), "self_attn.k_proj.weight": (8, 8), "self_attn.v_proj.weight": (8, 8),
            "self_attn.o_proj.weight": (8, 16), "self_attn.q_norm.weight": (4,), "self_attn.k_norm.weight": (4,),
            "input_layernorm.weight": (8,), "post_attention_layernorm.weight": (8,), "mlp.gate.weight": (3, 8),
        }.items():  # fmt: skip
            shapes[prefix + name] = shape
        for expert in range(3):
            for name, shape in {"gate": (6, 8), "up": (6, 8), "down": (8, 6)}.items():
                shapes[f"{prefix}mlp.experts.{expert}.{name}_proj.weight"] = shape
    made: dict[str, torch.Tensor] = {}
    start = 0
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        made[name] = torch.arange(start, start + count, dtype=torch.float32).reshape(shape)
        start += count
    return made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    save_file(model(), folder / SAFE, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_there_and_back(tmp_path: Path, source: Path) -> None:
    report = tx.convert(source, tmp_path / "torch", to="torch")
    assert (report.format, report.tensors, report.ignored) == ("torch", len(model()), ())
    for mapped in (False, True):
        found = torch.load(tmp_path / "torch" / WHOLE, weights_only=True, mmap=mapped)
        assert found.keys() == model().keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in model().items())
    assert (tmp_path / "torch" / "config.json").exists()
    checked = tx.verify(tmp_path / "torch")
    assert isinstance(checked, tx.Verification)
    assert (checked.ok, checked.against) == (True, "manifest")
    tx.convert(tmp_path / "torch", tmp_path / "back", to="safetensors")
    assert (tmp_path / "back" / SAFE).read_bytes() == (source / SAFE).read_bytes()


def test_what_torch_saved_is_read_in_any_dialect(tmp_path: Path, source: Path) -> None:
    """A training checkpoint with transposed, tied and wrapped tensors becomes a plain one."""
    turned = {name: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor for name, tensor in model().items()}
    state = {name: torch.nn.Parameter(tensor) for name, tensor in turned.items()}
    place = tmp_path / "trained" / "checkpoint.pt"
    place.parent.mkdir()
    torch.save({"model": state, "epoch": 3, "name": "run"}, place)
    (place.parent / "config.json").write_text(json.dumps(CONFIG))
    plan = tx.plan(place.parent, tmp_path / "out", to="hf")
    assert not plan.refusals
    assert {"name", "epoch"} <= set(plan.ignored)
    tx.convert(place.parent, tmp_path / "out", to="hf")
    found = load_file(tmp_path / "out" / SAFE)
    assert "epoch" not in found
    assert all(torch.equal(found[name], tensor) for name, tensor in model().items())
    tx.convert(place.parent, tmp_path / "titan", to="torchtitan")
    direct = tmp_path / "direct"
    tx.convert(source, direct, to="torchtitan")
    expected, made = load_file(direct / SAFE), load_file(tmp_path / "titan" / SAFE)
    assert all(torch.equal(made[name], tensor) for name, tensor in expected.items())


def test_the_header_of_safetensors_says_what_loaders_ask_for(tmp_path: Path) -> None:
    torch.save({"model": {"a": torch.ones(2)}, "note": "x"}, tmp_path / "a.pt")
    tx.convert(tmp_path / "a.pt", tmp_path / "out", to="safetensors")
    assert dict(tx.open(tmp_path / "out").metadata) == {"format": "pt"}


@pytest.mark.parametrize("ending", [".pt", ".pth", ".bin"])
def test_one_file(tmp_path: Path, source: Path, ending: str) -> None:
    place = tmp_path / f"one{ending}"
    report = tx.convert(source, place, to="torch", shard_size=100)
    assert "config.json" in report.ignored
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [place.name, "source"]
    found = torch.load(place, weights_only=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in model().items())
    with pytest.raises(TransaxleError, match="exists"):
        tx.convert(source, place, to="torch")
    tx.convert(source, place, to="torch", overwrite=True)
    assert tx.diff(source, place).equal


@pytest.mark.parametrize(("name", "to"), [("a.pt", "hf"), ("a.bin", "safetensors"), ("a.safetensors", "torch")])
def test_a_file_of_another_format(tmp_path: Path, source: Path, name: str, to: str) -> None:
    with refuses("UNSUPPORTED", "another format"):
        tx.convert(source, tmp_path / name, to=to)
    assert not (tmp_path / name).exists()


def test_shards(tmp_path: Path, source: Path) -> None:
    tx.convert(source, tmp_path / "out", to="torch", shard_size=2000)
    files = sorted(entry.name for entry in (tmp_path / "out").iterdir())
    assert len(files) > 4
    index = json.loads((tmp_path / "out" / f"{WHOLE}.index.json").read_text())
    for name, tensor in model().items():
        held = torch.load(tmp_path / "out" / index["weight_map"][name], weights_only=True)
        assert torch.equal(held[name], tensor)
    assert tx.verify(tmp_path / "out").ok
    assert tx.diff(source, tmp_path / "out").equal


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_types_without_a_safetensors_code(tmp_path: Path) -> None:
    """They go from torch to torch, and are refused by safetensors by name."""
    tensors = {
        "a": torch.arange(4.0).to(torch.complex128),
        "b": torch.zeros(3, dtype=torch.complex32),
        "c": torch.arange(6.0).to(torch.complex128).reshape(2, 3).t(),
        "d": torch.ones(2),
    }
    torch.save(tensors, tmp_path / "a.pt")
    tx.convert(tmp_path / "a.pt", tmp_path / "b.pt", to="torch")
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert raw(found[name]) == raw(tensor)
    plan = tx.plan(tmp_path / "a.pt", tmp_path / "out", to="safetensors")
    assert [(one.code, one.where.tensor) for one in plan.refusals] == [("UNSUPPORTED", name) for name in "abc"]
    assert tx.open(tmp_path / "a.pt")["a"].read().tolist() == tensors["a"].tolist()


def test_numbers_are_hashed_and_compared_like_tensors(tmp_path: Path) -> None:
    for name, epoch in (("a.pt", 3), ("b.pt", 3), ("c.pt", 4)):
        torch.save({"w": torch.ones(2), "epoch": epoch}, tmp_path / name)
    assert tx.diff(tmp_path / "a.pt", tmp_path / "b.pt").equal
    assert [one.name for one in tx.diff(tmp_path / "a.pt", tmp_path / "c.pt").differences] == ["epoch"]
    tx.convert(tmp_path / "a.pt", tmp_path / "out", to="torch")
    assert tx.open(tmp_path / "out")["epoch"].read().item() == 3
    assert tx.verify(tmp_path / "out").ok
