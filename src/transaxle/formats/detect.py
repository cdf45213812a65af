"""Which format a path is in: the clues of all formats, asked in a fixed order; the first that has an answer decides.

A folder may hold a checkpoint twice, in two formats or two precisions. Guessing would load one of them in silence. So
the order is written down, the files that were not chosen are listed as ignored, and when one question has two answers
the user is asked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from transaxle.arguments import Weights
from transaxle.errors import LONGEST_NAME, Refusal, TransaxleError, Where, gathered, refuse
from transaxle.formats.catalog import Container
from transaxle.formats.checksums import witnessed
from transaxle.formats.registry import (
    DCP,
    DCP_DATA,
    DCP_METADATA,
    INDEX,
    MANIFEST,
    SAFETENSORS,
    SCRATCH,
    STATE_FOLDER,
    TORCH,
    Clue,
    Folder,
    Format,
    builtin,
    check_newest,
    every_format,
    find,
    installed,
    listed,
    one_file_ends,
    unknown,
    unread_end,
)
from transaxle.formats.storage.storage import Storage, SubFolder, is_url, too_long
from transaxle.formats.store.staging import storage_at

if TYPE_CHECKING:
    from transaxle.formats.deepspeed.spread import Cutter
    from transaxle.formats.step_parts import Naming

_SHARD = re.compile(r".*-(\d+)-of-(\d+)")
_META = "consolidated"
_RANK = re.compile(rf"({_META}[._]|(?:.*[._-])?rank[._-]?)(\d+)((?:[._-].*)?\.(?:pth?|bin|safetensors))")
_OF_RANKS = (
    "Each holds its share of a model's tensors, and nothing in it says of which axes: join them with the program that "
    "wrote them (transformers' convert_llama_weights_to_hf.py for Meta's), and convert the result. One alone can "
    'keep its names: --to safetensors:identity (to="safetensors:identity").'
)
_LOOKED_INTO = 50
_SNAPSHOTS = "snapshots"
"""Folder in the cache of a hub, with a folder for each version."""
_ORIGIN = "Give the checkpoint that it was made from, or save its tensors as safetensors."
_WRITTEN_AS = re.compile(rb'\{\s*"transaxle":\s*\d+,\s*"format":\s*"([A-Za-z0-9_.+-]{1,100})"')
"""How our manifests begin: the rest, which may be long, is not read."""
_LONGEST_BEGINNING = 512
_PART = re.compile(
    r"\.hf_metadata|model|optim|pytorch_model_fsdp_\d+|optimizer_\d+|(?:optimizer(?:_\d+)?|scheduler)\.(?:pt|bin)"
)
"""Files and folders of step folders of parts, see `step_parts`."""
_WEIGHTS = "weights"
"""What readers take of formats that may hold weights twice."""


class _Match(NamedTuple):
    """A member of a folder that would be a checkpoint."""

    kind: Format
    clue: Clue | None
    """What found it; None where the user names the format of a file."""
    member: str


def open_container(
    path: str,
    format: str | None = None,  # noqa: A002 - the contract's name
    weights: Weights | None = None,
    cutter: Cutter | None = None,
    optimizer: bool | None = None,
    *,
    average: bool = False,
    lenient: bool = False,
    naming: Naming | None = None,
) -> Container:
    """Open the checkpoint that a path denotes: a folder, an index or a tensor file.

    Args:
        path: folder or file.
        format: consider this format only.
        weights: of a format that holds them twice, which weights; None: those that an optimizer keeps.
        cutter: says how ranks cut parameters where the checkpoint does not.
        optimizer: whether its state is wanted; None: if it is known.
        average: whether replicas that differ are to be averaged, which only formats of ranks have.
        lenient: open a format that has no choice of weights, and no replicas, all the same.
        naming: names the parameters of an optimizer that numbers them, where its state is wanted.

    Raises:
        UsageError: AMBIGUOUS if there are two candidates at the step that decides, or no such format.
        Refused: UNSUPPORTED if there is no checkpoint; INCOMPLETE for one shard of several; whatever the format's
            reader refuses.
        StorageError: IO.
    """
    wanted = None if format is None else find(format)
    if format is not None and wanted is None:
        raise unknown(format, [each.name for each in every_format()])
    options = {"weights": weights, "cutter": cutter, "optimizer": optimizer}
    asked = () if lenient else _asked(weights, average=average)
    storage = storage_at(path)
    try:
        given = {name: option for name, option in options.items() if option is not None}
        container = _open(storage, storage.path, _Wanted(wanted, given, asked, naming if optimizer else None))
    except BaseException:
        storage.close()
        raise
    return witnessed(container) if container.checksums else container


def has_choices(format: str) -> bool:  # noqa: A002 - as above
    """Tell whether checkpoints of a format may hold weights twice, or replicas that differ."""
    kind = find(format)
    return kind is not None and _WEIGHTS in kind.reader_takes


def _asked(weights: Weights | None, *, average: bool) -> tuple[tuple[str, str], ...]:
    """Return why what is asked for cannot be had of a format that stores each weight once, and what to do."""
    precision = "{} stores its weights once, so there is no precision to choose", "Omit --weights."
    replicas = "{} stores its weights once, so there are no replicas to average", "Omit --average-replicas (average=)."
    return (*([precision] if weights is not None else []), *([replicas] if average else []))


class _Wanted(NamedTuple):
    """What is asked of a place."""

    kind: Format | None = None
    """The only format that is considered; None: all."""
    options: Mapping[str, Any] = {}
    """Options of readers."""
    asked: Sequence[tuple[str, str]] = ()
    """Why what is asked for cannot be had of most formats, and what to do."""
    naming: Naming | None = None
    """Names numbered parameters."""


def _open(storage: Storage, path: str, wanted: _Wanted) -> Container:
    folder = _folder(storage)
    if SCRATCH in folder.folders or (storage.single and _unfinished_around(path)):
        message = "a run that was killed, or is still at work, has not written all of this: the rest is zeros"
        hint = "Continue it with --resume and its other options, or remove it with transaxle clean."
        raise refuse("INCOMPLETE", message, file=path, hint=hint)
    matches = _first_matches(folder, wanted.kind)
    if not matches and storage.single and wanted.kind and wanted.kind.one_file:
        matches = [_Match(wanted.kind, None, storage.single)]
    if not storage.single and _may_have_parts(folder):
        return _open_parts(folder, path, matches, wanted)
    if not matches:
        raise _nothing(folder, wanted.kind)
    return _of_match(folder, path, matches, wanted)


def _may_have_parts(folder: Folder) -> bool:
    """Tell whether a folder may be a step folder of parts, see `step_parts`."""
    return any(map(_PART.fullmatch, (*folder.names, *folder.folders)))


def _open_parts(folder: Folder, path: str, matches: Sequence[_Match], wanted: _Wanted) -> Container:
    """Open a step folder of parts, see `step_parts`; also a folder with names like those of parts, and without any."""
    from transaxle.formats.step_parts import in_part, weights_folders, with_model_files, with_parts

    folder = replace(folder, storage=with_model_files(folder))
    parts = [] if matches else weights_folders(folder)
    if len(parts) > 1:
        raise _several(path, [_Match(DCP, None, part) for part in parts])
    if not matches and not parts:
        raise _nothing(folder, wanted.kind)

    def open_part(member: str) -> Container:
        if member in folder.names:
            return TORCH.open(None, folder.storage, path, member)
        asked = wanted if member in parts else _Wanted()
        return in_part(member, path, lambda: _open(SubFolder(folder.storage, member), path, asked))

    part = parts[0] if parts else None
    weights = open_part(part) if part else _of_match(folder, path, matches, wanted)
    without_state = wanted.options.get("optimizer") is False
    return with_parts(weights, folder, part, open_part, wanted.naming, without_state=without_state)


def _of_match(folder: Folder, path: str, matches: Sequence[_Match], wanted: _Wanted) -> Container:
    """Open the checkpoint that clues have found in a place."""
    storage = folder.storage
    if len(matches) > 1:
        raise _several(path, matches)
    kind, clue, member = matches[0]
    shard = None if clue is not None and clue.all_shards else _shard(member)
    if shard and int(shard[2]) > 1 and not storage.single:
        message = f"this is shard {int(shard[1])} of {int(shard[2])}; the other shards and their index are missing"
        raise refuse("INCOMPLETE", message, file=member, hint="To read this shard alone, give the file itself.")
    if wanted.asked and _WEIGHTS not in kind.reader_takes:
        where = Where(path)
        raise gathered(Refusal("UNSUPPORTED", each.format(kind.title), where, hint) for each, hint in wanted.asked)
    if kind.newest in folder.names:
        check_newest(folder, kind.newest)
    taken = {name: option for name, option in wanted.options.items() if name in kind.reader_takes}
    container = kind.open(clue, storage, path, member, **taken)
    if kind.package:
        from transaxle.formats.package_checks import check_container

        check_container(kind, container, member)
    long = [name for name in container.entries if len(name) > LONGEST_NAME]
    if long:
        raise gathered(Refusal(*too_long(name), Where(member, name)) for name in long)
    return container


def _unfinished_around(file: str) -> bool:
    """Tell whether a file on this machine is in a folder that is not written to its end."""
    return not is_url(file) and (Path(file).parent / SCRATCH).is_dir()


def _folder(storage: Storage, inside: str = "") -> Folder:
    if storage.single:
        return Folder(storage, "", (storage.single,), ())
    listing = storage.listing(inside)
    # What must not be read counts as a candidate too: opening it says why, which a plain "nothing here" would not.
    return Folder(storage, f"{inside}/" if inside else "", listing.everything(), listing.folders)


def _first_matches(folder: Folder, wanted: Format | None) -> list[_Match]:
    """Return what the first clues find that find anything; clues of one place are asked together."""
    if wanted is not None:
        return _found_by([wanted], folder)
    writer = _written_as(folder)
    named = _found_by([writer], folder) if writer is not None else []
    return named or _found_by(builtin().values(), folder) or _found_by(installed(), folder)


def _written_as(folder: Folder) -> Format | None:
    """Return the installed format that a folder's manifest names; None where it names one that ships, or none.

    The names of its files may be those of a format that ships, whose clue would otherwise take them.

    Raises:
        Refused: UNSUPPORTED where no package that is installed has it.
    """
    if folder.storage.single or MANIFEST not in folder.names:
        return None
    file = f"{folder.inside}{MANIFEST}"
    try:
        beginning = folder.storage.read(file, 0, min(folder.storage.size(file), _LONGEST_BEGINNING))
    except TransaxleError:
        return None  # a manifest that cannot be read is no manifest
    match = _WRITTEN_AS.match(beginning)
    name = match[1].decode() if match else SAFETENSORS.name
    if name in builtin():
        return None
    kind = find(name)
    if kind is None:
        message = f"{MANIFEST} says it was written as {name!r}, which no installed package provides"
        hint = "Install its package, or say the format: --format NAME."
        raise refuse("UNSUPPORTED", message, file=folder.storage.path, hint=hint)
    return kind


def _found_by(formats: Iterable[Format], folder: Folder) -> list[_Match]:
    for clues in _in_order(formats):
        matches = [_Match(kind, clue, member) for kind, clue in clues for member in _candidates(kind, clue, folder)]
        if matches:
            return matches
    return []


def _candidates(kind: Format, clue: Clue, folder: Folder) -> tuple[str, ...]:
    with kind.answerable("a clue"):
        return clue.found(folder)


def _in_order(formats: Iterable[Format]) -> Iterator[list[tuple[Format, Clue]]]:
    clues = sorted(((kind, clue) for kind in formats for clue in kind.clues), key=lambda each: each[1].place)
    for _, same in groupby(clues, key=lambda each: each[1].place):
        yield list(same)


def _shard(member: str) -> re.Match[str] | None:
    """Read number and count out of the name of a shard; None for other names."""
    return _SHARD.fullmatch(member.removesuffix(next((end for end in one_file_ends() if member.endswith(end)), "")))


def _rank(file: str) -> tuple[str, int] | None:
    """Read what the files of all ranks are called, and the number of one, out of a name; None for other names."""
    match = _RANK.fullmatch(file)
    return None if match is None else (f"{match[1]}{match[3]}", int(match[2]))


def part_of_ranks(storage: Storage) -> Refusal | None:
    """Return why a file that was given alone is no whole model: by its name, it is one of several ranks' files."""
    rank = _rank(storage.single) if storage.single else None
    if rank is None:
        return None
    around: list[str] = []
    if not is_url(storage.path):
        with suppress(OSError):  # a folder that cannot be listed says nothing
            around = os.listdir(os.path.dirname(storage.path) or ".")  # noqa: PTH120, PTH208 - as typed
    others = {other[1]: name for name in sorted(around) if (other := _rank(name)) is not None and other[0] == rank[0]}
    others.pop(rank[1], None)
    is_one = sorted((rank[1], *others)) == list(range(1 + len(others))) if others else rank[0].startswith(_META)
    if not is_one or (rank[1] == 0 and not others):
        return None
    besides = f", beside {listed(list(others.values()))}" if others else ""
    message = f"by its name, this is the file of rank {rank[1]} of several{besides}: a part of the tensors of a model"
    return Refusal("INCOMPLETE", message, Where(storage.path), _OF_RANKS)


