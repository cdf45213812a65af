"""Two runs that write to one place on S3 without replacing: the second one is told, and the first one's files stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import transaxle as tx
from tests.checkpoints import write
from tests.formats.faulty_proxy import Exchange, FaultyProxy
from tests.formats.s3_server import Bucket
from transaxle.errors import TransaxleError
from transaxle.formats.registry import MANIFEST
from transaxle.formats.store.unfinished_uploads import HiddenObjects
from transaxle.formats.store.upload import Upload

CONFIG, WHOLE = "config.json", "model.safetensors"
CONDITION = "if-none-match"
Write = Callable[[Path, str], object]


def checkpoint(folder: Path, seed: int) -> Path:
    """Make a checkpoint with other values for another seed, and files of equal names and sizes."""
    return write(folder, {"w": np.random.default_rng(seed).standard_normal((9, 5))}, config={"seed": seed})


def streamed(source: Path, url: str, **others: int) -> None:
    """Write by the client's own streams, as saves of models do; `others`: further files, of no bytes."""
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    with Upload(url) as upload:
        upload.prepare({name: len(data) for name, data in files.items()} | others)
        for name, data in files.items():
            upload.pwrite(name, 0, memoryview(data))
        upload.write(MANIFEST, str(source).encode())
        upload.commit()


def converted(source: Path, url: str) -> None:
    tx.convert(source, url, to="safetensors")


WRITES = [streamed, converted]


@pytest.fixture(params=WRITES, ids=lambda each: each.__name__)
def run(request: pytest.FixtureRequest) -> Write:
    """Each way to write."""
    found: Write = request.param
    return found


def contents(bucket: Bucket) -> dict[str, bytes]:
    return {name: bucket.get(name) for name in bucket.names()}


