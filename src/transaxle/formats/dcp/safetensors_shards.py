"""The safetensors shards that torch's `HuggingFaceStorageWriter` leaves unconsolidated: each rank's parts of tensors.

They look like a safetensors checkpoint and are none: every file gives the parts that one rank held as if they were the
tensors. Which parts they are stands in a note in each header.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from transaxle.errors import TransaxleError
from transaxle.formats.builtin_formats import DCP, DCP_SHARD
from transaxle.formats.catalog.catalog import Container, Entry, Extent
from transaxle.formats.catalog.problem_list import Faults
from transaxle.formats.catalog.sidecar_files import company
from transaxle.formats.dcp.chunks.chunk_tiling import Box, tiled
from transaxle.formats.dtype import Shape
from transaxle.formats.safetensors.header import Header, read_header
from transaxle.formats.safetensors.torch_parts import NOTES, starts
from transaxle.formats.storage.storage import Storage

_SHARD = re.compile(DCP_SHARD)


def shard_files(names: Collection[str]) -> tuple[str, ...]:
    """Return the names of such shards among names, sorted."""
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
        for name, start in (starts(header.entries, header.metadata, file, faults) or {}).items():
            entry = header.entries[name]
            (there,) = entry.extents
            parts.setdefault(name, []).append((entry, Extent(start, entry.shape, file, there.offset)))
    joined = {name: _joined(name, held, faults) for name, held in parts.items()}
    entries = {name: entry for name, entry in joined.items() if entry}
    if faults:
        raise faults.error()
    files = {file: storage.size(file) for file in headers}
    around = company(storage, files)
    return Container(DCP.name, path, storage, entries, files, _notes(headers), around.carried, around.ignored)


def _joined(name: str, parts: list[tuple[Entry, Extent]], faults: Faults) -> Entry | None:
    """Return the tensor that parts make up; None if something is wrong with it."""
    (first, _), (_, place) = parts[0], parts[0]
    for entry, there in parts[1:]:
        if entry.dtype != first.dtype:
            message = f"it is {first.dtype} in {place.file}, and {entry.dtype} here"
            faults.add("DTYPE_MISMATCH", message, there.file, name)
            return None
        if len(entry.shape) != len(first.shape):
            message = f"it has {len(first.shape)} dims in {place.file}, and {len(entry.shape)} here"
            faults.add("SHAPE_MISMATCH", message, there.file, name)
            return None
    extents = sorted((there for _, there in parts), key=lambda extent: extent.start)
    shape: Shape = tuple(
        max(extent.start[dim] + extent.shape[dim] for extent in extents) for dim in range(len(first.shape))
    )
    held = [extent for extent in extents if 0 not in extent.shape]
    boxes: list[Box] = [(extent.start, extent.shape) for extent in held]
    if not tiled(name, shape, boxes, place.file, faults):
        return None
    return Entry(name, first.dtype, shape, tuple(held))


def _notes(headers: Mapping[str, Header]) -> dict[str, str]:
    """Return the free text that all headers agree on; what describes the parts is not that of the whole."""
    texts = [header.metadata for header in headers.values()]
    first = texts[0] if texts else {}
    return {
        key: text for key, text in first.items() if key not in NOTES and all(each.get(key) == text for each in texts)
    }
