"""Values of a checkpoint in its page: every number is what numpy computes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import transaxle as tx
from tests.checkpoints import CONFIG, GATE, tensors, tiny, write
from tests.cli.conftest import here, transaxle  # noqa: F401 - fixtures
from tests.cli.running import Transaxle
from tests.engine import quantized
from tests.reports.embedded import data, table
from transaxle.engine.values import measure_values
from transaxle.move.workers import limits

KINDS = ("float16", "float32", "float64", "int8", "int16", "int32", "uint8", "bool", "bfloat16", "float8_e4m3fn")


def _rows(page: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in table(data(page), "tensor-values")}


def _check(row: dict[str, Any], values: np.ndarray) -> None:
    wide = values.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    assert (row["elements"], row["zeros"]) == (wide.size, np.count_nonzero(wide == 0))
    assert (row["NaN"], row["infinite"]) == (np.count_nonzero(np.isnan(wide)), np.count_nonzero(np.isinf(wide)))
    if not finite.size:
        assert (row["min"], row["max"], row["mean"], row["RMS"]) == ("NaN",) * 4
        return
    assert (row["min"], row["max"]) == (finite.min(), finite.max())
    assert row["mean"] == pytest.approx(finite.mean(), rel=1e-9, abs=1e-12)
    assert row["RMS"] == pytest.approx(np.sqrt(np.square(finite).mean()), rel=1e-9)


@pytest.mark.parametrize("shards", [1, 3])
def test_numbers_are_those_of_numpy(shards: int, tmp_path: Path) -> None:
    source = tiny(tmp_path / "ck", shards=shards)
    page = tx.report(source, tmp_path / "page.html", values=True)
    rows, held = _rows(page), tensors()
    assert rows.keys() == held.keys()
    for name, values in held.items():
        _check(rows[name], values)
    drawn = data(page)["figures"]["values"]["data"]
    for column, row, state, (largest, rms), _ in drawn["cells"]:
        if (drawn["rows"][row], drawn["columns"][column]) == ("down", "1"):
            mine = [v.astype(np.float64) for n, v in held.items() if "layers.1." in n and "down_proj" in n]
            assert largest == max(np.abs(each).max() for each in mine)
            assert rms == pytest.approx(np.sqrt(np.mean([np.square(each).mean() for each in mine])))
            assert state == ""
            break
    else:
        pytest.fail("no such cell")
    measure = drawn["measures"][0]
    assert len(measure["labels"]) == len(measure["bounds"]) + 1 <= 6


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_and_special_values(kind: str, tmp_path: Path) -> None:
    """NaN, infinite, zeros of both signs, empty tensors, no dims, all NaN."""
    own = np.dtype(getattr(ml_dtypes, kind, None) or kind)
    random = np.random.default_rng(2)
    wide = random.integers(0, 100, (37, 5)).astype(np.float64)
    odd = wide.copy()
    odd[0, :3], odd[1, 0] = (math.nan, math.inf, -math.inf), -0.0
    floats = own.kind in "fV"
    values = (odd if floats else wide).astype(own)
    held = {"a": values, "none": np.zeros((0, 3), own), "one": np.ones((), own)}
    held |= {"nans": np.full((2, 2), math.nan, own)} if floats else {}
    if kind in {"bfloat16", "float8_e4m3fn"}:
        import torch
        from safetensors.torch import save_file

        types = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
        codes = {name: np.asarray(each).view(f"u{own.itemsize}") for name, each in held.items()}
        raw = {name: torch.from_numpy(each).view(types[kind]) for name, each in codes.items()}
        (tmp_path / "ck").mkdir()
        save_file(raw, tmp_path / "ck" / "model.safetensors")
    else:
        write(tmp_path / "ck", held)
    rows = _rows(tx.report(tmp_path / "ck", tmp_path / "page.html", values=True))
    for name, each in held.items():
        _check(rows[name], each)


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_special_values_are_listed_as_unusual(kind: str, tmp_path: Path) -> None:
    """It comes before everything else; without `values` the page says that nobody looked."""
    held: dict[str, np.ndarray] = {"extra.empty": np.zeros((0, 4), np.float32)}
    for number, odd in enumerate(([], [math.nan], [math.inf, -math.inf, math.nan], [math.inf] * 3)):
        values = np.arange(20, dtype=np.float64)
        values[3 : 3 + len(odd)] = odd
        held[f"w{number}"] = values.astype(getattr(ml_dtypes, kind, None) or kind).reshape(4, 5)
    write(tmp_path / "ck", held)
    page = tx.report(tmp_path / "ck", tmp_path / "page.html", values=True).read_text("utf-8")
    first, second, third = page.split("<li><strong>")[1:4]
    assert first.startswith("NaN values.</strong> <bdi>2 elements of 2 tensors, the most in w1: 1 of 20.")
    assert second.startswith("Infinite values.</strong> <bdi>5 elements of 2 tensors, the most in w3: 3 of 20.")
    assert third.startswith("No table")
    assert "Values were not read" not in page
    unread = tx.report(tmp_path / "ck", tmp_path / "unread.html").read_text("utf-8")
    assert "Values were not read; --values" in unread
    assert "NaN values" not in unread


def test_channels_that_stand_out(tmp_path: Path) -> None:
    """Of bf16 and of single precision, with a NaN in one of them; blocks of a few rows."""
    random = np.random.default_rng(4)
    values = random.standard_normal((3000, 96)).astype(np.float32)
    values[:, 7] *= 30
    values[5, 50] = 400
    values[9, 60] = math.nan
    held = {"single": values, "half": values.astype(ml_dtypes.bfloat16), "even": np.ones((8, 8), np.float32)}
    write(tmp_path / "ck", held)
    with tx.open(tmp_path / "ck") as checkpoint:
        for memory in (None, "2MiB"):
            found = measure_values(checkpoint, limits(2, memory)).tensors
            for name in ("single", "half"):
                absolute = np.abs(held[name].astype(np.float64))
                largest = np.where(np.isfinite(absolute), absolute, 0).max(0)
                each = found[name]
                assert each.outliers == (50, 7)
                assert each.channels == 96
                assert each.outlier_ratio == pytest.approx(largest.max() / np.median(largest))
            assert found["even"].outliers == ()
    page = data(tx.report(tmp_path / "ck", tmp_path / "page.html", values=True))
    assert {row["name"]: row["which, the largest first"] for row in table(page, "channels")} == {
        "half": "50, 7",
        "single": "50, 7",
    }


@pytest.mark.parametrize("name", ["complex32", "complex64", "complex128"])
def test_complex_numbers_are_not_measured(tmp_path: Path, name: str) -> None:
    parts = {"complex32": torch.half, "complex64": torch.float, "complex128": torch.double}[name]
    file = tmp_path / "one.pt"
    torch.save({"x": torch.randn(3, 2).to(parts).view(getattr(torch, name)), "w": torch.ones(2)}, file)
    with tx.open(file) as checkpoint:
        found = measure_values(checkpoint, limits(1))
    assert (list(found.tensors), found.unmeasured) == (["w"], ("x",))


def test_quantized_tensors_are_decoded(tmp_path: Path) -> None:
    held, config = quantized.llama(d=256, f=384, g=2, r=2, head=128, layers=2)
    quantized.store(tmp_path / "fp8", (held, config))
    rows = _rows(tx.report(tmp_path / "fp8", tmp_path / "page.html", values=True))
    name = "model.layers.1.mlp.down_proj.weight"
    exact = quantized.dequantized(held[name], held[name + quantized.SCALE])
    assert rows[name]["max"] == pytest.approx(exact.max(), rel=1e-6)
    assert rows[name]["RMS"] == pytest.approx(np.sqrt(np.square(exact).mean()), rel=1e-6)
    assert name + quantized.SCALE not in rows


def test_the_command_has_it(tmp_path: Path, transaxle: Transaxle) -> None:  # noqa: F811
    held = dict(tensors())
    held[GATE] = held[GATE].copy()
    held[GATE][0, 0] = math.nan
    write(tmp_path / "ck", held, config=CONFIG)
    assert transaxle("report", "ck", "--values").code == 0
    found = data(tmp_path / "ck.html")
    assert table(found, "tensor-values")[0]["name"] == GATE  # what has NaN comes first
    assert "values" not in data(tx.report(tmp_path / "ck", tmp_path / "plain.html"))["figures"]
    with pytest.raises(TypeError, match="for a checkpoint"):
        tx.report(tx.plan(tmp_path / "ck", tmp_path / "out", to="hf"), tmp_path / "plan.html", values=True)
