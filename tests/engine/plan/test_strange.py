"""Strange checkpoints: converted exactly or refused with a reason; never anything else."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import transaxle as tx
from tests import checkpoints
from tests.engine import law

SIZES = {**checkpoints.SIZES, "num_experts": 3}
CONFIG = {**checkpoints.CONFIG, **SIZES}
HELD = checkpoints.tensors(SIZES)
NAMES = sorted(HELD)
TARGETS = ["hf", "automodel", "torchtitan", "torchtitan@0.2", "transformers", "megatron", "te", "identity"]
VALUES: list[Any] = [None, 0, -1, 1, 3, 7, 2**70, 1.5, "4", "", [], [1], {}, True, float("nan")]

Array = npt.NDArray[Any]


KINDS = ["drop", "rename", "cast", "reshape", "cut", "copy", "config", "state", "empty"]
SHAPES: list[tuple[int, ...]] = [(-1,), (1, -1), (-1, 1), (1, -1, 1), (-1, 2)]
EMPTY: list[tuple[int, ...]] = [(0,), (0, 0), (3, 0), ()]


@dataclass
class Disturbance:
    """One thing wrong: its kind, the tensor it happens to, and a number that chooses how."""

    kind: str
    name: str
    other: str
    number: int

    def apply(self, held: dict[str, Array], config: dict[str, Any]) -> None:
        name, number = self.name, self.number
        array = HELD[name]
        match self.kind:
            case "drop":
                held.pop(name, None)
            case "rename":
                position = number % (len(name) + 1)
                inserted = ["0", "9", ".", "x", "-", "99999999999999999999"][number % 6]
                held[name[:position] + inserted + name[position:]] = held.pop(name, array)
            case "cast":
                held[name] = array.astype(["f4", "f8", "i4", "u1"][number % 4])
            case "reshape":
                held[name] = array.reshape(SHAPES[number % len(SHAPES)])
            case "cut":
                held[name] = array[: number % len(array)].copy()
            case "copy":
                held[name] = HELD[self.other]
            case "config":
                config[sorted(CONFIG)[number % len(CONFIG)]] = VALUES[number // 7 % len(VALUES)]
            case "state":
                state = ["exp_avg", "step", ""][number % 3]
                held[f"optim/{name}/{state}"] = [np.zeros(()), np.zeros((2, 2)), array][number // 3 % 3]
            case "empty":
                held[name] = np.zeros(EMPTY[number % len(EMPTY)], np.float32)


NAME = st.sampled_from(NAMES)
DISTURBANCES = st.lists(st.builds(Disturbance, st.sampled_from(KINDS), NAME, NAME, st.integers(0, 999)), max_size=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("strange")


def _converted(source: Path, out: Path, to: str, said: dict[str, Any]) -> tuple[set[str], tx.Report | None]:
    try:
        return set(), tx.convert(source, out, to=to, optimizer=True, sync=False, jobs=1, **said)
    except tx.TransaxleError as error:
        return {refusal.code for refusal in error.refusals if refusal.message}, None


@given(
    wrong=DISTURBANCES,
    to=st.sampled_from(TARGETS),
    family=st.sampled_from([None, "qwen3_moe", "llama", "mixtral"]),
    configured=st.booleans(),
)
@law
def test_converted_exactly_or_refused(
    folder: Path, wrong: list[Disturbance], to: str, family: str | None, *, configured: bool
) -> None:
    source, out, back = folder / "source", folder / "out", folder / "back"
    for path in (source, out, back):
        shutil.rmtree(path, ignore_errors=True)
    held, config = dict(HELD), dict(CONFIG)
    for one in wrong:
        one.apply(held, config)
    checkpoints.write(source, held, config=config if configured else None)
    said: dict[str, Any] = {} if family is None else {"family": family}
    codes, report = _converted(source, out, to, said)
    if report is None:
        assert codes
        assert not out.exists()
        return
    assert tx.verify(out).ok
    assert report.tensors == len(checkpoints.read(out))
    assert tx.diff(source, out, **said).equal or report.kept or report.ignored
    with tx.open(source, **said) as checkpoint:
        origin = checkpoint.dialect
    if origin is None or to == "identity":
        origin = "identity"  # nothing was asked of the family, and something may be lacking
    _, again = _converted(out, back, origin, said)
    assert again is not None
    first, last = checkpoints.read(source), checkpoints.read(back)
    assert all(last[name].tobytes() == first[name].tobytes() for name in last)
    assert first.keys() - last.keys() <= {"lm_head.weight", *report.ignored}, "only what is tied is stored once"
