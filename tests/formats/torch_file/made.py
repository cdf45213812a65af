"""torch files made by hand: archives in which any number may lie, and pickles that say anything of any storage."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transaxle.formats.catalog import Container
from transaxle.formats.detect import open_container
from transaxle.formats.pickled.descriptors import DType, Persistent, StorageType, TensorRef
from transaxle.formats.pickled.writer import write_pickle

FILE = "model.pt"
FOLDER = "archive"
PICKLE = "data.pkl"
UTF8 = 1 << 11
Numbers = Mapping[str, int]


@dataclass(frozen=True)
class Record:
    """One record; `local` and `central` replace fields of its headers."""

    name: str | bytes
    data: bytes
    local: Numbers = field(default_factory=dict)
    central: Numbers = field(default_factory=dict)
    local_name: bytes | None = None
    local_extra: bytes = b""
    central_extra: bytes = b""
    comment: bytes = b""
    after: bytes = b""
    """What stands between it and the next record."""
    before: bytes = b""
    """What stands before it."""

    @property
    def path(self) -> bytes:
        return self.name if isinstance(self.name, bytes) else f"{FOLDER}/{self.name}".encode()

    def fields(self, changed: Numbers) -> list[int]:
        said = {
            "version": 0, "flags": UTF8, "method": 0, "time": 0, "date": 0, "crc32": zlib.crc32(self.data),
            "packed": len(self.data), "plain": len(self.data), **changed,
        }  # fmt: skip
        return [said[key] for key in ("version", "flags", "method", "time", "date", "crc32", "packed", "plain")]


def archive(records: Sequence[Record], *, end: Numbers | None = None, tail: bytes = b"", wide: bytes = b"") -> bytes:
    """A zip archive; `end` replaces fields of its end record, `tail` follows, `wide` stands before the end record."""
    out, directory = bytearray(), bytearray()
    for record in records:
        out += record.before
        at = len(out)
        name = record.local_name if record.local_name is not None else record.path
        out += struct.pack("<4sHHHHHIIIHH", b"PK\3\4", *record.fields(record.local), len(name), len(record.local_extra))
        out += name + record.local_extra + record.data + record.after
        numbers = record.fields({key: value for key, value in record.central.items() if key not in ("header", "disk")})
        sizes = len(record.path), len(record.central_extra), len(record.comment)
        places = record.central.get("disk", 0), 0, 0, record.central.get("header", at)
        directory += struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\1\2", 0, *numbers, *sizes, *places)
        directory += record.path + record.central_extra + record.comment
    counts = {"disk": 0, "first": 0, "here": len(records), "count": len(records)}
    said = {**counts, "size": len(directory), "begin": len(out), "comment": 0, **(end or {})}
    return bytes(out + directory + wide + struct.pack("<4sHHHHIIH", b"PK\5\6", *said.values()) + tail)


def storage(key: str = "0", dtype: str | None = "float32", count: int = 4, device: Any = "cpu") -> Persistent:
    return Persistent(("storage", StorageType(None if dtype is None else DType(dtype)), key, device, count))


def view(
    held: Any = None, offset: int = 0, shape: tuple[int, ...] = (4,), strides: tuple[int, ...] = (1,), **more: Any
) -> TensorRef:
    return TensorRef(storage() if held is None else held, more.pop("dtype", None), offset, shape, strides, **more)


def records(value: Any, storages: Mapping[str, bytes] | None = None, **notes: bytes) -> list[Record]:
    pickle = value if isinstance(value, bytes) else write_pickle(value)
    held = {"0": bytes(16)} if storages is None else storages
    return [
        Record(PICKLE, pickle),
        *(Record(name, data) for name, data in {"byteorder": b"little", "version": b"3\n", **notes}.items() if data),
        *(Record(f"data/{key}", data) for key, data in held.items()),
    ]


def saved(value: Any, storages: Mapping[str, bytes] | None = None, **notes: bytes) -> bytes:
    return archive(records(value, storages, **notes))


def opened(folder: Path, data: bytes, file: str = FILE) -> Container:
    (folder / file).write_bytes(data)
    return open_container(str(folder / file))


def octets(container: Container, name: str) -> bytes:
    """The bytes of a tensor that lies in one row-major extent."""
    (extent,) = container.entries[name].extents
    assert extent.strides is None
    return container.storage.read(extent.file, extent.offset, container.entries[name].nbytes)
