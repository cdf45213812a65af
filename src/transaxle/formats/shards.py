"""Shard files: the tensors of a checkpoint in several files, with an index `*.index.json`, in which Hugging Face lists
each tensor's file.

The library transformers trusts an index even if it is wrong. Transaxle takes the tensors from the shard files: in every
format, an index that contradicts the files is refused.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from transaxle.errors import Faults, Refusal, TransaxleError, Where, gathered, refuse
from transaxle.formats.catalog import Draft, Entry, Fragment, Spec
from transaxle.formats.registry import INDEX, STATE_FOLDER
from transaxle.formats.storage.storage import (
    MAX_PAIRS,
    NotJsonError,
    Storage,
    has_dropped_keys,
    is_plain,
    members,
    pairs_in,
    repeated_keys,
)
from transaxle.formats.training_state import OPTIMIZER

MAX_FILES = 10_000
"""Maximum number of shard files: their names have five digits for the number, and a terabyte in files of 5 GB has only
200 files."""
_MIN_FILES = 100
"""Minimum number of files for the shard size that `refuse_many` suggests; the maximum is ten times as large."""
WEIGHT_MAP = "weight_map"
"""Key in an index of the dict from tensor name to the name of the shard file that contains the tensor."""
INDEX_METADATA = "metadata"
TOTAL_SIZE = "total_size"
"""Metadata key in an index for the total number of bytes of all tensors."""
DERIVED = frozenset({TOTAL_SIZE, "total_parameters"})
"""Metadata keys in an index whose values can be computed from the shard files."""

_NUMBERED = re.compile(r"(.*)-\d{1,9}(-of-\d{1,9}\.\w+)")
"""Pattern of a shard file's name; the texts of its groups are the same for all files of one set."""
_MAX_INDEX = 200_000_000
_NULL = msgspec.Raw(b"null")
_EMPTY = msgspec.Raw(b"{}")

_quoted = json.encoder.encode_basestring_ascii
_text: msgspec.json.Decoder[str] = msgspec.json.Decoder(str)
_weight_map: msgspec.json.Decoder[dict[str, str]] = msgspec.json.Decoder(dict[str, str])


class HoldsEntries(Protocol):
    """Protocol of the parsed contents of a tensor file."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Return tensor name -> catalog entry, for the tensors of the file."""


Sized = tuple[Spec, int]
"""A tensor to write, with its size in bytes."""
FileLayout = Callable[[str, list[Sized]], tuple[list[Entry], list[Fragment], int]]
"""A function `layout(file, tensors)`, which returns the file's catalog entries, its bytes outside the tensors, and its
size."""
FileContent = TypeVar("FileContent", bound=HoldsEntries)


class ReadFiles(msgspec.Struct, Generic[FileContent], frozen=True):
    """All files of a checkpoint after parsing."""

    parts: Mapping[str, FileContent]
    """File name -> parsed contents of the file."""
    entries: Mapping[str, Entry]
    """Tensor name -> catalog entry, for all tensors of the checkpoint."""
    index_texts: Mapping[str, str]
    """Strings in the index's metadata, except those that can be computed from the shard files."""
    sizes: Mapping[str, int]
    """File name -> size in bytes, also for index files."""


