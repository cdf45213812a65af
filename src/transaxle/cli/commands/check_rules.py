"""`transaxle check-rules`: whether a table is sound, and which names of a checkpoint it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import click

from transaxle.axes.layout.bind import group, score, split_slot
from transaxle.axes.notation.family import Dialect, Family
from transaxle.axes.notation.name import skeleton
from transaxle.cli import options
from transaxle.cli.command import Command
from transaxle.cli.commands.plan import folded
from transaxle.cli.screen.quantities import plural
from transaxle.cli.screen.screen import Screen
from transaxle.engine.checkpoint.checkpoint import Checkpoint, open_checkpoint
from transaxle.engine.checkpoint.settings import settings
from transaxle.errors import Code, Refused, TransaxleError, refuse
from transaxle.families import builtin

JsonFacts = dict[str, Any]
_MISSHAPEN: Code = "SHAPE_MISMATCH"
_TENSORS, _MANIFEST = "the tensors", "transaxle.json"
_SHOWN = 6
"""Misshapen tensors that are listed without `--all`."""
_TOLD, _TRIED = 3, 50
"""Names that a refusal shows, and those for which it looks for a line that is close."""
_NOTHING: JsonFacts = {
    "dialect": None, "unknown": [], "ignored": [], "misshapen": [], "axes": {}, "absent_keys": [], "writes": {},
}  # fmt: skip
"""What is read of a checkpoint by a family that knows none of its names."""


@click.command(
    "check-rules",
    cls=Command,
    examples=(
        ("transaxle check-rules my.rules", "list every mistake with its line"),
        ("transaxle check-rules my.rules my-model/", "and show what it reads of this checkpoint"),
    ),
    help="""Check a table of families and dialects, and show what it reads of a checkpoint.

    Without CKPT: prints every mistake in FILE with its line, and what the file declares and replaces. With CKPT: also
    prints how many tensor names each dialect reads, the names that no line reads, the tensors whose shape is not that
    of their line, the size of every axis, the config keys that do not exist, and what prevents writing each dialect.
    Exits with 3 if a shape differs.""",
)
@click.argument("file", type=click.Path())
@click.argument("ckpt", type=click.Path(), required=False)
@options.printing
def command(screen: Screen, file: str, ckpt: str | None) -> int:
    """Check a table."""
    known = settings(rules=file).families
    declared = [known[name] for name, entry in known.entries.items() if not entry.file]
    report: dict[str, Any] = {
        "file": file,
        "families": [_declared(family) | {"replaces": known.replaces(family.name)} for family in declared],
    }
    if ckpt is not None:
        report |= {"checkpoint": ckpt, "reads": [_read(ckpt, file, family) for family in declared]}
        if declared and not any(map(_reads_any, report["reads"])):
            raise _unread(ckpt, declared)
    if screen.as_json:
        screen.document(report)
    else:
        _print(screen, report)
    return Refused.exit_code if any(_shapes_differ(read) for read in report.get("reads", ())) else 0


def _declared(family: Family) -> JsonFacts:
    new = [dialect for dialect in family.dialects if not _ships(family, dialect)]
    return {
        "name": family.name,
        "model_types": list(family.model_types),
        "axes": {axis: None if formula is None else formula.text for axis, formula in family.axes.items()},
        "unsized": _unsized(family),
        "tensors": list(family.tensors),
        "dialects": {dialect.label: len(dialect.lines) for dialect in new},
        "says_anew": _said_anew(family),
    }


def _said_anew(family: Family) -> list[JsonFacts]:
    """Return the statements of other families that a family replaces by its own."""
    replaced = () if family.written is None else family.written.replaced
    return [
        {"of": each.taken.owner, "taken": " ".join(each.taken.text.split()), "own": " ".join(each.own.text.split())}
        for each in replaced
    ]


def _unsized(family: Family) -> list[str]:
    """Return the name axes without a formula: their size is known from a checkpoint's names only."""
    return [axis for axis, formula in family.axes.items() if formula is None and axis in family.name_axes]


def _ships(family: Family, dialect: Dialect) -> bool:
    shipped_family = builtin().get(family.name)
    return shipped_family is not None and any(dialect is shipped for shipped in shipped_family.dialects)


def _read(ckpt: str, file: str, family: Family) -> JsonFacts:
    """Return which names of a checkpoint each dialect of a family reads, and what prevents writing the others."""
    with open_checkpoint(ckpt, rules=file, family=family.name) as checkpoint:
        names = checkpoint.catalog.entries
        grouped = group(split_slot(name)[0] for name in names)
        counts = {dialect.label: score(grouped, dialect)[0] for dialect in family.dialects}
        if not any(counts.values()):
            return {**_NOTHING, "family": family.name, "tensors": len(names), "names_read": counts}
        source_dialect = checkpoint.recognised.dialect
        own_refusals = _written(checkpoint, source_dialect)["refusals"]
        return {
            "family": family.name,
            "tensors": len(checkpoint),
            "names_read": counts,
            "dialect": source_dialect.label,
            "unknown": list(checkpoint.bound.unknown),
            "ignored": list(checkpoint.bound.ignored),
            "misshapen": [refusal for refusal in own_refusals if refusal["code"] == _MISSHAPEN],
            "axes": dict(checkpoint.sizes.at({})),
            "absent_keys": _absent_keys(checkpoint),
            "writes": {d.label: _written(checkpoint, d) for d in family.dialects if d.label != source_dialect.label},
        }


