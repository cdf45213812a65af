"""What is asked for and is not there: an optimizer's state, sizes of axes that no table has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import transaxle as tx
from tests import checkpoints
from tests.engine.peers.test_optimizer import store, trained
from transaxle.errors import Refused, UsageError

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
