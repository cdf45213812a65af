"""A storage that counts what is read through it, and can be told to fail."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from msgspec.structs import replace

from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.formats.storage.storage import Listing, Storage

Before = Callable[[str, int, int], None]
"""Called before each read with file, offset and size; what it raises, the read raises."""


class CountingStorage(Storage):
    """Passes everything on, and keeps count."""

    def __init__(self, inner: Storage, before: Before | None = None) -> None:
        self.inner = inner
        self.before = before
        self.calls = 0
        self.bytes = 0
        self._lock = Lock()

    @property
    def path(self) -> str:
        return self.inner.path

    @property
    def single(self) -> str | None:
        return self.inner.single

    def listing(self, folder: str = "") -> Listing:
        return self.inner.listing(folder)

    def names(self) -> tuple[str, ...]:
        return self.inner.names()

    def size(self, name: str) -> int:
        return self.inner.size(name)

    def version(self, name: str) -> str:
        return self.inner.version(name)

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        with self._lock:
            self.calls += 1
            self.bytes += view.nbytes
        if self.before is not None:
            self.before(name, offset, view.nbytes)
        self.inner.read_into(name, offset, view)

    def read(self, name: str, offset: int, size: int) -> bytes:
        buffer = bytearray(size)
        self.read_into(name, offset, memoryview(buffer))
        return bytes(buffer)

    def recheck(self) -> None:
        self.inner.recheck()

    def close(self) -> None:
        self.inner.close()


def counted(checkpoint: Checkpoint, before: Before | None = None) -> tuple[Checkpoint, CountingStorage]:
    """Return the same checkpoint read through a storage that counts."""
    storage = CountingStorage(checkpoint.container.storage, before)
    return Checkpoint(replace(checkpoint.container, storage=storage), checkpoint.settings, None, None), storage
