"""The program: its commands as click sees them, and running it, which ends in one exit code and at most one message.

0 done   1 different   2 usage   3 refused   4 I/O   70 a bug in Transaxle   129 SIGHUP   130 interrupted
141 nobody reads on   143 SIGTERM

By default SIGTERM and SIGHUP end a process at once, leaving a half-written folder, and a terminal without its cursor.
Here they raise an exception in the main thread, so that a command ends as after Ctrl-C, when it has cleaned up. A
signal that the user told the system to ignore, as `nohup` does with SIGHUP, stays ignored.
"""

from __future__ import annotations

import difflib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType

import click
from click.shell_completion import add_completion_class, shell_complete

from transaxle import __version__
from transaxle.cli import NAME
from transaxle.cli.command import write_examples
from transaxle.cli.refusals import Stopped, error_of, outcome
from transaxle.cli.screen import Screen
from transaxle.errors import without_secrets

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stoppable() -> Iterator[list[Stopped]]:
    """Raise `Stopped` for the first of the signals; further ones are ignored, as they would interrupt the cleaning up.

    Yields:
        A list that receives the exception that stopped the process; empty until then.
    """
    stops: list[Stopped] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        if not stops:
            stops.append(Stopped(number))
            raise stops[0]

    if threading.current_thread() is not threading.main_thread():
        yield stops  # only the main thread may say what happens at a signal
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    ours = [number for number, handler in before.items() if handler is not signal.SIG_IGN and handler is not None]
    for number in ours:
        signal.signal(number, stop)
    try:
        yield stops
    finally:
        for number in ours:
            signal.signal(number, before[number])


def interruption_in(error: BaseException | None) -> BaseException | None:
    """Return the interruption that an error was made of, as Python does where it comes while a class is made."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__
    return error


COMPLETE = "_TRANSAXLE_COMPLETE"
"""Environment variable through which a shell requests completions."""

_LOADERS: dict[str, tuple[str, str]] = {
    "ls": ("List the tensors, layers and experts folded.", "transaxle.cli.ls"),
    "info": ("Describe a checkpoint, or this installation.", "transaxle.cli.info"),
    "report": ("Write a page to look at in a browser.", "transaxle.cli.report"),
    "families": ("List the families of models that tables are known for.", "transaxle.cli.known"),
    "dialects": ("List the layouts that tables know, by framework.", "transaxle.cli.known"),
    "plan": ("Show what a conversion would do; write nothing.", "transaxle.cli.convert"),
    "convert": ("Convert a checkpoint, exactly or not at all.", "transaxle.cli.convert"),
    "work": ("Carry out a conversion in parts, on many machines.", "transaxle.cli.convert"),
    "verify": ("Check a checkpoint against its manifest, or compare two.", "transaxle.cli.comparison"),
    "diff": ("Show where two checkpoints differ, across dialects.", "transaxle.cli.comparison"),
    "clean": ("Remove what killed runs left behind.", "transaxle.cli.convert"),
    "check-rules": ("Check a table of families and dialects.", "transaxle.cli.derive"),
    "derive": ("Derive a table from what a converter does.", "transaxle.cli.derive"),
    "explain": ("Explain a refusal code.", "transaxle.cli.explain"),
    "demo": ("Show a conversion there and back on a tiny model.", "transaxle.cli.demo"),
}  # fmt: skip
"""Command -> its summary, and the module with its `…_command`, which is imported when it is used."""
COMMANDS = tuple(_LOADERS)

_EXAMPLES = (
    ("transaxle demo", "watch it on a tiny model"),
    ("transaxle ls Qwen3-30B-A3B/", "look"),
    ("transaxle plan Qwen3-30B-A3B/ out/ --to dcp:torchtitan", "see what would happen"),
    ("transaxle convert Qwen3-30B-A3B/ out/ --to dcp:torchtitan", "do it"),
    ("transaxle verify Qwen3-30B-A3B/ out/", "prove it"),
    ("transaxle convert out/ back/ --to hf", "and back"),
)
_CODES = (
    ("0", "done; equal"),
    ("1", "they differ, or verification failed"),
    ("2", "usage error: the target exists, an option or axis is unknown, the dialect is ambiguous"),
    ("3", "input refused: unsafe, corrupt, unsupported, or the result would be lossy"),
    ("4", "I/O failure: source missing or unreadable, no space, or another machine failure"),
)


class Program(click.Group):
    """The program: commands are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the commands, most used first."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import a command."""
        if cmd_name not in _LOADERS:
            return None
        module = import_module(_LOADERS[cmd_name][1])
        loaded: click.Command = getattr(module, f"{cmd_name.replace('-', '_')}_command")
        return loaded

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the first argument names; a mistyped one gets a suggestion."""
        name = args[0]
        if name in _LOADERS or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        close = difflib.get_close_matches(name, COMMANDS, 1)
        suggestion = f" Did you mean {close[0]}?" if close else f" Commands: {', '.join(COMMANDS)}."
        raise click.UsageError(f"No such command {name!r}.{suggestion}", ctx)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the summary, examples, commands, and exit codes."""
        formatter.write_text(f"{self.help}")
        write_examples(formatter, _EXAMPLES)
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (summary, _) in _LOADERS.items()])
        self.format_options(ctx, formatter)
        with formatter.section("Exit codes"):
            formatter.write_dl(_CODES)
        formatter.write_paragraph()
        formatter.write_text(f"Run {NAME} COMMAND --help for the options of a command and examples.")
        formatter.write_text("Completion in bash (or zsh, fish):")
        formatter.write_text(f'  eval "$({COMPLETE}=bash_source {NAME})"')

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the program's own options; click would add the commands once more."""
        records = [record for param in self.get_params(ctx) if (record := param.get_help_record(ctx)) is not None]
        with formatter.section("Options"):
            formatter.write_dl(records)


def _version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(f"{NAME} {__version__}")
        ctx.exit()


@click.command(
    NAME,
    cls=Program,
    invoke_without_command=True,
    help="Moves model weights between frameworks, packings and file formats: exactly, or not at all.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Print the version."
)
@click.pass_context
def program(ctx: click.Context) -> None:
    """Run a command, or show the help where none is named."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


USAGE, MACHINE, BUG, BROKEN_PIPE = 2, 4, 70, 141
DEBUG = "TRANSAXLE_DEBUG"
"""Environment variable: if it is 1, a bug shows its traceback."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code; nothing but `SystemExit` of the interpreter itself leaves here."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    _repair_streams()
    if COMPLETE in os.environ:
        from transaxle.cli.shell import Bash

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
        from transaxle.cli.shell import write_report

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
