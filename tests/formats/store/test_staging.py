"""Staging: whatever happens, the place holds the old checkpoint or the new one, whole, and nothing is left behind."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import transaxle as tx
from tests.formats.files import names_in
from tests.formats.refusals import refuses
from transaxle.errors import StorageError, UsageError
from transaxle.formats.store import leftovers
from transaxle.formats.store import place as place_module
from transaxle.formats.store import staging as staging_module
from transaxle.formats.store.staging import Staging, Writer

A, B = "model-1.safetensors", "model-2.safetensors"
NEW = {A: b"new" * 1000, B: b"NEW" * 500}
TENSORS = bytes(8) + b"{}"
"""How a safetensors file begins."""
SIZES = {name: len(data) for name, data in NEW.items()}
OLD = {A: b"old", "model-00002-of-00002.safetensors": b"OLD", "config.json": b"{}"}
TARGET = "out"


def put(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, data in files.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    return folder


def held(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fill(staging: Staging, files: Mapping[str, bytes] = NEW) -> None:
    """Write backwards, in small pieces."""
    staging.prepare({name: len(data) for name, data in files.items()})
    for name, data in files.items():
        for offset in reversed(range(0, len(data), 700)):
            staging.pwrite(name, offset, memoryview(data)[offset : offset + 700])


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "parent"
    folder.mkdir()
    return folder / TARGET


def only(target: Path, *names: str) -> bool:
    """The folder around the target holds this and no hidden neighbours."""
    return names_in(target.parent) == sorted(names)


def test_a_new_folder(target: Path) -> None:
    with Staging(target) as staging:
        fill(staging)
        staging.write("config.json", b"{}")
        staging.scratch.joinpath("journal").write_bytes(b"...")
        assert not target.exists()
        staging.commit()
    assert held(target) == {**NEW, "config.json": b"{}"}
    assert not target.joinpath(".transaxle").exists()
    assert only(target, TARGET)
    mask = os.umask(0)
    os.umask(mask)
    assert target.stat().st_mode & 0o777 == 0o777 & ~mask
    assert target.joinpath(A).stat().st_mode & 0o777 == 0o666 & ~mask


def test_one_file(target: Path) -> None:
    file = target.with_suffix(".safetensors")
    with Staging(file) as staging:
        assert staging.single == file.name
        fill(staging, {"model.safetensors": TENSORS + NEW[A]})
        staging.commit()
    assert file.read_bytes() == TENSORS + NEW[A]
    assert only(target, file.name)
    with pytest.raises(UsageError), Staging(file):
        pass
    with Staging(file, overwrite=True) as staging:
        fill(staging, {"model.safetensors": NEW[B]})
        assert file.read_bytes() == TENSORS + NEW[A]
        staging.commit()
    assert file.read_bytes() == NEW[B]
    with refuses("EXISTS", "does not begin"), Staging(file, overwrite=True):
        pass
    assert file.read_bytes() == NEW[B]
    with Staging(file, overwrite="everything") as staging:
        fill(staging, {"model.safetensors": NEW[A]})
        staging.commit()
    assert file.read_bytes() == NEW[A]
    assert only(target, file.name)


def test_one_file_is_not_several(target: Path) -> None:
    file = target.with_suffix(".safetensors")
    with refuses("UNSUPPORTED"), Staging(file) as staging:
        staging.prepare({A: 1, B: 1})
    with Staging(file) as staging:
        staging.prepare({A: 1})
        with refuses("UNSUPPORTED"):
            staging.write("transaxle.json", b"{}")
    assert only(target)


class Interrupted(Exception):
    pass


def interrupted(target: Path, files: Mapping[str, bytes] = NEW, *, journal: str = "") -> None:
    """A run that resumes, and is interrupted when it has written these files."""
    try:
        with Staging(target, resume=True) as staging:
            fill(staging, files)
            staging.scratch.joinpath("journal").write_text(journal)
            raise Interrupted
    except Interrupted:
        return


def committed(target: Path, before: Callable[[Staging], object] = bool, *, overwrite: bool = False) -> None:
    """A run from beginning to end; `before` happens just before the commit."""
    with Staging(target, overwrite=overwrite) as staging:
        fill(staging)
        before(staging)
        staging.commit()


@pytest.mark.oracle
@pytest.mark.parametrize("kind", [Interrupted, KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_exception_leaves_nothing(target: Path, kind: type[BaseException], overwrite: bool) -> None:
    if overwrite:
        put(target, OLD)

    def stop(_: Staging) -> None:
        raise kind

    with pytest.raises(kind):
        committed(target, stop, overwrite=overwrite)
    assert held(target) == OLD if overwrite else not target.exists()
    assert only(target, *[TARGET] * overwrite)


# The target.


def test_an_existing_target(target: Path) -> None:
    put(target, OLD)
    with refuses("EXISTS", hint="--overwrite", exit_code=2, file=str(target)), Staging(target):
        pass
    assert held(target) == OLD
    assert only(target, TARGET)


@pytest.mark.parametrize(
    ("make", "is_checked"),
    [*product([Path.mkdir, Path.touch], [True, False]), (lambda path: path.symlink_to("nowhere"), True)],
)
def test_a_target_that_appears_in_the_meantime(
    target: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None], is_checked: bool
) -> None:
    """Before the commit, and in its last moment, after the target has been looked at."""
    check = place_module.TargetPlace.check

    def late(place: place_module.TargetPlace) -> None:
        check(place)
        make(target)

    def before(_: Staging) -> None:
        if is_checked:
            make(target)
        else:
            monkeypatch.setattr(place_module.TargetPlace, "check", late)

    with refuses("EXISTS"):
        committed(target, before)
    assert only(target, TARGET)
    assert target.is_symlink() or target.is_file() or not names_in(target)


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("sync", [True, False])
def test_overwriting(target: Path, monkeypatch: pytest.MonkeyPatch, atomic: bool, sync: bool) -> None:
    if not atomic:
        monkeypatch.setattr(place_module, "exchange", lambda *_: False)
    put(target, OLD)
    with Staging(target, overwrite=True, sync=sync) as staging:
        fill(staging)
        assert held(target) == OLD
        staging.commit()
    assert held(target) == NEW
    assert only(target, TARGET)


@pytest.mark.parametrize("files", [OLD, {}], ids=["old", "empty"])
def test_overwriting_a_link_replaces_what_it_leads_to(target: Path, files: dict[str, bytes]) -> None:
    elsewhere = target.with_name("elsewhere")
    elsewhere.mkdir()
    target.symlink_to(put(elsewhere, files))
    committed(target, overwrite=True)
    assert target.is_symlink()
    assert held(elsewhere) == NEW


def test_a_slip_in_the_path_costs_nothing(target: Path) -> None:
    project = put(target, {"main.py": b"", "data/model.safetensors": b""})
    os.chdir(project / "data")
    for place in (project, Path(), Path(".."), Path("/"), project / "main.py", Path("/dev/null")):
        with refuses("EXISTS"), Staging(place, overwrite=True):
            pass
    assert held(project) == {"main.py": b"", "data/model.safetensors": b""}


def test_when_the_second_rename_fails_the_old_comes_back(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(place_module, "exchange", lambda *_: False)
    monkeypatch.setattr(place_module, "rename_new", failing)
    put(target, OLD)
    with pytest.raises(StorageError):
        committed(target, overwrite=True)
    assert held(target) == OLD
    assert only(target, TARGET)


def test_a_checkpoint_that_was_moved_aside_comes_back(target: Path) -> None:
    """A run died between the two renames of a file system that cannot exchange names."""
    put(target.with_name(f".{TARGET}.transaxle-old"), OLD)
    with pytest.raises(UsageError), Staging(target):
        pass
    assert held(target) == OLD
    assert only(target, TARGET)


@pytest.mark.parametrize("path", ["missing/out", "file/out", "", "a\0b", "x" * 5000])
def test_places_that_cannot_be(target: Path, path: str) -> None:
    os.chdir(target.parent)
    Path("file").touch()
    with refuses("IO"), Staging(path):
        pass


def test_a_long_name(target: Path) -> None:
    long = target.with_name("é" * 120)
    committed(long)
    assert held(long) == NEW


# Names.


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["../x", "/x", "", "a/../../x", ".transaxle/journal", ".transaxle", "a\0b"])
def test_names_that_are_paths(target: Path, name: str) -> None:
    with refuses("PATH_ESCAPE"), Staging(target) as staging:
        staging.prepare({name: 1})
    with refuses("PATH_ESCAPE"), Staging(target) as staging:
        staging.write(name, b"")
    assert only(target)


def test_bytes_outside_of_a_file(target: Path) -> None:
    with Staging(target) as staging:
        staging.prepare({A: 3})
        for offset, size in ((0, 4), (3, 1), (-1, 1)):
            with pytest.raises(ValueError, match="outside"):
                staging.pwrite(A, offset, memoryview(bytes(size)))


# The machine says no.


ERRORS = {"ENOSPC": "NO_SPACE", "EDQUOT": "NO_SPACE", "EIO": "IO", "EFBIG": "IO", "EROFS": "IO"}


@pytest.mark.oracle
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("call", ["pwrite", "fsync", "ftruncate", "reserve", "rename"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_calls_that_fail(target: Path, monkeypatch: pytest.MonkeyPatch, error: str, call: str, overwrite: bool) -> None:
    where = {"reserve": staging_module, "rename": place_module}.get(call, os)
    name = {"rename": "exchange" if overwrite else "rename_new"}.get(call, call)
    own, calls, number = getattr(where, name), iter(range(10**9)), getattr(errno, error)

    def failing(*args: Any) -> Any:
        if call == "pwrite" and not next(calls):
            return own(*args)
        raise OSError(number, os.strerror(number))

    if overwrite:
        put(target, OLD)
    monkeypatch.setattr(where, name, failing)
    with refuses(ERRORS[error], exit_code=4, **{"file": A} if call == "pwrite" else {}):
        committed(target, overwrite=overwrite)
    assert only(target, *[TARGET] * overwrite)
    if overwrite:
        assert held(target) == OLD


def test_short_writes_are_continued(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:11], offset))
    committed(target)
    assert held(target) == NEW


@pytest.fixture
def small_files() -> Iterator[int]:
    """No file of this process may grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield 4096
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("reserving", [True, False])
def test_a_file_too_large_for_the_system(
    target: Path, small_files: int, monkeypatch: pytest.MonkeyPatch, reserving: bool
) -> None:
    if not reserving:
        monkeypatch.setattr(staging_module, "reserve", lambda *_: False)
    with refuses("IO", hint="ulimit", file=B), Staging(target) as staging:
        staging.prepare({A: small_files, B: small_files + 1})
    assert only(target)


