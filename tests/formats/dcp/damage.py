"""Changing what torch saved: its metadata through torch's own classes, its files byte by byte."""

from __future__ import annotations

import io
import json
import os
import pickle
import shlex
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

METADATA = ".metadata"
MARKER = "marker"
Damage = Callable[[Path], object]
"""Damages the checkpoint in a folder."""


class Evil:
    """Leaves a marker where it is unpickled by Python."""

    def __init__(self, folder: Path) -> None:
        self.command = f"touch {shlex.quote(str(folder / MARKER))}"

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)


def read(folder: Path) -> Metadata:
    held: Metadata = pickle.loads((folder / METADATA).read_bytes())  # noqa: S301 - our own
    return held


def write(folder: Path, metadata: object) -> None:
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


def edit(change: Callable[[Any], object]) -> Damage:
    """Change the metadata; if the change returns something, that takes its place."""

    def damage(folder: Path) -> None:
        metadata = read(folder)
        changed = change(metadata)
        write(folder, metadata if changed is None else changed)

    return damage


def place(key: str, chunk: int | None = 0, **fields: Any) -> Damage:
    """Change what is said of the place of a chunk, or of an object (None)."""

    def change(metadata: Any) -> None:
        for field, value in fields.items():
            setattr(metadata.storage_data[index_of(metadata, key, chunk)], field, value)

    return edit(change)


def index_of(metadata: Any, key: str, chunk: int | None) -> MetadataIndex:
    if chunk is None:
        return MetadataIndex(key)
    return MetadataIndex(key, metadata.state_dict_metadata[key].chunks[chunk].offsets)


def info(folder: Path, key: str, chunk: int | None = 0) -> _StorageInfo:
    metadata = read(folder)
    found: _StorageInfo = metadata.storage_data[index_of(metadata, key, chunk)]
    return found


def archive(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def put(folder: Path, key: str, payload: bytes, chunk: int | None = 0) -> None:
    """Let a chunk, or an object, lie at the end of its file in other bytes."""
    file = folder / info(folder, key, chunk).relative_path
    offset = file.stat().st_size
    with file.open("ab") as stream:
        stream.write(payload)
    place(key, chunk, offset=offset, length=len(payload))(folder)


def putting(key: str, make: Callable[[Path], bytes], chunk: int | None = 0) -> Damage:
    return lambda folder: put(folder, key, make(folder), chunk)


def payload(folder: Path, key: str, chunk: int | None = 0) -> bytes:
    there = info(folder, key, chunk)
    return (folder / there.relative_path).read_bytes()[there.offset : there.offset + there.length]


def repacked(data: bytes, change: Callable[[dict[str, bytes]], object], method: int = zipfile.ZIP_STORED) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as source:
        records = {name: source.read(name) for name in source.namelist()}
    change(records)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as target:
        for name, content in records.items():
            target.writestr(zipfile.ZipInfo(name), content, method)
    return stream.getvalue()


def moved(metadata: Any, key: str, chunk: int, start: list[int], sizes: list[int]) -> None:
    """Let a chunk be another box, in both places that speak of it."""
    entry = metadata.state_dict_metadata[key]
    there = metadata.storage_data.pop(index_of(metadata, key, chunk))
    entry.chunks[chunk] = ChunkStorageMetadata(torch.Size(start), torch.Size(sizes))
    metadata.storage_data[MetadataIndex(key, start)] = there


def header_edited(file: Path, begin: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of safetensors data, keeping its length where spaces allow."""
    data = file.read_bytes()
    length = int.from_bytes(data[begin : begin + 8], "little")
    header = json.loads(data[begin + 8 : begin + 8 + length])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(data[:begin] + len(text).to_bytes(8, "little") + text + data[begin + 8 + length :])


def note_edited(file: Path, begin: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the note in which torch says where parts begin."""

    def within(header: dict[str, Any]) -> None:
        note = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        changed = change(note)
        header["__metadata__"]["DCP_SHARDING_INFO"] = changed if isinstance(changed, str) else json.dumps(note)

    header_edited(file, begin, within)
