"""Stamped transfers: what is shifted from one layer or expert to the next is what would be found the long way."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import save_file

import transaxle as tx
from tests.engine import synthetic
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.source import SimilarStamps, Source, Stamps
from transaxle.formats.catalog import Extent
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


def transfers(opened: Checkpoint, to: str = "hf") -> dict[str, list[Transfer]]:
    source = Source(opened.container)
    return {name: source.transfers(target) for name, target in opened.translation(to).targets.items()}


def long_way(opened: Checkpoint, to: str = "hf") -> dict[str, list[Transfer]]:
    """Return the same transfers, of which none is stamped."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (Stamps, SimilarStamps):
            patch.setattr(kind, "transfers", lambda *_: None)
        return transfers(opened, to)


def stamped(opened: Checkpoint, to: str = "hf") -> set[str]:
    """Return the targets whose transfers are stamps, once all have been asked for."""
    names = set[str]()
    source, targets = Source(opened.container), opened.translation(to).targets
    with pytest.MonkeyPatch.context() as patch:
        for kind in (Stamps, SimilarStamps):

            def noted(self: Any, target: Any, real: Any = kind.transfers) -> Any:
                found = real(self, target)
                names.update(() if found is None else (target.name,))
                return found

            patch.setattr(kind, "transfers", noted)
        for _ in range(2):
            for target in targets.values():
                source.transfers(target)
    return names


def with_extents(opened: Checkpoint, name: str, extents: Iterable[Extent], **changed: Any) -> Checkpoint:
    """Return a checkpoint in which one tensor lies elsewhere, or is of another type."""
    entry = replace(opened.container.entries[name], extents=tuple(extents), **changed)
    entries = {**opened.container.entries, name: entry}
    return Checkpoint(replace(opened.container, entries=entries), opened.settings, None, None)


def test_experts_are_stamped(folder: Path) -> None:
    opened = tx.open(folder)
    assert len(opened.container.entries[FIRST].extents) == 2 * LAYERS * EXPERTS
    assert transfers(opened) == long_way(opened)
    names = stamped(opened)
    assert sum(".mlp.experts." in name for name in names) == 3 * LAYERS * EXPERTS
    assert "model.embed_tokens.weight" not in names


def test_whole_plans_are_those_made_one_by_one(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {to: tx.plan(tx.open(folder), tmp_path / "out", to=to) for to in ("hf", "te", "transformers", "torch_dist")}
    for kind in (Stamps, SimilarStamps):
        monkeypatch.setattr(kind, "transfers", lambda *_: None)
    for to, plan in made.items():
        assert not plan.refusals
        assert tx.plan(tx.open(folder), tmp_path / "out", to=to) == plan
    assert len(made["hf"].tensors) == 3 + LAYERS * (9 + 3 * EXPERTS)


def in_two(extent: Extent) -> list[Extent]:
    """Cut a chunk along its third dim."""
    rows = extent.shape[2] // 2
    shape = (*extent.shape[:2], rows, *extent.shape[3:])
    second = (*extent.start[:2], extent.start[2] + rows, *extent.start[3:])
    half = 4 * rows * extent.shape[3]
    return [replace(extent, shape=shape), replace(extent, shape=shape, start=second, offset=extent.offset + half)]


def turned(extent: Extent) -> list[Extent]:
    """Let a chunk lie column by column."""
    return [replace(extent, strides=(1, 1, 1, extent.shape[2]))]


def elsewhere(extent: Extent) -> list[Extent]:
    return [replace(extent, file="other", offset=3 * extent.offset)]


@pytest.mark.parametrize("change", [in_two, turned, elsewhere])
@pytest.mark.parametrize("changed", [range(0, 60, 7), range(60)])
def test_chunks_that_differ_are_found_as_they_are(
    folder: Path, change: Callable[[Extent], list[Extent]], changed: range
) -> None:
    opened = tx.open(folder)
    extents = opened.container.entries[FIRST].extents
    other = with_extents(
        opened,
        FIRST,
        (part for number, extent in enumerate(extents) for part in (change(extent) if number in changed else [extent])),
    )
    assert transfers(other) == long_way(other)


def test_experts_in_one_chunk_are_found_the_long_way(folder: Path) -> None:
    opened = tx.open(folder)
    shape = opened.container.entries[FIRST].shape
    layers = (Extent((layer, 0, 0, 0), (1, *shape[1:]), "a", 10_000_000 * layer) for layer in range(LAYERS))
    other = with_extents(opened, FIRST, layers)
    assert transfers(other) == long_way(other)
    assert not any("gate_proj" in name for name in stamped(other))


DIALECTS = ("transformers", "te", "hf")
"""Of the published form, where each tensor lies in one piece."""
DOWN = "model.layers.1.mlp.experts.2.down_proj.weight"


@pytest.mark.parametrize("to", DIALECTS)
def test_all_layers_are_stamped_and_a_tensor_in_two_places_is_not(to: str) -> None:
    opened = synthetic.model(LAYERS, EXPERTS)
    assert transfers(opened, to) == long_way(opened, to)
    names = stamped(opened, to)
    assert names == {name for name in opened.translation(to).targets if "layers." in name}
    (extent,) = opened.container.entries[DOWN].extents
    rows, columns = extent.shape
    halves = [Extent((start, 0), (rows // 2, columns), extent.file, (start + 1) << 39) for start in (0, rows // 2)]
    other = with_extents(opened, DOWN, halves)
    assert transfers(other, to) == long_way(other, to)
    assert len(names - stamped(other, to)) == 2, "and the next one, which is compared with it"


@pytest.mark.parametrize("to", DIALECTS)
def test_a_tensor_of_another_type_leaves_its_line_unlike(to: str) -> None:
    alike = synthetic.model(LAYERS, EXPERTS)
    norm = "model.layers.2.input_layernorm.weight"
    opened = with_extents(alike, norm, alike.container.entries[norm].extents, dtype="F32")
    assert transfers(opened, to) == long_way(opened, to)
    assert 1 <= len(stamped(alike, to) - stamped(opened, to)) <= LAYERS


def cut(opened: Checkpoint, elsewhere: str = "") -> Checkpoint:
    """Return a checkpoint with each matrix in two files, as two ranks save it; one is cut at another column."""
    entries = dict(opened.container.entries)
    for number, (name, entry) in enumerate(entries.items()):
        if len(entry.shape) == 2:
            rows, columns = entry.shape
            wide = 1 if name == elsewhere else columns // 2
            left = Extent((0, 0), (rows, wide), "left", number << 30)
            right = Extent((0, wide), (rows, columns - wide), "right", (number * 7 % 64) << 30)
            entries[name] = replace(entry, extents=(left, right))
    return Checkpoint(replace(opened.container, entries=entries), opened.settings, None, None)


@pytest.mark.parametrize("to", DIALECTS)
def test_tensors_that_are_cut_alike_are_alike(to: str) -> None:
    opened, other = cut(synthetic.model(LAYERS, EXPERTS)), cut(synthetic.model(LAYERS, EXPERTS), DOWN)
    assert transfers(opened, to) == long_way(opened, to)
    assert stamped(opened, to) == {name for name in opened.translation(to).targets if "layers." in name}
    assert transfers(other, to) == long_way(other, to)
    assert len(stamped(opened, to) - stamped(other, to)) == 2
