"""Records when each stage of a run was active on each thread, in the trace format of Chrome, Perfetto and Speedscope.

If no trace is recorded, a `span` costs one comparison; otherwise it costs about a microsecond. So spans surround stages
and blocks of bytes, never single values.
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
    """A record of spans of time, from several threads, in the order in which the spans ended."""

    def __init__(self) -> None:
        self._spans: list[tuple[str, int, int, int, int | None]] = []
        self._names: dict[int, str] = {}

    @contextmanager
    def span(self, name: str, size: int | None) -> Iterator[None]:
        """Record how long the `with` block runs, even if the block raises an error."""
        begin = time.perf_counter_ns()
        try:
            yield
        finally:
            self.add(name, begin, time.perf_counter_ns(), size)

    def add(self, name: str, begin: int, end: int, size: int | None = None) -> None:
        """Record a span of time of the calling thread; `begin` and `end` are values of `time.perf_counter_ns`."""
        thread = threading.get_native_id()
        # `list.append` is safe from several threads, and setting a thread's name twice does no harm.
        self._names.setdefault(thread, threading.current_thread().name)
        self._spans.append((name, thread, begin, end, size))

    def document(self) -> dict[str, object]:
        """Return the trace in Chrome's Trace Event Format, with times in microseconds since `start_clock`."""
        process = os.getpid()
        thread_names = [
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
        return {"traceEvents": [*thread_names, *spans], "displayTimeUnit": "ms"}


class _Program:
    """State of this process: the trace that is being recorded, and the start time of the program."""

    trace: Trace | None = None
    """The trace that is being recorded; None if no trace is being recorded."""
    began = time.perf_counter_ns()
    """Value of `time.perf_counter_ns` when the program started; times in a trace are relative to this start."""


def start_clock() -> None:
    """Set the time zero of traces to now; called when the program begins."""
    _Program.began = time.perf_counter_ns()


def span(name: str, size: int | None = None) -> AbstractContextManager[None]:
    """Record how long a `with` block runs, if a trace is being recorded.

    Args:
        name: name of the span in the trace.
        size: number of bytes that the `with` block moves; None means that the trace shows no size.
    """
    return _NOTHING if _Program.trace is None else _Program.trace.span(name, size)


def is_recording() -> bool:
    """Return whether a trace is being recorded."""
    return _Program.trace is not None


def stage(name: str) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Return a decorator that records each call of a function as a span of time."""

    def of(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @wraps(function)
        def wrapper(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            with span(name):
                return function(*args, **kwargs)

        return wrapper

    return of


@contextmanager
def record_trace() -> Iterator[Trace]:
    """Record a trace while the `with` block runs; the time from `start_clock` to the block is recorded as `import`."""
    trace = _Program.trace = Trace()
    trace.add("import", _Program.began, time.perf_counter_ns())
    try:
        yield trace
    finally:
        _Program.trace = None
