"""Stamped transfers: what is shifted from one layer or expert to the next is what would be found the long way."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file

import transaxle as tx
from transaxle.engine.source import Source, Stamps
from transaxle.formats import safetensors
from transaxle.formats.catalog import Entry, Extent
from transaxle.move.transfer import Transfer

LAYERS, EXPERTS, HIDDEN, INNER = 3, 5, 16, 12
FIRST = "decoder.layers.mlp.experts.experts.linear_fc1.weight"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE as it is published."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (40, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (40, HIDDEN),
    }
    for layer in range(LAYERS):
        base = f"model.layers.{layer}"
        shapes |= {f"{base}.{norm}.weight": (HIDDEN,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{base}.self_attn.{norm}.weight": (8,) for norm in ("q_norm", "k_norm")}
        shapes |= {f"{base}.self_attn.{name}_proj.weight": (16, HIDDEN) for name in ("k", "v")}
        shapes |= {f"{base}.self_attn.q_proj.weight": (32, HIDDEN), f"{base}.self_attn.o_proj.weight": (HIDDEN, 32)}
        shapes[f"{base}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            inside = f"{base}.mlp.experts.{expert}"
            shapes |= {f"{inside}.{half}_proj.weight": (INNER, HIDDEN) for half in ("gate", "up")}
            shapes[f"{inside}.down_proj.weight"] = (HIDDEN, INNER)
    config = {
        "model_type": "qwen3_moe", "tie_word_embeddings": False, "hidden_size": HIDDEN, "intermediate_size": 24,
        "moe_intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "num_experts": EXPERTS, "num_experts_per_tok": 2, "vocab_size": 40,
    }  # fmt: skip
    hub = tmp_path_factory.mktemp("published") / "hub"
    hub.mkdir()
    random = np.random.default_rng(18)
    save_file({name: random.random(shape, np.float32) for name, shape in shapes.items()}, hub / "model.safetensors")
    (hub / "config.json").write_text(json.dumps(config))
    return hub


@pytest.fixture(scope="module")
def folder(hub: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in Megatron's form: layers and experts are dims, and every expert's half is a chunk."""
    made = tmp_path_factory.mktemp("megatron") / "out"
    tx.convert(hub, made, to="torch_dist")
    return made


def long_way(monkeypatch: pytest.MonkeyPatch, source: Source, opened: tx.Checkpoint) -> dict[str, list[Transfer]]:
    with monkeypatch.context() as patch:
        patch.setattr(Stamps, "transfers", lambda *_: None)
        return transfers(source, opened)


def transfers(source: Source, opened: tx.Checkpoint) -> dict[str, list[Transfer]]:
    return {name: source.transfers(target) for name, target in opened.translation("hf").targets.items()}


def stamped(source: Source, opened: tx.Checkpoint) -> set[str]:
    targets = opened.translation("hf").targets
    for target in targets.values():
        source.transfers(target)
    stamps = source._stamps
    return {name for name, target in targets.items() if stamps is not None and stamps.transfers(target) is not None}


def test_experts_are_stamped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = tx.open(folder)
    entries = opened.container.entries
    found = transfers(Source(opened.container), opened)
    assert found == long_way(monkeypatch, Source(opened.container), opened)
    names = stamped(Source(opened.container), opened)
    assert len(entries[FIRST].extents) == 2 * LAYERS * EXPERTS
    assert sum(".mlp.experts." in name for name in names) == 3 * LAYERS * EXPERTS
    assert "model.embed_tokens.weight" not in names


