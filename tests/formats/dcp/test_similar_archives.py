"""Similar archives are matched with ones read before: what is read and refused is the same as by strict reading."""

from __future__ import annotations

import random
import struct
import zlib
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
from transaxle.formats.storage.storage import Storage
from transaxle.formats.torch_file.saved import Saved, read_saved

FILES = "__0_0.distcp", "__0_1.distcp"
LAYERS, EXPERTS = 3, 20
COUNT = LAYERS * EXPERTS
SHAPE = (1, 1, 4, 6)


def archives() -> list[bytes]:
    """One archive for each expert; those of the last layer are torch's transposed views."""
    values = torch.arange(COUNT * 24, dtype=torch.float32).reshape(LAYERS, EXPERTS, 4, 6)
    last = [each.t().contiguous().t().reshape(SHAPE) for each in values[-1]]
    return [archive(each[None, None].clone()) for each in values[:-1].flatten(0, 1)] + [archive(each) for each in last]


def write(
    folder: Path, parts: list[bytes], gaps: dict[int, int] | None = None, past_end: int = 0, *, apart: bool = False
) -> Path:
    """Write a DCP folder.

    Args:
        folder: where to.
        parts: the archive of each chunk.
        gaps: bytes before a chunk, by its number.
        past_end: number of bytes that are missing at the end of each file.
        apart: make each chunk a tensor of its own, in two files in turns.
    """
    data = [bytearray() for _ in FILES]
    places = []
    for at, part in enumerate(parts):
        number, gap = (at % 2 if apart else 0), (gaps or {}).get(at, 0)
        places.append(Payload(FILES[number], len(data[number]) + gap, len(part)))
        data[number] += bytes(gap) + part
    folder.mkdir(exist_ok=True)
    for name, text in zip(FILES, data, strict=True):
        (folder / name).write_bytes(text[: max(len(text) - past_end, 0)])
    return describe(folder, places, apart=apart)


