"""Finds Megatron checkpoints: in the folder of a single iteration, or in a run's folder with the folders of all
iterations.

run/latest_checkpointed_iteration.txt     # `7`, or `release` for weights without a run
run/iter_0000007/                         # a torch_dist folder, a DCP folder of Megatron-FSDP, or mp_rank_* folders
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

from transaxle.errors import Faults, TransaxleError, refuse
from transaxle.formats.registry import (
    DCP_DATA,
    DCP_METADATA,
    GLOBAL_STEP,
    HERE,
    MEGATRON_MODEL,
    MEGATRON_RANK,
    MEGATRON_TRACKER,
    TORCH_DIST,
    Folder,
    join_names,
)
from transaxle.formats.storage.storage import NotJsonError, Storage, parse_json

BACKEND_FILE = "metadata.json"
"""File in a distributed checkpoint that names the backend (the storage format), such as `torch_dist`."""
_BACKEND, _ZARR = "sharded_backend", "zarr"
_SUPPORTED: dict[str, str | int] = {
    _BACKEND: TORCH_DIST.name,
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""Key in `metadata.json` -> value that Transaxle supports."""
_KEYS = _SUPPORTED.keys()
_ZARR_UNSUPPORTED = "it is of Megatron's older format, zarr, which is not read"
_ZARR_HINT = "Load the checkpoint with the Megatron release that wrote it, and save it with --ckpt-format torch_dist."
COMMON_FILE = "common.pt"
"""Name of the file with that part of the run's state which is not sharded, such as arguments and counters; written up
to megatron-core 0.18."""
_DATA = re.compile(rf"__\d+_\d+{re.escape(DCP_DATA)}")

RELEASE = "release"
WEIGHTS = "weights"
"""Name of the sub-folder in which NeMo stores the checkpoint itself."""
_RANK = re.compile(MEGATRON_RANK)
_MAX_BYTES = 4096


def distributed(folder: Folder) -> tuple[str, ...]:
    """Return the names of folders that are distributed checkpoints: the newest iteration's folder, or `HERE` if the
    opened folder itself is a distributed checkpoint.

    Raises:
        Refused: with the code CORRUPT if the tracker file is malformed; with the code INCOMPLETE if the iteration that
            it names is missing.
        StorageError: with the code IO if a file cannot be read.
    """
    if folder.storage.single:
        return ()
    if _is_torch_dist(folder, "") or _is_interrupted(folder.names):
        return (HERE,)
    newest = newest_iteration(folder)
    candidates = [name for name in (newest or WEIGHTS,) if name in folder.folders]
    if newest is not None and WEIGHTS in folder.storage.listing(f"{folder.inside}{newest}").folders:
        candidates.append(f"{newest}/{WEIGHTS}")
    # Megatron-FSDP writes ordinary DCP folders: only the run's tracker file shows that Megatron wrote them.
    is_checkpoint = _is_torch_dist if newest is None else _is_distributed
    members = tuple(name for name in candidates if is_checkpoint(folder, f"{name}/"))
    for name in candidates if not members else ():
        _check_backend(folder, name)
    if newest is not None and not members:
        _check_ranks(folder, newest)
    return members


def legacy(folder: Folder) -> tuple[str, ...]:
    """Return the names of folders that contain one folder per rank: the newest iteration's folder, or `HERE` if the
    opened folder itself contains them.

    Raises:
        Refused: with the code CORRUPT if the tracker file is malformed; with the code INCOMPLETE if the iteration that
            it names is missing.
        StorageError: with the code IO if a file cannot be read.
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
    """Return whether a folder's files come from an interrupted save, because the metadata file, which Megatron writes
    last, is missing.
    """
    return COMMON_FILE in names and DCP_METADATA not in names and any(map(_DATA.fullmatch, names))


def _check_backend(folder: Folder, name: str) -> None:
    """Refuse a sub-folder in Megatron's older format, zarr.

    Raises:
        Refused: with the code UNSUPPORTED if the folder's `metadata.json` names zarr.
    """
    if _backend(folder, f"{name}/") == _ZARR:
        raise refuse("UNSUPPORTED", _ZARR_UNSUPPORTED, file=f"{folder.inside}{name}", hint=_ZARR_HINT)


def _check_ranks(folder: Folder, newest: str) -> None:
    """Check that an iteration's folder contains rank folders, if it is not a distributed checkpoint.

    Raises:
        Refused: with the code INCOMPLETE if the folder contains no rank folders.
    """
    where = f"{folder.inside}{newest}"
    if any(map(_RANK.fullmatch, folder.storage.listing(where).folders)):
        return
    message = f"{MEGATRON_TRACKER} names this folder, and there is no checkpoint in it: the save was interrupted, or "
    hint = "Take an earlier iteration, or copy the missing files."
    raise refuse("INCOMPLETE", f"{message}the files were not copied", file=where, hint=hint)


def newest_iteration(folder: Folder) -> str | None:
    """Return the name of the sub-folder of the iteration that the run's tracker file names; None if there is no tracker
    file.

    Raises:
        Refused: with the code CORRUPT if the tracker file is malformed; with the code INCOMPLETE if the iteration's
            folder is missing.
        StorageError: with the code IO if a file cannot be read.
    """
    if MEGATRON_TRACKER not in folder.names or any(map(GLOBAL_STEP.fullmatch, folder.folders)):
        return None  # verl names its newest step in a file of the same name
    file = f"{folder.inside}{MEGATRON_TRACKER}"
    text = folder.storage.read(file, 0, min(folder.storage.size(file), _MAX_BYTES)).decode("utf-8", "replace").strip()
    if text != RELEASE and not (text.isdecimal() and text.isascii() and len(text) < 20):
        message = f"the file names {text[:50]!r}, which is neither an iteration nor {RELEASE!r}"
        raise refuse("CORRUPT", message, file=file, hint="Give the folder of an iteration itself.")
    name = text if text == RELEASE else iteration_folder(int(text))
    if name not in folder.folders:
        message = (
            f"the file names {text}, but there is no folder {name}; present: {join_names(folder.folders) or 'none'}"
        )
        hint = "Copy the missing folder, or give the folder of an iteration itself."
        raise refuse("INCOMPLETE", message, file=file, hint=hint)
    return name


def iteration_folder(iteration: int) -> str:
    """Return the name of an iteration's folder."""
    return f"iter_{iteration:07d}"


