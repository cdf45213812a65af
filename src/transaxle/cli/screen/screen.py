"""Output: text or one JSON document to standard output, everything else to standard error.

Without a terminal, text is plain: no colours, no progress. Names and messages come from files that anybody may have
written, so control characters in them are shown, never sent to the terminal.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from transaxle.errors import shortened

if TYPE_CHECKING:
    from transaxle.engine.distribute.watching import Event, Watch

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
    """

    def __init__(self, *, as_json: bool = False, everything: bool = False) -> None:
        self.as_json = as_json
        self.everything = everything
        self.consequence = ""
        """What it means if the command fails now, such as `nothing was written`."""
        self.way_on = ""
        """What to do if the user stops it now; empty where the consequence says enough."""

    @property
    def width(self) -> int | None:
        """Columns of the terminal; None without one, where lines may have any length."""
        return shutil.get_terminal_size().columns if _watched(sys.stdout) else None

    def line(self, *parts: Text) -> None:
        """Print one line of the result."""
        self._write(sys.stdout, parts)

    def note(self, *parts: Text) -> None:
        """Print one line beside the result."""
        self._write(sys.stderr, parts)

    def document(self, data: Mapping[str, Any]) -> None:
        """Print the result as the one JSON document."""
        sys.stdout.write(json.dumps(data, indent=2, default=_number) + "\n")
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
    def progress(self, total: int, *, stays: bool = False) -> Iterator[Progress]:
        """Show a bar on standard error while bytes are moved; the context gives the function that counts them.

        Args:
            total: bytes that will be counted.
            stays: the bar is left on the screen when it is done.
        """
        if not _watched(sys.stderr):
            yield lambda _: None
            return
        from rich import progress
        from rich.console import Console

        bar = progress.Progress(
            progress.TextColumn(" "),
            progress.BarColumn(40),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(elapsed_when_finished=True),
            console=Console(file=sys.stderr),
            transient=not stays,
        )
        with bar:
            task = bar.add_task("", total=total)
            yield lambda count: bar.advance(task, count)

    @contextmanager
    def workers(self) -> Iterator[Watch]:
        """Show on standard error what several workers do: a bar for all and one for each machine.

        Where results are JSON, each event is a line of JSON there. The context gives the function that is told events.
        """
        if self.as_json:
            yield _json_line
            return
        if not _watched(sys.stderr):
            yield lambda _: None
            return
        from rich import progress
        from rich.console import Console

        bars = progress.Progress(
            progress.TextColumn("  {task.description}"),
            progress.BarColumn(40),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(elapsed_when_finished=True),
            console=Console(file=sys.stderr),
            speed_estimate_period=_PERIOD,
        )
        nodes: dict[str, progress.TaskID] = {}
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
        if not _watched(sys.stderr):
            yield
            return
        from rich.console import Console

        with Console(file=sys.stderr).status(activity):
            yield

    def _write(self, stream: TextIO, parts: Sequence[Text]) -> None:
        coloured = _watched(stream) and not os.environ.get("NO_COLOR")
        written = []
        for piece in parts:
            text, style = (piece, "") if isinstance(piece, str) else piece
            text = printable(text)
            written.append(f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if style and coloured else text)
        stream.write("".join(written) + "\n")


def _number(value: Any) -> object:
    """Return a numpy scalar, such as a setting of an optimizer, as a plain number."""
    return value.item()


def _json_line(event: Event) -> None:
    import msgspec

    sys.stderr.write(msgspec.json.encode(event).decode() + "\n")
    sys.stderr.flush()


def _watched(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"
