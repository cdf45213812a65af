"""What a killed run leaves beside its target: found, named, and removed when nobody works with it any more.

Two hidden neighbours of a target can be there, `.<name>.transaxle-partial` and `.<name>.transaxle-old`. The first is
work in progress, or the checkpoint that was replaced; the second is the one that was moved aside, and the only one
there is if the target is missing: then it is put back. Nothing is removed that a process holds the lock of, and nothing
whose content is not a checkpoint's: whoever made that must remove it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from transaxle.errors import TransaxleError, refuse
from transaxle.formats.registry import is_one_file
from transaxle.formats.remote.url import is_url, local_path, shown
from transaxle.formats.staging.belongings import LocalFolder, strangers
from transaxle.formats.staging.claim import Claim, lock, opened
from transaxle.formats.staging.place import JOURNAL, OLD, OURS, PARTIAL, SCRATCH, make_durable, neighbour
from transaxle.formats.storage.os_errors import failed

_HASHED = re.compile(r"[0-9a-f]{64}")
"""What stands for a name that is too long for an ending of ours."""
_IN_USE = "a process works with it. Wait for it, or end it."
_SHOWN = 3

Outcome = Literal["found", "removed", "put back", "kept"]


@dataclass(frozen=True)
class Leftover:
    """A hidden folder that a run has left."""

    path: str
    """Where it is."""
    target: str
    """The target beside which it lies."""
    what: str
    """What it is, and whether it can be continued."""
    nbytes: int
    """Bytes of the files in it."""
    outcome: Outcome = "found"
    """What was done with it."""
    why: str = ""
    """Why it was kept."""

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON data."""
        return asdict(self)


def leftovers(path: str | os.PathLike[str]) -> tuple[Leftover, ...]:
    """Return what killed runs have left beside a target, and directly inside of it where it is a folder.

    Args:
        path: a target, which need not exist, a folder of targets, or a leftover itself.

    Raises:
        Refused: UNSUPPORTED for a URL: services have no such folders.
        StorageError: IO.
    """
    typed = os.fspath(path)
    if is_url(typed):
        here = local_path(typed)
        if here is None:
            hint = "Parts of uploads that nobody finished are removed by the service, where its rules say so."
            raise refuse("UNSUPPORTED", "a killed run leaves no folders on a service", file=shown(typed), hint=hint)
        typed = here
    if not typed or "\0" in typed:
        raise refuse("IO", f"{typed!r} is not a path", file=typed)
    try:
        found = [described(each, target) for each, target in _candidates(typed)]
        return tuple(replace(each, outcome="kept", why=_IN_USE) if _locked(Path(each.path)) else each for each in found)
    except OSError as error:
        raise failed(error, "looking for leftovers", typed) from error


def _candidates(typed: str) -> Iterator[tuple[Path, Path]]:
    """Yield hidden folders with the targets that they belong to."""
    place = Path(os.path.realpath(typed))
    named = OURS.fullmatch(place.name)
    if named and _is_folder(place):
        yield place, place.with_name(named[1])
        return
    if not place.parent.is_dir():
        raise refuse("IO", "there is no such file or folder", file=typed)
    for what in (PARTIAL, OLD):
        if place.name and _is_folder(hidden := neighbour(place, what)):
            yield hidden, place
    if place.is_dir():
        for entry in sorted(os.scandir(place), key=lambda entry: entry.name):
            found = OURS.fullmatch(entry.name)
            if found and entry.is_dir(follow_symlinks=False):
                yield Path(entry.path), place / found[1]


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def described(path: Path, target: Path) -> Leftover:
    """Say what a hidden folder is.

    Args:
        path: the folder.
        target: the target that it belongs to.

    Raises:
        OSError: it cannot be read.
    """
    there = os.path.lexists(target)
    scratch = path / SCRATCH
    done = _done(scratch / JOURNAL)
    if path.name.endswith(OLD):
        what = "the checkpoint that was replaced" if there else f"the checkpoint that was at {target}, moved aside"
    elif not scratch.is_dir():
        what = "what was there before, or is finished and not yet in its place" if any(path.iterdir()) else "empty"
    elif done:
        what = f"work in progress: {done:,} tensors are written, --resume continues it"
    else:
        what = "work in progress, hardly begun"
    return Leftover(str(path), str(target), what, _size(path))


def _done(journal: Path) -> int:
    """Count the tensors that a journal lists."""
    if not journal.is_file():
        return 0
    with journal.open("rb") as lines:
        return max(0, sum(bool(line.strip()) for line in lines) - 1)  # the first line says what it belongs to


def _size(path: Path) -> int:
    """Return the bytes of all files in a folder, as far as they stay."""
    size = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                size += Path(folder, name).lstat().st_size
    return size


def swept(target: str) -> tuple[str, ...]:
    """Clean up beside a target that is complete; return what was there, and what became of it.

    Raises:
        StorageError: IO.
    """
    said = []
    for each in leftovers(target):
        if os.path.realpath(target) == each.target:
            done = clean(each) if each.outcome == "found" else each
            why = f": {done.why}" if done.why else ""
            said.append(f"{done.path}, left by a killed run ({done.what}), was {done.outcome}{why}")
    return tuple(said)


def clean(found: Leftover) -> Leftover:
    """Remove a leftover, or put it back where it is the only checkpoint there is.

    Returns:
        It, with what was done.

    Raises:
        StorageError: IO.
    """
    path, target = Path(found.path), Path(found.target)
    claim = Claim(neighbour(target, PARTIAL), found.target)
    try:
        made = claim.take()
    except TransaxleError as error:
        return replace(found, outcome="kept", why=f"{error.refusals[0].message}. {error.hint}")
    try:
        return _cleaned(found, path, target)
    except OSError as error:
        raise failed(error, "removing it", found.path) from error
    finally:
        if made:
            shutil.rmtree(neighbour(target, PARTIAL), ignore_errors=True)
        claim.release()


def _cleaned(found: Leftover, path: Path, target: Path) -> Leftover:
    """Remove or put back one leftover whose target nobody else writes now."""
    if path.name.endswith(OLD):
        if _HASHED.fullmatch(target.name):
            return replace(found, outcome="kept", why="its target cannot be told from its name. Name the target.")
        if _locked(path):
            return replace(found, outcome="kept", why=_IN_USE)
        if not os.path.lexists(target):
            path.rename(target)
            make_durable(target.parent)
            return replace(found, outcome="put back")
    own = [] if (path / SCRATCH).is_dir() else strangers(LocalFolder(path))
    if is_one_file(target.name):
        own = [name for name in own if not is_one_file(name)]  # one file, which may have any name
    if own:
        more = f" and {len(own) - _SHOWN:,} more" if len(own) > _SHOWN else ""
        why = f"{', '.join(own[:_SHOWN])}{more} belong to no checkpoint. Move that elsewhere, or remove it by hand."
        return replace(found, outcome="kept", why=why)
    shutil.rmtree(path)
    return replace(found, outcome="removed")


def _locked(path: Path) -> bool:
    """Tell whether a process holds the lock of a folder."""
    with opened(path) as fd:
        return lock(fd) is False  # where there are no locks, the claim on the target's own folder has decided it
