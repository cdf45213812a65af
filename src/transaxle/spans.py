"""What the program did, when and in which thread, in the format that Chrome, Perfetto and Speedscope show.

Nothing is recorded unless a trace is asked for; a `span` then costs one comparison. With one it costs about a
microsecond, so spans stand around stages and blocks of bytes, never around single values.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

_NOTHING = nullcontext()

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Trace:
    """Spans of time as they ended, from several threads."""

    def __init__(self) -> None:
        self._spans: list[tuple[str, int, int, int, int | None]] = []
        self._names: dict[int, str] = {}

    @contextmanager
    def span(self, name: str, size: int | None) -> Iterator[None]:
        """Record how long the block takes, whether or not it succeeds."""
        begin = time.perf_counter_ns()
        try:
            yield
        finally:
            self.add(name, begin, time.perf_counter_ns(), size)

    def add(self, name: str, begin: int, end: int, size: int | None = None) -> None:
        """Record a span of this thread, in ns of `time.perf_counter_ns`."""
        thread = threading.get_native_id()
        # A list takes from all threads at once; a name is set more than once at worst.
        self._names.setdefault(thread, threading.current_thread().name)
        self._spans.append((name, thread, begin, end, size))

    def document(self) -> dict[str, object]:
        """Return it in Chrome's Trace Event Format: complete events, times in microseconds from `start_clock` on."""
        process = os.getpid()
        named = [
            {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}
            for thread, name in self._names.items()
        ]
        spans = [
            {
                "ph": "X",
                "name": name,
                "pid": process,
                "tid": thread,
                "ts": (begin - _Program.began) / 1000,
                "dur": (end - begin) / 1000,
                **({} if size is None else {"args": {"bytes": size}}),
            }
            for name, thread, begin, end, size in sorted(self._spans, key=lambda span: (span[2], -span[3]))
        ]
        return {"traceEvents": [*named, *spans], "displayTimeUnit": "ms"}


class _Program:
    """What is recorded of this process."""

    trace: Trace | None = None
    """None: nothing."""
    began = time.perf_counter_ns()
    """When its times count from."""


def start_clock() -> None:
    """Let the times of traces count from now: the program begins."""
    _Program.began = time.perf_counter_ns()


def span(name: str, size: int | None = None) -> AbstractContextManager[None]:
    """Record how long a block takes, where a trace is asked for.

    Args:
        name: what is done in it.
        size: how many bytes are moved in it.
    """
    return _NOTHING if _Program.trace is None else _Program.trace.span(name, size)


def is_recorded() -> bool:
    """Tell whether a trace is asked for."""
    return _Program.trace is not None


def stage(name: str) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Record how long each call of a function takes, where a trace is asked for."""

    def of(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @wraps(function)
        def timed(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            with span(name):
                return function(*args, **kwargs)

        return timed

    return of


@contextmanager
def recording() -> Iterator[Trace]:
    """Record what the block does; what came before it, since `start_clock`, counts as imports."""
    trace = _Program.trace = Trace()
    trace.add("import", _Program.began, time.perf_counter_ns())
    try:
        yield trace
    finally:
        _Program.trace = None
