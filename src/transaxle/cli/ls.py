"""`transaxle ls` lists the tensors of a checkpoint, in as few rows as possible."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from transaxle import verbs
from transaxle.cli.command import Command, complete_with, dialects, options_of, with_screen
from transaxle.cli.screen import Screen
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.checkpoint_facts import totals
from transaxle.engine.wording import FoldedRow, parameters, plural, size, tensors_in_words
from transaxle.formats.registry import is_one_file

UNKNOWN = "unknown family"


def headline(checkpoint: Checkpoint, view: Checkpoint) -> str:
    """Describe a checkpoint in one line: format, family, dialect, and amount of data.

    Args:
        checkpoint: the checkpoint with its stored tensor names.
        view: the same checkpoint with the tensor names of the dialect to show.
    """
    amounts = totals(view)
    descriptions = [checkpoint.family, view.dialect] if checkpoint.family else [UNKNOWN]
    if view is not checkpoint:
        descriptions.append(f"stored as {checkpoint.dialect}")
    amount = f"{size(amounts.bytes)} in {plural(amounts.files, 'file')}" if view is checkpoint else size(amounts.bytes)
    parts = [
        checkpoint.format,
        *descriptions,
        tensors_in_words(amounts.tensors, amounts.optimizer),
        parameters(amounts.parameters),
        amount,
    ]
    return " · ".join(text for text in parts if text)


def fold_rows(view: Checkpoint, *, all_names: bool = False) -> list[FoldedRow]:
    """Return the rows to print for a checkpoint's tensors, in the order of the family's table of tensor names.

    Tensors whose names differ only in their numbers share one row if they have the same dtype and shape.

    Args:
        view: the checkpoint with the tensor names of the dialect to show.
        all_names: whether every tensor name gets its own row.

    Returns:
        The rows to print, each with the key `(dtype, shape)`.
    """
    if all_names:
        return [FoldedRow(name, (name,), (view[name].dtype, view[name].shape)) for name in view.in_order()]
    return view.fold_rows()


def cells(row: FoldedRow) -> list[str]:
    """Return a row as the cells to print: tensor name, number of tensors, dtype, shape."""
    dtype, shape = _key(row)
    return [row.name, row.times, dtype, str(list(shape))]


def as_json(row: FoldedRow) -> dict[str, Any]:
    """Return a row of the list as JSON data."""
    dtype, shape = _key(row)
    return {"name": row.name, "count": row.count, "dtype": dtype, "shape": list(shape)}


def _key(row: FoldedRow) -> tuple[str, tuple[int, ...]]:
    assert isinstance(row.key, tuple)
    dtype, shape = row.key
    return dtype, shape


@click.command(
    "ls",
    cls=Command,
    examples=(
        ("transaxle ls Qwen3-30B-A3B/", "fold layers and experts"),
        ("transaxle ls Qwen3-30B-A3B/ --all", "every name"),
        ("transaxle ls Qwen3-30B-A3B/ --as torchtitan", "as it would look after a conversion; writes nothing"),
    ),
    help="""List the tensors of a checkpoint.

    PATH is a folder or a file. Reads only headers. Tensors whose names differ only in their numbers share one row if
    they have the same dtype and shape.""",
)
@click.argument("path", type=click.Path(readable=False))
@click.option(
    "--as",
    "seen_as",
    metavar="DIALECT",
    shell_complete=complete_with(dialects),
    help="List the tensors as they would be in another dialect.",
)
@options_of("open")
@with_screen
def ls_command(screen: Screen, path: str, seen_as: str | None, options: dict[str, Any]) -> int:
    """List the tensors of a checkpoint."""
    with verbs.open(path, **options) as checkpoint:
        view = checkpoint if seen_as is None else checkpoint.as_dialect(seen_as)
        rows = fold_rows(view, all_names=screen.everything)
        if screen.as_json:
            screen.document(
                {
                    "path": checkpoint.path,
                    "format": checkpoint.format,
                    "family": checkpoint.family,
                    "dialect": view.dialect,
                    **asdict(totals(view)),
                    "rows": [as_json(row) for row in rows],
                }
            )
            return 0
        screen.line((headline(checkpoint, view), "bold"))
        screen.table([cells(row) for row in rows])
        tensor_files = [name for name in checkpoint.container.ignored if is_one_file(name)]
        if tensor_files:
            screen.some("  other tensor files, not read (--format chooses)", tensor_files)
    return 0
