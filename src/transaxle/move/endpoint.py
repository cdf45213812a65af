"""Endpoints: what bytes are moved from, and to. Files of a storage and the memory of ranks look alike here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from transaxle.axes.geometry.strided import Loop
from transaxle.formats.storage.copier import WRITING, Bytes, Steps


class Readable(Protocol):
    """What transfers read from: the files of a storage (`formats.Storage`).

    One that also has `lend` (see `Memory`) is not read, but copied from.
    """

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes of a file from `offset`."""

    def note_read(
        self, steps: Steps, name: str, offset: int, view: memoryview, width: int = 0, loops: Sequence[Loop] = ()
    ) -> None:
        """List that a view is filled with the bytes of a file from `offset`, or runs are read into it."""


class Memory(Readable, Protocol):
    """The memory of several ranks, as one storage: each file is a tensor's part that one of them holds."""

    def lend(self, name: str, offset: int, size: int) -> Bytes:
        """Return bytes of this rank's own files without copying them, to be read once: they may change meanwhile."""

    def owner(self, name: str) -> int:
        """Return the rank that holds a file; the others cannot read it."""


class Writable(Protocol):
    """Files that take bytes at any offset."""

    def pwrite(self, file: str, offset: int, view: memoryview) -> None:
        """Write bytes into a file from `offset`."""


class NotingWritable(Writable, Protocol):
    """Files of this machine: what is written into them can be listed."""

    def note_write(self, steps: Steps, file: str, offset: int, view: memoryview) -> None:
        """List that bytes are written as `pwrite`."""


class Sink(ABC):
    """Where the bytes of items go: memory that they are made in (`room`), or whoever takes them (`take`)."""

    ordered = True
    """The bytes of an item, and of items with the same queue, must come in order, from one thread."""

    span: int | None = None
    """Spans of an item of so many bytes each may come in any order, from several threads."""

    takes_notes = False
    """Whether many steps are worth one call: nobody waits for another machine."""

    def room(self, _key: int, _start: int, _stop: int) -> Bytes | None:
        """Return the memory in which an item's bytes `[start, stop)` belong; None: they are given to `take`."""
        return None

    def filled(self, _key: int, _start: int, _stop: int) -> None:  # noqa: B027 - a sink may have nothing to note
        """Note that the room for these bytes has them."""

    @abstractmethod
    def take(self, key: int, start: int, data: memoryview) -> None:
        """Take an item's bytes from `start` on, which are neither written to nor kept."""

    def note(self, steps: Steps, key: int, start: int, data: memoryview) -> None:
        """List that an item's bytes are taken: what lies there then."""
        steps.call(partial(self.take, key, start, data), WRITING)

    def end(self, _key: int) -> None:  # noqa: B027 - as above
        """Note that these were the last bytes of an item; of an empty one, that it is there."""
