"""Which format a path is in: a short list of questions, asked in a fixed order; the first that has an answer decides.

A folder may hold a checkpoint twice, in two formats or two precisions. Guessing would load one of them in silence. So
the order is written down, the files that were not chosen are listed as ignored, and when one question has two answers
the user is asked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transaxle.arguments import Weights
from transaxle.errors import LONGEST_NAME, Refusal, TransaxleError, Where, gathered, refuse
from transaxle.formats.catalog.catalog import Container
from transaxle.formats.catalog.checksums import witnessed
from transaxle.formats.catalog.sidecar_files import INDEX, SAFETENSORS, STATE_FOLDER, TORCH
from transaxle.formats.dcp.draft import FORMAT as DCP_FORMAT
from transaxle.formats.dcp.reader import metadata_files, open_dcp
from transaxle.formats.dcp.safetensors_shards import open_shards, shard_files
from transaxle.formats.deepspeed import keys as deepspeed
from transaxle.formats.deepspeed.files import is_rank_file
from transaxle.formats.deepspeed.reader import HERE, open_deepspeed
from transaxle.formats.deepspeed.table_cuts import Cutter, untold
from transaxle.formats.deepspeed.universal.reader import open_universal
from transaxle.formats.safetensors.index_name import FORMAT as SAFETENSORS_FORMAT
from transaxle.formats.safetensors.reader import open_safetensors
from transaxle.formats.staging.location import storage_at
from transaxle.formats.storage.names import is_plain, too_long
from transaxle.formats.storage.storage import Storage
from transaxle.formats.torch_file.reader import FORMAT as TORCH_FORMAT
from transaxle.formats.torch_file.reader import open_torch

_LONGEST_TAG = 4096
_STEP = "global_step"
_STEP_FOLDER = re.compile(rf"{_STEP}\d+")
_SHARD = re.compile(r".*-(\d+)-of-(\d+)")
_NO_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state(_\d+)?)\.(bin|pt|pth)")
"""What a transformers Trainer keeps beside the weights."""
_SHARDED = (SAFETENSORS, *TORCH)
_TWO_PRECISIONS = frozenset({deepspeed.FORMAT, deepspeed.UNIVERSAL})
"""Formats that hold weights twice: as the optimizer keeps them, and in low precision."""
_SHOWN = 10
_LOOKED_INTO = 50


@dataclass(frozen=True, slots=True)
class Folder:
    """What detection looks at: names, never contents, one small tag file excepted."""

    storage: Storage
    inside: str
    """The sub-folder of the storage that is looked at, with a `/` at its end; empty for the folder itself."""
    names: tuple[str, ...]
    """Files directly in the folder, or the one file that the path denotes."""
    folders: tuple[str, ...]
    """Sub-folders; none where the path denotes one file."""

    def ending(self, *ends: str) -> tuple[str, ...]:
        """Return the files whose names end so."""
        return tuple(name for name in self.names if name.endswith(ends))


@dataclass(frozen=True, slots=True)
class Row:
    """One format at one step: how its candidates are recognised, and how one of them is opened."""

    format: str
    what: str
    """The format in words, with its article."""
    candidates: Callable[[Folder], tuple[str, ...]]
    """Members of the folder, each of which would be a checkpoint."""
    open: Callable[..., Container] | None = None
    """Opens one candidate: storage, path as typed, candidate. None for a format that cannot be read yet."""


def _tag(folder: Folder) -> tuple[str, ...]:
    """Return the DeepSpeed tag that `latest` names; without one, every `global_step` folder, or the folder itself."""
    tag = _said(folder, deepspeed.LATEST)
    if tag is not None and not _is_universal(folder, tag):
        return (tag,)
    if deepspeed.ZERO_FOLDER not in folder.folders and any(map(is_rank_file, folder.names)):
        return (HERE,)
    steps = (name for name in folder.folders if _STEP_FOLDER.fullmatch(name))
    return tuple(name for name in steps if not _is_universal(folder, name))


def _universal(folder: Folder) -> tuple[str, ...]:
    """Return the tag that `latest_universal` names; without one, every folder like it, or the folder itself."""
    tag = _said(folder, deepspeed.LATEST_UNIVERSAL)
    if tag is not None:
        return (tag,)
    if deepspeed.ZERO_FOLDER in folder.folders and _is_universal(folder, HERE):
        return (HERE,)
    return tuple(name for name in folder.folders if name.startswith(_STEP) and _is_universal(folder, name))


def _said(folder: Folder, file: str) -> str | None:
    """Return the sub-folder that a file with a tag names."""
    if file not in folder.names or not folder.folders:
        return None
    tag = _tag_in(folder, file)
    return tag if tag in folder.folders else None


def _tag_in(folder: Folder, file: str) -> str:
    whole = f"{folder.inside}{file}"
    size = min(folder.storage.size(whole), _LONGEST_TAG)
    return folder.storage.read(whole, 0, size).decode("utf-8", "replace").strip()


def _check_tag(folder: Folder, file: str | None) -> None:
    """Refuse a file with a tag that names no folder of the checkpoint: another step is not what was asked for.

    Raises:
        Refused: PATH_ESCAPE where it leads out; INCOMPLETE where the folder is not there.
    """
    if file is None or file not in folder.names or _said(folder, file) is not None:
        return
    tag = _tag_in(folder, file)
    if not is_plain(tag):
        message = f"it names {tag!r}, which is no folder of the checkpoint"
        hint = "Name the folder of a step itself."
        raise refuse("PATH_ESCAPE" if tag else "CORRUPT", message, file=f"{folder.inside}{file}", hint=hint)
    if folder.folders:
        message = f"it names the folder {tag!r}, which is not there; there is {_listed(folder.folders)}"
        hint = "Copy it, or name the folder of a step itself."
        raise refuse("INCOMPLETE", message, file=f"{folder.inside}{file}", hint=hint)


def _is_universal(folder: Folder, name: str) -> bool:
    """Tell whether a folder holds a universal checkpoint."""
    inside = f"{folder.inside}" if name == HERE else f"{folder.inside}{name}/"
    zero = deepspeed.ZERO_FOLDER
    listed = folder.folders if name == HERE else folder.storage.listing(inside.rstrip("/")).folders
    return zero in listed and deepspeed.OPTIMIZER_FILE in folder.storage.listing(f"{inside}{zero}").everything()


def _named(name: str) -> Callable[[Folder], tuple[str, ...]]:
    return lambda folder: (name,) if name in folder.names else ()


def _ending(*ends: str) -> Callable[[Folder], tuple[str, ...]]:
    def candidates(folder: Folder) -> tuple[str, ...]:
        wanted = folder.storage.single
        return tuple(name for name in folder.ending(*ends) if name == wanted or not _NO_WEIGHTS.fullmatch(name))

    return candidates


def _shard(member: str) -> re.Match[str] | None:
    """Read number and count out of the name of a shard; None for other names."""
    return _SHARD.fullmatch(member.removesuffix(next((end for end in _SHARDED if member.endswith(end)), "")))


_DCP = partial(Row, DCP_FORMAT, "a torch.distributed.checkpoint (DCP) folder")
_SAFETENSORS = partial(Row, SAFETENSORS_FORMAT, "a safetensors checkpoint", open=open_safetensors)
_TORCH = partial(Row, TORCH_FORMAT, "a torch checkpoint", open=open_torch)

STEPS: tuple[tuple[Row, ...], ...] = (
    (_DCP(candidates=lambda folder: metadata_files(folder.names)[:1], open=open_dcp),),
    (Row(deepspeed.FORMAT, "a DeepSpeed checkpoint", _tag, open=open_deepspeed),),
    (Row(deepspeed.UNIVERSAL, "a DeepSpeed universal checkpoint", _universal, open=open_universal),),
    (_SAFETENSORS(candidates=_ending(f"{SAFETENSORS}{INDEX}")),),
    (_SAFETENSORS(candidates=_named(f"model{SAFETENSORS}")),),
    (_TORCH(candidates=_ending(*(f"{end}{INDEX}" for end in TORCH))),),
    (_DCP(candidates=lambda folder: shard_files(folder.names)[:1], open=open_shards),),
    (_SAFETENSORS(candidates=_ending(SAFETENSORS)), _TORCH(candidates=_ending(*TORCH))),
)
"""The questions, in order. Rows of one step are equals: if there are two candidates among them, the user decides."""

_POINTERS = {deepspeed.FORMAT: deepspeed.LATEST, deepspeed.UNIVERSAL: deepspeed.LATEST_UNIVERSAL}
"""Format -> file that names the newest of several checkpoints."""
FORMATS = tuple(dict.fromkeys(row.format for step in STEPS for row in step))
"""Names of the formats that are recognised."""


def open_container(
    path: str,
    format: str | None = None,  # noqa: A002 - the contract's name
    weights: Weights | None = None,
    cutter: Cutter = untold,
) -> Container:
    """Open the checkpoint that a path denotes: a folder, an index or a tensor file.

    Args:
        path: folder or file.
        format: consider this format only.
        weights: of a DeepSpeed checkpoint, those in low precision; None: those the optimizer keeps.
        cutter: of a DeepSpeed checkpoint, says how its ranks were cut where it does not say so itself.

    Raises:
        UsageError: AMBIGUOUS if there are two candidates at the step that decides.
        Refused: UNSUPPORTED if there is no checkpoint, or one that cannot be read yet; INCOMPLETE for one shard of
            several; whatever the format's reader refuses.
        StorageError: IO.
    """
    if format is not None and format not in FORMATS:
        raise refuse("UNSUPPORTED", f"unknown format {format!r}", hint=f"Known are {_listed(FORMATS)}.")
    storage = storage_at(path)
    try:
        return _open(storage, format, weights, cutter)
    except BaseException:
        storage.close()
        raise


def _open(storage: Storage, wanted: str | None, weights: Weights | None, cutter: Cutter) -> Container:
    folder = _folder(storage)
    found = _first_step(folder, wanted)
    if not found and storage.single and wanted:
        found = [(row, storage.single) for row in STEPS[-1] if row.format == wanted]
    if not found:
        raise _nothing(folder, wanted)
    if len(found) > 1:
        raise _several(storage.path, found)
    row, member = found[0]
    if row.open is None:
        raise _later(folder, row, member)
    shard = _shard(member) if row.format != DCP_FORMAT else None
    if shard and int(shard[2]) > 1 and not storage.single:
        message = f"this is shard {int(shard[1])} of {int(shard[2])}; the others and their index are not there"
        raise refuse("INCOMPLETE", message, file=member, hint="To read it all the same, name the file itself.")
    options: dict[str, Any] = {"cutter": cutter} if row.format == deepspeed.FORMAT else {}
    if weights is not None and row.format not in _TWO_PRECISIONS:
        message = f"{row.what} holds its weights once: there is no choice of precision"
        raise refuse("UNSUPPORTED", message, file=storage.path, hint="Leave out --weights.")
    precision = () if weights is None else (weights,)
    _check_tag(folder, _POINTERS.get(row.format))
    container = witnessed(row.open(storage, storage.path, member, *precision, **options))
    long = [name for name in container.entries if len(name) > LONGEST_NAME]
    if long:
        raise gathered(Refusal(*too_long(name), Where(member, name)) for name in long)
    return container


def _folder(storage: Storage, inside: str = "") -> Folder:
    if storage.single:
        return Folder(storage, "", (storage.single,), ())
    listing = storage.listing(inside)
    # What must not be read counts as a candidate too: opening it says why, which a plain "nothing here" would not.
    return Folder(storage, f"{inside}/" if inside else "", listing.everything(), listing.folders)


def _first_step(folder: Folder, wanted: str | None) -> list[tuple[Row, str]]:
    """Return the candidates of the first step that has any."""
    for step in STEPS:
        rows = [row for row in step if wanted in (None, row.format)]
        found = [(row, member) for row in rows for member in row.candidates(folder)]
        if found:
            return found
    return []


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


def _several(path: str, found: Sequence[tuple[Row, str]]) -> TransaxleError:
    members = [member for _, member in found]
    if len({row.format for row, _ in found}) > 1:
        hint = "Name one of them, or its format (--format)."
    elif all(_shard(member) for member in members):
        hint = f"These look like the shards of one checkpoint: its index (*{INDEX}) is missing."
    else:
        hint = "Name one of them."
    return refuse("AMBIGUOUS", f"several checkpoints in one place: {_listed(members)}", file=path, hint=hint)


def _later(folder: Folder, row: Row, member: str) -> TransaxleError:
    """Refuse a format that cannot be read yet; say so if the folder holds one that can."""
    readable = [other.format for step in STEPS for other in step if other.open and other.candidates(folder)]
    hint = "Convert it with its own framework first."
    if readable:
        hint = f"The folder holds {readable[0]} as well: --format {readable[0]} reads that."
    path = folder.storage.path
    place = path if folder.storage.single else f"{path.rstrip('/')}/{member}"
    return refuse("UNSUPPORTED", f"this is {row.what}, which this version cannot read", file=place, hint=hint)


def _nothing(folder: Folder, wanted: str | None) -> TransaxleError:
    """Refuse a place without a checkpoint; say what is there, and which sub-folder looks like one."""
    storage = folder.storage
    what = f"no {wanted} checkpoint" if wanted else "no checkpoint"
    if storage.single:
        hint = f"If you know what it is, say so: --format {SAFETENSORS_FORMAT}." if not wanted else ""
        return refuse("UNSUPPORTED", f"{what}: the name tells no format known here", file=storage.path, hint=hint)
    for file in _POINTERS.values():
        if wanted in (None, deepspeed.FORMAT, deepspeed.UNIVERSAL):
            _check_tag(folder, file)
    seen = [*folder.names, *(f"{name}/" for name in folder.folders)]
    path = storage.path.rstrip("/")
    others = [name for name in folder.folders if name != STATE_FOLDER]
    deeper = [f"{path}/{name}" for name in others[:_LOOKED_INTO] if _is_one(storage, name, wanted)]
    hint = f"There is one in {_listed(deeper)}." if deeper else ""
    message = f"{what} here; there is {_listed(seen) or 'nothing'}"
    return refuse("UNSUPPORTED", message, file=storage.path, hint=hint)


def _is_one(storage: Storage, inside: str, wanted: str | None) -> bool:
    """Tell whether a sub-folder looks like a checkpoint; one that cannot be looked at does not."""
    try:
        return bool(_first_step(_folder(storage, inside), wanted))
    except TransaxleError:
        return False
