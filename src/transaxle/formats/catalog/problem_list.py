"""Gathering what is wrong with an input, so that it is refused once with everything on the list."""

from __future__ import annotations

from transaxle.errors import Code, Refusal, TransaxleError, Where, gathered

_MOST = 100
"""Beyond this many, one more tells nothing."""


class Faults:
    """The refusals found so far, at most a hundred."""

    def __init__(self) -> None:
        self._refusals: list[Refusal] = []

    def __bool__(self) -> bool:
        return bool(self._refusals)

    @property
    def full(self) -> bool:
        """No more are kept; looking for them can stop."""
        return len(self._refusals) >= _MOST

    def add(self, code: Code, message: str, file: str | None, tensor: str | None = None, hint: str = "") -> None:
        """Note one refusal."""
        self.extend(Refusal(code, message, Where(file, tensor), hint))

    def extend(self, *refusals: Refusal) -> None:
        """Note refusals that exist already, those of an error that was caught for example."""
        self._refusals.extend(refusals[: _MOST - len(self._refusals)])

    def error(self) -> TransaxleError:
        """Build the error for what was noted; there must be something."""
        if self.full:
            more = Refusal("CORRUPT", f"there is more: these are the first {_MOST} problems")
            return gathered([*self._refusals, more])
        return gathered(self._refusals)
