"""Descriptions of many tensors of few chunks each, as torch writes them: read by the scan, they are what they say."""

from __future__ import annotations

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

from tests.formats.dcp.test_many_chunks import by_the_scan
from tests.formats.dcp.test_torchs_own_pickles import both, key, read
from transaxle.formats.dcp.metadata import Payload, SavedChunk
from transaxle.formats.pickled.descriptors import DType

RANKS = 4
NAME = "layers.{}.experts.{}.{}.weight"
SHAPES = {"down": (1024, 416), "gate": (416, 1024), "up_proj": (416, 70_000)}
"""Cut in four, their first indices are numbers of one byte and of two, and one of their sizes has four."""
MODEL = {
    NAME.format(layer, expert, part): SHAPES[part] for layer in (1, 12) for expert in range(120) for part in SHAPES
}
ODD, OTHER = NAME.format(12, 3, "gate"), NAME.format(1, 77, "down")
Change = Callable[[Metadata], object]


def chunks_of(shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return first index and size of each rank's rows."""
    rows = shape[0] // RANKS
    return [((rank * rows, *[0] * (len(shape) - 1)), (rows, *shape[1:])) for rank in range(RANKS)]


def place(name: str, rank: int) -> tuple[str, int, int]:
    """Return file, first byte and length; the last files are larger than 4 GB."""
    return f"__{rank}_0.distcp", list(MODEL).index(name) * 10**rank * 9001, 8000 + rank


def model(*, objects: bool = False) -> Metadata:
    """Return the description of the model, as rank 0 writes it with what others have sent."""
    state: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for rank in range(RANKS):
        for name, shape in MODEL.items():
            if rank == 0:
                chunks = [ChunkStorageMetadata(torch.Size(a), torch.Size(b)) for a, b in chunks_of(shape)]
                state[name] = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size(shape), chunks)
                if objects and name.endswith("up_proj.weight"):
                    state[f"{name}.extra"] = BytesStorageMetadata()
                    places[MetadataIndex(f"{name}.extra")] = _StorageInfo("__9_0.distcp", len(places) * 100, 99)
            index = MetadataIndex(name if rank == 0 else key(name), torch.Size(chunks_of(shape)[rank][0]), rank)
            places[index] = _StorageInfo(*place(name, rank))
    return Metadata(state, {name: (name,) for name in state}, places)


