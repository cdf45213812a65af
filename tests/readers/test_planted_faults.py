"""Fifteen planted faults: the reader, run in full, is wrong about each, and right about the mended checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.readers.planted import (
    BASE,
    FAULTS,
    PEFT,
    RULES,
    TRANSFORMERS,
    TRANSFORMERS_4,
    UP_FIRST,
    VLLM,
    VLLM_DRAFTS,
)
from tests.readers.real_readers import (
    Loaded,
    needs_transformers_4,
    needs_vllm,
    run_peft,
    run_transformers,
    run_transformers_4,
    run_vllm,
)

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

Run = Callable[[Sequence[Path]], list[Loaded]]
RUNS: Mapping[str, Run] = {
    TRANSFORMERS: run_transformers, TRANSFORMERS_4: run_transformers_4, VLLM: run_vllm,
    VLLM_DRAFTS: partial(run_vllm, drafting=True),
}  # fmt: skip
NEEDS: Mapping[str, Sequence[pytest.MarkDecorator]] = {
    TRANSFORMERS_4: needs_transformers_4,
    VLLM: needs_vllm,
    VLLM_DRAFTS: needs_vllm,
}


class Planted(NamedTuple):
    """A checkpoint that is right, the one with a fault, and the mended one, and what the reader makes of each."""

    folders: tuple[Path, Path, Path]
    right: Loaded
    spoilt: Loaded
    mended: Loaded


@pytest.fixture(scope="module")
def plant(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Planted]:
    """Return a function that plants a fault; a reader runs once on the checkpoints of all its faults."""

    def write(name: str) -> tuple[Path, Path, Path]:
        fault, place = FAULTS[name], tmp_path_factory.mktemp("planted")
        right, spoilt, mended = place / "right", place / "spoilt", place / "mended"
        (place / RULES).write_text(UP_FIRST)
        fault.build(right)
        shutil.copytree(right, spoilt)
        fault.spoil(spoilt)
        fault.mend(spoilt, right, mended)
        return right, spoilt, mended

    @cache
    def runs(reader: str) -> dict[str, Planted]:
        written = {name: write(name) for name, fault in FAULTS.items() if fault.reader == reader}
        if reader == PEFT:
            return {name: Planted(each, *run_peft(each[0].parent / BASE, each)) for name, each in written.items()}
        loaded = RUNS[reader]([folder for folders in written.values() for folder in folders])
        return {
            name: Planted(folders, *loaded[3 * place : 3 * place + 3])
            for place, (name, folders) in enumerate(written.items())
        }

    return lambda name: runs(FAULTS[name].reader)[name]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=NEEDS.get(fault.reader, ())) for name, fault in FAULTS.items()]
)
def test_the_reader_is_wrong_until_the_fault_is_mended(name: str, plant: Callable[[str], Planted]) -> None:
    planted = plant(name)
    assert not planted.right.error
    assert not planted.right.equals(planted.spoilt)
    assert planted.right.equals(planted.mended), planted.mended.error
