"""An archive is taken for read only if reading it would have said the same."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.formats.dcp.damage import archive
from transaxle.errors import Refused
from transaxle.formats.dcp.metadata import Payload
from transaxle.formats.dcp.payload import Match, Stencils
from transaxle.formats.pickled.descriptors import TensorRef
from transaxle.formats.storage.local import LocalStorage
from transaxle.formats.torch_file.saved import Saved, StoredStorage, read_saved

FILE = "__0_0.distcp"
RESULT = "what the first was found to hold"


def told(saved: Saved, begin: int) -> tuple[object, ...]:
    """What an archive says of its tensor."""
    value = saved.value
    assert isinstance(value, TensorRef)
    assert isinstance(value.storage, StoredStorage)
    return value.shape, value.strides, value.offset, value.storage.dtype, value.storage.offset - begin


def matched(folder: Path, first: bytes, second: bytes) -> tuple[Match[str] | None, Saved | None]:
    """What a stencil made of the first archive makes of the second, and what strict reading does."""
    folder.joinpath(FILE).write_bytes(first + second)
    storage = LocalStorage(folder)
    try:
        stencils: Stencils[str] = Stencils(storage)
        stencils.learn(Payload(FILE, 0, len(first)), RESULT)
        match = stencils.match(Payload(FILE, len(first), len(second)))
        saved = None
        with suppress(Refused):
            saved = read_saved(storage, FILE, len(first), len(second))
        return match, saved
    finally:
        storage.close()


def test_another_of_the_same_shape(tmp_path: Path) -> None:
    match, saved = matched(tmp_path, archive(torch.zeros(3, 4)), archive(torch.ones(3, 4)))
    assert saved is not None
    (crc32,) = (checksum.crc32 for checksum in saved.checksums if "data/0" in checksum.what)
    assert match == (RESULT, crc32)


@pytest.mark.parametrize(
    "other",
    [torch.ones(4, 3), torch.ones(3, 4).t(), torch.ones(3, 4, dtype=torch.int32), torch.ones(12), torch.ones(3, 5), 7],
    ids=str,
)
def test_another_of_another_kind(tmp_path: Path, other: object) -> None:
    match, _ = matched(tmp_path, archive(torch.zeros(3, 4)), archive(other))
    assert match is None


def test_the_same_number(tmp_path: Path) -> None:
    assert matched(tmp_path, archive(7), archive(7))[0] == (RESULT, 0)
    assert matched(tmp_path, archive(7), archive(8))[0] is None


def test_every_flipped_bit(tmp_path: Path) -> None:
    """Where a stencil still fits, strict reading finds the same tensor in the same place."""
    first, second = archive(torch.zeros(3, 4)), archive(torch.ones(3, 4))
    _, right = matched(tmp_path, first, second)
    assert right is not None
    fitting = 0
    for at in range(len(second)):
        flipped = second[:at] + bytes([second[at] ^ 1 << at % 8]) + second[at + 1 :]
        match, saved = matched(tmp_path, first, flipped)
        if match is not None:
            fitting += 1
            assert saved is not None, at
            assert told(saved, len(first)) == told(right, len(first))
    assert 48 <= fitting <= 48 + 40  # the tensor itself, and the serial number