def _is_distributed(folder: Folder, inside: str) -> bool:
    names = folder.storage.listing(f"{folder.inside}{inside}".rstrip("/")).names
    return DCP_METADATA in names or any(map(_DATA.fullmatch, names)) or _is_torch_dist(folder, inside)


def _is_torch_dist(folder: Folder, inside: str) -> bool:
    """Return whether a folder is a torch_dist checkpoint, even a damaged or incomplete one."""
    where = f"{folder.inside}{inside}"
    names = folder.names if not inside else folder.storage.listing(where.rstrip("/")).names
    if BACKEND_FILE not in names:
        return DCP_METADATA in names and COMMON_FILE in names
    about = _read_backend_file(folder.storage, f"{where}{BACKEND_FILE}")
    if about is not None and about.get(_BACKEND) == TORCH_DIST.name:
        return True
    return DCP_METADATA in names and (COMMON_FILE in names or about is None or not about.keys().isdisjoint(_KEYS))


def check_complete(storage: Storage, folder: str, *, has_state: bool) -> None:
    """Check that a torch_dist checkpoint has the small files that Megatron writes beside the files with tensors.

    Args:
        storage: storage that reads the checkpoint's files.
        folder: path of the folder with these files.
        has_state: whether the run's arguments and counters are stored elsewhere (as a DCP item, or in settings files),
            so that `common.pt` may be missing.

    Raises:
        Refused: with the code INCOMPLETE and each missing file.
    """
    names, faults = storage.names(), Faults()
    for file in (BACKEND_FILE, *(() if has_state else (COMMON_FILE,))):
        if file not in names:
            message = "the file is missing, which Megatron writes beside the tensors: the copy is not whole"
            alone = f"transaxle ls {shlex.quote(folder)} --format dcp"
            hint = f"Copy the missing file; or read the tensors alone, as torch's DCP stores them:  {alone}"
            faults.add("INCOMPLETE", message, file, hint=hint)
    if faults:
        raise faults.error()


def check_backend(storage: Storage) -> None:
    """Check the backend and versions in a distributed checkpoint's `metadata.json`, if this file exists.

    Raises:
        Refused: with the code CORRUPT if the file is malformed; with the code UNSUPPORTED for an unknown backend or a
            later version.
        StorageError: with the code IO if a file cannot be read.
    """
    if BACKEND_FILE not in storage.names():
        return
    about = _read_backend_file(storage, BACKEND_FILE)
    if about is None or not isinstance(about.get(_BACKEND), str):
        message = f"it is no JSON object with one {_BACKEND}, as Megatron writes it"
        raise refuse("CORRUPT", message, file=BACKEND_FILE, hint="Copy the file again.")
    if about[_BACKEND] == _ZARR:
        raise refuse("UNSUPPORTED", _ZARR_UNSUPPORTED, file=BACKEND_FILE, hint=_ZARR_HINT)
    for key, supported in _SUPPORTED.items():
        if about.get(key, supported) != supported:
            read = f"version {supported}" if isinstance(supported, int) else supported
            message = f"{key} is {about[key]!r}; {read} is read, and another may mean something else"
            hint = "Use a newer transaxle; or load it with the Megatron that wrote it, and save it with an older one."
            raise refuse("UNSUPPORTED", message, file=BACKEND_FILE, hint=hint)


def _backend(folder: Folder, inside: str) -> str:
    """Return the backend (storage format) named in a folder's `metadata.json`; an empty string if there is no such
    file.
    """
    where = f"{folder.inside}{inside}"
    names = folder.storage.listing(where.rstrip("/")).names
    about = _read_backend_file(folder.storage, f"{where}{BACKEND_FILE}") if BACKEND_FILE in names else None
    return str((about or {}).get(_BACKEND, ""))


def _read_backend_file(storage: Storage, file: str) -> dict[str, Any] | None:
    """Return the contents of a `metadata.json`; None if it is malformed or has duplicate keys."""
    try:
        about = parse_json(storage.read(file, 0, min(storage.size(file), _MAX_BYTES)))
    except (NotJsonError, TransaxleError):
        return None
    return about if isinstance(about, dict) else None
