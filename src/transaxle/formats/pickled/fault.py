"""What is wrong with a pickle, before it is known in which file it lies."""

from __future__ import annotations

from transaxle.errors import Code


class PickleFault(Exception):
    """A pickle is malformed, or says something that this package does not read."""

    def __init__(self, message: str, code: Code = "CORRUPT") -> None:
        super().__init__(message)
        self.message = message
        self.code: Code = code


class PickleEnds(PickleFault):
    """The bytes end before the pickle does."""


def malformed(message: str) -> PickleFault:
    """Build (not raise) the fault of a pickle that is CORRUPT."""
    return PickleFault(message)
