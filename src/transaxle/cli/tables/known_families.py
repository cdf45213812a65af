"""`transaxle families`: the families whose tables ship, or that installed packages add."""

from __future__ import annotations

import click

from transaxle.cli.command import Command, printing
from transaxle.cli.screen.screen import Screen
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
def command(screen: Screen, word: str | None) -> int:
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
