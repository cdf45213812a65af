"""The page of a refused checkpoint: the reasons of the command line, and the tile that a cut splits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import transaxle as tx
from tests.checkpoints import CONFIG, tensors, tiny, write
from tests.cli.conftest import here, transaxle  # noqa: F401 - fixtures
from tests.cli.running import Transaxle
from tests.formats.dcp import test_quantized_chunks as chunks
from tests.oracles.te_pickles import blockwise, float8
from tests.reports.embedded import data, table
from transaxle.errors import Refused


def cut_inside_a_tile(folder: Path, name: str = chunks.NAME) -> Path:
    """Write a DCP folder in which a weight with tiles of 128 x 128 is cut at row 192."""
    whole = blockwise(11, (256, 128))
    folder.parent.mkdir(parents=True, exist_ok=True)
    chunks.write(folder, (256, 128), [chunks.cut(whole, 0, 192), chunks.cut(whole, 192, 256)], key=name)
    return folder


def refusal_page(source: Path, page: Path) -> Path:
    """Write the report of what is refused."""
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
def test_reasons_are_those_of_the_command(
    make: Callable[[Path], Path],
    transaxle: Transaxle,  # noqa: F811
    tmp_path: Path,
) -> None:
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
    assert [
        (row["from position"], row["to before"], row["source"], row["tile of the source"]) for row in found
    ] == halves
    assert {(row["tensor"], row["dim"], row["its tile"]) for row in found} == {(chunks.NAME, 0, "(1, 0)")}
    drawn = page["figures"]["split"]["data"]
    assert [values[0] for _, _, _, values, _ in sorted(drawn["cells"])] == [0] * 64 + [1] * 64


def test_other_errors_have_no_page(tmp_path: Path, transaxle: Transaxle) -> None:  # noqa: F811
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
