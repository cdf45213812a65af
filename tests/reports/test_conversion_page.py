"""The pages of a plan and of a finished conversion: their numbers are those of the command, the files and numpy."""

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
from tests.cli.running import REFUSED, USAGE, Transaxle
from tests.engine import quantized
from tests.oracles import option_sources
from tests.reports.embedded import data, table


def _page(tmp_path: Path, source: Path, to: str) -> Any:
    return data(tx.report(tx.plan(source, tmp_path / "out", to=to), tmp_path / f"{to}.html"))


@pytest.mark.parametrize("to", ["torchtitan", "megatron", "te", "hf"])
def test_numbers_are_those_of_what_is_written(to: str, tmp_path: Path) -> None:
    source = tiny(tmp_path / "source")
    found = _page(tmp_path, source, to)
    tx.convert(source, tmp_path / "out", to=to)
    written = load_file(tmp_path / "out" / "model.safetensors")
    nbytes = sum(each.nbytes for each in written.values())
    flow = found["figures"]["flow"]["data"]
    assert sum(link[3] for link in flow["links"]) + sum(amount for _, amount in flow["others"]) == nbytes
    assert flow["bytes"] == nbytes
    for name in ("rules", "tensors"):
        rows = table(found, name)
        assert (sum(row["tensors"] for row in rows), sum(row["bytes"] for row in rows)) == (len(written), nbytes)
    for row in table(found, "tensors"):
        if row["tensors"] == 1:
            assert row["shape"] == " x ".join(map(str, written[row["name"]].shape))
    for row in table(found, "files"):
        held = tmp_path / "out" / row["file"]
        assert row["size"] == held.stat().st_size


def test_numbers_are_those_of_the_command(tmp_path: Path, transaxle: Transaxle) -> None:
    tiny(tmp_path / "ck")
    told = transaxle("plan", "ck", "out", "--to", "torchtitan", "--report", "plan.html", "--json").json
    facts = data(tmp_path / "plan.html")["facts"]
    assert facts == {key: told[key] for key in facts if key != "tensors"} | {"tensors": len(told["tensors"])}
    assert not (tmp_path / "out").exists()
    again = transaxle("plan", "ck", "out", "--to", "torchtitan", "--report", "plan.html")
    assert (again.code, "already exists" in again.err) == (USAGE, True)
    assert "the folder already exists" in transaxle("report", "ck", "-o", "ck").err
    assert "the folder absent does not exist" in transaxle("report", "ck", "-o", "absent/page.html").err
    assert ("or remove this one" in again.err, "--overwrite" in again.err) == (True, False)  # that is for the target


def test_moves_of_experts_are_described(tmp_path: Path) -> None:
    """Their number goes from the names into the shape; the halves of Megatron's first matrix are joined."""
    source = tiny(tmp_path / "source")
    moves = {(row["tensor"], row["axis"]): row for row in table(_page(tmp_path, source, "torchtitan"), "axes")}
    moved = {key: row["moves"] for key, row in moves.items() if row["moves"]}
    changed = {key: each for key, each in moved.items() if key[1] == "e"}
    assert changed == {(each, "e"): "name -> dim 0" for each in ("gate", "up", "down")}
    assert moves["down", "d"]["moves"] == "dim 0 -> dim 1"
    assert (moves["q", "g"]["in the source"], moves["q", "g"]["moves"]) == ("dim 0 (g r c)", "")
    (joined,) = (row for row in table(_page(tmp_path, source, "megatron"), "rules") if row["tensor"] == "gate, up")
    assert joined["moves"] == "joined"
    assert joined["source"].count("experts.{e}") == 2


