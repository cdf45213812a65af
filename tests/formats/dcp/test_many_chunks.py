"""Descriptions of many chunks: the scan reads and refuses what the interpreter does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from transaxle.errors import Faults, Refusal
from transaxle.formats.catalog import Spec
from transaxle.formats.dcp import metadata
from transaxle.formats.dcp.draft import ChunkPlace, ChunksByTensor, ObjectPlaces, TorchTensor, metadata_of
from transaxle.formats.dcp.metadata import METADATA, Payload, SavedItem, read_metadata
from transaxle.formats.pickled.descriptors import DType, Global, Object
from transaxle.formats.pickled.scan import Unread
from transaxle.formats.pickled.writer import write_pickle
from transaxle.formats.storage.local import LocalStorage

LAYERS, EXPERTS = 2, 300
SIZE = Global("torch", "Size")
STORED, INDEX = "storage_data", "offset"
Change = Callable[[dict[str, Any]], object]


def described(*, with_paths: bool = True) -> Object:
    """Two tensors of a chunk for each expert and half, and an object for each of them."""
    tensors: ChunksByTensor = []
    for number, name in enumerate(("fc1.weight", "fc2.weight")):
        shape = (LAYERS, EXPERTS, 4096, 8)
        starts = [
            (layer, expert, half * 2048, 0) for layer in range(LAYERS) for expert in range(EXPERTS) for half in (0, 1)
        ]
        chunks = [
            ChunkPlace(start, (1, 1, 2048, 8), Payload(f"__0_{number}.distcp", at * 70_000_000, 65536 + 1000))
            for at, start in enumerate(starts)
        ]
        tensors.append((TorchTensor(Spec(name, "F32", shape), (name,), DType("float32"), shape, 0), chunks))
    objects: ObjectPlaces = [
        ((f"fc1._extra_state/shard_{at}",), Payload("__0_0.distcp", 10**12, 1500)) for at in range(EXPERTS)
    ]
    made = metadata_of(tensors, objects, with_paths=with_paths)
    assert isinstance(made.state, dict)
    for name in ("state_dict_metadata", "storage_data"):
        made.state[name] = dict(made.state[name].parts)
    for item in made.state["state_dict_metadata"].values():
        if isinstance(item.state, dict):
            item.state["chunks"] = list(item.state["chunks"].parts)
    return made


def read(folder: Path, made: Object) -> tuple[list[SavedItem] | None, list[Refusal]]:
    (folder / METADATA).write_bytes(write_pickle(made))
    faults = Faults()
    items = read_metadata(LocalStorage(folder), METADATA, faults)
    return items, list(faults.error().refusals) if faults else []


def by_the_interpreter(patch: pytest.MonkeyPatch) -> None:
    """Let metadata be read as where there was no compiler."""

    def unread(*_: object) -> None:
        raise Unread

    patch.setattr(metadata, "scanned", unread)


def by_the_scan(patch: pytest.MonkeyPatch) -> None:
    """Let metadata be read by the scan, or not at all."""

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("the scan does not read it")

    patch.setattr(metadata, "read_pickle", refused)


def both(folder: Path, monkeypatch: pytest.MonkeyPatch, change: Change) -> tuple[list[SavedItem] | None, list[Refusal]]:
    made = described()
    assert isinstance(made.state, dict)
    change(made.state)
    fast = read(folder, made)
    with monkeypatch.context() as patch:
        by_the_interpreter(patch)
        assert fast == read(folder, made)
    return fast


@pytest.mark.parametrize("with_paths", [False, True])
def test_they_are_read_by_the_scan(with_paths: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_the_scan(monkeypatch)
    items, refusals = read(tmp_path, described(with_paths=with_paths))
    assert not refusals
    assert items is not None
    chunks = [chunk for item in items for chunk in item.chunks]
    assert len(chunks) == 4 * LAYERS * EXPERTS
    assert all(chunk.payload is not None for chunk in chunks)
    assert sum(item.payload is not None for item in items) == EXPERTS


def test_without_paths_each_key_is_its_own(tmp_path: Path) -> None:
    bare = described(with_paths=False)
    assert isinstance(bare.state, dict)
    assert bare.state["planner_data"] is None
    items, refusals = read(tmp_path, bare)
    assert not refusals
    assert items == read(tmp_path, described())[0]
    del bare.state[STORED][[*bare.state[STORED]][-1]]
    _, (refusal,) = read(tmp_path, bare)
    assert (refusal.code, refusal.where.tensor) == ("INCOMPLETE", f"fc1._extra_state/shard_{EXPERTS - 1}")


def place_of(state: dict[str, Any], number: int) -> tuple[Object, Object]:
    found: tuple[Object, Object] = list(state[STORED].items())[number]
    return found


def setting(number: int, which: int, **fields: Any) -> Change:
    """Change fields of the index (0) or of the place (1) of one part."""
    return lambda state: place_of(state, number)[which].state.update(fields)  # type: ignore[attr-defined]


def everywhere(which: int, **fields: Any) -> Change:
    def change(state: dict[str, Any]) -> None:
        for pair in state[STORED].items():
            pair[which].state.update(fields)

    return change


def chunk(number: int, **fields: Any) -> Change:
    return lambda state: state["state_dict_metadata"]["fc1.weight"].state["chunks"][number].state.update(fields)


def all_chunks(**fields: Any) -> Change:
    def change(state: dict[str, Any]) -> None:
        for each in state["state_dict_metadata"]["fc2.weight"].state["chunks"]:
            each.state.update(fields)

    return change


def size(*counts: int) -> Object:
    return Object(SIZE, (counts,))


CHANGES: dict[str, tuple[Change, bool]] = {
    "as it is": (lambda _: None, False),
    "stored twice": (setting(700, 0, offset=size(0, 10, 0, 0)), True),
    "stored twice in a run": (setting(701, 0, offset=size(1, 49, 0, 0)), True),
    "all in one place": (everywhere(0, offset=size(0, 0, 0, 0)), True),
    "under a key without description": (setting(900, 0, fqn="nothing"), True),
    "all under a key without description": (everywhere(0, fqn="nothing"), True),
    "key is no text": (setting(900, 0, fqn=7), True),
    "keys are no texts": (everywhere(0, fqn=None), True),
    "place is negative": (setting(900, 1, offset=-1), True),
    "places are negative": (everywhere(1, length=-1), True),
    "places are no numbers": (everywhere(1, offset=None), True),
    "places are true": (everywhere(1, offset=True), True),
    "bytes are transformed": (everywhere(1, transform_descriptors=["zip"]), True),
    "one is transformed": (setting(900, 1, transform_descriptors=["zip"]), True),
    "file is no text": (everywhere(1, relative_path=None), True),
    "offsets of another rank": (everywhere(0, offset=size(1)), True),
    "offset is a number": (everywhere(0, offset=1), True),
    "another file": (setting(900, 1, relative_path="other"), False),
    "chunk elsewhere": (chunk(800, offsets=size(3, 3, 3, 3)), True),
    "chunk is malformed": (chunk(800, sizes=None), True),
    "chunks are malformed": (all_chunks(sizes=5), True),
    "chunks of another size": (all_chunks(sizes=size(2, 2)), False),
    "chunks with more fields": (all_chunks(more=(1, "a", None)), False),
    "chunks with a list": (all_chunks(offsets=[1, 2]), True),
}  # fmt: skip


@pytest.mark.oracle
@pytest.mark.parametrize("name", CHANGES)
def test_the_same_as_by_the_interpreter(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change, is_refused = CHANGES[name]
    _, refusals = both(tmp_path, monkeypatch, change)
    assert bool(refusals) == is_refused
