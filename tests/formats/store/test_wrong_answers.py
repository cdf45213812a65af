"""S3 that answers wrongly or late: a run ends with what was sent, whole, or with an error; never otherwise."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import transaxle as tx
from tests.engine.distribute.test_object_store import hidden, look_at, many
from tests.formats.faulty_proxy import Exchange, FaultyProxy
from tests.formats.s3_server import Bucket
from tests.formats.store.test_two_runs import Write, checkpoint, converted, streamed
from transaxle.engine.distribute import driver
from transaxle.errors import TransaxleError
from transaxle.formats.store import multipart, upload

KEY = "x-amz-server-side-encryption"


@pytest.fixture(params=[streamed, converted], ids=lambda each: each.__name__)
def run(request: pytest.FixtureRequest) -> Write:
    """Each way to write."""
    found: Write = request.param
    return found


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
    with pytest.raises(TransaxleError, match="has not put the file together") as caught:
        run(checkpoint(tmp_path / "own", 1), f"{bucket.url}/out")
    assert caught.value.code == "IO"
    assert bucket.names() == hidden(bucket) == []


def test_a_part_with_another_tag_is_never_put_together(
    run: Write, bucket: Bucket, proxy: FaultyProxy, tmp_path: Path
) -> None:
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


def test_resuming_where_tags_are_no_sums_sends_the_parts_again(
    bucket: Bucket, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "ITEM", 6 << 20)
    source, url = many(tmp_path / "source", 18), f"{bucket.url}/out"
    under_own_key(proxy)
    proxy.fails = lambda _method, path: "forbidden" if "partNumber=3" in path else None
    convert = partial(tx.convert, source, url, to="safetensors", resume=True)
    with pytest.raises(TransaxleError, match="sending part 3"):
        convert()
    assert hidden(bucket)
    proxy.fails = lambda _method, _path: None
    convert()
    assert tx.diff(source, url).equal
    assert hidden(bucket) == []


def missing(exchange: Exchange) -> None:
    exchange.status, exchange.data = 404, b""


def test_a_file_that_is_seen_late_is_waited_for(
    run: Write, bucket: Bucket, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "_PAUSES", (0.01,) * 5)
    proxy.answers = first = First(2, looks, missing)
    source = checkpoint(tmp_path / "own", 1)
    run(source, f"{bucket.url}/out")
    assert first.seen
    assert tx.diff(source, f"{bucket.url}/out").equal


def test_a_file_that_is_never_seen_is_an_error(
    run: Write, bucket: Bucket, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "_PAUSES", (0.01,) * 5)
    proxy.answers = First(1000, looks, missing)
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


def test_a_listing_that_lacks_everything_is_no_failure(
    run: Write, bucket: Bucket, proxy: FaultyProxy, tmp_path: Path
) -> None:
    """Each file was seen by itself."""

    def answers(exchange: Exchange) -> None:
        if "list-type" in exchange.path:
            every = rb"<(Contents|CommonPrefixes)>.*</\1>"
            exchange.data = re.sub(every, b"", exchange.data, flags=re.DOTALL)

    proxy.answers = answers
    source = checkpoint(tmp_path / "own", 1)
    run(source, f"{bucket.url}/out")
    proxy.answers = lambda _exchange: None
    assert tx.diff(source, f"{bucket.url}/out").equal
    assert bucket.uploads() == []
