"""Fuzzing the reader of DCP folders with atheris: `python fuzz/dcp.py CORPUS [-max_total_time=60]`.

An input is a folder: the length of `.metadata` in four bytes, `.metadata`, then `__0_0.distcp`. `python fuzz/dcp.py
--seeds CORPUS` writes a few valid inputs to start from. Each input must be read or refused; any other exception is a
finding.
"""

from __future__ import annotations

from pathlib import Path

from folder import HeldFolder
from target import run

from transaxle.errors import TransaxleError
from transaxle.formats.catalog import NUMBERS, Spec, nbytes
from transaxle.formats.dcp.draft import draft
from transaxle.formats.dcp.metadata import METADATA
from transaxle.formats.dcp.reader import open_dcp

_LENGTH = 4
_DATA = "__0_0.distcp"


def one(data: bytes) -> None:
    """Read one input."""
    length = int.from_bytes(data[:_LENGTH], "little")
    remainder = data[_LENGTH:]
    storage = HeldFolder({METADATA: remainder[:length], _DATA: remainder[length:]})
    try:
        container = open_dcp(storage, storage.path, METADATA)
    except TransaxleError:
        return
    for checksum in container.checksums:
        assert checksum.offset + checksum.size <= storage.size(checksum.file), checksum
    for entry in container.entries.values():
        for extent in entry.extents:
            if extent.file != NUMBERS:
                last = sum((size - 1) * step for size, step in zip(extent.shape, extent.strides or (), strict=False))
                reach = nbytes(entry.dtype, extent.shape if extent.strides is None else (last + 1,))
                assert 0 <= extent.offset <= storage.size(extent.file) - reach, entry
        element_count = sum(_count(extent.shape) for extent in entry.extents)
        assert element_count == _count(entry.shape), "the chunks do not add up"


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def seeds(folder: Path) -> None:
    """Write seed inputs that are valid."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, specs in enumerate(
        [
            [Spec("a", "F32", (2, 3))],
            [Spec("a", "F4", (2, 4)), Spec("b", "BF16", ()), Spec("c", "I64", (0,))],
            [Spec("layers.0.weight", "F8_E4M3", (4, 4)), Spec("optim/layers.0.weight/step", "F32", ())],
        ]
    ):
        plan = draft(specs)
        files = {file: bytearray(size) for file, size in plan.files.items()}
        for fragment in plan.fragments:
            files[fragment.file][fragment.offset : fragment.offset + len(fragment.data)] = fragment.data
        metadata = files[METADATA]
        data = len(metadata).to_bytes(_LENGTH, "little") + metadata + files[_DATA]
        one(bytes(data))
        folder.joinpath(f"seed-{number}").write_bytes(data)


if __name__ == "__main__":
    run(one, seeds)
