"""Archives of many chunks that are recognised together: what is read, and refused, is the same as one by one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.formats.dcp.damage import archive
from transaxle.errors import TransaxleError
from transaxle.formats.catalog import Container, Spec
from transaxle.formats.dcp import payload
from transaxle.formats.dcp.draft import ChunkPlace, TorchTensor, metadata_of
from transaxle.formats.dcp.metadata import METADATA, Payload
from transaxle.formats.dcp.reader import open_dcp
from transaxle.formats.pickled.descriptors import DType
from transaxle.formats.pickled.writer import write_pickle
from transaxle.formats.storage.local import LocalStorage

FILE, OTHER_FILE = "__0_0.distcp", "__1_0.distcp"
LAYERS, EXPERTS = 3, 20
COUNT = LAYERS * EXPERTS


def parts() -> list[bytes]:
    """An archive for each expert; those of the last layer are transposed."""
    torch.manual_seed(0)
    values = torch.randn(LAYERS, EXPERTS, 4, 6)
    last = [each.t().contiguous().t().reshape(1, 1, 4, 6) for each in values[-1]]
    return [archive(each[None, None].clone()) for each in values[:-1].flatten(0, 1)] + [archive(each) for each in last]


def written(
    folder: Path,
    archives: list[bytes],
    gaps: dict[int, int] | None = None,
    past_end: int = 0,
    *,
    each_a_tensor: bool = False,
) -> Path:
    """Write a folder of one tensor.

    Args:
        folder: where.
        archives: one a chunk.
        gaps: number of a chunk -> bytes before it; negative: it begins in the one before.
        past_end: bytes of the last one that are missing.
        each_a_tensor: each chunk is a tensor of its own, and in two files they lie in turns.
    """
    if each_a_tensor:
        return _written_apart(folder, archives, gaps or {}, past_end)
    shape, chunks, data = (LAYERS, EXPERTS, 4, 6), [], bytearray()
    for at, part in enumerate(archives):
        gap = (gaps or {}).get(at, 0)
        begin = len(data) + gap
        data += bytes(max(gap, 0)) + part[max(-gap, 0) :]
        start = (at // EXPERTS, at % EXPERTS, 0, 0)
        chunks.append(ChunkPlace(start, (1, 1, 4, 6), Payload(FILE, begin, len(part))))
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_bytes(data[: len(data) - past_end])
    tensor = TorchTensor(Spec("weight", "F32", shape), ("weight",), DType("float32"), shape, 0)
    (folder / METADATA).write_bytes(write_pickle(metadata_of([(tensor, chunks)], [])))
    return folder


def _written_apart(folder: Path, archives: list[bytes], gaps: dict[int, int], past_end: int) -> Path:
    data, tensors = {FILE: bytearray(), OTHER_FILE: bytearray()}, []
    for at, part in enumerate(archives):
        file, gap = (FILE, OTHER_FILE)[at % 2], gaps.get(at, 0)
        begin = len(data[file]) + gap
        data[file] += bytes(max(gap, 0)) + part[max(-gap, 0) :]
        name, shape = f"experts.{at}", (1, 1, 4, 6)
        tensor = TorchTensor(Spec(name, "F32", shape), (name,), DType("float32"), shape, 0)
        tensors.append((tensor, [ChunkPlace((0, 0, 0, 0), shape, Payload(file, begin, len(part)))]))
    folder.mkdir(exist_ok=True)
    for file, text in data.items():
        (folder / file).write_bytes(text[: len(text) - past_end])
    (folder / METADATA).write_bytes(write_pickle(metadata_of(tensors, [])))
    return folder


def read(folder: Path) -> Container | list[str]:
    storage = LocalStorage(folder)
    try:
        return open_dcp(storage, str(folder), METADATA)
    except TransaxleError as error:
        return [str(each) for each in error.refusals]
    finally:
        storage.close()


def both(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Container | list[str]:
    together = read(folder)
    with monkeypatch.context() as patch:
        patch.setattr(payload, "_MIN_BATCH", COUNT + 1)
        one_by_one = read(folder)
    if isinstance(together, Container) and isinstance(one_by_one, Container):
        assert together.entries == one_by_one.entries
        assert together.checksums == one_by_one.checksums
        assert len(together.checksums) == COUNT
    else:
        assert together == one_by_one
    return together


def damaged(folder: Path, archives: list[bytearray], apart: bool) -> Path:
    return written(folder, [bytes(each) for each in archives], each_a_tensor=apart)


@pytest.fixture(params=[False, True], ids=["one tensor", "many tensors"])
def apart(request: pytest.FixtureRequest) -> bool:
    """Whether each archive is a tensor of its own."""
    return bool(request.param)


@pytest.mark.parametrize("block", [payload._BLOCK, 5000])
@pytest.mark.parametrize("whole", [payload._MAX_WHOLE_READ, 1000])
def test_as_they_are(block: int, whole: int, apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "_BLOCK", block)
    monkeypatch.setattr(payload, "_MAX_WHOLE_READ", whole)
    alone: list[Payload] = []
    match = payload.Stencils.match
    with monkeypatch.context() as patch:

        def counting(own: payload.Stencils[object], place: Payload) -> payload.Match[object] | None:
            alone.append(place)
            return match(own, place)

        patch.setattr(payload.Stencils, "match", counting)
        assert isinstance(read(written(tmp_path / "a", parts(), each_a_tensor=apart)), Container)
    assert apart or len(alone) < COUNT / 2
    for number, gaps in enumerate([{}, {5: 100, 30: 100_000}, {7: 3}]):
        folder = written(tmp_path / str(number), parts(), gaps, each_a_tensor=apart)
        assert isinstance(both(folder, monkeypatch), Container)


def test_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where archives lie in a file need not be in the order of the tensors."""
    folder, offset = written(tmp_path, parts()), 0
    lengths = [len(part) for part in parts()]
    places = []
    for length in lengths:
        places.append(Payload(FILE, offset, length))
        offset += length
    random.Random(0).shuffle(places)
    tensors = []
    for at, place in enumerate(places):
        shape = (1, 1, 4, 6)
        tensor = TorchTensor(Spec(f"experts.{at}", "F32", shape), (f"experts.{at}",), DType("float32"), shape, 0)
        tensors.append((tensor, [ChunkPlace((0, 0, 0, 0), shape, place)]))
    (folder / METADATA).write_bytes(write_pickle(metadata_of(tensors, [])))
    for whole in (payload._MAX_WHOLE_READ, 1000):
        monkeypatch.setattr(payload, "_MAX_WHOLE_READ", whole)
        assert isinstance(both(folder, monkeypatch), Container)


