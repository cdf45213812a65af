"""Torch files whose archive, notes or views contradict each other."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tests.corpus.case import Case, Make
from tests.formats.torch_file.made import Record, archive, records, saved, storage, view
from transaxle.errors import Code

FILE = "model.pt"
GOOD = {"w": view()}
FLOATS = bytes(range(16))


def file(data: bytes, name: str = FILE) -> Make:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return make


def case(data: bytes, said: str, code: Code = "CORRUPT") -> Case:
    return Case(file(data), code, said)


def note(name: str, data: bytes) -> bytes:
    return archive([*records(GOOD), Record(name, data)])


def changed(number: int, **fields: object) -> bytes:
    made = records(GOOD)
    made[number] = replace(made[number], **fields)  # type: ignore[arg-type]
    return archive(made)


def more(*added: Record) -> bytes:
    return archive([*records(GOOD), *added])


def wide(shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> bytes:
    return saved({"w": view(offset=offset, shape=tuple(shape), strides=tuple(strides))})


def legacy_of_another_order(folder: Path) -> Path:
    torch.save({"w": torch.zeros(4)}, folder / FILE, _use_new_zipfile_serialization=False)
    data = (folder / FILE).read_bytes()
    at = data.index(b"little_endian")
    true = data.index(b"\x88", at)
    (folder / FILE).write_bytes(data[:true] + b"\x89" + data[true + 1 :])
    return folder / FILE


CASES = {
    "an alignment that is no number": case(note(".storage_alignment", b"wide"), ".storage_alignment"),
    "an alignment of nothing": case(note(".storage_alignment", b"0"), ".storage_alignment"),
    "a negative alignment": case(note(".storage_alignment", b"-64"), ".storage_alignment"),
    "an empty alignment": case(note(".storage_alignment", b""), ".storage_alignment"),
    "an alignment beyond all numbers": case(note(".storage_alignment", b"9" * 60), ".storage_alignment"),
    "an alignment of pages of text": case(note(".storage_alignment", b"6" * 4096), "are read"),
    "an alignment of other digits": case(note(".storage_alignment", "٦٤".encode()), ".storage_alignment"),
    "a form of no version": case(note(".format_version", b"new"), ".format_version"),
    "a big-endian file": case(saved(GOOD, byteorder=b"big"), "big-endian", "UNSUPPORTED"),
    "a big-endian file of the old form": Case(legacy_of_another_order, "UNSUPPORTED", "big-endian"),
    "no byte order": case(saved(GOOD, byteorder=b"middle"), "not a byte order"),
    "one name twice": case(more(Record("data/0", FLOATS)), "twice"),
    "one name in two cases": case(more(Record("DATA/0", FLOATS)), "twice"),
    "another name in its own header": case(changed(3, local_name=b"archive/data/9"), "directory differ"),
    "another size in its own header": case(changed(3, local={"plain": 8, "packed": 8}), "differ in size"),
    "another checksum in its own header": case(changed(3, local={"crc32": 1}), "checksum"),
    "a header that lies elsewhere": case(changed(3, central={"header": 5}), "overlaps the next one"),
    "bytes between records": case(changed(3, before=b"PK--"), "belong to no record"),
    "bytes after a record": case(changed(3, after=b"....", local={"flags": 8}, central={"flags": 8}), "descriptor"),
    "a record beyond the file": case(changed(3, local={"plain": 2**31}, central={"plain": 2**31}), "stored in"),
    "a record that leads out": case(
        more(Record(b"archive/../../evil", b"")), "outside the archive's folder", "PATH_ESCAPE"
    ),
    "a record at the root": case(more(Record(b"/etc/evil", b"")), "outside the archive's folder", "PATH_ESCAPE"),
    "a file in a comment": case(saved(GOOD) + b"x" * 22, "truncated"),
    "an archive before the archive": case(saved(GOOD) + saved(GOOD), "directory"),
    "elements that a storage does not have": case(wide((2**38,), (1,)), "ends at byte"),
    "as many elements of one": case(wide((2**19, 2**19), (0, 0)), "strides of zero"),
    "as many elements in a row that moves by one": case(wide((2**38, 4), (0, 1)), "strides of zero"),
    "strides that overflow": case(wide((2, 2), (2**62, 1)), "ends at byte"),
    "an offset that overflows": case(wide((1,), (1,), 2**62), "ends at byte"),
    "a negative offset": case(wide((1,), (1,), -1), ""),
    "negative strides": case(wide((2,), (-1,), 1), ""),
    "a negative size": case(wide((-1,), (1,)), ""),
    "a size of truth": case(saved({"w": view(shape=(True,), strides=(1,))}), ""),
    "fewer strides than sizes": case(saved({"w": view(shape=(2, 2), strides=(1,))}), ""),
    "a storage of two types": case(saved([view(), view(storage(dtype="int32"))]), "int32"),
    "a storage that nobody wrote": case(saved([view(), view(storage("1"))]), "data/1, which is missing"),
    "a truncated file": case(saved(GOOD)[:-9], "truncated"),
    "a count of records that lies": case(archive(records(GOOD), end={"here": 9, "count": 9}), "the archive says 9"),
    "one of several disks": case(archive(records(GOOD), end={"disk": 1}), "one part of several"),
    "a directory that begins elsewhere": case(archive(records(GOOD), end={"begin": 4}), "does not end at"),
    "sizes in a field of their own": case(
        changed(3, central_extra=struct.pack("<HHQ", 1, 8, 16)), "gives zip64 sizes that it does not need"
    ),
}
