"""`transaxle check-rules`: whether a table is sound, and which names of a checkpoint it reads."""

from __future__ import annotations

from typing import Any

import click

from transaxle.axes.layout.bind import group, score, split_slot
from transaxle.axes.notation.family import Dialect, Family
from transaxle.cli import options
from transaxle.cli.command import Command
from transaxle.cli.commands.plan import folded
from transaxle.cli.screen.quantities import plural
from transaxle.cli.screen.screen import Screen
from transaxle.engine.checkpoint.checkpoint import Checkpoint, open_checkpoint
from transaxle.engine.checkpoint.settings import settings
from transaxle.errors import TransaxleError
from transaxle.families import builtin

JsonFacts = dict[str, Any]


@click.command(
    "check-rules",
    cls=Command,
    examples=(
        ("transaxle check-rules my.rules", "list every mistake with its line"),
        ("transaxle check-rules my.rules my-model/", "and show what it reads of this checkpoint"),
    ),
    help="""Check a table of families and dialects, and show what it reads of a checkpoint.

    Without CKPT: prints every mistake in FILE with its line, and what the file declares. With CKPT: also prints how
    many tensor names each dialect reads, the names that no line reads, the size of every axis, and what prevents
    writing each dialect.""",
)
@click.argument("file", type=click.Path())
@click.argument("ckpt", type=click.Path(), required=False)
@options.printing
def command(screen: Screen, file: str, ckpt: str | None) -> int:
    """Check a table."""
    known = settings(rules=file).families
    declared = [known[name] for name, entry in known.entries.items() if not entry.file]
    report: dict[str, Any] = {"file": file, "families": [_declared(family) for family in declared]}
    if ckpt is not None:
        report |= {"checkpoint": ckpt, "reads": [_read(ckpt, file, family) for family in declared]}
    if screen.as_json:
        screen.document(report)
    else:
        _print(screen, report)
    return 0


def _declared(family: Family) -> JsonFacts:
    new = [dialect for dialect in family.dialects if not _ships(family, dialect)]
    return {
        "name": family.name,
        "model_types": list(family.model_types),
        "axes": {axis: None if formula is None else formula.text for axis, formula in family.axes.items()},
        "unsized": _unsized(family),
        "tensors": list(family.tensors),
        "dialects": {dialect.label: len(dialect.lines) for dialect in new},
    }


def _unsized(family: Family) -> list[str]:
    """Return the name axes without a formula: their size is known from a checkpoint's names only."""
    return [axis for axis, formula in family.axes.items() if formula is None and axis in family.name_axes]


def _ships(family: Family, dialect: Dialect) -> bool:
    shipped_family = builtin().get(family.name)
    return shipped_family is not None and any(dialect is shipped for shipped in shipped_family.dialects)


def _read(ckpt: str, file: str, family: Family) -> JsonFacts:
    """Return which names of a checkpoint each dialect of a family reads, and what prevents writing the others."""
    with open_checkpoint(ckpt, rules=file, family=family.name) as checkpoint:
        grouped = group(split_slot(name)[0] for name in checkpoint)
        counts = {dialect.label: score(grouped, dialect)[0] for dialect in family.dialects}
        source_dialect = checkpoint.recognised.dialect
        return {
            "family": family.name,
            "tensors": len(checkpoint),
            "names_read": counts,
            "dialect": source_dialect.label,
            "unknown": list(checkpoint.bound.unknown),
            "ignored": list(checkpoint.bound.ignored),
            "axes": dict(checkpoint.sizes.at({})),
            "writes": {d.label: _written(checkpoint, d) for d in family.dialects if d.label != source_dialect.label},
        }


def _written(checkpoint: Checkpoint, dialect: Dialect) -> JsonFacts:
    """Return the result of writing a checkpoint in another dialect, or everything that prevents it."""
    try:
        translation = checkpoint.translation(dialect.label)
    except TransaxleError as error:
        return {"tensors": 0, "refusals": [refusal.as_json() for refusal in error.refusals]}
    refusals = (*checkpoint.foreign(dialect.label), *translation.refusals)
    return {"tensors": len(translation.targets), "refusals": [refusal.as_json() for refusal in refusals]}


def _print(screen: Screen, report: JsonFacts) -> None:
    screen.line((report["file"], "bold"), ": sound")
    for family in report["families"]:
        amount = f"{plural(len(family['axes']), 'axis', 'axes')}, {plural(len(family['tensors']), 'logical tensor')}"
        screen.line(f"  family {family['name']}: {amount}")
        for axis in family["unsized"]:
            screen.line(
                f"    axis {axis} has no size: it is counted from the tensor names, so a lost last entry goes "
                f"unnoticed; declare {axis}=CONFIG_KEY, or {axis}=len(CONFIG_KEY) for a list"
            )
        for label, lines in family["dialects"].items():
            screen.line(f"    dialect {label}: {plural(lines, 'line')}")
    for read in report.get("reads", []):
        screen.line((report["checkpoint"], "bold"), f": read as {read['family']}, dialect {read['dialect']}")
        total = plural(read["tensors"], "name")
        best = [(label, count) for label, count in read["names_read"].items() if count]
        screen.table([[label, f"reads {count:,} of {total}"] for label, count in best])
        if read["unknown"]:
            screen.some("  names that no line reads", list(folded(tuple(read["unknown"]))))
        screen.line(f"  axes {' '.join(f'{axis}={count}' for axis, count in read['axes'].items()) or '(from shapes)'}")
        for label, outcome in read["writes"].items():
            refusals = outcome["refusals"]
            if not refusals:
                screen.line(f"  to {label}: {plural(outcome['tensors'], 'tensor')}")
                continue
            message = refusals[0]["message"].splitlines()
            screen.line(
                f"  to {label}: {plural(len(refusals), 'refusal')}; the first is {refusals[0]['code']}: {message[0]}"
            )
            for line in message[1:]:
                screen.line(f"      {line}")
