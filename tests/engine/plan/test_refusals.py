"""What a plan refuses before anything is written, and what it tells: names, sizes, missing layers, unread scales."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch.distributed.checkpoint.state_dict_loader import load

import transaxle as tx
from tests import checkpoints
from tests.engine import demand_refusal
from tests.oracles.quiet import quiet
from transaxle.axes.layout.bind import bind
from transaxle.axes.layout.relayout import Shape
from transaxle.axes.notation.expression import Axis, walk
from transaxle.axes.notation.family import Dialect, Family, Formula, Line, Sizes
from transaxle.axes.translation.translate import Translation, translate
from transaxle.engine.plan.conversion import refuse_clashes
from transaxle.errors import Refusal, TransaxleError
from transaxle.families import builtin
from transaxle.formats.catalog import Entry, Extent

SHARP, LETTERS = "caf\u00e9", "cafe\u0301"
"""One word, as two file systems spell it."""


@pytest.mark.parametrize(
    ("names", "refused"),
    [
        (("a", "b", "c/a", "c/b", "d/a"), ()),
        (("README.md", "readme.md"), ("readme.md",)),
        ((SHARP, LETTERS), (LETTERS,)),
        (("straße", "STRASSE"), ("STRASSE",)),
        (("zero/A.weight/fp32.pt", "zero/a.weight/step.pt"), ("zero/a.weight/step.pt",)),
        (("a/b", "a"), ("a",)),
        (("transaxle.json", "x"), ("transaxle.json",)),
        (("Transaxle.JSON", ".transaxle/journal"), ("Transaxle.JSON", ".transaxle/journal")),
    ],
)
def test_which_names_clash(names: tuple[str, ...], refused: tuple[str, ...]) -> None:
    found = refuse_clashes(names)
    assert tuple(each.where.file for each in found) == refused
    assert {each.code for each in found} <= {"NAME_COLLISION"}


def test_tensors_whose_names_become_folders(tmp_path: Path) -> None:
    """In a universal checkpoint each parameter is a folder: `A.weight` and `a.weight` are one on many a disk."""
    held = {name: np.ones(3, np.float32) for name in ("A.weight", "a.weight", SHARP, LETTERS)}
    source = checkpoints.write(tmp_path / "source", held)
    with pytest.raises(TransaxleError) as caught:
        tx.convert(source, tmp_path / "out", to="deepspeed-universal:identity")
    assert [each.code for each in caught.value.refusals] == ["NAME_COLLISION"] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    assert tx.convert(source, tmp_path / "out", to="dcp:identity").tensors == 4


@pytest.mark.parametrize("names", [("README.md", "Readme.md"), ("Transaxle.json",)])
def test_files_that_travel_along(tmp_path: Path, names: tuple[str, ...]) -> None:
    source = checkpoints.tiny(tmp_path / "source")
    for name in names:
        (source / name).write_text("x")
    if len(list(source.iterdir())) != 2 + len(names):
        pytest.skip("this file system does not tell the names apart")
    with pytest.raises(TransaxleError) as caught:
        tx.convert(source, tmp_path / "out", to="torchtitan")
    assert (caught.value.code, caught.value.where.file) == ("NAME_COLLISION", names[-1])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [".out.transaxle-partial", ".a.transaxle-old", ".transaxle", ".a.transaxle-old/x"])
def test_targets_that_bear_our_own_names(tmp_path: Path, name: str) -> None:
    """What bears such a name would be taken for a leftover, and removed."""
    source = checkpoints.tiny(tmp_path / "source")
    (tmp_path / ".a.transaxle-old").mkdir()
    with demand_refusal("NAME_COLLISION") as caught:
        tx.convert(source, tmp_path / name, to="torchtitan")
    assert "is reserved" in caught.value.refusals[0].message
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.transaxle-old", "source"]


# A model without a head of its own, and without a config that says so.


def test_a_model_that_may_be_tied_needs_its_config(tmp_path: Path) -> None:
    """A head that is not stored is the embedding, or lost: only the config tells."""
    config = {**checkpoints.CONFIG, "tie_word_embeddings": True}
    values = {name: value for name, value in checkpoints.tensors().items() if name != "lm_head.weight"}
    source = checkpoints.write(tmp_path / "source", values)
    (refusal,) = tx.plan(source, tmp_path / "out", to="dcp:torchtitan").refusals
    assert (refusal.code, "lm_head.weight" in refusal.message) == ("MISSING_TENSOR", True)
    assert "tie_word_embeddings" in refusal.hint
    assert '--config FILE (config="FILE")' in refusal.hint
    assert tx.plan(source, tmp_path / "out", to="dcp:torchtitan", config=config).refusals == ()
    missing = checkpoints.write(tmp_path / "less", {n: v for n, v in values.items() if n != "model.norm.weight"})
    (refusal,) = tx.plan(missing, tmp_path / "out", to="dcp:torchtitan").refusals
    assert "tie_word_embeddings" not in refusal.hint


# Issue 15, tables: that the last layer is missing is found where a config has a list of layers, and else told of.

RULES = """family hybrid
  model_type hybrid
  axes l{size} d=hidden_size
  norm : l d
  mix  : l d   when layers_block_type[l] == "mamba"
  q    : l d   when layers_block_type[l] == "attention"
dialect hf
  backbone.layers.{{l}}.norm.weight = norm[d]
  backbone.layers.{{l}}.mixer.A     = mix[d]
  backbone.layers.{{l}}.mixer.q     = q[d]
dialect other
  {{l}}.norm = norm[d]
  {{l}}.A    = mix[d]
  {{l}}.q    = q[d]
