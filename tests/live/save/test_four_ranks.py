"""Faults among four ranks: each one that is left gets one error in time, and the checkpoint of before is there."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import transaxle as tx
from tests.formats.faulty_proxy import proxied
from tests.formats.s3_server import Bucket
from tests.live.ranks import DIED, Ranks
from tests.live.save import test_lost_store as lost_store
from tests.live.save.test_save_failures import (
    HUNG,
    NEW,
    OLD,
    SHORT,
    _again,
    _background,
    _first,
    _holds,
    _job,
    _process,
    _state,
    _stopped,
)
from transaxle.errors import TransaxleError

WORLD = 4
WHO = 2
"""The rank that fails: neither the first, which commits, nor the last."""


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Ranks of this test alone."""
    found = Ranks(WORLD, SHORT)
    yield found
    found.stop()


def _loaded(rank: int, world: int, target: str, add: float) -> bool:
    """Whether the checkpoint loads on all ranks, with the values of a save."""
    state, wanted = _state(-1.0), _state(add)
    tx.load(state, target)
    return all(torch.equal(each.to_local(), wanted[name].to_local()) for name, each in state.items())


def _told(answers: list[tuple[bool, Any]], *, died: bool) -> list[str]:
    """What the ranks have raised, of which each is one refusal; one of them may have died."""
    if died:
        assert answers[WHO] == (False, DIED)
        answers = answers[:WHO] + answers[WHO + 1 :]
    for fine, error in answers:
        assert not fine
        assert isinstance(error, TransaxleError), error
        assert len(error.refusals) == 1, error
        assert error.code in ("IO", "NO_SPACE")
    return [str(error) for _, error in answers]


def _saved_afterwards(target: Path) -> None:
    """The next run, of other processes, loads what is there, and replaces it."""
    others = Ranks(WORLD)
    try:
        assert others.run(_loaded, str(target), OLD) == [True] * WORLD
        others.run(_again, str(target), -1, "")
    finally:
        others.stop()
    assert _holds(target, NEW)
    assert [path.name for path in target.parent.iterdir()] == [target.name]


@pytest.mark.oracle
def test_a_rank_that_is_killed(tmp_path: Path, ranks: Ranks) -> None:
    target = tmp_path / "run"
    ranks.run(_first, str(target))
    for said in _told(ranks.answers(_again, str(target), WHO, "killed"), died=True):
        assert "a rank died or did not answer in time" in said
    assert _holds(target, OLD)
    _saved_afterwards(target)


def test_a_disk_that_is_full_on_one_rank(tmp_path: Path, ranks: Ranks) -> None:
    target = tmp_path / "run"
    ranks.run(_first, str(target))
    assert len(set(_told(ranks.answers(_again, str(target), WHO, "full"), died=False))) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert ranks.run(_loaded, str(target), OLD) == [True] * WORLD
    ranks.run(_again, str(target), -1, "")
    assert _holds(target, NEW)


@pytest.mark.oracle
def test_a_rank_that_is_too_slow_is_told_too(tmp_path: Path, ranks: Ranks) -> None:
    """It stands still for longer than the others wait, and goes on when they have given up."""
    target, meeting = tmp_path / "run", tmp_path / "meeting"
    meeting.mkdir()
    ranks.run(_first, str(target))
    ranks.meet(str(meeting))
    for pipe in ranks.pipes:
        pipe.send((_again.__module__, _again.__name__, (str(target), WHO, "hung")))
    answers: list[Any] = [None] * WORLD
    for rank in (0, 1, 3, WHO):
        if rank == WHO:
            pid = ranks.processes[WHO].pid
            assert pid is not None
            os.kill(pid, signal.SIGCONT)
        assert ranks.pipes[rank].poll(HUNG)
        answers[rank] = ranks.pipes[rank].recv()
    assert len(_told(answers, died=False)) == WORLD
    assert _holds(target, OLD)
    (meeting / "meeting-0").unlink(missing_ok=True)
    meeting.rmdir()
    _saved_afterwards(target)


