"""Zip archives that say one thing and hold another: every disagreement is refused, whichever reader would be right."""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.formats.torch_file.made import FILE, FOLDER, PICKLE, Record, archive, octets, opened, records, saved, view
from transaxle.errors import Code, TransaxleError
from transaxle.formats.storage.local import LocalStorage
from transaxle.formats.torch_file.archive import read_archive, window

GOOD = {"w": view()}
DEFLATE = 8
BOMB = zlib.compressobj(9, zlib.DEFLATED, -15)
BOMBED = BOMB.compress(bytes(100_000_000)) + BOMB.flush()


def changed(at: int, **fields: object) -> bytes:
    """The good archive with one record made differently."""
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


CASES: dict[str, tuple[bytes, Code, str]] = {
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
    "a bomb": (
        with_more(Record("data/1", BOMBED, {"method": 8, "plain": 10**8}, {"method": 8, "plain": 10**8})),
        "UNSUPPORTED",
        "compressed",
    ),
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
    "a size beyond the file": (
        changed(3, central={"packed": 10**9, "plain": 10**9}, local={"packed": 10**9, "plain": 10**9}),
        "CORRUPT",
        "overlaps",
    ),
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
    "zip64 that lies": (
        changed(3, central={"plain": 2**32 - 1}, central_extra=struct.pack("<HHQ", 1, 8, 2**60)),
        "CORRUPT",
        "stored in",
    ),
    "zip64 ends that differ": (wide(begin=5), "CORRUPT", "differ"),
    "zip64 counts that differ": (wide(count=3), "CORRUPT", "differ"),
    "a locator that leads astray": (wide(at=0), "CORRUPT", "the wrong place"),
    "a locator of two disks": (wide(disks=2), "CORRUPT", "the wrong place"),
    "no zip64 end record": (wide(kind=b"PKxx"), "CORRUPT", "malformed"),
    "a descriptor that is not there": (
        changed(3, central={"flags": 8}, local={"flags": 8}), "CORRUPT", "not a data descriptor"),
    "a descriptor that lies": (
        changed(3, central={"flags": 8}, local={"flags": 8}, after=struct.pack("<4sIII", b"PK\7\x08", 1, 16, 16)),
        "CORRUPT",
        "descriptor",
    ),
    "a descriptor without its sign": (
        changed(
            3,
            central={"flags": 8},
            local={"flags": 8},
            after=struct.pack("<4sIII", b"xxxx", zlib.crc32(bytes(16)), 16, 16),
        ),
        "CORRUPT",
        "descriptor",
    ),
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


@pytest.mark.parametrize(("data", "code", "said"), CASES.values(), ids=CASES.keys())
def test_what_is_refused(tmp_path: Path, data: bytes, code: Code, said: str) -> None:
    with pytest.raises(TransaxleError) as caught:
        opened(tmp_path, data)
    assert (caught.value.code, caught.value.where.file) == (code, FILE)
    assert said in str(caught.value)


def test_every_cut(tmp_path: Path) -> None:
    """A file that ends too early is never taken for a whole one."""
    data = saved(GOOD)
    for size in range(1, len(data)):
        with pytest.raises(TransaxleError) as caught:
            opened(tmp_path, data[:size])
        assert caught.value.code == "CORRUPT" if size > 3 else caught.value.code == "UNSUPPORTED"


def test_a_good_one(tmp_path: Path) -> None:
    container = opened(tmp_path, saved(GOOD, {"0": bytes(range(16))}))
    assert octets(container, "w") == bytes(range(16))
    assert [checksum.what for checksum in container.checksums] == [
        "record data.pkl", "record byteorder", "record version", "record data/0",
    ]  # fmt: skip


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


def test_the_zip64_end_record(tmp_path: Path) -> None:
    assert list(opened(tmp_path, wide()).entries) == ["w"]


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
    "everything": (5 * GIB, 5 * GIB, 8),
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
