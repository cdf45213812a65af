"""The checkpoints of a run's steps under one folder or URL: saved in turn, and deleted when newer ones are complete.

Frameworks that save into folders of their own rotate these; what lies elsewhere is rotated here. Nothing is deleted
before a newer checkpoint is complete, and nothing that is not all of it a checkpoint that Transaxle wrote.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from transaxle.arguments import PathLike, read_count, read_path
from transaxle.errors import TransaxleError, gathered, refuse
from transaxle.formats.registry import MANIFEST
from transaxle.formats.storage.storage import is_url
from transaxle.formats.store.leftovers import clean, discard, leftovers
from transaxle.formats.store.place import LocalFolder, RemoteFolder, strangers
from transaxle.formats.store.service import Service
from transaxle.formats.store.staging import on_this_machine
from transaxle.formats.store.upload import turn
from transaxle.live.asynchronous import SaveJob, async_save
from transaxle.live.derived import kept_elsewhere, partitioned
from transaxle.live.extra_state import EXTRA, FILE, Extras
from transaxle.live.save import save
from transaxle.live.transport.world import World
from transaxle.torch_tensors import Ranks

FOLDER = "transaxle"
"""The checkpoint's folder, inside that of the trainer."""
TICKET = "transaxle_save"
"""Name under which the framework's folder, and the checkpoint under a URL, have the same random text: of one save."""
_NUMBERED = re.compile(r"(.*?)([0-9]+)")
"""Name of a step's checkpoint: what all steps have in common, and the number of this one."""
_LONGEST = 1 << 30
_GIVEN = f"{EXTRA}/"
"""Begin of the names of what was given in `extra`."""


def read_place(url: PathLike | None, keep: int | None) -> tuple[str | None, int | None]:
    """Return the folder or URL under which each step has a checkpoint, and how many of these stay.

    Raises:
        TypeError: an argument of a type that it cannot have.
        ValueError: `keep` is zero or less.
        Refused: UNSUPPORTED for `keep` without `url`.
    """
    kept = None if keep is None else read_count("keep", keep)
    if url is None and kept is not None:
        hint = "Give url=, or let the framework delete: save_total_limit, total_limit."
        raise refuse("UNSUPPORTED", "keep counts the checkpoints under url, which is not given", hint=hint)
    return None if url is None else on_this_machine(read_path("url", url).rstrip("/")), kept


class StepCheckpoints:
    """Saves a run's steps under a folder or URL.

    Args:
        url: the folder or URL.
        keep: how many stay; None: all.
        group: the ranks that save together; None: all.
        background: write while training goes on.
    """

    def __init__(self, url: str, keep: int | None, group: Ranks | None, *, background: bool) -> None:
        self._url = url
        self._keep = keep
        self._group = group
        self._background = background
        self._job: SaveJob | None = None
        self._last = ""
        self.best: str | None = None
        """Name of the checkpoint that stays however old it is."""

    def place(self, name: str) -> str:
        """Return where the checkpoint of a name lies."""
        return f"{self._url}/{name}"

    def shares(self, other: StepCheckpoints | None) -> bool:
        """Tell whether others save into the same place."""
        return other is not None and other._url == self._url

    def save(self, model: nn.Module, name: str, best: str | None = None, **told: Any) -> None:
        """Save a step, once the one before is complete.

        Args:
            model: what is saved.
            name: of its checkpoint.
            best: name of the best one, which stays once this one is complete; None: as it was.
            **told: keyword arguments of `save`.

        Raises:
            TransaxleError: what that one, or this one, failed with.
        """
        self.wait()
        self.best = best or self.best  # not before: what was the best until now goes when this one is complete
        if not is_url(self._url):
            Path(self._url).mkdir(parents=True, exist_ok=True)
        told |= {"overwrite": True, "group": self._group}
        if self._background:
            self._job = async_save(model, self.place(name), **told)
        else:
            save(model, self.place(name), **told)
        self._last = name
        if not self._background:
            self._tidy()

    def wait(self) -> None:
        """Wait for the last save, and delete what it replaces.

        Raises:
            TransaxleError: what it failed with; nothing is deleted then.
        """
        job, self._job = self._job, None
        if job is not None:
            job.result()
            self._tidy()

    def steps(self, common: str) -> dict[int, str]:
        """Return the complete checkpoints of a run's steps: number -> name.

        Args:
            common: what their names have before the number; others belong to somebody else.

        Raises:
            StorageError: IO.
        """
        found = [(match, name) for name in _members(self._url) if (match := _NUMBERED.fullmatch(name)) is not None]
        return {int(match[2]): name for match, name in found if match[1] == common and is_complete(self.place(name))}

    def _tidy(self) -> None:
        """Delete, on one rank, all but the newest few up to the one just saved; later and other ones stay.

        A run that went back to an earlier step has later ones, too, until it replaces them. What killed runs have left
        of steps goes, too.
        """
        world = World(self._group)
        if self._keep is None or world.rank != world.ranks[0]:
            return
        newest = _NUMBERED.fullmatch(self._last)
        if newest is None:
            return
        try:
            numbers = {number: name for number, name in self.steps(newest[1]).items() if number <= int(newest[2])}
            for number in sorted(numbers)[: -self._keep]:
                if numbers[number] not in (self.best, self._last):
                    remove(self.place(numbers[number]))
            if not is_url(self._url):
                self._sweep(newest[1])
        except TransaxleError as error:  # the run goes on: its checkpoints are all there
            warnings.warn(f"older checkpoints under {self._url} were not deleted: {error}", stacklevel=2)

    def _sweep(self, common: str) -> None:
        """Clean up what killed runs have left beside steps whose names begin alike."""
        for leftover in leftovers(self._url):
            target = Path(leftover.target)
            step = _NUMBERED.fullmatch(target.name) if target.parent == Path(self._url).resolve() else None
            if step is not None and step[1] == common and leftover.outcome == "found":
                clean(leftover)


