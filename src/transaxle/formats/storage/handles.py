"""Open file descriptors by name: shared by threads, and closed when too many are idle.

A checkpoint may have thousands of files, a process has about a thousand descriptors, and a descriptor must not be
closed while another thread reads through it. So each one counts its users, and only idle ones are closed.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

LIMIT = 128
"""Cap on the descriptors that stay open while idle."""


@dataclass(slots=True)
class _Handle:
    """One open descriptor."""

    fd: int
    """The descriptor."""
    users: int = 0
    """Threads that are using it now."""
    dropped: bool = False
    """Whether to close it when the last user is done."""


class Handles:
    """A thread-safe cache of descriptors, least recently used first."""

    def __init__(
        self, opener: Callable[[str], int], closer: Callable[[str, int], None] | None = None, limit: int = LIMIT
    ) -> None:
        self._opener = opener
        self._closer = closer or (lambda _name, fd: os.close(fd))
        self._limit = limit
        self._lock = Lock()
        self._open: OrderedDict[str, _Handle] = OrderedDict()
        self._closed = False

    @contextmanager
    def use(self, name: str) -> Iterator[int]:
        """Give the descriptor of a file, opened if need be; it stays open at least until the block ends."""
        handle = self._acquire(name)
        try:
            yield handle.fd
        finally:
            self._release(name, handle)

    def drop(self, name: str) -> None:
        """Close a file's descriptor now, or as soon as its last user is done."""
        with self._lock:
            handle = self._open.pop(name, None)
            if handle is not None:
                self._retire(name, handle)

    def close(self) -> None:
        """Close all descriptors (those in use: as soon as they are released); nothing opens after this."""
        with self._lock:
            self._closed = True
            while self._open:
                self._retire(*self._open.popitem(last=False))

    def _acquire(self, name: str) -> _Handle:
        with self._lock:
            if self._closed:
                raise ValueError(f"{name}: the checkpoint is closed; open it again to read from it")
            handle = self._open.get(name)
            if handle is None:
                handle = self._open[name] = _Handle(self._opener(name))
                handle.users += 1
                self._evict()
            else:
                self._open.move_to_end(name)
                handle.users += 1
            return handle

    def _release(self, name: str, handle: _Handle) -> None:
        with self._lock:
            handle.users -= 1
            if handle.users:
                return
            if handle.dropped:
                self._closer(name, handle.fd)
            else:
                self._evict()

    def _evict(self) -> None:
        excess = len(self._open) - self._limit
        for name in [name for name, handle in self._open.items() if not handle.users][: max(excess, 0)]:
            self._retire(name, self._open.pop(name))

    def _retire(self, name: str, handle: _Handle) -> None:
        handle.dropped = True
        if not handle.users:
            self._closer(name, handle.fd)
