"""What plain torch saved is read bit for bit: at world 1, 2 and 4, and in every form that `.metadata` has had."""

from __future__ import annotations

import pickle
import shutil
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

import transaxle as tx
from tests.engine.counting import counted
from tests.formats.dcp.conftest import Saved
from tests.formats.dcp.damage import METADATA, Damage, edit, read
from tests.formats.dcp.peers.truth import hold, truth_of
from tests.formats.dcp.peers.world import BY_WORLD, CHECKPOINT, FULL
from tests.formats.pickled.assemble import call, name
from tests.formats.refusals import refuses
from tests.move.filling import fill
from transaxle.axes.geometry import Shard, whole
from transaxle.formats.catalog import Extent
from transaxle.formats.detect import open_container
from transaxle.formats.training_state import LEFT_BEHIND, ROOT
from transaxle.move.transfer import Scratch

ALL = [(world, case.__name__) for world, cases in BY_WORLD.items() for case in cases]
every_case = pytest.mark.parametrize(("world", "case"), ALL, ids=[f"{case}-{world}" for world, case in ALL])


@every_case
def test_every_tensor(saved: Saved, world: int, case: str) -> None:
    place = saved(world) / case
    with tx.open(place / CHECKPOINT) as checkpoint:
        assert checkpoint.format == ("safetensors" if case in ("hf_consolidated", "hf_whole") else "dcp")
        hold(checkpoint, truth_of(place))
        assert tx.verify(checkpoint).ok
        container = checkpoint.container
        listed = {*container.files, *container.carried, *(name.rstrip("/") for name in container.ignored)}
        assert listed == {path.name for path in (place / CHECKPOINT).iterdir()}, "every file is accounted for"
        assert not container.carried


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", ["sharded", "as_safetensors", "hf_shards"])
def test_a_box_reads_its_own_bytes(saved: Saved, world: int, case: str) -> None:
    with tx.open(saved(world) / case / CHECKPOINT) as checkpoint:
        for name in ("rows", "columns", "last"):
            whole = checkpoint[name].read()
            size = whole.shape[0]
            for start in range(size):
                box = (slice(start, size), *(slice(0, None) for _ in whole.shape[1:]))
                part = checkpoint[name].read(box)
                assert np.array_equal(part.view(np.uint8), whole[start:].view(np.uint8))


NAMED = {
    "nested": ("model", set()),
    "app": ("app.model", set()),
    "titan": (None, {"lr_scheduler", "dataloader"}),
    "sharded": (None, {"note"}),
    "threaded": (None, set()),
}


@pytest.mark.parametrize("case", NAMED)
def test_what_is_taken_off_and_left_behind(saved: Saved, case: str) -> None:
    root, left = NAMED[case]
    metadata = tx.open(saved(2) / case / CHECKPOINT).metadata
    assert metadata.get(ROOT) == root
    assert set(metadata.get(LEFT_BEHIND, {})) == left


def test_cut_tensors_stay_in_their_chunks(saved: Saved) -> None:
    """A tensor of seven rows over four ranks: two, two, two and one."""
    entries = open_container(str(saved(4) / "sharded" / CHECKPOINT)).entries
    assert [extent.shape[0] for extent in entries["rows"].extents] == [2, 2, 2, 1]
    assert len({extent.file for extent in entries["rows"].extents}) == 4
    assert [extent.start for extent in entries["columns"].extents] == [(0, 0), (0, 3), (0, 6), (0, 9)]
    assert entries["empty"].extents == ()
    assert entries["transposed"].extents[0].strides == (1, 4)
    assert len(open_container(str(saved(4) / "meshed" / CHECKPOINT)).entries["both"].extents) == 4


def copy_of(case: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(case / CHECKPOINT, tmp_path / CHECKPOINT))


def flip_first_bit(folder: Path, extent: Extent) -> None:
    data = bytearray((folder / extent.file).read_bytes())
    data[extent.offset] ^= 1
    (folder / extent.file).write_bytes(data)


def test_ranks_that_do_not_agree(saved: Saved, tmp_path: Path) -> None:
    """Without coordination every rank saves what all of them hold; if one of them differs, nothing is converted."""
    source = copy_of(saved(2) / "uncoordinated", tmp_path)
    twin = next(twin for twin in open_container(str(source)).twins if twin.first.name == "replicated")
    tx.convert(source, tmp_path / "fine", to="safetensors:identity")
    flip_first_bit(source, *twin.second.extents)
    with refuses("UNEQUAL_COPIES", tensor="replicated"):
        tx.convert(source, tmp_path / "target", to="safetensors:identity")
    assert not (tmp_path / "target").exists()


def test_a_rank_that_is_missing(saved: Saved, tmp_path: Path) -> None:
    source = copy_of(saved(4) / "uncoordinated", tmp_path)
    (source / "__2.metadata").unlink()
    with refuses("INCOMPLETE", file="__2.metadata"):
        tx.open(source)


