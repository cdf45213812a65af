"""What commands are made of: help that begins with examples, options whose value may be left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

NAME = "transaxle"


class Bare(click.Option):
    """An option whose value may be left out, and otherwise follows a `=`: never the next word, which is an argument.

    Args:
        bare: its value where it is left out.
    """

    def __init__(self, *args: Any, bare: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bare = bare


class Command(click.Command):
    """A command whose help begins with examples.

    Args:
        examples: command lines with what they do.
    """

    def __init__(self, *args: Any, examples: Sequence[tuple[str, str]] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments; options whose value is left out get it."""
        bare = {name: each.bare for each in self.params if isinstance(each, Bare) for name in each.opts}
        end = args.index("--") if "--" in args else len(args)
        said = [f"{word}={bare[word]}" if word in bare else word for word in args[:end]]
        return super().parse_args(ctx, [*said, *args[end:]])

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


def write_examples(formatter: click.HelpFormatter, examples: Sequence[tuple[str, str]]) -> None:
    """Write command lines and what they do, in two columns."""
    if not examples:
        return
    formatter.write_paragraph()
    widest = max(len(line) for line, _ in examples)
    for line, what in examples:
        formatter.write(f"  {line.ljust(widest)}   {what}\n".rstrip(" ") if what else f"  {line}\n")
