"""The checkpoints of a run's steps under one folder or URL; old checkpoints are deleted after newer ones are complete.

Training frameworks delete old checkpoints in their own folders; this module deletes old checkpoints in places that
these frameworks do not manage. The module deletes a checkpoint only after a newer one is complete, and only if
Transaxle wrote every file in it.
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
from transaxle.formats.store.leftovers import clean_leftover, discard, leftovers
from transaxle.formats.store.place import LocalFolder, RemoteFolder, foreign_files
from transaxle.formats.store.service import Service
from transaxle.formats.store.staging import as_local_path
from transaxle.formats.store.upload import turn
from transaxle.live.asynchronous import SaveJob, async_save
from transaxle.live.derived import find_kept_elsewhere, find_partitioned
from transaxle.live.extra_state import EXTRA, FILE, SavedStates
from transaxle.live.save import save
from transaxle.live.transport.world import World
from transaxle.torch_tensors import Ranks

FOLDER = "transaxle"
"""Name of the folder with Transaxle's checkpoint inside the trainer's folder."""
TICKET = "transaxle_save"
"""Name under which a random ID is stored, in the framework's folder and in the checkpoint under the URL; equal IDs mean
that the same save wrote both.
"""
_NUMBERED = re.compile(r"(.*?)([0-9]+)")
"""Pattern of the name of a step's checkpoint, such as `step-100`: a prefix that all steps share, and the number of the
step.
"""
_LONGEST = 1 << 30
_GIVEN = f"{EXTRA}/"
"""Prefix, in a checkpoint, of the names of states that the user passed in the argument `extra`."""


def read_place(url: PathLike | None, keep: int | None) -> tuple[str | None, int | None]:
    """Validate the folder or URL for step checkpoints, and the number of checkpoints to keep.

    Raises:
        TypeError: if `url` or `keep` has the wrong type.
        ValueError: if `keep` is less than 1.
        Refused: with code UNSUPPORTED, if `keep` is given without `url`.
    """
    count = None if keep is None else read_count("keep", keep)
    if url is None and count is not None:
        hint = "Give url=, or let the framework delete: save_total_limit, total_limit."
        raise refuse("UNSUPPORTED", "keep counts the checkpoints under url, which is not given", hint=hint)
    return None if url is None else as_local_path(read_path("url", url).rstrip("/")), count


class StepCheckpoints:
    """Saves checkpoints of a run's steps under a folder or URL.

    Args:
        url: the folder or URL under which checkpoints are saved.
        keep: number of checkpoints to keep; None means all.
        group: the ranks that save together; None means all ranks.
        background: whether to write the files while training continues.
    """

    def __init__(self, url: str, keep: int | None, group: Ranks | None, *, background: bool) -> None:
        self._url = url
        self._keep = keep
        self._group = group
        self._background = background
        self._job: SaveJob | None = None
        self._last = ""
        self.best: str | None = None
        """Name of the best checkpoint, which is never deleted because of its age."""

    def place(self, name: str) -> str:
        """Return the path or URL of the checkpoint with a given name."""
        return f"{self._url}/{name}"

    def shares(self, checkpoints: StepCheckpoints | None) -> bool:
        """Return whether this object and a second one save under the same folder or URL."""
        return checkpoints is not None and checkpoints._url == self._url

    def save(self, model: nn.Module, name: str, best: str | None = None, **options: Any) -> None:
        """Save the checkpoint of a step, after the previous save is complete.

        Args:
            model: the model to save.
            name: name of the step's checkpoint.
            best: name of the best checkpoint until now, which is kept after this save is complete; None means that it
                is unchanged.
            **options: additional keyword arguments for `transaxle.save`.

        Raises:
            TransaxleError: if the previous save or this save has failed.
        """
        self.wait()
        # set only after the previous save: the former best checkpoint may be deleted when the new save is complete
        self.best = best or self.best
        if not is_url(self._url):
            Path(self._url).mkdir(parents=True, exist_ok=True)
        options |= {"overwrite": True, "group": self._group}
        if self._background:
            self._job = async_save(model, self.place(name), **options)
        else:
            save(model, self.place(name), **options)
        self._last = name
        if not self._background:
            self._tidy()

    def wait(self) -> None:
        """Wait for the last save, and delete the checkpoints that it replaces.

        Raises:
            TransaxleError: if the save has failed; no checkpoint is deleted in this case.
        """
        job, self._job = self._job, None
        if job is not None:
            job.result()
            self._tidy()

    def steps(self, common: str) -> dict[int, str]:
        """Return step number -> checkpoint name, for the complete checkpoints under the folder or URL.

        Args:
            common: the part of the names before the number; checkpoints with a different prefix are ignored.

        Raises:
            StorageError: with code IO, if the folder or URL cannot be accessed.
        """
        matches = [(match, name) for name in _members(self._url) if (match := _NUMBERED.fullmatch(name)) is not None]
        return {int(match[2]): name for match, name in matches if match[1] == common and is_complete(self.place(name))}

    def _tidy(self) -> None:
        """On one rank, delete old checkpoints, but keep the newest ones up to the last saved step, the best one, and
        files of other programs.

        If a run went back to an earlier step, its later checkpoints are kept until the run replaces them. Files left by
        killed runs are deleted too.
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
        except TransaxleError as error:  # a failed deletion does not stop the run, because no checkpoint is lost
            warnings.warn(f"older checkpoints under {self._url} were not deleted: {error}", stacklevel=2)

    def _sweep(self, common: str) -> None:
        """Delete the files that killed runs left beside the checkpoints whose names have a common prefix."""
        for leftover in leftovers(self._url):
            target = Path(leftover.target)
            step = _NUMBERED.fullmatch(target.name) if target.parent == Path(self._url).resolve() else None
            if step is not None and step[1] == common and leftover.outcome == "found":
                clean_leftover(leftover)


