"""The program `transaxle`: its commands, their common options, and how a failure becomes an exit code and a message.

The help text of each command begins with examples. Each command takes its options from the table in `transaxle.options`
and prints through a `Screen`. The option `--profile` of a command writes a trace recorded by `transaxle.spans`.

Exit codes: 0 for success, 1 if compared checkpoints differ, 2 for wrong usage, 3 for a refusal, 4 for an I/O error, 70
for a bug in Transaxle, 129 after SIGHUP, 130 after Ctrl-C, 141 if the reader of a pipe has closed the pipe, 143 after
SIGTERM.

By default SIGTERM and SIGHUP end a process at once, leaving a half-written folder and a terminal without a cursor. For
both signals, this module raises an exception in the main thread instead, so that a command cleans up as after Ctrl-C. A
signal that is already ignored, such as SIGHUP under `nohup`, stays ignored.
"""

from __future__ import annotations

import difflib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import click
from click.shell_completion import CompletionItem, add_completion_class, shell_complete

from transaxle import __version__
from transaxle.arguments import EVERYTHING, Overwrite, parse_size, read_axes, read_float_type, read_number_of_job
from transaxle.cli import NAME
from transaxle.cli.refusals import Stopped, error_of, outcome, print_error, print_interruption
from transaxle.cli.screen import Screen
from transaxle.errors import TransaxleError, refuse, without_secrets
from transaxle.options import OPENING, OPTIONS, SECTIONS, VERBS, Option, combination_error, command_spelling, select

_COMMAND_LINE_ONLY = {
    "Reading the source": ("derive",),
    "Working": ("profile",),
    "Refits, live into an engine": ("meshes", "together", "ranks_per_node"),
}
"""Section title in the help text -> options of the section that exist only on the command line, not in Python
functions.
"""
_SECTIONED = 16
"""The help text of a command with at least this number of options has sections."""
_SHORTENED = 32
"""`--help` of a command with at least this number of options shows only the common options."""
_HELP_ALL_KEY = "transaxle.help_all"
"""Key of click's `Context.meta`; if it is set, the help text shows all options."""


_FOREIGN_PATHS = frozenset(
    ("-i", "-o", "--in", "--out", "--input", "--output", "--input-dir", "--output-dir", "--input-path", "--output-path",
     "--src", "--dst", "--source", "--load", "--save", "--load-dir", "--save-dir", "--input-folder", "--output-folder")
)  # fmt: skip
"""Options by which programs other than Transaxle take a source or target path. The error for such an option explains
Transaxle's arguments.
"""
_FOREIGN_OPTIONS = {
    f"--{before}{name}{after}": ours
    for ours, names in {
        "--tp": ("tp", "tensor-parallel", "tensor-model-parallel"),
        "--pp": ("pp", "pipeline-parallel", "pipeline-model-parallel"),
        "--ep": ("ep", "expert-parallel", "expert-model-parallel"),
    }.items()
    for name in names
    for before in ("", "target-")
    for after in ("", "-size", "-degree")
} | {
    f"--{name}": ours
    for ours, names in {
        "--to": ("target", "to-format", "target-format", "target-dialect", "output-format"),
        "--from": ("from-dialect", "source-dialect"),
        "--as": ("to",),
        "--format": ("source-format", "from-format", "input-format"),
        "--overwrite": ("force",),
        "--shard-size": ("max-shard-size",),
        "--dtype": ("torch-dtype", "precision"),
        "--jobs": ("workers", "num-workers", "threads"),
    }.items()
    for name in names
}
"""Option of a program other than Transaxle -> Transaxle's option for the same purpose."""


