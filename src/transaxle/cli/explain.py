"""`transaxle explain` prints explanations of the refusal codes."""

from __future__ import annotations

import difflib
import textwrap
from typing import Any

import click

from transaxle.cli.command import Command, complete_with, with_screen
from transaxle.cli.screen import Screen
from transaxle.engine.explanations import EXPLANATIONS, Explanation
from transaxle.errors import CODES, Code, refuse

_WIDTH = 100


def _parse_codes(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> tuple[Code, ...]:
    """Parse refusal codes in upper or lower case; the error for an unknown code suggests a known one."""
    codes: list[Code] = []
    for typed in values:
        spelling = typed.upper().replace("-", "_")
        close = difflib.get_close_matches(spelling, CODES, 1)
        code = next((code for code in CODES if code == spelling), None)
        if code is None:
            hint = f" Did you mean {close[0]}?" if close else " `transaxle explain` alone lists them."
            raise click.BadParameter(f"no such code: {typed!r}.{hint}")
        codes.append(code)
    return tuple(codes)


@click.command(
    "explain",
    cls=Command,
    examples=(("transaxle explain BLOCK_MISALIGNED", ""), ("transaxle explain", "list all codes, one line each")),
    help="""Explain a refusal: what it means, a typical example, and what to do.

    Without CODE: lists all codes. No error has a code outside this list.""",
)
@click.argument(
    "codes", metavar="[CODE]...", nargs=-1, callback=_parse_codes, shell_complete=complete_with(lambda: CODES)
)
@with_screen
def explain_command(screen: Screen, codes: tuple[Code, ...]) -> int:
    """Explain the given refusal codes, or list all codes if none is given."""
    if screen.as_json:
        screen.document({code: _as_json(code) for code in codes or CODES})
    elif codes:
        for number, code in enumerate(codes):
            if number:
                screen.line()
            _print(screen, code, EXPLANATIONS[code])
    else:
        screen.table([[code, f"exits with {_exit(code)}", EXPLANATIONS[code].summary] for code in CODES], indent="")
    return 0


def _exit(code: Code) -> int:
    return refuse(code, "").exit_code


def _as_json(code: Code) -> dict[str, Any]:
    text = EXPLANATIONS[code]
    return {
        "exit_code": _exit(code),
        "summary": text.summary,
        "meaning": text.meaning,
        "example": text.example,
        "remedy": text.remedy,
    }


def _print(screen: Screen, code: Code, text: Explanation) -> None:
    screen.line((code, "bold"), f"  {text.summary}", (f"  (exits with {_exit(code)})", "dim"))
    width = min(screen.width or _WIDTH, _WIDTH) - 2
    for paragraph in (text.meaning, text.remedy):
        screen.line()
        for line in textwrap.wrap(paragraph, width, break_on_hyphens=False):
            screen.line(f"  {line}")
        if paragraph is text.meaning:
            screen.line()
            for line in f"{code}  {text.example}".splitlines():
                screen.line((f"      {line}", "dim"))
