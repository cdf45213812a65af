"""DeepSpeed goes on from our universal checkpoints, on other ranks and at other stages, as if it had never stopped."""

from __future__ import annotations

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
Trained = dict[object, tuple[Path, list[Any]]]
"""A run, or the way on from one -> its folder, and what each rank told."""


def _all(runs: dict[Any, tuple[How, scheduled_run.Job]]) -> Trained:
    """Run jobs; those of as many ranks one after the other in the same processes."""
    done: Trained = {}
    for world in sorted({how.world for how, _ in runs.values()}):
        mine = {key: job for key, (how, job) in runs.items() if how.world == world}
        told = run(world, scheduled_run.train, list(mine.values()))
        done |= {key: (Path(job.folder), [rank[at] for rank in told]) for at, (key, job) in enumerate(mine.items())}
        stop_all()  # DeepSpeed keeps groups of processes
    return done


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Runs that never stop."""
    folder = tmp_path_factory.mktemp("begun")
    hows = dict.fromkeys(source for source, _ in WAYS)
    jobs = {
        how: (how, scheduled_run.Job(how.stage, how.low, str(folder / str(at)), (STOPS, ENDS)))
        for at, how in enumerate(hows)
    }
    return _all(jobs)


@pytest.fixture(scope="module")
def resumed(begun: Trained, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Runs that go on from what those saved on the way."""
    folder = tmp_path_factory.mktemp("resumed")
    jobs = {}
    for at, (source, target) in enumerate(WAYS):
        universal = folder / f"universal-{at}"
        report = tx.convert(begun[source][0] / str(STOPS), universal, to=UNIVERSAL, sync=False)
        assert ["differ in lr, which ZeRO-3 does not load" in note for note in report.notes] == [True]
        job = scheduled_run.Job(target.stage, target.low, str(folder / str(at)), (ENDS,), str(universal))
        jobs[source, target] = target, job
    return _all(jobs)


@pytest.mark.oracle
@pytest.mark.parametrize(("source", "target"), WAYS, ids=str)
def test_next_steps_are_those_of_a_run_that_never_stopped(
    source: How, target: How, begun: Trained, resumed: Trained
) -> None:
    (folder, told), (on, found) = begun[source], resumed[source, target]
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
