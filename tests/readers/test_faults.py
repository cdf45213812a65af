"""Faults of checkpoints, planted or reported: `check` names each, and the reader, run in full, is wrong about it.

The mended checkpoint passes, and computes what the right one does.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import transaxle as tx
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
    OLDER,
    Loaded,
    needs_transformers_4,
    needs_vllm,
    run_peft,
    run_transformers,
    run_transformers_4,
    run_vllm,
)
from tests.readers.real_readers import VLLM as VLLM_PYTHON
from tests.readers.reported import REPORTED

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

TOGETHER: Mapping[str, Callable[[Sequence[Path]], list[Loaded]]] = {
    TRANSFORMERS_4: run_transformers_4, VLLM: run_vllm, VLLM_DRAFTS: partial(run_vllm, drafting=True),
}  # fmt: skip
"""Readers with a process of their own, which starts once for all of their checkpoints."""
CASES = {**FAULTS, **REPORTED}
NEEDS: Mapping[str, Sequence[pytest.MarkDecorator]] = {
    TRANSFORMERS_4: needs_transformers_4, VLLM: needs_vllm, VLLM_DRAFTS: needs_vllm,
}  # fmt: skip
CHECKED: Mapping[str, str] = {
    TRANSFORMERS: "transformers", TRANSFORMERS_4: "transformers", VLLM: "vllm", VLLM_DRAFTS: "vllm", PEFT: "peft",
}  # fmt: skip
"""Reader of a fault -> its name for `check`."""
Folders = tuple[Path, Path, Path]
"""Of the checkpoint that is right, the one with a fault, and the mended one."""


class Planted(NamedTuple):
    """The checkpoints of a fault, and what the reader makes of each."""

    folders: Folders
    right: Loaded
    spoilt: Loaded
    mended: Loaded


@pytest.fixture(scope="module")
def plant(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Planted]:
    """Return a function that plants a fault and runs the reader in full."""

    def write(name: str) -> Folders:
        fault, place = CASES[name], tmp_path_factory.mktemp("planted")
        right, spoilt, mended = place / "right", place / "spoilt", place / "mended"
        (place / RULES).write_text(UP_FIRST)
        fault.build(right)
        shutil.copytree(right, spoilt)
        fault.spoil(spoilt)
        fault.mend(spoilt, right, mended)
        return right, spoilt, mended

    @cache
    def together(reader: str) -> dict[str, Planted]:
        written = {name: write(name) for name, fault in CASES.items() if fault.reader == reader}
        loaded = iter(TOGETHER[reader]([folder for folders in written.values() for folder in folders]))
        return {name: Planted(folders, next(loaded), next(loaded), next(loaded)) for name, folders in written.items()}

    def run(name: str) -> Planted:
        reader = CASES[name].reader
        if reader in TOGETHER:
            return together(reader)[name]
        folders = write(name)
        if reader == PEFT:
            return Planted(folders, *run_peft(folders[0].parent / BASE, folders))
        return Planted(folders, *run_transformers(folders))

    return run


@pytest.fixture(scope="module")
def python_4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a program that is this Python with transformers 4."""
    program = tmp_path_factory.mktemp("python") / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={OLDER} exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return program


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.oracle
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=NEEDS.get(fault.reader, ())) for name, fault in CASES.items()]
)
def test_a_fault_is_named_and_mended(name: str, plant: Callable[[str], Planted], python_4: Path) -> None:
    fault, planted = CASES[name], plant(name)
    assert not planted.right.error
    assert not planted.right.equals(planted.spoilt)
    assert planted.right.equals(planted.mended), planted.mended.error
    python = {TRANSFORMERS_4: python_4, VLLM: VLLM_PYTHON, VLLM_DRAFTS: VLLM_PYTHON}.get(fault.reader)
    _, spoilt, mended = planted.folders
    opening = {**fault.opening, **({"rules": spoilt.parent / RULES} if fault.opening else {})}
    texts = _findings(spoilt, CHECKED[fault.reader], python, fault.reader != VLLM_DRAFTS, **opening)
    assert any(fault.mentions in text for text in texts), texts
    assert _findings(mended, CHECKED[fault.reader], python, True) == []


def _findings(folder: Path, reader: str, python: Path | None, wrong: bool, **opening: Any) -> list[str]:
    """Return what `check` says is wrong, or all that it says: a model without layers that predict further tokens loads.

    Of files that contradict their index it is why they are not opened.
    """
    try:
        verdict = tx.check(folder, reader, python=python, **opening)
    except tx.TransaxleError as refused:
        return [str(refused)]
    assert bool(verdict) is not any(finding.wrong for finding in verdict.findings)
    findings = [finding for finding in verdict.findings if finding.wrong >= wrong]
    return [text for finding in findings for text in (finding.effect, *finding.names)]
