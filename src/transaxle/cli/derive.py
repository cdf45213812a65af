"""`transaxle derive` derives a table of tensor names from a converter; `transaxle check-rules` checks a table.

A table is derived by tracing to which position a converter moves each numbered element of a checkpoint. `check-rules`
lists mistakes in a table, and the tensor names of a checkpoint that the table can read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from transaxle.arguments import Overwrite
from transaxle.axes.notation import tables
from transaxle.cli.command import Command, overwrite_option, with_screen
from transaxle.cli.screen import Screen
from transaxle.cli.tracing import silence
from transaxle.derivation.sources import (
    UNNAMED,
    Table,
    are_dialects,
    check_place,
    family_name,
    from_folders,
    from_transformers,
)
from transaxle.derivation.table import Labels
from transaxle.engine.checkpoint.settings import CONFIG, model_config
from transaxle.engine.checkpoint_facts import JsonFacts, check_rules, reads_any
from transaxle.engine.wording import fold_to_text, plural
from transaxle.errors import Refused, TransaxleError, gathered, refuse
from transaxle.families import builtin

_MODEL_TYPE = r"[\w.-]{1,100}"
"""Pattern of the name of a model type; torch and transformers are imported only for an argument that matches the
pattern.
"""


@click.command(
    "derive",
    cls=Command,
    examples=(
        ("transaxle derive ctrl -o ctrl.rules", "a table for this model type, from transformers"),
        ("transaxle derive my-model/config.json", "the same, with the flags of this config"),
        ("transaxle derive --number hub/ numbered/", "a copy whose elements are numbered, for your converter"),
        ("transaxle derive numbered/ converted/ -o my.rules", "a table for your converter"),
    ),
    help="""Derive a table from a converter.

    SOURCE is a model type of transformers, a config.json or a folder with one: the installed transformers saves tiny
    models with numbered elements, and the table follows from the new place of each number. The table is checked on a
    config with different sizes before it is printed.

    Or SOURCE is a pair of folders: a checkpoint with numbered elements (--number makes one), and the result of your
    converter for it. Several pairs, of models of different sizes, show which sizes depend on each other.

    Anything that no table can express (values that are changed, dropped or invented) is listed, never guessed.""",
)
@click.argument("source", nargs=-1, required=True, type=click.Path(readable=False))
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(readable=False),
    help="Write the table to FILE instead of printing it.",
)
@click.option("--family", metavar="NAME", help="Name of the family.  [default: the model type; of folders, `derived`]")
@click.option("--dialects", metavar="FIRST:SECOND", default="hf:converted", show_default=True,
              help="For pairs of folders: names of the two dialects.")  # fmt: skip
@overwrite_option("table", "Replace the table in FILE; `=everything` replaces any file.")
@click.option(
    "--number",
    is_flag=True,
    help=("Write a copy of the checkpoint in the first folder, with numbered elements, to the second folder."),
)
@with_screen
def derive_command(
    screen: Screen,
    source: Sequence[str],
    output: str | None,
    family: str | None,
    dialects: str,
    number: bool,
    overwrite: Overwrite,
) -> int:
    """Derive a family's table of tensor names from a converter."""
    screen.consequence = "nothing was written"
    if number:
        if output or family or overwrite:
            raise click.UsageError("--number takes two folders, FROM TO, and writes no table")
        return _number(screen, source)
    if overwrite and output is None:
        raise click.UsageError("--overwrite needs -o FILE")
    if output is not None:
        check_place(output, overwrite=overwrite)
    with screen.working("tracing"), silence():
        table = _table(source, family, dialects)
    if output is not None:
        table.save(output, overwrite=overwrite)
    if screen.as_json:
        screen.document(_facts(table, output))
    else:
        _print_table(screen, table, output)
    return 0


def _table(source: Sequence[str], family: str | None, dialects: str) -> Table:
    if len(source) == 1:
        model_type, config = model_of(source[0])
        return from_transformers(model_type, config, family)
    if len(source) % 2:
        raise click.UsageError("give one model type or config.json, or pairs of folders: BEFORE AFTER …")
    first, _, second = dialects.partition(":")
    if not are_dialects((first, second)):
        raise click.BadParameter(f"{dialects!r} is not FIRST:SECOND; write for example hf:mine")
    pairs = [(source[at], source[at + 1]) for at in range(0, len(source), 2)]
    return from_folders(pairs, Labels(family_name(family or UNNAMED), dialects=(first, second)))


