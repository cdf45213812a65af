"""Stamped transfers: what is shifted from one layer or expert to the next is what would be found the long way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import transaxle as tx
from tests import checkpoints
from tests.engine import synthetic
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.source import SimilarStamps, Source, Stamps
from transaxle.formats.catalog import Extent
from transaxle.move.transfer import Transfer

LAYERS, EXPERTS = 3, 5
SIZES = {**checkpoints.SIZES, "num_hidden_layers": LAYERS, "num_experts": EXPERTS}
FIRST = "decoder.layers.mlp.experts.experts.linear_fc1.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE in Megatron's form: layers and experts are dims, and every expert's half is a chunk."""
    place, config = tmp_path_factory.mktemp("megatron"), {**checkpoints.CONFIG, **SIZES}
    hub = checkpoints.write(place / "hub", checkpoints.tensors(SIZES), config=config)
    tx.convert(hub, place / "out", to="torch_dist")
    return place / "out"


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
    half = 2 * rows * extent.shape[3]
    return [replace(extent, shape=shape), replace(extent, shape=shape, start=second, offset=extent.offset + half)]


def turned(extent: Extent) -> list[Extent]:
    """Let a chunk lie column by column."""
    return [replace(extent, strides=(1, 1, 1, extent.shape[2]))]


def elsewhere(extent: Extent) -> list[Extent]:
    return [replace(extent, file="other", offset=3 * extent.offset)]


@pytest.mark.parametrize("change", [in_two, turned, elsewhere])
@pytest.mark.parametrize("changed", [range(0, 60, 7), range(60)])
def test_chunks_that_differ_are_found(folder: Path, change: Callable[[Extent], list[Extent]], changed: range) -> None:
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
