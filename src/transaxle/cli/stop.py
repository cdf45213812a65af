"""Stopping from outside: SIGTERM and SIGHUP end a command like Ctrl-C, after it has cleaned up.

By default both signals end the process at once, leaving a half-written folder, and a terminal without its cursor. Here
they raise an exception in the main thread. A signal that the user told the system to ignore, as `nohup` does with
SIGHUP, stays ignored.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from transaxle.cli.screen.refusals import INTERRUPTED

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """A signal that asks the process to end.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.number).name}"

    @property
    def exit_code(self) -> int:
        """Exit code that a shell reports for a program that this signal ended: 143 for SIGTERM, 129 for SIGHUP."""
        return 128 + self.number


@contextmanager
def stoppable() -> Iterator[list[Stopped]]:
    """Raise `Stopped` for the first of the signals; further ones are ignored, as they would interrupt the cleaning up.

    Yields:
        A list that receives the exception that stopped the process; empty until then.
    """
    stops: list[Stopped] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        if not stops:
            stops.append(Stopped(number))
            raise stops[0]

    if threading.current_thread() is not threading.main_thread():
        yield stops  # only the main thread may say what happens at a signal
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    ours = [number for number, handler in before.items() if handler is not signal.SIG_IGN and handler is not None]
    for number in ours:
        signal.signal(number, stop)
    try:
        yield stops
    finally:
        for number in ours:
            signal.signal(number, before[number])


def outcome(stop: BaseException) -> tuple[int, str]:
    """Return the exit code and the message for the exception that stopped a command."""
    return (stop.exit_code, str(stop)) if isinstance(stop, Stopped) else (INTERRUPTED, "interrupted")


def interruption_in(error: BaseException | None) -> BaseException | None:
    """Return the interruption that an error was made of, as Python does where it comes while a class is made."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__
    return error