def model_of(source: str) -> tuple[str, dict[str, Any] | None]:
    """Return the model type that the argument SOURCE means, and the model's config if SOURCE is a file or folder.

    Raises:
        Refused: with code CORRUPT, if a config file has no model type.
        StorageError: with code IO, if the path has no config file.
    """
    path = Path(source)
    if re.fullmatch(_MODEL_TYPE, source) and not os.path.lexists(path) and path.suffix != ".json":
        return source, None
    if os.path.isdir(path) and not os.path.lexists(path / CONFIG):  # noqa: PTH112 - `Path.is_dir` may raise
        hint = (
            "Name a folder that contains a config.json. If you mean the model type of this name, "
            "run the command in another folder."
        )
        raise refuse("IO", f"there is no {CONFIG} in it", file=source, hint=hint)
    try:
        config = model_config(source)
    except TransaxleError as error:
        hint = "SOURCE is a model type, a config.json, or a folder with one."
        raise gathered(replace(refusal, hint=refusal.hint or hint) for refusal in error.refusals) from None
    assert config is not None
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        hint = "Add the model_type by which transformers knows the model, or give the model_type instead of the file."
        raise refuse("CORRUPT", "it has no model_type", file=source, hint=hint)
    return model_type, dict(config)


def _number(screen: Screen, source: Sequence[str]) -> int:
    from transaxle.derivation.traces import number_elements

    if len(source) != 2:
        raise click.UsageError("--number takes two folders: FROM TO")
    count = number_elements(*source)
    if screen.as_json:
        screen.document({"path": source[1], "elements": count})
    else:
        screen.line((source[1], "bold"), f": {count:,} elements, each with a number of its own")
    return 0


def _facts(table: Table, output: str | None) -> dict[str, Any]:
    return {
        "family": table.family,
        "path": output,
        "rules": table.text,
        "traces": table.traces,
        "proved": table.proved,
        "left_out": list(table.left_out),
        "ships": _ships(table),
    }


def _ships(table: Table) -> str | None:
    """Return the name of the built-in family that already supports the model of a derived table; None if no family
    supports it.
    """
    (family,) = tables.read(table.text)
    families = builtin().of_types(family.model_types)
    return families[0].name if families else None


def _print_table(screen: Screen, table: Table, output: str | None) -> None:
    say = screen.note if output is None else screen.line
    if output is None:
        for line in table.text.splitlines():
            screen.line(line)
    else:
        screen.line((output, "bold"), f": family {table.family}, {plural(table.text.count(chr(10)), 'line')}")
    proof = (
        "exact both ways on a model of other sizes"
        if table.proved
        else "exact both ways on its own model; no model of other sizes was given"
    )
    say(f"  from {plural(table.traces, 'trace')}, {proof}")
    for note in table.left_out:
        say(f"  not in the table: {note}")
    ships = _ships(table)
    if ships is not None:
        say(f"  a built-in table of this model exists, and may say more:  transaxle info --family {ships}")


_SHOWN = 6
"""Number of tensors with wrong shapes that are listed if `--all` is not given."""


@click.command(
    "check-rules",
    cls=Command,
    examples=(
        ("transaxle check-rules my.rules", "list every mistake with its line"),
        ("transaxle check-rules my.rules my-model/", "and show which names of this checkpoint it reads"),
    ),
    help="""Check a table of families and dialects, and show which names of a checkpoint it reads.

    Without CKPT: prints every mistake in FILE with its line, and what the file declares and replaces. With CKPT: also
    prints how many tensor names each dialect reads, the names that no line reads, the tensors whose shape is not that
    of their line, the size of every axis, the config keys that do not exist, and what prevents writing each dialect.
    Exits with 3 if a shape differs.""",
)
@click.argument("file", type=click.Path(readable=False))
@click.argument("ckpt", type=click.Path(readable=False), required=False)
@with_screen
def check_rules_command(screen: Screen, file: str, ckpt: str | None) -> int:
    """Check a table of tensor names."""
    report = check_rules(file, ckpt)
    if screen.as_json:
        screen.document(report)
    else:
        _print_rules(screen, report)
    return Refused.exit_code if not report.get("fits", True) else 0


def _print_rules(screen: Screen, report: JsonFacts) -> None:
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
        screen.some("    overrides what it takes over:", [f"  {change}" for change in changes])
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
        screen.some("  names that no line reads", list(fold_to_text(tuple(read["unknown"]))))
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
    """Return the refusal of a tensor's shape as one line of text: tensor name, table line, expected and actual
    shape.
    """
    return f"{refusal['tensor']}: {': '.join(refusal['message'].splitlines())}"
