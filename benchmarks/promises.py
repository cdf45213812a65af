"""Promises: compares measured figures with promised limits, prints them, and collects them for `table.py`.

A script creates one `Promises`, calls `at_least` or `at_most` for each figure, and exits with its `exit_code`.
`table.py` runs the scripts and reads their figures from a file, whose path is in an environment variable.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "TRANSAXLE_PROMISES"
"""Environment variable with the path of the file for figures, one JSON document per line."""


@dataclass(frozen=True)
class Figure:
    """A measured figure, and the promise about it."""

    label: str
    """Description of the figure."""
    measured: float
    """Median of the rounds."""
    low: float
    """Smallest value of the rounds."""
    high: float
    """Largest value of the rounds."""
    unit: str
    """Unit, printed after the number."""
    limit: float | None
    """Promised limit; None: no promise."""
    least: bool
    """Whether the limit is a lower bound."""
    floor: float | None = None
    """Median figure of the least possible work (the floor) in the same rounds; None: not measured."""

    @property
    def is_kept(self) -> bool:
        """Whether the promise is kept."""
        if self.limit is None:
            return True
        return self.measured >= self.limit if self.least else self.measured <= self.limit

    @property
    def promise(self) -> str:
        """The promise as text; empty if there is none."""
        return "" if self.limit is None else f"at {'least' if self.least else 'most'} {number(self.limit)} {self.unit}"

    @property
    def spread(self) -> str:
        """Range of the rounds as text; empty if there was only one."""
        return "" if self.low == self.high else f"{number(self.low)} to {number(self.high)}"

    @property
    def reachable(self) -> str:
        """The floor as text; empty if the promise is kept, or the floor was not measured."""
        return "" if self.floor is None or self.is_kept else f"{number(self.floor)} {self.unit}"

    @property
    def verdict(self) -> str:
        """Verdict on the promise as text; empty if there is none."""
        return "" if self.limit is None else "kept" if self.is_kept else "NOT KEPT"


def number(value: float) -> str:
    """Format a number with three significant digits."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


class Promises:
    """Collects the figures of one script."""

    def __init__(self) -> None:
        self._kept = True

    def at_least(
        self,
        label: str,
        rounds: float | Iterable[float],
        limit: float | None,
        unit: str = "x",
        floor: Iterable[float] = (),
    ) -> bool:
        """Print a figure, and return whether it is at least the limit.

        Args:
            label: description of the figure.
            rounds: value of each round, or a single value.
            limit: promised lower bound; None: no promise.
            unit: unit, printed after the number.
            floor: value of the least possible work in each round; empty: not measured.
        """
        reached = list(floor)
        return self._add(label, rounds, limit, unit, least=True, floor=statistics.median(reached) if reached else None)

    def at_most(self, label: str, rounds: float | Iterable[float], limit: float | None, unit: str) -> bool:
        """Print a figure, and return whether it is at most the limit; arguments as in `at_least`."""
        return self._add(label, rounds, limit, unit, least=False)

    @property
    def exit_code(self) -> int:
        """0 if all promises are kept, else 1."""
        return 0 if self._kept else 1

    def _add(
        self,
        label: str,
        rounds: float | Iterable[float],
        limit: float | None,
        unit: str,
        *,
        least: bool,
        floor: float | None = None,
    ) -> bool:
        values = list(rounds) if isinstance(rounds, Iterable) else [rounds]
        figure = Figure(label, statistics.median(values), min(values), max(values), unit, limit, least, floor)
        self._kept &= figure.is_kept
        shown = f"{number(figure.measured):>6} {unit}"
        verdict = f"{figure.verdict}, floor {figure.reachable}" if figure.reachable else figure.verdict
        print(f"  {label:62} {shown:11} {figure.spread:16} {figure.promise:19} {verdict}".rstrip(), flush=True)
        if path := os.environ.get(FILE):
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(figure)) + "\n")
        return figure.is_kept
