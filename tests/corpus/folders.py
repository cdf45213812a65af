"""Folders of shards, indexes and configs that disagree."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from tests.corpus.case import Case, Make

INDEX = "model.safetensors.index.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
A, B = np.arange(6.0, dtype=np.float32), np.arange(4.0, dtype=np.float32)


def shards(folder: Path) -> None:
    save_file({"a": A}, folder / ONE)
    save_file({"b": B}, folder / TWO)
    index(folder, {"a": ONE, "b": TWO})


def index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def folder_with(*changes: Callable[[Path], object]) -> Make:
    def make(folder: Path) -> None:
        shards(folder)
        for change in changes:
            change(folder)

    return make


def mapped(weight_map: object) -> Make:
    return folder_with(lambda folder: index(folder, weight_map))


def written(name: str, text: str) -> Make:
    return folder_with(lambda folder: (folder / name).write_text(text))


def whole(**tensors: np.ndarray) -> Make:
    return folder_with(lambda folder: save_file(tensors, folder / "model.safetensors"))


def linked(name: str, to: str) -> Make:
    """Put a link in the place of a shard; what it leads to is a good one."""

    def link(folder: Path) -> None:
        (folder.parent / "outside").mkdir()
        (folder / name).rename(folder.parent / "outside" / name)
        (folder / name).symlink_to(to.format(outside=folder.parent / "outside"))

    return folder_with(link)


def torch_shards(folder: Path) -> None:
    torch.save({"a": torch.zeros(3)}, folder / "pytorch_model-00001-of-00001.bin")
    torch.save({"a": torch.ones(3)}, folder / "pytorch_model.bin")
    text = json.dumps({"weight_map": {"a": "pytorch_model-00001-of-00001.bin"}})
    (folder / "pytorch_model.bin.index.json").write_text(text)


def header(entries: Mapping[str, Any] | str, data: bytes = bytes(16)) -> Make:
    """Write a safetensors file by hand."""

    def make(folder: Path) -> Path:
        text = (entries if isinstance(entries, str) else json.dumps(entries)).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
        return folder / "model.safetensors"

    return make


def tensor(begin: int, end: int, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def twice(key: str) -> str:
    return f'{{"weight_map": {{"a": "{ONE}", "b": "{TWO}", "{key}": "{ONE}"}}}}'


CASES = {
    "a whole file beside an index": Case(whole(a=A + 1, b=B), "AMBIGUOUS", "two checkpoints in one folder"),
    "a whole file with other tensors": Case(whole(c=A), "AMBIGUOUS", "two checkpoints in one folder"),
    "the same tensors in a whole file": Case(whole(a=A, b=B), "AMBIGUOUS", "Name the one to read"),
    "a whole torch file beside an index": Case(torch_shards, "AMBIGUOUS", "two checkpoints in one folder"),
    "an empty weight map": Case(mapped({}), "CORRUPT", "lists no tensor"),
    "no weight map": Case(written(INDEX, "{}"), "CORRUPT", "weight_map"),
    "a weight map that is a list": Case(mapped(["a"]), "CORRUPT", "weight_map"),
    "a shard that is a number": Case(mapped({"a": 1, "b": TWO}), "CORRUPT", "weight_map"),
    "a key twice in the weight map": Case(written(INDEX, twice("a")), "NAME_COLLISION", "lists it twice"),
    "a key twice in other letters": Case(written(INDEX, twice("\\u0061")), "NAME_COLLISION", "lists it twice"),
    "two weight maps": Case(
        written(INDEX, f'{{"weight_map": {{"a": "{ONE}"}}, "weight_map": {{"b": "{TWO}"}}}}'), "CORRUPT", "twice"
    ),
    "an index without an end": Case(written(INDEX, '{"weight_map": {'), "CORRUPT", "weight_map"),
    "an index of NaN": Case(written(INDEX, "NaN"), "CORRUPT", "weight_map"),
    "an index nested without end": Case(written(INDEX, "[" * 100_000), "CORRUPT", "weight_map"),
    "a tensor in the other shard": Case(mapped({"a": TWO, "b": ONE}), "CORRUPT", "the index"),
    "a tensor that no shard has": Case(mapped({"a": ONE, "b": TWO, "c": TWO}), "INCOMPLETE", "does not have it"),
    "a tensor that the index lacks": Case(mapped({"a": ONE}), "CORRUPT", "does not list it"),
    "a shard that is not there": Case(mapped({"a": ONE, "b": "other.safetensors"}), "INCOMPLETE", "shard is missing"),
    "a shard that leads out": Case(mapped({"a": ONE, "b": f"../source/{TWO}"}), "PATH_ESCAPE", "plain file name"),
    "an absolute shard": Case(mapped({"a": ONE, "b": "/etc/passwd"}), "PATH_ESCAPE", "plain file name"),
    "a shard that is the folder": Case(mapped({"a": ONE, "b": "."}), "PATH_ESCAPE", "plain file name"),
    "a shard without a name": Case(mapped({"a": ONE, "b": ""}), "PATH_ESCAPE", "plain file name"),
    "a shard with a NUL": Case(mapped({"a": ONE, "b": TWO + "\0"}), "PATH_ESCAPE", "plain file name"),
    "a link that leads out": Case(linked(TWO, "../outside/" + TWO), "PATH_ESCAPE", "leads out"),
    "an absolute link that leads out": Case(linked(TWO, "{outside}/" + TWO), "PATH_ESCAPE", "leads out"),
    "a link to nothing": Case(linked(TWO, "nothing"), "IO", ""),
    "a link to itself": Case(linked(TWO, TWO), "IO", ""),
    "a folder for a shard": Case(
        folder_with(lambda folder: (folder / TWO).unlink(), lambda folder: (folder / TWO).mkdir()), "INCOMPLETE", ""
    ),
    "a FIFO for a shard": Case(
        folder_with(lambda folder: (folder / TWO).unlink(), lambda folder: os.mkfifo(folder / TWO)),
        "UNSUPPORTED",
        "a FIFO",
    ),
    "a tensor in two shards": Case(
        folder_with(lambda folder: save_file({"a": A, "b": B}, folder / TWO)), "NAME_COLLISION", "also in"
    ),
    "a gap between tensors": Case(header({"a": tensor(0, 8), "b": tensor(12, 16, (1,))}), "CORRUPT", ""),
    "tensors that overlap": Case(header({"a": tensor(0, 8), "b": tensor(4, 16, (3,))}), "OVERLAP", ""),
    "two tensors on the same bytes": Case(header({"a": tensor(0, 16, (4,)), "b": tensor(0, 16, (4,))}), "OVERLAP", ""),
    "bytes after the last tensor": Case(header({"a": tensor(0, 8)}), "CORRUPT", ""),
    "a tensor beyond the file": Case(header({"a": tensor(0, 80, (20,))}), "CORRUPT", ""),
    "a range that ends before it begins": Case(header({"a": tensor(16, 0, (4,))}), "CORRUPT", ""),
    "a shape of another size": Case(header({"a": tensor(0, 16, (3,))}), "CORRUPT", ""),
    "a shape that overflows": Case(header({"a": tensor(0, 16, (2**40, 2**40))}), "CORRUPT", ""),
    "a negative shape": Case(header({"a": tensor(0, 16, (-2, -2))}), "CORRUPT", ""),
    "a shape of truth": Case(header({"a": tensor(0, 16, (4, True))}), "CORRUPT", ""),
    "a shape of fractions": Case(header({"a": tensor(0, 16, (4.0,))}), "CORRUPT", ""),
    "a name twice in a header": Case(
        header('{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"a":{"dtype":"F32","shape":[4],'
               '"data_offsets":[0,16]}}'),
        "NAME_COLLISION",
        "",
    ),
    "a header of a list": Case(header("[]"), "CORRUPT", ""),
    "a type that is not known": Case(header({"a": tensor(0, 16, (4,), "F33")}), "UNSUPPORTED", ""),
    "a type that is a number": Case(header({"a": tensor(0, 16, (4,), 7)}), "CORRUPT", ""),
}  # fmt: skip
