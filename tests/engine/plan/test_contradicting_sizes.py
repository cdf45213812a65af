"""Two sizes of one axis are refused, with a config or without one, wherever tensors go."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import transaxle as tx
from tests import checkpoints
from transaxle.axes.layout.bind import bind
from transaxle.axes.layout.relayout import Shape
from transaxle.axes.notation.expression import Axis, walk
from transaxle.axes.notation.family import Dialect, Family, Formula, Line, Sizes
from transaxle.axes.translation.translate import Translation, translate
from transaxle.errors import Refusal
from transaxle.families import builtin
from transaxle.formats.catalog import Entry, Extent

DIALECTS = ("hf", "dcp:automodel", "safetensors:identity")
OPTIONS: dict[str, Any] = {"family": "qwen3_moe", "axes": {"g": 2, "c": 8}}
EMBED, DOWN, NORM = "model.embed_tokens.weight", "model.layers.1.mlp.experts.2.down_proj.weight", "model.norm.weight"
SHRUNK: dict[str, Any] = {EMBED: np.s_[:, :8], DOWN: np.s_[:, :5], NORM: np.s_[:9], checkpoints.GATE: np.s_[:6]}
"""Tensor -> what is left of it."""
NAMES_NEED_A_CONFIG = frozenset({"kimi_linear", "molmo2"})
"""Families in which one name may mean two tensors."""


def _store(folder: Path, *names: str) -> Path:
    held = checkpoints.tensors()
    return checkpoints.write(folder, {**held, **{name: held[name][SHRUNK[name]].copy() for name in names}})


@pytest.mark.parametrize("name", SHRUNK)
@pytest.mark.parametrize("to", DIALECTS)
def test_two_sizes_of_an_axis_are_refused(name: str, to: str, tmp_path: Path) -> None:
    source, out = _store(tmp_path / "source", name), tmp_path / "out"
    (refusal,) = tx.plan(source, out, to=to, **OPTIONS).refusals
    assert (refusal.code, refusal.where.tensor) == ("SHAPE_MISMATCH", name)
    with pytest.raises(tx.TransaxleError, match="SHAPE_MISMATCH"):
        tx.convert(source, out, to=to, sync=False, **OPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_they_are_refused_where_tensors_are_compared_and_loaded(tmp_path: Path) -> None:
    good, bad = checkpoints.tiny(tmp_path / "good"), _store(tmp_path / "bad", EMBED, DOWN)
    tx.convert(good, tmp_path / "titan", to="torchtitan", sync=False)
    with pytest.raises(tx.TransaxleError, match="SHAPE_MISMATCH"):
        tx.verify(bad, tmp_path / "titan")
    with tx.open(tmp_path / "titan") as titan, tx.open(bad, **OPTIONS) as source:
        model = {name: torch.zeros(tuple(tensor.shape), dtype=torch.bfloat16) for name, tensor in titan.items()}
        with pytest.raises(tx.TransaxleError, match="SHAPE_MISMATCH"):
            tx.load(model, source)
        with pytest.raises(tx.TransaxleError, match="SHAPE_MISMATCH"):
            source.as_dialect("torchtitan")
        held = {name: torch.zeros(tuple(tensor.shape), dtype=torch.bfloat16) for name, tensor in source.items()}
    with pytest.raises(tx.TransaxleError, match="SHAPE_MISMATCH"):
        tx.state_dict_as(held, "torchtitan", family="qwen3_moe", config={"num_key_value_heads": 2, "head_dim": 8})


def _stored(family: Family, dialect: Dialect) -> tuple[dict[str, int], dict[str, Shape], dict[str, Line]]:
    """Sizes of all axes, two along those in names; shapes and lines of the tensors of a dialect in two layers."""
    unsized = Sizes(family, {})
    known, others, free = unsized.at({}), dict[str, int](), itertools.count(6, 2)
    sizes = {}
    for axis in family.axes:
        alike = unsized.first_alike(axis)
        if axis not in known and axis not in family.name_axes and alike not in others:
            others[alike] = next(free)
        sizes[axis] = 2 if axis in family.name_axes else known.get(axis, others.get(alike, 0))
    shapes, lines, there = dict[str, Shape](), dict[str, Line](), set[str]()
    for line in (line for line in dialect.lines if not line.read_only):
        if there.isdisjoint(line.expression.components):  # of lines that exclude each other the first
            there.update(line.expression.components)
            numbering = line.name.numbering(sizes)
            for position in itertools.product((0, 1), repeat=len(line.name.axes)):
                numbers = [-1 if number is None else number for number in numbering.numbers(position)]
                if all(number >= 0 for number in numbers):
                    name = line.name.format(tuple(numbers))
                    shapes[name], lines[name] = line.expression.layout(sizes).shape, line
    return sizes, shapes, lines


def _translated(
    family: Family, dialects: tuple[Dialect, Dialect], given: Mapping[str, int], shapes: Mapping[str, Shape]
) -> Translation:
    entries = {n: Entry(n, "F32", s, (Extent((0,) * len(s), s, "file", 0),)) for n, s in shapes.items()}
    sizes = Sizes(family, {}, given)
    return translate(bind(list(entries), family, dialects[0], sizes, stored=entries), entries, dialects[1], sizes)


def _unknown(refusals: tuple[Refusal, ...], family: Family) -> set[str]:
    return {axis for r in refusals for axis in family.axes if f"the size of axis {axis} is needed" in r.message}


def _shrunk(
    lines: Mapping[str, Line], shapes: Mapping[str, Shape], sizes: Sizes
) -> Iterator[tuple[str, dict[str, Shape]]]:
    """The first tensor of each line, each of its dims shorter by one, if another tensor shows what is in that dim.

    Of an axis that may have a size in each layer, that is one of the same layer. Those without a formula do not count.
    """
    firsts: dict[Line, str] = {}
    for name, line in lines.items():
        firsts.setdefault(line, name)
    counted = {**dict.fromkeys(sizes.family.name_axes, 0), **sizes.overrides}
    layers = {name: (line.name.numbering(counted).position(name) or ())[:1] for name, line in lines.items()}
    for line, name in firsts.items():
        shape, others = shapes[name], [other for other in lines if other != name]
        for dim, node in enumerate(line.expression.dims):
            own = {part.name for part in walk(node) if isinstance(part, Axis) and not sizes.lack_formula([part.name])}
            by_layer = {axis for axis in own if sizes.indices_of(axis)}
            if shape[dim] > 1 and any(
                (own if layers[other] == layers[name] else own - by_layer) & lines[other].expression.axes
                for other in others
            ):
                yield name, {**shapes, name: (*shape[:dim], shape[dim] - 1, *shape[dim + 1 :])}


def _sweep(name: str, step: int) -> int:
    """Shrink dims without a config, every so many; return how many of them. Sizes that are needed are given."""
    family = builtin()[name]
    tried = 0
    for target in (family.dialects[0], family.dialects[-1]):
        dialects = family.dialects[0], target
        sizes, shapes, lines = _stored(family, dialects[0])
        arithmetic = {
            axis for line in dialects[0].lines for hole in line.name.holes for axis in Formula(hole.text[1:-1]).names
        }
        given = {axis: sizes[axis] for axis in family.axes if axis in family.name_axes | arithmetic}
        while needed := _unknown(_translated(family, dialects, given, shapes).refusals, family) - given.keys():
            given |= {axis: sizes[axis] for axis in needed}
        assert "SHAPE_MISMATCH" not in {r.code for r in _translated(family, dialects, given, shapes).refusals}
        for tensor, wrong in itertools.islice(_shrunk(lines, shapes, Sizes(family, {}, given)), 0, None, step):
            refusals = _translated(family, dialects, given, wrong).refusals
            assert "SHAPE_MISMATCH" in {refusal.code for refusal in refusals}, (tensor, wrong[tensor], target.label)
            tried += 1
    return tried


@pytest.mark.oracle
@pytest.mark.parametrize("family", [name for name, entry in builtin().entries.items() if not entry.traced])
def test_every_dim_of_every_family(family: str) -> None:
    if family in NAMES_NEED_A_CONFIG:
        with pytest.raises(tx.TransaxleError, match="the config does not say which"):
            _sweep(family, 1)
    else:
        assert _sweep(family, 1) > 9


RANKS = {"consolidated.01.pth": 2, "model_rank_1.pt": 3}
"""File of a rank -> how many ranks there are."""


@pytest.mark.parametrize("file", RANKS)
def test_the_file_of_one_of_several_ranks_is_no_model(file: str, tmp_path: Path) -> None:
    """Sizes may agree: shares of heads, of rows and of the vocabulary alone are a narrower model."""
    number = next(part for part in file.replace("_", ".").split(".") if part.isdigit())
    held = {name: torch.from_numpy(array.view(np.int16)) for name, array in checkpoints.tensors().items()}
    for rank in range(RANKS[file]):
        torch.save(held, tmp_path / file.replace(number, str(rank).zfill(len(number))))
    with pytest.raises(tx.TransaxleError, match="AMBIGUOUS") as several:
        tx.open(tmp_path)
    assert file not in several.value.hint
    for to in ("torchtitan", "hf"):
        refusals = tx.plan(tmp_path / file, tmp_path / "out", to=to, **OPTIONS).refusals
        assert "INCOMPLETE" in {refusal.code for refusal in refusals}
    assert tx.plan(tmp_path / file, tmp_path / "out", to="safetensors:identity").refusals == ()


@pytest.mark.parametrize("file", ["consolidated.00.pth", "lora_rank_16.pt"])
def test_a_file_that_is_alone_is_a_model(file: str, tmp_path: Path) -> None:
    held = {name: torch.from_numpy(array.view(np.int16)) for name, array in checkpoints.tensors().items()}
    torch.save(held, tmp_path / file)
    torch.save(held, tmp_path / "lora_rank_32.pt")
    codes = {
        refusal.code for refusal in tx.plan(tmp_path / file, tmp_path / "out", to="torchtitan", **OPTIONS).refusals
    }
    assert codes == set()


@pytest.mark.parametrize(
    ("family", "key", "nested"),
    [
        ("qwen3_moe", "num_hidden_layers", ""),
        ("qwen2_5_vl", "depth", "vision_config"),
    ],
)
def test_zero_layers_are_wrong_where_layers_are_stored(family: str, key: str, nested: str, tmp_path: Path) -> None:
    config = {**checkpoints.CONFIG, key: 0} if not nested else {
        "model_type": family, "tie_word_embeddings": False, **checkpoints.SIZES, nested: {key: 0}
    }  # fmt: skip
    held = checkpoints.tensors()
    if nested:
        held |= {f"visual.blocks.{layer}.norm1.weight": np.ones(4, np.float32) for layer in range(2)}
    source = checkpoints.write(tmp_path / "source", held, config=config)
    refusals = tx.plan(source, tmp_path / "out", to="vllm").refusals
    beyond = [r for r in refusals if "is beyond its size, 0" in r.message]
    assert {refusal.code for refusal in beyond} == {"UNEXPECTED_TENSOR"}
