"""Shards: tensors spread over several files, and `*.index.json`, in which Hugging Face lists which file holds which.

transformers trusts an index. Here the shards decide what exists, and an index that contradicts them is refused,
whatever the format of the shards.
"""

from __future__ import annotations

import json
import re
from collections import Counter
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
    dropped,
    is_plain,
    members,
    pairs_in,
    repeated,
)
from transaxle.formats.training_state import OPTIMIZER

MOST_FILES = 10_000
"""Cap on the files of one checkpoint: names count them with five digits, and a terabyte in files of 5 GB has 200."""
_MANY = 100
"""Files that a refusal of too many suggests at least; fewer than ten times as many."""
WEIGHT_MAP = "weight_map"
"""Tensor name -> name of the shard that holds it."""
INDEX_METADATA = "metadata"
TOTAL_SIZE = "total_size"
"""Bytes of all tensors."""
DERIVED = frozenset({TOTAL_SIZE, "total_parameters"})
"""Keys of the metadata that repeat what the shards say."""

_NUMBERED = re.compile(r"(.*)-\d{1,9}(-of-\d{1,9}\.\w+)")
"""Name of a shard; the groups, without its number, are common to all shards of its set."""
_MAX_INDEX = 200_000_000
_NULL = msgspec.Raw(b"null")
_EMPTY = msgspec.Raw(b"{}")

_quoted = json.encoder.encode_basestring_ascii
_text: msgspec.json.Decoder[str] = msgspec.json.Decoder(str)
_weight_map: msgspec.json.Decoder[dict[str, str]] = msgspec.json.Decoder(dict[str, str])


class HoldsEntries(Protocol):
    """The contents of one file."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Its tensors by name."""


Sized = tuple[Spec, int]
"""A tensor and its bytes."""
FileLayout = Callable[[str, list[Sized]], tuple[list[Entry], list[Fragment], int]]
"""Lays out one file: its name and tensors -> entries, the bytes around them, and the file's size."""
FileContent = TypeVar("FileContent", bound=HoldsEntries)


class ReadFiles(msgspec.Struct, Generic[FileContent], frozen=True):
    """The files of a checkpoint, all of which were read."""

    parts: Mapping[str, FileContent]
    """File name -> its contents."""
    entries: Mapping[str, Entry]
    """All tensors."""
    index_texts: Mapping[str, str]
    """Texts of the index's metadata."""
    sizes: Mapping[str, int]
    """Bytes of each file, indexes included."""


