"""Checkpoints under URLs, written: in parts, all of it or nothing, and at no moment a mixture of two."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import transaxle as tx
from tests.checkpoints import TENSORS, WHOLE, read, same, tiny, write
from tests.formats.refusals import refuses
from tests.formats.s3_server import Bucket
from tests.formats.stores import Memory, Store, download, upload
from transaxle.errors import TransaxleError
from transaxle.formats.registry import MANIFEST, writable
from transaxle.formats.store.service import Service
from transaxle.formats.store.shared_upload import _OwnFile, _SharedFile
from transaxle.formats.store.upload import PART, StreamedFile, Upload, part_size

LEAST_PART = 5 << 20
"""What S3 takes."""
CONFIG = "config.json"
COMMITTED: tuple[type[Any], ...] = (StreamedFile, _SharedFile, _OwnFile)
"""Files that appear when they are committed."""


def refused(work: Callable[[], object]) -> TransaxleError:
    with pytest.raises(TransaxleError) as caught:
        work()
    return caught.value


def large(folder: Path) -> Path:
    random = np.random.default_rng(0)
    return write(folder, {f"w{i}": random.standard_normal((1024, 1024), np.float32) for i in range(6)})


def unfinished(store: Store) -> list[str]:
    return store.uploads() if isinstance(store, Bucket) else []


@pytest.mark.oracle
@pytest.mark.parametrize("shards", [1, 4])
def test_a_checkpoint_to_a_url(store: Store, tmp_path: Path, shards: int) -> None:
    local, url = tiny(tmp_path / "local", shards=shards), f"{store.url}/models/out"
    report = tx.convert(local, url, to="torchtitan", shard_size=10_000)
    assert (report.path, report.carried) == (url, (CONFIG,))
    assert report.bytes_written == sum(len(store.get(name)) for name in store.names() if not name.endswith(MANIFEST))
    checked = tx.verify(url)
    assert (checked.ok, checked.against) == (True, "manifest")
    assert tx.diff(local, url).equal
    tx.convert(local, tmp_path / "out", to="torchtitan", shard_size=10_000)
    for path in (tmp_path / "out").iterdir():
        assert store.get(f"models/out/{path.name}") == path.read_bytes()
    tx.convert(url, f"{store.url}/back", to="hf")
    assert same(local, download(store, "back", tmp_path / "back"))
    assert unfinished(store) == []


def test_one_file(store: Store, tmp_path: Path) -> None:
    local, url = tiny(tmp_path / "local"), f"{store.url}/one.safetensors"
    tx.convert(local, url, to="torchtitan")
    assert store.names() == ["one.safetensors"]
    assert tx.diff(local, url).equal
    assert refused(lambda: tx.convert(local, url, to="hf")).code == "EXISTS"
    tx.convert(local, url, to="hf", overwrite=True)
    tx.convert(local, tmp_path / "one.safetensors", to="hf")
    assert store.get("one.safetensors") == (tmp_path / "one.safetensors").read_bytes()


def test_many_parts(bucket: Bucket, tmp_path: Path) -> None:
    local = large(tmp_path / "local")
    tx.convert(local, f"{bucket.url}/out", to="safetensors", jobs=4)
    data = (local / WHOLE).read_bytes()
    assert bucket.parts(f"out/{WHOLE}") == -(-len(data) // PART) == 4
    with Upload(f"{bucket.url}/small", part=LEAST_PART) as staging:
        staging.prepare({WHOLE: len(data), "empty": 0, CONFIG: 2})
        staging.pwrite(CONFIG, 0, memoryview(b"{}"))
        for start in range(0, len(data), 1_000_003):
            staging.pwrite(WHOLE, start, memoryview(data)[start : start + 1_000_003])
        assert bucket.names() == [f"out/{WHOLE}", f"out/{MANIFEST}"]
        assert bucket.uploads()
        staging.commit()
    assert [bucket.get(f"small/{name}") for name in (WHOLE, "empty", CONFIG)] == [data, b"", b"{}"]
    assert bucket.parts(f"small/{WHOLE}") == -(-len(data) // LEAST_PART) == 5
    assert bucket.uploads() == []


def test_no_file_has_too_many_parts() -> None:
    for size in (0, 1, PART * 10_000, PART * 10_000 + 1, 5 << 40):
        part = part_size(size)
        assert part >= PART
        assert -(-size // part) <= 10_000
    assert part_size(64 << 30) == PART
    assert part_size(5 << 40) < 600 << 20


def test_bytes_out_of_turn(store: Store) -> None:
    with Upload(f"{store.url}/out") as staging:
        staging.prepare({"a": 10})
        staging.pwrite("a", 8, memoryview(b"89"))
        early = bytearray(b"456")
        staging.pwrite("a", 4, memoryview(early))
        early[:] = b"xxx"
        staging.pwrite("a", 0, memoryview(b"0123"))
        for offset, data in ((2, b"2"), (9, b"9a")):
            with pytest.raises(ValueError, match="of 10"):
                staging.pwrite("a", offset, memoryview(data))
        with pytest.raises(ValueError, match="7 of 10"):
            staging.commit()
        staging.pwrite("a", 7, memoryview(b"7"))
        staging.commit()
    assert store.get("out/a") == b"0123456789"


@pytest.mark.parametrize("name", ["", "..", "../a", "/a", "a//b"])
def test_names_that_are_paths(memory: Memory, name: str) -> None:
    with Upload(f"{memory.url}/out") as staging:
        assert refused(lambda: staging.prepare({name: 1})).code == "PATH_ESCAPE"
    assert memory.names() == []


def test_what_is_there_stays(store: Store, tmp_path: Path) -> None:
    local = tiny(tmp_path / "local")
    store.put("project/thesis.tex", b"x")
    store.put("file", b"x")
    url = upload(local, store, "old")
    before = {name: store.get(name) for name in store.names()}
    for target, overwrite in (("old", False), ("project", True), ("file", True), ("project", False)):
        with refuses("EXISTS", exit_code=2, file=f"{store.url}/{target}"):
            tx.convert(local, f"{store.url}/{target}", to="torchtitan", overwrite=overwrite)
    with refuses("EXISTS" if isinstance(store, Bucket) else "UNSUPPORTED"):
        tx.convert(local, url, to="torchtitan", resume=True)
    if isinstance(store, Memory):
        for target, overwrite in ((f"{store.url}/new", False), (url, True)):
            with refuses("UNSUPPORTED", exit_code=3):
                tx.convert(local, target, to="torchtitan", resume=True, overwrite=overwrite)
    assert {name: store.get(name) for name in store.names()} == before


def test_the_root_of_a_store(bucket: Bucket, tmp_path: Path) -> None:
    local = tiny(tmp_path / "local")
    for target in (bucket.url, f"{bucket.url}/"):
        with refuses("EXISTS"):
            tx.convert(local, target, to="hf", overwrite=True)
    with refuses("IO", exit_code=4):
        tx.convert(local, "s3://no-such-bucket-here/out", to="hf")


class StopError(Exception):
    """Raised in the middle."""


@pytest.mark.parametrize("shard_size", [1 << 30, 5_000_000])
def test_a_failure_leaves_nothing(store: Store, tmp_path: Path, shard_size: int) -> None:
    local = large(tmp_path / "local")
    done = 0

    def stop(count: int) -> None:
        nonlocal done
        done += count
        if done > 20 << 20:
            raise StopError

    with pytest.raises(StopError):
        tx.convert(local, f"{store.url}/out", to="safetensors", shard_size=shard_size, progress=stop, jobs=2)
    assert store.names() == []
    assert unfinished(store) == []


@pytest.mark.parametrize(
    ("doing", "method"),
    [("sending", "upload_part"), ("completing", "complete_multipart_upload"), ("deleting", "delete_object")],
)
def test_a_service_that_fails(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doing: str, method: str
) -> None:
    local, url, overwrite = tiny(tmp_path / "local", shards=3), f"{bucket.url}/out", doing == "deleting"
    if overwrite:
        upload(local, bucket, "out")
    client, calls = type(bucket.client), 0

    def failing(call: Callable[..., object]) -> Callable[..., object]:
        def third(self: object, name: str, *args: object, **kwargs: object) -> object:
            nonlocal calls
            calls += name == method
            if name == method and calls == 3:
                raise PermissionError("AccessDenied")
            return call(self, name, *args, **kwargs)

        return third

    with monkeypatch.context() as patch:
        for name in ("call_s3", "_call_s3"):  # the one of open files, and the one of everything else
            patch.setattr(client, name, failing(getattr(client, name)))
        with refuses("IO", exit_code=4) as caught:
            tx.convert(local, url, to="hf", shard_size=10_000, overwrite=overwrite)
    assert caught.value.refusals[0].message.startswith(doing)
    assert bucket.uploads() == []
    if overwrite:
        assert refused(lambda: tx.open(url)).exit_code != 0
    else:
        assert bucket.names() == []


def watch(look: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Look before and after every step of a commit; some take place at once, but no two looks do."""
    turns = threading.Lock()

    def watched(cls: type, name: str) -> None:
        method = getattr(cls, name)

        def step(*args: object, **options: object) -> object:
            with turns:
                look()
            done = method(*args, **options)
            with turns:
                look()
            return done

        monkeypatch.setattr(cls, name, step)

    for cls in COMMITTED:
        watched(cls, "commit")
    watched(Service, "delete")


