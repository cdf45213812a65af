"""Prints why a command ended: its refusals, most important first, or the signal that stopped the command."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Any

from transaxle.cli.screen import Screen, Text
from transaxle.errors import Refusal, StorageError, TransaxleError, UsageError

MOST = 5
"""Number of refusals that are shown without `--all`."""
_PLACES = 3
"""Number of rows with tensor names that are shown for one refusal."""
INTERRUPTED = 130
"""Exit code that a shell reports for a program ended by Ctrl-C."""


def print_error(screen: Screen, error: TransaxleError) -> int:
    """Print the error of a command.

    Returns:
        The exit code of the command.
    """
    if screen.as_json:
        screen.document(error_document(error))
    else:
        outcome = ", ".join(text for text in (_outcome(error), screen.consequence) if text)
        print_refusals(screen, outcome, error.refusals, screen.note)
    return error.exit_code


def print_interruption(screen: Screen, code: int, reason: str) -> int:
    """Print that the user or a signal stopped the command, and in what state the interruption leaves the files.

    Args:
        screen: where to print.
        code: the exit code of the command.
        reason: `interrupted`, or the name of the signal.

    Returns:
        The exit code of the command.
    """
    message = ", ".join(text for text in (reason, screen.way_on or screen.consequence) if text)
    if screen.as_json:
        screen.document(error_of(code, message))
    else:
        screen.note(message)
    return code


def print_refusals(screen: Screen, head: str, refusals: Sequence[Refusal], put: Callable[..., None]) -> None:
    """Print the most important refusals of a command, or all of them with `--all`.

    Args:
        screen: where to print; its attribute `everything` (option `--all`) decides how many refusals are printed.
        head: the text of the first line, such as "refused, nothing was written".
        refusals: the refusals, the most important first.
        put: function that prints one line.
    """
    count = len(refusals)
    put((head, "bold"), f" ({count:,} reasons)" if count > 1 else "")
    groups = _group_refusals([refusal.shown() for refusal in refusals])
    shown = groups if screen.everything else groups[:MOST]
    for group in shown:
        for parts in _lines(group, all_rows=screen.everything):
            put(*parts)
    hidden = count - sum(len(group) for group in shown)
    if hidden:
        put(f"  … and {hidden:,} more (--all or --json shows them)")
    codes = dict.fromkeys(group[0].code for group in shown)
    put((f"  for details: transaxle explain {' '.join(codes)}", "dim"))


def _group_refusals(refusals: Sequence[Refusal]) -> list[list[Refusal]]:
    """Group refusals that differ only in the tensor name. The groups are in the order of their first refusals."""
    groups: dict[object, list[Refusal]] = {}
    for refusal in refusals:
        key = refusal.code, refusal.where.file, refusal.message, refusal.hint
        groups.setdefault(key, []).append(refusal)
    return list(groups.values())


def _lines(group: Sequence[Refusal], *, all_rows: bool) -> list[tuple[Text, ...]]:
    """Return the printed lines for a group of refusals: code and tensor names, message, hint."""
    from transaxle.engine.wording import fold  # imported inside the function, so that --help does not import the engine

    model = group[0]
    rows = [
        f"{row.name} {row.times}".rstrip()
        for row in fold(dict.fromkeys(r.where.tensor for r in group if r.where.tensor))
    ]
    if not all_rows and len(rows) > _PLACES:
        rows = [*rows[:_PLACES], f"… {len(group):,} tensors in all"]
    places = [model.where.file or "", *rows[:1]]
    place = " · ".join(text for text in places if text)
    lines: list[tuple[Text, ...]] = []
    message = model.message.splitlines()
    if place:
        lines.append(("  ", (model.code, "red"), f"  {place}"))
        lines += [(f"  {' ' * len(model.code)}  {row}",) for row in rows[1:]]
    else:
        lines.append(("  ", (model.code, "red"), f"  {message.pop(0)}" if message else ""))
    lines += [(f"      {line}",) for line in message]
    lines += [("      ", (line, "green")) for line in model.hint.splitlines()]
    return lines


def _outcome(error: TransaxleError) -> str:
    if isinstance(error, StorageError):
        return "failed"
    return "not possible as asked" if isinstance(error, UsageError) else "refused"


def error_document(error: TransaxleError) -> dict[str, Any]:
    """Return the JSON document that describes the error of a command."""
    return error_of(error.exit_code, error.refusals[0].shown().message, *error.refusals)


def error_of(exit_code: int, message: str, *refusals: Refusal) -> dict[str, Any]:
    """Return the JSON document of a failed command: exit code, message and refusals."""
    listed = [refusal.as_json() for refusal in refusals]
    return {"error": {"exit_code": exit_code, "message": message, "refusals": listed}}


class Stopped(KeyboardInterrupt):
    """Exception that is raised when a signal asks the process to end.

    Args:
        number: signal number, such as 15 for SIGTERM.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.number).name}"

    @property
    def exit_code(self) -> int:
        """The exit code that a shell reports for a program ended by this signal: 143 for SIGTERM, 129 for SIGHUP."""
        return 128 + self.number


def outcome(stop: BaseException) -> tuple[int, str]:
    """Return (exit code, message) for the exception that stopped a command."""
    return (stop.exit_code, str(stop)) if isinstance(stop, Stopped) else (INTERRUPTED, "interrupted")
