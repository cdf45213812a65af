"""Reading ahead: few large requests instead of many small ones, in bounded memory, for any number of threads.

For a service a request costs about as much as a megabyte. Readers ask for headers, then for adjacent blocks of tensors.
So a request that continues an earlier one reads twice as much as that one, up to a limit; a request that starts
elsewhere reads little more than what is wanted. Data is cached until the memory is needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock

MEMORY = 64 << 20
"""Default cap on cached bytes."""
LEAST = 128 << 10
"""Smallest request, if the file has that many bytes; also the largest gap that is read along instead of skipped."""
_SHARE = 8
"""The largest request takes this fraction of the memory: one in `_SHARE`."""

Fetch = Callable[[str, int, int], bytes]
"""File, first byte, one past the last: returns exactly these bytes or raises."""


@dataclass(slots=True, eq=False)
class _Request:
    """A range of a file that was requested."""

    file: str
    """Name of the file."""
    start: int
    """First byte."""
    stop: int
    """One past the last."""
    data: Future[bytes] = field(default_factory=Future)
    """Its bytes, once they have arrived."""


class NearReads:
    """Reads byte ranges of many files through few requests.

    Args:
        fetch: makes one request; called from several threads.
        memory: cap on cached bytes. In addition, each thread holds no more than it asks for at once.
    """

    def __init__(self, fetch: Fetch, memory: int = MEMORY) -> None:
        self._fetch = fetch
        self._memory = memory
        self._largest = max(memory // _SHARE, LEAST)
        self._lock = Lock()
        self._windows: dict[str, dict[int, _Request]] = {}
        self._recent: OrderedDict[_Request, None] = OrderedDict()
        self._held = 0

    def read_into(self, file: str, size: int, offset: int, view: memoryview) -> None:
        """Fill a contiguous view of bytes from `offset`; the file, of `size` bytes, must not end before it is full.

        Raises:
            TransaxleError: what `fetch` raises.
        """
        filled, wanted = 0, view.nbytes
        while filled < wanted:
            at = offset + filled
            window, new = self._window(file, size, at, wanted - filled)
            if new:
                self._fill(window)
            data = memoryview(window.data.result())[at - window.start :][: wanted - filled]
            view[filled : filled + len(data)] = data
            filled += len(data)

    def clear(self) -> None:
        """Drop all cached data."""
        with self._lock:
            for window in list(self._recent):
                self._drop(window)

    def _window(self, file: str, size: int, at: int, wanted: int) -> tuple[_Request, bool]:
        """Return the request that covers a byte; True if it is new, so that the caller must fill it."""
        with self._lock:
            requests_of_file = self._windows.setdefault(file, {})
            previous: _Request | None = None
            stop = size
            for window in requests_of_file.values():
                if window.start <= at < window.stop:
                    self._recent.move_to_end(window)
                    return window, False
                if window.start > at:
                    stop = min(stop, window.start)  # what is there already is not asked for again
                elif at - window.stop <= LEAST and (previous is None or window.stop > previous.stop):
                    previous = window
            read_length = LEAST
            if previous is not None:
                read_length = 2 * (previous.stop - previous.start)
                self._recent.move_to_end(previous, last=False)  # read to its end: the first to be forgotten
            stop = min(stop, at + min(max(wanted, read_length), self._largest))
            if not self._make_room(stop - at):
                stop = min(stop, at + wanted)
            window = requests_of_file[at] = _Request(file, at, stop)
            self._recent[window] = None
            self._held += stop - at
            return window, True

    def _fill(self, window: _Request) -> None:
        try:
            window.data.set_result(self._fetch(window.file, window.start, window.stop))
        except BaseException as error:
            with self._lock:
                self._drop(window)
            window.data.set_exception(error)  # for the others who wait for it
            raise

    def _make_room(self, size: int) -> bool:
        """Drop the least recently used data; False if pending requests occupy all the memory."""
        for window in list(self._recent):
            if self._held + size <= self._memory:
                break
            if window.data.done():
                self._drop(window)
        return self._held + size <= self._memory

    def _drop(self, window: _Request) -> None:
        if window in self._recent:
            del self._recent[window], self._windows[window.file][window.start]
            self._held -= window.stop - window.start
