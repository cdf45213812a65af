"""Faults of a pickle, before the file that holds it is known."""

from __future__ import annotations

from transaxle.errors import Code


class PickleFault(Exception):
    """A malformed pickle, or one that this package does not read."""

    def __init__(self, message: str, code: Code = "CORRUPT") -> None:
        super().__init__(message)
        self.message = message
        self.code: Code = code


class PickleEnds(PickleFault):
    """The bytes end before the pickle does."""


class TakenApart(Exception):
    """A step that runs cannot be read with, such as one that takes the last of their records away again: the pickle is
    to be read without them.
    """


def malformed(message: str) -> PickleFault:
    """Build (not raise) the fault of a pickle that is CORRUPT."""
    return PickleFault(message)
