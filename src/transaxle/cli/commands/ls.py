"""`transaxle ls`: lists the tensors of a checkpoint."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from transaxle import verbs
from transaxle.cli.command import Command, completing, dialects, options_of, printing
from transaxle.cli.screen import summary
from transaxle.cli.screen.screen import Screen
from transaxle.engine.checkpoint_facts import totals
from transaxle.formats.registry import is_one_file


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
    shell_complete=completing(dialects),
    help="List the tensors as they would be in another dialect.",
)
@options_of("open")
@printing
def command(screen: Screen, path: str, seen_as: str | None, options: dict[str, Any]) -> int:
    """List a checkpoint."""
    with verbs.open(path, **options) as checkpoint:
        view = checkpoint if seen_as is None else checkpoint.as_dialect(seen_as)
        rows = summary.rows(view, everything=screen.everything)
        if screen.as_json:
            screen.document(
                {
                    "path": checkpoint.path,
                    "format": checkpoint.format,
                    "family": checkpoint.family,
                    "dialect": view.dialect,
                    **asdict(totals(view)),
                    "rows": [summary.as_json(row) for row in rows],
                }
            )
            return 0
        screen.line((summary.headline(checkpoint, view), "bold"))
        screen.table([summary.cells(row) for row in rows])
        tensor_files = [name for name in checkpoint.container.ignored if is_one_file(name)]
        if tensor_files:
            screen.some("  other tensor files, not read (--format chooses)", tensor_files)
    return 0
