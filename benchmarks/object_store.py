"""Promise: workers that write to an object store share its connections' time, so twice as many take half as long.

A real S3 server (moto's) stands behind a proxy that gives every connection a latency and a bandwidth, as stores do. A
checkpoint is converted to it by 1, 2, 4 and 8 worker processes, with one item each: as many files for each, since an
object has one writer. What is measured is the sum of all
steps: begin, items, commit; and of all but the completion of the uploads, since this server, one process, copies and
hashes all bytes anew for it. Efficiency is the time of one worker over that of n workers times n, without that
completion. Connections are slow, so that the machine's own processors are not what is measured.

They are all the same where many parts end at one time, and proxy and server take them one by one. So beside it stands
what this arrangement allows: as many processes with as many connections that send the same bytes by plain requests, and
do nothing else. That is the floor; *of the floor* is its time over that of the conversion.

    python benchmarks/object_store.py [--mebibytes 512] [--files 8] [--rate 1] [--latency 0.03]
"""

from __future__ import annotations

import argparse
import http.client
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from urllib.parse import urlsplit

import fsspec
import fsspec.config
import numpy as np
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))

import transaxle as tx
from tests.formats.faulty_proxy import proxied
from tests.formats.s3_server import ENVIRONMENT, serving_s3
from transaxle.formats.store.shared_upload import SENDERS, SharedUpload
from transaxle.formats.store.upload import PART

LEAST = 0.9
"""Efficiency that is promised."""
BUCKET = "benchmark"
PATIENT = '{"config_kwargs": {"read_timeout": 120}}'
"""The client waits for more than 15 seconds: of what it has sent, megabytes lie in the system's buffers."""
TENSOR, SMALL = 2 << 20, 4096
"""Bytes of a tensor, and of one of the small checkpoint, where each has a file."""


def checkpoint(folder: Path, count: int, size: int = TENSOR) -> Path:
    """Write a checkpoint of equal tensors in one file."""
    folder.mkdir()
    values = np.random.default_rng(0).integers(0, 255, size, np.uint8)
    save_file({f"w{at:04}": values + at % 7 for at in range(count)}, folder / "model.safetensors")
    return folder


def seconds(source: Path, small: Path, url: str, given: argparse.Namespace, workers: int) -> tuple[float, float]:
    """Convert by some workers, which have done another conversion before.

    Returns:
        seconds of all, and of the completion of the uploads.
    """
    shard = (given.mebibytes << 20) // given.files
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for _ in range(2):  # so that all of them have imported everything, and have a connection
            how = {"items": 4 * workers, "jobs": 1, "shard_size": SMALL, "overwrite": True}
            tx.convert(small, f"{url}-small", to="safetensors", on=pool, **how)
        completing.clear()
        begun = time.monotonic()
        tx.convert(source, f"{url}-{workers}", to="safetensors", on=pool, items=workers, jobs=1, shard_size=shard)
        return time.monotonic() - begun, sum(completing)


def send_parts(url: str, key: str, count: int) -> None:
    """Send parts by plain requests, over as many connections as a worker has; the upload is abandoned then."""
    where, data = urlsplit(url).netloc, bytes(PART)

    def ask(method: str, query: str, body: bytes | None = None) -> bytes:
        connection = http.client.HTTPConnection(where, timeout=600)
        connection.request(method, f"/{BUCKET}/{key}?{query}", body, {"Authorization": "AWS testing:testing"})
        answer = connection.getresponse().read()
        connection.close()
        return answer

    (upload,) = re.findall(rb"<UploadId>(.*?)</UploadId>", ask("POST", "uploads"))
    named = f"uploadId={upload.decode()}"
    with ThreadPoolExecutor(SENDERS) as threads:
        list(threads.map(lambda number: ask("PUT", f"partNumber={number + 1}&{named}", data), range(count)))
    ask("DELETE", named)


def floor_seconds(url: str, given: argparse.Namespace, workers: int) -> float:
    """Return how long as many processes take that only send."""
    count = (given.mebibytes << 20) // PART // workers
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        list(pool.map(abs, range(4 * workers)))  # so that all of them have started
        begun = time.monotonic()
        for each in [pool.submit(send_parts, url, f"floor-{number}", count) for number in range(workers)]:
            each.result()
        return time.monotonic() - begun


completing: list[float] = []
"""Seconds of each completion."""


def timed(appear: Callable[[SharedUpload], None]) -> Callable[[SharedUpload], None]:
    """Let a completion leave its time."""

    def timing(upload: SharedUpload) -> None:
        begun = time.monotonic()
        appear(upload)
        completing.append(time.monotonic() - begun)

    return timing


def main() -> int:
    """Measure, and tell whether the promise is kept."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1.0, help="MiB a second of a connection")
    parser.add_argument("--latency", type=float, default=0.03)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    given = parser.parse_args()
    os.environ.update(ENVIRONMENT, FSSPEC_S3=PATIENT)
    fsspec.config.set_conf_env(fsspec.config.conf)
    SharedUpload.appear = timed(SharedUpload.appear)  # type: ignore[method-assign]
    kept = True
    with (
        serving_s3() as server,
        tempfile.TemporaryDirectory() as folder,
        proxied(server, latency=given.latency, rate=given.rate * (1 << 20)) as proxy,
    ):
        os.environ["AWS_ENDPOINT_URL"] = proxy.url
        fsspec.filesystem("s3").call_s3("create_bucket", Bucket=BUCKET)
        source = checkpoint(Path(folder, "source"), (given.mebibytes << 20) // TENSOR)
        small = checkpoint(Path(folder, "small"), 4 * max(given.workers), SMALL)
        print(f"{given.mebibytes} MiB, {given.rate:g} MiB/s and {given.latency * 1000:g} ms a connection")
        first = 0.0
        for workers in given.workers:
            whole, completion = seconds(source, small, f"s3://{BUCKET}/out", given, workers)
            fsspec.filesystem("s3").rm(f"{BUCKET}/out-{workers}", recursive=True)
            took = whole - completion
            first = first or took * workers
            efficiency = first / (took * workers)
            kept = kept and efficiency >= LEAST
            rate = given.mebibytes / took
            floor = floor_seconds(proxy.url, given, workers)
            print(
                f"  {workers:3} workers {whole:7.1f} s, without completion {took:7.1f} s {rate:7.1f} MiB/s  "
                f"efficiency {efficiency:.2f}, of the floor {floor / took:.2f}",
                flush=True,
            )
    print("kept" if kept else f"not kept: less than {LEAST}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