@pytest.mark.parametrize("form", sorted(writable()))
@pytest.mark.parametrize("shard_size", [9000, 1 << 30])
def test_no_format_is_seen_in_part(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, shard_size: int
) -> None:
    local, url = tiny(tmp_path / "local"), f"{memory.url}/out"
    seen: list[tuple[str, int] | str] = []

    def look() -> None:
        try:
            with tx.open(url) as there:
                seen.append((there.format, len(there)))
        except TransaxleError:
            seen.append("nothing")

    watch(look, monkeypatch)
    tx.convert(local, url, to=form if form == "vllm_sharded" else f"{form}:hf", shard_size=shard_size)
    with tx.open(url) as written:
        count = len(written)
    assert list(dict.fromkeys(seen)) == ["nothing", (form, count)]
    assert count == TENSORS or form == "vllm_sharded"  # which has scales as well
    assert tx.diff(local, url).equal
    seen.clear()
    tx.convert(local, url, to="torchtitan", overwrite=True)
    assert seen[0] == (form, count)
    assert set(seen[1:-1]) - {seen[0], seen[-1]} == {"nothing"}
    assert tx.diff(local, url).equal


@pytest.mark.oracle
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("old_shards", [None, 1, 3])
def test_no_reader_ever_sees_a_mixture(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int, old_shards: int | None
) -> None:
    """Look at the target before and after every step of the commit: old, new, or nothing that can be opened."""
    url = f"{store.url}/out"
    old, new = read(tiny(tmp_path / "new")), {}
    new = {name: array + np.ones((), array.dtype) for name, array in old.items()}
    local = write(tmp_path / "other", new, config={"model_type": "qwen3_moe"})
    shard_size = 10_000 if shards > 1 else 1 << 30
    if old_shards:
        tx.convert(tmp_path / "new", url, to="hf", shard_size=10_000 if old_shards > 1 else 1 << 30)
    seen: list[str] = []

    def look() -> None:
        try:
            with tx.open(url) as there:
                found = {name: there[name].tobytes() for name in there}
                config = CONFIG in there.container.carried
        except TransaxleError:
            seen.append("nothing")
            return
        assert config
        if found == {name: array.tobytes() for name, array in old.items()}:
            seen.append("old")
        else:
            assert found == {name: array.tobytes() for name, array in new.items()}
            seen.append("new")

    watch(look, monkeypatch)
    tx.convert(local, url, to="hf", shard_size=shard_size, overwrite=True)
    order = ["old", "nothing", "new"] if old_shards else ["nothing", "new"]
    assert list(dict.fromkeys(seen)) == order
    assert seen == sorted(seen, key=order.index)
    checked = tx.verify(url)
    assert (checked.ok, checked.against, checked.unlisted) == (True, "manifest", ())


