"""A real S3 server on a free port of the loopback, in a process of its own: moto's, which keeps objects in memory.

Where `S3_SERVER` is set, the tests talk to the one at that address instead, which takes the credentials of
`ENVIRONMENT`: `nanio serve`, for example (pip install nanio), which keeps objects in files.
"""

from __future__ import annotations

import os
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
import pytest

from tests.formats.server_process import serving

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""Credentials that moto takes, and nothing that would look for others beyond this machine."""
OTHER_SERVER = "S3_SERVER"
"""Variable with the address of another server."""
_RESET = "/moto-api/reset"
_PATIENCE = 60.0
"""Seconds in which the server must answer."""
_SERVER = """
import sys
from moto.server import main
main(["-H", sys.argv[1], "-p", sys.argv[2]])
"""


def reach_s3(server: str) -> None:
    """Let `s3://` mean a server in this process, whose clients of before may have looked for credentials in vain."""
    os.environ.update(ENVIRONMENT, AWS_ENDPOINT_URL=server)
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@contextmanager
def serving_s3() -> Iterator[str]:
    """Start the server; yield its address."""
    with serving(_SERVER, {**os.environ, **ENVIRONMENT}, "/moto-api/") as url:
        yield url


def _read_once() -> None:
    """Keep what clients read about S3: megabytes of JSON, for each of the hundreds that the tests make."""
    loader: Any = pytest.importorskip("botocore.loaders").JSONFileLoader
    read, found = loader.load_file, dict[str, Any]()

    def load_file(self: Any, file_path: str) -> Any:
        if file_path not in found:
            found[file_path] = read(self, file_path)
        return found[file_path]

    loader.load_file = load_file


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Address of the server."""
    pytest.importorskip("s3fs")
    _read_once()
    if other := os.environ.get(OTHER_SERVER):
        yield other
        return
    pytest.importorskip("moto.server")
    with serving_s3() as url:
        yield url


class Bucket:
    """A bucket of one test, looked at with the client's own calls, never with ours."""

    def __init__(self, client: Any, name: str) -> None:
        self.client = client
        self.name = name
        self.url = f"s3://{name}"

    def put(self, key: str, data: bytes) -> None:
        self.client.pipe_file(f"{self.name}/{key}", data)

    def get(self, key: str) -> bytes:
        self.client.invalidate_cache()
        return bytes(self.client.cat_file(f"{self.name}/{key}"))

    def names(self) -> list[str]:
        answer = self.client.call_s3("list_objects_v2", Bucket=self.name)
        return sorted(found["Key"] for found in answer.get("Contents", []))

    def delete(self, key: str) -> None:
        self.client.rm_file(f"{self.name}/{key}")

    def uploads(self) -> list[str]:
        """Keys of multipart uploads that are neither completed nor given up."""
        answer = self.client.call_s3("list_multipart_uploads", Bucket=self.name)
        return [found["Key"] for found in answer.get("Uploads", [])]

    def parts(self, key: str) -> int:
        """How many parts an object was uploaded in: S3 counts them at the end of its ETag."""
        tag = self.client.call_s3("head_object", Bucket=self.name, Key=key)["ETag"].strip('"')
        return int(tag.partition("-")[2] or 1)


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """An empty bucket, and an environment in which `s3://` means the server, which then forgets what it has."""
    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": s3_server}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    client = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)
    name = f"b-{uuid.uuid4().hex}"
    client.call_s3("create_bucket", Bucket=name)
    yield Bucket(client, name)
    urllib.request.urlopen(f"{s3_server}{_RESET}", data=b"", timeout=_PATIENCE).close()