def _several(path: str, matches: Sequence[_Match]) -> TransaxleError:
    members = [match.member for match in matches]
    kinds = list(dict.fromkeys(match.kind.name for match in matches))
    if len(kinds) > 1:
        hint = f"Give one of them, or say its format: --format {' or --format '.join(kinds)}."
    elif _rank(members[0]) and len({rank and rank[0] for rank in map(_rank, members)}) == 1:
        hint = _OF_RANKS
    elif all(_shard(member) for member in members):
        hint = f"These look like the shards of one checkpoint: its index (*{INDEX}) is missing."
    else:
        hint = f"Give one of them: {path.rstrip('/')}/{members[0]}"
    return refuse("AMBIGUOUS", f"the folder holds several checkpoints: {listed(members)}", file=path, hint=hint)


def _nothing(folder: Folder, wanted: Format | None) -> TransaxleError:
    """Refuse a place without a checkpoint; say what is there, and which sub-folder looks like one."""
    storage = folder.storage
    what = f"no {wanted.name} checkpoint" if wanted else "no checkpoint"
    if storage.single:
        return _no_file(storage.path, what, wanted)
    if wanted is None or wanted.newest:
        for kind in every_format():
            check_newest(folder, kind.newest)
    if wanted in (None, DCP) and any(name.endswith(DCP_DATA) for name in folder.names):
        message = (
            "the file is missing, which DCP writes last: the save was interrupted, or a copy left out hidden files"
        )
        hint = "Copy the missing file; without it nothing says what the others hold."
        return refuse("INCOMPLETE", message, file=DCP_METADATA, hint=hint)
    names = [*folder.names, *(f"{name}/" for name in folder.folders)]
    path = storage.path.rstrip("/")
    others = [name for name in folder.folders if name not in (STATE_FOLDER, _SNAPSHOTS)]
    if _SNAPSHOTS in folder.folders:  # the cache of a hub, of which the other folders hold files without names
        others = [f"{_SNAPSHOTS}/{name}" for name in storage.listing(_SNAPSHOTS).folders]
    deeper = [f"{path}/{name}" for name in others[:_LOOKED_INTO] if _holds_one(storage, name, wanted)]
    hint = ""
    if deeper:
        hint = f"There is one in {listed(deeper)}."
    elif wanted is None and (ends := sorted(set(filter(None, map(unread_end, folder.names))))):
        hint = f"Files that end in {listed(ends)} are not read. {_ORIGIN}"
    elif wanted is None:
        kinds = listed([kind.name for kind in every_format()])
        hint = f"Give the file or folder that holds the tensors; these are read: {kinds}."
    message = f"{what} here; found {listed(names) or 'nothing'}"
    return refuse("UNSUPPORTED", message, file=storage.path, hint=hint)