@pytest.fixture
def other(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """What another run writes whole, just after the next one has looked what is there; empty until then."""
    make_way, source = Upload.make_way, checkpoint(tmp_path / "other", 1)
    files: dict[str, bytes] = {}

    def then_another(self: Upload) -> None:
        make_way(self)
        if not files:
            files["begun"] = b""
            streamed(source, f"{bucket.url}/out")
            files.clear()
            files.update({name: data for name, data in contents(bucket).items() if name.startswith("out/")})

    monkeypatch.setattr(Upload, "make_way", then_another)
    yield files
    assert files


def unknown(exchange: Exchange) -> None:
    if CONDITION in exchange.headers:
        exchange.answer(501, "NotImplemented")


def invalid(exchange: Exchange) -> None:
    if CONDITION in exchange.headers:
        exchange.answer(400, "InvalidArgument")


def known(_: Exchange) -> None:
    """S3 itself."""


@pytest.mark.oracle
@pytest.mark.parametrize("asks", [known, unknown, invalid], ids=lambda each: each.__name__)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_second_one_is_refused(
    asks: Callable[[Exchange], None],
    seed: int,
    run: Write,
    bucket: Bucket,
    proxy: FaultyProxy,
    other: dict[str, bytes],
    tmp_path: Path,
) -> None:
    """Also with the same bytes, and where the store knows no conditions: then it is looked at just before."""
    proxy.asks = asks
    with pytest.raises(TransaxleError, match="another run has put this file here") as caught:
        run(checkpoint(tmp_path / "own", seed), f"{bucket.url}/out")
    assert (caught.value.code, caught.value.exit_code) == ("EXISTS", 2)
    assert "--overwrite" in caught.value.hint
    assert contents(bucket) == other
    assert bucket.uploads() == []


def test_what_is_put_there_last_does_not_cover_the_other_ones(
    run: Write, bucket: Bucket, proxy: FaultyProxy, other: dict[str, bytes], tmp_path: Path
) -> None:
    """The two have only the manifest in common: what the second one has let appear by then goes again."""
    assert proxy.failed == 0
    source = write(tmp_path / "own", {"w": np.ones(3)})
    (source / WHOLE).rename(source / "pytorch_model.safetensors")
    with pytest.raises(TransaxleError, match="another run has put this file here"):
        run(source, f"{bucket.url}/out")
    assert contents(bucket) == other
    assert bucket.uploads() == []


def test_two_that_begin_at_the_same_time(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, url, begin = checkpoint(tmp_path / "own", 2), f"{bucket.url}/out", HiddenObjects.begin
    begun: list[dict[str, bytes]] = []

    def another(self: HiddenObjects, *how: object, **options: object) -> None:
        if not begun:
            begin(self, *how)  # type: ignore[arg-type] # as another run does
            begun.append(contents(bucket))
        begin(self, *how, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(HiddenObjects, "begin", another)
    with pytest.raises(TransaxleError, match="beside the target is unfinished work") as caught:
        converted(source, url)
    assert caught.value.code == "EXISTS"
    assert [contents(bucket)] == begun
    assert bucket.uploads() == []


class Once:
    """Changes the first answer of each file that appears, and no others."""

    def __init__(self, change: Callable[[Exchange], None]) -> None:
        self._change = change
        self.seen: set[str] = set()

    def __call__(self, exchange: Exchange) -> None:
        path = exchange.path.partition("?")[0]
        if exchange.appears and path not in self.seen:
            self.seen.add(path)
            self._change(exchange)


def test_a_refusal_of_what_was_carried_out_is_none(
    run: Write, bucket: Bucket, proxy: FaultyProxy, tmp_path: Path
) -> None:
    """The first answer is lost, the client asks again, and finds its own file there."""
    proxy.answers = once = Once(lambda exchange: exchange.answer(412, "PreconditionFailed"))
    source = checkpoint(tmp_path / "own", 2)
    run(source, f"{bucket.url}/out")
    assert len(once.seen) >= 3
    assert tx.diff(source, f"{bucket.url}/out").equal
    assert bucket.uploads() == []


def test_a_conflict_that_passes(run: Write, bucket: Bucket, proxy: FaultyProxy, tmp_path: Path) -> None:
    proxy.asks = once = Once(lambda exchange: exchange.answer(409, "ConditionalRequestConflict"))
    source = checkpoint(tmp_path / "own", 2)
    run(source, f"{bucket.url}/out")
    assert len(once.seen) >= 3
    assert tx.diff(source, f"{bucket.url}/out").equal


@pytest.mark.oracle
def test_a_conflict_after_which_the_upload_is_gone_says_to_begin_again(
    run: Write, bucket: Bucket, proxy: FaultyProxy, tmp_path: Path
) -> None:
    """As S3's documentation says: it must be begun again, and all parts sent."""

    def conflict(exchange: Exchange) -> None:
        if exchange.completes:
            key, _, upload = exchange.path.partition("?uploadId=")
            which = {"Bucket": bucket.name, "Key": key.removeprefix(f"/{bucket.name}/"), "UploadId": upload}
            if bucket.uploads():
                bucket.client.call_s3("abort_multipart_upload", **which)
            exchange.answer(409, "ConditionalRequestConflict")

    proxy.asks = conflict
    with pytest.raises(TransaxleError, match="the upload is gone") as caught:
        run(checkpoint(tmp_path / "own", 2), f"{bucket.url}/out")
    assert (caught.value.code, caught.value.hint) == ("IO", "Begin again.")
    assert contents(bucket) == {}


def test_a_file_without_bytes_is_not_replaced_either(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no parts, so it is put there in one step."""
    source, make_way = checkpoint(tmp_path / "own", 2), Upload.make_way
    streamed(source, f"{bucket.url}/first", empty=0)
    assert bucket.get("first/empty") == b""

    def then_another(self: Upload) -> None:
        make_way(self)
        bucket.put("out/empty", b"of another run")

    monkeypatch.setattr(Upload, "make_way", then_another)
    with pytest.raises(TransaxleError, match="another run has put this file here") as caught:
        streamed(source, f"{bucket.url}/out", empty=0)
    assert caught.value.where.file == "empty"
    assert [name for name in bucket.names() if name.startswith("out/")] == ["out/empty"]
    assert bucket.get("out/empty") == b"of another run"
