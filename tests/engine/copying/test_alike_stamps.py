"""Stamps of alike tensors: what follows from where a target's tensors begin is what would be found the long way."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.engine import synthetic
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.source import SimilarStamps, Source
from transaxle.formats.catalog import Entry, Extent
from transaxle.move.transfer import Transfer

LAYERS, EXPERTS = 3, 4
DIALECTS = ("transformers", "automodel", "torchtitan", "te", "megatron", "hf")
DOWN = "model.layers.1.mlp.experts.2.down_proj.weight"


def _transfers(source: Source, opened: Checkpoint, to: str) -> dict[str, list[Transfer]]:
    return {name: source.transfers(target) for name, target in opened.translation(to).targets.items()}


def _long_way(opened: Checkpoint, to: str) -> dict[str, list[Transfer]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimilarStamps, "transfers", lambda *_: None)
        return _transfers(Source(opened.container), opened, to)


def _stamped(opened: Checkpoint, to: str) -> set[str]:
    source, targets = Source(opened.container), opened.translation(to).targets
    for target in targets.values():
        source.transfers(target)
    return {name for name, target in targets.items() if source._similar_stamps.transfers(target) is not None}


def _with(opened: Checkpoint, entry: Entry) -> Checkpoint:
    """Return the same checkpoint with another entry of that name."""
    entries = {**opened.container.entries, entry.name: entry}
    return Checkpoint(replace(opened.container, entries=entries), opened.settings, None, None)


def _in_two(entry: Entry) -> Entry:
    """Return a tensor whose halves lie in two places, the second one first."""
    rows, *rest = entry.shape
    (whole,) = entry.extents
    half = (rows // 2, *rest)
    first, second = (Extent((start, 0), half, whole.file, at) for start, at in ((0, 1 << 40), (rows // 2, 1 << 39)))
    return replace(entry, extents=(first, second))


@pytest.mark.parametrize("to", DIALECTS)
def test_all_layers_are_filled_as_each_would_be(to: str) -> None:
    opened = synthetic.model(LAYERS, EXPERTS)
    assert _transfers(Source(opened.container), opened, to) == _long_way(opened, to)
    layers = {name for name in opened.translation(to).targets if "layers." in name}
    assert _stamped(opened, to) == layers


@pytest.mark.parametrize("to", DIALECTS)
def test_a_tensor_in_two_places_is_found_the_long_way(to: str) -> None:
    alike = synthetic.model(LAYERS, EXPERTS)
    opened = _with(alike, _in_two(alike.container.entries[DOWN]))
    found = _transfers(Source(opened.container), opened, to)
    assert found == _long_way(opened, to)
    (other,) = _stamped(alike, to) - _stamped(opened, to)
    assert any(transfer.source >= 1 << 39 for transfer in found[other])


def _all_cut(opened: Checkpoint, elsewhere: str = "") -> Checkpoint:
    """Return the same checkpoint with each matrix in two files, as two ranks save it; one is cut at another column."""
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
    """The folder of ranks that shard each tensor, whatever the places of the parts."""
    opened = _all_cut(synthetic.model(LAYERS, EXPERTS))
    assert _transfers(Source(opened.container), opened, to) == _long_way(opened, to)
    layers = {name for name in opened.translation(to).targets if "layers." in name}
    assert _stamped(opened, to) == layers
    other = _all_cut(synthetic.model(LAYERS, EXPERTS), DOWN)
    found = _transfers(Source(other.container), other, to)
    assert found == _long_way(other, to)
    assert found != _transfers(Source(opened.container), opened, to)
    assert len(_stamped(opened, to) - _stamped(other, to)) == 1


@pytest.mark.parametrize("to", DIALECTS)
def test_a_target_with_other_sources_is_filled_from_them(to: str) -> None:
    """A target that changed its number, but not its sources, is none of those that are alike."""
    opened = synthetic.model(LAYERS, EXPERTS)
    source, targets = Source(opened.container), opened.translation(to).targets
    target = next(target for name, target in targets.items() if "layers.1." in name and "experts" in name)
    expected = source.transfers(target)
    moved = target.at(target.name, {axis: number + 1 for axis, number in target.index.items()}, target.parts)
    assert source.transfers(target) == expected
    assert source._similar_stamps.transfers(moved) is None


@pytest.mark.parametrize("to", DIALECTS)
def test_a_tensor_of_another_type_leaves_its_line_unlike(to: str) -> None:
    alike = synthetic.model(LAYERS, EXPERTS)
    norm = alike.container.entries["model.layers.2.input_layernorm.weight"]
    opened = _with(alike, replace(norm, dtype="F32"))
    assert _transfers(Source(opened.container), opened, to) == _long_way(opened, to)
    assert len(_stamped(alike, to) - _stamped(opened, to)) in (1, LAYERS)