def test_chunks_of_packed_types(saved: Saved) -> None:
    """torch counts pairs; here every value counts."""
    entries = open_container(str(saved(1) / "freely" / CHECKPOINT)).entries
    assert entries["packed"].shape == (2, 12)
    assert [(part.start, part.shape) for part in entries["packed"].extents] == [((0, 0), (2, 8)), ((0, 8), (2, 4))]
    assert len(entries["pinwheel"].extents) == 5


def test_a_flipped_bit_is_seen_without_a_manifest(saved: Saved, tmp_path: Path) -> None:
    """torch writes checksums and never looks at them."""
    folder = copy_of(saved(2) / "sharded", tmp_path)
    assert tx.verify(folder).ok
    flip_first_bit(folder, open_container(str(folder)).entries["rows"].extents[0])
    found = tx.verify(folder)
    assert not found.ok
    assert found.problems[0].code == "CORRUPT"


def test_one_shard_under_another_name_is_no_checkpoint(saved: Saved, tmp_path: Path) -> None:
    """A part of a tensor must not pass for the tensor."""
    shard = saved(2) / "hf_shards" / CHECKPOINT / "shard-00002-model-00001-of-00001.safetensors"
    shutil.copy(shard, tmp_path / "model.safetensors")
    with refuses("INCOMPLETE"):
        tx.open(tmp_path)
    with tx.open(shard) as checkpoint:
        hold(checkpoint, truth_of(shard.parent.parent))


def test_one_rank_of_three_reads_its_third(saved: Saved) -> None:
    """Four chunks of rows, read by each rank of three: no more than five percent beyond its own bytes."""
    checkpoint, counting = counted(tx.open(saved(4) / "sharded" / CHECKPOINT))
    stored = checkpoint["rows"]
    rows, columns = stored.shape
    for rank in range(3):
        held = Shard()(whole(rows), 3, rank)
        transfers = stored.transfers([held, whole(columns)])
        wanted = FULL["rows"][held[0][0] : held[0][1]].numpy()
        counting.bytes = 0
        got = np.empty(wanted.nbytes, np.uint8)
        for transfer in transfers:
            fill(counting, transfer, got, 0, Scratch(1 << 16))
        assert got.tobytes() == wanted.tobytes()
        assert counting.bytes <= 1.05 * wanted.nbytes


# The forms that `.metadata` has had: older torch, older Python, other planners, other places for the same classes.

MODULE = "torch.distributed.checkpoint.metadata"
OLD_PROPERTIES = "torch.distributed._shard.sharded_tensor.metadata"
OLD_PACKAGE = "torch.distributed._shard.checkpoint"


def renamed(*pairs: tuple[bytes, bytes]) -> Damage:
    """Rename globals; pickles of protocol 2 hold their names in lines."""

    def change(folder: Path) -> None:
        data = pickle.dumps(read(folder), protocol=2)
        for old, new in pairs:
            assert old in data
            data = data.replace(old, new)
        (folder / METADATA).write_bytes(data)

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


def _lists(metadata: Any) -> None:
    for item in metadata.state_dict_metadata.values():
        for chunk in getattr(item, "chunks", ()):
            chunk.offsets, chunk.sizes = list(chunk.offsets), list(chunk.sizes)


def _pickled(folder: Path, protocol: int) -> None:
    (folder / METADATA).write_bytes(pickle.dumps(read(folder), protocol=protocol))


def _by_name(folder: Path) -> None:
    metadata = read(folder)
    data, named = pickle.dumps(metadata, protocol=2), line(MODULE, "_MEM_FORMAT_ENCODING")
    at = data.index(named)
    end = data.index(b"R", at + len(named)) + 1
    (folder / METADATA).write_bytes(data[:at] + MEMBER + data[end:])
    assert read(folder) == metadata


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
    "another planner": edit(lambda m: setattr(m, "planner_data", {"mine": 1, "rows": "not a path"})),
    "lists for sizes": edit(_lists),
    "a path of nothing": edit(lambda m: m.planner_data.update(rows=())),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_every_form(saved: Saved, tmp_path: Path, form: Damage) -> None:
    folder = copy_of(saved(2) / "sharded", tmp_path)
    form(folder)
    with tx.open(folder) as checkpoint:
        hold(checkpoint, truth_of(saved(2) / "sharded"))


def test_plans_of_all_ranks_beside_the_metadata(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron keeps them there; up to Python 3.11.3 the members of their enums were pickled by name."""
    plans = [SavePlan([WriteItem(MetadataIndex("x"), kind) for kind in WriteItemType])]
    monkeypatch.setattr(Enum, "__reduce_ex__", lambda member, _: (getattr, (type(member), member.name)))
    test_every_form(saved, tmp_path, edit(lambda m: setattr(m, "all_local_plans", plans)))


def test_an_optimizer_is_known_by_its_keys(saved: Saved, tmp_path: Path) -> None:
    """Without paths the keys must do; only the model's own root then stays in its names."""
    place = saved(2) / "nested"
    folder = copy_of(place, tmp_path)
    edit(_unplanned)(folder)
    truth = {key if key.startswith("optim/") else f"model.{key}": tensor for key, tensor in truth_of(place).items()}
    with tx.open(folder) as checkpoint:
        hold(checkpoint, truth)
