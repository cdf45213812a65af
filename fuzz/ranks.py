"""Fuzzing the reader of rank files with atheris: `python fuzz/ranks.py CORPUS [-runs=200000]`.

An input is a folder of two ranks: for each rank the length of its pickle in two bytes, and the pickle. The storages
that a pickle asks for count up from zero, so that lists of ranks are valid. So what is tried here is what the reader
makes of values, not of archives (`torch_file.py`). `python fuzz/ranks.py --seeds CORPUS` writes folders to begin with.
Whatever an input says, it becomes a catalog whose every chunk lies in a file and adds up, or it is refused; any other
exception is a finding.
"""

from __future__ import annotations

import io
import struct
import zipfile
from functools import partial
from math import prod
from pathlib import Path
from unittest.mock import patch

from folder import HeldFolder
from target import run

from transaxle.arguments import Degrees
from transaxle.errors import TransaxleError, refuse
from transaxle.formats.catalog import NUMBERS, Container, Entry, Spec, nbytes
from transaxle.formats.pickled.interpreter import Bounds, read_pickle
from transaxle.formats.ranks import reader
from transaxle.formats.ranks.draft import draft
from transaxle.formats.storage.storage import Storage
from transaxle.formats.torch_file.saved import Saved, Storages

_LENGTH = 2
_ROOM = struct.pack("<16384i", *range(16384))
"""The storages of every file."""
_BOUNDS = Bounds(memory=20_000_000)
_FILES = tuple(f"model_world_size_2_rank_{rank}.pt" for rank in range(2))


def one(data: bytes) -> None:
    """Read one input."""
    open_folder(data)


def open_folder(data: bytes) -> bool:
    """Read one input; return whether it was a valid checkpoint."""
    pickles = {}
    for file in _FILES:
        length = int.from_bytes(data[:_LENGTH], "little")
        pickles[file], data = data[_LENGTH : _LENGTH + length], data[_LENGTH + length :]
    storage = HeldFolder(dict.fromkeys(_FILES, _ROOM))
    with patch.object(reader, "read_saved", partial(_save, pickles)):
        try:
            container = reader.open_ranks(storage, storage.path, _FILES[0])
        except TransaxleError:
            return False
    _check(container, storage)
    return True


def _save(pickles: dict[str, bytes], _storage: Storage, file: str) -> Saved:
    """Return the content of a torch file with this pickle."""
    storages = Storages(legacy=False)
    pickled = read_pickle(pickles[file], file=file, bounds=_BOUNDS, persistent=storages.refer)
    for stored in storages.by_key.values():
        stored.offset = 0
        if stored.nbytes > len(_ROOM):
            raise refuse("CORRUPT", "the file is truncated", file=file)
    return Saved(pickled.value, storages.by_key, ())


def _check(container: Container, storage: HeldFolder) -> None:
    twins = [entry for twin in container.twins for entry in (twin.first, twin.second)]
    for entry in (*container.entries.values(), *twins):
        assert sum(prod(extent.shape) for extent in entry.extents) == prod(entry.shape), "the chunks do not add up"
        _check_extents(entry, storage)


def _check_extents(entry: Entry, storage: HeldFolder) -> None:
    for extent in entry.extents:
        ends = (start + size for start, size in zip(extent.start, extent.shape, strict=True))
        assert all(end <= size for end, size in zip(ends, entry.shape, strict=True)), entry
        if extent.file == NUMBERS:
            continue
        last = sum((size - 1) * step for size, step in zip(extent.shape, extent.strides or (), strict=False))
        reach = nbytes(entry.dtype, extent.shape if extent.strides is None else (last + 1,))
        assert 0 <= extent.offset <= storage.size(extent.file) - reach, entry


def seeds(folder: Path) -> None:
    """Write seed inputs that are valid."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {"a": (5, 3), "b": (4,), "c": (1, 2), "count": ()}
    plan = draft(
        [Spec(name, "F32", shape) for name, shape in shapes.items()], fsdp=Degrees(dp=len(_FILES)), whole={"count"}
    )
    data = b""
    for file in _FILES:
        content = bytearray(plan.files[file])
        for fragment in plan.fragments:
            if fragment.file == file:
                content[fragment.offset : fragment.offset + len(fragment.data)] = fragment.data
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            pickle = archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))
        data += len(pickle).to_bytes(_LENGTH, "little") + pickle
    assert open_folder(data), "a seed must be read"
    folder.joinpath("seed-0").write_bytes(data)


if __name__ == "__main__":
    run(one, seeds)
