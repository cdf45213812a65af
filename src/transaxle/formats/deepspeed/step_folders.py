"""Which folders hold DeepSpeed checkpoints: of a run, and universal ones."""

from __future__ import annotations

import re

from transaxle.formats.deepspeed import keys
from transaxle.formats.deepspeed.files import is_rank_file
from transaxle.formats.format import HERE, Folder
from transaxle.formats.newest_step import newest_step

_STEP = "global_step"
_STEP_FOLDER = re.compile(rf"{_STEP}\d+")


def of_run(folder: Folder) -> tuple[str, ...]:
    """Return the step that `latest` names; without one, every `global_step` folder, or the folder itself."""
    newest = newest_step(folder, keys.LATEST)
    if newest is not None and not _is_universal(folder, newest):
        return (newest,)
    if keys.ZERO_FOLDER not in folder.folders and any(map(is_rank_file, folder.names)):
        return (HERE,)
    steps = (name for name in folder.folders if _STEP_FOLDER.fullmatch(name))
    return tuple(name for name in steps if not _is_universal(folder, name))


def universal(folder: Folder) -> tuple[str, ...]:
    """Return the step that `latest_universal` names; without one, every folder like it, or the folder itself."""
    newest = newest_step(folder, keys.LATEST_UNIVERSAL)
    if newest is not None:
        return (newest,)
    if keys.ZERO_FOLDER in folder.folders and _is_universal(folder, HERE):
        return (HERE,)
    return tuple(name for name in folder.folders if name.startswith(_STEP) and _is_universal(folder, name))


def _is_universal(folder: Folder, name: str) -> bool:
    """Tell whether a folder holds a universal checkpoint."""
    inside = f"{folder.inside}" if name == HERE else f"{folder.inside}{name}/"
    zero = keys.ZERO_FOLDER
    there = folder.folders if name == HERE else folder.storage.listing(inside.rstrip("/")).folders
    return zero in there and keys.OPTIMIZER_FILE in folder.storage.listing(f"{inside}{zero}").everything()
