"""A verdict is on every byte of every file: one flipped bit anywhere in what we write is seen."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import transaxle as tx
from tests.checkpoints import Tensors, write
from tests.cli.running import flip
from tests.formats.megatron.legacy import run as megatron
from transaxle.formats.registry import MANIFEST

MOST = 40
"""Flips for each format: of places that are spread over the kinds of regions, the files and the offsets."""
RANKS: dict[str, Any] = {"tp": 2, "pp": 2, "make_vocab_size_divisible_by": megatron.MULTIPLE}
FORMS: dict[str, dict[str, Any]] = {
    "safetensors:identity": {"shard_size": 2000}, "torch:identity": {}, "dcp:identity": {},
    "deepspeed-universal:identity": {}, "megatron_torch": RANKS, "torch_dist": {},
}  # fmt: skip


def _trained() -> Tensors:
    """A few weights with the optimizer's state."""
    generator = np.random.default_rng(0)
    held: Tensors = {}
    for name, shape in {"a.weight": (12, 16), "b.weight": (7, 5), "c.bias": (9,)}.items():
        held[name] = generator.standard_normal(shape).astype(np.float32)
        for state in ("exp_avg", "exp_avg_sq"):
            held[f"optim/{name}/{state}"] = generator.standard_normal(shape).astype(np.float32)
        held[f"optim/{name}/step"] = np.array(3.0, np.float32)
    return held


def _made(folder: Path, to: str) -> Path:
    """Write a checkpoint with an optimizer in a format, with its sidecars."""
    if to in ("megatron_torch", "torch_dist"):
        megatron.write(replace(megatron.Run(), optimizer="flat"), folder / "ck")
        for file in ("tokenizer.json", "generation_config.json"):
            (folder / "ck" / file).write_text('{"a": 1}')
    else:
        write(folder / "ck", _trained(), config={"model_type": "unknown"})
        (folder / "ck" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    tx.convert(folder / "ck", folder / "out", to=to, sync=False, **FORMS[to])
    return folder / "out"


def _regions(folder: Path) -> Iterator[tuple[str, Path, int]]:
    """Yield a byte of each region of each file: kind, file and offset."""
    with tx.open(folder) as checkpoint:
        container = checkpoint.container
    copies = [twin.second for twin in container.twins]
    inside: dict[str, dict[int, str]] = {}
    for kind, entries in (("copy", copies), ("tensor", container.entries.values())):
        for entry in entries:
            for extent in entry.extents:
                if entry.nbytes:
                    size = entry.nbytes // max(len(entry.extents), 1)
                    inside.setdefault(extent.file, {})[extent.offset + size // 2] = kind
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size):
        name, size = str(file.relative_to(folder)), file.stat().st_size
        for at, kind in inside.get(name, {}).items():
            yield kind, file, at
        for at in {0, size // 3, 2 * size // 3, size - 1}:
            yield "any", file, at
        if zipfile.is_zipfile(file):
            yield from _of_archive(file)


def _of_archive(file: Path) -> Iterator[tuple[str, Path, int]]:
    """Yield a byte of each member's header, padding and data, and of the directory."""
    head = struct.Struct("<HH")
    with zipfile.ZipFile(file) as archive, file.open("rb") as held:
        for member in archive.infolist():
            held.seek(member.header_offset + 26)
            name, extra = head.unpack(held.read(head.size))
            begin = member.header_offset + 30 + name + extra
            yield "header", file, member.header_offset + 10
            if extra:
                yield "padding", file, begin - 1
            if member.file_size:
                yield "member", file, begin + member.file_size // 2
        yield "directory", file, archive.start_dir + 12


def _spread(regions: list[tuple[str, Path, int]]) -> list[tuple[str, Path, int]]:
    """Return some of the regions, of each kind about equally many."""
    kinds: dict[str, list[tuple[str, Path, int]]] = {}
    for region in dict.fromkeys(regions):
        kinds.setdefault(region[0], []).append(region)
    share = MOST // len(kinds)
    return [region for found in kinds.values() for region in found[:: -(-len(found) // share)]]


@pytest.mark.oracle
@pytest.mark.parametrize("to", FORMS)
def test_a_bit_anywhere_is_seen(to: str, tmp_path: Path) -> None:
    folder = _made(tmp_path, to)
    assert tx.verify(folder)
    regions = _spread(list(_regions(folder)))
    unseen = []
    for number, (kind, file, at) in enumerate(regions):
        flip(file, at, bit=number % 8)
        with suppress(tx.TransaxleError):
            if tx.verify(folder):
                unseen.append((kind, file.relative_to(folder), at))
        flip(file, at, bit=number % 8)
    assert not unseen
    assert tx.verify(folder)


def test_a_verdict_is_also_on_what_was_left_out(tmp_path: Path) -> None:
    folder = _made(tmp_path, "dcp:identity")
    with tx.open(folder) as checkpoint:
        extent = checkpoint.container.entries["optim/b.weight/exp_avg"].extents[0]
    flip(folder / extent.file, extent.offset + 7)
    with tx.open(folder, optimizer=False) as checkpoint:
        assert [each.where.tensor for each in tx.verify(checkpoint).problems] == ["optim/b.weight/exp_avg"]


def test_copies_are_compared_without_a_manifest_too(tmp_path: Path) -> None:
    """Then nothing says which of both is right."""
    folder = _made(tmp_path, "megatron_torch")
    (folder / MANIFEST).unlink()
    assert tx.verify(folder)
    with tx.open(folder) as checkpoint:
        twin = next(twin for twin in checkpoint.container.twins if twin.second.nbytes > 8)
    (extent,) = twin.second.extents
    flip(folder / extent.file, extent.offset + 3)
    (refusal,) = tx.verify(folder).problems
    assert (refusal.code, refusal.where.file) == ("UNEQUAL_COPIES", extent.file)


def test_it_says_what_it_did_not_prove(tmp_path: Path) -> None:
    folder = _made(tmp_path, "safetensors:identity")
    (folder / "notes").mkdir()
    (folder / "notes" / "more.txt").write_text("beside")
    (folder / "other.bin").write_bytes(b"1")
    found = tx.verify(folder)
    assert (found.ok, found.unlisted, found.unproved) == (True, ("other.bin", "notes/more.txt"), 0)
    (folder / MANIFEST).unlink()
    found = tx.verify(folder)
    assert found.unproved == found.bytes_read > 0
    assert "unchecked" in found.verdict
    torch.save({"a": torch.arange(9.0)}, tmp_path / "a.pt")
    found = tx.verify(tmp_path / "a.pt")
    assert (found.against, found.unproved) == ("structure", 0)
    assert "checksums of the format cover all tensors" in found.verdict