"""
KINDS = ["mamba", "attention", "mamba"]


def _made(folder: Path, layers: int, size: str) -> tuple[Path, Path]:
    rules = folder / "my.rules"
    rules.write_text(RULES.format(size=size))
    held = {}
    for layer, kind in enumerate(KINDS[:layers]):
        held[f"backbone.layers.{layer}.norm.weight"] = np.ones(4, np.float32)
        held[f"backbone.layers.{layer}.mixer.{'A' if kind == 'mamba' else 'q'}"] = np.ones(4, np.float32)
    config = {"model_type": "hybrid", "hidden_size": 4, "layers_block_type": KINDS}
    return checkpoints.write(folder / "source", held, config=config), rules


def test_a_missing_last_layer_is_found_by_the_length_of_a_list(tmp_path: Path) -> None:
    """As Nemotron-H's config has it: no number of layers, but a list of their kinds."""
    source, rules = _made(tmp_path, 2, "=len(layers_block_type)")
    (refusal,) = tx.plan(source, tmp_path / "out", to="other", rules=rules).refusals
    assert refusal.code == "MISSING_TENSOR"
    assert "backbone.layers.2.norm.weight" in refusal.message
    assert "backbone.layers.2.mixer.A" in refusal.message


def test_layers_that_only_names_count_are_told_of(tmp_path: Path) -> None:
    source, rules = _made(tmp_path, 2, "")
    assert tx.plan(source, tmp_path / "out", to="other", rules=rules).counted == {"l": 2}
    assert tx.convert(source, tmp_path / "out", to="other", rules=rules, sync=False).as_json()["counted"] == {"l": 2}
    (refusal,) = tx.plan(source, tmp_path / "x", to="other", rules=rules, axes={"l": 3}).refusals
    assert refusal.code == "MISSING_TENSOR"


def test_a_config_that_claims_too_many_experts_is_refused_at_once(tmp_path: Path) -> None:
    """What would be written is not laid out first: that would not end."""
    source = checkpoints.tiny(tmp_path / "source")
    config = json.loads((source / "config.json").read_text("utf-8"))
    (source / "config.json").write_text(json.dumps({**config, "num_experts": 10**30}), "utf-8")
    found = tx.plan(source, tmp_path / "out", to="dcp:torchtitan")
    assert {"MISSING_TENSOR", "CORRUPT"} <= {refusal.code for refusal in found.refusals}
    assert any("is not plausible" in refusal.message for refusal in found.refusals)


# Codes and scales in the format of a program that takes codes for values: said in a line, with the way out.

SIZES = {
    **checkpoints.SIZES, "hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 64, "num_experts": 2,
    "num_hidden_layers": 1,
}  # fmt: skip
NAME = "layers.0.attention.wo.weight"


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("codes")
    generator = np.random.default_rng(0)
    values = {
        name: (1e-3 * generator.standard_normal(shape)).astype("float32")
        for name, shape in checkpoints.shapes(SIZES).items()
    }
    (folder / "plain").mkdir()
    save_file(values, folder / "plain" / "model.safetensors")
    (folder / "plain" / "config.json").write_text(json.dumps({**checkpoints.CONFIG, **SIZES}), "utf-8")
    tx.convert(folder / "plain", folder / "encoded", to="hf", encode="float8_block", sync=False)
    return folder / "encoded"


def loaded(folder: Path) -> torch.Tensor:
    """What torch's DCP, by which torchtitan loads, makes of a tensor that a model has in single precision."""
    state = {NAME: torch.zeros(128, 256)}
    with quiet():
        load(state, checkpoint_id=folder, no_dist=True)
    return state[NAME]


def test_torchtitan_takes_codes_for_values_unless_they_are_decoded(encoded: Path, tmp_path: Path) -> None:
    true = tx.open(encoded, decode="fp32")["model.layers.0.self_attn.o_proj.weight"].read()
    report = tx.convert(encoded, tmp_path / "codes", to="dcp:torchtitan", sync=False)
    (note,) = [note for note in report.notes if "codes" in note]
    assert 'with --decode bf16 (decode="bf16")' in note
    assert not np.allclose(loaded(tmp_path / "codes").numpy(), true, rtol=0.5)
    report = tx.convert(encoded, tmp_path / "values", to="dcp:torchtitan", decode="fp32", sync=False)
    assert [note for note in report.notes if "codes" in note] == []
    assert np.array_equal(loaded(tmp_path / "values").numpy(), true)


@pytest.mark.parametrize("to", ["dcp:automodel", "torch_dist", "megatron_torch"])
def test_other_trainers_read_no_scales_either(encoded: Path, to: str, tmp_path: Path) -> None:
    assert [note for note in tx.plan(encoded, tmp_path / "out", to=to).notes if "read no scales" in note]


@pytest.mark.parametrize("to", ["hf", "dcp:hf", "dcp", "safetensors:megatron", "safetensors:transformers"])
def test_nothing_is_said_where_scales_are_read_or_names_stay(encoded: Path, to: str, tmp_path: Path) -> None:
    assert [note for note in tx.plan(encoded, tmp_path / "out", to=to).notes if "codes" in note] == []


# Two sizes of one axis are refused, with a config or without one, wherever tensors go.

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
def test_two_sizes_in_any_family_are_refused(family: str) -> None:
    if family in NAMES_NEED_A_CONFIG:
        with pytest.raises(tx.TransaxleError, match="the config does not say which"):
            _sweep(family, 1)
    else:
        assert _sweep(family, 3) > 3


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
    ("family", "key", "nested"), [("qwen3_moe", "num_hidden_layers", ""), ("qwen2_5_vl", "depth", "vision_config")]
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
