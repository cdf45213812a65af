"""Descriptions of many chunks as torch and Megatron write them: the scan reads them as the interpreter does."""

from __future__ import annotations

import copy
import pickle
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
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from tests.formats.dcp.conftest import Saved
from tests.formats.dcp.test_many_chunks import CHANGES, by_the_interpreter, by_the_scan, described
from transaxle.errors import Faults, Refusal, TransaxleError
from transaxle.formats.dcp.metadata import METADATA, SavedItem, read_metadata
from transaxle.formats.pickled.writer import write_pickle
from transaxle.formats.storage.local import LocalStorage

LAYERS, EXPERTS, RANKS = 3, 300, 2
PROTOCOLS = [2, 4, 5]


def key(name: str) -> str:
    """Return a text that the pickler does not know yet, as one that came from another rank."""
    return name.encode().decode()


def megatrons() -> Metadata:
    """Halves of each expert, an object of each, and the plans of all ranks, which share what they say of the chunks."""
    state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    plans = []
    for rank in range(RANKS):
        items: list[WriteItem] = []
        for number in range(2):
            name = f"decoder.layers.mlp.experts.experts.linear_fc{number + 1}"
            weight = f"{name}.weight"
            size = torch.Size((LAYERS, EXPERTS, 4096, 8))
            tensor = state.setdefault(weight, TensorStorageMetadata(TensorProperties(torch.bfloat16), size, []))
            assert isinstance(tensor, TensorStorageMetadata)
            for at in range(LAYERS * EXPERTS * 2):
                layer, expert, half = at // (2 * EXPERTS), at // 2 % EXPERTS, at % 2
                if expert % RANKS != rank:
                    continue
                start = (layer, expert, half * 2048, 0)
                chunk = ChunkStorageMetadata(torch.Size(start), torch.Size((1, 1, 2048, 8)))
                tensor.chunks.append(chunk)
                data = TensorWriteData(chunk, copy.copy(tensor.properties), size)
                items.append(WriteItem(MetadataIndex(weight, start), WriteItemType.SHARD, tensor_data=data))
                index = MetadataIndex(key(weight), start)
                places[index] = _StorageInfo(f"__{rank}_{number}.distcp", at * 70_000_000, 66_000)
            for expert in range(rank, EXPERTS, RANKS):
                extra = f"{name}._extra_state/shard_0.{expert}_{LAYERS}.{EXPERTS}"
                state[extra] = BytesStorageMetadata()
                items.append(WriteItem(MetadataIndex(extra), WriteItemType.BYTE_IO, BytesIOWriteData(4)))
                places[MetadataIndex(key(extra))] = _StorageInfo(f"__{rank}_0.distcp", expert * 1513, 1513)
        plans.append(SavePlan(items))
    made = Metadata(state, None, places)
    made.all_local_plans = plans  # type: ignore[attr-defined]
    return made


def torchs() -> Metadata:
    """Chunks whose first index is shared with their place, as where one rank saves alone."""
    size = torch.Size((LAYERS, EXPERTS, 8))
    starts = [torch.Size((layer, expert, 0)) for layer in range(LAYERS) for expert in range(EXPERTS)]
    chunks = [ChunkStorageMetadata(start, torch.Size((1, 1, 8))) for start in starts]
    tensors = {name: TensorStorageMetadata(TensorProperties(torch.float32), size, chunks) for name in ("a", "b")}
    alone = {
        f"layers.{at}.weight": TensorStorageMetadata(
            TensorProperties(torch.float32),
            torch.Size((8,)),
            [ChunkStorageMetadata(torch.Size((0,)), torch.Size((8,)))],
        )
        for at in range(EXPERTS)
    }
    places = {
        MetadataIndex(name, start, index): _StorageInfo("__0_0.distcp", index * 2000, 1900)
        for name in tensors
        for index, start in enumerate(starts)
    }
    places |= {
        MetadataIndex(name, tensor.chunks[0].offsets, 0): _StorageInfo("__0_1.distcp", at * 2000, 1900)
        for at, (name, tensor) in enumerate(alone.items())
    }
    paths: dict[str, Any] = {name: (name,) for name in tensors} | {
        name: ("layers", at, "weight") for at, name in enumerate(alone)
    }
    return Metadata({**tensors, **alone}, paths, places)


def read(folder: Path, data: bytes) -> tuple[list[SavedItem] | None, list[Refusal]]:
    (folder / METADATA).write_bytes(data)
    faults = Faults()
    try:
        items = read_metadata(LocalStorage(folder), METADATA, faults)
    except TransaxleError as error:
        return None, list(error.refusals)
    return items, list(faults.error().refusals) if faults else []


def both(folder: Path, monkeypatch: pytest.MonkeyPatch, data: bytes) -> tuple[list[SavedItem] | None, list[Refusal]]:
    fast = read(folder, data)
    with monkeypatch.context() as patch:
        by_the_interpreter(patch)
        assert fast == read(folder, data)
    return fast


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_megatrons_own(protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickle.dumps(megatrons(), protocol)
    items, refusals = both(tmp_path, monkeypatch, data)
    assert not refusals
    assert items is not None
    assert len(items) == 2 + 2 * EXPERTS
    assert all(chunk.payload is not None for item in items for chunk in item.chunks)
    by_the_scan(monkeypatch)
    assert read(tmp_path, data)[0] == items


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_torchs_own(protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickle.dumps(torchs(), protocol)
    items, refusals = both(tmp_path, monkeypatch, data)
    assert not refusals
    assert items is not None
    assert sum(len(item.chunks) for item in items) == 2 * LAYERS * EXPERTS + EXPERTS
    by_the_scan(monkeypatch)
    assert read(tmp_path, data)[0] == items


@pytest.mark.parametrize("world", [1, 2, 4])
def test_saved_by_torch(world: int, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = list(saved(world).rglob("*" + METADATA))
    for file in files:
        both(tmp_path, monkeypatch, file.read_bytes())
    by_the_scan(monkeypatch)
    for file in files:
        read(tmp_path, file.read_bytes())


@pytest.mark.oracle
@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("name", CHANGES)
def test_damaged(name: str, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong is said as the interpreter says it."""
    change, is_refused = CHANGES[name]
    made = described()
    assert isinstance(made.state, dict)
    change(made.state)
    _, refusals = both(tmp_path, monkeypatch, pickle.dumps(pickle.loads(write_pickle(made)), protocol))  # noqa: S301
    # In torch's own dict there is one of two equal keys.
    assert bool(refusals) == (is_refused and not name.startswith("stored twice"))
