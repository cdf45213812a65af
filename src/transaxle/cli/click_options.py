"""The options of commands, made from the table of `transaxle.options`, and those that only the command line has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any

import click
from click.shell_completion import CompletionItem

from transaxle.arguments import EVERYTHING, Overwrite, parse_size, read_axes, read_float_type
from transaxle.cli.command import Bare, Seldom
from transaxle.cli.screen.refusals import failed, interrupted
from transaxle.cli.screen.screen import Screen
from transaxle.cli.stop import outcome
from transaxle.errors import TransaxleError, refuse
from transaxle.options import OPENING, OPTIONS, VERBS, Option, refused, select, spelled

_Body = Callable[..., int]


class _FloatType(click.Choice[str]):
    """A choice of floating-point types; each is taken by any of its names (`bfloat16`, `BF16`)."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        name = read_float_type("type", value)
        return super().convert(name if name in self.choices else value, param, ctx)


class _Target(click.types.StringParamType):
    """The type of `--to`, which says what can be written where it is missing."""

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str:  # noqa: ARG002
        """Return what follows "Missing option"."""
        return "For example --to hf, --to dcp:torchtitan or --to torch_dist; `transaxle dialects` lists more."


def _size(_ctx: click.Context, _param: click.Parameter, typed: str | None) -> int | None:
    """Parse a number of bytes: `5GB`, `512MB`, `1.5GiB`."""
    count = None if typed is None else parse_size(typed)
    if typed is not None and not count:
        raise click.BadParameter(f"{typed!r} is not a size; write for example 5GB, 512MB or 1.5GiB")
    return count


def _memory(ctx: click.Context, param: click.Parameter, typed: str | None) -> int | None:
    """Parse the memory limit, and refuse one that is too small for a single worker."""
    from transaxle.move.workers import LEAST_MEMORY

    count = _size(ctx, param, typed)
    if count is not None and count < LEAST_MEMORY:
        raise click.BadParameter(f"{typed} is too little: one worker alone needs {LEAST_MEMORY >> 10}KiB of buffers")
    return count


def _axes(_ctx: click.Context, _param: click.Parameter, typed: tuple[str, ...]) -> dict[str, int] | None:
    """Parse sizes of axes: `g=8`."""
    try:
        return read_axes(typed) or None
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _overwrite(_ctx: click.Context, _param: click.Parameter, typed: str | None) -> Overwrite:
    return EVERYTHING if typed == EVERYTHING else typed is not None


def overwriting(what: str, text: str) -> Callable[[_Body], _Body]:
    """Return the option `--overwrite`; the command gets it as the Python functions take it.

    Args:
        what: what it replaces without a value.
        text: its help.
    """
    return click.option("--overwrite", help=text, **_overwrites(what))


def _overwrites(what: str) -> dict[str, Any]:
    choice = click.Choice([what, EVERYTHING])
    return {"cls": Bare, "bare": what, "metavar": f"[={EVERYTHING}]", "type": choice, "callback": _overwrite}


def completing(names: Callable[[], Sequence[str]]) -> Callable[..., list[CompletionItem]]:
    """Return the click callback that completes these names."""

    def complete(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in names() if name.startswith(incomplete)]

    return complete


def dialects() -> list[str]:
    """Return the built-in dialects, each once."""
    from transaxle.families import builtin

    labels = [
        name
        for entry in builtin().everything.entries.values()
        for label in entry.dialects
        for name in (label.partition("@")[0], label)
    ]
    return sorted(dict.fromkeys(labels))


def families() -> list[str]:
    """Return the names of the families."""
    from transaxle.families import builtin

    return sorted(builtin())


def _readable() -> list[str]:
    from transaxle.formats.registry import every_format

    return [kind.name for kind in every_format()]


def _targets() -> list[str]:
    """Return the values of `--to`: dialects alone, and formats with dialects."""
    from transaxle.formats.registry import writable

    names = [*dialects(), "identity"]
    return [*names, *(f"{form}:{name}" for form in writable() for name in names)]


_COMPLETED: Mapping[str, Callable[[], list[str]]] = {
    "NAME": families, "DIALECT": dialects, "FORMAT": _readable, "TARGET": _targets,
}  # fmt: skip
"""What stands for a value in the help -> the names that complete it."""


def _click_option(option: Option) -> Callable[[_Body], _Body]:
    """Return an option of the table for click."""
    how: dict[str, Any] = {"help": option.help, "metavar": option.metavar or None, **_KINDS[option.kind](option)}
    spellings = list(option.spellings)
    if option.kind == "switch" or option.default is True:
        spellings = [f"{spellings[0]}/--no-{option.name}"]
    if option.required:
        how |= {"required": True, "type": _Target()}
    if option.metavar in _COMPLETED:
        how["shell_complete"] = completing(_COMPLETED[option.metavar])
    return click.option(*spellings, option.name, **{"cls": click.Option if option.common else Seldom, **how})


