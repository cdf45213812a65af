"""A server that speaks as Google Cloud Storage does, on a free port of the loopback, in a process of its own."""

from __future__ import annotations

import json
import os
import urllib.request
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import fsspec
import pytest

from tests.formats.server_process import serving

_EMULATOR = "STORAGE_EMULATOR_HOST"
_SERVER = """
import sys
from http import HTTPStatus
from gcp_storage_emulator import server

def cancel(request, response, storage, *_, **__):
    storage.delete_resumable_file_obj(request.query["upload_id"][0])
    response.status = HTTPStatus.NO_CONTENT

for _, methods in server.HANDLERS:
    if server.objects.upload_partial in methods.values():
        methods["DELETE"] = cancel
server.create_server(sys.argv[1], int(sys.argv[2]), in_memory=True).run()
"""
"""The emulator, which lacks the call that cancels an upload."""


class GoogleBucket:
    """A bucket of one test, looked at by plain requests: neither by our code nor by the client that it uses."""

    def __init__(self, server: str, name: str) -> None:
        self._server = server
        self._name = name
        self.url = f"gs://{name}"

    def _ask(self, path: str, data: bytes | None = None, method: str = "GET", kind: str = "") -> bytes:
        request = urllib.request.Request(f"{self._server}{path}", data, {"Content-Type": kind} if kind else {})
        request.method = method
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bytes(answer.read())

    def make(self) -> None:
        self._ask("/storage/v1/b", json.dumps({"name": self._name}).encode(), "POST", "application/json")

    def put(self, key: str, data: bytes) -> None:
        self._ask(
            f"/upload/storage/v1/b/{self._name}/o?uploadType=media&name={quote(key, safe='')}",
            data,
            "POST",
            "application/octet-stream",
        )

    def get(self, key: str) -> bytes:
        return self._ask(f"/download/storage/v1/b/{self._name}/o/{quote(key, safe='')}?alt=media")

    def names(self) -> list[str]:
        found: dict[str, Any] = json.loads(self._ask(f"/storage/v1/b/{self._name}/o"))
        return sorted(each["name"] for each in found.get("items", []))

    def delete(self, key: str) -> None:
        self._ask(f"/storage/v1/b/{self._name}/o/{quote(key, safe='')}", method="DELETE")


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[str]:
    """Address of the server."""
    pytest.importorskip("gcsfs")
    pytest.importorskip("gcp_storage_emulator")
    environment = {name: value for name, value in os.environ.items() if name != _EMULATOR}
    with serving(_SERVER, environment) as url:
        yield url


@pytest.fixture
def google(gcs_server: str, monkeypatch: pytest.MonkeyPatch) -> GoogleBucket:
    """An empty bucket, and an environment in which `gs://` means the server."""
    monkeypatch.setenv(_EMULATOR, gcs_server)
    monkeypatch.setenv("FSSPEC_GS_TOKEN", "anon")  # for other processes
    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
    fsspec.get_filesystem_class("gs").clear_instance_cache()
    bucket = GoogleBucket(gcs_server, f"b-{uuid.uuid4().hex}")
    bucket.make()
    return bucket
