"""Choosing tensors by patterns of their names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from transaxle.errors import Refusal, gathered


def chosen(
    names: Iterable[str], only: Sequence[str], skip: Sequence[str], noun: str, default: Sequence[str] | None = None
) -> list[str]:
    """Choose some of several names.

    Args:
        names: all of them; order is kept.
        only: patterns of wanted names, in which `*` stands for any characters; none: those of `default`.
        skip: patterns of those not wanted.
        noun: what the names name, for the error.
        default: names chosen where `only` has no patterns; None: all.

    Raises:
        UsageError: AMBIGUOUS for a pattern that no name has: nobody writes one for nothing.
    """
    all_names = list(names)
    idle = [pattern for pattern in (*only, *skip) if not any(fnmatchcase(name, pattern) for name in all_names)]
    if idle:
        raise gathered(_idle(pattern, all_names, noun) for pattern in idle)
    matched = [name for name in all_names if any(fnmatchcase(name, pattern) for pattern in only)]
    wanted = matched if only else all_names if default is None else default
    return [name for name in wanted if not any(fnmatchcase(name, pattern) for pattern in skip)]


def _idle(pattern: str, names: Sequence[str], noun: str) -> Refusal:
    close = get_close_matches(pattern, names, 1, 0.5) or names[:1]
    hint = f"Names look like {close[0]}; * stands for any text." if close else f"There is no {noun}."
    return Refusal("AMBIGUOUS", f"no {noun} has a name like {pattern!r}", hint=hint)
