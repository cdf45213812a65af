"""Spreading tensors over several files, as Hugging Face does for every format it shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from transaxle.formats.catalog import Draft, Entry, Fragment, Spec
from transaxle.formats.company import INDEX
from transaxle.formats.index import encode_index

Sized = tuple[Spec, int]
"""A tensor and its bytes."""
Shard = Callable[[str, list[Sized]], tuple[list[Entry], list[Fragment], int]]
"""Lays one file out: its name and tensors -> where each tensor lies, the bytes around them, and the file's size."""


def lay_out_shards(
    form: str, stem: str, ending: str, sized: Sequence[Sized], shard_size: int | None, one: Shard
) -> Draft:
    """Lay out one file, or several with their index.

    Args:
        form: name of the format.
        stem: beginning of the file names, `model`.
        ending: their end, `.safetensors`.
        sized: what to write; shards are filled in this order.
        shard_size: bytes of tensors in one file; a tensor that is larger gets a file of its own. None: one file.
        one: lays one file out.
    """
    shards = split(sized, shard_size)
    entries: dict[str, Entry] = {}
    files: dict[str, int] = {}
    fragments: list[Fragment] = []
    for number, shard in enumerate(shards, 1):
        file = shard_name(stem, ending, number, len(shards))
        placed, known, files[file] = one(file, shard)
        fragments.extend(known)
        entries.update((entry.name, entry) for entry in placed)
    if len(shards) > 1:
        weight_map = {entry.name: entry.extents[0].file for entry in entries.values()}
        index, name = encode_index(weight_map, sum(size for _, size in sized)), f"{stem}{ending}{INDEX}"
        fragments.append(Fragment(name, 0, index))
        files[name] = len(index)
    return Draft(form, entries, files, tuple(fragments))


def split(sized: Iterable[Sized], shard_size: int | None) -> list[list[Sized]]:
    """Fill shards in order, as huggingface_hub does; there is at least one, be it empty."""
    shards: list[list[Sized]] = []
    current: list[Sized] = []
    room = shard_size
    for spec, size in sized:
        if shard_size is not None and size > shard_size:
            shards.append([(spec, size)])
            continue
        if room is not None and shard_size is not None and size > room:
            shards.append(current)
            current, room = [], shard_size
        current.append((spec, size))
        room = None if room is None else room - size
    return [*shards, current] if current or not shards else shards


def shard_name(stem: str, ending: str, number: int, count: int) -> str:
    """Return the name of a shard, counted from 1; that of the whole if there is only one."""
    return f"{stem}{ending}" if count == 1 else f"{stem}-{number:05d}-of-{count:05d}{ending}"