def test_a_source_is_never_written_to(store: Store, tmp_path: Path) -> None:
    local = tiny(tmp_path / "local", shards=3)
    url = upload(local, store, "ck")
    before = {name: store.get(name) for name in store.names()}
    for target in (url, f"{url}/", f"{url}/sub", store.url.replace("://", ":///./"), f"{url}/out.safetensors"):
        with refuses("EXISTS", "the source"):
            tx.convert(url, target, to="torchtitan", overwrite="everything")
    assert {name: store.get(name) for name in store.names()} == before


def test_only_a_checkpoint_is_replaced(store: Store, tmp_path: Path) -> None:
    """Notes, adapters and whatever else is under the URL make it refuse, and stay."""
    local = tiny(tmp_path / "local", shards=3)
    url = upload(local, store, "ck")
    own = {"ck/notes.md": b"mine", "ck/sub/model.safetensors": b"of somebody", "ck/adapter_model.safetensors": b"mine"}
    for name, data in own.items():
        store.put(name, data)
    before = {name: store.get(name) for name in store.names()}
    foreign = "adapter_model.safetensors, notes.md, sub/ belong to no checkpoint"
    with refuses("EXISTS", foreign, hint="--overwrite=everything", exit_code=2):
        tx.convert(local, url, to="torchtitan", overwrite=True)
    assert {name: store.get(name) for name in store.names()} == before
    tx.convert(local, url, to="torchtitan", overwrite="everything")
    assert store.names() == [f"ck/{name}" for name in sorted((CONFIG, WHOLE, MANIFEST))]
    tx.convert(local, url, to="dcp", overwrite=True)
    assert tx.diff(local, url).equal
    store.put("one.bin", b"years of work")
    with refuses("EXISTS", "does not begin"):
        tx.convert(local, f"{store.url}/one.bin", to="torch", overwrite=True)
    assert store.get("one.bin") == b"years of work"


