"""`verify` and `diff`: whether checkpoints are equal, and where they differ."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.checkpoints import CONFIG, GATE, TENSORS, tensors, write
from tests.cli.running import DIFFERENT, Transaxle, flip, only


def _changed(folder: Path, *names: str) -> Path:
    """Write the tiny checkpoint with 1 added to the first element of some tensors."""
    held = tensors()
    for name in names:
        held[name].reshape(-1)[0] += 1
    return write(folder, held, config=CONFIG)


def test_equal_across_dialects(ck: Path, converted: Callable[[str], Path], transaxle: Transaxle) -> None:
    folder = converted("automodel")
    for verb in ("verify", "diff"):
        said = "equal: 69 tensors on the left are 25 on the right, 13,936 parameters\n"
        assert transaxle(verb, ck, folder).out == said
    assert transaxle("verify", folder, ck).code == 0
    found = transaxle("verify", ck, folder, "--json").json
    assert (found["ok"], found["against"]) == (True, "checkpoint")
    assert found["comparison"]["stored"] == {"first": TENSORS, "second": 25}
    assert found["comparison"]["differences"] == []


def test_every_flipped_bit_of_the_data_is_seen(converted: Callable[[str], Path], transaxle: Transaxle) -> None:
    folder = converted("torchtitan")
    assert transaxle("verify", folder).out == (
        "intact: 29 tensors, 13,952 parameters, 27.94 kB read; every hash in the manifest matches (xxh3-128)\n"
    )
    file = only(list(folder.glob("*.safetensors")))
    for at in (-1, -2000, -20_000):
        flip(file, at, bit=at % 8)
        outcome = transaxle("verify", folder)
        assert outcome.code == DIFFERENT
        assert re.search(rf"CORRUPT  {file.name} · \S+\n.*the bytes were changed after they were written", outcome.out)
        assert "Copy the file again" in outcome.out
        flip(file, at, bit=at % 8)
    assert transaxle("verify", folder).code == 0


def test_without_a_manifest_verify_says_what_was_checked(ck: Path, transaxle: Transaxle) -> None:
    outcome = transaxle("verify", ck)
    assert outcome.code == 0
    assert outcome.out.startswith("checked the structure only, there are no digests: 69 tensors")
    assert "intact" not in outcome.out
    assert transaxle("verify", ck, "--json").json["against"] == "structure"


def test_one_file_is_compared_with_its_own_digests(ck: Path, transaxle: Transaxle) -> None:
    assert transaxle("convert", ck, "out.safetensors", "--to", "hf", "--verify").code == 0
    outcome = transaxle("verify", "out.safetensors")
    assert "every digest in the file matches" in outcome.out
    flip(Path("out.safetensors"), -1)
    assert transaxle("verify", "out.safetensors").code == DIFFERENT
    assert transaxle("verify", "out.safetensors", "--json").json["problems"][0]["code"] == "CORRUPT"


def test_diff_lists_differing_tensors(ck: Path, transaxle: Transaxle) -> None:
    _changed(Path("other"), GATE, GATE.replace("experts.3", "experts.5"), "model.norm.weight")
    outcome = transaxle("diff", ck, "other")
    assert outcome.code == DIFFERENT
    assert outcome.out == (
        "  model.layers.0.mlp.experts.[3,5].gate_proj.weight  x2  values differ\n"
        "  model.norm.weight                                      values differ\n"
        "  3 tensors differ, 66 equal\n"
    )
    assert transaxle("verify", ck, "other").code == DIFFERENT


def test_diff_measures_differences(ck: Path, transaxle: Transaxle) -> None:
    _changed(Path("other"), GATE, "model.norm.weight")
    stat = transaxle("diff", ck, "other", "--stat")
    assert stat.code == DIFFERENT
    rows = [line.split("  ")[1:] for line in stat.out.splitlines()]
    assert [row[0] for row in rows] == ["gate", "norm", "everything else"]
    assert "1 of 16 tensors differ" in stat.out
    assert "max |Δ| 1.0e+00" in stat.out
    assert "67 tensors equal" in stat.out
    assert "1 element, max |Δ| 1.0e+00" in transaxle("diff", ck, "other", "--numeric").out
    found = transaxle("diff", ck, "other", "--numeric", "--json").json
    assert [(d["name"], d["elements"], d["kind"]) for d in found["differences"]] == [
        (GATE, 1, "values"),
        ("model.norm.weight", 1, "values"),
    ]


def test_diff_lists_tensors_of_one_side_only(ck: Path, transaxle: Transaxle) -> None:
    write(Path("other"), tensors() | {"extra.0.w": np.zeros(2), "extra.1.w": np.zeros(2)}, config=CONFIG)
    assert transaxle("diff", ck, "other").out == ("  extra.[0-1].w  x2  only in other\n  2 tensors differ, 69 equal\n")
    assert "only in other" in transaxle("diff", ck, "other", "--stat").out


def test_diff_of_dtypes_and_shapes(here: Path, transaxle: Transaxle) -> None:
    write(here / "a", {"x": np.zeros(4, np.float32), "y": np.zeros((2, 2), np.float32)})
    write(here / "b", {"x": np.zeros(4, np.float16), "y": np.zeros((4, 1), np.float32)})
    out = transaxle("diff", "a", "b").out
    assert "dtype F32 and F16" in out
    assert "shape [2, 2] and [4, 1]" in out


def test_a_long_list_of_differences_is_shortened(here: Path, transaxle: Transaxle) -> None:
    write(here / "a", {f"name_{chr(97 + n)}": np.zeros(n + 1, np.float32) for n in range(25)})
    write(here / "b", {f"name_{chr(97 + n)}": np.ones(n + 1, np.float32) for n in range(25)})
    assert "… and 5 more rows (--all or --json shows them)" in transaxle("diff", "a", "b").out
    assert transaxle("diff", "a", "b", "--all").out.count("values differ") == 25


def test_optimizer_state_on_one_side_only_is_reported_as_such(here: Path, transaxle: Transaxle) -> None:
    held = {**tensors(), f"optim/{GATE}/step": np.array(3.0, np.float32)}
    whole = write(here / "whole", held, config=CONFIG)
    assert f"optim/{GATE}/step" in transaxle("convert", whole, "hub", "--to", "hf", "--all").out
    transaxle("verify", whole, "hub").expect(DIFFERENT, out="--no-optimizer compares the rest")
    assert transaxle("verify", whole, "hub", "--no-optimizer").code == 0
    assert transaxle("convert", whole, "checked", "--to", "hf", "--verify").code == 0
    assert transaxle("convert", whole, "both", "--to", "hf", "--optimizer", "--verify").code == 0
    assert transaxle("verify", whole, "both").code == 0
    assert "--no-optimizer" not in transaxle("verify", _changed(here / "other", GATE), "hub").out
