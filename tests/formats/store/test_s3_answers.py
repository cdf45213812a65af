"""Two runs that write to one place on S3 without replacing: the second one is told, and the first one's files stay."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import transaxle as tx
from tests.checkpoints import write
from tests.engine.distribute.test_object_store import hidden, look_at, many
from tests.formats.faulty_proxy import Exchange, FaultyProxy
from tests.formats.refusals import refuses
from tests.formats.s3_server import Bucket
from transaxle.errors import TransaxleError
from transaxle.formats.registry import MANIFEST
from transaxle.formats.store import multipart, upload
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
    with refuses("EXISTS", "another run has put this file here", exit_code=2, hint="--overwrite"):
        run(checkpoint(tmp_path / "own", seed), f"{bucket.url}/out")
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
    with refuses("EXISTS", "beside the target is unfinished work"):
        converted(source, url)
    assert [contents(bucket)] == begun
    assert bucket.uploads() == []


def test_a_refusal_of_what_was_done_is_none(run: Write, bucket: Bucket, proxy: FaultyProxy, tmp_path: Path) -> None:
    """The first answer is lost, the client asks again, and finds its own file there."""
    proxy.answers = once = First(1, appears, lambda exchange: exchange.answer(412, "PreconditionFailed"))
    source = checkpoint(tmp_path / "own", 2)
    run(source, f"{bucket.url}/out")
    assert len(once.seen) >= 3
    assert tx.diff(source, f"{bucket.url}/out").equal
    assert bucket.uploads() == []


def test_a_conflict_that_passes(run: Write, bucket: Bucket, proxy: FaultyProxy, tmp_path: Path) -> None:
    proxy.asks = once = First(1, appears, lambda exchange: exchange.answer(409, "ConditionalRequestConflict"))
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


def test_a_file_without_bytes_is_not_replaced(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


# S3 that answers wrongly or late: a run ends with what was sent, whole, or with an error; never otherwise.

KEY = "x-amz-server-side-encryption"


class First:
    """Changes the first exchanges of a kind for each file.

    Args:
        count: how many of each.
        which: tells what is of the kind.
        change: what it does to them.
    """

    def __init__(self, count: int, which: Callable[[Exchange], bool], change: Callable[[Exchange], None]) -> None:
        self._count, self._which, self._change = count, which, change
        self.seen = Counter[str]()
        self._lock = threading.Lock()

    def __call__(self, exchange: Exchange) -> None:
        path = exchange.path.partition("?")[0]
        if self._which(exchange):
            with self._lock:
                self.seen[path] += 1
            if self.seen[path] <= self._count:
                self._change(exchange)


def appears(exchange: Exchange) -> bool:
    return exchange.appears


def completes(exchange: Exchange) -> bool:
    return exchange.completes


def looks(exchange: Exchange) -> bool:
    """Tell whether it asks for the status of a file of the target that is there."""
    return exchange.method == "HEAD" and "/out/" in exchange.path and exchange.status == 200


def internal(exchange: Exchange) -> None:
    """Fail with a status that says otherwise, as S3 does where it takes long."""
    exchange.answer(200, "InternalError")


@pytest.mark.oracle
@pytest.mark.parametrize("carried_out", [True, False])
def test_an_error_in_an_answer_of_success_is_asked_again(
    carried_out: bool, run: Write, bucket: Bucket, proxy: FaultyProxy, tmp_path: Path
) -> None:
    source, first = checkpoint(tmp_path / "own", 1), First(1, completes, internal)
    proxy.answers, proxy.asks = (first, proxy.asks) if carried_out else (proxy.answers, first)
    run(source, f"{bucket.url}/out")
    assert first.seen
    assert tx.diff(source, f"{bucket.url}/out").equal
    assert hidden(bucket) == []


@pytest.mark.oracle
def test_an_error_in_an_answer_of_success_that_stays_is_one(
    run: Write, bucket: Bucket, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multipart, "COMPLETION", 1.0)
    proxy.asks = First(1000, completes, internal)
    with refuses("IO", "has not put the file together"):
        run(checkpoint(tmp_path / "own", 1), f"{bucket.url}/out")
    assert bucket.names() == hidden(bucket) == []


def test_a_part_of_another_tag_is_never_joined(run: Write, bucket: Bucket, proxy: FaultyProxy, tmp_path: Path) -> None:
    def other_tag(exchange: Exchange) -> None:
        exchange.answered = {name: value for name, value in exchange.answered.items() if name.lower() != "etag"}
        exchange.answered["ETag"] = f'"{"0" * 32}"'

    proxy.answers = First(1000, lambda exchange: "partNumber" in exchange.path, other_tag)
    with pytest.raises(TransaxleError) as caught:
        run(checkpoint(tmp_path / "own", 1), f"{bucket.url}/out")
    assert caught.value.code in ("IO", "INCOMPLETE")
    assert bucket.names() == hidden(bucket) == []


def backwards(text: bytes) -> bytes:
    """Turn every tag around: what looks like a sum then is none."""
    return re.sub(rb"[0-9a-f]{32}", lambda found: found[0][::-1], text)


def under_own_key(proxy: FaultyProxy) -> None:
    """Let the store tag and answer as S3 does that encrypts with a key of one's own (SSE-KMS)."""

    def asks(exchange: Exchange) -> None:
        if exchange.completes:
            exchange.body = re.sub(rb"<ETag>.*?</ETag>", lambda found: backwards(found[0]), exchange.body)

    def answers(exchange: Exchange) -> None:
        exchange.data = re.sub(rb"<ETag>.*?</ETag>", lambda found: backwards(found[0]), exchange.data)
        for name, value in exchange.answered.items():
            if name.lower() == "etag":
                exchange.answered[name] = backwards(value.encode()).decode()
        if exchange.method in ("HEAD", "PUT", "POST", "GET"):
            exchange.answered[KEY] = "aws:kms"

    proxy.asks, proxy.answers = asks, answers


