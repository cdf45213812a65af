"""Endpoints: what bytes are moved from, and to. Files of a storage and the memory of ranks look alike here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from transaxle.axes.geometry.strided import Loop
from transaxle.formats.storage.compiled import StepBatch

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Bytes: TypeAlias = "npt.NDArray[np.uint8]"
"""One-dimensional."""


class Readable(Protocol):
    """What transfers read from: the files of a storage (`formats.Storage`).

    One that also has `lend` (see `Memory`) is not read, but copied from.
    """

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes of a file from `offset`."""


class NotingFiles(Readable, Protocol):
    """Files that are read in batches too."""

    def note_read(self, batch: StepBatch, name: str, offset: int, view: memoryview) -> None:
        """Fill `view` as `read_into`, together with the rest of a batch."""

    def note_strided(
        self, batch: StepBatch, name: str, offset: int, view: memoryview, width: int, loops: Sequence[Loop]
    ) -> None:
        """Read runs as `compiled.read_strided`, together with the rest of a batch."""


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
    """Files that take bytes in batches too."""

    def note_write(self, batch: StepBatch, file: str, offset: int, view: memoryview) -> None:
        """Write bytes as `pwrite`, together with the rest of a batch."""


class Sink(ABC):
    """Where the bytes of items go: memory that they are made in (`room`), or whoever takes them (`take`)."""

    ordered = True
    """The bytes of an item, and of items with the same queue, must come in order, from one thread."""

    span: int | None = None
    """Spans of an item of so many bytes each may come in any order, from several threads."""

    takes_notes = False
    """Whether it has `note`."""

    def room(self, _key: int, _start: int, _stop: int) -> Bytes | None:
        """Return the memory in which an item's bytes `[start, stop)` belong; None: they are given to `take`."""
        return None

    def filled(self, _key: int, _start: int, _stop: int) -> None:  # noqa: B027 - a sink may have nothing to note
        """Note that the room for these bytes has them."""

    @abstractmethod
    def take(self, key: int, start: int, data: memoryview) -> None:
        """Take an item's bytes from `start` on, which are neither written to nor kept."""

    def note(self, batch: StepBatch, key: int, start: int, data: memoryview) -> None:
        """Take an item's bytes as `take`, when a batch is carried out: what lies there then."""
        batch.run()
        self.take(key, start, data)

    def end(self, _key: int) -> None:  # noqa: B027 - as above
        """Note that these were the last bytes of an item; of an empty one, that it is there."""
