"""What people see: a plan that is printed, a checkpoint in a notebook, one that is closed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import transaxle as tx
from tests import checkpoints


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
