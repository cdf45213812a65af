"""Comparison: bit by bit, whatever the dialects, the shards and the formats."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import transaxle as tx
from tests import checkpoints
from tests.engine import law, quantized
from tests.formats import files
from transaxle.engine.compare import compare
from transaxle.move.workers import limits

GATE = checkpoints.GATE
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def stored(folder: Path, **changed: npt.NDArray[Any]) -> Path:
    return checkpoints.write(folder, {**checkpoints.tensors(), **changed}, config=checkpoints.CONFIG)


def plain(folder: Path, held: Mapping[str, Any]) -> Path:
    return checkpoints.write(folder, {name: np.asarray(value) for name, value in held.items()})


def test_logical_tensors_are_told_also_where_both_sides_have_one_dialect(tmp_path: Path) -> None:
    held = checkpoints.tensors() | {"of.no.table": np.ones(2)}
    del held["model.norm.weight"]
    first = checkpoints.write(tmp_path / "first", held, config=checkpoints.CONFIG)
    held = checkpoints.tensors()
    held[GATE][0, 0] += 1
    del held["model.layers.1.mlp.gate.weight"]
    second = checkpoints.write(tmp_path / "second", held, config=checkpoints.CONFIG)
    for numeric in (False, True):
        found = {each.name: (each.kind, each.component) for each in tx.diff(first, second, numeric=numeric).differences}
        assert found == {
            GATE: ("values", "gate"),
            "model.layers.1.mlp.gate.weight": ("only_first", "router"),
            "model.norm.weight": ("only_second", "norm"),
            "of.no.table": ("only_first", ""),
        }


@pytest.mark.parametrize("dialect", ["hf", "automodel", "megatron"])
@pytest.mark.parametrize("numeric", [False, True])
def test_one_changed_value_is_found_in_any_dialect(tmp_path: Path, dialect: str, *, numeric: bool) -> None:
    value = checkpoints.tensors()[GATE].copy()
    value[3, 5] += 1
    one, changed = stored(tmp_path / "one"), stored(tmp_path / "changed", **{GATE: value})
    two = tmp_path / "two"
    tx.convert(changed, two, to=dialect, sync=False)
    for a, b in [(one, two), (two, one)]:
        found = tx.diff(a, b, numeric=numeric)
        assert not found.equal
        (difference,) = found.differences
        assert difference.kind == "values"
        if numeric:
            assert difference.elements == 1
            assert difference.max_abs == pytest.approx(1, rel=0.02)
            assert "1 of" in difference.detail
    assert tx.diff(one, two).differences[0].name in tx.open(two)
    assert tx.diff(two, one).differences[0].name == GATE


@pytest.mark.parametrize("numeric", [False, True])
def test_padding_holds_nothing_of_a_model(tmp_path: Path, *, numeric: bool) -> None:
    """Rows that Megatron adds to the vocabulary are no difference, whatever they hold; a changed row of words is."""
    hub, ranks = stored(tmp_path / "hub"), tmp_path / "ranks"
    tx.convert(hub, ranks, to="safetensors:megatron", axes={"p": 24}, sync=False)
    name = "embedding.word_embeddings.weight"
    with tx.open(ranks) as written:
        arrays = {each: tensor.numpy().copy() for each, tensor in written.items()}
    words = len(checkpoints.tensors()[EMBED])
    assert len(arrays[name]) == words + 24
    arrays[name][words:] = 7
    padded = checkpoints.write(tmp_path / "padded", arrays, config=checkpoints.CONFIG)
    more = tmp_path / "more"
    tx.convert(hub, more, to="safetensors:megatron", axes={"p": 40}, sync=False)
    for a, b in [(hub, padded), (padded, hub), (padded, more), (more, padded)]:
        assert tx.diff(a, b, numeric=numeric).equal
    arrays[name][words - 1] += 1
    changed = checkpoints.write(tmp_path / "changed", arrays, config=checkpoints.CONFIG)
    for a, b in [(hub, changed), (changed, hub), (more, changed)]:
        (difference,) = tx.diff(a, b, numeric=numeric).differences
        assert (difference.name, difference.kind) == (EMBED, "values")


def test_differences_of_every_kind_are_told_by_name(tmp_path: Path) -> None:
    both = {"a": np.zeros(3, "f4")}
    one = {**both, "b": np.zeros((2, 3)), "c": np.zeros(2, "f4"), "d": np.zeros(1), "e": np.ones(2, "i8")}
    two = {**both, "b": np.zeros((3, 2)), "c": np.zeros(2, "i4"), "z": np.zeros(1), "e": np.zeros(2, "i8")}
    found = tx.diff(plain(tmp_path / "one", one), plain(tmp_path / "two", two), numeric=True)
    assert [(d.name, d.kind) for d in found.differences] == [
        ("b", "shape"),
        ("c", "dtype"),
        ("d", "only_first"),
        ("e", "values"),
        ("z", "only_second"),
    ]
    told = {d.name: d.detail for d in found.differences}
    assert "[2, 3]" in told["b"]
    assert "[3, 2]" in told["b"]
    assert "F32 and I32" in told["c"]
    assert (found.differences[3].elements, found.differences[3].max_abs) == (2, 1.0)
    assert found.compared == {"": 4}
    assert len(found.as_json()["differences"]) == 5


NAN = np.frombuffer(np.array([0x7FC00000, 0x7FC00001, 0xFFC00000], "<u4").tobytes(), "<f4")


@pytest.mark.parametrize(
    ("a", "b", "elements", "apart"),
    [
        (NAN[0], NAN[0], 0, 0.0),
        (NAN[0], NAN[1], 1, 0.0),
        (NAN[0], 1.0, 1, math.inf),
        (1.0, NAN[1], 1, math.inf),
        (math.inf, -math.inf, 1, math.inf),
        (0.0, -0.0, 1, 0.0),
        (3e38, -3e38, 1, 6e38),
    ],
)
def test_bits_and_distances_are_compared(tmp_path: Path, a: float, b: float, elements: int, apart: float) -> None:
    """NaN equals itself if its bits do; a NaN on one side only is infinitely far from anything."""
    one, two = (np.array([5, value, 7], "f4") for value in (a, b))
    found = tx.diff(plain(tmp_path / "one", {"x": one}), plain(tmp_path / "two", {"x": two}), numeric=True)
    assert found.equal == (elements == 0)
    if elements:
        assert found.differences[0].elements == elements
        assert found.differences[0].max_abs == pytest.approx(apart)


@pytest.mark.parametrize("kind", ["?", "i1", "u8", "f2", "f8", "c8", "bfloat16", "float8_e5m2"])
def test_distances_of_every_type(tmp_path: Path, kind: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, kind, kind))
    one = np.zeros(200_000, np.float32).astype(dtype)
    two = one.copy()
    two[[3, 100, 199_999]] = np.ones(3).astype(dtype)
    found = tx.diff(plain(tmp_path / "one", {"x": one}), plain(tmp_path / "two", {"x": two}), numeric=True)
    assert (found.differences[0].elements, found.differences[0].max_abs) == (3, 1.0)


@pytest.mark.parametrize("name", ["complex32", "complex64"])
def test_bits_of_complex_numbers_are_compared(tmp_path: Path, name: str) -> None:
    """A zero of the other sign is another tensor, equal NaN are none, and the distance is that of the numbers."""
    parts = torch.tensor([[0.0, 0.0], [math.nan, 1.0], [3.0, 4.0]], dtype=torch.float64)
    one = parts.to({"complex32": torch.half, "complex64": torch.float}[name])
    negative, moved = one.clone(), one.clone()
    negative[0, 1] = -0.0
    moved[2] = 0.0
    for file, values in (("one", one), ("negative", negative), ("moved", moved)):
        torch.save({"x": values.view(getattr(torch, name))}, tmp_path / f"{file}.pt")
    found = {
        file: tx.diff(tmp_path / "one.pt", tmp_path / f"{file}.pt", numeric=True).differences
        for file in ("one", "negative", "moved")
    }
    assert found["one"] == ()
    assert [(each.elements, each.max_abs) for each in found["negative"]] == [(1, 0.0)]
    assert [(each.elements, each.max_abs) for each in found["moved"]] == [(1, 5.0)]


def test_packed_types_are_compared_and_not_measured(tmp_path: Path) -> None:
    for folder, byte in (("one", b"\1"), ("two", b"\2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / files.FILE).write_bytes(files.made({"x": files.info("F4", [2], 0, 1)}, byte))
    (difference,) = tx.diff(tmp_path / "one", tmp_path / "two", numeric=True).differences
    assert (difference.kind, difference.elements, difference.max_abs) == ("values", None, None)


HALVES = st.lists(st.floats(width=16, allow_nan=False), min_size=1, max_size=40)


@given(a=HALVES, b=HALVES)
@law
def test_numbers_against_numpy(a: list[float], b: list[float], tmp_path_factory: pytest.TempPathFactory) -> None:
    length = min(len(a), len(b))
    one, two = (np.array(values[:length], "f2") for values in (a, b))
    folder = tmp_path_factory.mktemp("numbers")
    found = tx.diff(plain(folder / "one", {"x": one}), plain(folder / "two", {"x": two}), numeric=True)
    differing = one.view("u2") != two.view("u2")
    assert found.equal == (not differing.any())
    if differing.any():
        assert found.differences[0].elements == differing.sum()
        with np.errstate(invalid="ignore"):
            apart = np.abs(one.astype("f8") - two.astype("f8"))
        assert found.differences[0].max_abs == apart[differing].max()


def test_any_buffers_and_many_blocks(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    one = random.standard_normal((700, 900))
    two = one.copy()
    two[::7, 3] += 0.5
    a, b = plain(tmp_path / "one", {"x": one}), plain(tmp_path / "two", {"x": two})
    with tx.open(a) as first, tx.open(b) as second:
        seen: list[int] = []
        found = compare(first, second, numeric=True, limit=limits(3, 1_000_003), progress=seen.append)
    assert found.differences[0].elements == 100
    assert found.differences[0].max_abs == pytest.approx(0.5)
    assert sum(seen) == one.nbytes


def test_a_tie_stored_twice_is_the_one_that_the_dialect_stores(tmp_path: Path) -> None:
    """What `--to hf` leaves out as a copy is no difference; a copy that is none is one, and so is a lost original."""
    config = {**checkpoints.CONFIG, "tie_word_embeddings": True}
    held = checkpoints.tensors()
    twice = {**held, HEAD: held[EMBED].copy()}
    first = checkpoints.write(tmp_path / "first", twice, config=config)
    tx.convert(first, tmp_path / "second", to="hf", sync=False)
    assert HEAD not in checkpoints.read(tmp_path / "second")
    assert tx.verify(first, tmp_path / "second").equal
    assert tx.verify(tmp_path / "second", first).equal
    untied = checkpoints.write(tmp_path / "untied", {**held, HEAD: held[EMBED][::-1].copy()}, config=config)
    for pair in ((untied, tmp_path / "second"), (tmp_path / "second", untied)):
        (difference,) = tx.diff(*pair).differences
        assert (difference.kind, str(untied) in difference.detail) == ("copies", True)
    neither = {name: array for name, array in held.items() if name not in {HEAD, EMBED}}
    lost = checkpoints.write(tmp_path / "lost", neither, config=config)
    alone = checkpoints.write(tmp_path / "alone", {**neither, HEAD: held[EMBED]}, config=config)
    assert [d.name for d in tx.diff(alone, lost).differences] == [HEAD]
    assert {d.name for d in tx.diff(first, lost).differences} >= {EMBED}


def test_settings_of_the_first_are_not_those_of_the_second(tmp_path: Path) -> None:
    one = stored(tmp_path / "one")
    tx.convert(one, tmp_path / "two", to="megatron", sync=False)
    assert tx.diff(one, tmp_path / "two", dialect="hf", config=checkpoints.CONFIG).equal
    with tx.open(one) as first, tx.open(tmp_path / "two") as second:
        assert tx.verify(first, second).equal
        assert tx.diff(first, tmp_path / "two", family="qwen3_moe").equal
        assert first[GATE].tobytes(), "what the caller opened stays open"
        with pytest.raises(TypeError, match="already open"):
            tx.diff(first, second, family="qwen3_moe")
        with pytest.raises(TypeError, match="already open"):
            tx.convert(first, tmp_path / "x", to="hf", family="qwen3_moe")


# Number formats.


def test_other_encodings_differ_unless_values_are_compared(tmp_path: Path) -> None:
    """The same codes under two exponents, twice as large: other bits, other encodings, equal values."""
    codes, scale = quantized.blocks((128, 256))
    mine = {"a.weight": codes, "a.weight_scale_inv": scale, "b": np.arange(3.0)}
    one = quantized.store(tmp_path / "one", (mine, {"quantization_config": quantized.FP8}))
    values = quantized.dequantized(codes, scale).astype(np.float32)
    two = quantized.store(tmp_path / "two", ({"a.weight": values, "b": np.arange(3.0)}, {}))
    for a, b in ((one, two), (two, one)):
        (difference,) = tx.diff(a, b).differences
        assert (difference.name, difference.kind) == ("a.weight", "encoding")
        assert {"F32", "float8_block"} <= set(difference.detail.replace("(", " ").split())
        found = tx.diff(a, b, numeric=True)
        assert found.equal
        assert sum(found.compared.values()) == 2
        assert list(found.across.values()) == [1]
        assert found.as_json()["across"] == dict(found.across)
    assert tx.diff(one, one, numeric=True).equal


def test_distances_across_number_formats_are_those_of_the_values(tmp_path: Path) -> None:
    codes, scale = quantized.blocks((130, 200))
    codes = codes.copy()
    one = quantized.store(tmp_path / "one", ({"a.weight": codes, "a.weight_scale_inv": scale}, {}))
    values = quantized.dequantized(codes, scale).astype(np.float32)
    other = values.copy()
    other[::3, 5] += np.float32(0.25)
    other[129, 199] = 0
    two = quantized.store(tmp_path / "two", ({"a.weight": other}, {}))
    (difference,) = tx.diff(one, two, numeric=True).differences
    apart = values.astype("f8") - other.astype("f8")
    assert difference.elements == np.count_nonzero(apart)
    assert difference.max_abs == np.abs(apart).max()
    assert difference.rms == pytest.approx(np.sqrt((apart**2).mean()))
    assert difference.relative == pytest.approx(np.linalg.norm(apart) / np.linalg.norm(other.astype("f8")))


def test_types_are_compared_by_value_where_asked(tmp_path: Path) -> None:
    wide = np.array([[0.5, -0.0, np.nan, np.inf], [1, 2, 3, 4]], np.float32)
    for kind in ("f2", "f8", quantized.BF16):
        one = plain(tmp_path / f"{kind} one", {"x": wide})
        two = plain(tmp_path / f"{kind} two", {"x": wide.astype(kind)})
        assert [d.kind for d in tx.diff(one, two).differences] == ["dtype"]
        assert tx.diff(one, two, numeric=True).equal
        changed = wide.astype(kind)
        changed[1, 1], changed[0, 2] = 2.5, 0
        three = plain(tmp_path / f"{kind} three", {"x": changed})
        (difference,) = tx.diff(one, three, numeric=True).differences
        assert (difference.elements, difference.max_abs) == (2, np.inf)
    one, whole = (plain(tmp_path / n, {"x": x}) for n, x in (("one", wide), ("two", np.arange(8).reshape(2, 4))))
    (difference,) = tx.diff(one, whole, numeric=True).differences
    assert difference.kind == "dtype"


def test_one_encoding_in_two_conventions_differs_by_name_only(tmp_path: Path) -> None:
    codes, scale = quantized.blocks((128, 128))
    one = quantized.store(tmp_path / "one", ({"a.weight": codes, "a.weight_scale_inv": scale}, {}))
    section = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}}},
        "quant_method": "compressed-tensors", "format": "float-quantized"}  # fmt: skip
    two = quantized.store(
        tmp_path / "two", ({"a.weight": codes, "a.weight_scale": scale}, {"quantization_config": section})
    )
    (difference,) = tx.diff(one, two).differences
    assert difference.kind == "encoding"
    assert "deepseek" in difference.detail
    assert "compressed_tensors" in difference.detail
    found = tx.diff(one, two, numeric=True)
    assert found.equal
    assert list(found.across) == ["float8_block"]


OLDER = """
family grown
  axes l=layers f=inner d=width
  up : l f d
  down : l d f
  norm : l d
