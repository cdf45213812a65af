"""The page of a checkpoint, with its values or refused: its numbers are those of the files, numpy and the command."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import transaxle as tx
from tests.checkpoints import CONFIG, GATE, SIZES, read, shapes, tensors, tiny, write
from tests.cli.running import MACHINE, REFUSED, USAGE, Transaxle
from tests.engine import quantized
from tests.formats.dcp import test_quantized_chunks as chunks
from tests.live.refusals import refused
from tests.oracles.te_pickles import blockwise, float8
from tests.reports.embedded import data, leaf_bytes, parts, table
from transaxle.engine.values import measure_values
from transaxle.errors import Refused
from transaxle.move.workers import limits
from transaxle.reports import checkpoint_page, html_page

HOSTILE = {
    "</script><script>document.title='x'</script>": 3,
    "<img src=x onerror=alert(1)>": 4,
    "\"quotes\" 'and' `ticks` & {{ braces }}": 5,
    "\u202egnp.tier\u2066 bidi": 6,
    "long." * 800: 7,
    "<!--": 8,
    "layers.3.=cmd|' /C calc'!A0,\r\n": 9,
}
"""Names that somebody may have written into a file -> elements."""


def test_numbers_are_those_of_the_files(tmp_path: Path) -> None:
    """Counted with numpy and nothing of ours: totals, rules, types, files, and every leaf of the treemap."""
    source = tiny(tmp_path / "source", shards=3)
    found = data(tx.report(source, tmp_path / "page.html"))
    held = read(source)
    nbytes = sum(each.nbytes for each in held.values())
    assert found["facts"]["bytes"] == found["figures"]["bytes"]["data"]["bytes"] == nbytes
    assert found["facts"]["parameters"] == sum(each.size for each in held.values())
    assert sum(leaf_bytes(found).values()) == nbytes
    assert len(leaf_bytes(found)) == len(held)
    rows = table(found, "layout")
    assert sum(row["tensors"] for row in rows) == len(held)
    (down,) = (row for row in rows if row["tensor"] == "down")
    mine = {name: each for name, each in held.items() if name.endswith("down_proj.weight")}
    assert down["rule"] == "model.layers.{l}.mlp.experts.{e}.down_proj.weight = down[d f]"
    assert (down["tensors"], down["bytes"]) == (len(mine), sum(each.nbytes for each in mine.values()))
    assert (down["indices"], down["shape"]) == ("l 0-1  e 0-7", "16 x 12")
    assert down["example"] in mine
    for row in table(found, "files"):
        inside = load_file(source / row["file"]).values() if row["file"].endswith(".safetensors") else ()
        assert (row["tensors"], row["of tensors"]) == (len(inside), sum(each.nbytes for each in inside))
        assert row["size"] == (source / row["file"]).stat().st_size


def test_numbers_are_those_of_info(tmp_path: Path, transaxle: Transaxle) -> None:
    tiny(tmp_path / "ck")
    told = transaxle("info", "ck", "--json").json
    written = transaxle("report", "ck", "--json").json
    assert written == {"path": "ck.html", "bytes": (tmp_path / "ck.html").stat().st_size}
    found = data(tmp_path / "ck.html")
    assert found["facts"] == {key: told[key] for key in found["facts"]}
    assert {row["type"]: row["bytes"] for row in table(found, "dtypes")} == {
        code: each["bytes"] for code, each in told["dtypes"].items()
    }
    assert {row["axis"]: row["size"] for row in table(found, "axes")} == told["axes"]


def test_encoded_tensors_are_apart_from_their_scales_and_decoded(tmp_path: Path) -> None:
    held, config = quantized.llama(d=256, f=384, g=2, r=2, head=128, layers=2)
    quantized.store(tmp_path / "fp8", (held, config))
    page = tx.report(tmp_path / "fp8", tmp_path / "page.html", values=True)
    found, values = data(page), _rows(page)
    rows = {row["tensor"]: row for row in table(found, "layout")}
    codes, scales = rows["down (codes, float8_block)"], rows["down (scale, float8_block)"]
    assert (codes["type"], codes["bytes"]) == ("F8_E4M3", 2 * 256 * 384)
    assert (scales["tensors"], scales["bytes"]) == (2, 2 * 2 * 3 * 4)
    assert sum(leaf_bytes(found).values()) == sum(each.nbytes for each in held.values())
    name = "model.layers.1.mlp.down_proj.weight"
    exact = quantized.dequantized(held[name], held[name + quantized.SCALE])
    assert values[name]["max"] == pytest.approx(exact.max(), rel=1e-6)
    assert values[name]["RMS"] == pytest.approx(np.sqrt(np.square(exact).mean()), rel=1e-6)
    assert name + quantized.SCALE not in values


def test_optimizer_states_are_apart_from_weights(tmp_path: Path) -> None:
    held: dict[str, Any] = dict(tensors())
    held |= {f"optim/{name}/exp_avg": each.astype(np.float32) for name, each in tensors().items()}
    found = data(tx.report(write(tmp_path / "source", held, config=CONFIG), tmp_path / "page.html"))
    rows = {row["tensor"]: row["bytes"] for row in table(found, "layout")}
    states = [each.nbytes for name, each in held.items() if "q_proj" in name and name.endswith("/exp_avg")]
    assert rows["q · exp_avg"] == sum(states) == 2 * rows["q"]
    assert {group["slot"] for group in found["figures"]["bytes"]["data"]["groups"]} == {"", "exp_avg"}


def test_names_that_no_table_reads_are_folded_by_their_numbers(tmp_path: Path) -> None:
    held = {f"blocks.{layer}.w": np.ones((3, 4), np.float32) for layer in range(12)}
    page = tx.report(write(tmp_path / "source", held), tmp_path / "page.html")
    (row,) = table(data(page), "layout")
    assert (row["rule"], row["indices"], row["tensors"], row["bytes"]) == ("blocks.*.w", "0-11", 12, 12 * 48)
    assert "No table reads these names." in page.read_text("utf-8")


def test_unusual_tensors(tmp_path: Path) -> None:
    changed: dict[str, Any] = dict(tensors())
    del changed["model.layers.1.mlp.experts.3.up_proj.weight"]
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    changed[name] = changed[name].astype(np.float32)
    changed |= {"extra.0.weight": np.ones(3), "extra.1.weight": np.ones(3), "extra.empty": np.ones((0, 4))}
    page = tx.report(write(tmp_path / "source", changed, config=CONFIG), tmp_path / "page.html").read_text("utf-8")
    assert "Tensors outside the table.</strong> <bdi>3 tensors (48 B) have no line in dialect hf" in page
    assert "such as extra.0.weight." in page
    assert "Different types in one rule" in page
    assert f"15 of BF16, 1 of F32; {name} is of F32." in page
    assert "15 tensors, but 16 combinations of l x e." in page
    assert "1 tensor, such as extra.empty." in page
    usual = tx.report(tiny(tmp_path / "usual"), tmp_path / "usual.html").read_text("utf-8")
    assert "<p>Nothing.</p>" in usual
    assert usual.count("<li><strong>") == 0


def test_shapes_that_do_not_fit_the_config_are_unusual(tmp_path: Path) -> None:
    """A conversion refuses the same ones."""
    source = write(tmp_path / "source", tensors(), config={**CONFIG, "moe_intermediate_size": 24})
    page = tx.report(source, tmp_path / "page.html").read_text("utf-8")
    count = len([name for name in tensors() if ".experts." in name])
    assert f"<bdi>{count} tensors, such as model.layers.0.mlp.experts.0.gate_proj.weight, gate[f d]: " in page
    assert "expected [24, 16] (d=16, f=24), got [12, 16]. A conversion refuses them." in page
    with pytest.raises(tx.TransaxleError) as caught:
        tx.convert(source, tmp_path / "out", to="torchtitan")
    assert len({each.where.tensor for each in caught.value.refusals if each.code == "SHAPE_MISMATCH"}) == count


def test_a_file_much_larger_than_the_others_is_named(tmp_path: Path) -> None:
    held = {f"w{number}": np.ones(1000 if number == 2 else 100, np.float32) for number in range(5)}
    page = tx.report(write(tmp_path / "source", held, shards=5), tmp_path / "page.html").read_text("utf-8")
    assert "model-00003-of-00005.safetensors has 4 kB of tensors; half of the files have 400 B or less." in page


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    """The page has the tags of any other, its policy allows its own scripts alone, and the names arrive whole."""
    held = {name: np.ones(size, np.uint8) for name, size in HOSTILE.items()}
    metadata = {"</script><b>": "<script>alert(1)</script>" * 50}
    config = {"model_type": "</script><script>alert(2)</script>"} | metadata
    source = write(tmp_path / "</script><i>", held, config=config)
    hostile = tx.report(source, tmp_path / "hostile.html")
    plain = tx.report(write(tmp_path / "plain", {"w": np.ones(3)}, config={"a": 1}), tmp_path / "plain.html")
    tags, found = parts(hostile)
    usual = {tag for tag, _ in parts(plain)[0]}
    assert {tag for tag, _ in tags} <= usual | {"ul", "li", "strong", "bdi"}
    assert not [name for _, attributes in tags for name in attributes if name.startswith("on") or name == "style"]
    assert {row["example"] for row in table(found, "layout")} == set(HOSTILE)
    policies = [each["content"] or "" for _, each in tags if each.get("http-equiv") == "Content-Security-Policy"]
    text = hostile.read_text("utf-8")
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    hashes = {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts}
    allowed = re.search(r"script-src ([^;]*);", policies[0])
    assert allowed is not None
    assert set(allowed[1].split()) == {f"'sha256-{each}'" for each in hashes}
    assert policies[0].startswith("default-src 'none';")
    assert "unsafe" not in policies[0]
    assert "\u202e" not in text


@pytest.mark.parametrize("named", ["page.html", Path("page.html")])
def test_a_file_is_replaced_only_if_it_is_a_report(named: str | Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    tiny(tmp_path / "ck")
    assert tx.report("ck", named) == Path("page.html")
    with refused("EXISTS", "already exists"):
        tx.report("ck", named)
    tx.report("ck", named, overwrite=True)
    kept = (tmp_path / "ck" / "model.safetensors").read_bytes()
    for other in ("ck/model.safetensors", "ck"):
        with pytest.raises(tx.TransaxleError, match="is no report"):
            tx.report("ck", other, overwrite=True)
    assert (tmp_path / "ck" / "model.safetensors").read_bytes() == kept
    assert sorted(each.name for each in tmp_path.iterdir()) == ["ck", "page.html"]


def test_errors_have_their_exit_code(tmp_path: Path, transaxle: Transaxle) -> None:
    tiny(tmp_path / "ck")
    assert transaxle("report", "ck").out.startswith("ck.html · ")
    assert transaxle("report", "ck").code == USAGE
    assert transaxle("report", "ck", "--overwrite").code == 0
    assert transaxle("report", "ck", "-o", "nowhere/page.html").code == MACHINE
    assert transaxle("report", "missing").code == MACHINE
    remote = transaxle("report", "ck", "-o", "s3://bucket/page.html")
    assert (remote.code, "a report is written to this machine only" in remote.err) == (REFUSED, True)


def test_it_is_shown_in_the_browser(tmp_path: Path, transaxle: Transaxle, monkeypatch: Any) -> None:
    tiny(tmp_path / "c k")
    shown: list[str] = []
    monkeypatch.setattr("webbrowser.open", shown.append)
    assert transaxle("report", "c k", "--open").code == 0
    assert shown == [(tmp_path / "c k.html").as_uri()]


def test_many_notices_are_shortened(tmp_path: Path) -> None:
    held = {f"w{number}": np.ones(100 if number % 3 else 1000, np.uint8) for number in range(120)}
    page = tx.report(write(tmp_path / "source", held, shards=120), tmp_path / "page.html").read_text("utf-8")
    assert page.count("<li><strong>") == 31
    assert "11 notices like these." in page


def test_without_jinja_the_error_says_what_to_install(tmp_path: Path, transaxle: Transaxle, monkeypatch: Any) -> None:
    tiny(tmp_path / "ck")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    refused = transaxle("report", "ck")
    assert refused.code == REFUSED
    assert "pip install 'jinja2>=3.1'" in refused.err
    assert not (tmp_path / "ck.html").exists()


def test_random_names_do_not_fill_the_page(tmp_path: Path, monkeypatch: Any) -> None:
    """The largest have rows of their own, all others share one area, and long names are cut."""
    for module in (checkpoint_page, html_page):
        monkeypatch.setattr(module, "MOST_ROWS", 150)
    held = {f"{number}x{'y' * 4_000}": np.ones(number, np.uint8) for number in range(1, 401)}
    page = tx.report(write(tmp_path / "source", held), tmp_path / "page.html")
    found = data(page)
    drawn = found["figures"]["bytes"]["data"]
    assert (len(drawn["groups"]), drawn["rest"]) == (150, {"count": 250, "bytes": sum(range(1, 251))})
    assert sum(each["each"] for each in drawn["groups"]) + drawn["rest"]["bytes"] == drawn["bytes"]
    (layout,) = (each for each in found["tables"] if each["id"] == "layout")
    assert layout["left_out"].startswith("The largest 150 of 400 rows")
    assert page.stat().st_size < 1_500_000


PROGRAM = """
import re, sys, time
import transaxle as tx
began = time.process_time()
tx.report(*sys.argv[1:])
print(time.process_time() - began, int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1000)
"""


def test_seventy_thousand_tensors(tmp_path: Path) -> None:
    """Less than 6 MB, 10 s and 300 MB; its files have headers and no more."""
    header: dict[str, Any] = {}
    end = 0
    sizes = {**SIZES, "num_hidden_layers": 61, "num_experts": 384}
    for name, shape in shapes(sizes).items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    source = tmp_path / "source"
    source.mkdir()
    with (source / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    (source / "config.json").write_text(json.dumps({**CONFIG, **sizes}))
    page = tmp_path / "page.html"
    command = [sys.executable, "-c", PROGRAM, str(source), str(page)]
    seconds, megabytes = map(float, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    found = data(page)
    assert len(header) == found["facts"]["tensors"] > 70_000
    assert sum(leaf_bytes(found).values()) == end
    assert page.stat().st_size < 6e6
    assert seconds < 10
    assert megabytes < 300


# The page of a refused checkpoint: the reasons of the command line, and the tile that a cut splits.


def cut_inside_a_tile(folder: Path, name: str = chunks.NAME) -> Path:
    """Write a DCP folder in which a weight with tiles of 128 x 128 is cut at row 192."""
    whole = blockwise(11, (256, 128))
    folder.parent.mkdir(parents=True, exist_ok=True)
    chunks.write(folder, (256, 128), [chunks.cut(whole, 0, 192), chunks.cut(whole, 192, 256)], key=name)
    return folder


def refusal_page(source: Path, page: Path) -> Path:
    with pytest.raises(Refused):
        tx.report(source, page)
    return page


def truncated(folder: Path) -> Path:
    """A file that ends too early."""
    tiny(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return folder


def lying(folder: Path) -> Path:
    """A DCP folder whose metadata tells of two chunks in one place."""
    whole = float8(10, (8, 4))
    folder.parent.mkdir(parents=True, exist_ok=True)
    chunks.write(folder, (8, 4), [chunks.cut(whole, 0, 6), chunks.cut(whole, 4, 8)])
    return folder


def no_tensors(folder: Path) -> Path:
    """A header that is no JSON."""
    write(folder, tensors(), config=CONFIG)
    (folder / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b"{{{{{{{{")
    return folder


@pytest.mark.parametrize("make", [cut_inside_a_tile, truncated, lying, no_tensors])
def test_reasons_are_those_of_the_command(make: Callable[[Path], Path], transaxle: Transaxle, tmp_path: Path) -> None:
    """The same reasons in the page, in the error, and on standard error; the exit code is that of a refusal."""
    source = make(tmp_path / "model")
    ls = transaxle("ls", "model")
    run = transaxle("report", "model")
    assert (run.code, ls.code) == (3, 3)
    assert run.err == ls.err
    assert run.out.startswith("model.html")
    page = data(tmp_path / "model.html")
    assert page["kind"] == "refusal"
    with pytest.raises(Refused) as error:
        tx.report(source, tmp_path / "again.html")
    told = [refusal.as_json() for refusal in error.value.refusals]
    said = json.loads(transaxle("report", "model", "-o", "json.html", "--json").out)["error"]
    assert page["facts"] == {"exit_code": 3, "refusals": told}
    assert (said["exit_code"], said["refusals"]) == (3, told)
    rows = table(page, "reasons")
    assert [(row["code"], row["tensor"], row["what to do"]) for row in rows] == [
        (each["code"], each["tensor"] or "", each["hint"]) for each in told
    ]
    for row, each in zip(rows, told, strict=True):
        assert row["why"] == " ".join(each["message"].split())
        assert row["why"] in " ".join(run.err.split())


def test_a_cut_inside_a_tile_is_drawn(tmp_path: Path) -> None:
    """Row 192 is in the second tile of 128 rows: half of it is the one chunk's second tile, half the other's first."""
    page = data(refusal_page(cut_inside_a_tile(tmp_path / "a"), tmp_path / "page.html"))
    halves = [(128, 192, "the chunk at [0, 0]", "(1, 0)"), (192, 256, "the chunk at [192, 0]", "(0, 0)")]
    found = table(page, "split")
    keys = "from position", "to before", "source", "tile of the source"
    assert [tuple(row[key] for key in keys) for row in found] == halves
    assert {(row["tensor"], row["dim"], row["its tile"]) for row in found} == {(chunks.NAME, 0, "(1, 0)")}
    drawn = page["figures"]["split"]["data"]
    assert [values[0] for _, _, _, values, _ in sorted(drawn["cells"])] == [0] * 64 + [1] * 64


def test_other_errors_have_no_page(tmp_path: Path, transaxle: Transaxle) -> None:
    """Nothing is written of what is not there, nor over a file that is no report."""
    assert transaxle("report", "nowhere").code == 4
    assert not (tmp_path / "nowhere.html").exists()
    truncated(tmp_path / "model")
    (tmp_path / "model.html").write_text("mine")
    assert transaxle("report", "model").code == 2
    assert transaxle("report", "model", "--overwrite").code == 2
    assert (tmp_path / "model.html").read_text() == "mine"
    assert transaxle("report", "model", "-o", "own.html").code == 3
    assert transaxle("report", "model", "-o", "own.html", "--overwrite").code == 3
    assert "split" not in data(tmp_path / "own.html")["figures"]


# Values of a checkpoint in its page: every number is what numpy computes.

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
    at = [drawn["columns"].index("1"), drawn["rows"].index("down")]
    ((state, (largest, rms)),) = (cell[2:4] for cell in drawn["cells"] if cell[:2] == at)
    mine = [v.astype(np.float64) for n, v in held.items() if "layers.1." in n and "down_proj" in n]
    assert (state, largest) == ("", max(np.abs(each).max() for each in mine))
    assert rms == pytest.approx(np.sqrt(np.mean([np.square(each).mean() for each in mine])))
    measure = drawn["measures"][0]
    assert len(measure["labels"]) == len(measure["bounds"]) + 1 <= 6


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_and_special_values(kind: str, tmp_path: Path) -> None:
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
    assert "The values were not read" not in page
    unread = tx.report(tmp_path / "ck", tmp_path / "unread.html").read_text("utf-8")
    assert "The values were not read; with --values" in unread
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
    channels = {row["name"]: row["which, the largest first"] for row in table(page, "channels")}
    assert channels == dict.fromkeys(("half", "single"), "50, 7")


@pytest.mark.parametrize("name", ["complex32", "complex64", "complex128"])
def test_complex_numbers_are_not_measured(tmp_path: Path, name: str) -> None:
    parts = {"complex32": torch.half, "complex64": torch.float, "complex128": torch.double}[name]
    file = tmp_path / "one.pt"
    torch.save({"x": torch.randn(3, 2).to(parts).view(getattr(torch, name)), "w": torch.ones(2)}, file)
    with tx.open(file) as checkpoint:
        found = measure_values(checkpoint, limits(1))
    assert (list(found.tensors), found.unmeasured) == (["w"], ("x",))


def test_the_command_has_it(tmp_path: Path, transaxle: Transaxle) -> None:
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
