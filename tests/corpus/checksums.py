"""Archives whose storages do not have the checksum that their directory gives."""

from __future__ import annotations

import json
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.corpus.case import Case

SAID = "match the checksum in the file"
SHAPE = (48, 32)


def flip(file: Path, which: int = 0) -> None:
    """Flip a bit in the middle of a storage of an archive."""
    with zipfile.ZipFile(file) as archive:
        found = [each for each in archive.infolist() if "/data/" in each.filename and each.file_size][which]
    data = bytearray(file.read_bytes())
    name, extra = struct.unpack_from("<HH", data, found.header_offset + 26)
    at = found.header_offset + 30 + name + extra + found.file_size // 2
    data[at] ^= 1
    file.write_bytes(data)


def tensors() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"a": torch.randn(SHAPE), "b": torch.randn(SHAPE)}


def saved(name: str, change: Callable[[dict[str, Any]], object] = lambda held: held) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        torch.save(change(tensors()), folder / name)
        flip(folder / name)
        return folder / name

    return make


def sharded(folder: Path) -> None:
    names = {}
    for number, (name, tensor) in enumerate(tensors().items(), 1):
        names[name] = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save({name: tensor}, folder / names[name])
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    flip(folder / names["b"])


def distributed(folder: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        dcp_save(tensors(), checkpoint_id=folder, no_dist=True)
    file = folder / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.index(tensors()["b"].numpy().tobytes()[:64]) + 100] ^= 1
    file.write_bytes(data)


CASES = {
    "a .pt with a wrong checksum": Case(saved("model.pt"), "CORRUPT", SAID, late=True),
    "a .bin with a wrong checksum": Case(saved("pytorch_model.bin"), "CORRUPT", SAID, late=True),
    "a shard with a wrong checksum": Case(sharded, "CORRUPT", SAID, late=True),
    "a .distcp with a wrong checksum": Case(distributed, "CORRUPT", SAID, late=True),
    "a transposed view of a storage with a wrong checksum": Case(
        saved("model.pt", lambda held: {name: tensor.T for name, tensor in held.items()}), "CORRUPT", SAID, late=True
    ),
    "rows of a storage with a wrong checksum, out of order": Case(
        saved("model.pt", lambda held: {str(n): held["a"][47 - n] for n in range(48)}), "CORRUPT", SAID, late=True
    ),
}