def test_without_the_calls_of_linux(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place_module, "_linux", lambda *_: None)
    committed(target)
    with Staging(target, overwrite=True) as staging:
        fill(staging, OLD)
        staging.commit()
    assert held(target) == OLD
    with pytest.raises(FileExistsError):
        place_module.rename_new(str(target), str(target.parent))


@pytest.mark.parametrize("tamper", [Path.unlink, lambda path: os.truncate(path, 3)])
def test_files_that_change_before_the_end(target: Path, tamper: Callable[[Path], None]) -> None:
    with refuses("IO", file=B):
        committed(target, lambda staging: tamper(staging.path / B))
    assert only(target)


def test_what_is_durable_before_the_rename(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file, every folder, then the rename, then the folder around it."""
    done: list[str] = []
    fsync, rename_new = os.fsync, place_module.rename_new

    def spy(fd: int) -> None:
        done.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        fsync(fd)

    def renamed(old: str, new: str) -> None:
        done.append("rename")
        rename_new(old, new)

    monkeypatch.setattr(os, "fsync", spy)
    monkeypatch.setattr(place_module, "rename_new", renamed)
    with Staging(target) as staging:
        work = str(staging.path)
        fill(staging, {"sub/a": b"1", "b": b"2"})
        staging.commit()
    assert sorted(done[:-2]) == sorted([work, f"{work}/sub", f"{work}/sub/a", f"{work}/b"])
    assert done[-2:] == ["rename", str(target.parent)]
    done.clear()
    with Staging(target.with_name("other"), sync=False) as staging:
        fill(staging)
        staging.commit()
    assert done == ["rename"]


# Several threads, several runs.


def test_two_runs_at_once(target: Path) -> None:
    with Staging(target) as staging:
        fill(staging)
        for resume in (False, True):
            with refuses("EXISTS", "another run"), Staging(target, resume=resume):
                pass
        staging.commit()
    assert held(target) == NEW


def test_without_locks_a_leftover_is_not_touched(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    interrupted(target)
    with pytest.raises(UsageError, match="--resume"), Staging(target):
        pass
    with Staging(target, resume=True) as staging:
        assert staging.prepare(SIZES) == NEW.keys()
        staging.commit()
    assert held(target) == NEW


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("/etc")])
def test_something_else_has_the_hidden_name(target: Path, make: Callable[[Path], None]) -> None:
    make(target.with_name(f".{TARGET}.transaxle-partial"))
    with pytest.raises(StorageError), Staging(target):
        pass


# Resuming.


def test_a_run_that_resumes_keeps_what_is_there(target: Path) -> None:
    interrupted(target, {A: NEW[A], B: bytes(len(NEW[B])), "gone": b"?", "sub/gone": b"?"}, journal="A is done")
    assert not target.exists()
    with Staging(target, resume=True) as staging:
        assert staging.scratch.joinpath("journal").read_text() == "A is done"
        assert staging.prepare(SIZES) == NEW.keys()
        staging.pwrite(B, 0, memoryview(NEW[B]))
        staging.commit()
    assert held(target) == NEW
    assert not target.joinpath("sub").exists()
    assert only(target, TARGET)


def test_files_of_another_size_begin_anew(target: Path) -> None:
    interrupted(target)
    with Staging(target, resume=True) as staging:
        assert staging.prepare({A: len(NEW[A]), B: 3}) == {A}
        staging.commit()
    assert held(target) == {A: NEW[A], B: b"\0\0\0"}


def test_the_space_that_an_earlier_run_has_taken_counts_as_free(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`st_blocks` counts units of 512 bytes, on every file system."""
    sizes = {A: 3 << 20, B: 1 << 20}
    interrupted(target, {name: bytes(size) for name, size in sizes.items()})
    (folder,) = target.parent.iterdir()
    taken = sum((folder / name).stat().st_blocks for name in sizes) * 512
    more = {**sizes, "another": taken + 1 - sum(sizes.values())}
    for free in (0, 1):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(total=1 << 30, free=free))
        with Staging(target, resume=True) as staging:
            if free:
                staging.prepare(more)
                continue
            with pytest.raises(StorageError, match=f"{taken + 1:,} bytes are needed, {taken:,} are free") as caught:
                staging.prepare(more)
            assert caught.value.code == "NO_SPACE"


