"""`transaxle derive`: writes the table of a converter, read off from where it puts every number."""

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
from transaxle.cli.command import Command, overwriting, printing
from transaxle.cli.screen.screen import Screen
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
from transaxle.engine.wording import plural
from transaxle.errors import TransaxleError, gathered, refuse
from transaxle.families import builtin

_MODEL_TYPE = r"[\w.-]{1,100}"
"""A word that may be a model type: only for such, which is no path, torch and transformers are imported."""


@click.command(
    "derive",
    cls=Command,
    examples=(
        ("transaxle derive ctrl -o ctrl.rules", "what transformers does with this model type"),
        ("transaxle derive my-model/config.json", "the same, with the flags of this config"),
        ("transaxle derive --number hub/ numbered/", "a copy whose elements are numbered, for your converter"),
        ("transaxle derive numbered/ converted/ -o my.rules", "what your converter did with it"),
    ),
    help="""Derive a table from a converter.

    SOURCE is a model type of transformers, a config.json or the folder of one: tiny models with numbered elements are
    saved by the installed transformers, and the table follows from where each number went. It is proved on a config of
    other sizes before it is printed.

    Or SOURCE is a pair of folders: a checkpoint with numbered elements (--number makes one), and what your converter
    made of it. Several pairs, of models of different sizes, show which sizes hang together.

    What no table can say (values that are changed, dropped or invented) is listed, never guessed.""",
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
              help="Of pairs of folders: names of the two dialects.")  # fmt: skip
@overwriting("table", "Replace the table in FILE; `=everything` replaces any file.")
@click.option("--number", is_flag=True, help="Write a copy of the first folder, with numbered elements, to the second.")
@printing
def command(
    screen: Screen,
    source: Sequence[str],
    output: str | None,
    family: str | None,
    dialects: str,
    number: bool,
    overwrite: Overwrite,
) -> int:
    """Derive a table."""
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
        _print(screen, table, output)
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
    """Return the model type that is meant, and its config where one is given.

    Raises:
        Refused: CORRUPT for a config without a model type.
        StorageError: IO for a path that leads to no config.
    """
    path = Path(source)
    if re.fullmatch(_MODEL_TYPE, source) and not os.path.lexists(path) and path.suffix != ".json":
        return source, None
    if os.path.isdir(path) and not os.path.lexists(path / CONFIG):  # noqa: PTH112 - `Path.is_dir` may raise
        hint = "Name a folder that has one. If it is the model type that you mean, run this in another folder."
        raise refuse("IO", f"there is no {CONFIG} in it", file=source, hint=hint)
    try:
        config = model_config(source)
    except TransaxleError as error:
        hint = "SOURCE is a model type, a config.json, or a folder with one."
        raise gathered(replace(refusal, hint=refusal.hint or hint) for refusal in error.refusals) from None
    assert config is not None
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        hint = "Add the model_type by which transformers knows the model, or give that word instead of the file."
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
    """Return the family that ships for the model of a derived table; None where there is none."""
    (family,) = tables.read(table.text)
    known = builtin().of_types(family.model_types)
    return known[0].name if known else None


def _print(screen: Screen, table: Table, output: str | None) -> None:
    say = screen.note if output is None else screen.line
    if output is None:
        for line in table.text.splitlines():
            screen.line(line)
    else:
        screen.line((output, "bold"), f": family {table.family}, {plural(table.text.count(chr(10)), 'line')}")
    proof = "exact both ways on one of other sizes" if table.proved else "exact both ways on itself; no other was given"
    say(f"  from {plural(table.traces, 'trace')}, {proof}")
    for note in table.left_out:
        say(f"  not in the table: {note}")
    ships = _ships(table)
    if ships is not None:
        say(f"  a table of this model ships, and may say more:  transaxle info --family {ships}")
