"""Names of files that are one on some file system, or ours, are refused before anything is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import transaxle as tx
from tests import checkpoints
from transaxle.engine.plan.conversion import refuse_clashes
from transaxle.errors import TransaxleError

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
    with pytest.raises(TransaxleError) as caught:
        tx.convert(source, tmp_path / name, to="torchtitan")
    assert caught.value.code == "NAME_COLLISION"
    assert "is reserved" in caught.value.refusals[0].message
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.transaxle-old", "source"]
