"""Output of the commands. The result, as text or one JSON document, is printed to standard output, and all other
messages to standard error.

If the output is not a terminal, text has no colours, and progress is printed as one line every few seconds. Tensor
names may come from hostile files, so control characters in them are escaped before anything is printed.
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
    from transaxle.engine.execute import CheckedPlan


_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_LONGEST = 20_000
"""Largest number of characters that are printed of one text within a line."""
_SHOWN_ROWS = 20
"""Number of rows of a list that are shown without `--all`."""
_MOST_MACHINES = 16
"""Largest number of machines that each get their own progress bar."""
_PERIOD = 120.0
"""Number of seconds over which a worker's speed is averaged; it is long, because a worker rarely finishes a work
item.
"""
_LINE_SECONDS = 5.0
"""Seconds between two progress lines if the output is not a terminal."""

Text = str | tuple[str, str]
"""A text, or a pair (text, name of the style in which it is printed)."""
Progress = Callable[[int], None]


def printable(text: str) -> str:
    """Escape control characters in a text, such as ESC, and shorten a very long text by omitting its middle."""
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], shortened(text, _LONGEST))


class Screen:
    """The output of one run of the program.

    Args:
        as_json: whether to print the result or the error as one JSON document.
        everything: whether to print every row of lists (option `--all`).
        quiet: whether to print only errors and JSON documents.
        verbose: whether to also print the steps of the command, and how long each step took.
    """

    def __init__(
        self, *, as_json: bool = False, everything: bool = False, quiet: bool = False, verbose: bool = False
    ) -> None:
        self.as_json = as_json
        self.everything = everything
        self.quiet = quiet
        self.verbose = verbose
        self.consequence = ""
        """Text that describes the consequence if the command fails now, such as `nothing was written`."""
        self.way_on = ""
        """Advice to print if the user stops the command now; if empty, `consequence` is printed instead."""
        self.on_opened: Callable[[Sequence[Checkpoint]], None] | None = None
        """Function called with the checkpoints that a public function has opened."""
        self.on_planned: Callable[[CheckedPlan], None] | None = None
        """Function called with the plan of a conversion."""

    def state(self, consequence: str, way_on: str = "") -> None:
        """Set the text that is printed if the command fails from now on, and the advice that is printed if the user
        stops it.
        """
        self.consequence, self.way_on = consequence, way_on

    def opened(self, *checkpoints: Checkpoint) -> None:
        """Pass the opened checkpoints to `on_opened`."""
        if self.on_opened is not None:
            self.on_opened(checkpoints)

    def planned(self, cleared: CheckedPlan) -> None:
        """Pass the plan of a conversion to `on_planned`."""
        if self.on_planned is not None:
            self.on_planned(cleared)

    @property
    def width(self) -> int | None:
        """Width of the terminal in columns. None means that the output is not a terminal, so that lines may have any
        length.
        """
        return shutil.get_terminal_size().columns if _is_terminal(sys.stdout) else None

    def line(self, *parts: Text) -> None:
        """Print one line of the result."""
        if self.quiet:
            return
        self._write(sys.stdout, parts)

    def note(self, *parts: Text) -> None:
        """Print one line of messages to standard error."""
        self._write(sys.stderr, parts)

    def document(self, data: Mapping[str, Any]) -> None:
        """Print the result of the command as a JSON document."""
        try:
            text = json.dumps(data, indent=2, default=_number, allow_nan=False)
        except ValueError:
            text = json.dumps(_with_words(data), indent=2, default=_number, allow_nan=False)
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def table(self, rows: Sequence[Sequence[str]], *, indent: str = "  ", limit: int | None = None) -> int:
        """Print rows in aligned columns.

        Args:
            rows: the rows to print, each with the same number of cells.
            indent: text printed before each row.
            limit: number of rows to print without `--all`; None means all rows.

        Returns:
            The number of rows that were not printed.
        """
        shown = rows if limit is None or self.everything else rows[:limit]
        cells = [[printable(cell) for cell in row] for row in shown]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            self.line((indent + "  ".join(padded)).rstrip())
        return len(rows) - len(shown)

    def some(self, label: str, items: Sequence[str], limit: int = _SHOWN_ROWS) -> None:
        """Print a list under a label; without `--all`, at most `limit` items."""
        shown = items if self.everything else items[:limit]
        self.line(label)
        for item in shown:
            self.line(f"    {item}")
        if len(shown) < len(items):
            self.line(f"    … and {len(items) - len(shown):,} more (--all or --json shows them)")

    @contextmanager
    def progress(self, total: int, label: str = "copying", *, stays: bool = False) -> Iterator[Progress]:
        """Show progress in bytes on standard error, as a bar; if standard error is not a terminal, as one line every
        few seconds.

        Args:
            total: number of bytes at the end of the activity.
            label: name of the activity, printed beside the bar.
            stays: whether the bar stays on the screen, and shows `finishing` from its last byte to the end of the
                `with` block.

        Yields:
            A function that the caller calls with each number of newly processed bytes.
        """
        counted = _ByteCounter(label, total)
        if self.quiet:
            yield counted
        elif not _is_terminal(sys.stderr):
            yield counted if self.as_json else counted.print_with(self.note)
        else:
            with _bar(label, total, stays=stays) as advance:
                yield counted.pass_to(advance)
        self._note_time(str(counted), counted.began)

    @contextmanager
    def workers(self) -> Iterator[Watch]:
        """Show the progress of several workers on standard error: one bar for all workers together, and one bar per
        machine.

        With `--json`, print each event of a worker as a line of JSON instead. The context manager yields the function
        to call with each event of a worker.
        """
        if self.as_json:
            yield _json_line
            return
        if self.quiet or not _is_terminal(sys.stderr):
            yield lambda _: None
            return
        bars = _bars(speed_estimate_period=_PERIOD)
        nodes: dict[str, TaskID] = {}
        with bars:
            total_bar = bars.add_task("", total=None)

            def watch(event: Event) -> None:
                text = f"{event.items_done} of {event.items} items"
                bars.update(total_bar, total=event.total, completed=event.done, description=text)
                if event.node and event.node not in nodes and len(nodes) < _MOST_MACHINES:
                    nodes[event.node] = bars.add_task(event.node, total=None)
                if event.node in nodes:
                    bars.update(nodes[event.node], advance=event.nbytes)

            yield watch

    @contextmanager
    def working(self, activity: str) -> Iterator[None]:
        """Show the name of an activity on standard error while the `with` block runs."""
        began = time.monotonic()
        if self.quiet or not _is_terminal(sys.stderr):
            yield
        else:
            from rich.console import Console

            with Console(file=sys.stderr).status(activity):
                yield
        self._note_time(activity, began)

    def _note_time(self, activity: str, began: float) -> None:
        if self.verbose and not self.quiet:
            self.note(f"{activity}, {time.monotonic() - began:.2f} s")

    def _write(self, stream: TextIO, parts: Sequence[Text]) -> None:
        coloured = _is_terminal(stream) and not os.environ.get("NO_COLOR")
        written = []
        for piece in parts:
            text, style = (piece, "") if isinstance(piece, str) else piece
            text = printable(text)
            written.append(f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if style and coloured else text)
        stream.write("".join(written) + "\n")


class _ByteCounter:
    """Thread-safe counter of processed bytes, which can print the progress.

    Args:
        label: name of the activity.
        total: number of bytes at the end of the activity.
    """

    def __init__(self, label: str, total: int) -> None:
        self.label = label
        self.total = total
        self.count = 0
        self.began = self._printed_at = time.monotonic()
        self._print: Callable[[str], None] | None = None
        self._advance: Progress | None = None
        self._counting = threading.Lock()

    def print_with(self, tell: Callable[[str], None]) -> _ByteCounter:
        """Make the counter print the progress every few seconds with the function `tell`; return the counter."""
        self._print = tell
        return self

    def pass_to(self, advance: Progress) -> _ByteCounter:
        """Make the counter pass each number of newly processed bytes to the function `advance`; return the counter."""
        self._advance = advance
        return self

    def __call__(self, count: int) -> None:
        with self._counting:
            self.count += count
            if self._advance is not None:
                self._advance(count)
            if self._print is None or time.monotonic() < self._printed_at + _LINE_SECONDS:
                return
            self._printed_at = time.monotonic()
            self._print(str(self))

    def __str__(self) -> str:
        from transaxle.engine.wording import percent, size, speed

        share = percent(self.count, self.total)
        pace = speed(self.count, time.monotonic() - self.began)
        return f"{self.label}: {size(self.count)} of {size(self.total)} ({share}), {pace}"


def _bars(**options: Any) -> Bars:
    """Return a progress display of the package rich, which shows bytes on standard error."""
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
    """Show a bar with a label on standard error; the context manager yields the function that advances the bar."""
    bar = _bars(transient=not stays)
    with bar:
        task = bar.add_task(label, total=total)

        def advance(count: int) -> None:
            bar.advance(task, count)
            if stays and bar.tasks[0].finished:  # the written files must still be synced and renamed
                bar.update(task, description="finishing")

        yield advance
        bar.update(task, description=label)


def _number(value: Any) -> object:
    """Convert a numpy scalar to a plain number, for JSON."""
    return value.item()


def _with_words(value: Any) -> Any:
    """Replace NaN and infinite numbers in JSON data by texts such as "NaN"."""
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


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"
