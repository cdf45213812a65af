"""torch files that contradict themselves are refused: archives, the form before 1.6, storages, changed bytes."""

from __future__ import annotations

import io
import os
import pickle
import struct
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import transaxle as tx
from tests.formats.drafts import damage
from tests.formats.refusals import refuses
from tests.formats.torch_file.made import (
    FILE,
    FOLDER,
    PICKLE,
    Record,
    archive,
    octets,
    opened,
    records,
    saved,
    storage,
    view,
)
from transaxle.errors import Code, TransaxleError
from transaxle.formats.pickled.descriptors import DType, Global, Object, OrderedMap, Persistent, StorageType, TensorRef
from transaxle.formats.pickled.writer import write_pickle
from transaxle.formats.storage.local import LocalStorage
from transaxle.formats.torch_file.archive import read_archive, window
from transaxle.formats.torch_file.saved import MAGIC, REPEATED

GOOD = {"w": view()}
DEFLATE = 8
BOMB = zlib.compressobj(9, zlib.DEFLATED, -15)
BOMBED = BOMB.compress(bytes(100_000_000)) + BOMB.flush()


def changed(at: int, **fields: object) -> bytes:
    made = records(GOOD)
    made[at] = Record(**{**made[at].__dict__, **fields})
    return archive(made)


def with_more(*more: Record) -> bytes:
    return archive([*records(GOOD), *more])


def wide(
    *, begin: int | None = None, count: int = 4, at: int | None = None, kind: bytes = b"PK\6\6", disks: int = 1
) -> bytes:
    """The good archive with a zip64 end record."""
    plain = archive(records(GOOD))
    _, _, _, _, _, size, first, _ = struct.unpack("<4sHHHHIIH", plain[-22:])
    directory = first if begin is None else begin
    end = struct.pack("<4sQHHIIQQQQ", kind, 44, 45, 45, 0, 0, count, count, size, directory)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, len(plain) - 22 if at is None else at, disks)
    return archive(records(GOOD), wide=end + locator)