def encode_index(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """Return the text of an index, in the layout that transformers gives it."""
    if not weight_map:
        index = {INDEX_METADATA: {TOTAL_SIZE: total_size}, WEIGHT_MAP: {}}
        return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
    # Written out, as indented text takes `json` five times as long, and there may be a hundred thousand tensors.
    lines = [f"    {_quoted(name)}: {_quoted(weight_map[name])}" for name in sorted(weight_map)]
    head = f'{{\n  "{INDEX_METADATA}": {{\n    "{TOTAL_SIZE}": {total_size}\n  }},\n  "{WEIGHT_MAP}": {{\n'
    return (head + ",\n".join(lines) + "\n  }\n}\n").encode()


def read_index(storage: Storage, index: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the weight map, and those texts of the index's metadata that are not derived from the tensors.

    Raises:
        Refused: CORRUPT, NAME_COLLISION.
        StorageError: IO.
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
        if dropped(text, top) or dropped(metadata, notes):
            raise NotJsonError("the index has a key twice")
    except (NotJsonError, msgspec.MsgspecError) as error:
        message = f"the index must map tensors to files under {WEIGHT_MAP!r}: {error}"
        raise refuse("CORRUPT", message, file=index, hint="Copy or download the file again.") from error
    if pairs_in(weight_map_text) != len(weight_map):
        twice = [name for name, *_ in repeated(weight_map_text)]
        raise gathered(Refusal("NAME_COLLISION", "the index lists it twice", Where(index, name)) for name in twice)
    texts = {key: raw for key, raw in notes.items() if key not in DERIVED and bytes(raw).startswith(b'"')}
    return weight_map, {key: _text.decode(raw) for key, raw in texts.items()}


def read_files(storage: Storage, member: str, read: Callable[[str], FileContent]) -> ReadFiles[FileContent]:
    """Read a file, or all shards of an index, and the files of the optimizer's state in their folder.

    Args:
        storage: the files.
        member: a file, or an index.
        read: reads one file.

    Raises:
        Refused: every problem of the indexes and of all files.
        StorageError: IO.
    """
    faults = Faults()
    parts, entries, index_texts = _read_set(storage, member, read, faults)
    names = [*parts, member]
    beside = _state_beside(storage, member)
    if beside is not None:
        state_contents, state, _ = _read_set(storage, beside, read, faults)
        if all(name.startswith(OPTIMIZER) for name in state):  # else it is somebody else's folder
            parts |= state_contents
            names += [*state_contents, beside]
            for name in sorted(state.keys() & entries.keys()):
                holder = entries[name].extents[0].file
                faults.add("NAME_COLLISION", f"the tensor is also in {holder}", state[name].extents[0].file, name)
            entries |= state
    if faults:
        raise faults.error()
    return ReadFiles(parts, entries, index_texts, {name: storage.size(name) for name in dict.fromkeys(names)})


def _state_beside(storage: Storage, member: str) -> str | None:
    """Return the file, or the index, of the optimizer's state beside a model's."""
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
    """Read a file, or all shards of an index; return also their tensors, and the texts of the index's metadata."""
    if not member.endswith(INDEX):
        content = read(member)
        return {member: content}, dict(content.entries), {}
    weight_map, index_texts = read_index(storage, member)
    _check_alone(storage, member, weight_map, faults)
    parts = read_shards(storage, member, weight_map, read, faults)
    return (
        parts,
        agreed(member, weight_map, {name: content.entries for name, content in parts.items()}, faults),
        index_texts,
    )


def _check_alone(storage: Storage, index: str, weight_map: Mapping[str, str], faults: Faults) -> None:
    """Refuse an empty index, and one beside an unsharded file of its name: programs differ in which they read.

    transformers reads the file and ignores the shards. A user who names one of the two has chosen.
    """
    if not weight_map:
        faults.add("CORRUPT", f"its {WEIGHT_MAP} is empty: it lists no tensor", index)
    if storage.single is not None:
        return
    begin, named = _folder_of(index), set(weight_map.values())
    whole_file = index.removeprefix(begin).removesuffix(INDEX)
    files_here = storage.listing(begin.rstrip("/")).everything()
    numbered = [match.groups() for shard in named if (match := _NUMBERED.fullmatch(shard))]
    sets = set(numbered if len(numbered) == len(named) else ())  # a name of another kind is told of elsewhere
    for shard in files_here:
        match = _NUMBERED.fullmatch(shard)
        if match and match.groups() in sets and shard not in named:
            message = f"its name makes it a shard of the same set, but the index {index} does not list it"
            faults.add(
                "CORRUPT", message, f"{begin}{shard}", hint="Copy the index that belongs to it, or remove the shard."
            )
    if whole_file not in named and whole_file in files_here:
        message = f"{begin}{whole_file} and the shards of {index} are two checkpoints in one folder"
        faults.add(
            "AMBIGUOUS", message, storage.path, hint=f"Name the one you mean: the file {whole_file}, or the index."
        )


def read_shards(
    storage: Storage, index: str, weight_map: Mapping[str, str], read: Callable[[str], FileContent], faults: Faults
) -> dict[str, FileContent]:
    """Read all shards that an index names, by name; they lie beside it.

    Args:
        storage: where they are.
        index: its name, for errors.
        weight_map: tensor -> shard.
        read: reads one shard.
        faults: receives what is wrong with any of them; such a shard is left out.

    Raises:
        StorageError: IO for the folder.
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


def agreed(
    index: str, weight_map: Mapping[str, str], shards: Mapping[str, Mapping[str, Entry]], faults: Faults
) -> dict[str, Entry]:
    """Return the tensors of all shards; every contradiction between them and the index is a fault."""
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
    for name, named in weight_map.items():
        shard = f"{begin}{named}"
        if shard not in shards or name in shards[shard]:
            continue
        if name in holders:
            faults.add(
                "CORRUPT", f"the index {index} places the tensor here, but it is in {holders[name]}", shard, name
            )
        else:
            faults.add(
                "INCOMPLETE", f"the index {index} places the tensor here, but the shard does not have it", shard, name
            )
    return entries


def _folder_of(index: str) -> str:
    """Return the folder of an index, with a trailing `/`; empty for the checkpoint's own folder."""
    return index[: index.rfind("/") + 1]


def lay_out_shards(
    form: str, stem: str, ending: str, sized: Sequence[Sized], shard_size: int | None, lay_out_file: FileLayout
) -> Draft:
    """Lay out one file, or several with their index; the optimizer's state in files of its own, in a folder of its own.

    A framework that loads the model then meets nothing that it does not know.

    Args:
        form: name of the format.
        stem: beginning of the file names, `model`.
        ending: their end, `.safetensors`.
        sized: what to write; shards are filled in this order.
        shard_size: bytes of tensors in one file; a tensor that is larger gets a file of its own. None: one file with
            everything.
        lay_out_file: lays out one file; called for the optimizer's state, if there is any, before the model.
    """
    are_some = has_state(spec.name for spec, _ in sized)
    state = [item for item in sized if item[0].name.startswith(OPTIMIZER)] if are_some else []
    if shard_size is None or len(state) in (0, len(sized)):
        return _lay_out(form, stem, ending, sized, shard_size, lay_out_file)
    beside = _lay_out(form, f"{STATE_FOLDER}/{STATE_FOLDER}", ending, state, shard_size, lay_out_file)
    weights = [item for item in sized if not item[0].name.startswith(OPTIMIZER)]
    model = _lay_out(form, stem, ending, weights, shard_size, lay_out_file)
    return Draft(
        form,
        {**model.entries, **beside.entries},
        {**model.files, **beside.files},
        (*model.fragments, *beside.fragments),
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
        placed, known_fragments, files[file] = lay_out_file(file, shard)
        fragments.extend(known_fragments)
        names = [entry.name for entry in placed]
        entries.update(zip(names, placed, strict=True))
        weight_map.update(dict.fromkeys(names, file[inside:]))
    if len(shards) > 1:
        index, name = encode_index(weight_map, sum(size for _, size in sized)), f"{stem}{ending}{INDEX}"
        fragments.append(Fragment(name, 0, index))
        files[name] = len(index)
    return Draft(form, entries, files, tuple(fragments))


def has_state(names: Iterable[str]) -> bool:
    """Tell whether some names are those of an optimizer's state; very many are searched as one text."""
    listed = list(names)
    return OPTIMIZER in "".join(listed) and any(name.startswith(OPTIMIZER) for name in listed)


def refuse_many(files: int, size: int, shard_size: int) -> None:
    """Refuse a size of files that gives more of them than anybody wants: folders become slow, and hubs refuse them.

    Args:
        files: how many there would be.
        size: bytes of all tensors.
        shard_size: the size that the user gave.

    Raises:
        UsageError: AMBIGUOUS.
    """
    if files <= MOST_FILES:
        return
    power = len(str(size // _MANY)) - 1
    unit = ("B", "KB", "MB", "GB", "TB", "PB")[power // 3]
    sensible = f"{10 ** (power % 3)}{unit}"
    given = f"files of {shard_size:,} bytes (--shard-size, shard_size=)"
    message = f"{given} would be {files:,} files; at most {MOST_FILES:,} are written"
    enough = f'--shard-size {sensible} (shard_size="{sensible}")'
    hint = f"Give a larger size: {enough} makes some {-(-size // 10**power):,} files."
    raise refuse("AMBIGUOUS", message, hint=hint)


def split(sized: Sequence[Sized], shard_size: int | None) -> list[list[Sized]]:
    """Fill shards in order, as huggingface_hub does; there is at least one, even if it is empty."""
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
    """Return the name of a shard, counted from 1; the plain name if there is only one."""
    return f"{stem}{ending}" if count == 1 else f"{stem}-{number:05d}-of-{count:05d}{ending}"