dialect hf
  layers.{l}.up = up[f d]
  layers.{l}.down = down[d f]
  layers.{l}.norm = norm[d]
  also blocks.{l}.up = up[f d]
  also layers.{l}.turned = down[f d]
  also norms = norm[l d]
"""


@pytest.mark.parametrize(("older", "to"), [(("turned",), "safetensors:hf"), (("blocks", "turned", "norms"), "dcp:hf")])
def test_older_names_of_a_dialect_are_the_same_tensors(older: tuple[str, ...], to: str, tmp_path: Path) -> None:
    """As transformers stores some models otherwise than their makers: what is written has the newer names."""
    rules = tmp_path / "grown.rules"
    rules.write_text(OLDER)
    values: dict[str, npt.NDArray[Any]] = {name: np.arange(24, dtype=np.float32).reshape(2, *shape) * (i + 2)
              for i, (name, shape) in enumerate({"up": (4, 3), "down": (3, 4)}.items())}  # fmt: skip
    values["norm"] = np.arange(6, dtype=np.float32).reshape(2, 3) + 7
    held: dict[str, npt.NDArray[Any]] = {}
    for layer in range(2):
        held[f"{'blocks' if 'blocks' in older else 'layers'}.{layer}.up"] = values["up"][layer]
        down = values["down"][layer]
        held |= {f"layers.{layer}.turned": down.T.copy()} if "turned" in older else {f"layers.{layer}.down": down}
        held |= {} if "norms" in older else {f"layers.{layer}.norm": values["norm"][layer]}
    held |= {"norms": values["norm"]} if "norms" in older else {}
    config = {"model_type": "grown", "layers": 2, "inner": 4, "width": 3}
    source = checkpoints.write(tmp_path / "source", held, config=config)
    options: dict[str, Any] = {"rules": rules, "family": "grown", "config": config}
    report = tx.convert(source, tmp_path / "out", to=to, verify=True, sync=False, **options)
    assert report.kept == ()
    with tx.open(tmp_path / "out", **options) as out:
        assert {n: t.read().tolist() for n, t in out.items()} == {
            f"layers.{layer}.{name}": value[layer].tolist() for name, value in values.items() for layer in range(2)
        }
    assert tx.verify(source, tmp_path / "out", **options)
    assert tx.verify(tmp_path / "out", source, **options)
    held[min(held)] = held[min(held)] + 1
    wrong = checkpoints.write(tmp_path / "wrong", held, config=config)
    assert not tx.verify(wrong, tmp_path / "out", **options)
