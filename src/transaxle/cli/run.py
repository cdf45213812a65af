"""Running the program: whatever happens inside ends in one exit code and, at most, one message.

0 done   1 different   2 usage   3 refused   4 I/O   70 a bug in Transaxle   129 SIGHUP   130 interrupted
141 nobody reads on   143 SIGTERM
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

import click
from click.shell_completion import add_completion_class, shell_complete

from transaxle.cli.command import NAME
from transaxle.cli.program import COMPLETE, program
from transaxle.cli.screen.refusals import error_of
from transaxle.cli.screen.screen import Screen
from transaxle.cli.stop import interruption_in, outcome, stoppable
from transaxle.errors import without_secrets

USAGE, MACHINE, BUG, BROKEN_PIPE = 2, 4, 70, 141
DEBUG = "TRANSAXLE_DEBUG"
"""Environment variable: if it is 1, a bug shows its traceback."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code; nothing but `SystemExit` of the interpreter itself leaves here."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    _repair_streams()
    if COMPLETE in os.environ:
        from transaxle.cli.shell.completion import Bash

        add_completion_class(Bash)
        return shell_complete(program, {}, NAME, COMPLETE, os.environ[COMPLETE])
    with stoppable() as stops:
        code = _run_printing(arguments)
    return stops[0].exit_code if stops and code == MACHINE else code  # the terminal that hung up cannot be written to


def _run_printing(arguments: Sequence[str]) -> int:
    """Run the program; a result that can no longer be printed gives an exit code, not a traceback."""
    try:
        code = _run_command(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read has what they wanted. The interpreter would complain when it flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        with suppress(OSError):
            sys.stderr.write(f"{error.filename or 'writing the result'}: {error.strerror or error}\n")
            sys.stderr.flush()
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return MACHINE
    return code


def _run_command(arguments: Sequence[str]) -> int:
    """Run the command that the arguments name, and turn every failure into an exit code and a message."""
    screen = Screen(as_json="--json" in arguments)
    try:
        with program.make_context(NAME, list(arguments)) as context:
            return int(program.invoke(context) or 0)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        return _usage(screen, error)
    except (KeyboardInterrupt, click.Abort) as stop:
        return _failed(screen, *outcome(stop))
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - the one place where a bug becomes a message
        if (interruption := interruption_in(error)) is not None:
            return _failed(screen, *outcome(interruption))
        from transaxle.cli.shell.bug_report import write_report

        if os.environ.get(DEBUG) == "1":
            import traceback

            traceback.print_exc()
        message = f"internal error: {type(error).__name__}: {error}"
        told = write_report(error, arguments)
        return _failed(screen, BUG, f"{message}\n{told}") if screen.as_json else _failed(screen, BUG, message, told)


def _usage(screen: Screen, error: click.ClickException) -> int:
    context = error.ctx if isinstance(error, click.UsageError) else None
    hint = f"See {context.command_path} --help." if context is not None else ""
    return _failed(screen, USAGE, error.format_message(), hint)


def _failed(screen: Screen, code: int, message: str, hint: str = "") -> int:
    message = without_secrets(message)
    if screen.as_json:
        screen.document(error_of(code, message))
        return code
    for line in (message, hint) if hint else (message,):
        screen.note(line)
    return code


def _repair_streams() -> None:
    """Replace closed streams, and let the others escape names that they cannot encode."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