def test_refusals_and_kept_tensors(tmp_path: Path) -> None:
    held: dict[str, Any] = dict(tensors()) | {"extra.0.weight": np.ones(3), "extra.1.weight": np.ones(3)}
    source = write(tmp_path / "source", held, config=CONFIG)
    (tmp_path / "out").mkdir()
    plan = tx.plan(source, tmp_path / "out", to="torchtitan")
    page = tx.report(plan, tmp_path / "page.html")
    assert "<li><strong>EXISTS.</strong>" in page.read_text("utf-8")
    kept = [row for row in table(data(page), "others") if "unchanged" in row["result"]]
    assert [(row["name"], row["names"]) for row in kept] == [("extra.[0-1].weight", 2)]
    assert data(page)["figures"]["flow"]["data"]["others"] == [["as named", 48], ["zeros", 64]]
    assert page.read_text("utf-8").count("refusal</dt>") == 1
    noted = tx.report(tx.plan(source, tmp_path / "other", to="torchtitan"), tmp_path / "noted.html").read_text("utf-8")
    assert noted.index("<strong>Refused.</strong> <bdi>Nothing.") < noted.index("<strong>Note.</strong>")
    assert "refusal</dt>" not in noted
    with pytest.raises(TypeError, match="the plan is already made"):
        tx.report(plan, tmp_path / "other.html", family="llama")


