"""Run as a program: convert again and again, die at one more point each time, and look at what is left.

    python -m tests.engine.killed SOURCE FOLDER REFERENCE OLD [TO EVERY]

Each child dies by SIGKILL before or after its n-th call that changes the disk, for every n or each EVERY-th. The parent
then demands that the target is what it was or complete, lets another run finish the work, and demands the reference's
bytes. It prints how many children died.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transaxle as tx
from transaxle.engine import journal
from transaxle.formats import place, staging

TO = "automodel"
SHARD_SIZE = 8000
JOBS = 1


class Death:
    """Dies at the n-th of all points before and after the wrapped calls."""

    def __init__(self, at: int) -> None:
        self.left = at

    def point(self) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def dying(*args: Any, **kwargs: Any) -> Any:
            self.point()
            result = call(*args, **kwargs)
            self.point()
            return result

        return dying

    def prepare(self) -> None:
        """Wrap everything that writes, makes, renames or removes."""
        for owner, names in {
            os: ("pwrite", "ftruncate", "fsync"),
            shutil: ("rmtree",),
            place: ("rename_new", "exchange", "make_durable"),
            staging: ("reserve", "make_durable"),
            journal.Journal: ("add",),
            Path: ("mkdir", "unlink"),
        }.items():
            for name in names:
                setattr(owner, name, self.wrap(getattr(owner, name)))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def convert(source: Path, target: Path, to: str = TO, **options: Any) -> None:
    tx.convert(source, target, to=to, shard_size=SHARD_SIZE, jobs=JOBS, **options)


def died(source: Path, target: Path, at: int, **options: Any) -> bool:
    """Convert in a child that dies at a point; False if it finished before."""
    child = os.fork()
    if child == 0:
        Death(at).prepare()
        convert(source, target, **options)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, status
    return False


def _durable(fd: object) -> None:
    """Stand in for fsync: a kill loses nothing that was written, and waiting for the disk takes most of the time."""


def main(source: Path, folder: Path, reference: Path, old: Path, to: str = TO, every: int = 1) -> None:
    os.fsync = _durable
    wanted, before = contents(reference), contents(old)
    untouched = contents(source)
    for replacing in (False, True):
        at = 0
        while True:
            target = folder / f"{replacing}-{at}"
            if replacing:
                shutil.copytree(old, target)
            resume = at % 3 != 2
            if not died(source, target, at, to=to, overwrite=replacing, resume=at % 2 == 1):
                break
            found = contents(target) if target.exists() else None
            assert found in ([before, wanted] if replacing else [None, wanted]), f"point {at}: a mixed checkpoint"
            if found == wanted and not resume:
                shutil.rmtree(target)
            convert(source, target, to, overwrite=replacing, resume=resume)
            assert contents(target) == wanted, f"point {at}: another result"
            left = [path.name for path in folder.iterdir() if path != target]
            assert left == [], f"point {at}: {left}"
            shutil.rmtree(target)
            at += every
        shutil.rmtree(target)
        sys.stdout.write(f"{at // every}\n")
    assert contents(source) == untouched


if __name__ == "__main__":
    source, folder, reference, old = map(Path, sys.argv[1:5])
    to, every = sys.argv[5:] or (TO, "1")
    main(source, folder, reference, old, to, int(every))
