"""Spreading tensors over several files, as Hugging Face does for every format it shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from transaxle.formats.catalog.catalog import Draft, Entry, Fragment, Spec
from transaxle.formats.catalog.sidecar_files import STATE_FOLDER
from transaxle.formats.format import INDEX
from transaxle.formats.sharded.shard_index import encode_index
from transaxle.formats.training_state.state import OPTIMIZER

Sized = tuple[Spec, int]
"""A tensor and its bytes."""
FileLayout = Callable[[str, list[Sized]], tuple[list[Entry], list[Fragment], int]]
"""Lays out one file: its name and tensors -> entries, the bytes around them, and the file's size."""


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
    state = [item for item in sized if item[0].name.startswith(OPTIMIZER)]
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
    entries: dict[str, Entry] = {}
    files: dict[str, int] = {}
    fragments: list[Fragment] = []
    for number, shard in enumerate(shards, 1):
        file = shard_name(stem, ending, number, len(shards))
        placed, known_fragments, files[file] = lay_out_file(file, shard)
        fragments.extend(known_fragments)
        entries.update((entry.name, entry) for entry in placed)
    if len(shards) > 1:
        inside = len(stem.rpartition("/")[0]) + 1 if "/" in stem else 0
        weight_map = {entry.name: entry.extents[0].file[inside:] for entry in entries.values()}
        index, name = encode_index(weight_map, sum(size for _, size in sized)), f"{stem}{ending}{INDEX}"
        fragments.append(Fragment(name, 0, index))
        files[name] = len(index)
    return Draft(form, entries, files, tuple(fragments))


def split(sized: Iterable[Sized], shard_size: int | None) -> list[list[Sized]]:
    """Fill shards in order, as huggingface_hub does; there is at least one, even if it is empty."""
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
    """Return the name of a shard, counted from 1; the plain name if there is only one."""
    return f"{stem}{ending}" if count == 1 else f"{stem}-{number:05d}-of-{count:05d}{ending}"