def _reads_any(read: JsonFacts) -> bool:
    return any(read["names_read"].values())


def _unread(ckpt: str, families: Sequence[Family]) -> TransaxleError:
    """Build the refusal of a checkpoint of which no family reads a name, with the line closest to one."""
    with open_checkpoint(ckpt) as checkpoint:
        names = list(checkpoint)
    lines = {key: found[0] for each in families for d in each.dialects for key, found in d.by_skeleton.items()}
    close = [(name, match) for name in names[:_TRIED] for match in get_close_matches(skeleton(name), lines, 1, 0.7)]
    closest = f" Closest to {close[0][0]}:  {lines[close[0][1]].text}" if close else ""
    listed, shown = ", ".join(family.name for family in families), ", ".join(names[:_TOLD]) or "(no tensors)"
    return refuse(
        "UNKNOWN_FAMILY",
        f"no dialect of {listed} reads any of its {plural(len(names), 'name')}: {shown}",
        file=ckpt,
        hint=f"A line begins with the whole name; only what all names begin with may be missing.{closest}",
    )


def _absent_keys(checkpoint: Checkpoint) -> list[JsonFacts]:
    """Return the axes in use whose formula has no value because the config lacks its keys."""
    sizes, family = checkpoint.sizes, checkpoint.recognised.family
    if not sizes.config:
        return []
    lines = {line for line, _ in checkpoint.bound.names}
    used = {axis for line in lines for axis in (*line.name.axes, *line.expression.axes)}
    from_config = replace(sizes, given={}).at({})
    absent = []
    for axis, formula in family.axes.items():
        if formula is None or axis in from_config or axis not in used:
            continue
        keys = sorted(formula.names - sizes.settings.keys() - (family.axes.keys() - {axis}))
        if keys:
            absent.append({"axis": axis, "keys": keys, "size_from": _MANIFEST if axis in sizes.given else _TENSORS})
    return absent


def _shapes_differ(read: JsonFacts) -> bool:
    refusals = [refusal for outcome in read["writes"].values() for refusal in outcome["refusals"]]
    return bool(read["misshapen"]) or any(refusal["code"] == _MISSHAPEN for refusal in refusals)


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
    if not report["families"]:
        screen.line("  it declares no family and no dialect")
    for family in report["families"]:
        _print_family(screen, family)
    for read in report.get("reads", []):
        _print_read(screen, report["checkpoint"], read)


def _print_family(screen: Screen, family: JsonFacts) -> None:
    amount = f"{plural(len(family['axes']), 'axis', 'axes')}, {plural(len(family['tensors']), 'logical tensor')}"
    screen.line(f"  family {family['name']}: {amount}")
    if family["replaces"]:
        screen.line(f"    replaces the built-in family {family['name']}")
    for axis in family["unsized"]:
        screen.line(
            f"    axis {axis} has no size: it is counted from the tensor names, so a lost last entry goes "
            f"unnoticed; declare {axis}=CONFIG_KEY, or {axis}=len(CONFIG_KEY) for a list"
        )
    if family["says_anew"]:
        changes = [f"{each['own']}  (in {each['of']}: {each['taken']})" for each in family["says_anew"]]
        screen.some("    says anew what it takes over:", [f"  {change}" for change in changes])
    for label, lines in family["dialects"].items():
        screen.line(f"    dialect {label}: {plural(lines, 'line')}")


def _print_read(screen: Screen, ckpt: str, read: JsonFacts) -> None:
    if not _reads_any(read):
        screen.line((ckpt, "bold"), f": no dialect of {read['family']} reads any of its names")
        return
    screen.line((ckpt, "bold"), f": read as {read['family']}, dialect {read['dialect']}")
    total = plural(read["tensors"], "name")
    best = [(label, count) for label, count in read["names_read"].items() if count]
    screen.table([[label, f"reads {count:,} of {total}"] for label, count in best])
    if read["unknown"]:
        screen.some("  names that no line reads", list(folded(tuple(read["unknown"]))))
    if read["misshapen"]:
        label = f"  {plural(len(read['misshapen']), 'tensor')} without the shape that the table says"
        screen.some(label, [_one_line(refusal) for refusal in read["misshapen"]], _SHOWN)
    screen.line(f"  axes {' '.join(f'{axis}={count}' for axis, count in read['axes'].items()) or '(from shapes)'}")
    for absent in read["absent_keys"]:
        keys = " and no ".join(map(repr, absent["keys"]))
        screen.line(f"  config.json has no {keys} (axis {absent['axis']}); its size comes from {absent['size_from']}")
    for label, outcome in read["writes"].items():
        _print_writing(screen, label, outcome)


def _print_writing(screen: Screen, label: str, outcome: JsonFacts) -> None:
    refusals = outcome["refusals"]
    if not refusals:
        screen.line(f"  to {label}: {plural(outcome['tensors'], 'tensor')}")
        return
    first = refusals[0]
    message = first["message"].splitlines()
    place = f"{first['code']} {first['tensor']}" if first["tensor"] else first["code"]
    screen.line(f"  to {label}: {plural(len(refusals), 'refusal')}; the first is {place}: {message[0]}")
    for line in message[1:]:
        screen.line(f"      {line}")


def _one_line(refusal: JsonFacts) -> str:
    """Write a refusal of a tensor's shape on one line: the name, the rule, and both shapes."""
    return f"{refusal['tensor']}: {': '.join(refusal['message'].splitlines())}"