_KILLED = """
import os, signal, sys
import transaxle as tx

done = 0

def stop(count):
    global done
    done += count
    if done > 20 << 20:
        os.kill(os.getpid(), signal.SIGKILL)

tx.convert(sys.argv[1], sys.argv[2], to="safetensors", shard_size=5_000_000, progress=stop)
"""


def test_a_killed_run_leaves_nothing_to_be_seen(bucket: Bucket, tmp_path: Path) -> None:
    local, url = large(tmp_path / "local"), f"{bucket.url}/out"
    done = subprocess.run([sys.executable, "-c", _KILLED, str(local), url], check=False, timeout=120)
    assert done.returncode == -9
    assert {name.partition("/")[0] for name in bucket.names()} == {".out.transaxle-partial"}
    assert refused(lambda: tx.open(url)).code == "IO"
    error = refused(lambda: tx.convert(local, url, to="safetensors", shard_size=5_000_000))
    assert (error.code, "unfinished work" in str(error)) == ("EXISTS", True)
    tx.convert(local, url, to="safetensors", shard_size=5_000_000, resume=True)
    assert tx.diff(local, url).equal
    assert [name for name in bucket.names() if not name.startswith("out/")] == bucket.uploads() == []


def ready(store: Store, data: bytes, *, overwrite: bool) -> Upload:
    """An upload of a file and a manifest, of which only the last steps are left."""
    upload = Upload(f"{store.url}/ck", overwrite=overwrite).__enter__()
    upload.prepare({WHOLE: len(data), MANIFEST: len(data)})
    for name in (WHOLE, MANIFEST):
        upload.pwrite(name, 0, memoryview(data))
    upload.complete()
    upload.make_way()
    return upload


@pytest.mark.parametrize("mixed", [False, True])
def test_of_two_in_one_place_one_succeeds(store: Store, mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no lock, but each looks at the end whether its files are still its own; the other's are left alone."""
    first, second = ready(store, b"first", overwrite=True), ready(store, b"second", overwrite=True)
    compare = Upload._compare

    def compared(self: Upload, name: str) -> None:
        compare(self, name)
        if mixed and self is first and name == WHOLE:
            second.appear()

    monkeypatch.setattr(Upload, "_compare", compared)
    first.appear()
    if not mixed:
        second.appear()
    error = refused(first.recheck)
    assert (error.code, "another run wrote" in str(error)) == ("IO", True)
    first.__exit__(type(error), error, None)
    assert store.get(f"ck/{WHOLE}") == b"second"
    assert (f"ck/{MANIFEST}" in store.names()) is not mixed
    if mixed:
        error = refused(second.recheck)
        assert error.where.file == MANIFEST
    else:
        second.recheck()
        second.keep()
    second.__exit__(None, None, None)
    assert store.names() == ([] if mixed else [f"ck/{WHOLE}", f"ck/{MANIFEST}"])


def test_fsspec_is_not_imported_before_it_is_needed() -> None:
    code = "import sys, transaxle as tx, transaxle.verbs, transaxle.cli; assert 'fsspec' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
