"""`transaxle families` and `transaxle dialects`: what the tables know.

**`transaxle families`**: the families whose tables ship, or that installed packages add.

**`transaxle dialects`**: whose layouts the tables know, and those of one family with a legend of its axes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import click

from transaxle.cli.command import Command, completing, families, printing
from transaxle.cli.screen import Screen
from transaxle.engine.checkpoint.recognise import pick_family
from transaxle.engine.moves import axis_facts, axis_rows, dialect_facts, dialect_rows
from transaxle.engine.wording import plural
from transaxle.families import Entry, builtin

_TRACED, _WRITTEN = "tracing", "hand"


@click.command(
    "families",
    cls=Command,
    examples=(
        ("transaxle families", "list all"),
        ("transaxle families qwen", "those with this word in their name or model types"),
    ),
    help="""List the families of models that tables are known for.

    Of each: its name, the values of model_type in a config.json that mean it, and its dialects. Tables by tracing were
    derived from transformers; the others are by hand.""",
)
@click.argument("word", required=False)
@printing
def families_command(screen: Screen, word: str | None) -> int:
    """List families."""
    entries = builtin().everything.entries
    shown = {name: entry for name, entry in entries.items() if _has(word, name, entry)}
    if screen.as_json:
        facts = [
            {
                "family": name,
                "model_types": list(entry.model_types),
                "dialects": list(entry.dialects),
                "axes": list(entry.axes),
                "made_by": _TRACED if entry.traced else _WRITTEN,
            }
            for name, entry in shown.items()
        ]
        screen.document({"families": facts})
        return 0
    rows = [[name, _types(name, entry), ", ".join(entry.dialects)] for name, entry in shown.items()]
    if rows:
        screen.table(rows, indent="")
    more = "`transaxle dialects FAMILY` says more" if rows else "`transaxle derive` makes tables of other models"
    screen.note(f"{plural(len(shown), 'family', 'families')} of {len(entries):,}; {more}")
    return 0


def _has(word: str | None, name: str, entry: Entry) -> bool:
    return word is None or any(word.lower() in text.lower() for text in (name, *entry.model_types))


def _types(name: str, entry: Entry) -> str:
    """Return the model types where they are more than the name."""
    return "" if entry.model_types == (name,) else ", ".join(entry.model_types)


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
def dialects_command(screen: Screen, family: str | None) -> int:
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
