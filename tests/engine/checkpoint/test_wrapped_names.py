"""Segments of wrappers inside names are no part of the model; `module` is one only where it is alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import transaxle as tx
from tests import checkpoints
from tests.engine import demand_refusal
from transaxle.engine.checkpoint.recognise import recognise
from transaxle.families import builtin

COMPILED, CHECKPOINTED, FSDP1, DDP = "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"


def layers(*segments: str) -> Callable[[str], str]:
    """Wrap every layer."""
    return lambda name: _after(name, 3, segments) if name.startswith("model.layers.") else name


def _after(name: str, count: int, segments: Sequence[str]) -> str:
    parts = name.split(".")
    return ".".join([*parts[:count], *segments, *parts[count:]])


PLACES: dict[str, Callable[[str], str]] = {
    "each layer compiled": layers(COMPILED),
    "each layer under DDP": layers(DDP),
    "three at one place": layers(FSDP1, COMPILED, CHECKPOINTED),
    "the model and its layers": lambda name: f"{COMPILED}.{layers(COMPILED)(name)}",
    "the body alone": lambda name: _after(name, 1, [COMPILED]) if name.startswith("model.") else name,
    "attention alone": lambda name: _after(name, 4, [COMPILED, DDP]) if ".self_attn." in name else name,
    "the modules of weights": lambda name: f"{name.removesuffix('.weight')}.{CHECKPOINTED}.weight",
}
"""What was wrapped when a model was saved -> the names that its state dict has."""


def _stored(folder: Path, wrapped: Callable[[str], str]) -> Path:
    held = {wrapped(name): array for name, array in checkpoints.tensors().items()}
    return checkpoints.write(folder, held, config=checkpoints.CONFIG)


@pytest.mark.parametrize("place", PLACES)
def test_a_wrapped_model_converts_as_the_model_itself(place: str, tmp_path: Path) -> None:
    source, plain = _stored(tmp_path / "source", PLACES[place]), checkpoints.tiny(tmp_path / "plain")
    for to in ("hf", "safetensors:transformers", "safetensors:megatron"):
        out = [tx.convert(path, tmp_path / f"{path.name}-{to}", to=to, sync=False).path for path in (source, plain)]
        assert checkpoints.same(Path(out[0]), Path(out[1])), to
    assert tx.verify(source, plain)
    assert tx.verify(plain, source)
    assert not tx.diff(source, plain).differences
    with tx.open(source) as checkpoint:
        assert set(checkpoint) == set(map(PLACES[place], checkpoints.tensors()))


@pytest.mark.parametrize("family", ["gpt2", "deepseek_v3", "qwen3_next"])
def test_names_of_any_family_are_read_without_wrappers(family: str) -> None:
    """In front of every segment of the names, one place after the other."""
    known = builtin()[family]
    for dialect in (each for each in known.dialects if each.name != "vllm"):
        names = [line.name.text for line in dialect.lines if not line.name.axes]
        names += [line.name.format((0,) * len(line.name.holes)) for line in dialect.lines if line.name.axes][:40]
        names = [name for name in dict.fromkeys(names) if "(" not in name]
        expected = recognise(names, {}, builtin(), family, dialect.label)
        for place in range(1, 4):
            wrapped = [_after(name, place, [COMPILED]) if name.count(".") > place else name for name in names]
            assert wrapped != names
            found = recognise(wrapped, {}, builtin(), family, dialect.label)
            assert (found.dialect.label, found.matched) == (expected.dialect.label, expected.matched)


def test_the_state_of_an_optimizer_and_its_groups_follow(tmp_path: Path) -> None:
    wrapped = PLACES["the model and its layers"]
    arrays = {name: array.astype(np.float32) for name, array in checkpoints.tensors().items()}
    model = {wrapped(name): torch.from_numpy(array) for name, array in arrays.items()}
    state = {wrapped(name): {"exp_avg": torch.from_numpy(array + 1)} for name, array in arrays.items()}
    groups = [{"lr": 0.5, "params": list(state)}]
    torch.save({"model": model, "optimizer": {"state": state, "param_groups": groups}}, tmp_path / "run.pt")
    tx.convert(tmp_path / "run.pt", tmp_path / "out", to="dcp:hf", config=checkpoints.CONFIG, sync=False)
    with tx.open(tmp_path / "out") as out:
        assert set(out) == {*arrays, *(f"optim/{name}/exp_avg" for name in arrays)}
        assert sorted(out.metadata["param_groups"][0]["params"]) == sorted(arrays)
        for name, array in arrays.items():
            assert np.array_equal(out[f"optim/{name}/exp_avg"].read(), array + 1)
            assert np.array_equal(out[name].read(), array)


def test_two_names_that_are_one_without_wrappers_are_refused(tmp_path: Path) -> None:
    twice = {f"model.{segment}.norm.weight": np.full(16, 7, np.float32) for segment in (COMPILED, FSDP1)}
    source = checkpoints.write(tmp_path / "source", checkpoints.tensors() | twice, config=checkpoints.CONFIG)
    with pytest.raises(tx.TransaxleError) as caught:
        tx.convert(source, tmp_path / "out", to="megatron", sync=False)
    assert {refusal.code for refusal in caught.value.refusals} == {"NAME_COLLISION"}
    assert len(caught.value.refusals) == len(twice)
    assert "model._fsdp_wrapped_module.norm.weight" in str(caught.value)
    assert not (tmp_path / "out").exists()
    tx.convert(source, tmp_path / "same", to="safetensors:identity", sync=False)
    assert checkpoints.same(source, tmp_path / "same")


def test_module_beside_others_is_a_module(tmp_path: Path) -> None:
    """A wrapper has nothing beside it: else it is one of the model's own, which no table reads."""
    held = {layers(DDP)(name): array for name, array in checkpoints.tensors().items()}
    held["model.layers.0.gate.weight"] = np.ones((2, 3), np.float32)
    source = checkpoints.write(tmp_path / "source", held, config=checkpoints.CONFIG)
    with pytest.raises(tx.TransaxleError, match="MISSING_TENSOR"):
        tx.convert(source, tmp_path / "out", to="megatron", sync=False)