@pytest.mark.oracle
@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("objects", [False, True])
def test_they_are_what_was_described(
    protocol: int, objects: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = pickle.dumps(model(objects=objects), protocol)
    found, refusals = both(tmp_path, monkeypatch, data)
    assert not refusals
    assert found is not None
    tensors = {item.key: item for item in found if item.dtype is not None}
    assert list(tensors) == list(MODEL)
    assert len(found) - len(tensors) == (len(MODEL) // 3 if objects else 0)
    for name, shape in MODEL.items():
        chunks = tuple(
            SavedChunk(start, size, Payload(*place(name, rank))) for rank, (start, size) in enumerate(chunks_of(shape))
        )
        assert tensors[name].chunks == chunks
        assert (tensors[name].shape, tensors[name].dtype, tensors[name].path) == (shape, DType("bfloat16"), (name,))
    by_the_scan(monkeypatch)
    assert read(tmp_path, data)[0] == found


def items(made: Metadata) -> dict[Any, Any]:
    return made.state_dict_metadata


def tensor(made: Metadata, name: str = ODD) -> Any:
    return made.state_dict_metadata[name]


def changed_everywhere(change: Callable[[Any], object]) -> Change:
    return lambda made: [change(each) for each in made.state_dict_metadata.values()]


CHANGES: dict[str, tuple[Change, bool]] = {
    "one has another dtype": (lambda made: setattr(tensor(made).properties, "dtype", torch.float32), False),
    "one has no dtype": (lambda made: setattr(tensor(made).properties, "dtype", None), True),
    "none has a dtype": (changed_everywhere(lambda each: setattr(each.properties, "dtype", None)), True),
    "one is sparse": (lambda made: setattr(tensor(made).properties, "layout", torch.sparse_coo), True),
    "all are sparse": (changed_everywhere(lambda each: setattr(each.properties, "layout", torch.sparse_coo)), True),
    "one has another shape": (lambda made: setattr(tensor(made), "size", torch.Size((1, 2, 3))), False),
    "one has no shape": (lambda made: setattr(tensor(made), "size", None), True),
    "all shapes are lists": (changed_everywhere(lambda each: setattr(each, "size", list(each.size))), False),
    "one has a negative size": (lambda made: setattr(tensor(made), "size", (-416, 1024)), True),
    "all have negative sizes": (changed_everywhere(lambda each: setattr(each, "size", (-1, 1))), True),
    "all have 60 dims": (changed_everywhere(lambda each: setattr(each, "size", torch.Size([1] * 60))), False),
    "one lacks a chunk": (lambda made: tensor(made).chunks.pop(), True),
    "all lack a chunk": (changed_everywhere(lambda each: each.chunks.pop()), True),
    "no chunks at all": (changed_everywhere(lambda each: each.chunks.clear()), True),
    "one chunk is twice there": (lambda made: tensor(made).chunks.append(tensor(made).chunks[0]), False),
    "all chunks are one": (lambda made: tensor(made).chunks.__setitem__(1, tensor(made).chunks[0]), True),
    "chunks of another": (lambda made: setattr(tensor(made), "chunks", tensor(made, OTHER).chunks), True),
    "a chunk without sizes": (lambda made: setattr(tensor(made).chunks[2], "sizes", None), True),
    "all without sizes": (changed_everywhere(lambda each: setattr(each.chunks[2], "sizes", None)), True),
    "one is shared": (lambda made: made.state_dict_metadata.__setitem__(ODD, tensor(made, OTHER)), True),
    "one is an object": (lambda made: made.state_dict_metadata.__setitem__(ODD, BytesStorageMetadata()), True),
    "one is a text": (lambda made: items(made).__setitem__(ODD, "text"), True),
    "one is gone": (lambda made: made.state_dict_metadata.pop(ODD), True),
    "one place is gone": (lambda made: made.storage_data.pop(next(iter(made.storage_data))), False),
    "one key is no text": (lambda made: items(made).__setitem__(7, tensor(made)), True),
    "no paths": (lambda made: setattr(made, "planner_data", None), False),
    "another path": (lambda made: made.planner_data.__setitem__(ODD, ("layers", ODD[7:])), False),
    "a path of another": (lambda made: made.planner_data.__setitem__(ODD, ("layers",)), True),
}  # fmt: skip


@pytest.mark.oracle
@pytest.mark.parametrize("name", CHANGES)
def test_what_is_odd_is_said_by_the_interpreter(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change, is_refused = CHANGES[name]
    made = model()
    change(made)
    _, refusals = both(tmp_path, monkeypatch, pickle.dumps(made, 4))
    assert bool(refusals) == is_refused, refusals


@pytest.mark.parametrize("objects", [False, True])
def test_a_key_twice(objects: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No dict has one, but a pickle may."""
    data = pickle.dumps(model(objects=objects), 4)
    for first, second in [((1, 50), (1, 51)), ((1, 10), (12, 10)), ((1, 0), (1, 9)), ((12, 118), (12, 119))]:
        one, other = (NAME.format(*each, "gate").encode() for each in (first, second))
        if len(one) != len(other):
            continue
        at = data.index(other)
        found, refusals = both(tmp_path, monkeypatch, data[:at] + one + data[at + len(one) :])
        assert found is None
        assert [each.code for each in refusals] == ["CORRUPT"]


@pytest.mark.oracle
@pytest.mark.parametrize("seed", range(8))
def test_damage(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is changed in such a pickle: it reads, or is refused, as it does without the scan."""
    chosen = random.Random(seed)
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "MODEL", dict(list(MODEL.items())[:75]))
        data = pickle.dumps(model(objects=seed % 2 == 1), 4 + seed % 2)
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
