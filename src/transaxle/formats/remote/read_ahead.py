"""Reading ahead: few large requests in the place of many small ones, in bounded memory, for any number of threads.

To a service a request costs about as much as a megabyte. Readers ask for headers, then for blocks of tensors that lie
side by side. So a request that goes on where an earlier one ended asks for twice as much as that one, up to a limit;
one that begins elsewhere asks for little more than what is wanted. What is read is kept until the memory is needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock

MEMORY = 64 << 20
"""Bytes kept, if nothing else is said."""
LEAST = 128 << 10
"""Bytes of a request, at least, where the file has so many; also the gap that is read along rather than left out."""
_SHARE = 8
"""The largest request takes one part in so many of the memory."""

Fetch = Callable[[str, int, int], bytes]
"""File, first byte, one past the last: returns exactly these bytes or raises."""


@dataclass(slots=True, eq=False)
class _Window:
    """A range of a file that was asked for."""

    file: str
    """Name of the file."""
    start: int
    """First byte."""
    stop: int
    """One past the last."""
    data: Future[bytes] = field(default_factory=Future)
    """Its bytes, as soon as they are there."""


class ReadAhead:
    """Byte ranges of many files through few requests.

    Args:
        fetch: makes one request; called from several threads.
        memory: bytes kept. Beside them, each thread holds no more than it asks for at once.
    """

    def __init__(self, fetch: Fetch, memory: int = MEMORY) -> None:
        self._fetch = fetch
        self._memory = memory
        self._largest = max(memory // _SHARE, LEAST)
        self._lock = Lock()
        self._windows: dict[str, dict[int, _Window]] = {}
        self._recent: OrderedDict[_Window, None] = OrderedDict()
        self._held = 0

    def read_into(self, file: str, size: int, offset: int, view: memoryview) -> None:
        """Fill a contiguous view of bytes from `offset`; the file, of `size` bytes, must not end before it is full.

        Raises:
            TransaxleError: what `fetch` raises.
        """
        done, wanted = 0, view.nbytes
        while done < wanted:
            at = offset + done
            window, new = self._window(file, size, at, wanted - done)
            if new:
                self._fill(window)
            data = memoryview(window.data.result())[at - window.start :][: wanted - done]
            view[done : done + len(data)] = data
            done += len(data)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            for window in list(self._recent):
                self._drop(window)

    def _window(self, file: str, size: int, at: int, wanted: int) -> tuple[_Window, bool]:
        """Return the window that holds a byte; True if it is new, and the caller's to fill."""
        with self._lock:
            beside = self._windows.setdefault(file, {})
            before: _Window | None = None
            stop = size
            for window in beside.values():
                if window.start <= at < window.stop:
                    self._recent.move_to_end(window)
                    return window, False
                if window.start > at:
                    stop = min(stop, window.start)  # what is there already is not asked for again
                elif at - window.stop <= LEAST and (before is None or window.stop > before.stop):
                    before = window
            ahead = LEAST
            if before is not None:
                ahead = 2 * (before.stop - before.start)
                self._recent.move_to_end(before, last=False)  # read to its end: the first to be forgotten
            stop = min(stop, at + min(max(wanted, ahead), self._largest))
            if not self._make_room(stop - at):
                stop = min(stop, at + wanted)
            window = beside[at] = _Window(file, at, stop)
            self._recent[window] = None
            self._held += stop - at
            return window, True

    def _fill(self, window: _Window) -> None:
        try:
            window.data.set_result(self._fetch(window.file, window.start, window.stop))
        except BaseException as error:
            with self._lock:
                self._drop(window)
            window.data.set_exception(error)  # for the others who wait for it
            raise

    def _make_room(self, size: int) -> bool:
        """Forget what was not used for longest; False if what is still on its way takes all the memory."""
        for window in list(self._recent):
            if self._held + size <= self._memory:
                break
            if window.data.done():
                self._drop(window)
        return self._held + size <= self._memory

    def _drop(self, window: _Window) -> None:
        if window in self._recent:
            del self._recent[window], self._windows[window.file][window.start]
            self._held -= window.stop - window.start