def test_where_a_tile_splits_is_drawn(tmp_path: Path) -> None:
    """Of each rule the first tile that does: position by position what numpy says of rows that were moved by hand."""
    sizes = {"d": 256, "f": 192, "g": 2, "r": 2, "head": 64, "layers": 2}
    quantized.store(tmp_path / "fp8", quantized.llama(**sizes))
    plan = tx.plan(tmp_path / "fp8", tmp_path / "out", to="megatron")
    assert {each.code for each in plan.refusals} == {"BLOCK_MISALIGNED"}
    assert len(plan.refusals) == 4
    page = data(tx.report(plan, tmp_path / "page.html"))
    rows = {part: [(part, row // 128) for row in range(count)] for part, count in
            (("q_proj", 256), ("k_proj", 128), ("v_proj", 128), ("gate_proj", 192), ("up_proj", 192))}  # fmt: skip
    heads = [rows["q_proj"][:128], rows["k_proj"][:64], rows["v_proj"][:64]]
    heads += [rows["q_proj"][128:], rows["k_proj"][64:], rows["v_proj"][64:]]
    expected = {
        "decoder.layers.0.self_attention.linear_qkv.weight": (1, [row for head in heads for row in head]),
        "decoder.layers.0.mlp.linear_fc1.weight": (1, rows["gate_proj"] + rows["up_proj"]),
    }
    said: dict[str, list[tuple[str, int]]] = {}
    for row in table(page, "split"):
        number, _ = expected[row["tensor"]]
        assert (row["dim"], row["its tile"]) == (0, f"({number}, 0)")
        assert row["from position"] == 128 * number + len(said.setdefault(row["tensor"], []))
        source = row["source"].split(".")[-2], int(row["tile of the source"].strip("()").split(",")[0])
        said[row["tensor"]] += [source] * (row["to before"] - row["from position"])
    assert said == {name: source[128 * at : 128 * at + 128] for name, (at, source) in expected.items()}
    drawn = page["figures"]["split"]["data"]
    assert drawn["rows"] == list(said)
    for line, name in enumerate(said):
        order = list(dict.fromkeys(said[name]))
        colours = [values[0] for _, at, _, values, _ in sorted(drawn["cells"]) if at == line]
        assert colours == [order.index(source) for source in said[name]]
    whole = tx.plan(tmp_path / "fp8", tmp_path / "out", to="hf")
    assert "split" not in data(tx.report(whole, tmp_path / "whole.html"))["figures"]


def test_counts_of_experts_are_described(tmp_path: Path) -> None:
    """Eight tensors of a layer become one, one becomes eight, or the number stays."""
    tiny(tmp_path / "hf")
    tx.convert(tmp_path / "hf", tmp_path / "stacked", to="torchtitan", sync=False)
    e, joined = "Axis e (experts)", "model.layers.{l}.mlp.experts.gate_up_proj[e [gate:f | up:f] d]"
    into, out = f"{e} goes from the names into dim 0 of", f"{e} goes from dim 0 into the names of"
    become = "8 tensors of each become one."
    for number, (source, to, *sentences) in enumerate((
        ("hf", "torchtitan", f"{into} gate, down and up: {become}"),
        ("stacked", "hf", f"{out} gate, up and down: each becomes 8 tensors."),
        ("hf", "transformers", f"{into} gate, up and down: {become}", f"Joined: gate and up become {joined}."),
        ("hf", "megatron", f"{e} stays in the names of gate, up and down."),
        ("stacked", "transformers", f"{e} stays in dim 0 of router, gate, up and down."),
    )):  # fmt: skip
        page = tx.report(tx.plan(tmp_path / source, tmp_path / "out", to=to), tmp_path / f"{number}.html")
        text = page.read_text("utf-8")
        for sentence in sentences:
            assert f'<p class="lead">{sentence}</p>' in text


def test_bands_of_fused_tensors_are_as_wide_as_their_parts(tmp_path: Path) -> None:
    found = _page(tmp_path, tiny(tmp_path / "source"), "megatron")
    nbytes: dict[str, int] = {}
    for name, values in tensors().items():
        part = name.split(".")[-2]
        nbytes[part] = nbytes.get(part, 0) + values.nbytes
    rows = {row["source"].split(".")[-2]: row for row in table(found, "joined")}
    assert {part: row["bytes"] for part, row in rows.items()} == {
        f"{part}_proj": nbytes[f"{part}_proj"] for part in ("q", "k", "v", "gate", "up")
    }
    links = {link[0]: link for link in found["figures"]["flow"]["data"]["links"]}
    for row in rows.values():
        assert links[row["source"]][1::2] == [row["target"], row["bytes"]]


def test_axes_are_drawn_where_the_rules_have_them(tmp_path: Path) -> None:
    found = _page(tmp_path, tiny(tmp_path / "source"), "transformers")
    drawn = found["figures"]["axes"]["data"]
    assert (drawn["meanings"]["e"], drawn["sizes"]["e"]) == ("experts", 8)
    gate_up, down = drawn["rules"]
    assert gate_up["moved"] == down["moved"] == ["d", "e", "f"]
    assert gate_up["steps"] == ["e: name -> dim 0", "f: dim 0 -> dim 1", "d: dim 1 -> dim 2"]
    assert [(each["name"], each["dims"]) for each in gate_up["before"]] == 2 * [
        (["l", "e"], [[["f", True]], [["d", True]]])
    ]
    halves = [["gate", False], ["f", True], ["| up", False], ["f", True]]
    assert (gate_up["after"]["name"], gate_up["after"]["dims"]) == (["l"], [[["e", True]], halves, [["d", True]]])
    same = _page(tmp_path, tmp_path / "source", "hf")
    assert "axes" not in same["figures"]


# The page of a finished conversion: its numbers are those of the files, of numpy, and of `convert --json`.

BF16 = np.dtype(ml_dtypes.bfloat16)


def single() -> Tensors:
    """The tiny model in single precision."""
    random = np.random.default_rng(3)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes().items()}


def test_numbers_are_those_of_the_command_and_of_the_files(tmp_path: Path, transaxle: Transaxle) -> None:
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


def test_averaged_and_cast_tensors_have_two_rows(tmp_path: Path, transaxle: Transaxle) -> None:
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


def test_refusals_are_those_of_the_command(tmp_path: Path, transaxle: Transaxle) -> None:
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


def test_a_page_that_cannot_be_written_is_reported_first(tmp_path: Path, transaxle: Transaxle) -> None:
    tiny(tmp_path / "ck")
    (tmp_path / "page.html").write_text("mine")
    refused = transaxle("convert", "ck", "out", "--to", "hf", "--report", "page.html")
    assert (refused.code, "already exists" in refused.err) == (USAGE, True)
    assert not (tmp_path / "out").exists()
    nowhere = transaxle("convert", "ck", "out", "--to", "hf", "--report", "missing/page.html")
    assert (nowhere.code, "nothing was written" in nowhere.err, (tmp_path / "out").exists()) == (4, True, False)
    done = transaxle("convert", "ck", "out", "--to", "hf", "--report", "other.html")
    assert done.out.rstrip().endswith("shown in other.html")
