"""Unconsolidated safetensors shards of torch's `HuggingFaceStorageWriter`: each rank's parts of tensors.

They look like a safetensors checkpoint but are none: every file lists the parts of one rank as if they were the
tensors. A note in each header says which parts they are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from transaxle.errors import Faults, TransaxleError
from transaxle.formats.builtin_formats import DCP, DCP_SHARD
from transaxle.formats.catalog import Container, Entry, Extent, Shape
from transaxle.formats.dcp.chunk_tiling import ChunkBox, tiled
from transaxle.formats.registry import sort_sidecars
from transaxle.formats.safetensors import PART_NOTES, Header, part_starts, read_header
from transaxle.formats.storage.storage import Storage

_SHARD = re.compile(DCP_SHARD)


def shard_files(names: Collection[str]) -> tuple[str, ...]:
    """Return the names of such shards, sorted."""
    return tuple(sorted(name for name in names if _SHARD.fullmatch(name)))


def open_shards(storage: Storage, path: str, member: str) -> Container:
    """Open all shards of a folder.

    Args:
        storage: where the files are.
        path: what the user typed.
        member: any one of them.

    Raises:
        Refused: CORRUPT, DTYPE_MISMATCH, INCOMPLETE, NAME_COLLISION, OVERLAP, UNSUPPORTED: every problem found.
        StorageError: IO.
    """
    faults = Faults()
    headers: dict[str, Header] = {}
    parts: dict[str, list[tuple[Entry, Extent]]] = {}
    for file in shard_files({*storage.names(), member}):
        try:
            headers[file] = header = read_header(storage, file)
        except TransaxleError as error:
            if error.exit_code != TransaxleError.exit_code:
                raise
            faults.extend(*error.refusals)
            continue
        for name, start in (part_starts(header.entries, header.metadata, file, faults) or {}).items():
            entry = header.entries[name]
            (placed,) = entry.extents
            parts.setdefault(name, []).append((entry, Extent(start, entry.shape, file, placed.offset)))
    joined = {name: _joined(name, pieces, faults) for name, pieces in parts.items()}
    entries = {name: entry for name, entry in joined.items() if entry}
    if faults:
        raise faults.error()
    files = {file: storage.size(file) for file in headers}
    sidecars = sort_sidecars(storage, files)
    return Container(DCP.name, path, storage, entries, files, _notes(headers), sidecars.carried, sidecars.ignored)


def _joined(name: str, parts: list[tuple[Entry, Extent]], faults: Faults) -> Entry | None:
    """Return the tensor that parts make up; None if it has a problem."""
    (model, _), (_, first_extent) = parts[0], parts[0]
    for entry, extent_here in parts[1:]:
        if entry.dtype != model.dtype:
            message = f"it is {model.dtype} in {first_extent.file}, but {entry.dtype} here"
            faults.add("DTYPE_MISMATCH", message, extent_here.file, name)
            return None
        if len(entry.shape) != len(model.shape):
            message = f"it has {len(model.shape)} dims in {first_extent.file}, but {len(entry.shape)} here"
            faults.add("SHAPE_MISMATCH", message, extent_here.file, name)
            return None
    extents = sorted((extent_here for _, extent_here in parts), key=lambda extent: extent.start)
    shape: Shape = tuple(
        max(extent.start[dim] + extent.shape[dim] for extent in extents) for dim in range(len(model.shape))
    )
    non_empty = [extent for extent in extents if 0 not in extent.shape]
    boxes: list[ChunkBox] = [(extent.start, extent.shape) for extent in non_empty]
    if not tiled(name, shape, boxes, first_extent.file, faults):
        return None
    return Entry(name, model.dtype, shape, tuple(non_empty))


def _notes(headers: Mapping[str, Header]) -> dict[str, str]:
    """Return the free text on which all headers agree, without the notes on parts."""
    texts = [header.metadata for header in headers.values()]
    first_text = texts[0] if texts else {}
    return {
        key: text
        for key, text in first_text.items()
        if key not in PART_NOTES and all(other_text.get(key) == text for other_text in texts)
    }
