"""The page of a finished conversion: its numbers are those of the files, of numpy, and of `convert --json`."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import transaxle as tx
from tests.checkpoints import CONFIG, Tensors, shapes, tensors, tiny, write
from tests.cli.conftest import here, transaxle  # noqa: F401 - fixtures
from tests.cli.running import REFUSED, USAGE, Transaxle
from tests.oracles import option_sources
from tests.reports.embedded import data, table

BF16 = np.dtype(ml_dtypes.bfloat16)


def single() -> Tensors:
    """The tiny model in single precision."""
    random = np.random.default_rng(3)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes().items()}


def test_numbers_are_those_of_the_command_and_of_the_files(tmp_path: Path, transaxle: Transaxle) -> None:  # noqa: F811
    held = single() | {"extra.0.weight": np.ones(3, np.float32), "extra.1.weight": np.ones(3, np.float32)}
    write(tmp_path / "ck", held, config=CONFIG)
    (tmp_path / "ck" / "notes.txt").write_text("kept")
    command = ("convert", "ck", "out", "--to", "torchtitan", "--shard-size", "20kB", "--dtype", "bf16")
    told = transaxle(*command, "--report", "page.html", "--json").json
    found = data(tmp_path / "page.html")
    facts = found["facts"]
    assert facts == {key: told[key] for key in facts if key != "recoded"} | {"recoded": len(told["recoded"])}
    written = {file.name: load_file(file) for file in (tmp_path / "out").glob("*.safetensors")}
    said = f"{len(told['recoded'])} tensors cast; {sum(each['exact'] for each in told['recoded'])} exactly."
    assert said in (tmp_path / "page.html").read_text("utf-8")
    rows = {row["file"]: row for row in table(found, "times")}
    assert len(rows) > 1
    assert {file: row["tensors"] for file, row in rows.items()} == {
        file: sum(each.nbytes for each in inside.values()) for file, inside in written.items()
    }
    assert min(row["from second"] for row in rows.values()) == 0
    for row in rows.values():
        assert 0 <= row["from second"] <= row["to second"] <= told["seconds"]
        assert row["seconds"] == row["to second"] - row["from second"]
        assert row["bytes per second"] == pytest.approx(row["tensors"] / row["seconds"], abs=1)
    bars = found["figures"]["times"]["data"]["series"][0]["bars"]
    assert dict(bars) == {file: row["bytes per second"] for file, row in rows.items()}
    others = {(row["result"], row["name"]) for row in table(found, "others")}
    assert ("name unchanged: no rule in the target dialect", "extra.[0-1].weight") in others
    assert {name for what, name in others if what == "file copied"} == set(told["carried"])
    assert {"flow", "map"} & found["figures"].keys() == {"flow"}


def test_errors_are_those_of_numpy(tmp_path: Path) -> None:
    """Of values cast to bf16: the largest, the largest RMS of a tensor, and how many tensors were exact."""
    held = single()
    for layer in (0, 1):
        held[f"model.layers.{layer}.input_layernorm.weight"][:] = 0.5
    write(tmp_path / "ck", held, config=CONFIG)
    report = tx.convert(tmp_path / "ck", tmp_path / "out", to="hf", dtype="bf16", sync=False)
    path = tx.report(report, tmp_path / "page.html")
    rows = table(data(path), "recoded")
    away = {name: each.astype(np.float64) - each.astype(BF16).astype(np.float64) for name, each in held.items()}
    for part in ("q_proj", "down_proj", "input_layernorm"):
        (row,) = (row for row in rows if part in row["name"])
        mine = [distance for name, distance in away.items() if part in name]
        assert (row["action"], row["tensors"]) == ("cast", len(mine))
        assert row["max |Δ|"] == pytest.approx(max(np.abs(each).max() for each in mine), rel=1e-6)
        assert row["largest RMS of Δ"] == pytest.approx(max(np.sqrt(np.square(e).mean()) for e in mine), rel=1e-6)
        assert row["exact"] == sum(not each.any() for each in mine)
    text = path.read_text("utf-8")
    assert "Not synced" in text
    assert "times" not in data(path)["figures"]
    with pytest.raises(TypeError, match="already done"):
        tx.report(report, tmp_path / "other.html", family="llama")


def test_averaged_and_cast_tensors_have_two_rows(tmp_path: Path, transaxle: Transaxle) -> None:  # noqa: F811
    option_sources.write("replicas", "llama", tmp_path / "run")
    command = ("convert", "run", "out", "--to", "hf", "--average", "--dtype", "bf16", "--report", "page.html", "--all")
    printed = transaxle(*command).out
    rows = table(data(tmp_path / "page.html"), "recoded")
    norms = {row["action"]: row["tensors"] for row in rows if row["name"].endswith("input_layernorm.weight")}
    assert norms == {"averaged": 2, "cast": 2}
    assert "5 tensors averaged" in printed
    assert "21 tensors cast" in printed


def test_a_verification_is_shown(tmp_path: Path) -> None:
    report = tx.convert(tiny(tmp_path / "ck"), tmp_path / "out", to="megatron", verify=True)
    text = tx.report(report, tmp_path / "page.html").read_text("utf-8")
    assert "<strong>Verified.</strong>" in text
    assert "Not synced" not in text


def test_refusals_are_those_of_the_command(tmp_path: Path, transaxle: Transaxle) -> None:  # noqa: F811
    held: dict[str, Any] = dict(tensors())
    for name in ("model.layers.0.mlp.experts.3.down_proj.weight", "model.layers.1.self_attn.q_proj.weight"):
        del held[name]
    write(tmp_path / "ck", held, config=CONFIG)
    refused = transaxle("convert", "ck", "out", "--to", "torchtitan", "--report", "page.html", "--all")
    assert refused.code == REFUSED
    assert not (tmp_path / "out").exists()
    page = (tmp_path / "page.html").read_text("utf-8").replace("<br>", "\n")
    text = " ".join(html.unescape(page.replace("<bdi>", "").replace("</bdi>", "")).split())
    refusals = tx.plan(tmp_path / "ck", tmp_path / "out", to="torchtitan").refusals
    assert len(refusals) >= 2
    printed = " ".join(refused.err.split())
    for each in refusals:
        assert f"<strong>{each.code}.</strong>" in text
        for said in (each.where.tensor, each.message, each.hint):
            line = " ".join((said or "").split())
            assert line in text
            assert line in printed
    assert data(tmp_path / "page.html")["kind"] == "plan"


def test_a_page_that_cannot_be_written_is_reported_first(tmp_path: Path, transaxle: Transaxle) -> None:  # noqa: F811
    tiny(tmp_path / "ck")
    (tmp_path / "page.html").write_text("mine")
    refused = transaxle("convert", "ck", "out", "--to", "hf", "--report", "page.html")
    assert (refused.code, "already exists" in refused.err) == (USAGE, True)
    assert not (tmp_path / "out").exists()
    nowhere = transaxle("convert", "ck", "out", "--to", "hf", "--report", "missing/page.html")
    assert (nowhere.code, "nothing was written" in nowhere.err, (tmp_path / "out").exists()) == (4, True, False)
    done = transaxle("convert", "ck", "out", "--to", "hf", "--report", "other.html")
    assert done.out.rstrip().endswith("shown in other.html")