def describe(folder: Path, places: list[Payload], *, apart: bool) -> Path:
    if apart:
        tensors = [
            (_tensor(f"experts.{at}", SHAPE), [ChunkPlace((0, 0, 0, 0), SHAPE, place)])
            for at, place in enumerate(places)
        ]
    else:
        starts = [(at // EXPERTS, at % EXPERTS, 0, 0) for at in range(COUNT)]
        chunks = [ChunkPlace(start, SHAPE, place) for start, place in zip(starts, places, strict=True)]
        tensors = [(_tensor("weight", (LAYERS, EXPERTS, 4, 6)), chunks)]
    (folder / METADATA).write_bytes(write_pickle(metadata_of(tensors, [])))
    return folder


def _tensor(name: str, shape: tuple[int, ...]) -> TorchTensor:
    return TorchTensor(Spec(name, "F32", shape), (name,), DType("float32"), shape, 0)


def read(folder: Path) -> Container | list[str]:
    storage = LocalStorage(folder)
    try:
        return open_dcp(storage, str(folder), METADATA)
    except TransaxleError as error:
        return [str(each) for each in error.refusals]
    finally:
        storage.close()


def read_each_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Container | list[str]:
    """Read a folder with archives matched in batches, one by one, and not at all: with the same outcome."""
    batched = read(folder)
    with monkeypatch.context() as patch:
        patch.setattr(payload, "_MIN_BATCH", COUNT + 1)
        singly = read(folder)
        patch.setattr(payload.Stencils, "match", lambda *_: None)
        strictly = read(folder)
    for other in (singly, strictly):
        if isinstance(batched, Container) and isinstance(other, Container):
            assert batched.entries == other.entries
            assert batched.checksums == other.checksums
            assert len(batched.checksums) == COUNT
        else:
            assert batched == other
    return batched


@pytest.fixture(params=[False, True], ids=["one tensor", "many tensors"])
def apart(request: pytest.FixtureRequest) -> bool:
    """Whether each archive is a tensor of its own."""
    return bool(request.param)


@pytest.mark.parametrize("block", [payload._BLOCK, 5000])
@pytest.mark.parametrize("whole", [payload._MAX_WHOLE_READ, 1000])
def test_good_archives(block: int, whole: int, apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "_BLOCK", block)
    monkeypatch.setattr(payload, "_MAX_WHOLE_READ", whole)
    strict: list[str] = []

    def count(storage: Storage, file: str, begin: int, size: int) -> Saved:
        strict.append(file)
        return read_saved(storage, file, begin, size)

    with monkeypatch.context() as patch:
        patch.setattr(payload, "read_saved", count)
        assert isinstance(read(write(tmp_path / "a", archives(), apart=apart)), Container)
    assert len(strict) < COUNT / 2, "most archives are matched"
    for number, gaps in enumerate([{}, {5: 100, 30: 100_000}, {7: 3}]):
        folder = write(tmp_path / str(number), archives(), gaps, apart=apart)
        assert isinstance(read_each_way(folder, monkeypatch), Container)
    places = [Payload(FILES[0], at * 10_000, len(each)) for at, each in enumerate(archives())]
    random.Random(0).shuffle(places)  # archives need not be in the order of the tensors
    (tmp_path / "a" / FILES[0]).write_bytes(b"".join(each.ljust(10_000, b"\0") for each in archives()))
    assert isinstance(read_each_way(describe(tmp_path / "a", places, apart=True), monkeypatch), Container)


def test_overlaps_and_ends(apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = archives()
    places = [Payload(FILES[0], at * 10_000, len(part)) for at, part in enumerate(parts)]
    places[9] = places[8]
    folder = write(tmp_path, [part.ljust(10_000, b"\0") for part in parts])
    found = read_each_way(describe(folder, places, apart=apart), monkeypatch)
    assert isinstance(found, list)
    assert "overlap those of" in found[0]
    found = read_each_way(write(tmp_path / "cut", parts, past_end=10, apart=apart), monkeypatch)
    assert isinstance(found, list)
    assert "lie outside the file" in found[0]


def test_checksums_that_differ(apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy of the checksum that one archive records of its tensor."""
    parts = archives()
    part = parts[17]
    values = torch.arange(17 * 24, 18 * 24, dtype=torch.float32).numpy().tobytes()
    copy = struct.pack("<I", zlib.crc32(values))
    assert part.count(copy) == 2
    for at in (part.find(copy), part.rfind(copy)):
        changed = part[:at] + bytes([part[at] ^ 1]) + part[at + 1 :]
        folder = write(tmp_path, [*parts[:17], changed, *parts[18:]], apart=apart)
        assert isinstance(read_each_way(folder, monkeypatch), list)


@pytest.mark.oracle
@pytest.mark.parametrize("seed", range(8))
def test_flipped_bits(seed: int, apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "_MAX_WHOLE_READ", (payload._MAX_WHOLE_READ, 1000)[seed % 2])
    chosen = random.Random(seed)
    for _ in range(8):
        parts = [bytearray(each) for each in archives()]
        for _ in range(chosen.choice((1, 1, 3, 30))):
            which = chosen.choice(parts)
            which[chosen.randrange(len(which))] ^= 1 << chosen.randrange(8)
        read_each_way(write(tmp_path, [bytes(each) for each in parts], apart=apart), monkeypatch)


@pytest.mark.oracle
@pytest.mark.parametrize("first", range(8))
def test_every_byte_of_an_archive(first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits of one archive that are flipped in turn are noticed, or are those of the tensor or the serial number."""
    parts = archives()
    for at in range(first, len(parts[1]), 8 * 13):
        flipped = parts[1][:at] + bytes([parts[1][at] ^ 1 << at % 8]) + parts[1][at + 1 :]
        read_each_way(write(tmp_path, [parts[0], flipped, *parts[2:]]), monkeypatch)


def test_others_of_the_same_length(apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Archives of other tensors, or of none, among similar ones."""
    parts = archives()
    others = torch.zeros(1, 1, 6, 4), torch.zeros(SHAPE, dtype=torch.int32), torch.zeros(24), 7
    for at, other in zip((12, 13, 14, 40), others, strict=True):
        data = archive(other)
        padded = [*parts[:at], data + bytes(len(parts[at]) - len(data)), *parts[at + 1 :]]
        assert isinstance(read_each_way(write(tmp_path, padded, apart=apart), monkeypatch), list)
    exchanged = [*parts[:10], *[archive(torch.zeros(1, 1, 6, 4))] * 20, *parts[30:]]
    assert isinstance(read_each_way(write(tmp_path, exchanged, apart=apart), monkeypatch), list)
