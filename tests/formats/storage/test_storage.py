"""Local files: byte ranges of regular files inside the folder, and a named refusal for everything else."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.formats.refusals import refuses
from transaxle.errors import Code, Refused
from transaxle.formats.storage.local import LocalStorage
from transaxle.formats.storage.storage import Handles

FILE = "a.bin"
DATA = bytes(range(256)) * 16
SECRET = b"secret"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "checkpoint"
    inside.mkdir()
    inside.joinpath(FILE).write_bytes(DATA)
    tmp_path.joinpath("secret").write_bytes(SECRET)
    return inside


def test_short_reads_are_continued(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:7]], offset))
    assert LocalStorage(folder).read(FILE, 3, 1000) == DATA[3:1003]


def test_a_failing_disk_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    storage = LocalStorage(folder)
    monkeypatch.setattr(os, "preadv", broken)
    with refuses("IO", file=FILE):
        storage.read(FILE, 0, 1)


def test_a_file_cut_short_while_open(folder: Path) -> None:
    storage = LocalStorage(folder)
    assert storage.size(FILE) == len(DATA)
    os.truncate(folder / FILE, 100)
    with refuses("CORRUPT", "truncated", "100", file=FILE):
        storage.read(FILE, 64, 64)


def test_a_file_replaced_while_open(folder: Path) -> None:
    folder.joinpath("b.bin").write_bytes(b"b")
    storage = LocalStorage(folder)
    storage._handles = Handles(storage._open, limit=1)
    assert storage.size(FILE) == len(DATA)
    assert storage.size("b.bin") == 1
    folder.joinpath(FILE).unlink()
    folder.joinpath(FILE).write_bytes(DATA)
    with refuses("CORRUPT", "changed"):
        storage.read(FILE, 0, 1)


@pytest.mark.parametrize(
    ("change", "code"), [(Path.touch, "CORRUPT"), (lambda path: os.truncate(path, 9), "CORRUPT"), (Path.unlink, "IO")]
)
def test_a_change_is_found_before_the_end(folder: Path, change: Callable[[Path], None], code: str) -> None:
    storage = LocalStorage(folder)
    storage.read(FILE, 0, 1)
    storage.recheck()
    change(folder / FILE)
    with refuses(code, file=FILE):
        storage.recheck()


def refuses_to_read(folder: Path, name: str, code: Code = "PATH_ESCAPE", *words: str) -> None:
    with refuses(code, *words, file=name):
        LocalStorage(folder).read(name, 0, 1)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../secret", "/etc/passwd", "a/../../secret", "./a.bin", "a//b", "a/", "..\\secret", "a\0b"]
)
def test_names_that_are_paths(folder: Path, name: str) -> None:
    refuses_to_read(folder, name)


@pytest.mark.parametrize(
    "target", ["../secret", "{outside}", "sub/../../secret", "/etc/passwd", "sub/up/secret", "/dev/zero"]
)
def test_links_that_lead_out(folder: Path, target: str) -> None:
    folder.joinpath("sub").mkdir()
    folder.joinpath("sub/up").symlink_to("../..")
    folder.joinpath("link").symlink_to(target.format(outside=folder.parent / "secret"))
    refuses_to_read(folder, "link")
    listing = LocalStorage(folder).listing()
    assert listing.names == (FILE,)
    assert listing.special["link"].code == "PATH_ESCAPE"


def test_folders_that_lead_out(folder: Path) -> None:
    folder.joinpath("sub").symlink_to("..")
    refuses_to_read(folder, "sub/secret")
    listing = LocalStorage(folder).listing()
    assert (listing.folders, listing.special["sub"].code) == ((), "PATH_ESCAPE")
    with pytest.raises(Refused):
        LocalStorage(folder).listing("sub")


def test_links_that_stay_inside(folder: Path) -> None:
    folder.joinpath("sub").mkdir()
    folder.joinpath("sub/link").symlink_to(f"../{FILE}")
    folder.joinpath("again").symlink_to("sub/link")
    storage = LocalStorage(folder)
    assert storage.names() == (FILE, "again")
    assert storage.read("again", 1, 3) == storage.read("sub/link", 1, 3) == DATA[1:4]
    assert storage.listing("sub").names == ("link",)


def test_broken_links(folder: Path) -> None:
    for name, target in (("loop", "loop"), ("gone", "nothing")):
        folder.joinpath(name).symlink_to(target)
        refuses_to_read(folder, name, "IO")
    assert LocalStorage(folder).listing().special.keys() == {"loop", "gone"}


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A repository in the cache of huggingface_hub."""
    repository = tmp_path / "hub" / "models--a--b"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "0a1b"
    blobs.mkdir(parents=True)
    snapshot.joinpath("unet").mkdir(parents=True)
    blobs.joinpath("cafe").write_bytes(DATA)
    snapshot.joinpath(FILE).symlink_to("../../blobs/cafe")
    snapshot.joinpath("unet", FILE).symlink_to("../../../blobs/cafe")
    repository.joinpath("token").write_bytes(SECRET)
    return snapshot


