"""`transaxle dialects`: whose layouts the tables know, and those of one family with a legend of its axes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import click

from transaxle.cli.command import Command, completing, families, printing
from transaxle.cli.screen.screen import Screen
from transaxle.engine.checkpoint.recognise import pick_family
from transaxle.engine.moves import axis_facts, axis_rows, dialect_facts, dialect_rows
from transaxle.engine.wording import plural
from transaxle.families import builtin


@click.command(
    "dialects",
    cls=Command,
    examples=(
        ("transaxle dialects", "list all, with the frameworks they are of"),
        ("transaxle dialects qwen3_moe", "those of a family, and what its axes stand for"),
    ),
    help="""List dialects: the names and layouts that frameworks give the tensors of a model.

    Of each: the framework and its version that the tables were compared with. Every family has dialects of its own
    under these names; with FAMILY they are listed, with a legend of the axes of its table.""",
)
@click.argument("family", required=False, shell_complete=completing(families))
@printing
def command(screen: Screen, family: str | None) -> int:
    """List dialects."""
    known = builtin()
    facts: dict[str, Any]
    if family is None:
        count = Counter(label for entry in known.everything.entries.values() for label in entry.dialects)
        facts = {"dialects": [{**fact, "families": count[fact["dialect"]]} for fact in dialect_facts(count)]}
        rows = dialect_rows(count)
        lines = [[*row[:2], plural(count[row[0]], "family", "families"), *row[2:]] for row in rows]
        legend: list[list[str]] = []
    else:
        found = pick_family(family, known)
        facts = {"family": found.name, "dialects": dialect_facts(found.labels), "axes": axis_facts(found)}
        lines, legend = dialect_rows(found.labels), axis_rows(found)
    if screen.as_json:
        screen.document(facts)
        return 0
    screen.table(lines, indent="")
    if legend:
        screen.line()
        screen.line(("axes", "bold"))
        screen.table(legend)
    return 0
