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
"""Promised efficiency."""
BUCKET = "benchmark"
PATIENT = '{"config_kwargs": {"read_timeout": 120}}'
"""Client setting: wait up to 120 s for an answer, since megabytes of a request can remain in socket buffers."""
TENSOR, SMALL = 2 << 20, 4096
"""Bytes of a tensor, and of a tensor of the small checkpoint, which has one file per tensor."""


def checkpoint(folder: Path, count: int, size: int = TENSOR) -> Path:
    """Write a checkpoint of equal tensors in one file."""
    folder.mkdir()
    values = np.random.default_rng(0).integers(0, 255, size, np.uint8)
    save_file({f"w{at:04}": values + at % 7 for at in range(count)}, folder / "model.safetensors")
    return folder


def seconds(source: Path, small: Path, url: str, options: argparse.Namespace, workers: int) -> tuple[float, float]:
    """Convert with `workers` workers, which have been warmed up by another conversion.

    Returns:
        (seconds in all, seconds of the completion of the uploads).
    """
    shard = (options.mebibytes << 20) // options.files
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for _ in range(2):  # so that all of them have imported everything, and have a connection
            how = {"items": 4 * workers, "jobs": 1, "shard_size": SMALL, "overwrite": True}
            tx.convert(small, f"{url}-small", to="safetensors", on=pool, **how)
        completion_seconds.clear()
        start = time.monotonic()
        tx.convert(source, f"{url}-{workers}", to="safetensors", on=pool, items=workers, jobs=1, shard_size=shard)
        return time.monotonic() - start, sum(completion_seconds)


def send_parts(url: str, key: str, count: int) -> None:
    """Send parts with plain requests over as many connections as a worker has; the upload is not completed."""
    where, data = urlsplit(url).netloc, bytes(PART)

    def ask(method: str, query: str, body: bytes | None = None) -> bytes:
        connection = http.client.HTTPConnection(where, timeout=600)
        connection.request(method, f"/{BUCKET}/{key}?{query}", body, {"Authorization": "AWS testing:testing"})
        answer = connection.getresponse().read()
        connection.close()
        return answer

    (upload,) = re.findall(rb"<UploadId>(.*?)</UploadId>", ask("POST", "uploads"))
    query_id = f"uploadId={upload.decode()}"
    with ThreadPoolExecutor(SENDERS) as threads:
        list(threads.map(lambda number: ask("PUT", f"partNumber={number + 1}&{query_id}", data), range(count)))
    ask("DELETE", query_id)


def floor_seconds(url: str, options: argparse.Namespace, workers: int) -> float:
    """Return how long as many processes take that only send."""
    count = (options.mebibytes << 20) // PART // workers
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        list(pool.map(abs, range(4 * workers)))  # so that all of them have started
        start = time.monotonic()
        for job in [pool.submit(send_parts, url, f"floor-{number}", count) for number in range(workers)]:
            job.result()
        return time.monotonic() - start


completion_seconds: list[float] = []
"""Seconds of each completion of an upload."""


def record_time(appear: Callable[[SharedUpload], None]) -> Callable[[SharedUpload], None]:
    """Wrap the completion of an upload so that its time is recorded."""

    def wrapper(upload: SharedUpload) -> None:
        start = time.monotonic()
        appear(upload)
        completion_seconds.append(time.monotonic() - start)

    return wrapper


def main() -> int:
    """Measure; return 0 if the promise is kept."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1.0, help="MiB per second of a connection")
    parser.add_argument("--latency", type=float, default=0.03)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT, FSSPEC_S3=PATIENT)
    fsspec.config.set_conf_env(fsspec.config.conf)
    SharedUpload.appear = record_time(SharedUpload.appear)  # type: ignore[method-assign]
    all_kept = True
    with (
        serving_s3() as server,
        tempfile.TemporaryDirectory() as folder,
        proxied(server, latency=options.latency, rate=options.rate * (1 << 20)) as proxy,
    ):
        os.environ["AWS_ENDPOINT_URL"] = proxy.url
        fsspec.filesystem("s3").call_s3("create_bucket", Bucket=BUCKET)
        source = checkpoint(Path(folder, "source"), (options.mebibytes << 20) // TENSOR)
        small = checkpoint(Path(folder, "small"), 4 * max(options.workers), SMALL)
        print(f"{options.mebibytes} MiB, {options.rate:g} MiB/s and {options.latency * 1000:g} ms a connection")
        first = 0.0
        for workers in options.workers:
            whole, completion = seconds(source, small, f"s3://{BUCKET}/out", options, workers)
            fsspec.filesystem("s3").rm(f"{BUCKET}/out-{workers}", recursive=True)
            took = whole - completion
            first = first or took * workers
            efficiency = first / (took * workers)
            all_kept = all_kept and efficiency >= LEAST
            rate = options.mebibytes / took
            floor = floor_seconds(proxy.url, options, workers)
            print(
                f"  {workers:3} workers {whole:7.1f} s, without completion {took:7.1f} s {rate:7.1f} MiB/s  "
                f"efficiency {efficiency:.2f}, of the floor {floor / took:.2f}",
                flush=True,
            )
    print("kept" if all_kept else f"not kept: less than {LEAST}")
    return 0 if all_kept else 1


if __name__ == "__main__":
    sys.exit(main())
