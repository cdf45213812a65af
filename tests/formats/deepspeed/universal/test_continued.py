"""DeepSpeed goes on from our universal checkpoints, on other ranks and at other stages, as if it had never stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import transaxle as tx
from tests.formats.deepspeed.universal import scheduled_run
from tests.live.ranks import run, stop_all
from transaxle.formats.deepspeed.keys import UNIVERSAL
from transaxle.formats.training_state import OPTIMIZER

pytestmark = [pytest.mark.peers, pytest.mark.slow]
STOPS, ENDS = 3, 5


class How(NamedTuple):
    """A run's stage, ranks and type."""

    stage: int
    world: int
    low: bool = True


WAYS = [
    (How(1, 2), How(1, 1)),
    (How(1, 1), How(2, 2)),
    (How(2, 2), How(3, 1)),
    (How(2, 1), How(1, 2)),
    (How(3, 2), How(3, 1)),
    (How(3, 1), How(3, 2)),
    (How(3, 1, low=False), How(1, 2, low=False)),
    (How(1, 2, low=False), How(2, 1, low=False)),
]
Train = Callable[[How, str], tuple[Path, list[Any]]]
"""Runs a job from scratch, or from a universal checkpoint; returns its folder, and what each rank told."""


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Train]:
    """Run each job once."""
    done: dict[tuple[How, str], tuple[Path, list[Any]]] = {}

    def make(how: How, source: str = "") -> tuple[Path, list[Any]]:
        if (how, source) not in done:
            folder = tmp_path_factory.mktemp("run")
            saves = (ENDS,) if source else (STOPS, ENDS)
            job = scheduled_run.Job(how.stage, how.low, str(folder), saves, source)
            done[how, source] = folder, [told for (told,) in run(how.world, scheduled_run.train, [job])]
            stop_all()  # DeepSpeed keeps groups of processes
        return done[how, source]

    yield make
    stop_all()


@pytest.mark.oracle
@pytest.mark.parametrize(("source", "target"), WAYS, ids=str)
def test_next_steps_are_those_of_a_run_that_never_stopped(
    source: How, target: How, train: Train, tmp_path: Path
) -> None:
    folder, told = train(source, "")
    report = tx.convert(folder / str(STOPS), tmp_path / "universal", to=UNIVERSAL, sync=False)
    assert ["differ in lr, which ZeRO-3 does not load" in note for note in report.notes] == [True]
    on, found = train(target, str(tmp_path / "universal"))
    assert found == [told[0][STOPS:]] * target.world
    assert len({tuple(rates) for rates, *_ in told[0]}) == ENDS
    with tx.open(folder / str(ENDS)) as wanted, tx.open(on / str(ENDS)) as ended, tx.open(folder / str(STOPS)) as begin:
        assert ended.keys() == wanted.keys()
        assert {name for name in wanted if name.endswith("/exp_avg")} == {
            f"{OPTIMIZER}{name}/exp_avg" for name in scheduled_run.TRAINED
        }
        assert [name for name in wanted if ended[name].tobytes() != wanted[name].tobytes()] == []
        moved = {name for name in wanted if begin[name].tobytes() != wanted[name].tobytes()}
        assert moved >= set(scheduled_run.TRAINED)
        assert _groups(ended) == _groups(wanted)
        weight = scheduled_run.made().state_dict()[scheduled_run.FROZEN]
        kept = weight.to(torch.bfloat16 if source.low else torch.float32)
        assert wanted[scheduled_run.FROZEN].tobytes() == kept.view(torch.uint8).numpy().tobytes()


def _groups(checkpoint: tx.Checkpoint) -> list[dict[str, Any]]:
    return [{**group, "params": sorted(group["params"])} for group in checkpoint.metadata["param_groups"]]