def test_links_of_the_hub_cache(hub: Path) -> None:
    storage = LocalStorage(hub)
    assert storage.names() == (FILE,)
    assert storage.read(FILE, 0, 9) == storage.read(f"unet/{FILE}", 0, 9) == DATA[:9]
    assert LocalStorage(hub / "unet").read(FILE, 0, 9) == DATA[:9]
    assert LocalStorage(hub / FILE).read(FILE, 0, 9) == DATA[:9]


@pytest.mark.parametrize("target", ["../../token", "../../blobs/sub/cafe", "../../refs", "../../blobs/link"])
def test_only_blobs_of_the_hub_cache(hub: Path, target: str) -> None:
    blobs = hub.parent.parent / "blobs"
    blobs.joinpath("sub").mkdir()
    blobs.joinpath("sub/cafe").write_bytes(SECRET)
    blobs.joinpath("link").symlink_to("../token")
    blobs.with_name("refs").write_bytes(SECRET)
    hub.joinpath("link").symlink_to(target)
    refuses_to_read(hub, "link")


def test_blobs_beside_any_other_folder_are_outside(folder: Path) -> None:
    deep = folder / "revisions" / "0a1b"
    deep.mkdir(parents=True)
    folder.joinpath("blobs").mkdir()
    folder.joinpath("blobs/cafe").write_bytes(DATA)
    deep.joinpath("link").symlink_to("../../blobs/cafe")
    refuses_to_read(deep, "link")


def make_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket is at most 107 bytes long
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(here)


@pytest.mark.parametrize(("make", "kind"), [(os.mkfifo, "FIFO"), (make_socket, "socket"), (os.mkdir, "folder")])
def test_what_is_no_regular_file(folder: Path, make: Callable[[Path], None], kind: str) -> None:
    make(folder / "odd")
    refuses_to_read(folder, "odd", "UNSUPPORTED", kind)
    listing = LocalStorage(folder).listing()
    assert listing.names == (FILE,)
    assert ("odd" in listing.folders) != ("odd" in listing.special)


@pytest.mark.parametrize("path", ["fifo", "/dev/zero", "/dev/null"])
def test_paths_that_are_no_files(folder: Path, path: str) -> None:
    os.mkfifo(folder / "fifo")
    typed = path if path.startswith("/") else str(folder / path)
    with refuses("UNSUPPORTED", file=typed):
        LocalStorage(typed)


def test_links_that_the_user_typed_are_followed(folder: Path, tmp_path: Path) -> None:
    tmp_path.joinpath("to-folder").symlink_to(folder)
    tmp_path.joinpath("to-file").symlink_to(folder / FILE)
    assert LocalStorage(tmp_path / "to-folder").read(FILE, 0, 4) == DATA[:4]
    assert LocalStorage(tmp_path / "to-file").read("to-file", 0, 4) == DATA[:4]


@pytest.mark.parametrize(
    ("typed", "hint"),
    [("checkpoin", "checkpoint"), ("nothing/like/this", "does not exist"), ("checkpoint/b.bin", FILE)],
)
def test_missing_paths(folder: Path, typed: str, hint: str) -> None:
    path = str(folder.parent / typed)
    with refuses("IO", file=path, exit_code=4, hint=hint):
        LocalStorage(path)


@pytest.mark.parametrize("typed", ["", "a\0b", "x" * 5000, "checkpoint/a.bin/b"])
def test_impossible_paths(folder: Path, typed: str) -> None:
    os.chdir(folder.parent)
    with refuses("IO"):
        LocalStorage(typed)


def test_names_that_are_not_utf8(folder: Path) -> None:
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff.bin")).write_bytes(b"")
    listing = LocalStorage(folder).listing()
    assert listing.names == (FILE,)
    assert [refusal.code for refusal in listing.special.values()] == ["UNSUPPORTED"]
    for name in listing.everything():
        assert name.encode()


def test_a_descriptor_in_use_is_closed_after_its_last_user() -> None:
    closed: list[str] = []
    handles = Handles(lambda _name: 7, lambda name, _fd: closed.append(name), limit=1)
    with handles.use("a"), handles.use("a"):
        with handles.use("b"):
            assert closed == []
        handles.drop("a")
        handles.close()
        assert closed == ["b"]
    assert closed == ["b", "a"]
