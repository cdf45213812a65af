"""The promised fields of a plan: their places are those of the bytes, and a plan that was stored still reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import transaxle as tx
from tests.checkpoints import tiny
from tests.cli import documents
from transaxle.engine.plan.planned import box_of
from transaxle.move.transfer import Transfer

STORED = Path(__file__).parent / "plan-v1.json"
PAGE = Path(__file__).parents[3] / "docs/reference/plan.md"


def _promised(document: Any, name: str = "") -> Iterator[str]:
    """Yield the fields of a document that the page lists: no names of files or dims, no fields of refusals."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield f"{name}{key}"
            if key not in {"files", "mesh", "owners", "refusals"}:
                yield from _promised(value, f"{name}{key}.")
    for each in document if isinstance(document, list) else ():
        yield from _promised(each, f"{name[:-1]}[].")


def _assert_kept(stored: Any, written: Any, where: str) -> None:
    """Every field is there with a value of its kind; where the bytes are may change, and what they are may not."""
    if isinstance(stored, dict):
        assert stored.keys() <= written.keys(), where
        for key, value in stored.items():
            _assert_kept(value, written[key], f"{where}.{key}")
            assert key not in {"name", "dtype", "shape", "nbytes", "box", "dialect"} or value == written[key], where
    elif isinstance(stored, list):
        assert len(stored) == len(written), where
        for number, value in enumerate(stored):
            _assert_kept(value, written[number], f"{where}[{number}]")
    else:
        assert type(stored) is type(written), where


def test_a_stored_plan_still_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny(tmp_path / "model")
    stored = json.loads(STORED.read_text("utf-8"))
    written = json.loads(json.dumps(tx.plan("model", "out", to="megatron_torch", tp=2).document()))
    _assert_kept(stored, written, "plan")
    table = PAGE.read_text("utf-8").partition("## Promised fields")[2].partition("## Versions")[0]
    listed = {
        field for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for field in re.findall(r"`(.*?)`", row)
    }
    assert listed == set(_promised(stored))
    documents.check(documents.PLAN_DOCUMENT, stored)


@pytest.mark.parametrize(
    ("target", "dialect", "options"),
    [
        ("megatron_torch", "megatron", {"tp": 2, "ep": 2}),
        ("dcp:torchtitan", "torchtitan", {}),
        ("torch_dist", "megatron_dist", {}),
    ],
)
def test_pieces_are_where_the_bytes_are(target: str, dialect: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Each piece without gaps is compared with the box of the tensor that it is said to be, in the files themselves."""
    source = tiny(tmp_path / "model", shards=2)
    plan = tx.plan(source, tmp_path / "out", to=target, **options).document()
    documents.check(documents.PLAN_DOCUMENT, plan)
    tx.convert(source, tmp_path / "out", to=target, sync=False, **options)
    compared = dict.fromkeys(("reads", "writes"), 0)
    with tx.open(source) as opened:
        view = opened.as_dialect(dialect)
        for tensor in plan["tensors"]:
            if tensor["name"] not in view:
                continue  # padding and state of the framework
            values = np.asarray(view[tensor["name"]].numpy()).view(np.uint16)
            assert sum(piece["nbytes"] for piece in tensor["reads"]) <= tensor["nbytes"]  # the rest is padding
            for side, folder in (("reads", source), ("writes", tmp_path / "out")):
                for piece in tensor[side]:
                    has_gaps = piece["box"] is None or piece["span"] != piece["nbytes"]
                    if has_gaps or values.shape != tuple(tensor["shape"]):
                        continue
                    region = values[tuple(slice(*interval) for interval in piece["box"])]
                    data = (folder / piece["file"]).read_bytes()[piece["offset"] : piece["offset"] + piece["nbytes"]]
                    assert region.nbytes == piece["nbytes"]
                    stored = np.frombuffer(data, np.uint16)
                    if side == "reads":  # in the order of the source, which may be transposed
                        stored, region = np.sort(stored), np.sort(region, axis=None)
                    assert (stored == region.ravel()).all(), (tensor["name"], piece)
                    compared[side] += 1
    assert min(compared.values()) > 20


@pytest.mark.parametrize("options", [{"encode": "nvfp4"}, {"dtype": "fp32"}])
def test_computed_values_have_no_file(options: dict[str, Any], tmp_path: Path) -> None:
    """The schema is that of plans with computed values too."""
    plan = tx.plan(tiny(tmp_path / "model"), tmp_path / "out", to="dcp:torchtitan", **options).document()
    documents.check(documents.PLAN_DOCUMENT, plan)
    for piece in (piece for tensor in plan["tensors"] for piece in tensor["reads"]):
        assert (piece["file"] is None) is (piece["tensor"] is not None)


def test_what_is_not_one_box_has_none() -> None:
    """Rows 0 and 2 of 4, and bytes that begin in the middle of a row; two 4-bit codes are one byte."""
    rows = Transfer("f", 0, 0, 6, ((2, 6, 12),))
    assert box_of(rows, "BF16", (4, 3)) is None
    assert box_of(rows, "BF16", (2, 2, 3)) == [[0, 2], [0, 1], [0, 3]]
    assert box_of(Transfer("f", 0, 2, 6), "BF16", (4, 3)) is None
    assert box_of(Transfer("f", 0, 8, 4), "BF16", (4, 3)) == [[1, 2], [1, 3]]
    assert box_of(Transfer("f", 0, 4, 4), "F4", (2, 8)) == [[1, 2], [0, 8]]
    assert box_of(Transfer("f", 0, 0, 4), "F32", ()) == []