def test_a_run_that_does_not_resume_begins_anew(target: Path) -> None:
    interrupted(target, journal="all done")
    with Staging(target) as staging:
        assert not list(staging.scratch.iterdir())
        assert staging.prepare({A: len(NEW[A])}) == frozenset()
        staging.commit()
    assert held(target) == {A: bytes(len(NEW[A]))}


@pytest.mark.parametrize("journal", ["head\na tensor", "head\na tensor\nanother\n"])
def test_finished_work_is_kept_unless_the_user_says_otherwise(target: Path, journal: str) -> None:
    interrupted(target, journal=journal)
    before = held(target.parent)
    for look in (lambda: Staging(target).look({}, {}), lambda: Staging(target).__enter__()):
        with refuses("EXISTS", f"transaxle clean {target}", hint="--resume"):
            look()
        assert held(target.parent) == before
    committed(target, overwrite=True)
    assert only(target, TARGET)


def test_a_replaced_checkpoint_is_not_taken_for_a_beginning(target: Path) -> None:
    """A run died after the exchange, before the old checkpoint was removed: the hidden folder has no marker."""
    put(target.with_name(f".{TARGET}.transaxle-partial"), NEW)
    with Staging(target, resume=True) as staging:
        assert staging.prepare({A: len(NEW[A])}) == frozenset()


