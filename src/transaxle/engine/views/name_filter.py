"""Choosing tensors by patterns of their names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from transaxle.errors import Refusal, gathered


def chosen(
    names: Iterable[str], only: Sequence[str], skip: Sequence[str], what: str, among: Sequence[str] | None = None
) -> list[str]:
    """Choose some of several names.

    Args:
        names: all of them; order is kept.
        only: patterns of those wanted, in which `*` stands for any characters; none: those of `among`.
        skip: patterns of those not wanted.
        what: what the names are of, for the error.
        among: those that are wanted unless patterns say which; None: all.

    Raises:
        UsageError: AMBIGUOUS for a pattern that no name has: nobody writes one for nothing.
    """
    known = list(names)
    idle = [pattern for pattern in (*only, *skip) if not any(fnmatchcase(name, pattern) for name in known)]
    if idle:
        raise gathered(_idle(pattern, known, what) for pattern in idle)
    found = [name for name in known if any(fnmatchcase(name, pattern) for pattern in only)]
    wanted = found if only else known if among is None else among
    return [name for name in wanted if not any(fnmatchcase(name, pattern) for pattern in skip)]


def _idle(pattern: str, names: Sequence[str], what: str) -> Refusal:
    close = get_close_matches(pattern, names, 1, 0.5) or names[:1]
    hint = f"names are such as {close[0]}; * stands for any characters" if close else f"there is no {what}"
    return Refusal("AMBIGUOUS", f"no {what} has a name like {pattern!r}", hint=hint)
