"""Real checkpoints with bytes changed, taken out and put in: read right, or refused by name; never anything else."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

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
positions = st.floats(0, 1, exclude_max=True)
changes = st.one_of(
    st.tuples(
        st.just("replace"),
        st.lists(st.tuples(positions, st.integers(0, 40), st.binary(max_size=40)), min_size=1, max_size=4),
    ),
    st.tuples(st.just("flip"), st.lists(st.tuples(positions, st.integers(0, 7)), min_size=1, max_size=8)),
    st.tuples(st.just("cut"), st.lists(st.tuples(positions), min_size=1, max_size=1)),
)
"""Edits of a file; positions are fractions of its size."""


@pytest.fixture(scope="module")
def folders(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("fuzz")
    for case in CASES:
        shutil.copytree(saved(2) / case / CHECKPOINT, base / case)
    return base


def edited(data: bytearray, kind: str, edits: list[tuple[Any, ...]]) -> bytes:
    for where, *how in edits:
        at = int(where * len(data))
        if kind == "replace":
            data[at : at + how[0]] = how[1]
        elif kind == "flip":
            data[at] ^= 1 << how[0]
        else:
            del data[at:]
    return bytes(data)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([(case, file) for case, files in CASES.items() for file in files]), changes)
def test_damaged_files_are_read_or_refused(
    folders: Path, target: tuple[str, str], change: tuple[str, list[tuple[Any, ...]]]
) -> None:
    """Only our own refusals may come of opening and reading everything."""
    file = folders.joinpath(*target)
    whole = file.read_bytes()
    try:
        file.write_bytes(edited(bytearray(whole), *change))
        with suppress(Refused), tx.open(file.parent) as checkpoint:
            for tensor in checkpoint.values():
                if tensor.nbytes < _LARGE:
                    tensor.read()
    finally:
        file.write_bytes(whole)