@pytest.mark.parametrize("name", ["extra.module.bias", "heads.module.0.weight"])
def test_a_module_that_is_called_so_keeps_its_name_where_no_line_reads_it(name: str, tmp_path: Path) -> None:
    held = {**checkpoints.tensors(), name: np.arange(6, dtype=np.float32)}
    source = checkpoints.write(tmp_path / "source", held, config=checkpoints.CONFIG)
    for to in ("hf", "megatron"):
        assert tx.convert(source, tmp_path / to, to=to, sync=False).kept == (name,)
        with tx.open(tmp_path / to) as out:
            assert np.array_equal(out[name].read(), np.arange(6))


_TORCHTUNE = {
    "model.embed_tokens": "tok_embeddings", "model.layers": "layers", "self_attn": "attn", "o_proj": "output_proj",
    "input_layernorm.weight": "sa_norm.scale", "post_attention_layernorm.weight": "mlp_norm.scale",
    "model.norm.weight": "norm.scale", "lm_head": "output",
}  # fmt: skip
"""Parts of the hub's names -> torchtune's, by its own `convert_weights` of Llama."""


@pytest.mark.parametrize("kind", ["wrapped", "without config", "adapter"])
def test_names_of_torchtune_are_called_so(kind: str, tmp_path: Path) -> None:
    held = {}
    for name, array in checkpoints.tensors().items():
        own = name
        for theirs, ours in _TORCHTUNE.items():
            own = own.replace(theirs, ours)
        if kind == "wrapped":
            own = own.replace("layers.0.", f"layers.0.{COMPILED}.")
        if kind == "adapter":
            own = own.replace("attn.q_proj.weight", "attn.q_proj.lora_a.weight")
        if kind != "adapter" or "lora" in own:
            held[own] = array
    config = None if kind == "without config" else checkpoints.CONFIG
    source = checkpoints.write(tmp_path / "source", held, config=config)
    with demand_refusal("UNKNOWN_FAMILY", "names of torchtune") as caught:
        tx.convert(source, tmp_path / "out", to="hf", sync=False)
    assert "FullModelHFCheckpointer" in caught.value.hint
    tx.convert(source, tmp_path / "same", to="safetensors:identity", sync=False)
    assert checkpoints.same(source, tmp_path / "same")
