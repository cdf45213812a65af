"""The building blocks of commands: help that begins with examples, and options whose value may be left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from transaxle.options import SECTIONS

NAME = "transaxle"
_ALONE = {
    "Reading the source": ("derive",),
    "Working": ("profile",),
    "Refits, live into an engine": ("meshes", "together", "ranks_per_node"),
}
"""Title of a section in the help of a command with many options -> options that only the command line has."""
_MANY = 16
"""Options that make sections worth their titles."""
_TOO_MANY = 32
"""Options of which the help shows only those that many people need."""
_EVERYTHING = "transaxle.help_all"
"""Key in a context's `meta`: the help shows all options."""


_PLACES = frozenset(
    ("-i", "-o", "--in", "--out", "--input", "--output", "--input-dir", "--output-dir", "--input-path", "--output-path",
     "--src", "--dst", "--source", "--load", "--save", "--load-dir", "--save-dir", "--input-folder", "--output-folder")
)  # fmt: skip
"""Options by which other programs take the source and the target."""
_ELSEWHERE = {
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
"""Options of other programs -> ours."""


class Bare(click.Option):
    """An option whose value may be omitted; if given, it follows a `=`, never a space, as the next word is an
    argument.

    Args:
        bare: its value where it is omitted.
    """

    def __init__(self, *args: Any, bare: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bare = bare


class Seldom(click.Option):
    """An option that few people need: the short help of a command with many options leaves it out."""


class Command(click.Command):
    """A command whose help begins with examples.

    Args:
        examples: pairs of a command line and its effect.
    """

    def __init__(self, *args: Any, examples: Sequence[tuple[str, str]] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, with `--help-all` where there are too many options for `--help`."""
        params = super().get_params(ctx)
        if len(self.params) < _TOO_MANY:
            return params
        return [*params[:-1], _HELP_ALL, params[-1]]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; options without a value get their bare one."""
        bare = {name: option.bare for option in self.params if isinstance(option, Bare) for name in option.opts}
        end = args.index("--") if "--" in args else len(args)
        words = [f"{word}={bare[word]}" if word in bare else word for word in args[:end]]
        if not ctx.resilient_parsing:
            self._check_dashes(ctx, words)
        try:
            return super().parse_args(ctx, [*words, *args[end:]])
        except click.NoSuchOption as error:
            raise self._meant(ctx, error) from None

    def _meant(self, ctx: click.Context, error: click.NoSuchOption) -> click.UsageError:
        """Return the error for an option that other programs have, with what to write here."""
        places = [each.human_readable_name for each in self.params if isinstance(each, click.Argument)]
        if error.option_name in _PLACES and "DST" in places:
            line = f"{ctx.command_path} {' '.join(places)} --to TARGET"
            message = f"No such option {error.option_name!r}. The target is the second argument: {line}"
            return click.UsageError(message, ctx)
        ours = _ELSEWHERE.get(error.option_name)
        if any(ours in each.opts for each in self.params):
            return click.UsageError(f"No such option {error.option_name!r}. Did you mean {ours!r}?", ctx)
        return error

    def _check_dashes(self, ctx: click.Context, words: Sequence[str]) -> None:
        """Refuse a word behind a single dash, which click would read letter by letter: `-out` as `-o ut`."""
        options = [option for option in self.get_params(ctx) if isinstance(option, click.Option)]
        names = [name for option in options for name in option.opts]
        valued = {
            name for option in options if not (option.is_flag or isinstance(option, Bare)) for name in option.opts
        }
        for before, word in zip(["", *words], words, strict=False):
            name = word.partition("=")[0]
            if len(name) < 3 or word[0] != "-" or not name[1].isalpha() or before in valued:
                continue
            meant = [each for each in names if each.startswith(f"-{name}")]
            if meant or name[:2] not in names:
                advice = f"Did you mean {' or '.join(meant)}? A" if meant else "Options have two dashes; a"
                raise click.UsageError(
                    f"No such option {name!r}. {advice} path that begins so is written ./{word}", ctx
                )

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write summary, examples, usage, and options."""
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
        """Write the options, in sections where there are many; where there are too many, those of most use."""
        params = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        shown = params
        if _HELP_ALL in params and not ctx.meta.get(_EVERYTHING):
            shown = [param for param in params if not isinstance(param, Seldom)]
        records = {param.name: record for param in shown if (record := param.get_help_record(ctx)) is not None}
        for title, names in _sections().items() if len(records) >= _MANY else ():
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
    """Return the sections of the help, each with the options in it."""
    sections = {title: tuple(option.name for option in options) for title, options in SECTIONS.items()}
    return sections | {title: (*sections.get(title, ()), *names) for title, names in _ALONE.items()}


def with_all_options(context: click.Context) -> click.Context:
    """Let the help of a command show all options."""
    context.meta[_EVERYTHING] = True
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
    """Write command lines with their effects, in two columns."""
    if not examples:
        return
    formatter.write_paragraph()
    widest = max(len(line) for line, _ in examples)
    for line, effect in examples:
        formatter.write(f"  {line.ljust(widest)}   {effect}\n".rstrip(" ") if effect else f"  {line}\n")
