"""Which folders hold Megatron checkpoints: those of single iterations, and the folder above them.

run/latest_checkpointed_iteration.txt     # `7`, or `release` for weights without a run
run/iter_0000007/                         # a torch_dist folder, a DCP folder of Megatron-FSDP, or mp_rank_* folders
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from transaxle.errors import Faults, TransaxleError, refuse
from transaxle.formats.registry import (
    DCP_DATA,
    DCP_METADATA,
    HERE,
    MEGATRON_MODEL,
    MEGATRON_RANK,
    MEGATRON_TRACKER,
    TORCH_DIST,
    Folder,
    listed,
)
from transaxle.formats.storage.storage import NotJsonError, Storage, parsed

BACKEND_FILE = "metadata.json"
"""Says which kind of distributed checkpoint a folder is."""
_BACKEND, _ZARR = "sharded_backend", "zarr"
_KNOWN: dict[str, str | int] = {
    _BACKEND: TORCH_DIST.name,
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""What a folder says of itself that is read."""
_KEYS = _KNOWN.keys()
_OLDER = "it is of Megatron's older format, zarr, which is not read"
_OLDER_HINT = "Let the release that wrote it load it, and save it in torch_dist (--ckpt-format torch_dist)."
COMMON_FILE = "common.pt"
"""The state beside the sharded tensors, up to megatron-core 0.18."""
_DATA = re.compile(rf"__\d+_\d+{re.escape(DCP_DATA)}")

RELEASE = "release"
WEIGHTS = "weights"
"""Sub-folder in which NeMo keeps the checkpoint itself."""
_RANK = re.compile(MEGATRON_RANK)
_LONGEST = 4096


def distributed(folder: Folder) -> tuple[str, ...]:
    """Return the sub-folder of the newest iteration, `HERE` for the folder itself, if it is a distributed checkpoint.

    Raises:
        Refused: CORRUPT, INCOMPLETE for a tracker file that names no iteration that is there.
        StorageError: IO.
    """
    if folder.storage.single:
        return ()
    if _is_torch_dist(folder, "") or _is_interrupted(folder.names):
        return (HERE,)
    newest = newest_iteration(folder)
    found = [name for name in (newest or WEIGHTS,) if name in folder.folders]
    if newest is not None and WEIGHTS in folder.storage.listing(f"{folder.inside}{newest}").folders:
        found.append(f"{newest}/{WEIGHTS}")
    # Megatron-FSDP writes plain DCP folders: only the tracker tells that they are Megatron's.
    tells = _is_torch_dist if newest is None else _is_distributed
    members = tuple(name for name in found if tells(folder, f"{name}/"))
    for name in found if not members else ():
        _check_backend(folder, name)
    if newest is not None and not members:
        _check_ranks(folder, newest)
    return members


def legacy(folder: Folder) -> tuple[str, ...]:
    """Return the sub-folder of the newest iteration, or `HERE`, if it holds one folder for each rank, or is one.

    Raises:
        Refused: CORRUPT, INCOMPLETE for a tracker file that names no iteration that is there.
        StorageError: IO.
    """
    if folder.storage.single:
        return ()
    if MEGATRON_MODEL in folder.names or any(map(_RANK.fullmatch, folder.folders)):
        return (HERE,)
    newest = newest_iteration(folder)
    if newest is None:
        return ()
    inside = folder.storage.listing(f"{folder.inside}{newest}").folders
    return (newest,) if any(map(_RANK.fullmatch, inside)) else ()


def _is_interrupted(names: Sequence[str]) -> bool:
    """Tell whether files are those of a save that did not come to its end, when Megatron writes the metadata."""
    return COMMON_FILE in names and DCP_METADATA not in names and any(map(_DATA.fullmatch, names))


def _check_backend(folder: Folder, name: str) -> None:
    """Check that a sub-folder is not of the format that came before.

    Raises:
        Refused: UNSUPPORTED.
    """
    if _backend(folder, f"{name}/") == _ZARR:
        raise refuse("UNSUPPORTED", _OLDER, file=f"{folder.inside}{name}", hint=_OLDER_HINT)


def _check_ranks(folder: Folder, newest: str) -> None:
    """Check that an iteration that is no distributed checkpoint has folders of ranks.

    Raises:
        Refused: INCOMPLETE where there is nothing.
    """
    where = f"{folder.inside}{newest}"
    if any(map(_RANK.fullmatch, folder.storage.listing(where).folders)):
        return
    message = f"{MEGATRON_TRACKER} names this folder, and there is no checkpoint in it: the save was interrupted, or "
    hint = "Take an earlier iteration, or copy the missing files."
    raise refuse("INCOMPLETE", f"{message}the files were not copied", file=where, hint=hint)