def test_joined_experts_are_stamped(hub: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many transfers fill a layer's experts; those of the other layers are not found the long way again."""
    opened = tx.open(folder)
    targets = opened.translation("transformers").targets
    source, other_source = Source(opened.container), Source(opened.container)
    for ending, count in ("down_proj", EXPERTS), ("gate_up_proj", 2 * EXPERTS):
        first, *others = [target for name, target in targets.items() if name.endswith(f".experts.{ending}")]
        assert len(source.transfers(first)) == count
        assert source._stamps is not None
        filled = [source._stamps.transfers(target) for target in others]
        with monkeypatch.context() as patch:
            patch.setattr(Stamps, "transfers", lambda *_: None)
            assert filled == [tuple(other_source.transfers(target)) for target in others]
    tx.convert(folder, tmp_path / "out", to="transformers")
    stored, made = load_file(hub / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    for layer in range(LAYERS):
        inside = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([stored[f"{inside}.{expert}.{half}_proj.weight"] for expert in range(EXPERTS)])
            for half in ("gate", "up", "down")
        )
        assert np.array_equal(made[f"{inside}.down_proj"], down)
        assert np.array_equal(made[f"{inside}.gate_up_proj"], np.concatenate([gate, up], 1))


def test_whole_plans_are_those_made_one_by_one(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither stamps nor the short ways for many tensors without problems leave a trace in a plan."""
    made = {to: tx.plan(tx.open(folder), tmp_path / "out", to=to) for to in ("hf", "te", "transformers", "torch_dist")}
    monkeypatch.setattr(Stamps, "transfers", lambda *_: None)
    monkeypatch.setattr(safetensors, "_are_plain", lambda _: False)
    for to, plan in made.items():
        assert not plan.refusals
        assert tx.plan(tx.open(folder), tmp_path / "out", to=to) == plan
    assert len(made["hf"].tensors) == 3 + LAYERS * (9 + 3 * EXPERTS)


def whole(extent: Extent) -> list[Extent]:
    return [extent]


def in_two(extent: Extent) -> list[Extent]:
    """Cut a chunk along its third dim."""
    rows = extent.shape[2] // 2
    shape = (*extent.shape[:2], rows, *extent.shape[3:])
    second = (*extent.start[:2], extent.start[2] + rows, *extent.start[3:])
    half = 4 * rows * extent.shape[3]
    return [
        msgspec.structs.replace(extent, shape=shape),
        msgspec.structs.replace(extent, shape=shape, start=second, offset=extent.offset + half),
    ]


def turned(extent: Extent) -> list[Extent]:
    """Let a chunk lie column by column."""
    return [msgspec.structs.replace(extent, strides=(1, 1, 1, extent.shape[2]))]


def elsewhere(extent: Extent) -> list[Extent]:
    return [msgspec.structs.replace(extent, file="other", offset=3 * extent.offset)]


@pytest.mark.parametrize("change", [whole, in_two, turned, elsewhere])
@pytest.mark.parametrize("changed", [range(0, 60, 7), range(1), range(60), range(0, 60, 2)])
def test_chunks_that_differ(folder: Path, monkeypatch: pytest.MonkeyPatch, change: object, changed: range) -> None:
    """A chunk that is cut, turned or elsewhere is found as it is."""
    assert callable(change)
    opened = tx.open(folder)
    extents = [
        other
        for number, extent in enumerate(opened.container.entries[FIRST].extents)
        for other in (change(extent) if number in changed else [extent])
    ]
    before = opened.container.entries[FIRST]
    entries = {**opened.container.entries, FIRST: Entry(FIRST, before.dtype, before.shape, tuple(extents))}
    found = transfers(Source(opened.container, entries), opened)
    assert found == long_way(monkeypatch, Source(opened.container, entries), opened)


def test_experts_in_several_chunks_are_stamped(folder: Path) -> None:
    """As where ranks of tensor parallelism each have written some rows."""
    opened = tx.open(folder)
    before = opened.container.entries[FIRST]
    extents = tuple(half for extent in before.extents for half in in_two(extent))
    entries = {**opened.container.entries, FIRST: replace(before, extents=extents)}
    names = stamped(Source(opened.container, entries), opened)
    assert sum("gate_proj" in name for name in names) == LAYERS * EXPERTS


def test_experts_in_one_chunk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of several experts have no index to themselves: nothing is stamped, and all is found."""
    opened = tx.open(folder)
    before = opened.container.entries[FIRST]
    extents = tuple(
        Extent((layer, 0, 0, 0), (1, *before.shape[1:]), "a", 10_000_000 * layer) for layer in range(LAYERS)
    )
    entries = {**opened.container.entries, FIRST: replace(before, extents=extents)}
    found = transfers(Source(opened.container, entries), opened)
    assert found == long_way(monkeypatch, Source(opened.container, entries), opened)
    names = stamped(Source(opened.container, entries), opened)
    assert not any("gate_proj" in name for name in names)
