"""Services of the tests: what lies under a URL, looked at with the client's own calls and never with ours."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import fsspec
import pytest


class Store(Protocol):
    """A place that nobody else writes to."""

    url: str

    def put(self, key: str, data: bytes) -> None:
        """Put a file there."""

    def get(self, key: str) -> bytes:
        """Return a file's bytes."""

    def names(self) -> list[str]:
        """Return the names of all files, sorted."""

    def delete(self, key: str) -> None:
        """Delete a file."""


class Memory:
    def __init__(self) -> None:
        self.client: Any = fsspec.filesystem("memory")
        self.root = f"/{uuid.uuid4().hex}"
        self.url = f"memory:/{self.root}"

    def put(self, key: str, data: bytes) -> None:
        self.client.pipe_file(f"{self.root}/{key}", data)

    def get(self, key: str) -> bytes:
        return bytes(self.client.cat_file(f"{self.root}/{key}"))

    def names(self) -> list[str]:
        return sorted(path.removeprefix(f"{self.root}/") for path in self.client.store if path.startswith(self.root))

    def delete(self, key: str) -> None:
        self.client.rm_file(f"{self.root}/{key}")


@pytest.fixture
def memory() -> Iterator[Memory]:
    """An empty folder in memory, gone after the test."""
    store = Memory()
    yield store
    for key in store.names():
        store.delete(key)


@pytest.fixture(params=["memory", "bucket"])
def store(request: pytest.FixtureRequest) -> Store:
    found: Store = request.getfixturevalue(request.param)
    return found


def upload(folder: Path, store: Store, under: str) -> str:
    """Copy a local folder under a prefix, as any other program would; return its URL."""
    for path in folder.iterdir():
        store.put(f"{under}/{path.name}", path.read_bytes())
    return f"{store.url}/{under}"


def download(store: Store, under: str, folder: Path) -> Path:
    """Copy what lies under a prefix into a new local folder."""
    folder.mkdir()
    for key in store.names():
        if key.startswith(f"{under}/"):
            (folder / key.removeprefix(f"{under}/")).write_bytes(store.get(key))
    return folder