def newest_iteration(folder: Folder) -> str | None:
    """Return the sub-folder that the tracker file names; None without such a file.

    Raises:
        Refused: CORRUPT where it names none; INCOMPLETE where that folder is missing.
        StorageError: IO.
    """
    if MEGATRON_TRACKER not in folder.names:
        return None
    file = f"{folder.inside}{MEGATRON_TRACKER}"
    text = folder.storage.read(file, 0, min(folder.storage.size(file), _LONGEST)).decode("utf-8", "replace").strip()
    if text != RELEASE and not (text.isdecimal() and text.isascii() and len(text) < 20):
        message = f"the file names {text[:50]!r}, which is neither an iteration nor {RELEASE!r}"
        raise refuse("CORRUPT", message, file=file, hint="Give the folder of an iteration itself.")
    name = text if text == RELEASE else iteration_folder(int(text))
    if name not in folder.folders:
        message = f"the file names {text}, but there is no folder {name}; present: {listed(folder.folders) or 'none'}"
        hint = "Copy that folder, or give the folder of an iteration itself."
        raise refuse("INCOMPLETE", message, file=file, hint=hint)
    return name


def iteration_folder(iteration: int) -> str:
    """Return the name of an iteration's folder."""
    return f"iter_{iteration:07d}"


def _is_distributed(folder: Folder, inside: str) -> bool:
    names = folder.storage.listing(f"{folder.inside}{inside}".rstrip("/")).names
    return DCP_METADATA in names or any(map(_DATA.fullmatch, names)) or _is_torch_dist(folder, inside)


def _is_torch_dist(folder: Folder, inside: str) -> bool:
    """Tell whether a folder is a torch_dist checkpoint, or would be one if nothing in it were damaged or missing."""
    where = f"{folder.inside}{inside}"
    names = folder.names if not inside else folder.storage.listing(where.rstrip("/")).names
    if BACKEND_FILE not in names:
        return DCP_METADATA in names and COMMON_FILE in names
    about = _about(folder.storage, f"{where}{BACKEND_FILE}")
    if about is not None and about.get(_BACKEND) == TORCH_DIST.name:
        return True
    return DCP_METADATA in names and (COMMON_FILE in names or about is None or not about.keys().isdisjoint(_KEYS))


def check_complete(storage: Storage, *, has_state: bool) -> None:
    """Check that no file of a torch_dist checkpoint is missing beside its tensors.

    Args:
        storage: its files.
        has_state: the state beside the tensors is an item of the folder, or in files of the run.

    Raises:
        Refused: INCOMPLETE.
    """
    names, faults = storage.names(), Faults()
    for file in (BACKEND_FILE, *(() if has_state else (COMMON_FILE,))):
        if file not in names:
            message = "the file is missing, which Megatron writes beside the tensors: the copy is not whole"
            hint = "Copy the missing file; or read the tensors alone, as torch's DCP stores them: --format dcp."
            faults.add("INCOMPLETE", message, file, hint=hint)
    if faults:
        raise faults.error()


def check_backend(storage: Storage) -> None:
    """Check what a distributed checkpoint says of itself, if it says anything.

    Raises:
        Refused: CORRUPT where that is malformed; UNSUPPORTED for another backend, or a version that came later.
        StorageError: IO.
    """
    if BACKEND_FILE not in storage.names():
        return
    about = _about(storage, BACKEND_FILE)
    if about is None or not isinstance(about.get(_BACKEND), str):
        message = f"it is no JSON object with one {_BACKEND}, as Megatron writes it"
        raise refuse("CORRUPT", message, file=BACKEND_FILE, hint="Copy the file again.")
    if about[_BACKEND] == _ZARR:
        raise refuse("UNSUPPORTED", _OLDER, file=BACKEND_FILE, hint=_OLDER_HINT)
    for key, known in _KNOWN.items():
        if about.get(key, known) != known:
            read = f"version {known}" if isinstance(known, int) else known
            message = f"{key} is {about[key]!r}; {read} is read, and another may mean something else"
            hint = "Use a newer transaxle; or load it with its own Megatron, and save it with a release from before."
            raise refuse("UNSUPPORTED", message, file=BACKEND_FILE, hint=hint)


def _backend(folder: Folder, inside: str) -> str:
    """Return which kind of distributed checkpoint a folder says that it is; empty where it does not."""
    where = f"{folder.inside}{inside}"
    names = folder.storage.listing(where.rstrip("/")).names
    about = _about(folder.storage, f"{where}{BACKEND_FILE}") if BACKEND_FILE in names else None
    return str((about or {}).get(_BACKEND, ""))


def _about(storage: Storage, file: str) -> dict[str, Any] | None:
    """Return what a folder says of itself; None where that is malformed, or says something twice."""
    try:
        about = parsed(storage.read(file, 0, min(storage.size(file), _LONGEST)))
    except (NotJsonError, TransaxleError):
        return None
    return about if isinstance(about, dict) else None
