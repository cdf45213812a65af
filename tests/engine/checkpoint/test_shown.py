"""What users see: a printed plan, a checkpoint in a notebook, one that is closed, and what is asked for in vain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import transaxle as tx
from tests import checkpoints
from tests.engine.peers.test_optimizer import store, trained
from transaxle.errors import Refused, UsageError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return checkpoints.tiny(tmp_path / "source")


def test_a_plan_is_printed_short(source: Path, tmp_path: Path) -> None:
    plan = tx.plan(source, tmp_path / "out", to="torchtitan")
    lines = str(plan).splitlines()
    assert lines[0] == "safetensors, hf -> safetensors, torchtitan@0.3"
    assert lines[-1] == "  nothing refused"
    assert ["experts" in line for line in lines[1:5]] == [True, True, True, False]  # what moves comes first
    assert f"{len(plan.tensors)} tensors" in lines[-2]
    assert len(lines) <= 16
    assert "\n" not in repr(plan)
    assert len(repr(plan)) < 200 + len(str(source))
    (tmp_path / "out").mkdir()
    refused = tx.plan(source, tmp_path / "out", to="torchtitan")
    assert "refused (1 reason)" in str(refused)
    assert "EXISTS" in str(refused)
    assert repr(refused).endswith("1 refusal>")


def test_notebooks_show_names_as_text(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>&"
    held = {name: np.ones(3, np.float32)} | {f"w{n}": np.ones(1) for n in range(20)}
    folder = checkpoints.write(tmp_path / "source", held)
    with tx.open(folder) as checkpoint:
        plan = tx.plan(checkpoint, tmp_path / "<b>", to="safetensors:identity")
        for shown in (checkpoint, checkpoint[name], checkpoint.select("*script*"), plan):
            html = shown._repr_html_()
            assert html.startswith("<pre>")
            assert html.endswith("</pre>")
            assert "<" not in html.removeprefix("<pre>").removesuffix("</pre>")
        assert "&lt;script&gt;" in checkpoint[name]._repr_html_()


def test_what_a_notebook_shows_is_bounded(tmp_path: Path) -> None:
    """However many names there are, and however long they are; folded, a hundred thousand layers are one row."""
    held = {f"{letter * 3000}{number}x.weight": np.ones(1) for number in range(100) for letter in "ab"}
    checkpoints.write(tmp_path / "odd", held)
    checkpoints.write(tmp_path / "many", {f"layers.{number}.weight": np.ones(1, np.int8) for number in range(3000)})
    with tx.open(tmp_path / "odd") as odd, tx.open(tmp_path / "many") as many:
        assert len(odd._repr_html_()) < 15_000
        assert "… and 160 more rows" in odd._repr_html_()
        assert many._repr_html_().splitlines()[1:] == ["  layers.[0-2999].weight  x3000  I8  [1]</pre>"]


def test_a_closed_checkpoint_says_so(source: Path) -> None:
    checkpoint = tx.open(source)
    view, cast = checkpoint.as_dialect("torchtitan"), checkpoint.cast("fp32")
    assert "· closed" not in repr(checkpoint) + repr(view) + repr(cast)
    cast.close()
    for each in (checkpoint, view, cast):
        assert repr(each).endswith(" tensors · closed>")
        assert "· closed" in each._repr_html_()
        tensor = next(iter(each.values()))
        assert repr(tensor).endswith("] · closed>")
        with pytest.raises(ValueError, match="the checkpoint is closed; open it again to read from it"):
            tensor.read()
    assert "· closed" not in repr(tx.open(source))


# What is asked for and is not there: an optimizer's state, sizes of axes that no table has.

VERBS: dict[str, Callable[[Path, Path], object]] = {
    "open": lambda source, _: tx.open(source, optimizer=True),
    "info": lambda source, _: tx.info(source, optimizer=True),
    "plan": lambda source, out: tx.plan(source, out, to="hf", optimizer=True),
    "convert": lambda source, out: tx.convert(source, out, to="hf", optimizer=True),
    "verify": lambda source, _: tx.verify(source, optimizer=True),
    "diff": lambda source, _: tx.diff(source, source, optimizer=True),
}


@pytest.mark.parametrize("verb", VERBS)
def test_state_that_is_not_there_is_refused(tmp_path: Path, verb: str) -> None:
    source = checkpoints.tiny(tmp_path / "source")
    with pytest.raises(Refused, match="no optimizer state") as refused:
        VERBS[verb](source, tmp_path / "out")
    (refusal,) = refused.value.refusals
    assert refusal.code == "MISSING_TENSOR"
    assert refusal.where.file == str(source)
    assert "--optimizer" in refusal.hint
    assert "optimizer=" in refusal.hint
    assert not (tmp_path / "out").exists()


def test_a_universal_folder_without_moments_has_none(tmp_path: Path) -> None:
    """It has settings, of no parameter."""
    source = checkpoints.tiny(tmp_path / "source")
    report = tx.convert(source, tmp_path / "universal", to="deepspeed-universal", sync=False)
    assert any("there is no optimizer state" in note for note in report.notes)
    with pytest.raises(Refused, match="no optimizer state"):
        tx.convert(tmp_path / "universal", tmp_path / "out", to="hf", optimizer=True)
    whole = store(tmp_path / "trained", trained())
    assert not tx.convert(whole, tmp_path / "again", to="deepspeed-universal", sync=False).notes


def test_one_of_two_may_have_none(tmp_path: Path) -> None:
    source, whole = checkpoints.tiny(tmp_path / "source"), store(tmp_path / "trained", trained())
    compared = tx.diff(whole, source, optimizer=True)
    assert not compared.equal
    assert all(difference.name.startswith("optim/") for difference in compared.differences)


def test_sizes_of_axes_are_for_tables(tmp_path: Path) -> None:
    source = checkpoints.write(tmp_path / "unknown", {"a.b": np.zeros((2, 3), np.float32)})
    tx.convert(source, tmp_path / "out", to="safetensors", sync=False)
    with pytest.raises(UsageError) as refused:
        tx.convert(source, tmp_path / "again", to="safetensors", axes={"e": 8})
    assert refused.value.code == "UNKNOWN_FAMILY"