ARCHIVES: dict[str, tuple[bytes, Code, str]] = {
    "the same name twice": (with_more(Record("data/0", bytes(16))), "CORRUPT", "twice"),
    "the same name in capitals": (with_more(Record("DATA/0", bytes(16))), "CORRUPT", "twice"),
    "the pickle twice": (with_more(Record(PICKLE, b"N.")), "CORRUPT", "twice"),
    "a name that leads up": (with_more(Record("../0", b"")), "PATH_ESCAPE", "../0"),
    "a name that leads up later": (with_more(Record("data/../../../0", b"")), "PATH_ESCAPE", "outside the archive"),
    "an absolute name": (with_more(Record(b"/etc/passwd", b"")), "PATH_ESCAPE", "/etc/passwd"),
    "a name for Windows": (with_more(Record("..\\..\\x", b"")), "PATH_ESCAPE", "outside the archive's folder"),
    "a name with a NUL": (with_more(Record("a\0b", b"")), "PATH_ESCAPE", "outside the archive's folder"),
    "no name": (with_more(Record(b"", b"")), "PATH_ESCAPE", "outside the archive's folder"),
    "a name that is no UTF-8": (with_more(Record(b"archive/\xff", b"")), "CORRUPT", "UTF-8"),
    "a name outside of the folder": (with_more(Record(b"other/x", b"")), "CORRUPT", "other/x"),
    "a name without a folder": (with_more(Record(b"x", b"")), "CORRUPT", "folder"),
    "a folder": (with_more(Record("data/", b"")), "PATH_ESCAPE", "outside the archive's folder"),
    "compressed": (changed(3, central={"method": DEFLATE}, local={"method": DEFLATE}), "UNSUPPORTED", "compressed"),
    "a bomb": (with_more(Record("data/1", BOMBED, {"method": 8, "plain": 10**8}, {"method": 8, "plain": 10**8})),
        "UNSUPPORTED", "compressed"),
    "compressed, says one": (changed(3, local={"method": DEFLATE}), "CORRUPT", "differ"),
    "encrypted": (changed(3, central={"flags": 1}, local={"flags": 1}), "UNSUPPORTED", "encrypted"),
    "a flag of no torch file": (changed(3, central={"flags": 1 << 6}, local={"flags": 1 << 6}), "CORRUPT", "flags"),
    "flags that differ": (changed(3, local={"flags": 0}), "CORRUPT", "differ"),
    "times that differ": (changed(3, local={"time": 77}), "CORRUPT", "differ"),
    "names that differ": (changed(3, local_name=b"archive/data/7"), "CORRUPT", "differ"),
    "names of different length": (changed(3, local_name=b"archive/data/0/"), "CORRUPT", "differ"),
    "checksums that differ": (changed(3, local={"crc32": 5}), "CORRUPT", "checksum"),
    "no checksum in one": (changed(3, local={"crc32": 0}), "CORRUPT", "checksum"),
    "sizes that differ": (changed(3, local={"plain": 8}), "CORRUPT", "size"),
    "packed sizes that differ": (changed(3, local={"packed": 8}), "CORRUPT", "size"),
    "a size that is no size": (changed(3, central={"packed": 8}), "CORRUPT", "stored in 8 bytes"),
    "a size beyond the file": (changed(3, central={"packed": 10**9, "plain": 10**9},
        local={"packed": 10**9, "plain": 10**9}), "CORRUPT", "overlaps"),
    "a size that swallows the next": (
        changed(0, central={"packed": 999, "plain": 999}, local={"packed": 999, "plain": 999}), "CORRUPT", "overlaps"),
    "a size that leaves a gap": (
        changed(3, central={"packed": 8, "plain": 8}, local={"packed": 8, "plain": 8}), "CORRUPT", "to no record"),
    "two records in one place": (changed(3, central={"header": 0}), "CORRUPT", "overlaps the next one at 0"),
    "a header elsewhere": (changed(3, central={"header": 7}), "CORRUPT", "overlaps the next one at 7"),
    "a header beyond the file": (changed(3, central={"header": 10**9}), "CORRUPT", "belong to no record"),
    "something between": (changed(2, after=b"hidden"), "CORRUPT", "belong to no record"),
    "something before": (changed(0, before=b"#!/bin/sh\n"), "UNSUPPORTED", "neither a zip"),
    "an archive before": (changed(0, before=b"PK\3\4" + bytes(26)), "CORRUPT", "begins at 30"),
    "something at the end": (saved(GOOD) + b"more", "CORRUPT", "bytes were appended"),
    "an archive at the end": (saved(GOOD) + saved({"w": 1}, {}), "CORRUPT", "does not end at"),
    "a comment": (archive(records(GOOD), end={"comment": 4}, tail=b"note"), "CORRUPT", "bytes were appended"),
    "a comment that is not there": (archive(records(GOOD), end={"comment": 4}), "CORRUPT", "bytes were appended"),
    "a comment of a record": (changed(3, comment=b"note"), "CORRUPT", "malformed"),
    "a record on another disk": (changed(3, central={"disk": 1}), "CORRUPT", "malformed"),
    "several disks": (archive(records(GOOD), end={"disk": 1}), "CORRUPT", "several"),
    "more entries than there are": (archive(records(GOOD), end={"here": 5, "count": 5}), "CORRUPT", "4 entries"),
    "fewer entries than there are": (archive(records(GOOD), end={"here": 3, "count": 3}), "CORRUPT", "4 entries"),
    "a directory that is longer": (archive(records(GOOD), end={"size": 999}), "CORRUPT", "does not end"),
    "a directory elsewhere": (archive(records(GOOD), end={"begin": 0}), "CORRUPT", "does not end"),
    "a directory that is too large": (
        archive(records(GOOD), end={"begin": 0, "size": 2**32 - 2}), "CORRUPT", "does not end"),
    "no records": (archive([]), "UNSUPPORTED", "neither a zip"),
    "a header and no records": (b"PK\3\4" + archive([], end={"begin": 4}), "CORRUPT", "no records"),
    "an extra field that is cut": (changed(3, central_extra=b"\1\0\xff\xff"), "CORRUPT", "extra"),
    "an extra field of two bytes": (changed(3, local_extra=b"FB"), "CORRUPT", "extra"),
    "zip64 without numbers": (changed(3, central={"plain": 2**32 - 1}), "CORRUPT", "zip64"),
    "zip64 with too many": (changed(3, central_extra=struct.pack("<HHQ", 1, 8, 16)), "CORRUPT", "does not need"),
    "zip64 twice": (changed(3, central_extra=struct.pack("<HHQ", 1, 8, 16) * 2), "CORRUPT", "zip64"),
    "zip64 of three bytes": (changed(3, central_extra=b"\1\0\3\0abc"), "CORRUPT", "zip64"),
    "zip64 that lies": (changed(3, central={"plain": 2**32 - 1}, central_extra=struct.pack("<HHQ", 1, 8, 2**60)),
        "CORRUPT", "stored in"),
    "zip64 ends that differ": (wide(begin=5), "CORRUPT", "differ"),
    "zip64 counts that differ": (wide(count=3), "CORRUPT", "differ"),
    "a locator that leads astray": (wide(at=0), "CORRUPT", "the wrong place"),
    "a locator of two disks": (wide(disks=2), "CORRUPT", "the wrong place"),
    "no zip64 end record": (wide(kind=b"PKxx"), "CORRUPT", "malformed"),
    "a descriptor that is not there": (
        changed(3, central={"flags": 8}, local={"flags": 8}), "CORRUPT", "not a data descriptor"),
    "a descriptor that lies": (changed(3, central={"flags": 8}, local={"flags": 8},
        after=struct.pack("<4sIII", b"PK\7\x08", 1, 16, 16)), "CORRUPT", "descriptor"),
    "a descriptor without its sign": (changed(3, central={"flags": 8}, local={"flags": 8},
        after=struct.pack("<4sIII", b"xxxx", zlib.crc32(bytes(16)), 16, 16)), "CORRUPT", "descriptor"),
    "the pickle is damaged": (changed(0, local={"crc32": 7}, central={"crc32": 7}), "CORRUPT", "checksum"),
    "the version is damaged": (changed(2, local={"crc32": 7}, central={"crc32": 7}), "CORRUPT", "checksum"),
    "no pickle": (archive(records(GOOD)[1:]), "CORRUPT", "no record data.pkl"),
    "something after the pickle": (saved(b"\x80\x02N.more", {}), "CORRUPT", "4 bytes follow"),
    "big-endian": (saved(GOOD, byteorder=b"big"), "UNSUPPORTED", "big-endian"),
    "no byte order": (saved(GOOD, byteorder=b"middle"), "CORRUPT", "byte order"),
    "a version that is none": (saved(GOOD, version=b"three"), "CORRUPT", "version"),
    "a version of a megabyte": (saved(GOOD, version=b"3" * 1_000_000), "CORRUPT", "1000000 bytes"),
    "TorchScript": (with_more(Record("constants.pkl", b"N.")), "UNSUPPORTED", "TorchScript"),
    "empty": (b"", "CORRUPT", "empty"),
    "a text": (b"hello", "UNSUPPORTED", "neither a zip"),
    "a pointer of Git LFS": (b"version https://git-lfs.github.com/spec/v1\n", "UNSUPPORTED", "git lfs pull"),
    "a tar archive": (bytes(257) + b"ustar" + bytes(300), "UNSUPPORTED", "tar form"),
    "only a header": (saved(GOOD)[:30], "CORRUPT", "truncated"),
    "a few bytes": (b"PK\3\4", "CORRUPT", "truncated"),
}  # fmt: skip


