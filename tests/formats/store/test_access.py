"""Access: what replaces something private is as private, from its first byte on."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

import transaxle as tx
from tests.checkpoints import tiny
from transaxle.derivation.sources import write_table
from transaxle.formats.store.access import Access, access_of, set_access
from transaxle.formats.store.staging import Staging
from transaxle.reports.html_page import MARK, write_page

FIRST, SECOND = "model-1.safetensors", "model-2.safetensors"
TENSORS = bytes(8) + b"{}"


@pytest.fixture(autouse=True)
def generous() -> Iterator[None]:
    """The umask of most people: others may read."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def modes(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder.parent)): f"{mode(path):o}" for path in (folder, *folder.rglob("*"))}


def readable(folder: Path) -> list[Path]:
    """Return what others than the owner could open below a folder."""
    if mode(folder) & 0o077:
        return [folder, *folder.rglob("*")]
    return []


@pytest.mark.parametrize("atomic", [True, False])
def test_a_private_folder_stays_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, atomic: bool) -> None:
    target = tmp_path / "out"
    for name, data in {FIRST: TENSORS, "config.json": b"{}", "sub/model-3.safetensors": TENSORS}.items():
        place = target / name
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        place.write_bytes(data)
        place.chmod(0o640 if name == "config.json" else 0o600)
    target.chmod(0o2750)
    if not atomic:
        monkeypatch.setattr("transaxle.formats.store.place.exchange", lambda *_: False)
    with Staging(target, overwrite="everything") as staging:
        assert readable(staging.path) == []
        staging.prepare({FIRST: 3, SECOND: 3, "sub/model-3.safetensors": 3, "new/model-4.safetensors": 3})
        staging.pwrite(FIRST, 0, memoryview(b"new"))
        staging.write("config.json", b"{}")
        assert readable(staging.path) == []
        staging.commit()
    assert target.joinpath(FIRST).read_bytes() == b"new"
    assert modes(target) == {
        "out": "2750",
        f"out/{FIRST}": "600",
        f"out/{SECOND}": "600",  # what all files had that are replaced
        "out/config.json": "640",
        "out/sub": "700",
        "out/sub/model-3.safetensors": "600",
        "out/new": "700",
        "out/new/model-4.safetensors": "600",
    }


def test_unfinished_work_is_private_before_it_is_continued(tmp_path: Path) -> None:
    """It was begun when nothing was there, and may be read by all; then something private came."""
    target = tmp_path / "out"
    with Staging(target, resume=True) as staging:  # nothing is committed, and the work stays
        staging.prepare({FIRST: 3})
    assert mode(staging.path) == 0o755
    target.mkdir(mode=0o700)
    with Staging(target, overwrite=True, resume=True) as staging:
        assert staging.prepare({FIRST: 3}) == {FIRST}
        assert readable(staging.path) == []
        staging.commit()
    assert modes(target) == {"out": "700", f"out/{FIRST}": "644"}


def test_files_that_all_may_change_stay_so(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    target.joinpath(FIRST).write_bytes(TENSORS)
    target.joinpath(FIRST).chmod(0o666)
    target.chmod(0o777)
    with Staging(target, overwrite=True) as staging:
        staging.write(SECOND, b"new")
        staging.commit()
    assert modes(target) == {"out": "777", f"out/{SECOND}": "666"}


def test_conversions_reports_and_tables_keep_the_mode_of_what_they_replace(tmp_path: Path) -> None:
    source = tiny(tmp_path / "ck")
    out, single = tmp_path / "out", tmp_path / "out.safetensors"
    page, table = tmp_path / "page.html", tmp_path / "own.rules"
    tx.convert(source, out, to="hf")
    tx.convert(source, single, to="hf")
    page.write_bytes(MARK)
    table.write_text("family own\n", "utf-8")
    for path in (single, page, table, *out.iterdir()):
        path.chmod(0o600)
    out.chmod(0o700)
    tx.convert(source, out, to="hf", overwrite=True, shard_size="10KB")
    tx.convert(source, single, to="torchtitan", overwrite=True)
    write_page(MARK, str(page), overwrite=True)
    write_table("family other\n", table, overwrite=True)
    assert set(modes(out).values()) == {"700", "600"}
    assert len(modes(out)) > 5
    assert {mode(path) for path in (single, page, table)} == {0o600}
    write_page(MARK, str(tmp_path / "new.html"), overwrite=True)
    assert mode(tmp_path / "new.html") == 0o644


def test_a_group_that_cannot_be_kept_gets_what_others_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "chown", forbidden)
    path = tmp_path / "model.safetensors"
    path.touch()
    own = access_of(path)
    for before, after in ((0o640, 0o600), (0o664, 0o644), (0o604, 0o604), (0o600, 0o600)):
        set_access(path, Access(before, own.owner, own.group + 1, (None, None)))
        assert mode(path) == after
        set_access(path, Access(before, own.owner, own.group, (None, None)))
        assert mode(path) == before


def entries(*, user: int) -> bytes:
    """Return a list of users as Linux keeps it: the owner, one user who may read, and nobody else."""
    rows = [(1, 6, -1), (2, 4, user), (4, 0, -1), (0x10, 4, -1), (0x20, 0, -1)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *row) for row in rows)


def test_lists_of_users_are_kept(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    for name in (FIRST, SECOND):
        target.joinpath(name).write_bytes(TENSORS)
        target.joinpath(name).chmod(0o600)
    try:
        os.setxattr(target / FIRST, "system.posix_acl_access", entries(user=1000))
    except OSError:
        pytest.skip("this file system has no lists of users")
    with Staging(target, overwrite=True) as staging:
        for name in (FIRST, SECOND, "model-3.safetensors"):
            staging.write(name, b"new")
        staging.commit()
    assert os.getxattr(target / FIRST, "system.posix_acl_access") == entries(user=1000)
    assert [access_of(target / name).lists for name in (SECOND, "model-3.safetensors")] == [(None, None)] * 2
    assert mode(target / "model-3.safetensors") == 0o600


def test_a_system_that_refuses_it_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out.safetensors"
    target.write_bytes(TENSORS)
    target.chmod(0o640)

    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    with Staging(target, overwrite=True) as staging:
        staging.write(FIRST, b"new")
        monkeypatch.setattr(Path, "chmod", refused)
        with pytest.raises(tx.TransaxleError, match="the access of what it replaces"):
            staging.commit()
    assert target.read_bytes() == TENSORS
    assert list(tmp_path.iterdir()) == [target]
