"""`transaxle families` lists the families that have tables; `transaxle dialects` lists the dialects of these tables.

A table lists the tensor names of a model family; it is built in, or comes from a plugin package. With the name of a
family, `transaxle dialects` also explains the axes of the family's tensors.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import click

from transaxle.cli.command import Command, complete_with, families, with_screen
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
        ("transaxle families qwen", "families with this word in their name or model types"),
    ),
    help="""List the model families that have tables.

    For each family: its name, the values of model_type in a config.json that select it, and its dialects. With --json
    also whether its table was derived from transformers by tracing, or written by hand.""",
)
@click.argument("word", required=False)
@with_screen
def families_command(screen: Screen, word: str | None) -> int:
    """List the model families that have tables."""
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
    advice = "`transaxle dialects FAMILY` explains it" if rows else "`transaxle derive` makes tables of more models"
    screen.note(f"{plural(len(shown), 'family', 'families')} of {len(entries):,}; {advice}")
    return 0


def _has(word: str | None, name: str, entry: Entry) -> bool:
    return word is None or any(word.lower() in text.lower() for text in (name, *entry.model_types))


def _types(name: str, entry: Entry) -> str:
    """Return the model types of a family as text; return an empty text if the only model type is the family's name."""
    return "" if entry.model_types == (name,) else ", ".join(entry.model_types)


@click.command(
    "dialects",
    cls=Command,
    examples=(
        ("transaxle dialects", "list all, with their frameworks"),
        ("transaxle dialects qwen3_moe", "dialects of one family, and the meaning of its axes"),
    ),
    help="""List dialects: the names and layouts that frameworks give the tensors of a model.

    For each dialect: the framework, and the version with which its tables were compared. Dialects of the same name
    differ between families: with FAMILY, the command lists the dialects of this family, and the axes of its table.""",
)
@click.argument("family", required=False, shell_complete=complete_with(families))
@with_screen
def dialects_command(screen: Screen, family: str | None) -> int:
    """List the dialects (the tensor names and layouts of each framework)."""
    all_families = builtin()
    facts: dict[str, Any]
    if family is None:
        count = Counter(label for entry in all_families.everything.entries.values() for label in entry.dialects)
        facts = {"dialects": [{**fact, "families": count[fact["dialect"]]} for fact in dialect_facts(count)]}
        rows = dialect_rows(count)
        lines = [[*row[:2], plural(count[row[0]], "family", "families"), *row[2:]] for row in rows]
        legend: list[list[str]] = []
    else:
        chosen_family = pick_family(family, all_families)
        facts = {
            "family": chosen_family.name,
            "dialects": dialect_facts(chosen_family.labels),
            "axes": axis_facts(chosen_family),
        }
        lines, legend = dialect_rows(chosen_family.labels), axis_rows(chosen_family)
    if screen.as_json:
        screen.document(facts)
        return 0
    screen.table(lines, indent="")
    if legend:
        screen.line()
        screen.line(("axes", "bold"))
        screen.table(legend)
    return 0
