"""`transaxle check-rules`: whether a table is sound, and which names of a checkpoint it reads."""

from __future__ import annotations

import click

from transaxle.cli.command import Command, printing
from transaxle.cli.screen.screen import Screen
from transaxle.engine.checkpoint_facts import JsonFacts, reads_any, rules_facts
from transaxle.engine.wording import folded, plural
from transaxle.errors import Refused

_SHOWN = 6
"""Misshapen tensors that are listed without `--all`."""


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
@click.argument("file", type=click.Path(readable=False))
@click.argument("ckpt", type=click.Path(readable=False), required=False)
@printing
def command(screen: Screen, file: str, ckpt: str | None) -> int:
    """Check a table."""
    report = rules_facts(file, ckpt)
    if screen.as_json:
        screen.document(report)
    else:
        _print(screen, report)
    return Refused.exit_code if not report.get("fits", True) else 0


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
    if not reads_any(read):
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
