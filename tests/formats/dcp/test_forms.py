"""The forms that `.metadata` has had: older torch, older Python, other planners, other places for the same classes."""

from __future__ import annotations

import pickle
import shutil
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

import transaxle as tx
from tests.formats.dcp.conftest import Saved
from tests.formats.dcp.damage import METADATA, Damage, edit
from tests.formats.dcp.peers.truth import hold, truth_of
from tests.formats.dcp.peers.world import CHECKPOINT
from tests.formats.pickled.assemble import call, name

MODULE = "torch.distributed.checkpoint.metadata"
OLD_PROPERTIES = "torch.distributed._shard.sharded_tensor.metadata"
OLD_PACKAGE = "torch.distributed._shard.checkpoint"


def renamed(*pairs: tuple[bytes, bytes]) -> Damage:
    """Rename globals; pickles of protocol 2 hold their names in lines."""

    def change(folder: Path) -> None:
        file = folder / METADATA
        data = pickle.dumps(pickle.loads(file.read_bytes()), protocol=2)  # noqa: S301 - our own
        for old, new in pairs:
            assert old in data
            data = data.replace(old, new)
        file.write_bytes(data)

    return change


def without(*fields: str) -> Damage:
    def forget(metadata: Any) -> None:
        for field in fields:
            delattr(metadata, field)

    return edit(forget)


def line(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def _unplanned(metadata: Any) -> None:
    metadata.planner_data = None


def _own_planner(metadata: Any) -> None:
    metadata.planner_data = {"mine": 1, "rows": "not a path"}


def _lists(metadata: Any) -> None:
    for item in metadata.state_dict_metadata.values():
        for chunk in getattr(item, "chunks", ()):
            chunk.offsets, chunk.sizes = list(chunk.offsets), list(chunk.sizes)


def _pickled(folder: Path, protocol: int) -> None:
    file = folder / METADATA
    file.write_bytes(pickle.dumps(pickle.loads(file.read_bytes()), protocol=protocol))  # noqa: S301 - our own


def _by_name(folder: Path) -> None:
    file = folder / METADATA
    metadata = pickle.loads(file.read_bytes())  # noqa: S301 - our own
    data = pickle.dumps(metadata, protocol=2)
    named = line(MODULE, "_MEM_FORMAT_ENCODING")
    at = data.index(named)
    end = data.index(b"R", at + len(named)) + 1
    file.write_bytes(data[:at] + MEMBER + data[end:])
    assert pickle.loads(file.read_bytes()) == metadata  # noqa: S301 - our own


MEMBER = call("builtins", "getattr", name(MODULE, "_MEM_FORMAT_ENCODING"), "TORCH_CONTIGUOUS_FORMAT")
FORMS: dict[str, Damage] = {
    "protocol 1": lambda folder: _pickled(folder, 1),
    "protocol 2": lambda folder: _pickled(folder, 2),
    "protocol 5": lambda folder: _pickled(folder, 5),
    "before 2.3": without("storage_meta", "version"),
    "before 2.3: properties of sharded tensors": renamed(
        (line(MODULE, "TensorProperties"), line(OLD_PROPERTIES, "TensorProperties")),
        (line(MODULE, "_MEM_FORMAT_ENCODING"), line(OLD_PROPERTIES, "MEM_FORMAT_ENCODING")),
    ),
    "before 2.0": renamed(
        (MODULE.encode(), f"{OLD_PACKAGE}.metadata".encode()),
        (b"torch.distributed.checkpoint.filesystem", f"{OLD_PACKAGE}.filesystem".encode()),
        (line(f"{OLD_PACKAGE}.metadata", "TensorProperties"), line(OLD_PROPERTIES, "TensorProperties")),
        (line(f"{OLD_PACKAGE}.metadata", "_MEM_FORMAT_ENCODING"), line(OLD_PROPERTIES, "MEM_FORMAT_ENCODING")),
    ),
    "members of an Enum by name, as Python 3.11.0 has it": _by_name,
    "paths of Python 3.13": renamed((b"cpathlib\nPosixPath\n", b"cpathlib._local\nPosixPath\n")),
    "paths in text": edit(lambda m: setattr(m.storage_meta, "checkpoint_id", "s3://bucket/step-1")),
    "no planner": edit(_unplanned),
    "another planner": edit(_own_planner),
    "lists for sizes": edit(_lists),
    "a path of nothing": edit(lambda m: m.planner_data.update(rows=())),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_every_form(saved: Saved, tmp_path: Path, form: Damage) -> None:
    place = saved(2) / "sharded"
    folder = tmp_path / CHECKPOINT
    shutil.copytree(place / CHECKPOINT, folder)
    form(folder)
    with tx.open(folder) as checkpoint:
        hold(checkpoint, truth_of(place))


def test_plans_of_all_ranks_beside_the_metadata(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron keeps them there; up to Python 3.11.3 the members of their enums were pickled by name."""
    place = saved(2) / "sharded"
    folder = tmp_path / CHECKPOINT
    shutil.copytree(place / CHECKPOINT, folder)
    plans = [SavePlan([WriteItem(MetadataIndex("x"), kind) for kind in WriteItemType])]
    monkeypatch.setattr(Enum, "__reduce_ex__", lambda member, _: (getattr, (type(member), member.name)))
    edit(lambda m: setattr(m, "all_local_plans", plans))(folder)
    with tx.open(folder) as checkpoint:
        hold(checkpoint, truth_of(place))


def test_an_optimizer_is_known_by_its_keys(saved: Saved, tmp_path: Path) -> None:
    """Without paths the keys must do; only the model's own root then stays in its names."""
    place = saved(2) / "nested"
    folder = tmp_path / CHECKPOINT
    shutil.copytree(place / CHECKPOINT, folder)
    edit(_unplanned)(folder)
    truth = {key if key.startswith("optim/") else f"model.{key}": tensor for key, tensor in truth_of(place).items()}
    with tx.open(folder) as checkpoint:
        hold(checkpoint, truth)