_KINDS: Mapping[str, Callable[[Option], dict[str, Any]]] = {
    "axes": lambda _: {"multiple": True, "callback": _axes},
    "choice": lambda option: {"type": click.Choice(option.choices)},
    "config": lambda _: {"type": click.Path(readable=False)},
    "count": lambda option: {"type": click.IntRange(1, option.most)},
    "flag": lambda option: {"is_flag": True, "default": option.default},
    "float_type": lambda option: {"type": _FloatType(option.choices)},
    "memory": lambda _: {"callback": _memory},
    "on": lambda _: {},
    "overwrite": lambda _: _overwrites("checkpoint"),
    "path": lambda _: {"type": click.Path(readable=False)},
    "patterns": lambda _: {"multiple": True},
    "size": lambda option: {"callback": _size, "default": str(option.default)},
    "switch": lambda _: {"is_flag": True, "default": None},
    "text": lambda _: {},
}
"""Kind of an option -> how click reads it."""


def options_of(verb: str, *, but: Collection[str] = ()) -> Callable[[_Body], _Body]:
    """Return what gives a command the options of a verb; the command gets them as `options`, as Python would.

    Args:
        verb: one of `VERBS`.
        but: options that the command has in a form of its own.
    """
    names = [name for name in VERBS[verb] if name not in but]

    def decorate(body: _Body) -> _Body:
        @wraps(body)
        def command(*args: Any, **others: Any) -> int:
            options = {name: others.pop(name) for name in names}
            if sentence := refused(verb, given(options), spelled):
                raise click.UsageError(sentence)
            return body(*args, options=options, **others)

        return _with([_click_option(OPTIONS[name]) for name in names], command)

    return decorate


def given(options: Mapping[str, Any], names: Iterable[str] | None = None) -> dict[str, Any]:
    """Return the options that the user typed: whose values are not the defaults.

    Args:
        options: values by name.
        names: those that are asked for; None: all.
    """
    chosen = options if names is None else select(options, names)
    return {name: value for name, value in chosen.items() if value != OPTIONS[name].default}


_PROFILE = click.option(
    "--profile", cls=Seldom, metavar="FILE", type=click.Path(readable=False), envvar="TRANSAXLE_TRACE",
    help="Write what was done when, and in which thread, into FILE, for https://ui.perfetto.dev.",
)  # fmt: skip
_DERIVE = click.option("--derive", cls=Seldom, is_flag=True,
                       help="If no table knows the model, derive one from the installed transformers.")  # fmt: skip
_EVERYWHERE = (
    click.option("--all", "everything", is_flag=True, help="Print all rows of lists and all refusals."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON document."),
    click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors, and JSON where --json asks for it."),
    click.option("-v", "--verbose", is_flag=True, help="Say what was done, and how long it took."),
)  # fmt: skip


def printing(body: _Body) -> _Body:
    """Add the options on what is printed, give the command its screen, and print the errors that it raises."""

    @wraps(body)
    def command(*args: Any, **options: Any) -> int:
        names = ("as_json", "everything", "quiet", "verbose")
        profile = options.pop("profile", None)  # of commands that move bytes
        screen = Screen(**{name: options.pop(name) for name in names})
        if screen.quiet and screen.verbose:
            raise click.UsageError("--quiet and --verbose exclude each other; give only one")
        try:
            if profile is None:
                return body(screen, *args, **options)
            from transaxle.cli.shell.profile_file import profiled

            with profiled(profile):
                return body(screen, *args, **options)
        except TransaxleError as error:
            return failed(screen, error)
        except MemoryError:
            hint = "Use smaller buffers: --memory 32MB --jobs 1."
            return failed(screen, refuse("IO", "not enough memory", hint=hint))
        except KeyboardInterrupt as stop:
            return interrupted(screen, *outcome(stop))

    return _with(_EVERYWHERE, command)


def profiling(body: _Body) -> _Body:
    """Add the option that notes what is done when; `printing` takes it."""
    return _PROFILE(body)


def deriving(body: _Body) -> _Body:
    """Add the option that derives a missing table, which joins the command's `options`. Below `printing`."""

    @wraps(body)
    def command(screen: Screen, *args: Any, src: str, options: dict[str, Any], derive: bool, **others: Any) -> int:
        if derive:
            from transaxle.cli.tracing import check_dialect, check_target, derived_rules

            screen.state("nothing was written")

            def check() -> None:
                check_dialect(options["to"])
                if click.get_current_context().info_name == "convert":
                    check_target(others["dst"], **select(options, ("overwrite", "resume")))

            options = {**options, "rules": derived_rules(screen, src, given(options, OPENING), check)}
        return body(screen, *args, src=src, options=options, **others)

    return _DERIVE(command)


def _with(options: Sequence[Callable[[_Body], _Body]], body: _Body) -> _Body:
    for option in reversed(options):
        body = option(body)
    return body
