"""Run as a program: convert again and again, die at one more point each time, and look at what is left.

    python -m tests.engine.killed SOURCE FOLDER REFERENCE OLD [TO EVERY [two-renames]]

REFERENCE and OLD are folders, or files such as `old.pt`: then the targets are one file too. `two-renames`: as on file
systems that cannot exchange two names. Each child dies by SIGKILL before or after its n-th call that changes the disk,
for every n or each EVERY-th. The parent then demands that the target is what it was or complete, lets another run
finish the work or `clean` remove it, and demands the reference's bytes and that nothing is left over. It prints how
many children died.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import transaxle as tx
from transaxle.formats.storage import copier
from transaxle.formats.store import place, staging
from transaxle.move import journal

TO = "automodel"
SHARD_SIZE = 8000
JOBS = 1


Calls = Mapping[Any, Sequence[str]]
"""Modules and classes -> names of their functions."""

CHANGES: Calls = {
    os: ("pwrite", "ftruncate", "fsync"), shutil: ("rmtree",), place: ("rename_new", "exchange", "make_durable"),
    staging: ("reserve", "make_durable"), journal.Journal: ("add",), Path: ("mkdir", "unlink", "rename", "replace"),
}  # fmt: skip
"""Everything that writes, makes, renames or removes on a disk, once `one_by_one` keeps it in Python."""


def one_by_one() -> Callable[..., int]:
    """Stand in for `load_steps`: no step of a batch is done, so each is done again in the ordinary way, by `os`."""

    def nothing(_steps: int, _stop: int, first: int) -> int:
        return first

    return nothing


class Death:
    """Dies at the n-th of all points before and after calls; of those that change the disk, unless others are named."""

    def __init__(self, at: int, calls: Calls = CHANGES) -> None:
        self.left = at
        self._calls = calls

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
        """Wrap the calls."""
        setattr(copier, "load_steps", one_by_one)  # noqa: B010
        for owner, names in self._calls.items():
            for name in names:
                setattr(owner, name, self.wrap(getattr(owner, name)))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, or the one file."""
    if folder.is_file():
        return {"": folder.read_bytes()}
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


def remove(target: Path) -> None:
    shutil.rmtree(target) if target.is_dir() else target.unlink()


def _never(*_: object) -> bool:
    """Stand in for `exchange` where names cannot be exchanged."""
    return False


def main(
    source: Path, folder: Path, reference: Path, old: Path, to: str = TO, every: int = 1, *, exchange: bool = True
) -> None:
    os.fsync = _durable
    if not exchange:
        setattr(place, "exchange", _never)  # noqa: B010
    wanted, before = contents(reference), contents(old)
    untouched = contents(source)
    for replacing in (False, True):
        at = 0
        while True:
            target = folder / f"{replacing}-{at}{reference.suffix}"
            if replacing:
                shutil.copytree(old, target) if old.is_dir() else shutil.copy(old, target)
            resume = at % 3 != 2
            if not died(source, target, at, to=to, overwrite=replacing, resume=at % 2 == 1):
                break
            found = contents(target) if target.exists() else None
            aside = place.neighbour(target, place.OLD)
            if replacing and not exchange and found is None:
                assert contents(aside) == before, f"point {at}: neither the old one nor the new one"
            else:
                assert found in ([before, wanted] if replacing else [None, wanted]), f"point {at}: a mixed checkpoint"
            if at % 4 == 3:
                moved = found is None and replacing
                assert all(each.outcome in ("removed", "put back") for each in tx.clean(target)), f"point {at}"
                assert (contents(target) if target.exists() else None) == (before if moved else found), f"point {at}"
                _alone(target, f"point {at}, cleaned")
            if found == wanted and resume:  # the work is done: what the run had no time to remove goes all the same
                convert(source, target, to, resume=True)
                _alone(target, f"point {at}, done")
            if found == wanted and not resume:
                remove(target)
            if not (resume or replacing):  # finished work is kept until somebody says otherwise
                tx.clean(target)
            convert(source, target, to, overwrite=replacing, resume=resume)
            assert contents(target) == wanted, f"point {at}: another result"
            _alone(target, f"point {at}")
            remove(target)
            at += every
        remove(target)
        sys.stdout.write(f"{at // every}\n")
    assert contents(source) == untouched


def _alone(target: Path, when: str) -> None:
    """Demand that nothing is left beside a target."""
    left = [path.name for path in target.parent.iterdir() if path != target]
    assert left == [], f"{when}: {left}"


if __name__ == "__main__":
    source, folder, reference, old = map(Path, sys.argv[1:5])
    to, every, *rest = sys.argv[5:] or (TO, "1")
    main(source, folder, reference, old, to, int(every), exchange=not rest)
