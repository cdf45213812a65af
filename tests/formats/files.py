"""Safetensors files made by hand, byte by byte, for what no library would write."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors

from transaxle.formats.catalog import Container, Entry
from transaxle.formats.safetensors import Header, read_header
from transaxle.formats.storage.local import LocalStorage

FILE = "model.safetensors"
INDEX = f"{FILE}.index.json"


def info(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def raw(header: bytes, data: bytes = b"") -> bytes:
    """A file of these bytes; the header's length is right."""
    return len(header).to_bytes(8, "little") + header + data


def made(entries: Mapping[str, Any], data: bytes = b"") -> bytes:
    return raw(json.dumps(entries).encode(), data)


def header_of(folder: Path, file: str = FILE) -> Header:
    storage = LocalStorage(folder)
    try:
        return read_header(storage, file)
    finally:
        storage.close()


def names_in(folder: Path | str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def open_files() -> int:
    """Descriptors of this process."""
    gc.collect()  # what others have left open, and nobody can reach any more, is closed now and not in between
    return len(names_in("/proc/self/fd"))


def library(file: bytes) -> dict[str, dict[str, Any]]:
    """What the safetensors library reads from these bytes; it raises SafetensorError."""
    read: Callable[[bytes], list[tuple[str, dict[str, Any]]]] = safetensors.deserialize
    return dict(read(file))


def dense(container: Container, entry: Entry) -> bytes:
    """The bytes of a tensor that lies in one row-major extent."""
    (extent,) = entry.extents
    assert extent.start == (0,) * len(entry.shape)
    assert extent.shape == entry.shape
    assert extent.strides is None
    return container.storage.read(extent.file, extent.offset, entry.nbytes)
