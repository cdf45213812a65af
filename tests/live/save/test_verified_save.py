"""`verify=True` of a save: what the disk has is read back, and a byte that is not what was held in memory is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import transaxle as tx
from tests.live.ranks import run
from transaxle.formats.store.staging import Writer

WORLD = 2
LARGE = 4096
"""Bytes of a write that is a part of a tensor, and no header."""
FORMATS = ("safetensors", "dcp", "torch")
WRITE = Writer.pwrite


def _state(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (WORLD,))
    full = torch.arange(64 * 256.0).reshape(64, 256)
    return {"w": distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None), "b": torch.arange(7)}


def _flipped(self: Writer, file: str, offset: int, view: memoryview) -> None:
    """Write as a disk or a cable that turns a bit."""
    octets = bytearray(view)
    if len(octets) >= LARGE:
        octets[-1] ^= 1
    WRITE(self, file, offset, memoryview(octets))


def _saved(rank: int, world: int, folder: str, to: str) -> list[tuple[bool, int, str]]:
    """Save well, now and in the background; return what each report says of the verification."""
    jobs = (
        tx.save(_state(rank), f"{folder}/now", to=to, verify=True),
        tx.async_save(_state(rank), f"{folder}/later", to=to, verify=True).result(),
    )
    found = []
    for report in jobs:
        assert report.verification is not None
        assert "verify" in report.stages
        assert "read back" in str(report)
        found.append((report.verification.ok, report.verification.tensors, report.verification.against))
    assert tx.save(_state(rank), f"{folder}/unread", to=to).verification is None
    return found


@pytest.mark.parametrize("to", FORMATS)
def test_the_report_says_what_was_read(tmp_path: Path, to: str) -> None:
    assert run(WORLD, _saved, str(tmp_path), to) == [[(True, 2, "manifest")] * 2] * WORLD


def _damaged(rank: int, world: int, folder: str, to: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Writer, "pwrite", _flipped)
        tx.save(_state(rank), f"{folder}/unread", to=to)  # nobody notices
        with pytest.raises(tx.TransaxleError) as found:
            tx.save(_state(rank), f"{folder}/read", to=to, verify=True)
    return [found.value.code, str(found.value)]


@pytest.mark.parametrize("to", FORMATS)
def test_a_bit_that_turned_on_the_way_is_told_on_every_rank(tmp_path: Path, to: str) -> None:
    (code, text), other = run(WORLD, _damaged, str(tmp_path), to)
    assert [code, text] == other
    assert code == "CORRUPT"
    assert "the bytes were changed after they were written" in text
    assert not tx.verify(tmp_path / "unread").ok
