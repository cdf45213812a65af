"""Run as a program: save again and again, die at one more point each time, and look at what is there.

    python -m tests.live.save.killed_saves FOLDER TO EVERY
    python -m tests.live.save.killed_saves FOLDER rotation EVERY

Each child dies by SIGKILL before or after its n-th call that changes the disk, for each EVERY-th n: while it saves a
model into a new place, while it replaces a checkpoint, or while it saves the step of a run that keeps one. The parent
then demands that what is there is what was or complete, with the file that names the newest step; of a run, that each
step which counts as complete is, and that the newest loads. The next save leaves nothing over. It prints how many
children died.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

import transaxle as tx
from tests.engine import killed
from tests.engine.killed import CHANGES, Death, contents
from tests.parallel.models import EVEN, build
from transaxle.formats.registry import LATEST_UNIVERSAL, MEGATRON_TRACKER
from transaxle.live.integrations.step_checkpoints import StepCheckpoints
from transaxle.live.save import save

ROTATION = "rotation"
TRACKERS = {"torch_dist": MEGATRON_TRACKER, "megatron_torch": MEGATRON_TRACKER, "deepspeed-universal": LATEST_UNIVERSAL}
"""Formats -> the file by which their loaders find the newest step."""
CONFIG = {**EVEN, "num_hidden_layers": 1}
CALLS = {**CHANGES, os: (*CHANGES[os], "unlink", "rmdir")}
"""Calls that change the disk, those of `shutil.rmtree` one by one."""


def _model(seed: int) -> nn.Module:
    return build(CONFIG, seed)


def _died(at: int, work: Callable[[], object]) -> bool:
    """Do something in a child that dies at a point; False if it finished before."""
    child = os.fork()
    if child == 0:
        Death(at, CALLS).prepare()
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def _saves(folder: Path, to: str, every: int) -> int:
    old, new = _model(1), _model(2)
    write = partial(save, to=to)
    write(old, folder / "old")
    write(new, folder / "new")
    before, wanted, points = contents(folder / "old"), contents(folder / "new"), 0
    assert before != wanted
    assert TRACKERS.get(to) is None or TRACKERS[to] in wanted
    for replacing in (False, True):
        at = 0
        while True:
            target = folder / f"{replacing}-{at}"
            if replacing:
                shutil.copytree(folder / "old", target)
            if not _died(at, partial(write, new, target, overwrite=replacing)):
                break
            found = contents(target) if target.exists() else None
            assert found in ([before, wanted] if replacing else [None, wanted]), f"point {at}: a mixed checkpoint"
            if found is not None:
                _check_tracker(target, to)
                assert tx.verify(target).ok
                tx.load(_model(0), target)
            write(new, target, overwrite=True)
            assert contents(target) == wanted, f"point {at}: another result"
            shutil.rmtree(target)
            assert sorted(path.name for path in folder.iterdir()) == ["new", "old"], f"point {at}"
            at += every
            points += 1
        shutil.rmtree(target)
    return points


def _check_tracker(target: Path, to: str) -> None:
    """Demand that the file names a folder that is there."""
    if to in TRACKERS:
        newest = (target / TRACKERS[to]).read_text().strip()
        assert (target / newest).is_dir() or (target / f"iter_{int(newest):07d}").is_dir()


def _rotation(folder: Path, every: int) -> int:
    """Keep one step, and die while the third is saved and the second goes."""
    models = {step: nn.Linear(8, 4) for step in range(1, 5)}
    at = points = 0

    def saved(url: Path, step: int) -> None:
        StepCheckpoints(str(url), 1, None, background=False).save(models[step], f"step-{step}", to="dcp:identity")

    while True:
        url = folder / f"run-{at}"
        for step in (1, 2):
            saved(url, step)
        if not _died(at, partial(saved, url, 3)):
            break
        steps = StepCheckpoints(str(url), 1, None, background=False).steps("step-")
        assert max(steps) in (2, 3), f"point {at}"
        for step, name in steps.items():
            assert tx.verify(url / name).ok, f"point {at}: {name} is broken"
            loaded = nn.Linear(8, 4)
            tx.load(loaded, url / name)
            assert torch.equal(loaded.weight, models[step].weight), f"point {at}: {name}"
        assert sorted(path.name for path in url.iterdir() if not path.name.startswith(".")) == sorted(steps.values())
        saved(url, 4)
        assert [path.name for path in url.iterdir()] == ["step-4"], f"point {at}: {[*url.iterdir()]}"
        shutil.rmtree(url)
        at += every
        points += 1
    return points


def main(folder: Path, to: str, every: int) -> None:
    torch.set_num_threads(1)  # children of a process with threads do not have them
    os.fsync = killed._durable
    points = _rotation(folder, every) if to == ROTATION else _saves(folder, to, every)
    sys.stdout.write(f"{points}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
