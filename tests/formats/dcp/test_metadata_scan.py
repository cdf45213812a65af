"""Metadata of many items: the fast scan reads and refuses exactly what the interpreter does."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import BytesIOWriteData, SavePlan, TensorWriteData, WriteItem, WriteItemType

from tests.formats.dcp.conftest import Saved
from transaxle.errors import Faults, Refusal, TransaxleError
from transaxle.formats.catalog import Spec
from transaxle.formats.dcp import metadata
from transaxle.formats.dcp.draft import ChunkPlace, TorchTensor, metadata_of
from transaxle.formats.dcp.metadata import METADATA, Payload, SavedChunk, SavedItem, read_metadata
from transaxle.formats.pickled.descriptors import DType
from transaxle.formats.pickled.scan import Unread
from transaxle.formats.pickled.writer import write_pickle
from transaxle.formats.storage.local import LocalStorage

RANKS = 4
NAME = "layers.{}.experts.{}.{}.weight"
SHAPES = {"down": (1024, 416), "gate": (416, 1024), "up_proj": (416, 70_000)}
"""Cut in four, their first indices are numbers of one byte and of two, and one of their sizes has four."""
MODEL = {NAME.format(layer, expert, part): SHAPES[part] for layer in (1, 12) for expert in range(40) for part in SHAPES}
ODD, OTHER = NAME.format(12, 3, "gate"), NAME.format(1, 17, "down")
Change = Callable[[Metadata], object]
Found = tuple[list[SavedItem] | None, list[Refusal]]


def new_text(name: str) -> str:
    """Return a text that the pickler has not stored yet, like a key that came from another rank."""
    return name.encode().decode()


def rank_chunks(shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return first index and size of each rank's rows."""
    rows = shape[0] // RANKS
    return [((rank * rows, *[0] * (len(shape) - 1)), (rows, *shape[1:])) for rank in range(RANKS)]


def place(name: str, rank: int) -> tuple[str, int, int]:
    """Return file, offset and length; the last files are larger than 4 GB."""
    return f"__{rank}_0.distcp", list(MODEL).index(name) * 10**rank * 135_001, 8000 + rank


def torch_metadata(*, objects: bool = False) -> Metadata:
    """Return the metadata of the model, as rank 0 writes it with the plans of other ranks."""
    state: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for rank in range(RANKS):
        for name, shape in MODEL.items():
            if rank == 0:
                chunks = [ChunkStorageMetadata(torch.Size(a), torch.Size(b)) for a, b in rank_chunks(shape)]
                state[name] = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size(shape), chunks)
                if objects and name.endswith("up_proj.weight"):
                    state[f"{name}.extra"] = BytesStorageMetadata()
                    places[MetadataIndex(f"{name}.extra")] = _StorageInfo("__9_0.distcp", len(places) * 100, 99)
            key = name if rank == 0 else new_text(name)
            index = MetadataIndex(key, torch.Size(rank_chunks(shape)[rank][0]), rank)
            places[index] = _StorageInfo(*place(name, rank))
    return Metadata(state, {name: (name,) for name in state}, places)


def megatron_metadata(layers: int = 2, experts: int = 100) -> Metadata:
    """Two halves and an object for each expert, and the plans of all ranks, which share their chunks."""
    state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    plans = []
    weight, size = "decoder.layers.mlp.experts.experts.linear_fc1.weight", torch.Size((layers, experts, 4096, 8))
    tensor = state[weight] = TensorStorageMetadata(TensorProperties(torch.bfloat16), size, [])
    for rank in range(2):
        items: list[WriteItem] = []
        for at in range(layers * experts * 2):
            layer, expert, half = at // (2 * experts), at // 2 % experts, at % 2
            if expert % 2 != rank:
                continue
            start = (layer, expert, half * 2048, 0)
            chunk = ChunkStorageMetadata(torch.Size(start), torch.Size((1, 1, 2048, 8)))
            tensor.chunks.append(chunk)
            data = TensorWriteData(chunk, copy.copy(tensor.properties), size)
            items.append(WriteItem(MetadataIndex(weight, start), WriteItemType.SHARD, tensor_data=data))
            places[MetadataIndex(new_text(weight), start)] = _StorageInfo(f"__{rank}_0.distcp", at * 70_000_000, 66_000)
        for expert in range(rank, experts, 2):
            extra = f"{weight}._extra_state/shard_0.{expert}_{layers}.{experts}"
            state[extra] = BytesStorageMetadata()
            items.append(WriteItem(MetadataIndex(extra), WriteItemType.BYTE_IO, BytesIOWriteData(4)))
            places[MetadataIndex(new_text(extra))] = _StorageInfo(f"__{rank}_1.distcp", expert * 1513, 1513)
        plans.append(SavePlan(items))
    made = Metadata(state, None, places)
    made.all_local_plans = plans  # type: ignore[attr-defined]
    return made