class Bare(click.Option):
    """An option whose value may be omitted. A value is typed after `=`, because a word after a space is parsed as an
    argument.

    Args:
        bare: the option's value if the user types the option without a value.
    """

    def __init__(self, *args: Any, bare: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bare = bare


class Seldom(click.Option):
    """An option that few users need: omitted from `--help` of a command with many options."""


class Command(click.Command):
    """A command whose help text begins with examples.

    Args:
        examples: pairs of (command line, description of what the command line does).
    """

    def __init__(self, *args: Any, examples: Sequence[tuple[str, str]] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the command's parameters. If `--help` cannot show all parameters, an option `--help-all` is added."""
        params = super().get_params(ctx)
        if len(self.params) < _SHORTENED:
            return params
        return [*params[:-1], _HELP_ALL, params[-1]]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command's arguments; a `Bare` option typed without a value gets its attribute `bare` as value."""
        bare = {name: option.bare for option in self.params if isinstance(option, Bare) for name in option.opts}
        end = args.index("--") if "--" in args else len(args)
        words = [f"{word}={bare[word]}" if word in bare else word for word in args[:end]]
        if not ctx.resilient_parsing:
            self._check_dashes(ctx, words)
        try:
            return super().parse_args(ctx, [*words, *args[end:]])
        except click.NoSuchOption as error:
            raise self._unknown_option(ctx, error) from None

    def _unknown_option(self, ctx: click.Context, error: click.NoSuchOption) -> click.UsageError:
        """Return the error for an unknown option. If programs other than Transaxle have the option, the error names
        Transaxle's equivalent.
        """
        places = [each.human_readable_name for each in self.params if isinstance(each, click.Argument)]
        if error.option_name in _FOREIGN_PATHS and "DST" in places:
            line = f"{ctx.command_path} {' '.join(places)} --to TARGET"
            message = f"No such option {error.option_name!r}. The target is the second argument: {line}"
            return click.UsageError(message, ctx)
        our_option = _FOREIGN_OPTIONS.get(error.option_name)
        if any(our_option in each.opts for each in self.params):
            return click.UsageError(f"No such option {error.option_name!r}. Did you mean {our_option!r}?", ctx)
        return error

    def _check_dashes(self, ctx: click.Context, words: Sequence[str]) -> None:
        """Refuse a long option with a single dash, which click would split into letters: `-out` into `-o ut`."""
        options = [option for option in self.get_params(ctx) if isinstance(option, click.Option)]
        names = [name for option in options for name in option.opts]
        valued = {
            name for option in options if not (option.is_flag or isinstance(option, Bare)) for name in option.opts
        }
        for before, word in zip(["", *words], words, strict=False):
            name = word.partition("=")[0]
            if len(name) < 3 or word[0] != "-" or not name[1].isalpha() or before in valued:
                continue
            suggestions = [each for each in names if each.startswith(f"-{name}")]
            if suggestions or name[:2] not in names:
                advice = f"Did you mean {' or '.join(suggestions)}? A" if suggestions else "Options have two dashes; a"
                raise click.UsageError(
                    f"No such option {name!r}. {advice} path that begins so is written ./{word}", ctx
                )

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command's help text: summary, examples, usage and options."""
        summary, _, details = (self.help or "").strip().partition("\n")
        formatter.write_text(summary)
        write_examples(formatter, self.examples)
        formatter.write_paragraph()
        self.format_usage(ctx, formatter)
        for paragraph in details.strip().split("\n\n"):
            formatter.write_paragraph()
            formatter.write_text(" ".join(paragraph.split()))
        self.format_options(ctx, formatter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options into the help text: in sections if there are many, and only the common options if there are
        too many.
        """
        params = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        shown = params
        if _HELP_ALL in params and not ctx.meta.get(_HELP_ALL_KEY):
            shown = [param for param in params if not isinstance(param, Seldom)]
        records = {param.name: record for param in shown if (record := param.get_help_record(ctx)) is not None}
        for title, names in _sections().items() if len(records) >= _SECTIONED else ():
            rows = [records.pop(name) for name in names if name in records]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
        with formatter.section("Options"):
            formatter.write_dl(list(records.values()))
        if len(shown) < len(params):
            formatter.write_paragraph()
            formatter.write_text(f"{ctx.command_path} --help-all shows {len(params) - len(shown)} more options.")


def _sections() -> dict[str, tuple[str, ...]]:
    """Return section title in the help text -> names of the section's options."""
    sections = {title: tuple(option.name for option in options) for title, options in SECTIONS.items()}
    return sections | {title: (*sections.get(title, ()), *names) for title, names in _COMMAND_LINE_ONLY.items()}


def with_all_options(context: click.Context) -> click.Context:
    """Make the help text of a command show all options."""
    context.meta[_HELP_ALL_KEY] = True
    return context


def _print_everything(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(with_all_options(ctx).get_help(), color=ctx.color)
        ctx.exit()


_HELP_ALL = click.Option(
    ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_print_everything,
    help="Show this message with all options and exit.",
)  # fmt: skip


def write_examples(formatter: click.HelpFormatter, examples: Sequence[tuple[str, str]]) -> None:
    """Write example command lines and their effects in two columns."""
    if not examples:
        return
    formatter.write_paragraph()
    widest = max(len(line) for line, _ in examples)
    for line, effect in examples:
        formatter.write(f"  {line.ljust(widest)}   {effect}\n".rstrip(" ") if effect else f"  {line}\n")


_Body = Callable[..., int]


class _FloatType(click.Choice[str]):
    """Click type for the name of a floating-point type; it accepts every spelling of the type (`bfloat16`, `BF16`)."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        name = read_float_type("type", value)
        return super().convert(name if name in self.choices else value, param, ctx)


class _Target(click.types.StringParamType):
    """Click type of the option `--to`; the error for a missing value lists examples."""

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str:  # noqa: ARG002
        """Return the text that click prints after "Missing option"."""
        return "For example --to hf, --to dcp:torchtitan or --to torch_dist; `transaxle dialects` lists more."


def _size(_ctx: click.Context, _param: click.Parameter, typed: str | None) -> int | None:
    """Parse a number of bytes such as `5GB`, `512MB` or `1.5GiB`."""
    count = None if typed is None else parse_size(typed)
    if typed is not None and not count:
        raise click.BadParameter(f"{typed!r} is not a size; write for example 5GB, 512MB or 1.5GiB")
    return count


def _memory(ctx: click.Context, param: click.Parameter, typed: str | None) -> int | None:
    """Parse the memory limit; refuse a limit that is too small for even one worker thread."""
    from transaxle.move.workers import MIN_MEMORY

    count = _size(ctx, param, typed)
    if count is not None and count < MIN_MEMORY:
        raise click.BadParameter(f"{typed} is too little: one worker alone needs {MIN_MEMORY >> 10}KiB of buffers")
    return count


def _axes(_ctx: click.Context, _param: click.Parameter, typed: tuple[str, ...]) -> dict[str, int] | None:
    """Parse axis sizes such as `g=8`."""
    try:
        return read_axes(typed) or None
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _overwrite(_ctx: click.Context, _param: click.Parameter, typed: str | None) -> Overwrite:
    return EVERYTHING if typed == EVERYTHING else typed is not None


def overwrite_option(bare: str, text: str) -> Callable[[_Body], _Body]:
    """Return a decorator that adds the option `--overwrite` to a command, with the same values as the Python argument
    `overwrite`.

    Args:
        bare: the option's value if the user types `--overwrite` alone; the value names what may be replaced.
        text: help text of the option.
    """
    return click.option("--overwrite", help=text, **_overwrite_settings(bare))


def _overwrite_settings(bare: str) -> dict[str, Any]:
    choice = click.Choice([bare, EVERYTHING])
    return {"cls": Bare, "bare": bare, "metavar": f"[={EVERYTHING}]", "type": choice, "callback": _overwrite}


def complete_with(names: Callable[[], Sequence[str]]) -> Callable[..., list[CompletionItem]]:
    """Return a click callback that offers the names that `names()` returns as completions."""

    def complete(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in names() if name.startswith(incomplete)]

    return complete


def dialects() -> list[str]:
    """Return the names of all built-in dialects, with and without version suffix, sorted."""
    from transaxle.families import builtin

    labels = [
        name
        for entry in builtin().everything.entries.values()
        for label in entry.dialects
        for name in (label.partition("@")[0], label)
    ]
    return sorted(dict.fromkeys(labels))


def families() -> list[str]:
    """Return the names of all model families, sorted."""
    from transaxle.families import builtin

    return sorted(builtin())


def _readable() -> list[str]:
    from transaxle.formats.registry import every_format

    return [kind.name for kind in every_format()]


def targets() -> list[str]:
    """Return the values that the shell offers as completions of `--to`: each FORMAT, DIALECT and FORMAT:DIALECT that
    programs load.
    """
    from transaxle.formats.registry import SAFETENSORS, get_format, writable

    labels, labels_by_format = dialects(), dict[str, list[str]]()
    for kind in map(get_format, writable()):
        names = kind.loaded_as or kind.dialects or labels
        loaded_labels = [label for label in labels if label in names or label.partition("@")[0] in names]
        labels_by_format[kind.name] = loaded_labels if kind.dialects else [*loaded_labels, "identity"]
    combinations = [f"{name}:{label}" for name, of_format in labels_by_format.items() for label in of_format]
    return [*labels_by_format[SAFETENSORS.name], *labels_by_format, *combinations]


_COMPLETIONS: Mapping[str, Callable[[], list[str]]] = {
    "NAME": families, "DIALECT": dialects, "FORMAT": _readable, "TARGET": targets,
}  # fmt: skip
"""Placeholder of an option's value in the help text -> function that returns the names offered as completions."""


def _click_option(option: Option) -> Callable[[_Body], _Body]:
    """Return the click decorator for an option of the table in `transaxle.options`."""
    how: dict[str, Any] = {"help": option.help, "metavar": option.metavar or None, **_KINDS[option.kind](option)}
    spellings = list(option.spellings)
    if option.negation:
        spellings = [f"{spellings[0]}/{option.negation}"]
    if option.required:
        how |= {"required": True, "type": _Target()}
    if option.metavar in _COMPLETIONS:
        how["shell_complete"] = complete_with(_COMPLETIONS[option.metavar])
    return click.option(*spellings, option.name, **{"cls": click.Option if option.common else Seldom, **how})


_KINDS: Mapping[str, Callable[[Option], dict[str, Any]]] = {
    "axes": lambda _: {"multiple": True, "callback": _axes},
    "choice": lambda option: {"type": click.Choice(option.choices)},
    "config": lambda _: {"type": click.Path(readable=False)},
    "count": lambda option: {"type": click.IntRange(1, option.maximum)},
    "flag": lambda option: {"is_flag": True, "default": option.default},
    "float_type": lambda option: {"type": _FloatType(option.choices)},
    "memory": lambda _: {"callback": _memory},
    "on": lambda _: {},
    "overwrite": lambda _: _overwrite_settings("checkpoint"),
    "path": lambda _: {"type": click.Path(readable=False)},
    "patterns": lambda _: {"multiple": True},
    "size": lambda option: {"callback": _size, "default": str(option.default)},
    "switch": lambda _: {"is_flag": True, "default": None},
    "text": lambda _: {},
}
"""Kind of an option -> function that returns the keyword arguments of `click.option` for an option of this kind."""


def options_of(verb: str, *, but: Collection[str] = ()) -> Callable[[_Body], _Body]:
    """Return a decorator that adds a public function's options to a command; the command gets the options as its
    argument `options`, a dict.

    Args:
        verb: name of the public function, a key of `VERBS`.
        but: names of options to omit, because the command defines these options itself.
    """
    names = [name for name in VERBS[verb] if name not in but]

    def decorate(body: _Body) -> _Body:
        @wraps(body)
        def command(*args: Any, **parameters: Any) -> int:
            options = {name: parameters.pop(name) for name in names}
            if sentence := combination_error(verb, non_default_options(options), command_spelling):
                raise click.UsageError(sentence)
            return body(*args, options=options, **parameters)

        return _with([_click_option(OPTIONS[name]) for name in names], command)

    return decorate


def non_default_options(options: Mapping[str, Any], names: Iterable[str] | None = None) -> dict[str, Any]:
    """Return the options whose values differ from their defaults.

    Args:
        options: option name -> value.
        names: names of the options to consider; None means all options.
    """
    chosen = options if names is None else select(options, names)
    return {name: value for name, value in chosen.items() if value != OPTIONS[name].default}


_PROFILE = click.option(
    "--profile", cls=Seldom, metavar="FILE", type=click.Path(readable=False), envvar="TRANSAXLE_TRACE",
    help="Write a trace of all threads into FILE, for https://ui.perfetto.dev.",
)  # fmt: skip
_DERIVE = click.option("--derive", cls=Seldom, is_flag=True,
                       help="If no table supports the model, derive one with the installed transformers.")  # fmt: skip
_PRINT_OPTIONS = (
    click.option("--all", "everything", is_flag=True, help="Print all rows of lists and all refusals."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON document."),
    click.option("-q", "--quiet", is_flag=True, help="Print only errors, and JSON if --json is given."),
    click.option("-v", "--verbose", is_flag=True, help="Also print the steps and their times."),
)  # fmt: skip


def with_screen(body: _Body) -> _Body:
    """Decorate a command: add the options for printing, pass a `Screen` to the command, and print its errors."""

    @wraps(body)
    def command(*args: Any, **options: Any) -> int:
        names = ("as_json", "everything", "quiet", "verbose")
        profile = options.pop("profile", None)  # only commands that move tensor bytes have the option --memory
        screen = Screen(**{name: options.pop(name) for name in names})
        if screen.quiet and screen.verbose:
            raise click.UsageError("--quiet and --verbose exclude each other; give only one")
        try:
            if profile is None:
                return body(screen, *args, **options)

            with write_profile(profile):
                return body(screen, *args, **options)
        except TransaxleError as error:
            return print_error(screen, error)
        except MemoryError:
            hint = "Use smaller buffers: --memory 32MB --jobs 1."
            return print_error(screen, refuse("IO", "not enough memory", hint=hint))
        except KeyboardInterrupt as stop:
            return print_interruption(screen, *outcome(stop))

    return _with(_PRINT_OPTIONS, command)


def with_profile(body: _Body) -> _Body:
    """Decorate a command: add `--profile`, which `with_screen` handles."""
    return _PROFILE(body)


def with_derive(body: _Body) -> _Body:
    """Decorate a command: add `--derive`, which derives a table of tensor names and stores its path in `options`. Apply
    this decorator before `with_screen`.
    """

    @wraps(body)
    def command(screen: Screen, *args: Any, src: str, options: dict[str, Any], derive: bool, **parameters: Any) -> int:
        if derive:
            from transaxle.cli.tracing import check_dialect, check_target, derive_rules

            screen.state("nothing was written")

            def check() -> None:
                check_dialect(options["to"])
                if click.get_current_context().info_name == "convert":
                    check_target(parameters["dst"], **select(options, ("overwrite", "resume")))

            options = {**options, "rules": derive_rules(screen, src, non_default_options(options, OPENING), check)}
        return body(screen, *args, src=src, options=options, **parameters)

    return _DERIVE(command)


def _with(options: Sequence[Callable[[_Body], _Body]], body: _Body) -> _Body:
    for option in reversed(options):
        body = option(body)
    return body


@contextmanager
def write_profile(typed: str) -> Iterator[None]:
    """Record a time trace of the `with` block, and write the trace to a file when the block ends or fails.

    Args:
        typed: path of the trace file, which must not exist. In a distributed job, every rank except the first writes
            its own trace file, such as `trace.rank1.json`.

    Raises:
        UsageError: with code EXISTS, before the `with` block runs, if the trace file exists.
        StorageError: with code IO or NO_SPACE, if the trace file cannot be written.
    """
    from transaxle.formats.storage.local import storage_error as storage_failed
    from transaxle.spans import record_trace

    rank = read_number_of_job("RANK", 0)
    path = Path(typed) if rank == 0 else Path(typed).with_suffix(f".rank{rank}{Path(typed).suffix}")
    try:
        file = path.open("x", encoding="utf-8")
    except FileExistsError:
        raise refuse("EXISTS", "the file for the trace already exists", file=str(path), hint="Name another.") from None
    except OSError as error:
        raise storage_failed(error, "creating the trace", str(path)) from error
    with record_trace() as trace:
        try:
            yield
        finally:
            try:
                with file:
                    json.dump(trace.document(), file)
            except OSError as error:
                raise storage_failed(error, "writing the trace", str(path)) from error


_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stoppable() -> Iterator[list[Stopped]]:
    """Raise `Stopped` at the first signal, and ignore later signals, because they would interrupt the cleanup.

    Yields:
        A list to which the exception `Stopped` is appended when a signal arrives; empty until then.
    """
    stops: list[Stopped] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        if not stops:
            stops.append(Stopped(number))
            raise stops[0]

    if threading.current_thread() is not threading.main_thread():
        yield stops  # only the main thread may set signal handlers
        return
    previous = {number: signal.getsignal(number) for number in _SIGNALS}
    handled = [number for number, handler in previous.items() if handler is not signal.SIG_IGN and handler is not None]
    for number in handled:
        signal.signal(number, stop)
    try:
        yield stops
    finally:
        for number in handled:
            signal.signal(number, previous[number])


def interruption_in(error: BaseException | None) -> BaseException | None:
    """Return the KeyboardInterrupt that caused an error. Python wraps a KeyboardInterrupt that arrives while a class is
    created.
    """
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__
    return error


COMPLETE = "_TRANSAXLE_COMPLETE"
"""Environment variable through which a shell requests completions."""

_LOADERS: dict[str, tuple[str, str]] = {
    "ls": ("List the tensors, layers and experts folded.", "transaxle.cli.ls"),
    "info": ("Describe a checkpoint, or this installation.", "transaxle.cli.info"),
    "report": ("Write a report of a checkpoint as an HTML page.", "transaxle.cli.report"),
    "families": ("List the model families that have tables.", "transaxle.cli.known"),
    "dialects": ("List the dialects of the tables, by framework.", "transaxle.cli.known"),
    "plan": ("Show what a conversion would do; write nothing.", "transaxle.cli.convert"),
    "supports": ("Say from a config.json alone whether a conversion works.", "transaxle.cli.convert"),
    "convert": ("Convert a checkpoint, exactly or not at all.", "transaxle.cli.convert"),
    "serve": ("Serve a checkpoint as a hub, without a copy on disk.", "transaxle.cli.serve"),
    "work": ("Carry out a planned conversion in parts, on many machines.", "transaxle.cli.jobs"),
    "verify": ("Check a checkpoint against its manifest, or compare two.", "transaxle.cli.comparison"),
    "check": ("Check whether a program will load a checkpoint.", "transaxle.cli.comparison"),
    "diff": ("Show where two checkpoints differ, across dialects.", "transaxle.cli.comparison"),
    "clean": ("Remove files that killed runs left behind.", "transaxle.cli.jobs"),
    "check-rules": ("Check a table of families and dialects.", "transaxle.cli.derive"),
    "derive": ("Derive a table from a converter.", "transaxle.cli.derive"),
    "explain": ("Explain a refusal code.", "transaxle.cli.explain"),
    "demo": ("Show a conversion there and back on a tiny model.", "transaxle.cli.demo"),
}  # fmt: skip
"""Command name -> (summary, module that defines the function `NAME_command`); the module is imported when the command
runs.
"""
COMMANDS = tuple(_LOADERS)

_EXAMPLES = (
    ("transaxle demo", "convert a tiny model there and back"),
    ("transaxle ls Qwen3-30B-A3B/", "list the tensors"),
    ("transaxle plan Qwen3-30B-A3B/ out/ --to dcp:torchtitan", "see what a conversion would do"),
    ("transaxle convert Qwen3-30B-A3B/ out/ --to dcp:torchtitan", "convert"),
    ("transaxle verify Qwen3-30B-A3B/ out/", "check that both are equal"),
    ("transaxle convert out/ back/ --to hf", "convert back"),
)
_CODES = (
    ("0", "done; equal"),
    ("1", "they differ, verification failed, or the reader would not load it"),
    ("2", "usage error: the target exists, an option or axis is unknown, the dialect is ambiguous"),
    ("3", "input refused: unsafe, corrupt, unsupported, or the result would be lossy"),
    ("4", "I/O failure: source missing or unreadable, no space, or another machine failure"),
)


class Program(click.Group):
    """The click group of all commands; the module of a command is imported when the command runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the names of the commands, the most used command first."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import a command by name, and return it."""
        if cmd_name not in _LOADERS:
            return None
        module = import_module(_LOADERS[cmd_name][1])
        loaded: click.Command = getattr(module, f"{cmd_name.replace('-', '_')}_command")
        return loaded

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command named by the first argument; the error for an unknown name suggests a similar command."""
        name = args[0]
        if name in _LOADERS or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        close = difflib.get_close_matches(name, COMMANDS, 1)
        suggestion = f" Did you mean {close[0]}?" if close else f" Commands: {', '.join(COMMANDS)}."
        raise click.UsageError(f"No such command {name!r}.{suggestion}", ctx)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help text: summary, examples, commands, options and exit codes."""
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
        """Write only the options of the program itself; click's own method would list the commands a second time."""
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
    """Run a command, or show the help text if no command is given."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


USAGE, MACHINE, BUG, BROKEN_PIPE = 2, 4, 70, 141
DEBUG = "TRANSAXLE_DEBUG"
"""Environment variable; if its value is 1, Transaxle prints a traceback after a bug."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code; no exception but `SystemExit` leaves this function."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    _repair_streams()
    if COMPLETE in os.environ:
        from transaxle.cli.shell import Bash

        add_completion_class(Bash)
        return shell_complete(program, {}, NAME, COMPLETE, os.environ[COMPLETE])
    with stoppable() as stops:
        code = _run_printing(arguments)
    # after SIGHUP, nothing can be written to the terminal
    return stops[0].exit_code if stops and code == MACHINE else code


def _run_printing(arguments: Sequence[str]) -> int:
    """Run the program; if an output stream fails, return an exit code instead of printing a traceback."""
    try:
        code = _run_command(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The process that reads the pipe has closed it. Without replacing the stream, the interpreter would print an
        # error when it flushes the stream at exit.
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
    """Run one command; turn every failure into an exit code and a message."""
    screen = Screen(as_json="--json" in arguments)
    try:
        with program.make_context(NAME, list(arguments)) as context:
            return int(program.invoke(context) or 0)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        return _usage(screen, error)
    except (KeyboardInterrupt, click.Abort) as stop:
        return _print_failure(screen, *outcome(stop))
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - the only place where a bug becomes a message
        if (interruption := interruption_in(error)) is not None:
            return _print_failure(screen, *outcome(interruption))
        from transaxle.cli.shell import write_report

        if os.environ.get(DEBUG) == "1":
            import traceback

            traceback.print_exc()
        message = f"internal error: {type(error).__name__}: {error}"
        advice = write_report(error, arguments)
        return (
            _print_failure(screen, BUG, f"{message}\n{advice}")
            if screen.as_json
            else _print_failure(screen, BUG, message, advice)
        )


def _usage(screen: Screen, error: click.ClickException) -> int:
    context = error.ctx if isinstance(error, click.UsageError) else None
    hint = f"See {context.command_path} --help." if context is not None else ""
    return _print_failure(screen, USAGE, error.format_message(), hint)


def _print_failure(screen: Screen, code: int, message: str, hint: str = "") -> int:
    message = without_secrets(message)
    if screen.as_json:
        screen.document(error_of(code, message))
        return code
    for line in (message, hint) if hint else (message,):
        screen.note(line)
    return code


def _repair_streams() -> None:
    """Replace closed standard streams, and make open standard streams escape characters that they cannot encode."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
