"""The list of problems of an input, so that it is refused once with everything on the list."""

from __future__ import annotations

from transaxle.errors import Code, Refusal, TransaxleError, Where, gathered

_MOST = 100
"""Cap on the number of reported problems."""


class Faults:
    """The refusals collected so far, up to the cap."""

    def __init__(self) -> None:
        self._refusals: list[Refusal] = []

    def __bool__(self) -> bool:
        return bool(self._refusals)

    @property
    def full(self) -> bool:
        """Whether the cap is reached, so that the search can stop."""
        return len(self._refusals) >= _MOST

    def add(self, code: Code, message: str, file: str | None, tensor: str | None = None, hint: str = "") -> None:
        """Add one refusal."""
        self.extend(Refusal(code, message, Where(file, tensor), hint))

    def extend(self, *refusals: Refusal) -> None:
        """Add refusals that exist already, such as those of an error that was caught."""
        self._refusals.extend(refusals[: _MOST - len(self._refusals)])

    def error(self) -> TransaxleError:
        """Build the error for the collected refusals; there must be at least one."""
        if self.full:
            overflow = Refusal("CORRUPT", f"there are more; these are the first {_MOST} problems")
            return gathered([*self._refusals, overflow])
        return gathered(self._refusals)
