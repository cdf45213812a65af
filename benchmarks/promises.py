"""Promises: what a script has measured, held against what is promised, printed alike and collected for the table.

A script makes one `Promises`, calls `at_least` or `at_most` for each figure, and ends with its `exit_code`. `table.py`
runs the scripts and reads what they have written into the file that the environment variable names.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "TRANSAXLE_PROMISES"
"""Environment variable: the file that gets the figures, one JSON document a line."""


@dataclass(frozen=True)
class Figure:
    """One figure and what is promised of it."""

    what: str
    """What was measured."""
    measured: float
    """The median of the rounds."""
    low: float
    """The least of the rounds."""
    high: float
    """The most of the rounds."""
    unit: str
    """What follows the number."""
    limit: float | None
    """What is promised; None: nothing."""
    least: bool
    """It is at least the limit, not at most."""
    floor: float | None = None
    """Median of what the least possible work reached in the same rounds; None: not measured."""

    @property
    def kept(self) -> bool:
        """Whether the promise is kept."""
        if self.limit is None:
            return True
        return self.measured >= self.limit if self.least else self.measured <= self.limit

    @property
    def promise(self) -> str:
        """The promise in words; empty where there is none."""
        return "" if self.limit is None else f"at {'least' if self.least else 'most'} {number(self.limit)} {self.unit}"

    @property
    def spread(self) -> str:
        """The range of the rounds; empty where there was one."""
        return "" if self.low == self.high else f"{number(self.low)} to {number(self.high)}"

    @property
    def reachable(self) -> str:
        """The floor beside a promise that is not kept; empty elsewhere, and where it was not measured."""
        return "" if self.floor is None or self.kept else f"{number(self.floor)} {self.unit}"

    @property
    def verdict(self) -> str:
        """What has become of the promise."""
        return "" if self.limit is None else "kept" if self.kept else "NOT KEPT"


def number(value: float) -> str:
    """Return a number with three digits."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


class Promises:
    """The figures of one script."""

    def __init__(self) -> None:
        self._kept = True

    def at_least(
        self,
        what: str,
        rounds: float | Iterable[float],
        limit: float | None,
        unit: str = "x",
        floor: Iterable[float] = (),
    ) -> bool:
        """Print a figure, of one round or of several; tell whether it is at least the limit.

        Args:
            what: what was measured.
            rounds: the figure of each round.
            limit: what is promised; None: nothing.
            unit: what follows the number.
            floor: what the least possible work reached in the same rounds; none: not measured.
        """
        reached = list(floor)
        return self._add(what, rounds, limit, unit, least=True, floor=statistics.median(reached) if reached else None)

    def at_most(self, what: str, rounds: float | Iterable[float], limit: float | None, unit: str) -> bool:
        """Print a figure, of one round or of several; tell whether it is at most the limit."""
        return self._add(what, rounds, limit, unit, least=False)

    @property
    def exit_code(self) -> int:
        """0 if all promises are kept, else 1."""
        return 0 if self._kept else 1

    def _add(
        self,
        what: str,
        rounds: float | Iterable[float],
        limit: float | None,
        unit: str,
        *,
        least: bool,
        floor: float | None = None,
    ) -> bool:
        values = list(rounds) if isinstance(rounds, Iterable) else [rounds]
        figure = Figure(what, statistics.median(values), min(values), max(values), unit, limit, least, floor)
        self._kept &= figure.kept
        shown = f"{number(figure.measured):>6} {unit}"
        verdict = f"{figure.verdict}, floor {figure.reachable}" if figure.reachable else figure.verdict
        print(f"  {what:62} {shown:11} {figure.spread:16} {figure.promise:19} {verdict}".rstrip(), flush=True)
        if path := os.environ.get(FILE):
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(figure)) + "\n")
        return figure.kept
