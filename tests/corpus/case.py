"""One hostile input: how it is made, and how it must be refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transaxle.errors import Code

Make = Callable[[Path], Path | None]
"""Makes the input in an empty folder; returns what is opened, None for the folder."""


@dataclass(frozen=True)
class Case:
    """An input, and what is said of it."""

    make: Make
    code: Code
    said: str
    """In the message or the hint."""
    unverified: bool = False
    """It is about copies that differ: conversions compare them, `verify` reads each."""
    late: bool = False
    """The damage is in the values: it is found when they are read, not when the file is opened."""