def encode_index(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """Return the text of an index, formatted as transformers writes it."""
    if not weight_map:
        index = {INDEX_METADATA: {TOTAL_SIZE: total_size}, WEIGHT_MAP: {}}
        return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
    # The index is formatted without `json`, which takes five times as long with indentation; there may be a hundred
    # thousand tensors.
    lines = [f"    {_quoted(name)}: {_quoted(weight_map[name])}" for name in sorted(weight_map)]
    head = f'{{\n  "{INDEX_METADATA}": {{\n    "{TOTAL_SIZE}": {total_size}\n  }},\n  "{WEIGHT_MAP}": {{\n'
    return (head + ",\n".join(lines) + "\n  }\n}\n").encode()


def read_index(storage: Storage, index: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the weight map of an index, and those strings of its metadata that cannot be computed from the shard
    files.

    Raises:
        Refused: with the code CORRUPT for an invalid index; with the code NAME_COLLISION if the index lists a tensor
            twice; with the code UNSUPPORTED for too many keys.
        StorageError: with the code IO if the index cannot be read.
    """
    size = storage.size(index)
    if size > _MAX_INDEX:
        raise refuse("CORRUPT", f"an index of {size} bytes is too long to be real", file=index)
    text = storage.read(index, 0, size)
    if pairs_in(text) > MAX_PAIRS:
        raise refuse("UNSUPPORTED", f"the index has more than {MAX_PAIRS} keys", file=index)
    try:
        top = members(text)
        weight_map_text = bytes(top.get(WEIGHT_MAP, _NULL))
        weight_map = _weight_map.decode(weight_map_text)
        metadata = bytes(top.get(INDEX_METADATA, _EMPTY))
        notes = members(metadata)
        if has_dropped_keys(text, top) or has_dropped_keys(metadata, notes):
            raise NotJsonError("the index has a key twice")
    except (NotJsonError, msgspec.MsgspecError) as error:
        message = f"the index must map tensors to files under {WEIGHT_MAP!r}: {error}"
        raise refuse("CORRUPT", message, file=index, hint="Copy or download the file again.") from error
    if pairs_in(weight_map_text) != len(weight_map):
        twice = [name for name, *_ in repeated_keys(weight_map_text)]
        raise gathered(Refusal("NAME_COLLISION", "the index lists it twice", Where(index, name)) for name in twice)
    texts = {key: raw for key, raw in notes.items() if key not in DERIVED and bytes(raw).startswith(b'"')}
    return weight_map, {key: _text.decode(raw) for key, raw in texts.items()}


def read_files(storage: Storage, member: str, read: Callable[[str], FileContent]) -> ReadFiles[FileContent]:
    """Read a file, or all shard files that an index names, and also the optimizer's state in its sub-folder.

    Args:
        storage: storage that reads the files.
        member: name of the file or of the index.
        read: function that reads one file.

    Raises:
        Refused: with the codes of `read` and of `read_index`; one refusal lists all problems together.
        StorageError: with the code IO if a file cannot be read.
    """
    faults = Faults()
    parts, entries, index_texts = _read_set(storage, member, read, faults)
    names = [*parts, member]
    state_member = _state_of(storage, member)
    if state_member is not None:
        state_contents, state, _ = _read_set(storage, state_member, read, faults)
        # a tensor that is not optimizer state shows that a different program wrote the folder
        if all(name.startswith(OPTIMIZER) for name in state):
            parts |= state_contents
            names += [*state_contents, state_member]
            for name in sorted(state.keys() & entries.keys()):
                holder = entries[name].extents[0].file
                faults.add("NAME_COLLISION", f"the tensor is also in {holder}", state[name].extents[0].file, name)
            entries |= state
    if faults:
        raise faults.error()
    return ReadFiles(parts, entries, index_texts, {name: storage.size(name) for name in dict.fromkeys(names)})


def _state_of(storage: Storage, member: str) -> str | None:
    """Return the name of the optimizer's file or index that belongs to a model's file or index; None if there
    is none.
    """
    if storage.single is not None or STATE_FOLDER not in storage.listing().folders:
        return None
    ending = member.removesuffix(INDEX).rpartition(".")[2]
    single_file = f"{STATE_FOLDER}.{ending}"
    files_in_folder = storage.listing(STATE_FOLDER).everything()
    return next(
        (f"{STATE_FOLDER}/{name}" for name in (f"{single_file}{INDEX}", single_file) if name in files_in_folder), None
    )


def _read_set(
    storage: Storage, member: str, read: Callable[[str], FileContent], faults: Faults
) -> tuple[dict[str, FileContent], dict[str, Entry], dict[str, str]]:
    """Read a file, or all shard files that an index names; return contents, tensors, and the strings in the index's
    metadata.
    """
    if not member.endswith(INDEX):
        content = read(member)
        return {member: content}, dict(content.entries), {}
    weight_map, index_texts = read_index(storage, member)
    _check_index(storage, member, weight_map, faults)
    parts = read_shards(storage, member, weight_map, read, faults)
    return (
        parts,
        check_agreement(member, weight_map, {name: content.entries for name, content in parts.items()}, faults),
        index_texts,
    )


def _check_index(storage: Storage, index: str, weight_map: Mapping[str, str], faults: Faults) -> None:
    """Refuse an index without tensors, and an index next to an unsharded file of the same name, because programs differ
    in which of the two they read.

    In the second case, transformers reads the unsharded file and ignores the shard files. If the user named the index
    or the file, the named one is read.
    """
    if not weight_map:
        faults.add("CORRUPT", f"its {WEIGHT_MAP} is empty: it lists no tensor", index)
    if storage.single is not None:
        return
    folder, index_shards = _folder_of(index), set(weight_map.values())
    whole_file = index.removeprefix(folder).removesuffix(INDEX)
    files_here = storage.listing(folder.rstrip("/")).everything()
    numbered = [match.groups() for shard in index_shards if (match := _NUMBERED.fullmatch(shard))]
    # shard files with names of different sets are refused elsewhere
    sets = set(numbered if len(numbered) == len(index_shards) else ())
    for shard in files_here:
        match = _NUMBERED.fullmatch(shard)
        if match and match.groups() in sets and shard not in index_shards:
            message = f"its name makes it a shard of the same set, but the index {index} does not list it"
            faults.add(
                "CORRUPT", message, f"{folder}{shard}", hint="Copy the index of this shard, or remove the shard."
            )
    if whole_file not in index_shards and whole_file in files_here:
        message = f"{folder}{whole_file} and the shards of {index} are two checkpoints in one folder"
        faults.add(
            "AMBIGUOUS", message, storage.path, hint=f"Name the one to read: the file {whole_file}, or the index."
        )


def read_shards(
    storage: Storage, index: str, weight_map: Mapping[str, str], read: Callable[[str], FileContent], faults: Faults
) -> dict[str, FileContent]:
    """Read all shard files that an index names, from the folder of the index.

    Args:
        storage: storage that reads the shard files.
        index: name of the index file.
        weight_map: maps the name of each tensor to the name of its shard file.
        read: function that reads one shard file.
        faults: list of faults, to which the problems of shard files are added; a file with problems is missing in the
            result.

    Raises:
        StorageError: with the code IO if the folder cannot be listed.
    """
    begin = _folder_of(index)
    listing = storage.listing(begin.rstrip("/"))
    parts: dict[str, FileContent] = {}
    present, tensors_per_shard = frozenset(listing.names), Counter(weight_map.values())
    for shard in sorted(tensors_per_shard):
        if faults.full:
            break
        if not is_plain(shard):
            faults.add("PATH_ESCAPE", f"the index names the shard {shard!r}, which is not a plain file name", index)
        elif shard in listing.special:
            faults.extend(listing.special[shard])
        elif shard not in present:
            message = f"the shard is missing; the index {index} places {tensors_per_shard[shard]} tensors in it"
            faults.add("INCOMPLETE", message, f"{begin}{shard}", hint="Copy or download the missing file.")
        else:
            try:
                parts[f"{begin}{shard}"] = read(f"{begin}{shard}")
            except TransaxleError as error:
                faults.extend(*error.refusals)
    return parts


def check_agreement(
    index: str, weight_map: Mapping[str, str], shards: Mapping[str, Mapping[str, Entry]], faults: Faults
) -> dict[str, Entry]:
    """Return the tensors of all shard files; add a fault for each contradiction between these files and the index."""
    begin = _folder_of(index)
    entries: dict[str, Entry] = {}
    holders: dict[str, str] = {}
    for shard, shard_entries in shards.items():
        for name, entry in shard_entries.items():
            if name in holders:
                faults.add("NAME_COLLISION", f"the tensor is also in {holders[name]}", shard, name)
            elif name not in weight_map:
                faults.add("CORRUPT", f"the tensor is not in the index {index}", shard, name)
            holders[name] = shard
            entries[name] = entry
    lacking: defaultdict[str, list[str]] = defaultdict(list)
    for name, shard_name in weight_map.items():
        shard = f"{begin}{shard_name}"
        if shard not in shards or name in shards[shard]:
            continue
        if name in holders:
            faults.add(
                "CORRUPT", f"the index {index} places the tensor here, but it is in {holders[name]}", shard, name
            )
        else:
            lacking[shard].append(name)
    for shard, (name, *more_names) in lacking.items():
        message = f"the index {index} places the tensor here, but the shard does not have it"
        if more_names:
            message += f", nor {len(more_names):,} more that the index places here: {more_names[0]}, …"
        faults.add("INCOMPLETE", message, shard, name, hint="Copy or download the file again, with its index.")
    return entries


def _folder_of(index: str) -> str:
    """Return the folder of an index, ending in `/`; empty if the index is in the top folder."""
    return index[: index.rfind("/") + 1]


def lay_out_shards(
    form: str, stem: str, ending: str, sized: Sequence[Sized], shard_size: int | None, lay_out_file: FileLayout
) -> Draft:
    """Lay out one file, or shard files with an index; optimizer state is in separate files in a sub-folder.

    Because of the sub-folder, a framework that loads the model does not read optimizer tensors, which it does not know.

    Args:
        form: name of the format.
        stem: beginning of the file names, such as `model`.
        ending: ending of the file names, such as `.safetensors`.
        sized: the tensors with their sizes; shard files are filled in this order.
        shard_size: maximum number of tensor bytes in one file; a larger tensor gets a separate file. None means one
            file for all tensors.
        lay_out_file: function that lays out one file; it is called first for the optimizer's state, then for the model.
    """
    any_state = has_state(spec.name for spec, _ in sized)
    state = [item for item in sized if item[0].name.startswith(OPTIMIZER)] if any_state else []
    if shard_size is None or len(state) in (0, len(sized)):
        return _lay_out(form, stem, ending, sized, shard_size, lay_out_file)
    state_files = _lay_out(form, f"{STATE_FOLDER}/{STATE_FOLDER}", ending, state, shard_size, lay_out_file)
    weights = [item for item in sized if not item[0].name.startswith(OPTIMIZER)]
    model = _lay_out(form, stem, ending, weights, shard_size, lay_out_file)
    return Draft(
        form,
        {**model.entries, **state_files.entries},
        {**model.files, **state_files.files},
        (*model.fragments, *state_files.fragments),
    )


def _lay_out(
    form: str, stem: str, ending: str, sized: Sequence[Sized], shard_size: int | None, lay_out_file: FileLayout
) -> Draft:
    shards = split(sized, shard_size)
    if shard_size is not None:
        refuse_many(len(shards), sum(size for _, size in sized), shard_size)
    entries: dict[str, Entry] = {}
    files: dict[str, int] = {}
    fragments: list[Fragment] = []
    weight_map: dict[str, str] = {}
    inside = len(stem.rpartition("/")[0]) + 1 if "/" in stem else 0
    for number, shard in enumerate(shards, 1):
        file = shard_name(stem, ending, number, len(shards))
        file_entries, file_fragments, files[file] = lay_out_file(file, shard)
        fragments.extend(file_fragments)
        names = [entry.name for entry in file_entries]
        entries.update(zip(names, file_entries, strict=True))
        weight_map.update(dict.fromkeys(names, file[inside:]))
    if len(shards) > 1:
        index, name = encode_index(weight_map, sum(size for _, size in sized)), f"{stem}{ending}{INDEX}"
        fragments.append(Fragment(name, 0, index))
        files[name] = len(index)
    return Draft(form, entries, files, tuple(fragments))


def has_state(names: Iterable[str]) -> bool:
    """Return whether any of the tensor names belongs to optimizer state. For speed, a single search through all names
    joined together decides in most cases.
    """
    all_names = list(names)
    return OPTIMIZER in "".join(all_names) and any(name.startswith(OPTIMIZER) for name in all_names)


def refuse_many(files: int, size: int, shard_size: int) -> None:
    """Refuse a shard size that results in too many files: they make folders slow, and hubs refuse them.

    Args:
        files: number of files that would result from the shard size.
        size: total bytes of all tensors.
        shard_size: maximum size of a shard file in bytes, as the user gave it.

    Raises:
        UsageError: with the code AMBIGUOUS if there would be too many files.
    """
    if files <= MAX_FILES:
        return
    power = len(str(size // _MIN_FILES)) - 1
    unit = ("B", "KB", "MB", "GB", "TB", "PB")[power // 3]
    sensible = f"{10 ** (power % 3)}{unit}"
    wish = f"files of {shard_size:,} bytes (--shard-size, shard_size=)"
    message = f"{wish} would be {files:,} files; at most {MAX_FILES:,} are written"
    option = f'--shard-size {sensible} (shard_size="{sensible}")'
    hint = f"Give a larger size: {option} makes some {-(-size // 10**power):,} files."
    raise refuse("AMBIGUOUS", message, hint=hint)


def split(sized: Sequence[Sized], shard_size: int | None) -> list[list[Sized]]:
    """Distribute tensors over shard files in order, as huggingface_hub does; without tensors there is one empty
    file.
    """
    if shard_size is None or sum(size for _, size in sized) <= shard_size:
        return [list(sized)]
    shards: list[list[Sized]] = []
    current: list[Sized] = []
    room = shard_size
    for spec, size in sized:
        if size > shard_size:
            shards.append([(spec, size)])
            continue
        if size > room:
            shards.append(current)
            current, room = [], shard_size
        current.append((spec, size))
        room -= size
    return [*shards, current] if current or not shards else shards


def shard_name(stem: str, ending: str, number: int, count: int) -> str:
    """Return the name of a shard file; `number` counts from 1. The name of a single file has no number."""
    return f"{stem}{ending}" if count == 1 else f"{stem}-{number:05d}-of-{count:05d}{ending}"