def shared_metadata() -> Metadata:
    """Chunks whose first index is one object in the description and in the place, as where one rank saves alone."""
    starts = [torch.Size((layer, expert, 0)) for layer in range(2) for expert in range(100)]
    chunks = [ChunkStorageMetadata(start, torch.Size((1, 1, 8))) for start in starts]
    size, names = torch.Size((2, 100, 8)), [f"layers.{number}.weight" for number in range(2)]
    tensors = {name: TensorStorageMetadata(TensorProperties(torch.float32), size, chunks) for name in names}
    places = {
        MetadataIndex(name, start, index): _StorageInfo("__0_0.distcp", index * 2000, 1900)
        for name in tensors
        for index, start in enumerate(starts)
    }
    paths: dict[str, Any] = {name: ("layers", number, "weight") for number, name in enumerate(names)}
    return Metadata(tensors, paths, places)  # type: ignore[arg-type]


def read(folder: Path, data: bytes) -> Found:
    (folder / METADATA).write_bytes(data)
    faults = Faults()
    try:
        items = read_metadata(LocalStorage(folder), METADATA, faults)
    except TransaxleError as error:
        return None, list(error.refusals)
    return items, list(faults.error().refusals) if faults else []


def both(folder: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, *, scanned: bool | None = None) -> Found:
    """Read metadata with the scan and without it; with `scanned`, the interpreter must not be needed."""

    def unread(*_: object) -> None:
        raise Unread

    def unexpected(*_: object, **__: object) -> None:
        raise AssertionError("the scan does not read it")

    fast = read(folder, data)
    with monkeypatch.context() as patch:
        patch.setattr(metadata, "scan_pickle", unread)
        assert fast == read(folder, data)
    if scanned:
        with monkeypatch.context() as patch:
            patch.setattr(metadata, "read_pickle", unexpected)
            assert fast == read(folder, data)
    return fast


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("make", [megatron_metadata, shared_metadata, torch_metadata])
def test_the_scan_reads_what_torch_and_megatron_write(
    make: Callable[[], Metadata], protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = make()
    items, refusals = both(tmp_path, monkeypatch, pickle.dumps(described, protocol), scanned=True)
    assert not refusals
    assert items is not None
    assert [item.key for item in items] == list(described.state_dict_metadata)
    assert all(chunk.payload is not None for item in items for chunk in item.chunks)


@pytest.mark.parametrize("objects", [False, True])
def test_items_have_the_described_chunks(objects: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items, refusals = both(tmp_path, monkeypatch, pickle.dumps(torch_metadata(objects=objects), 4))
    assert not refusals
    assert items is not None
    tensors = {item.key: item for item in items if item.dtype is not None}
    assert list(tensors) == list(MODEL)
    assert len(items) - len(tensors) == (len(MODEL) // 3 if objects else 0)
    for name, shape in MODEL.items():
        chunks = tuple(
            SavedChunk(start, size, Payload(*place(name, rank)))
            for rank, (start, size) in enumerate(rank_chunks(shape))
        )
        assert tensors[name].chunks == chunks
        assert (tensors[name].shape, tensors[name].dtype, tensors[name].path) == (shape, DType("bfloat16"), (name,))


@pytest.mark.parametrize("with_paths", [False, True])
def test_the_scan_reads_what_we_write(with_paths: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (2, 100, 4, 8)
    chunks = [
        ChunkPlace((at // 100, at % 100, 0, 0), (1, 1, 4, 8), Payload("__0_0.distcp", at * 70_000_000, 66_000))
        for at in range(200)
    ]
    tensor = TorchTensor(Spec("w", "F32", shape), ("w",), DType("float32"), shape, 0)
    objects = [((f"w._extra_state/shard_{at}",), Payload("__0_0.distcp", 10**12, 1500)) for at in range(100)]
    data = write_pickle(metadata_of([(tensor, chunks)], objects, with_paths=with_paths))  # type: ignore[arg-type]
    items, refusals = both(tmp_path, monkeypatch, data, scanned=True)
    assert not refusals
    assert items is not None
    assert [len(item.chunks) for item in items] == [200] + [0] * 100


@pytest.mark.parametrize("world", [1, 2, 4])
def test_scans_of_what_ranks_saved(world: int, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in saved(world).rglob("*" + METADATA):
        both(tmp_path, monkeypatch, file.read_bytes(), scanned=True)


def tensor(made: Metadata, name: str = ODD) -> Any:
    return made.state_dict_metadata[name]


def every_item(change: Callable[[Any], object]) -> Change:
    return lambda made: [change(each) for each in made.state_dict_metadata.values()]


def part(number: int, **fields: Any) -> Change:
    """Change fields of the index, or of the place, of one part."""
    return lambda made: _set(list(made.storage_data.items())[number], fields)


def every_part(**fields: Any) -> Change:
    return lambda made: [_set(pair, fields) for pair in made.storage_data.items()]


def _set(pair: tuple[Any, Any], fields: dict[str, Any]) -> tuple[Any, Any]:
    for key, value in fields.items():
        target = pair[0] if key in ("fqn", "start") else pair[1]
        object.__setattr__(target, {"start": "offset"}.get(key, key), value)
    return pair


CHANGES: dict[str, tuple[Change, bool]] = {
    "one has another dtype": (lambda made: setattr(tensor(made).properties, "dtype", torch.float32), False),
    "one has no dtype": (lambda made: setattr(tensor(made).properties, "dtype", None), True),
    "none has a dtype": (every_item(lambda each: setattr(each.properties, "dtype", None)), True),
    "all are sparse": (every_item(lambda each: setattr(each.properties, "layout", torch.sparse_coo)), True),
    "one has another shape": (lambda made: setattr(tensor(made), "size", torch.Size((1, 2, 3))), False),
    "all shapes are lists": (every_item(lambda each: setattr(each, "size", list(each.size))), False),
    "one has a negative size": (lambda made: setattr(tensor(made), "size", (-416, 1024)), True),
    "all have 60 dims": (every_item(lambda each: setattr(each, "size", torch.Size([1] * 60))), False),
    "one lacks a chunk": (lambda made: tensor(made).chunks.pop(), True),
    "no chunks at all": (every_item(lambda each: each.chunks.clear()), True),
    "one chunk is there twice": (lambda made: tensor(made).chunks.append(tensor(made).chunks[0]), False),
    "chunks of another": (lambda made: setattr(tensor(made), "chunks", tensor(made, OTHER).chunks), True),
    "a chunk without sizes": (lambda made: setattr(tensor(made).chunks[2], "sizes", None), True),
    "chunks of other dims": (every_item(lambda each: setattr(each.chunks[1], "sizes", torch.Size((2,)))), False),
    "one is shared": (lambda made: made.state_dict_metadata.__setitem__(ODD, tensor(made, OTHER)), True),
    "one is an object": (lambda made: made.state_dict_metadata.__setitem__(ODD, BytesStorageMetadata()), True),
    "one is a text": (lambda made: made.state_dict_metadata.__setitem__(ODD, "text"), True),  # type: ignore[assignment]
    "one is gone": (lambda made: made.state_dict_metadata.pop(ODD), True),
    "one place is gone": (lambda made: made.storage_data.pop(next(iter(made.storage_data))), False),
    "one key is no text": (lambda made: made.state_dict_metadata.__setitem__(7, tensor(made)), True),  # type: ignore[index]
    "no paths": (lambda made: setattr(made, "planner_data", None), False),
    "another path": (lambda made: made.planner_data.__setitem__(ODD, ("layers", ODD[7:])), False),
    "a path of another": (lambda made: made.planner_data.__setitem__(ODD, ("layers",)), True),
    "under a key without description": (part(200, fqn="nothing"), True),
    "keys are no texts": (every_part(fqn=None), True),
    "a place is negative": (part(200, offset=-1), True),
    "places are negative": (every_part(length=-1), True),
    "places are no numbers": (every_part(offset=None), True),
    "places are true": (every_part(offset=True), True),
    "one is transformed": (part(200, transform_descriptors=["zip"]), True),
    "files are no texts": (every_part(relative_path=None), True),
    "offsets of other dims": (every_part(start=torch.Size((1,))), True),
    "offsets are numbers": (every_part(start=1), True),
    "another file": (part(200, relative_path="other"), False),
}  # fmt: skip


@pytest.mark.oracle
@pytest.mark.parametrize("name", CHANGES)
def test_oddities_are_told_as_by_the_interpreter(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change, is_refused = CHANGES[name]
    made = torch_metadata()
    change(made)
    _, refusals = both(tmp_path, monkeypatch, pickle.dumps(made, 4))
    assert bool(refusals) == is_refused, refusals


@pytest.mark.parametrize("objects", [False, True])
def test_a_key_twice(objects: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No dict has one, but a pickle may."""
    data = pickle.dumps(torch_metadata(objects=objects), 4)
    for first, second in [((1, 30), (1, 31)), ((1, 0), (1, 9)), ((12, 38), (12, 39))]:
        one, other = (NAME.format(*each, "gate").encode() for each in (first, second))
        at = data.index(other)
        found, refusals = both(tmp_path, monkeypatch, data[:at] + one + data[at + len(one) :])
        assert found is None
        assert [each.code for each in refusals] == ["CORRUPT"]


@pytest.mark.oracle
@pytest.mark.parametrize("seed", range(8))
def test_the_interpreter_agrees_on_damaged_pickles(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = random.Random(seed)
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "MODEL", dict(list(MODEL.items())[:75]))
        data = pickle.dumps(torch_metadata(objects=seed % 2 == 1), 4 + seed % 2)
    for _ in range(20):
        damaged = bytearray(data)
        at = chosen.randrange(len(data))
        kind = chosen.random()
        if kind < 0.7:
            damaged[at] = chosen.choice([chosen.randrange(256), damaged[at] ^ (1 << chosen.randrange(8))])
        elif kind < 0.85:
            del damaged[at : at + chosen.choice([1, 2, 5, 90])]
        else:
            damaged[at:at] = damaged[max(0, at - chosen.choice([1, 2, 5, 90, 200])) : at]
        both(tmp_path, monkeypatch, bytes(damaged))