def test_a_refusal_leaves_a_beginning_alone(target: Path) -> None:
    interrupted(target)
    target.mkdir()
    with pytest.raises(UsageError), Staging(target):
        pass
    target.rmdir()
    with Staging(target, resume=True) as staging:
        assert staging.prepare(SIZES) == NEW.keys()


# SIGKILL.

KILLED_NEW = {"a.safetensors": b"n" * 3000, "sub/b.safetensors": b"n" * 10}
KILLED_OLD = {"model-a.safetensors": b"old", "model-c.safetensors": b"old"}


def run_until(target: Path, deadline: int, overwrite: bool, atomic: bool) -> int | None:
    """Write in a process that is killed at its n-th system call; the number of calls if it came to its end."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, str(write_until(target, deadline, overwrite, atomic)).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as told:
        calls = told.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return None
    assert os.WEXITSTATUS(status) == 0
    return int(calls)


def write_until(target: Path, deadline: int, overwrite: bool, atomic: bool) -> int:
    """Write and die before the n-th system call; the number of calls if there are fewer."""
    seen = 0

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == deadline:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counted

    for name in ("open", "pwrite", "fsync", "mkdir", "rmdir", "unlink", "rename", "replace", "ftruncate"):
        setattr(os, name, dying(getattr(os, name)))
    for name in ("rename_new", "exchange"):
        counted = dying(getattr(place_module, name))
        setattr(place_module, name, counted if atomic or name != "exchange" else lambda *_: False)
    with Staging(target, overwrite=overwrite) as work:
        work.prepare({name: len(data) for name, data in KILLED_NEW.items()})
        for at in range(0, 3000, 1000):
            work.pwrite("a.safetensors", at, memoryview(b"n" * 1000))
        work.pwrite("sub/b.safetensors", 0, memoryview(b"n" * 10))
        work.commit()
    return seen


@pytest.mark.oracle
@pytest.mark.parametrize(("overwrite", "atomic"), [(False, True), (True, True), (True, False)])
def test_killed_at_every_call(tmp_path: Path, overwrite: bool, atomic: bool) -> None:
    calls = None
    deadline = 0
    outcomes = set()
    while calls is None:
        deadline += 1
        parent = tmp_path / str(deadline)
        target = parent / TARGET
        put(target, KILLED_OLD) if overwrite else parent.mkdir()
        calls = run_until(target, deadline, overwrite, atomic)
        if not target.exists():
            outcome: object = None
            if overwrite:  # only between the two renames, where names cannot be exchanged
                assert not atomic
                assert held(target.with_name(f".{TARGET}.transaxle-old")) == KILLED_OLD
        else:
            assert held(target) in (KILLED_OLD, KILLED_NEW)
            outcome = held(target) == KILLED_NEW
        outcomes.add(outcome)
        # Whatever was left, the next run comes to its end and leaves nothing.
        with Staging(target, overwrite="everything", resume=bool(deadline % 2)) as staging:
            fill(staging)
            staging.commit()
        assert held(target) == NEW
        assert only(target, TARGET)
    assert deadline > 15
    assert True in outcomes
    assert (False if overwrite else None) in outcomes
    assert (None in outcomes) == (not overwrite or not atomic)


# Writing into the files of another process: under its claim, and into no other folder of that name.


def test_a_shared_claim_lets_writers_in_and_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "_PATIENCE", 0.2)
    target = tmp_path / "out"
    with Staging(target, resume=True) as staging:
        staging.prepare({"a": 4})
        with pytest.raises(tx.TransaxleError, match="another run is writing this target"):
            Writer(staging.path, sync=True, shared=True)
        staging.share()
        writer, second = (Writer(staging.path, sync=True, shared=True) for _ in range(2))
        writer.pwrite("a", 0, memoryview(b"ab"))
        second.pwrite("a", 2, memoryview(b"cd"))
        with pytest.raises(tx.TransaxleError, match="another run is writing this target"), Staging(target, resume=True):
            pass
        second.finish()
        with pytest.raises(tx.TransaxleError, match="a worker of this run is still writing"):
            staging.take_back()
        writer.finish()
        staging.take_back()
        staging.commit()
    assert (target / "a").read_bytes() == b"abcd"


def test_workers_keep_the_work_of_a_driver_that_died(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with Staging(target, resume=True) as staging:
        staging.prepare({"a": 4})
        staging.share()
        writer = Writer(staging.path, sync=True, shared=True)
    assert [each.outcome for each in tx.clean(target)] == ["kept"], "a worker is at work"
    with pytest.raises(tx.TransaxleError, match="another run is writing this target"), Staging(target):
        pass
    writer.close()
    assert [each.outcome for each in tx.clean(target)] == ["removed"]


def test_nothing_is_written_into_a_folder_that_came_later(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with Staging(target) as staging:
        staging.prepare({"a": 4})
        writer = Writer(staging.path, sync=True)
    with Staging(target) as staging:
        staging.prepare({"a": 4})
        with pytest.raises(tx.TransaxleError, match="opening it"):
            writer.pwrite("a", 0, memoryview(b"abcd"))
        with pytest.raises(tx.TransaxleError, match="creating it"):
            writer.put("b", b"small")
        assert (staging.path / "a").read_bytes() == bytes(4)
    writer.close()
    with pytest.raises(tx.TransaxleError, match="opening the folder for the unfinished work"):
        Writer(staging.path, sync=True)


def test_a_small_file_is_put_at_once(tmp_path: Path) -> None:
    writer = Writer(tmp_path, sync=True)
    for data in (b"one", b"another"):
        writer.put("small", data)
        assert (tmp_path / "small").read_bytes() == data
    writer.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_a_writer_that_comes_late_does_not_take_a_later_folder_for_its_own(tmp_path: Path) -> None:
    """A rank that stood still while the others gave up, and began again."""
    target = tmp_path / "out"
    with Staging(target) as staging:
        staging.prepare({"a": 4})
        first = staging.mark()
        Writer(staging.path, sync=True, run=first).close()
    with Staging(target) as staging:
        staging.prepare({"a": 4})
        assert staging.mark() != first
        with pytest.raises(tx.TransaxleError, match="looking for the run that this belongs to"):
            Writer(staging.path, sync=True, run=first)
        staging.pwrite("a", 0, memoryview(b"abcd"))
        staging.commit()
    assert [path.name for path in target.iterdir()] == ["a"]
