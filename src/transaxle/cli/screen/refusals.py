"""How refusals look: all of them at once, the most important first, and no wall of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transaxle.cli.screen.fold import fold
from transaxle.cli.screen.screen import Part, Screen
from transaxle.errors import Refusal, StorageError, TransaxleError, UsageError

MOST = 5
"""Refusals that are shown without `--all`."""
_PLACES = 3
"""Rows of tensors that are shown for one of them."""
INTERRUPTED = 130
"""What a shell reports of a program that Ctrl-C ended."""


def failed(screen: Screen, error: TransaxleError) -> int:
    """Print what a command raised.

    Returns:
        The exit code.
    """
    if screen.as_json:
        screen.document(error_document(error))
    else:
        outcome = ", ".join(part for part in (_outcome(error), screen.consequence) if part)
        print_refusals(screen, outcome, error.refusals, screen.note)
    return error.exit_code


def interrupted(screen: Screen, code: int, what: str) -> int:
    """Say that the user or a signal stopped it, and what that left.

    Args:
        screen: where to.
        code: the exit code.
        what: `interrupted`, or which signal.

    Returns:
        The exit code.
    """
    message = ", ".join(part for part in (what, screen.way_on or screen.consequence) if part)
    if screen.as_json:
        screen.document(error_of(code, message))
    else:
        screen.note(message)
    return code


def print_refusals(screen: Screen, head: str, refusals: Sequence[Refusal], put: Callable[..., None]) -> None:
    """Print refusals, as many as a person reads.

    Args:
        screen: how much to print.
        head: what they amount to.
        refusals: most important first.
        put: prints one line.
    """
    count = len(refusals)
    put((head, "bold"), f" ({count:,} reasons)" if count > 1 else "")
    groups = _alike([refusal.shown() for refusal in refusals])
    shown = groups if screen.everything else groups[:MOST]
    for group in shown:
        for parts in _lines(group, everything=screen.everything):
            put(*parts)
    left = count - sum(len(group) for group in shown)
    if left:
        put(f"  … and {left:,} more (--all or --json shows them)")
    codes = dict.fromkeys(group[0].code for group in shown)
    put((f"  for details: transaxle explain {' '.join(codes)}", "dim"))


def _alike(refusals: Sequence[Refusal]) -> list[list[Refusal]]:
    """Group refusals that say the same of several tensors, in the order of the first of each."""
    groups: dict[object, list[Refusal]] = {}
    for refusal in refusals:
        key = refusal.code, refusal.where.file, refusal.message, refusal.hint
        groups.setdefault(key, []).append(refusal)
    return list(groups.values())


def _lines(group: Sequence[Refusal], *, everything: bool) -> list[tuple[Part, ...]]:
    """Return the lines of refusals that say the same: code and place, the message, the way out."""
    first = group[0]
    rows = [
        f"{row.name} {row.times}".rstrip()
        for row in fold(dict.fromkeys(r.where.tensor for r in group if r.where.tensor))
    ]
    if not everything and len(rows) > _PLACES:
        rows = [*rows[:_PLACES], f"… {len(group):,} tensors in all"]
    places = [first.where.file or "", *rows[:1]]
    place = " · ".join(part for part in places if part)
    lines: list[tuple[Part, ...]] = []
    message = first.message.splitlines()
    if place:
        lines.append(("  ", (first.code, "red"), f"  {place}"))
        lines += [(f"  {' ' * len(first.code)}  {row}",) for row in rows[1:]]
    else:
        lines.append(("  ", (first.code, "red"), f"  {message.pop(0)}" if message else ""))
    lines += [(f"      {line}",) for line in message]
    lines += [("      ", (line, "green")) for line in first.hint.splitlines()]
    return lines


def _outcome(error: TransaxleError) -> str:
    if isinstance(error, StorageError):
        return "failed"
    return "not possible as asked" if isinstance(error, UsageError) else "refused"


def error_document(error: TransaxleError) -> dict[str, Any]:
    """Return an error as the JSON document that stands for it."""
    return error_of(error.exit_code, error.refusals[0].shown().message, *error.refusals)


def error_of(exit_code: int, message: str, *refusals: Refusal) -> dict[str, Any]:
    """Return the JSON document of any failure."""
    listed = [refusal.as_json() for refusal in refusals]
    return {"error": {"exit_code": exit_code, "message": message, "refusals": listed}}