def test_every_cut(tmp_path: Path) -> None:
    """A file that ends too early is never taken for a whole one."""
    data = saved(GOOD)
    for size in range(1, len(data)):
        with pytest.raises(TransaxleError) as caught:
            opened(tmp_path, data[:size])
        assert caught.value.code == "CORRUPT" if size > 3 else caught.value.code == "UNSUPPORTED"


def test_a_good_archive_is_read(tmp_path: Path) -> None:
    container = opened(tmp_path, saved(GOOD, {"0": bytes(range(16))}))
    assert octets(container, "w") == bytes(range(16))
    assert [checksum.what.removeprefix("record ") for checksum in container.checksums] == [
        "data.pkl", "byteorder", "version", "data/0",
    ]  # fmt: skip
    assert list(opened(tmp_path, wide()).entries) == ["w"]  # with a zip64 end record


def test_other_writers_of_zip(tmp_path: Path) -> None:
    """What Python's own zipfile writes is as good, with or without descriptors and zip64 fields."""
    for seekable in (True, False):
        file = io.BytesIO()
        target = file if seekable else _Unseekable(file)
        with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as made:
            for record in records(GOOD, {"0": bytes(range(16))}):
                with made.open(record.path.decode(), "w", force_zip64=seekable) as out:
                    out.write(record.data)
        assert octets(opened(tmp_path, file.getvalue()), "w") == bytes(range(16))


class _Unseekable(io.RawIOBase):
    """A pipe: zipfile then writes descriptors."""

    def __init__(self, file: io.BytesIO) -> None:
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        return self._file.write(data)


def test_zero_checksums(tmp_path: Path) -> None:
    """torch can be told to take none."""
    zero = {"crc32": 0}
    made = [Record(**{**record.__dict__, "local": zero, "central": zero}) for record in records(GOOD)]
    container = opened(tmp_path, archive(made))
    assert container.checksums == ()


GIB = 1 << 30
LAYOUTS: dict[str, Sequence[int]] = {
    "a record beyond 4 GiB": (4 * GIB, 8),
    "a record of just less": (2**32 - 2, 8),
    "a record of 4 GiB less one": (2**32 - 1, 8),
    "the directory beyond 4 GiB": (2 * GIB, 2 * GIB),
}


