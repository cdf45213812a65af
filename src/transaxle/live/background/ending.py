"""The end of this process: what has to be finished before it, and a failure that its exit code must not hide.

Python's own ways fall short. `atexit` is not for processes that multiprocessing has forked, such as the ranks of some
launchers; multiprocessing's finalizers run in these and in all others. And no function that is called at exit can
change the exit code, but a standard stream that cannot be flushed then does: Python exits with 120.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from multiprocessing import util
from typing import Any

_PREFIX = "transaxle: "


def at_end(work: Callable[[], None]) -> None:
    """Call something when this process ends by itself; where it has forked, not in the new process."""
    util.Finalize(None, work, exitpriority=0)


def say(message: str) -> None:
    """Tell the user something on stderr."""
    if sys.stderr is not None:
        sys.stderr.write(f"{_PREFIX}{message}\n")
        sys.stderr.flush()


def fail() -> None:
    """Let this process, which is about to end, exit with a code other than 0: 120, and 1 where it was forked."""
    if sys.stderr is not None and not isinstance(sys.stderr, _Unflushable):
        sys.stderr = _Unflushable(sys.stderr)


class _Unflushable:
    """A stream that does everything but be flushed by the interpreter, when nothing else is left to run."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def flush(self) -> None:
        """Flush the stream; fail if it is the interpreter that asks."""
        self._stream.flush()
        caller = sys._getframe().f_back
        if caller is None or caller.f_code is getattr(util._flush_std_streams, "__code__", None):  # type: ignore[attr-defined]
            raise RuntimeError("a save in the background failed; its error is shown above")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
