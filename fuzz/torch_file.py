"""Fuzzing the reader of torch files with atheris: `python fuzz/torch_file.py CORPUS [-runs=200000]`.

`python fuzz/torch_file.py --seeds CORPUS` writes a few files to begin with, of both forms. Whatever an input says, it
becomes a catalog whose every extent lies in the file, or it is refused; any other exception is a finding.
"""

from __future__ import annotations

from pathlib import Path

from held import Held
from target import run

from transaxle.errors import Refused
from transaxle.formats.catalog import NUMBERS, Spec
from transaxle.formats.pickled.descriptors import DType, Persistent, StorageType, TensorRef
from transaxle.formats.pickled.writer import write_pickle
from transaxle.formats.torch_file.draft import draft
from transaxle.formats.torch_file.reader import open_torch
from transaxle.formats.torch_file.saved import MAGIC

_FILE = "fuzz.pt"
_CODES = {"CORRUPT", "UNSAFE_PICKLE", "UNSUPPORTED", "PATH_ESCAPE", "NAME_COLLISION"}
_WIDEST = 16
"""Bytes of the widest type."""


def one(data: bytes) -> None:
    """Read one input."""
    try:
        container = open_torch(Held(_FILE, data), _FILE, _FILE)
    except Refused as refused:
        if not {refusal.code for refusal in refused.refusals} <= _CODES:
            raise
        return
    for entry in container.entries.values():
        (extent,) = entry.extents
        if extent.file == NUMBERS or not entry.nbytes:
            continue
        last = sum((size - 1) * step for size, step in zip(extent.shape, extent.strides or (), strict=False))
        reach = last + 1 if extent.strides is not None else entry.nbytes
        assert extent.offset >= 0, entry
        assert extent.offset + reach <= len(data), entry
    for checksum in container.checksums:
        assert checksum.offset + checksum.size <= len(data), checksum


def seeds(folder: Path) -> None:
    """Write seed files that are valid."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = draft([Spec("a", "F32", (2, 3)), Spec("b", "U16", ()), Spec("c", "F4", (2, 4)), Spec("e", "I8", (0,))])
    ((_, size),) = plan.files.items()
    archive = bytearray(size)
    for fragment in plan.fragments:
        archive[fragment.offset : fragment.offset + len(fragment.data)] = fragment.data
    view = TensorRef(
        Persistent(("storage", StorageType(DType("float32")), "7", "cpu", 4, None)), None, 0, (2, 2), (1, 2)
    )
    state = {"model": {"w": view, "v": view}, "epoch": 3, "note": "x"}
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    legacy = b"".join(map(write_pickle, [MAGIC, 1001, system, state, ["7"]])) + (4).to_bytes(8, "little") + bytes(16)
    for number, data in enumerate([bytes(archive), legacy]):
        one(data)
        folder.joinpath(f"seed-{number}").write_bytes(data)


if __name__ == "__main__":
    run(one, seeds)
