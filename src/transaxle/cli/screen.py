"""Output of commands: text or one JSON document to standard output, everything else to standard error.

Without a terminal, text has no colours, and progress is a line every few seconds. Names and messages may come from
hostile files, so control characters in them are escaped, never sent to the terminal.
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
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

from transaxle.errors import shortened

if TYPE_CHECKING:
    from transaxle.engine.checkpoint.checkpoint import Checkpoint
    from transaxle.engine.distribute.driver import Event, Watch
    from transaxle.engine.execute import Cleared


_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_LONGEST = 20_000
"""Maximum number of printed characters of one piece of a line."""
_SHOWN_ROWS = 20
"""Number of rows of a list that are shown without `--all`."""
_MOST_MACHINES = 16
"""Maximum number of machines with a progress bar of their own."""
_PERIOD = 120.0
"""Seconds over which rates of workers are averaged; long, because items finish rarely."""
_LINE_SECONDS = 5.0
"""Seconds between two lines of progress without a terminal."""
_REDRAW_SECONDS = 0.1
"""Minimum number of seconds between two drawings of the bars on a terminal."""
_BAR_WIDTH = 40
"""Length in columns of a whole bar."""
_HIDE_CURSOR, _SHOW_CURSOR, _ERASE_LINE, _ERASE_LINE_ABOVE = "\x1b[?25l", "\x1b[?25h", "\r\x1b[2K", "\x1b[1A\x1b[2K"

Text = str | tuple[str, str]
"""A text, or (text, name of its style)."""
Progress = Callable[[int], None]


def printable(text: str) -> str:
    """Escape control characters in a text, such as ESC, and cut the middle out of a very long one."""
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], shortened(text, _LONGEST))


class Screen:
    """The output of one run of the program.

    Args:
        as_json: print the result or the error as one JSON document.
        everything: print lists completely.
        quiet: print only errors and JSON documents.
        verbose: also print which steps were done, and their times.
    """

    def __init__(
        self, *, as_json: bool = False, everything: bool = False, quiet: bool = False, verbose: bool = False
    ) -> None:
        self.as_json = as_json
        self.everything = everything
        self.quiet = quiet
        self.verbose = verbose
        self.consequence = ""
        """Consequence if the command fails now, such as `nothing was written`."""
        self.way_on = ""
        """Advice if the user stops the command now; empty: the consequence is printed instead."""
        self.on_opened: Callable[[Sequence[Checkpoint]], None] | None = None
        """Callback for the checkpoints that a verb has opened."""
        self.on_planned: Callable[[Cleared], None] | None = None
        """Callback for the plan of a conversion."""
        self._bars: Bars | None = None
        """Progress bars that are on the terminal now."""

    def state(self, consequence: str, way_on: str = "") -> None:
        """Note the consequence if the command fails from now on, and the advice if the user stops it."""
        self.consequence, self.way_on = consequence, way_on

    def opened(self, *checkpoints: Checkpoint) -> None:
        """Pass the opened checkpoints to `on_opened`."""
        if self.on_opened is not None:
            self.on_opened(checkpoints)

    def planned(self, cleared: Cleared) -> None:
        """Pass the plan of a conversion to `on_planned`."""
        if self.on_planned is not None:
            self.on_planned(cleared)

    @property
    def width(self) -> int | None:
        """Width of the terminal in columns; None without a terminal: lines may have any length."""
        return shutil.get_terminal_size().columns if _is_terminal(sys.stdout) else None

    def line(self, *parts: Text) -> None:
        """Print one line of the result."""
        if self.quiet:
            return
        self._write(sys.stdout, parts)

    def note(self, *parts: Text) -> None:
        """Print one line to standard error."""
        self._write(sys.stderr, parts)

    def document(self, data: Mapping[str, Any]) -> None:
        """Print the result as a JSON document."""
        try:
            text = json.dumps(data, indent=2, default=_number, allow_nan=False)
        except ValueError:
            text = json.dumps(_with_words(data), indent=2, default=_number, allow_nan=False)
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def table(self, rows: Sequence[Sequence[str]], *, indent: str = "  ", limit: int | None = None) -> int:
        """Print rows in aligned columns.

        Args:
            rows: rows with the same number of cells.
            indent: text before each row.
            limit: number of rows to print without `--all`; None: all.

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
        """Show progress in bytes on standard error: a bar, or without a terminal a line every few seconds.

        Args:
            total: total number of bytes.
            label: name of the activity.
            stays: leave the bar on the screen, and mark the time between its last byte and the end as finishing.

        Yields:
            The function to call with each number of bytes done.
        """
        counted = _ByteCounter(label, total)
        if self.quiet:
            yield counted
        elif not _is_terminal(sys.stderr):
            yield counted if self.as_json else counted.print_with(self.note)
        else:
            with self._show_bars(Bars(stays=stays)) as bars:
                bars.update(label, label=label, total=total)

                def draw(_: int) -> None:
                    # after the last byte, files must still be synced and renamed
                    activity = "finishing" if stays and counted.count >= total else label
                    bars.update(label, label=activity, count=counted.count)

                yield counted.pass_to(draw)
                bars.update(label, label=label)
        self._note_time(str(counted), counted.began)

    @contextmanager
    def workers(self) -> Iterator[Watch]:
        """Show the progress of several workers on standard error: a bar for all, and one per machine.

        With `--json`, print each event as a line of JSON instead. The context gives the function to call with events.
        """
        if self.as_json:
            yield _json_line
            return
        if self.quiet or not _is_terminal(sys.stderr):
            yield lambda _: None
            return
        node_bytes: dict[str, int] = {}
        with self._show_bars(Bars(period=_PERIOD)) as bars:

            def watch(event: Event) -> None:
                text = f"{event.items_done} of {event.items} items"
                if event.node and (event.node in node_bytes or len(node_bytes) < _MOST_MACHINES):
                    node_bytes[event.node] = node_bytes.get(event.node, 0) + event.nbytes
                    bars.update(event.node, label=event.node, count=node_bytes[event.node])
                bars.update("", label=text, total=event.total, count=event.done)

            bars.update("")
            yield watch

    @contextmanager
    def _show_bars(self, bars: Bars) -> Iterator[Bars]:
        """Show bars on the terminal; lines that are printed in the meantime appear above them."""
        self._bars = bars
        try:
            with bars:
                yield bars
        finally:
            self._bars = None

    @contextmanager
    def working(self, activity: str) -> Iterator[None]:
        """Show an activity on standard error while the block runs."""
        began = time.monotonic()
        if self.quiet or not _is_terminal(sys.stderr):
            yield
        else:
            _draw_on_terminal(f"  {activity} …")
            try:
                yield
            finally:
                _draw_on_terminal(_ERASE_LINE)
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
        if self._bars is not None:
            self._bars.erase()
        stream.write("".join(written) + "\n")