def check_loadable(model: nn.Module) -> None:
    """Refuse a model that could perhaps be saved, but not loaded: whoever trains it learns so before the first step.

    Raises:
        Refused: UNSUPPORTED.
    """
    if kept := [*partitioned(model), *kept_elsewhere(model)]:
        raise gathered(kept)


def is_complete(place: str) -> bool:
    """Tell whether a folder or URL holds a complete checkpoint of ours.

    Raises:
        StorageError: IO.
    """
    return stored_bytes(place, MANIFEST) is not None


def stored_bytes(place: str, name: str) -> bytes | None:
    """Return a file of a checkpoint; None where there is none.

    Raises:
        StorageError: IO.
    """
    if not is_url(place):
        return LocalFolder(Path(place)).read(name, _LONGEST)
    return RemoteFolder(Service(place)).read(name, _LONGEST)


def text_beside(place: str, name: str) -> str | None:
    """Return a text that a complete checkpoint under a URL or in a folder has beside tensors; None where there is none.

    Args:
        place: of the checkpoint.
        name: under which it was given in `extra`.

    Raises:
        Refused: CORRUPT.
        StorageError: IO.
    """
    found = states_beside(place, World()).get(name)
    return found if isinstance(found, str) else None


def states_beside(place: str, world: World) -> dict[str, Any]:
    """Return what a complete checkpoint has beside tensors for this rank, by the names in `extra`.

    Raises:
        Refused: CORRUPT.
        StorageError: IO.
    """
    text = stored_bytes(place, FILE) if is_complete(place) else None
    found = {} if text is None else Extras(text, world).states
    return {name.removeprefix(_GIVEN): state for name, state in found.items() if name.startswith(_GIVEN)}


def remove(place: str) -> None:
    """Delete a checkpoint; one that is not there needs no deleting.

    Raises:
        UsageError: EXISTS where anything in the folder is not of a checkpoint that Transaxle wrote. Nothing is deleted.
        StorageError: IO.
    """
    if not is_url(place):
        if Path(place).exists():
            _check_ours(LocalFolder(Path(place)), place)
            discard(Path(place))
        return
    service = Service(place)
    files = service.below(service.path, service.shown)
    if files:
        _check_ours(RemoteFolder(service), service.shown)
    names = {file.removeprefix(f"{service.path}/"): file for file in files}
    for name in sorted(names, key=turn, reverse=True):  # the manifest first: nobody reads what is half gone
        service.delete(names[name], name)


def _members(url: str) -> Mapping[str, str]:
    """Return the names of what lies directly under a folder or URL."""
    if not is_url(url):
        return LocalFolder(Path(url)).top() if Path(url).is_dir() else {}
    return RemoteFolder(Service(url)).top()


def _check_ours(folder: LocalFolder | RemoteFolder, shown: str) -> None:
    """Refuse to delete a folder that is not all of it a checkpoint of ours.

    Raises:
        UsageError: EXISTS.
    """
    foreign = strangers(folder) if MANIFEST in folder.top() else [f"no {MANIFEST} there: the folder"]
    if foreign:
        message = f"nothing is deleted: {', '.join(foreign[:8])} belongs to no checkpoint that Transaxle wrote"
        raise refuse("EXISTS", message, file=shown, hint="Move it elsewhere, or delete the folder by hand.")
