"""Output: text or one JSON document to standard output, everything else to standard error.

Without a terminal, text is plain: no colours, and of progress a line every few seconds. Names and messages come from
files that anybody may have written, so control characters in them are shown, never sent to the terminal.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from transaxle.errors import shortened

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    from transaxle.engine.checkpoint.checkpoint import Checkpoint
    from transaxle.engine.distribute.driver import Event, Watch
    from transaxle.engine.execute import Cleared


_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_LONGEST = 20_000
"""Cap on the printed characters of one piece of a line."""
_ENOUGH = 20
"""Rows of a list that are shown without `--all`."""
_MOST = 16
"""Machines that have a bar of their own."""
_PERIOD = 120.0
"""Seconds over which the rates of workers are taken: items are done seldom."""
_EVERY = 5.0
"""Seconds between two lines of progress where there is no terminal."""

Text = str | tuple[str, str]
"""A text, or a text with its style."""
Progress = Callable[[int], None]


def printable(text: str) -> str:
    """Return the text with its control characters escaped, such as ESC; the middle of a very long one is cut."""
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], shortened(text, _LONGEST))


class Screen:
    """The output of one run of the program.

    Args:
        as_json: results and errors are one JSON document.
        everything: lists are printed completely.
        quiet: nothing is printed but errors and JSON documents.
        verbose: what was done is said beside the result, and how long it took.
    """

    def __init__(
        self, *, as_json: bool = False, everything: bool = False, quiet: bool = False, verbose: bool = False
    ) -> None:
        self.as_json = as_json
        self.everything = everything
        self.quiet = quiet
        self.verbose = verbose
        self.consequence = ""
        """What it means if the command fails now, such as `nothing was written`."""
        self.way_on = ""
        """What to do if the user stops it now; empty where the consequence says enough."""
        self.on_opened: Callable[[Sequence[Checkpoint]], None] | None = None
        """Called with the checkpoints that a verb has opened."""
        self.on_planned: Callable[[Cleared], None] | None = None
        """Called with the plan of a conversion."""

    def state(self, consequence: str, way_on: str = "") -> None:
        """Take note of what it means if the command fails now, and of what to do if the user stops it."""
        self.consequence, self.way_on = consequence, way_on

    def opened(self, *checkpoints: Checkpoint) -> None:
        """Hand on the checkpoints that a verb has opened."""
        if self.on_opened is not None:
            self.on_opened(checkpoints)

    def planned(self, cleared: Cleared) -> None:
        """Hand on the plan of a conversion."""
        if self.on_planned is not None:
            self.on_planned(cleared)

    @property
    def width(self) -> int | None:
        """Columns of the terminal; None without one, where lines may have any length."""
        return shutil.get_terminal_size().columns if _watched(sys.stdout) else None

    def line(self, *parts: Text) -> None:
        """Print one line of the result."""
        if self.quiet:
            return
        self._write(sys.stdout, parts)

    def note(self, *parts: Text) -> None:
        """Print one line beside the result."""
        self._write(sys.stderr, parts)

    def document(self, data: Mapping[str, Any]) -> None:
        """Print the result as the one JSON document."""
        try:
            text = json.dumps(data, indent=2, default=_number, allow_nan=False)
        except ValueError:
            text = json.dumps(_with_words(data), indent=2, default=_number, allow_nan=False)
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def table(self, rows: Sequence[Sequence[str]], *, indent: str = "  ", most: int | None = None) -> int:
        """Print rows in aligned columns; a column that holds only numbers is aligned to the right.

        Args:
            rows: cells, the same number in each.
            indent: what stands before each row.
            most: rows to print where not everything is asked for; None: all.

        Returns:
            The number of rows that were left out.
        """
        shown = rows if most is None or self.everything else rows[:most]
        cells = [[printable(cell) for cell in row] for row in shown]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            self.line((indent + "  ".join(padded)).rstrip())
        return len(rows) - len(shown)

    def some(self, label: str, items: Sequence[str], most: int = _ENOUGH) -> None:
        """Print a list under a label, as much of it as a person reads."""
        shown = items if self.everything else items[:most]
        self.line(label)
        for item in shown:
            self.line(f"    {item}")
        if len(shown) < len(items):
            self.line(f"    … and {len(items) - len(shown):,} more (--all or --json shows them)")

    @contextmanager
    def progress(self, total: int, label: str = "copying", *, stays: bool = False) -> Iterator[Progress]:
        """Show on standard error how many bytes were moved: a bar, or without a terminal a line every few seconds.

        Args:
            total: bytes that will be counted.
            label: what is done with them.
            stays: the bar is left on the screen when it is done; something may remain to be done after the last byte.

        Yields:
            The function that counts them.
        """
        counted = _Counted(label, total)
        if self.quiet:
            yield counted
        elif not _watched(sys.stderr):
            yield counted if self.as_json else counted.telling(self.note)
        else:
            with _bar(label, total, stays=stays) as advance:
                yield counted.telling_each(advance)
        self._took(str(counted), counted.began)

    @contextmanager
    def workers(self) -> Iterator[Watch]:
        """Show on standard error what several workers do: a bar for all and one for each machine.

        Where results are JSON, each event is a line of JSON there. The context gives the function that is told events.
        """
        if self.as_json:
            yield _json_line
            return
        if self.quiet or not _watched(sys.stderr):
            yield lambda _: None
            return
        bars = _bars(speed_estimate_period=_PERIOD)
        nodes: dict[str, TaskID] = {}
        with bars:
            everything = bars.add_task("", total=None)

            def watch(event: Event) -> None:
                text = f"{event.items_done} of {event.items} items"
                bars.update(everything, total=event.total, completed=event.done, description=text)
                if event.node and event.node not in nodes and len(nodes) < _MOST:
                    nodes[event.node] = bars.add_task(event.node, total=None)
                if event.node in nodes:
                    bars.update(nodes[event.node], advance=event.nbytes)

            yield watch

    @contextmanager
    def working(self, activity: str) -> Iterator[None]:
        """Say on standard error what is being done, until it is done."""
        began = time.monotonic()
        if self.quiet or not _watched(sys.stderr):
            yield
        else:
            from rich.console import Console

            with Console(file=sys.stderr).status(activity):
                yield
        self._took(activity, began)

    def _took(self, what: str, began: float) -> None:
        if self.verbose and not self.quiet:
            self.note(f"{what}, {time.monotonic() - began:.2f} s")

    def _write(self, stream: TextIO, parts: Sequence[Text]) -> None:
        coloured = _watched(stream) and not os.environ.get("NO_COLOR")
        written = []
        for piece in parts:
            text, style = (piece, "") if isinstance(piece, str) else piece
            text = printable(text)
            written.append(f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if style and coloured else text)
        stream.write("".join(written) + "\n")


class _Counted:
    """Counts the bytes that several threads move.

    Args:
        label: what is done with them.
        total: how many there will be.
    """

    def __init__(self, label: str, total: int) -> None:
        self.label = label
        self.total = total
        self.count = 0
        self.began = self._told = time.monotonic()
        self._tell: Callable[[str], None] | None = None
        self._each: Progress | None = None
        self._counting = threading.Lock()

    def telling(self, tell: Callable[[str], None]) -> _Counted:
        """Let it tell how many there are, every few seconds."""
        self._tell = tell
        return self

    def telling_each(self, advance: Progress) -> _Counted:
        """Let it hand on each count."""
        self._each = advance
        return self

    def __call__(self, count: int) -> None:
        with self._counting:
            self.count += count
            if self._each is not None:
                self._each(count)
            if self._tell is None or time.monotonic() < self._told + _EVERY:
                return
            self._told = time.monotonic()
            self._tell(str(self))

    def __str__(self) -> str:
        from transaxle.engine.wording import percent, size, speed

        share = percent(self.count, self.total)
        pace = speed(self.count, time.monotonic() - self.began)
        return f"{self.label}: {size(self.count)} of {size(self.total)} ({share}), {pace}"


def _bars(**options: Any) -> Bars:
    """Return what shows bars of bytes on standard error, with rich's own options."""
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("  {task.description}"),
        progress.BarColumn(40),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(elapsed_when_finished=True),
        console=Console(file=sys.stderr),
        **options,
    )


@contextmanager
def _bar(label: str, total: int, *, stays: bool) -> Iterator[Progress]:
    """Show a bar with a label on standard error; the context gives the function that moves it on."""
    bar = _bars(transient=not stays)
    with bar:
        task = bar.add_task(label, total=total)

        def advance(count: int) -> None:
            bar.advance(task, count)
            if stays and bar.tasks[0].finished:  # the files are still to be synced, and to appear under their name
                bar.update(task, description="finishing")

        yield advance
        bar.update(task, description=label)


def _number(value: Any) -> object:
    """Return a numpy scalar, such as a setting of an optimizer, as a plain number."""
    return value.item()


def _with_words(value: Any) -> Any:
    """Return JSON data with words for numbers that JSON has no digits for."""
    if isinstance(value, Mapping):
        return {key: _with_words(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_words(item) for item in value]
    plain = value.item() if hasattr(value, "item") else value
    if not isinstance(plain, float) or math.isfinite(plain):
        return plain
    return "NaN" if math.isnan(plain) else "Infinity" if plain > 0 else "-Infinity"


def _json_line(event: Event) -> None:
    import msgspec

    sys.stderr.write(msgspec.json.encode(event).decode() + "\n")
    sys.stderr.flush()


def _watched(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"
