"""Real checkpoints with bytes changed, taken out and put in: read right, or refused by name; never anything else."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import transaxle as tx
from tests.formats.dcp.conftest import Saved
from tests.formats.dcp.damage import METADATA
from tests.formats.dcp.peers.world import CHECKPOINT
from transaxle.errors import Refused

CASES = {
    "sharded": (METADATA, "__0_0.distcp", "__1_0.distcp"),
    "as_safetensors": (METADATA, "__0_0.distcp"),
    "titan": (METADATA, "__0_0.distcp"),
    "hf_shards": ("shard-00001-model-00001-of-00001.safetensors",),
    "uncoordinated": ("__0.metadata", "__1.metadata"),
}
_LARGE = 1 << 24
Edit = tuple[float, int, bytes]
"""Where, as a part of the whole; bytes taken out; bytes put in."""
edits = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 40), st.binary(max_size=40)), min_size=1, max_size=4
)
flips = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), min_size=1, max_size=8)


@pytest.fixture(scope="module")
def folders(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("fuzz")
    for case in CASES:
        shutil.copytree(saved(2) / case / CHECKPOINT, base / case)
    return base


def holds(folder: Path) -> None:
    """Open and read everything; only our own refusals may come of it."""
    with suppress(Refused), tx.open(folder) as checkpoint:
        for tensor in checkpoint.values():
            if tensor.nbytes < _LARGE:
                tensor.read()


def attempt(file: Path, data: bytes) -> None:
    whole = file.read_bytes()
    try:
        file.write_bytes(data)
        holds(file.parent)
    finally:
        file.write_bytes(whole)


targets = st.sampled_from([(case, file) for case, files in CASES.items() for file in files])
relaxed = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])


@relaxed
@given(targets, edits)
def test_bytes_taken_out_and_put_in(folders: Path, target: tuple[str, str], changes: list[Edit]) -> None:
    file = folders.joinpath(*target)
    data = bytearray(file.read_bytes())
    for where, out, new in changes:
        at = int(where * len(data))
        data[at : at + out] = new
    attempt(file, bytes(data))


@relaxed
@given(targets, flips)
def test_bits_flipped(folders: Path, target: tuple[str, str], changes: list[tuple[float, int]]) -> None:
    file = folders.joinpath(*target)
    data = bytearray(file.read_bytes())
    for where, bit in changes:
        data[int(where * len(data))] ^= 1 << bit
    attempt(file, bytes(data))


@relaxed
@given(targets, st.floats(0, 1, exclude_max=True))
def test_files_cut_short(folders: Path, target: tuple[str, str], where: float) -> None:
    file = folders.joinpath(*target)
    data = file.read_bytes()
    attempt(file, data[: int(where * len(data))])


def test_the_folders_are_as_they_were(folders: Path) -> None:
    for case in CASES:
        tx.open(folders / case).close()