@pytest.mark.parametrize("sizes", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_zip64(tmp_path: Path, sizes: Sequence[int]) -> None:
    """Records beyond 4 GiB, in files that are mostly holes; Python's zipfile sees them at the same places."""
    from transaxle.formats.torch_file.archive import ZipItem, lay_out

    layout = lay_out(FOLDER, [ZipItem(f"data/{at}", size) for at, size in enumerate(sizes)])
    with (tmp_path / FILE).open("wb") as file:
        file.truncate(layout.size)
        for offset, data in layout.fragments:
            file.seek(offset)
            file.write(data)
    storage = LocalStorage(tmp_path)
    found = read_archive(window(storage, FILE)).records
    assert [(record.offset, record.size) for record in found.values()] == list(zip(layout.offsets, sizes, strict=True))
    with zipfile.ZipFile(tmp_path / FILE) as theirs:
        assert [info.file_size for info in theirs.infolist()] == list(sizes)
        for info, offset in zip(theirs.infolist(), layout.offsets, strict=True):
            header = os.pread(theirs.fp.fileno(), 30, info.header_offset)  # type: ignore[union-attr]
            name, extra = struct.unpack("<HH", header[26:30])
            assert info.header_offset + 30 + name + extra == offset


# Files of the form before torch 1.6.

PROTOCOL = 1001
SYSTEM = {"protocol_version": PROTOCOL, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
BYTES = bytes(range(16))


def legacy_storage(key: str = "7", count: int = 4, part: Any = None, dtype: str = "float32") -> Persistent:
    return Persistent(("storage", StorageType(DType(dtype)), key, "cpu", count, part))


def weight(**more: Any) -> dict[str, TensorRef]:
    return {"w": view(legacy_storage(**more))}


def stored(*parts: tuple[int, bytes]) -> bytes:
    return b"".join(struct.pack("<q", count) + data for count, data in parts)


def legacy(
    value: Any = None,
    keys: Any = ("7",),
    data: bytes | None = None,
    *,
    magic: Any = MAGIC,
    protocol: Any = PROTOCOL,
    system: Any = None,
) -> bytes:
    listed = list(keys) if isinstance(keys, tuple) else keys
    head = [magic, protocol, SYSTEM if system is None else system, weight() if value is None else value, listed]
    return b"".join(map(write_pickle, head)) + (stored((4, BYTES)) if data is None else data)


def test_a_good_legacy_file_is_read(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(legacy())
    assert torch.load(tmp_path / FILE, weights_only=True)["w"].numpy().tobytes() == BYTES
    container = opened(tmp_path, legacy())
    assert octets(container, "w") == BYTES
    assert container.checksums == ()


def test_views_of_storages(tmp_path: Path) -> None:
    """torch up to 0.3 saved a part of a storage as a storage of its own; torch still reads such files."""
    value = {
        "whole": view(legacy_storage()),
        "first": view(legacy_storage(part=("8", 0, 2)), shape=(2,)),
        "last": view(legacy_storage(part=("9", 1, 3)), offset=1, shape=(2,)),
        "again": view(legacy_storage(part=("9", 1, 3)), shape=(2,), strides=(2,)),
        "none": view(legacy_storage(part=("10", 4, 0)), shape=(0,)),
    }
    data = legacy(value)
    (tmp_path / FILE).write_bytes(data)
    held = torch.load(tmp_path / FILE, weights_only=True)
    with tx.open(tmp_path / FILE) as checkpoint:
        found = {name: tensor.tobytes() for name, tensor in checkpoint.items()}
    assert found == {name: tensor.contiguous().numpy().tobytes() for name, tensor in held.items()}
    assert found["last"] == BYTES[8:16]


LEGACY: dict[str, tuple[bytes, Code, str]] = {
    "no storages are listed": (legacy(keys=(), data=b""), "CORRUPT", "which the file does not hold"),
    "a storage that no tensor refers to": (
        legacy(keys=("7", "8"), data=stored((4, BYTES), (4, BYTES))), "CORRUPT", "'8', which no tensor uses"),
    "another storage": (legacy(keys=("8",)), "CORRUPT", "which no tensor uses"),
    "a storage twice": (legacy(keys=("7", "7"), data=stored((4, BYTES), (4, BYTES))), "CORRUPT", "twice"),
    "keys that are numbers": (legacy(keys=(7,)), "CORRUPT", "list of storages"),
    "no list of keys": (legacy(keys={"7": 1}), "CORRUPT", "list of storages"),
    "more elements": (legacy(data=stored((5, BYTES + bytes(4)))), "CORRUPT", "5 elements; the pickle says 4"),
    "fewer elements": (legacy(data=stored((3, BYTES[:12]))), "CORRUPT", "3 elements; the pickle says 4"),
    "less than none": (legacy(data=stored((-4, BYTES))), "CORRUPT", "-4 elements"),
    "a cut storage": (legacy(data=stored((4, BYTES[:-1]))), "CORRUPT", "truncated"),
    "no storage": (legacy(data=b""), "CORRUPT", "outside"),
    "half a size": (legacy(data=b"\4\0\0"), "CORRUPT", "outside"),
    "something at the end": (legacy(data=stored((4, BYTES)) + b"x"), "CORRUPT", "1 bytes of the file belong to"),
    "a storage of a terabyte": (legacy(weight(count=1 << 38), data=stored((1 << 38, BYTES))), "CORRUPT", "truncated"),
    "no magic number": (legacy(magic=5), "UNSUPPORTED", "not one that torch wrote"),
    "a magic text": (legacy(magic="torch"), "UNSUPPORTED", "not one that torch wrote"),
    "another protocol": (legacy(protocol=1002), "CORRUPT", "protocol version"),
    "a protocol that is true": (legacy(protocol=[True]), "CORRUPT", "protocol version"),
    "no system": (legacy(system=[]), "CORRUPT", "system"),
    "a system without its order": (legacy(system={"x": 1}), "CORRUPT", "system"),
    "big-endian": (legacy(system={"little_endian": False}), "UNSUPPORTED", "big-endian"),
    "a view beyond its storage": (legacy(weight(part=("8", 1, 4))), "CORRUPT", "lies outside the storage '7'"),
    "a view before its storage": (legacy(weight(part=("8", -1, 4))), "CORRUPT", "lies outside the storage '7'"),
    "a view of less than nothing": (legacy(weight(part=("8", 2, -1))), "CORRUPT", "lies outside the storage '7'"),
    "a view of a true size": (legacy(weight(part=("8", 0, True))), "CORRUPT", "lies outside the storage '7'"),
    "a tensor beyond its view": (legacy(weight(part=("8", 1, 3))), "CORRUPT", "ends at byte 16 of storage '8'"),
    "a view without a key": (legacy(weight(part=(8, 0, 4))), "CORRUPT", "view of storage '7' is malformed"),
    "a view of two numbers": (legacy(weight(part=("8", 0))), "CORRUPT", "view of storage '7' is malformed"),
    "a view with a path for a name": (legacy(weight(part=("../8", 0, 4))), "CORRUPT", "not the name of a view"),
    "a view that is its storage": (legacy(weight(part=("7", 0, 4))), "CORRUPT", "is both a storage and a view"),
    "a view that is two": (legacy([view(legacy_storage(part=("8", at, 2)), shape=(2,)) for at in (0, 2)]), "CORRUPT",
        "two different parts of storages"),
    "a storage of a new file": (
        legacy({"w": view(Persistent(("storage", StorageType(None), "7", "cpu", 4)))}), "CORRUPT", "not a storage"),
    "a view that is too long": (legacy({"w": view(legacy_storage(), shape=(5,))}), "CORRUPT", "ends at byte 20"),
    "a pickle of something else": (pickle.dumps([1, 2, 3]), "UNSUPPORTED", "not one that torch wrote"),
    "a pickle that is cut": (legacy()[:100], "CORRUPT", "pickle"),
    "a global": (b"".join(map(write_pickle, [MAGIC, PROTOCOL, SYSTEM])) + b"cos\nsystem\n(S'x'\ntR.", "UNSAFE_PICKLE",
        "os.system"),
    "a global instead of the keys": (
        b"".join(map(write_pickle, [MAGIC, PROTOCOL, SYSTEM, {}])) + b"cos\nsystem\n.", "UNSAFE_PICKLE", "os.system"),
    "a global instead of the magic number": (b"\x80\x02cos\nsystem\n.", "UNSAFE_PICKLE", "os.system"),
}  # fmt: skip


HOSTILE = [
    *(pytest.param(*case, id=f"archive: {name}") for name, case in ARCHIVES.items()),
    *(pytest.param(*case, id=f"legacy: {name}") for name, case in LEGACY.items()),
]


@pytest.mark.parametrize(("data", "code", "said"), HOSTILE)
def test_hostile_files_are_refused(tmp_path: Path, data: bytes, code: Code, said: str) -> None:
    with refuses(code, said, file=FILE):
        opened(tmp_path, data)


def test_every_cut_of_a_legacy_file(tmp_path: Path) -> None:
    data = legacy()
    for size in range(len(data)):
        with refuses("CORRUPT"):
            opened(tmp_path, data[:size])


@pytest.mark.parametrize("size", [900_000, 1_048_000, 3_000_000, 9_000_000])
def test_pickles_of_any_length(tmp_path: Path, size: int) -> None:
    """The head is read in growing parts; wherever the first one ends, nothing is lost."""
    what = {"w": torch.arange(5.0), "note": "x" * size, "v": torch.arange(3)}
    torch.save(what, tmp_path / FILE, _use_new_zipfile_serialization=False)
    container = opened(tmp_path, (tmp_path / FILE).read_bytes())
    assert octets(container, "w") == torch.arange(5.0).numpy().tobytes()
    assert container.metadata == {"left_behind": {"note": "str"}}


@pytest.mark.parametrize("protocol", range(1, 6))
def test_every_protocol(tmp_path: Path, protocol: int) -> None:
    """Protocol 1 has no steps for large integers and for truth."""
    what = {"w": torch.arange(5.0), "u": torch.arange(4, dtype=torch.uint8), "seed": 1 << 70, "done": True}
    for form in (True, False) if protocol > 1 else (True,):
        torch.save(what, tmp_path / FILE, _use_new_zipfile_serialization=form, pickle_protocol=protocol)
        container = opened(tmp_path, (tmp_path / FILE).read_bytes())
        assert octets(container, "w") == torch.arange(5.0).numpy().tobytes()
        assert octets(container, "u") == bytes(range(4))


# Storages and views: what the pickle says of them, and what the file has.

FLOATS = StorageType(DType("float32"))
TERABYTE = 1 << 40


STORAGES: dict[str, tuple[Any, Code, str]] = {
    "a storage that is larger than its record": (view(storage(count=5)), "CORRUPT", "record data/0 has 16 bytes"),
    "a storage that is smaller than its record": (view(storage(count=3), shape=(3,)), "CORRUPT", "data/0 has 16 bytes"),
    "doubles under the name of floats": (view(storage(dtype="float64", count=4)), "CORRUPT", "data/0 has 16 bytes"),
    "a storage that is not there": ([view(), view(storage("1"))], "CORRUPT", "record data/1, which is missing"),
    "a storage that nothing refers to": ("text", "CORRUPT", "no tensor uses the record data/0"),
    "a storage of two types": ([view(), view(storage(dtype="int32"))], "CORRUPT", "4 elements of int32"),
    "a storage of two sizes": ([view(), view(storage(count=2), shape=(2,))], "CORRUPT", "2 elements of float32"),
    "a storage of a terabyte": (view(storage(count=TERABYTE)), "CORRUPT", "record data/0 has 16 bytes"),
    "a negative storage": (view(storage(count=-4)), "CORRUPT", "impossible number"),
    "a storage beyond 64 bits": (view(storage(count=2**63)), "CORRUPT", "impossible number"),
    "a storage of a true size": (view(Persistent(("storage", FLOATS, "0", "cpu", True))), "CORRUPT", "impossible"),
    "a storage with a path for a name": (view(storage("../0")), "CORRUPT", "not the name of a storage"),
    "a storage without a name": (view(storage("")), "CORRUPT", "not the name of a storage"),
    "a storage that is a number": (view(Persistent(("storage", FLOATS, 0, "cpu", 4))), "CORRUPT", "malformed"),
    "a storage of no type": (view(Persistent(("storage", "float", "0", "cpu", 4))), "CORRUPT", "malformed"),
    "a storage of a class": (
        view(Persistent(("storage", Global("torch", "Tensor"), "0", "cpu", 4))), "CORRUPT", "malformed"),
    "a storage on no device": (view(storage(device=7)), "CORRUPT", "malformed"),
    "a storage of an old file": (
        view(Persistent(("storage", FLOATS, "0", "cpu", 4, None))), "CORRUPT", "not a storage"),
    "a short id": (view(Persistent(("storage",))), "CORRUPT", "not a storage"),
    "an id that is a text": (view(Persistent("0")), "CORRUPT", "not a storage"),
    "an id of something else": (view(Persistent(("tensor", FLOATS, "0", "cpu", 4))), "CORRUPT", "not a storage"),
    "a module": (
        Persistent(("module", Global("torch", "Tensor"), "x.py", "code")), "UNSUPPORTED", "source code of a module"),
    "a view that is too long": (view(shape=(5,)), "CORRUPT", "ends at byte 20 of storage '0', which has 16"),
    "a view that begins too late": (view(offset=1), "CORRUPT", "ends at byte 20"),
    "a view that begins a terabyte late": (view(offset=TERABYTE, shape=(1,)), "CORRUPT", "ends at byte"),
    "a view with long strides": (view(shape=(2, 2), strides=(4, 1)), "CORRUPT", "ends at byte 24"),
    "a view that overflows": (view(shape=(2**40, 2**40), strides=(0, 0)), "CORRUPT", "overflows"),
    "an empty view that overflows": (view(shape=(0, 2**62, 2**62), strides=(1, 1, 1)), "CORRUPT", "overflows"),
    "strides that overflow": (view(shape=(2, 2), strides=(2**62, 1)), "CORRUPT", "ends at byte"),
    "a terabyte from four bytes": (view(shape=(TERABYTE // 4,), strides=(0,)), "CORRUPT", "with strides of zero"),
    "a terabyte from sixteen bytes": (view(shape=(TERABYTE // 16, 4), strides=(0, 1)), "CORRUPT", "strides of zero"),
    "a terabyte in many views": (
        [view(shape=(REPEATED // 8,), strides=(0,)) for _ in range(10)], "CORRUPT", "with strides of zero"),
    "floats as doubles": (view(shape=(2,), dtype=DType("float64")), "CORRUPT", "views elements of float32 as float64"),
    "floats as words": (view(shape=(8,), dtype=DType("uint16")), "CORRUPT", "views elements of float32 as uint16"),
    "floats as bytes": (view(shape=(16,), dtype=DType("uint8")), "CORRUPT", "views elements of float32 as uint8"),
    "no storage": ([view(), view(5)], "UNSUPPORTED", "inside another pickle"),
    "a pickled storage": (
        [view(), view(Object(Global("torch.storage", "_load_from_bytes"), (b"",)))], "UNSUPPORTED", "pickle"),
    "a subclass": (Object(Global("torch._tensor", "_rebuild_from_type_v2"),
        (Global("torch._utils", "_rebuild_tensor_v2"), Global("torch.distributed.tensor", "DTensor"),
        (storage(), 0, (4,), (1,), False, OrderedMap()), {})), "UNSUPPORTED", "one rank's part"),
    "a tensor under a key that is no text": ({b"bytes": view()}, "UNSUPPORTED", "not text"),
    "a tensor under a key of two": ({(1, 2): view()}, "UNSUPPORTED", "not text"),
    "packs without dims": ([view(), view(storage("0", "float32"), shape=(), strides=(), dtype=None),
        view(storage("1", None, 1), shape=(), strides=(), dtype=DType("float4_e2m1fn_x2"))], "UNSUPPORTED",
        "a scalar of"),
    "packs that do not lie along a row": ([view(),
        view(storage("1", None, 4), shape=(2, 2), strides=(1, 2), dtype=DType("float4_e2m1fn_x2"))], "UNSUPPORTED",
        "packed values are not along the last dim"),
}  # fmt: skip
EXTRA = {"packs without dims": {"1": b"x"}, "packs that do not lie along a row": {"1": b"abcd"}}


@pytest.mark.parametrize("case", STORAGES)
def test_pickles_that_lie_about_storages_are_refused(tmp_path: Path, case: str) -> None:
    said, code, message = STORAGES[case]
    value = said if isinstance(said, dict) else {"layers.0.weight": said}
    with refuses(code, message, file=FILE) as caught:
        opened(tmp_path, saved(value, {"0": bytes(16), **EXTRA.get(case, {})}))
    assert caught.value.where.tensor or "record" in str(caught.value)


def test_every_wrong_view_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(TransaxleError) as caught:
        opened(tmp_path, saved({"a": view(shape=(5,)), "b": view(), "c": view(flags=("conj",))}))
    assert [(one.code, one.where.tensor) for one in caught.value.refusals] == [("CORRUPT", "a"), ("UNSUPPORTED", "c")]
    with refuses("UNSUPPORTED", "neither tensors"):
        opened(tmp_path, saved("text", {}))


def test_views_that_are_odd_and_honest(tmp_path: Path) -> None:
    data = np.arange(4, dtype="<f4")
    value = {
        "expanded": view(shape=(3, 4), strides=(0, 1)),
        "windows": view(shape=(3, 2), strides=(1, 1)),
        "empty, far away": view(offset=TERABYTE, shape=(0, 3), strides=(3, 1)),
        "one element": view(offset=3, shape=(1, 1), strides=(99, 77)),
        "bytes": view(storage("1", None, 4), shape=(4,)),
        "words of bytes": view(storage("1", None, 4), shape=(2,), dtype=DType("uint16")),
        "bytes again": view(storage("1", "uint8", 4), shape=(4,)),
        "nothing of one type": view(storage("2", "float32", 0), shape=(0,)),
        "nothing of another": view(storage("2", "int64", 0), shape=(0,)),
    }
    (tmp_path / FILE).write_bytes(saved(value, {"0": data.tobytes(), "1": b"abcd", "2": b""}))
    found = tx.open(tmp_path / FILE)
    assert found["expanded"].read().tolist() == [[0, 1, 2, 3]] * 3
    assert found["windows"].read().tolist() == [[0, 1], [1, 2], [2, 3]]
    assert found["windows"].read((slice(1, 3), slice(1, 2))).tolist() == [[2], [3]]
    assert found["empty, far away"].shape == (0, 3)
    assert found["one element"].read().tolist() == [[3]]
    assert found["words of bytes"].tobytes() == found["bytes"].tobytes() == b"abcd"
    assert [found[name].dtype for name in ("nothing of one type", "nothing of another")] == ["F32", "I64"]


def tensors_of_other_kinds() -> dict[str, tuple[torch.Tensor, str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "sparse": (torch.eye(3).to_sparse(), "sparse"),
            "csr": (torch.eye(3).to_sparse_csr(), "sparse"),
            "quantized": (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized"),
            "by channel": (
                torch.quantize_per_channel(torch.ones(3, 2), torch.ones(3), torch.zeros(3), 0, torch.quint8),
                "quantized",
            ),
            "nested": (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
            "meta": (torch.ones(3, device="meta"), "meta"),
            "conjugated": (torch.ones(3, dtype=torch.complex64).conj(), "conj"),
            "negated": (torch.ones(3, dtype=torch.complex64).conj().imag, "neg"),
            "without values": (torch.nn.UninitializedParameter(), "without values"),
        }


@pytest.mark.parametrize("kind", tensors_of_other_kinds())
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_tensors_that_are_no_plain_views(tmp_path: Path, kind: str, legacy: bool) -> None:
    """As torch writes them: each is refused by its name, none is left out in silence."""
    tensor, said = tensors_of_other_kinds()[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save({"a": torch.ones(1), "w": tensor}, tmp_path / FILE, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(TransaxleError, match=said) as caught:
        opened(tmp_path, (tmp_path / FILE).read_bytes())
    assert (caught.value.code, caught.value.where.tensor) == ("UNSUPPORTED", "w")


# Changed bytes: every tensor can be read, or the file is refused.

REFUSAL_CODES = {"CORRUPT", "UNSAFE_PICKLE", "UNSUPPORTED", "PATH_ESCAPE", "NAME_COLLISION"}


def survives(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, FILE)
        place.write_bytes(data)
        refused: TransaxleError | None = None
        try:
            with tx.open(place) as found:
                for tensor in found.values():
                    assert len(tensor.tobytes()) == tensor.nbytes
        except TransaxleError as error:
            refused = error
        assert refused is None or {one.code for one in refused.refusals} <= REFUSAL_CODES
        assert [entry.name for entry in Path(folder).iterdir()] == [FILE]


def samples() -> list[bytes]:
    tensor = torch.arange(12.0).reshape(3, 4)
    what = {"model": {"w": tensor, "t": tensor.t(), "e": torch.zeros(0)}, "epoch": 3, "name": "x"}
    made = []
    for new in (True, False):
        file = io.BytesIO()
        torch.save(what, file, _use_new_zipfile_serialization=new)
        made.append(file.getvalue())
    return [*made, saved({"w": view(), "v": view(storage("1", None, 4))}, {"0": bytes(16), "1": b"abcd"}), legacy()]


@given(st.sampled_from(samples()).flatmap(damage))
@settings(max_examples=600)
def test_files_with_changed_bytes(data: bytes) -> None:
    survives(data)


@given(st.binary())
@settings(max_examples=100)
def test_any_bytes_behind_a_signature(data: bytes) -> None:
    survives(b"PK\3\4" + data)
    survives(b"\x80\2" + data)


sizes = st.integers(0, 6) | st.sampled_from([-1, 2**40, 2**63, True, None, "4"])


@given(
    offset=sizes,
    shape=st.lists(sizes, max_size=3).map(tuple),
    strides=st.lists(sizes, max_size=3).map(tuple),
    count=sizes,
    held=st.integers(0, 40),
    kind=st.sampled_from([None, "float32", "int8", "complex128"]),
)
@settings(max_examples=400)
def test_views_of_every_kind(
    offset: int, shape: tuple[int, ...], strides: tuple[int, ...], count: int, held: int, kind: str | None
) -> None:
    what = view(storage("0", kind, count), offset, shape, strides)
    survives(saved({"w": what, "v": view(storage("0", kind, count), 0, (1,), (1,))}, {"0": bytes(held)}))
    assert records({"w": what})
