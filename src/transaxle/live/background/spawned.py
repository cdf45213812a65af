"""Processes of our own in somebody else's program.

A spawned process runs the program's main script again, up to `if __name__ == "__main__"`; a training script without
that line would begin to train once more. Our processes need nothing of the script.

They end with the process that has started them, however it ends, and with nothing else: Ctrl-C and the signals of
launchers go to all processes of a group, and a program that takes them as a wish to end well must still have ours.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CDLL
from dataclasses import dataclass, field
from multiprocessing import parent_process, resource_tracker
from multiprocessing.connection import wait

_SCRIPT = ("__spec__", "__file__")
"""What multiprocessing looks at to tell a new process where the main script is."""
_PROGRAM_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Signals that are meant for the program."""
_SET_PDEATHSIG = 1
_LOOK = 1.0
"""Seconds after which a process looks whether its parent is there."""


@contextmanager
def without_main_script() -> Iterator[None]:
    """Start processes in this block that do not run the main script, and that call `Parent.follow`.

    Meanwhile the main script cannot be found, and signals wait.
    """
    main = vars(sys.modules["__main__"])
    kept = {name: main[name] for name in _SCRIPT if name in main}
    with _undisturbed():
        try:
            for name in kept:
                main[name] = None
            yield
        finally:
            main.update(kept)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Let signals wait; processes that are started meanwhile begin so."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # or it would be started with the first process, and let signals in
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PROGRAM_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True, slots=True)
class Parent:
    """The process that starts another one; made in it, and given to the other."""

    pid: int = field(default_factory=os.getpid)
    """Number of the process."""
    by_main: bool = field(default_factory=lambda: threading.current_thread() is threading.main_thread())
    """Whether its main thread starts the other: the system takes the end of the thread for the end of the process."""

    def follow(self) -> None:
        """Let this process end when the parent does, and no signal for the parent end it."""
        for number in _PROGRAM_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _PROGRAM_SIGNALS)
        if self.by_main and sys.platform == "linux":
            CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)  # at once, whatever this process does
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """End this process after the parent; a pipe tells, unless a process that was forked meanwhile has it too."""
        above = parent_process()
        while above is not None and self._is_alive():
            if wait([above.sentinel], _LOOK):
                break
        os._exit(1)

    def _is_alive(self) -> bool:
        """Tell whether the parent was still there when this was asked, as far as the system tells."""
        return sys.platform == "win32" or os.getppid() == self.pid
