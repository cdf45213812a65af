"""Endpoints: what bytes are moved from, and to, and how they travel between ranks.

Files of a storage and the memory of ranks look alike here. Between ranks parcels of bytes travel in rounds of bounded
memory. Every rank knows every parcel (its sender, receivers and size), so no header travels; how the bytes of a round
travel is the matter of an `Exchange`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import ParamSpec, Protocol

import msgspec

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


Fill = Callable[[int, Bytes], None]
"""`fill(parcel, buffer)`: put the parcel's bytes into the buffer."""
Take = Callable[[int, Bytes], None]
"""`take(parcel, buffer)`: do with the parcel's bytes what they came for; they stay until the next round."""
Arguments = ParamSpec("Arguments")


class Parcel(msgspec.Struct, frozen=True):
    """Bytes that one rank has and others need."""

    sender: int
    """Global rank that has them."""
    receivers: tuple[int, ...]
    """Global ranks that need them, the sender perhaps among them."""
    size: int
    """Bytes."""


class Exchange(Protocol):
    """Moves parcels between ranks."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def ranks(self) -> Sequence[int]:
        """All of them, in one order everywhere."""

    def round(self, parcels: Sequence[Parcel], fill: Fill, take: Take) -> int:
        """Send parcels, all at once; collective over the ranks, which must pass equal parcels.

        Args:
            parcels: what moves; a rank that is sender and receiver gets its own without sending it.
            fill: called on the sender, once per parcel; it must not raise (see `Deferred`).
            take: called on each receiver, once per parcel; it must not raise.

        Returns:
            bytes that this rank received from others.
        """

    def close(self) -> None:
        """Free what the rounds needed."""


class Alone:
    """The exchange of a process that is alone: nothing is sent."""

    rank = 0
    ranks = (0,)

    def round(self, _parcels: Sequence[Parcel], _fill: Fill, _take: Take) -> int:
        """See `Exchange`."""
        return 0

    def close(self) -> None:
        """See `Exchange`."""


class Deferred:
    """Callbacks that never raise: the first error is kept, later calls do nothing, `check` raises it.

    Inside a collective no rank may leave early, or the others would wait for it forever.
    """

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def __call__(self, work: Callable[Arguments, None]) -> Callable[Arguments, None]:
        """Return `work` with its errors kept back."""

        def quietly(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
            if self._error is not None:
                return
            try:
                work(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - it is raised again by `check`
                self._error = error

        return quietly

    def check(self) -> None:
        """Raise what was kept back."""
        if self._error is not None:
            raise self._error
