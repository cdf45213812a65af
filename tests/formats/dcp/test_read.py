"""What plain torch saved, at world 1, 2 and 4, is read bit for bit: held to tensors gathered beside it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import transaxle as tx
from tests.engine.counting import counted
from tests.formats.dcp.conftest import Saved
from tests.formats.dcp.peers.truth import hold, truth_of
from tests.formats.dcp.peers.world import BY_WORLD, CHECKPOINT, FULL
from tests.move.filling import fill
from transaxle.axes.geometry import Shard, whole
from transaxle.errors import Refused
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


def test_ranks_that_do_not_agree(saved: Saved, tmp_path: Path) -> None:
    """Without coordination every rank saves what all of them hold; if one of them differs, nothing is converted."""
    source = tmp_path / "source"
    shutil.copytree(saved(2) / "uncoordinated" / CHECKPOINT, source)
    container = open_container(str(source))
    twin = next(twin for twin in container.twins if twin.first.name == "replicated")
    tx.convert(source, tmp_path / "fine", to="safetensors:identity")
    (extent,) = twin.second.extents
    file = source / extent.file
    data = bytearray(file.read_bytes())
    data[extent.offset] ^= 1
    file.write_bytes(data)
    with pytest.raises(Refused) as caught:
        tx.convert(source, tmp_path / "target", to="safetensors:identity")
    assert caught.value.code == "UNEQUAL_COPIES"
    assert caught.value.where.tensor == "replicated"
    assert not (tmp_path / "target").exists()


def test_a_rank_that_is_missing(saved: Saved, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(saved(4) / "uncoordinated" / CHECKPOINT, source)
    (source / "__2.metadata").unlink()
    with pytest.raises(Refused) as caught:
        tx.open(source)
    assert (caught.value.code, caught.value.where.file) == ("INCOMPLETE", "__2.metadata")


def test_chunks_of_packed_types(saved: Saved) -> None:
    """torch counts pairs; here every value counts."""
    entries = open_container(str(saved(1) / "freely" / CHECKPOINT)).entries
    assert entries["packed"].shape == (2, 12)
    assert [(part.start, part.shape) for part in entries["packed"].extents] == [((0, 0), (2, 8)), ((0, 8), (2, 4))]
    assert len(entries["pinwheel"].extents) == 5


def test_a_flipped_bit_is_seen_without_a_manifest(saved: Saved, tmp_path: Path) -> None:
    """torch writes checksums and never looks at them."""
    folder = tmp_path / CHECKPOINT
    shutil.copytree(saved(2) / "sharded" / CHECKPOINT, folder)
    assert tx.verify(folder).ok
    (extent, *_) = open_container(str(folder)).entries["rows"].extents
    file = folder / extent.file
    data = bytearray(file.read_bytes())
    data[extent.offset] ^= 1
    file.write_bytes(data)
    found = tx.verify(folder)
    assert not found.ok
    assert found.problems[0].code == "CORRUPT"


def test_one_shard_under_another_name_is_no_checkpoint(saved: Saved, tmp_path: Path) -> None:
    """A part of a tensor must not pass for the tensor."""
    shards = saved(2) / "hf_shards" / CHECKPOINT
    shutil.copy(shards / "shard-00002-model-00001-of-00001.safetensors", tmp_path / "model.safetensors")
    with pytest.raises(Refused) as caught:
        tx.open(tmp_path)
    assert caught.value.code == "INCOMPLETE"
    with tx.open(shards / "shard-00002-model-00001-of-00001.safetensors") as checkpoint:
        hold(checkpoint, truth_of(shards.parent))


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
