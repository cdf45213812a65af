"""Issue 15, files 4: `--dtype` on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import checkpoints
from tests.cli.running import USAGE, Transaxle


def test_a_cast_lists_its_errors_and_is_verified(here: Path, transaxle: Transaxle) -> None:
    held = {name: array.astype("float32") * 1.001 for name, array in checkpoints.tensors().items()}
    checkpoints.write(Path("source"), held, config={**checkpoints.CONFIG, "dtype": "float32"})
    planned = transaxle("plan", "source", "out", "--to", "automodel", "--dtype", "bf16")
    assert "will be cast, F32 -> BF16" in planned.out
    outcome = transaxle("convert", "source", "out", "--to", "automodel", "--dtype", "bf16", "--verify")
    assert outcome.code == 0
    assert "cast, F32 -> BF16" in outcome.out
    assert "RMS" in outcome.out
    assert transaxle("verify", "out").code == 0


@pytest.mark.parametrize(
    ("typed", "short"), [("bfloat16", "bf16"), ("float16", "fp16"), ("half", "fp16"), ("float32", "fp32")]
)
def test_a_type_goes_by_all_its_names(typed: str, short: str, here: Path, transaxle: Transaxle) -> None:
    """As in Python, where `dtype=` takes torch's types too; `--decode` takes the same."""
    held = {name: array.astype("float64") for name, array in checkpoints.tensors().items()}
    checkpoints.write(Path("source"), held, config=checkpoints.CONFIG)
    for name in (typed, short):
        assert transaxle("convert", "source", f"out-{name}", "--to", "hf", "--dtype", name).code == 0
    assert checkpoints.same(Path(f"out-{typed}"), Path(f"out-{short}"))
    assert "nothing to decode" in transaxle("convert", "source", "out", "--to", "hf", "--decode", "float32").err
    outcome = transaxle("convert", "source", "out", "--to", "hf", "--dtype", "bf61")
    assert (outcome.code, "'bf61' is not one of 'bf16', 'fp16', 'fp32'" in outcome.err) == (USAGE, True)


def test_options_that_exclude_each_other(here: Path, transaxle: Transaxle) -> None:
    checkpoints.tiny(Path("source"))
    for more in (["--decode", "bf16"], ["--encode", "mxfp8"]):
        outcome = transaxle("convert", "source", "out", "--to", "hf", "--dtype", "bf16", *more)
        assert outcome.code == USAGE
        assert "exclude each other" in outcome.err
    outcome = transaxle("convert", "source", "out", "--to", "hf", "--decode", "fp32")
    assert outcome.code == USAGE
    assert "--dtype fp32" in outcome.err
    assert not Path("out").exists()
