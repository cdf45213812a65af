"""A universal checkpoint that is not finished is not there: no folder, no `latest_universal`, the source as it was."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import transaxle as tx
from tests.engine import killed
from tests.engine.execute.test_execute import ROOT, Trouble, failing, names_in
from tests.engine.killed import contents
from transaxle.errors import Code
from transaxle.formats.deepspeed import keys
from transaxle.formats.deepspeed.keys import UNIVERSAL
from transaxle.formats.deepspeed.universal_record import Record
from transaxle.formats.storage import copier
from transaxle.parallel.universal_metadata import collect_metadata

torch = pytest.importorskip("torch")

from tests.formats.deepspeed.made import TAG, save  # noqa: E402

NAME, NORM = "layers.0.qkv.weight", "layers.0.norm.weight"
RECORD = Record.cut("column", (16, 4), 0, [[4, 4], [2, 2], [2, 2]], view=((8, 4, 4), -1))


def folder(path: Path, first: float = 1.0) -> Path:
    """A tensor-parallel checkpoint of a fused weight and a norm."""
    q, k, v = torch.arange(first, first + 64).reshape(16, 4).split([8, 4, 4])
    shards = {
        NAME: [torch.cat([part.chunk(2)[rank] for part in (q, k, v)]) for rank in range(2)],
        NORM: [torch.arange(first, first + 4)] * 2,
    }
    return save(path, shards, collect_metadata({NAME: RECORD, NORM: (4,)}, 2))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return folder(tmp_path / "source")


def universals(path: Path) -> Iterator[Path]:
    """Every pointer to a universal checkpoint that somebody could follow."""
    return path.glob(f"*/{keys.LATEST_UNIVERSAL}")


def test_killed_at_any_point_it_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    """Another run then finishes the work to the same bytes, with `resume` and without, and nothing is left over."""
    source, old = folder(tmp_path / "source"), tmp_path / "old"
    killed.convert(folder(tmp_path / "before", 500.0), old, UNIVERSAL)
    killed.convert(source, tmp_path / "reference", UNIVERSAL)
    (tmp_path / "work").mkdir()
    folders = [str(tmp_path / name) for name in ("source", "work", "reference", "old")]
    command = [sys.executable, "-m", "tests.engine.killed", *folders, UNIVERSAL, "7"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert min(map(int, done.stdout.split())) > 14, "points where a child died"


@pytest.mark.parametrize("call", ["pwrite", "fsync", "ftruncate"])
@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, "NO_SPACE"), (errno.EIO, "IO")])
@pytest.mark.parametrize("at", [1, 4, 9])
def test_a_failing_disk_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, code: Code, at: int
) -> None:
    before = contents(source)
    real = getattr(os, call)
    trouble = Trouble(at, failing(number))

    def patched(*args: Any) -> Any:
        trouble()
        return real(*args)

    monkeypatch.setattr(copier, "load_steps", killed.one_by_one)
    monkeypatch.setattr(os, call, patched)
    with pytest.raises(tx.TransaxleError) as caught:
        tx.convert(source, tmp_path / "out", to=UNIVERSAL, jobs=1)
    assert (caught.value.code, caught.value.exit_code) == (code, 4)
    assert names_in(tmp_path) == ["source"]
    assert not list(universals(tmp_path))
    assert contents(source) == before
    assert trouble.calls >= at


def test_a_failure_that_may_be_resumed_is_no_checkpoint_yet(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    with monkeypatch.context() as patch:
        trouble = Trouble(12, failing(errno.ENOSPC))
        real = os.pwrite

        def patched(*args: Any) -> int:
            trouble()
            return real(*args)

        patch.setattr(copier, "load_steps", killed.one_by_one)
        patch.setattr(os, "pwrite", patched)
        with pytest.raises(tx.TransaxleError, match="NO_SPACE"):
            tx.convert(source, out, to=UNIVERSAL, jobs=1, resume=True)
    assert not out.exists()
    left = [name for name in names_in(tmp_path) if name != "source"]
    assert left, "what is done so far is kept"
    for name in left:
        with pytest.raises(tx.TransaxleError):
            tx.open(tmp_path / name)
    tx.convert(source, out, to=UNIVERSAL, resume=True)
    tx.convert(source, whole, to=UNIVERSAL)
    assert contents(out) == contents(whole)
    assert names_in(tmp_path) == ["out", "source", "whole"]


def test_ranks_that_differ_leave_nothing(source: Path, tmp_path: Path) -> None:
    """Found only while the data is read, when files of the target exist already."""
    path = source / TAG / f"zero_pp_rank_0_mp_rank_01{keys.OPTIM_END}"
    held = torch.load(path, weights_only=False)
    held[keys.STATE][keys.MASTER][0][-1] += 1
    torch.save(held, path)
    with pytest.raises(tx.TransaxleError, match=NORM) as caught:
        tx.convert(source, tmp_path / "out", to=UNIVERSAL)
    assert caught.value.code == "UNEQUAL_COPIES"
    assert names_in(tmp_path) == ["source"]


def test_what_cannot_be_described_is_refused_before_a_byte_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = collect_metadata({NAME: Record.unsupported("column", (16, 4), "interleaved heads"), NORM: (4,)}, 2)
    for path in (source / TAG).glob(f"*{keys.MODEL_END}"):
        held = torch.load(path, weights_only=False)
        torch.save(held | {keys.INFO: info}, path)
    for call in ("pwrite", "ftruncate", "mkdir"):
        monkeypatch.setattr(os, call, lambda *_, **__: pytest.fail("something was written"))
    with pytest.raises(tx.TransaxleError, match="interleaved heads") as caught:
        tx.convert(source, tmp_path / "out", to=UNIVERSAL)
    assert caught.value.code == "UNSUPPORTED"
    assert names_in(tmp_path) == ["source"]