@pytest.mark.oracle
@pytest.mark.parametrize("lost", [False, True])
def test_tags_that_are_no_sums(lost: bool, run: Write, bucket: Bucket, proxy: FaultyProxy, tmp_path: Path) -> None:
    """Where the last answer is lost, too: then the file is known by being another one than before."""
    under_own_key(proxy)
    asks, answers, asked = proxy.asks, proxy.answers, Counter[str]()

    def asks_once(exchange: Exchange) -> None:
        asks(exchange)
        asked[exchange.path] += exchange.completes
        if lost and asked[exchange.path] > 1:
            exchange.answer(404, "NoSuchUpload")

    def answers_nothing(exchange: Exchange) -> None:
        answers(exchange)
        if lost and exchange.completes and exchange.status == 200:
            exchange.answer(500, "InternalError")

    proxy.asks, proxy.answers = asks_once, answers_nothing
    source = checkpoint(tmp_path / "own", 1)
    run(source, f"{bucket.url}/out")
    assert (max(asked.values()) > 1) is lost
    assert tx.diff(source, f"{bucket.url}/out").equal
    assert hidden(bucket) == []


def not_found(exchange: Exchange) -> None:
    exchange.status, exchange.data = 404, b""


def test_a_file_that_is_never_seen_is_an_error(
    run: Write, bucket: Bucket, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "_PAUSES", (0.01,) * 5)
    proxy.answers = First(1000, looks, not_found)
    with pytest.raises(TransaxleError, match="but the service holds nothing"):
        run(checkpoint(tmp_path / "own", 1), f"{bucket.url}/out")
    proxy.answers = lambda _exchange: None
    assert bucket.names() == hidden(bucket) == []


@pytest.mark.oracle
@pytest.mark.parametrize("count", [2, 1000])
def test_the_status_of_an_earlier_file_is_not_taken_for_that_of_ours(
    count: int, bucket: Bucket, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of the same size was there: its status is waited for to pass, and believed in the end."""
    monkeypatch.setattr(upload, "_PAUSES", (0.01,) * 5)
    old, new, url = (
        checkpoint(tmp_path / "old", 1),
        checkpoint(tmp_path / "new", 2),
        f"{bucket.url}/out/one.safetensors",
    )
    tx.convert(old, url, to="safetensors")
    tag = bucket.client.info(f"{bucket.name}/out/one.safetensors")["ETag"]
    appeared = threading.Event()

    def stale(exchange: Exchange) -> None:
        exchange.answered = {name: value for name, value in exchange.answered.items() if name.lower() != "etag"}
        exchange.answered["ETag"] = tag

    late = First(count, lambda exchange: looks(exchange) and appeared.is_set(), stale)

    def answers(exchange: Exchange) -> None:
        late(exchange)
        if exchange.completes:
            appeared.set()

    proxy.answers = answers
    if count == 2:
        tx.convert(new, url, to="safetensors", overwrite=True)
    else:
        with pytest.raises(TransaxleError, match="is not ours any more"):
            tx.convert(new, url, to="safetensors", overwrite=True)
    proxy.answers = lambda _exchange: None
    assert late.seen
    assert tx.diff(new, url).equal


@pytest.mark.oracle
@pytest.mark.parametrize("listed", [False, True])
def test_a_file_that_a_listing_lacks_is_not_mixed_with_ours(
    listed: bool, bucket: Bucket, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not deleted, so it would stand beside what replaces the checkpoint that it was of."""
    monkeypatch.setattr(upload, "_PAUSES", (0.01,) * 5)
    old, new, url = many(tmp_path / "old", 6), checkpoint(tmp_path / "new", 2), f"{bucket.url}/out"
    tx.convert(old, url, to="safetensors", shard_size=4 << 20)
    appeared = threading.Event()

    def answers(exchange: Exchange) -> None:
        if exchange.completes:
            appeared.set()
        if "list-type" in exchange.path and not appeared.is_set() and not listed:
            lacking = rb"<Contents>(?:(?!</Contents>).)*00002-of-(?:(?!</Contents>).)*</Contents>"
            exchange.data = re.sub(lacking, b"", exchange.data, flags=re.DOTALL)

    proxy.answers = answers
    if listed:
        tx.convert(new, url, to="safetensors", overwrite=True)
        assert tx.diff(new, url).equal
        return
    with pytest.raises(TransaxleError, match="is none of this run's") as caught:
        tx.convert(new, url, to="safetensors", overwrite=True)
    assert "00002-of-" in str(caught.value.where.file)
    assert len(look_at(bucket)) == 1