def _no_file(path: str, what: str, wanted: Format | None) -> TransaxleError:
    """Refuse a file whose name is not that of a checkpoint."""
    if wanted is not None:
        hint = ""
    elif end := unread_end(path):
        return refuse("UNSUPPORTED", f"{what}: files that end in {end} are not read", file=path, hint=_ORIGIN)
    elif not is_url(path) and _is_checkpoint(around := os.path.dirname(path) or "."):  # noqa: PTH120 - as typed
        hint = f"Give the folder: {around}"
    else:  # files of any name are given that are safetensors; those of other formats keep their endings
        hint = f"If it is a safetensors file all the same, say so: --format {SAFETENSORS.name}."
    return refuse("UNSUPPORTED", f"{what}: the file's name does not tell a known format", file=path, hint=hint)


def _is_checkpoint(path: str) -> bool:
    storage = storage_at(path)
    try:
        return _holds_one(storage, "", None)
    finally:
        storage.close()


def _weights_folders(folder: Folder) -> list[str]:
    if not _may_have_parts(folder):
        return []
    from transaxle.formats.step_parts import weights_folders

    return weights_folders(folder)


def _holds_one(storage: Storage, inside: str, wanted: Format | None) -> bool:
    """Tell whether a sub-folder looks like a checkpoint; one that cannot be looked at does not."""
    try:
        folder = _folder(storage, inside)
        return SCRATCH not in folder.folders and bool(_first_matches(folder, wanted) or _weights_folders(folder))
    except TransaxleError:
        return False