def check_loadable(model: nn.Module) -> None:
    """Refuse, before the first training step, a model whose checkpoints could be saved but not loaded.

    Raises:
        Refused: with code UNSUPPORTED, if a load into the model would be refused.
    """
    if refusals := [*find_partitioned(model), *find_kept_elsewhere(model)]:
        raise gathered(refusals)


def is_complete(place: str) -> bool:
    """Return whether a folder or URL contains a complete checkpoint that Transaxle wrote.

    Raises:
        StorageError: with code IO, if the folder or URL cannot be accessed.
    """
    return read_stored(place, MANIFEST) is not None


def read_stored(place: str, name: str) -> bytes | None:
    """Return the content of a file in a checkpoint; None if the file does not exist.

    Raises:
        StorageError: with code IO, if the folder or URL cannot be accessed.
    """
    if not is_url(place):
        return LocalFolder(Path(place)).read(name, _LONGEST)
    return RemoteFolder(Service(place)).read(name, _LONGEST)


def text_beside(place: str, name: str) -> str | None:
    """Return a text in the extra state of a complete checkpoint; None if the checkpoint or the text does not exist.

    Args:
        place: path or URL of the checkpoint.
        name: name under which the text was saved in the argument `extra`.

    Raises:
        Refused: with code CORRUPT, if the extra state file is not valid.
        StorageError: with code IO, if the folder or URL cannot be accessed.
    """
    text = states_beside(place, World()).get(name)
    return text if isinstance(text, str) else None


def states_beside(place: str, world: World) -> dict[str, Any]:
    """Return name in the argument `extra` -> this rank's state, for the extra states in a complete checkpoint.

    Raises:
        Refused: with code CORRUPT, if the extra state file is not valid.
        StorageError: with code IO, if the folder or URL cannot be accessed.
    """
    text = read_stored(place, FILE) if is_complete(place) else None
    states = {} if text is None else SavedStates(text, world).states
    return {name.removeprefix(_GIVEN): state for name, state in states.items() if name.startswith(_GIVEN)}


def remove(place: str) -> None:
    """Delete a checkpoint if it exists.

    Raises:
        UsageError: with code EXISTS, if the folder contains a file that belongs to no checkpoint of Transaxle; nothing
            is deleted.
        StorageError: with code IO, if the folder or URL cannot be accessed.
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
    # delete the manifest first, so that no program takes the remaining files for a complete checkpoint
    for name in sorted(names, key=turn, reverse=True):
        service.delete(names[name], name)


def _members(url: str) -> Mapping[str, str]:
    """Return name -> path or URL, for the files and folders directly under a folder or URL."""
    if not is_url(url):
        return LocalFolder(Path(url)).top() if Path(url).is_dir() else {}
    return RemoteFolder(Service(url)).top()


def _check_ours(folder: LocalFolder | RemoteFolder, shown: str) -> None:
    """Refuse to delete a folder that contains a file which Transaxle has not written as part of a checkpoint.

    Raises:
        UsageError: with code EXISTS, if the folder contains a file that Transaxle has not written.
    """
    foreign = foreign_files(folder) if MANIFEST in folder.top() else [f"no {MANIFEST} there: the folder"]
    if foreign:
        message = f"nothing is deleted: {', '.join(foreign[:8])} belongs to no checkpoint that Transaxle wrote"
        raise refuse("EXISTS", message, file=shown, hint="Move the file elsewhere, or delete the folder by hand.")
