"""Transport: parcels of bytes between ranks, in rounds of bounded memory.

Every rank knows every parcel (its sender, receivers and size), so no header travels. How the bytes of a round travel is
the matter of an `Exchange`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, Protocol

import msgspec

from transaxle.formats.storage.copier import Bytes

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
