"""Observers of the public functions: what a function reports while it runs, and its progress in bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol, TypeAlias

from transaxle.errors import Refusal, Refused

if TYPE_CHECKING:
    from transaxle.engine.carry import Report
    from transaxle.engine.checkpoint.checkpoint import Checkpoint
    from transaxle.engine.distribute.driver import Event
    from transaxle.engine.execute import CheckedPlan

Progress: TypeAlias = Callable[[int], None]
"""Function that is called, from several threads, with the number of bytes that were just read or written."""


def no_progress(_: int) -> None:
    """Ignore the number of bytes; this function is the default value of arguments named `progress`."""


class Watch(Protocol):
    """Observer whose methods a public function calls while it runs; the command line's `Screen` is such an observer."""

    def state(self, consequence: str, way_on: str = "") -> None:
        """Record what to tell the user if the function fails from now on, and what to advise if the user stops it."""

    def working(self, activity: str) -> AbstractContextManager[None]:
        """Show an activity while the `with` block runs."""

    def opened(self, *checkpoints: Checkpoint) -> None:
        """Receive the checkpoints that the public function has opened; they are closed when the function ends."""

    def planned(self, cleared: CheckedPlan) -> None:
        """Receive the plan of a conversion, with all reasons against carrying it out."""

    def progress(self, total: int, label: str = "copying", *, stays: bool = False) -> AbstractContextManager[Progress]:
        """Show progress while the `with` block runs; the context manager yields the function that adds bytes."""

    def workers(self) -> AbstractContextManager[Callable[[Event], None]]:
        """Show the progress of other processes; the context manager yields the function to call with each event."""


class Unwatched:
    """A `Watch` that ignores all calls."""

    def state(self, consequence: str, way_on: str = "") -> None:
        """Ignore the text that would be shown after a failure."""

    def working(self, activity: str) -> AbstractContextManager[None]:  # noqa: ARG002
        """Ignore the activity."""
        return nullcontext()

    def opened(self, *checkpoints: Checkpoint) -> None:
        """Ignore the checkpoints."""

    def planned(self, cleared: CheckedPlan) -> None:
        """Ignore the plan."""

    def progress(self, total: int, label: str = "", *, stays: bool = False) -> AbstractContextManager[Progress]:  # noqa: ARG002
        """Show no progress; yield a function that does nothing."""
        return nullcontext(no_progress)

    def workers(self) -> AbstractContextManager[Callable[[Event], None]]:
        """Show no workers; yield a function that does nothing."""
        return nullcontext(lambda _: None)


@contextmanager
def report_progress(
    watch: Watch | None, progress: Progress, total: int, label: str, *, stays: bool = False
) -> Iterator[Progress]:
    """Yield a function that reports the bytes of each block to both `watch` and `progress`."""
    if watch is None or type(watch) is Unwatched:
        yield progress
        return
    with watch.progress(total, label, stays=stays) as shown:

        def count(size: int) -> None:
            shown(size)
            progress(size)

        yield count


class Unverified(Refused):
    """Raised if a conversion was completed, but its result, read back, does not equal the source.

    Attributes:
        report: report of the conversion, which contains the verification.
    """

    def __init__(self, refusals: Sequence[Refusal], report: Report) -> None:
        super().__init__(refusals)
        self.report = report

    def __reduce__(self) -> tuple[type[Unverified], tuple[tuple[Refusal, ...], Report]]:  # type: ignore[override]
        return type(self), (self.refusals, self.report)