class _ByteCounter:
    """Thread-safe counter of bytes done, which can print progress.

    Args:
        label: name of the activity.
        total: total number of bytes.
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
        """Print the progress every few seconds with the function `tell`; return the counter."""
        self._print = tell
        return self

    def pass_to(self, advance: Progress) -> _ByteCounter:
        """Pass each count on to `advance`; return the counter."""
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


class Bars:
    """Progress bars on standard error, one line each, drawn at most ten times a second.

    Several threads may update them. If the terminal is gone, nothing is drawn.

    Args:
        period: seconds over which speeds are averaged.
        stays: whether the bars stay on the screen at the end.
    """

    def __init__(self, *, period: float = 30.0, stays: bool = True) -> None:
        self._period = period
        self._stays = stays
        self._bars: dict[str, _Bar] = {}
        self._lines_drawn = 0
        self._drawn_at = -math.inf
        self._lock = threading.RLock()

    def __enter__(self) -> Bars:
        _draw_on_terminal(_HIDE_CURSOR)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.erase()
            lines = self._lines() if self._stays else []
            _draw_on_terminal("".join(f"{line}\n" for line in lines) + _SHOW_CURSOR)

    def update(self, key: str, *, label: str = "", total: int | None = None, count: int | None = None) -> None:
        """Change a bar, or add one.

        Args:
            key: names the bar.
            label: text before it; empty keeps the text.
            total: bytes of the whole; None keeps the number. A bar without a total shows bytes and speed only.
            count: bytes so far; None keeps the number.
        """
        now = time.monotonic()
        with self._lock:
            bar = self._bars.setdefault(key, _Bar(now))
            bar.label = label or bar.label
            bar.total = bar.total if total is None else total
            if count is not None:
                bar.count = count
                bar.samples.append((now, count))
                while len(bar.samples) > 2 and bar.samples[0][0] < now - self._period:
                    bar.samples.popleft()
            if now >= self._drawn_at + _REDRAW_SECONDS:
                self._drawn_at = now
                self.erase()
                lines = self._lines()
                _draw_on_terminal("\n".join(lines))
                self._lines_drawn = len(lines)

    def erase(self) -> None:
        """Take the bars off the screen until they are drawn again."""
        with self._lock:
            if self._lines_drawn:
                _draw_on_terminal(_ERASE_LINE + _ERASE_LINE_ABOVE * (self._lines_drawn - 1) + "\r")
            self._lines_drawn = 0

    def _lines(self) -> list[str]:
        columns = shutil.get_terminal_size().columns - 1
        widest = max((len(bar.label) for bar in self._bars.values()), default=0)
        return [bar.line(widest)[:columns] for bar in self._bars.values()]


class _Bar:
    """One progress bar, from `began` on, a time of `time.monotonic`."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.label = ""
        self.total: int | None = None
        self.count = 0
        self.samples = deque([(began, 0)])
        """Times and bytes so far, of the last seconds."""

    def line(self, label_width: int) -> str:
        """Return the bar as text: label, bar, bytes, speed, and the time that is left, or at the end the time taken."""
        from transaxle.engine.wording import duration, size, speed

        (start, before), (end, after) = self.samples[0], self.samples[-1]
        pace = speed(after - before, end - start) if end > start else ""
        label = f"  {printable(self.label).ljust(label_width)}"
        if not self.total:
            return f"{label}  {size(self.count)}  {pace}"
        filled = _BAR_WIDTH * min(self.count, self.total) // self.total
        bar = "━" * filled + "─" * (_BAR_WIDTH - filled)
        if self.count >= self.total:
            seconds = end - self.began
        else:
            seconds = (self.total - self.count) * (end - start) / max(after - before, 1)
        return f"{label}  {bar}  {size(self.count)} of {size(self.total)}  {pace}  {duration(seconds)}"


def _draw_on_terminal(text: str) -> None:
    with suppress(OSError):  # the terminal was closed
        sys.stderr.write(text)
        sys.stderr.flush()


def _number(value: Any) -> object:
    """Convert a numpy scalar to a plain number, for JSON."""
    return value.item()


def _with_words(value: Any) -> Any:
    """Replace NaN and infinite numbers in JSON data by texts."""
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