SLOW = 1.5
"""Seconds by which a rank is behind, of those that the others wait."""


def _behind(rank: int, world: int, target: str) -> None:
    state = _state(NEW)
    if rank == WHO:
        time.sleep(SLOW)
    tx.save(state, target, to="safetensors", overwrite=True)
    job = _job(_state(NEW + 1), target)
    if rank == WHO:
        os.kill(_process(world).pid, signal.SIGSTOP)
        time.sleep(SLOW)
        os.kill(_process(world).pid, signal.SIGCONT)
    job.result(HUNG)


@pytest.mark.oracle
def test_a_rank_that_is_slow_is_waited_for(tmp_path: Path, ranks: Ranks) -> None:
    ranks.run(_first, str(tmp_path / "run"))
    ranks.run(_behind, str(tmp_path / "run"))
    assert _holds(tmp_path / "run", NEW + 1)


@pytest.mark.parametrize("fault", ["killed", pytest.param("full", marks=pytest.mark.oracle)])
def test_in_the_background(tmp_path: Path, ranks: Ranks, fault: str) -> None:
    """One background process is killed, or its disk is full: told on every rank, and the next save is well."""
    target = tmp_path / "run"
    for said in ranks.run(_background, str(target), WHO, fault):
        assert len(said) == 1
        assert set(said) <= {"IO", "NO_SPACE"}
    assert ranks.run(_loaded, str(target), OLD) == [True] * WORLD
    assert _holds(tmp_path / "run-next", NEW + 1)


@pytest.mark.oracle
def test_a_background_process_that_stands_still(tmp_path: Path, ranks: Ranks) -> None:
    target = tmp_path / "run"
    said = ranks.run(_stopped, str(target))
    assert len({str(each) for each in said}) == 1
    assert len(said[0]) == 1
    assert "did not answer in time" in said[0][0]
    assert ranks.run(_loaded, str(target), OLD) == [True] * WORLD


def _leaves(rank: int, world: int, target: str) -> None:
    """Begin a save in the background of which one rank, with the process that writes for it, is killed."""
    _job(_state(OLD), target).result()
    process = _process(world)
    os.kill(process.pid, signal.SIGSTOP)  # nobody is done before it has happened
    job = _job(_state(NEW), target)
    dist.barrier()
    if rank == WHO:
        os.kill(process.pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    os.kill(process.pid, signal.SIGCONT)
    job.result(HUNG)


@pytest.mark.oracle
def test_a_rank_that_is_killed_while_it_is_saved_in_the_background(tmp_path: Path, ranks: Ranks) -> None:
    target = tmp_path / "run"
    _told(ranks.answers(_leaves, str(target)), died=True)
    assert _holds(target, OLD)
    _saved_afterwards(target)


@pytest.mark.oracle
@pytest.mark.parametrize("background", [False, True])
def test_a_store_that_is_lost(bucket: Bucket, s3_server: str, background: bool) -> None:
    """The former step stays, nothing opens as the new one, and the next save to the same place is well."""
    first, second = f"{bucket.url}/step-1", f"{bucket.url}/step-2"
    ranks = Ranks(WORLD, timedelta(seconds=120))
    try:
        with proxied(s3_server) as proxy:
            ranks.run(lost_store._save, proxy.url, first, OLD, background)
            proxy.fails = lost_store._until(lost_store.AT["sending"])
            answers = ranks.answers(lost_store._save, proxy.url, second, NEW, background)
            for fine, error in answers:
                assert not fine
                assert isinstance(error, TransaxleError), error
                assert {refusal.code for refusal in error.refusals} == {"IO"}
            assert len({str(error) for _, error in answers}) == 1
            assert lost_store._holds(bucket, first, OLD)
            with pytest.raises(TransaxleError):
                tx.open(second)
            proxy.fails = lambda _method, _path: None
            ranks.run(lost_store._save, proxy.url, second, NEW, background)
            assert lost_store._holds(bucket, second, NEW)
    finally:
        ranks.stop()
