"""The file beside the folders of training steps that names the newest of them."""

from __future__ import annotations

from collections.abc import Sequence

from transaxle.errors import refuse
from transaxle.formats.format import Folder
from transaxle.formats.storage.storage import is_plain

_LONGEST_TAG = 4096
_SHOWN = 10


def newest_step(folder: Folder, file: str) -> str | None:
    """Return the sub-folder that a file names; None where the file, or the sub-folder, is not there."""
    if file not in folder.names or not folder.folders:
        return None
    tag = _tag_in(folder, file)
    return tag if tag in folder.folders else None


def check_newest(folder: Folder, file: str) -> None:
    """Refuse a file that names no sub-folder of the checkpoint: another step is not what was asked for.

    Raises:
        Refused: PATH_ESCAPE where it leads out; CORRUPT where it is empty; INCOMPLETE where the folder is not there.
    """
    if not file or file not in folder.names or newest_step(folder, file) is not None:
        return
    tag = _tag_in(folder, file)
    if not is_plain(tag):
        message = f"the file names the step {tag!r}, which is not a folder of the checkpoint"
        hint = "Give the folder of a step itself."
        raise refuse("PATH_ESCAPE" if tag else "CORRUPT", message, file=f"{folder.inside}{file}", hint=hint)
    if folder.folders:
        message = f"the file names the step {tag!r}, whose folder is missing; present: {listed(folder.folders)}"
        hint = "Copy that folder, or give the folder of a step itself."
        raise refuse("INCOMPLETE", message, file=f"{folder.inside}{file}", hint=hint)


def listed(names: Sequence[str]) -> str:
    """Return names as errors show them: the first ten."""
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


def _tag_in(folder: Folder, file: str) -> str:
    whole = f"{folder.inside}{file}"
    size = min(folder.storage.size(whole), _LONGEST_TAG)
    return folder.storage.read(whole, 0, size).decode("utf-8", "replace").strip()