def test_overlaps_and_ends(apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overlapping = written(tmp_path / "overlap", parts(), {9: -1}, each_a_tensor=apart)
    assert isinstance(both(overlapping, monkeypatch), list)
    found = both(written(tmp_path / "cut", parts(), past_end=10, each_a_tensor=apart), monkeypatch)
    assert isinstance(found, list)
    assert "lie outside the file" in found[0]


@pytest.mark.oracle
@pytest.mark.parametrize("whole", [payload._MAX_WHOLE_READ, 1000])
def test_flipped_bits(whole: int, apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever archives are damaged, one by one the same is said of them."""
    monkeypatch.setattr(payload, "_MAX_WHOLE_READ", whole)
    chosen = random.Random(0)
    refused = 0
    for _ in range(30):
        archives = [bytearray(each) for each in parts()]
        for _ in range(chosen.choice((1, 1, 3, 30))):
            which = chosen.choice(archives)
            which[chosen.randrange(len(which))] ^= 1 << chosen.randrange(8)
        refused += isinstance(both(damaged(tmp_path, archives, apart), monkeypatch), list)
    assert 5 < refused < 30


def test_others_of_the_same_length(apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Archives of other tensors, or of none, among those alike."""
    archives = parts()
    for at, other in ((12, torch.zeros(1, 1, 6, 4)), (13, torch.zeros(1, 1, 4, 6, dtype=torch.int32)), (40, 7)):
        made = archive(other)
        padded = [*archives[:at], made + bytes(len(archives[at]) - len(made)), *archives[at + 1 :]]
        assert isinstance(both(written(tmp_path, padded, each_a_tensor=apart), monkeypatch), list)
    exchanged = [*archives[:10], *[archive(torch.zeros(1, 1, 6, 4))] * 20, *archives[30:]]
    assert isinstance(both(written(tmp_path, exchanged, each_a_tensor=apart), monkeypatch), list)
