"""The page of a comparison: its numbers are those of numpy, and of `transaxle diff --json`."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import transaxle as tx
from tests.checkpoints import CONFIG, SIZES, Tensors, tensors, tiny, write
from tests.cli.running import USAGE, Transaxle
from tests.engine import quantized
from tests.reports.embedded import data, table

DEEP = {**SIZES, "num_hidden_layers": 4}
NORM = "model.layers.2.input_layernorm.weight"
GONE = "model.layers.3.mlp.experts.7.up_proj.weight"
EXTRA = ("extra.0.weight", "extra.1.weight")
PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "q_proj": "q", "k_proj": "k", "v_proj": "v"}
"""Segment of a name -> logical tensor."""


def changed() -> tuple[Tensors, Tensors]:
    """Two models: layers 1 to 3 differ ever more, but not layer 0 and not the norms."""
    first, second = tensors(DEEP), {}
    random = np.random.default_rng(1)
    for name, values in first.items():
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else 0
        noise = random.standard_normal(values.shape) * (random.random(values.shape) < layer / 4) * 10.0 ** (layer - 4)
        still = "norm" in name
        second[name] = values if still else (values.astype(np.float64) + noise).astype(values.dtype)
    first[NORM] = first[NORM].copy()
    first[NORM][0], second[NORM] = 0.0, first[NORM].copy()
    second[NORM][0] = -0.0
    del second[GONE]
    return first, second | {name: np.ones(3, np.float32) for name in EXTRA}


def pair(folder: Path) -> tuple[Path, Path]:
    (first, second), config = changed(), {**CONFIG, **DEEP}
    return write(folder / "a", first, config=config), write(folder / "b", second, shards=3, config=config)


def _wide(values: Any) -> Any:
    return np.asarray(values).astype(np.float64)


@pytest.mark.parametrize("dialect", ["hf", "torchtitan", "megatron"])
def test_cells_are_those_of_numpy(dialect: str, tmp_path: Path) -> None:
    """Norms over the experts of a layer, elements that differ, and layers without a difference, in three dialects."""
    first, second = changed()
    a, b = pair(tmp_path)
    if dialect != "hf":
        complete = {name: first[name] if name == GONE else second[name] for name in first}
        write(tmp_path / "whole", complete, config={**CONFIG, **DEEP})
        b, second = tmp_path / dialect, complete
        tx.convert(tmp_path / "whole", b, to=dialect, sync=False)
    found = data(tx.report(tx.diff(a, b, numeric=True), tmp_path / "page.html"))
    expected: dict[tuple[str, int], list[Any]] = defaultdict(list)
    for name in set(first) & set(second):
        segments = name.split(".")
        component = PARTS.get(segments[-2])
        if component is not None:
            expected[component, int(segments[2])].append((first[name], second[name]))
    rows = {(row["tensor"], row["layer"]): row for row in table(found, "cells")}
    together = {"gate": "gate, up", "up": "gate, up", "q": "q, k, v", "k": "q, k, v", "v": "q, k, v"}
    if dialect == "megatron":
        merged: dict[tuple[str, int], list[Any]] = defaultdict(list)
        for (component, layer), pairs in expected.items():
            merged[together.get(component, component), layer] += pairs
        expected = merged
    assert expected
    for key, pairs in expected.items():
        x, y = (np.concatenate([_wide(each[side]).reshape(-1) for each in pairs]) for side in (0, 1))
        row = rows[key]
        assert row["relative"] == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(y), rel=1e-9)
        assert (row["changed"], row["elements"]) == (np.count_nonzero(x != y), x.size)
        assert row["max |Δ|"] == np.abs(x - y).max()
        assert (row["differ"] == 0) == np.array_equal(x, y)
    assert {key[1] for key in expected if not rows[key]["differ"]} >= {0}
    cells = found["figures"]["map"]["data"]
    for column, row, state, (relative, share), _ in cells["cells"]:
        layer = cells["columns"][column]
        told = rows[cells["rows"][row], int(layer) if layer.isdigit() else layer]
        assert (state == "equal") == (told["differ"] == 0)
        assert (relative, share) == (told["relative"], told["changed"] / told["elements"])
    assert len(cells["cells"]) == len(rows)


def test_equal_values_with_other_bits_differ(tmp_path: Path) -> None:
    """0.0 and -0.0: one changed element, no distance, and no cell that looks equal."""
    found = data(tx.report(tx.diff(*pair(tmp_path), numeric=True), tmp_path / "page.html"))
    (row,) = (row for row in table(found, "cells") if row["tensor"] == "ln1" and row["layer"] == 2)
    assert (row["changed"], row["relative"], row["differ"]) == (1, 0.0, 1)
    drawn = found["figures"]["map"]["data"]
    at = drawn["columns"].index("2"), drawn["rows"].index("ln1")
    assert [state for column, row, state, *_ in drawn["cells"] if (column, row) == at] == [""]
    assert table(found, "histogram-0")[0] == {"from": 0.0, "below": 0.0, "elements": 1}


def test_bars_count_elements_by_the_powers_of_two(tmp_path: Path) -> None:
    first, second = changed()
    found = data(tx.report(tx.diff(*pair(tmp_path), numeric=True), tmp_path / "page.html"))
    common = [name for name in first if name in second]
    x, y = (np.concatenate([_wide(side[name]).reshape(-1) for name in common]) for side in (first, second))
    distance = np.abs(x - y)[x != y]
    for label, values in (("histogram-0", distance), ("histogram-1", distance / np.abs(y[x != y]))):
        rows = table(found, label)
        assert sum(row["elements"] for row in rows) == len(values) + 1  # and -0.0
        for row in rows[1:]:
            inside = (float(row["from"]) <= values) & (values < float(row["below"]))
            assert row["elements"] == np.count_nonzero(inside)
    series = found["figures"]["histogram"]["data"]["series"]
    assert [[bar[2] for bar in each["bars"]] for each in series] == [
        [row["elements"] for row in table(found, f"histogram-{at}")] for at in (0, 1)
    ]


def test_numbers_are_those_of_the_command(tmp_path: Path, transaxle: Transaxle) -> None:
    pair(tmp_path)
    told = transaxle("diff", "a", "b", "--report", "page.html", "--json")
    assert told.code == 1
    found = data(tmp_path / "page.html")
    for key, value in found["facts"].items():
        assert value == (len(told.json[key]) if key == "differences" else told.json[key])
    measured = {each["name"]: each for each in told.json["differences"] if each["kind"] == "values"}
    rows = table(found, "worst")
    assert [row["relative"] for row in rows] == sorted((row["relative"] for row in rows), reverse=True)
    assert {row["name"] for row in rows} == measured.keys()
    for row in rows:
        each = measured[row["name"]]
        assert (row["changed"], row["relative"], row["max |Δ|"], row["RMS of Δ"]) == (
            each["elements"], each["relative"], each["max_abs"], each["rms"],
        )  # fmt: skip
    alone = {(row["side"], row["name"], row["names"]) for row in table(found, "alone")}
    assert alone == {("only in A", GONE, 1), ("only in B", "extra.[0-1].weight", 2)}
    again = transaxle("diff", "a", "b", "--report", "page.html")
    assert (again.code, "already exists" in again.err) == (USAGE, True)
    assert transaxle("diff", "a", "b", "--report", "other.html").out.rstrip().endswith("shown in other.html")


def test_equal_checkpoints_have_no_colour(tmp_path: Path) -> None:
    a, b = tiny(tmp_path / "a"), tiny(tmp_path / "b", shards=2)
    page = tx.report(tx.diff(a, b, numeric=True), tmp_path / "page.html")
    found = data(page)
    assert {state for _, _, state, *_ in found["figures"]["map"]["data"]["cells"]} == {"equal"}
    assert found["facts"]["equal"] is True
    assert table(found, "worst") == []
    assert "histogram" not in found["figures"]
    assert "<p>Nothing.</p>" in page.read_text("utf-8")


def _steps(values: Any, scale: Any, tile: int) -> Any:
    """The distance of each code from the next larger one times its scale, from the definition of E4M3."""
    spread = np.repeat(np.repeat(scale.astype(np.float64), tile, 0), tile, 1)[: values.shape[0], : values.shape[1]]
    codes = np.abs(values / spread)
    grid = np.unique(np.abs(np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)))
    nearest = np.abs(codes[..., None] - grid).argmin(-1)
    above = np.append(np.diff(grid), 32.0)[nearest]
    return above * spread, spread


def test_differences_from_codes_are_in_steps(tmp_path: Path) -> None:
    """A bf16 model and its float8 twin, either way round: no weight is more than half a step away, but one is."""
    held, config = quantized.llama(d=256, f=384, g=2, r=2, head=128, layers=2)
    quantized.store(tmp_path / "fp8", (held, config))
    tx.convert(tmp_path / "fp8", tmp_path / "plain", to="hf", decode="fp32", sync=False)
    name = "model.layers.1.mlp.down_proj.weight"
    weights = {key: np.asarray(tensor.read()) for key, tensor in tx.open(tmp_path / "plain").items()}
    steps, spread = _steps(_wide(weights[name]), held[name + quantized.SCALE], 128)
    moved = _wide(weights[name]) + 0.4 * steps
    moved[3, 200] += 2.5 * steps[3, 200]
    moved = moved.astype(np.float32)
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    write(tmp_path / "moved", {**weights, name: moved}, config=config)
    for a, b in (("moved", "fp8"), ("fp8", "moved")):
        compared = tx.diff(tmp_path / a, tmp_path / b, numeric=True)
        found = data(tx.report(compared, tmp_path / f"{a}.html"))
        rows = {row["tensor"]: row for row in table(found, "steps")}
        row = rows["down"]
        distance = np.abs(_wide(moved) - _wide(weights[name]))
        assert row["tensors"] == 2
        assert row["codes of"] == str(tmp_path / "fp8")
        assert row["most steps"] == pytest.approx((distance / steps).max(), rel=1e-9)
        assert row["most |Δ| / scale"] == pytest.approx((distance / spread).max(), rel=1e-9)
        size = moved.size
        assert (row["equal"], row["to half a step"], row["to one"], row["to two"], row["more"]) == (
            size + np.count_nonzero(distance == 0), np.count_nonzero(distance) - 1, 0, 0, 1,
        )  # fmt: skip
        assert rows["gate"]["equal"] == 2 * 256 * 384
        assert found["facts"]["across"]


def test_names_that_no_table_reads_have_cells_too(tmp_path: Path) -> None:
    held = {f"blocks.{layer}.w": np.full((3, 4), layer, np.float32) for layer in range(5)} | {"head": np.ones(2)}
    write(tmp_path / "a", held)
    write(tmp_path / "b", held | {"blocks.3.w": held["blocks.3.w"] + 1})
    found = data(tx.report(tx.diff(tmp_path / "a", tmp_path / "b", numeric=True), tmp_path / "page.html"))
    drawn = found["figures"]["map"]["data"]
    assert (sorted(drawn["rows"]), drawn["columns"]) == (["blocks.*.w", "head"], ["no layer", "0", "1", "2", "3", "4"])
    differing = [row for row in table(found, "cells") if row["differ"]]
    assert [(row["tensor"], row["layer"], row["changed"]) for row in differing] == [("blocks.*.w", 3, 12)]


def test_unmeasured_tensors_are_listed(tmp_path: Path) -> None:
    write(tmp_path / "a", {"x": np.ones((2, 3), np.float32), "y": np.ones(3, np.int8), "z": np.full(2, np.nan)})
    write(tmp_path / "b", {"x": np.ones((3, 2), np.float32), "y": np.ones(3, np.int16), "z": np.ones(2)})
    page = tx.report(tx.diff(tmp_path / "a", tmp_path / "b", numeric=True), tmp_path / "page.html")
    found = data(page)
    assert {(row["kind"], row["name"]) for row in table(found, "unmeasured")} == {("shape", "x"), ("dtype", "y")}
    (row,) = table(found, "worst")
    assert (row["relative"], row["max |Δ|"]) == ("Infinity", "Infinity")
    assert "Shapes differ" in page.read_text("utf-8")
    json.loads(json.dumps(found, allow_nan=False))


def test_a_comparison_without_numbers_has_no_report(tmp_path: Path) -> None:
    tiny(tmp_path / "a")
    compared = tx.diff(tmp_path / "a", tmp_path / "a")
    with pytest.raises(TypeError, match="numeric=True"):
        tx.report(compared, tmp_path / "page.html")
    measured = tx.diff(tmp_path / "a", tmp_path / "a", numeric=True)
    with pytest.raises(TypeError, match="already made"):
        tx.report(measured, tmp_path / "page.html", family="llama")
    assert not (tmp_path / "page.html").exists()
