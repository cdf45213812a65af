"""`transaxle clean`: lists the leftovers of killed runs, and removes them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from transaxle.cli.command import Command, printing
from transaxle.cli.screen.screen import Screen
from transaxle.engine.number_text import plural, size
from transaxle.formats.store.leftovers import Leftover, clean, leftovers


@click.command(
    "clean",
    cls=Command,
    examples=(
        ("transaxle clean out/", "what a killed conversion to out/ left behind"),
        ("transaxle clean checkpoints/", "what is left beside and inside a folder of checkpoints"),
        ("transaxle clean checkpoints/ --yes", "remove it without asking"),
        ("transaxle clean s3://models/out", "uploads that were not completed, and unfinished work"),
    ),
    help="""Remove what killed runs left behind.

    A run that ends by SIGKILL, a power cut or a batch job's time limit leaves hidden folders beside its target:
    .NAME.transaxle-partial holds the unfinished work, and, where the file system cannot swap two names,
    .NAME.transaxle-old holds the checkpoint that was being replaced.

    The command lists these folders, asks, and removes them. If the old checkpoint was moved aside and the new one
    never took its place, the old one is put back. Folders that a live process is using are kept, and so are folders
    with files that belong to no checkpoint.

    On S3 it lists, and removes, the multipart uploads under a URL that were not completed, and the unfinished work of
    several workers beside it. S3 does not tell whether a run is still at work on them: that run would fail.

    Exit codes: 0 nothing is left; 1 something is left, because you answered no or because it was kept; 2 standard
    input is not a terminal and --yes is missing.""",
)
@click.argument("path", type=click.Path(readable=False))
@click.option("--yes", is_flag=True, help="Remove without asking.")
@printing
def command(screen: Screen, path: str, yes: bool) -> int:
    """Remove what killed runs have left."""
    screen.consequence = "nothing was removed"
    listed = leftovers(path)
    todo = [leftover for leftover in listed if leftover.outcome == "found"]
    if not screen.as_json:
        for leftover in listed:
            _print(screen, leftover)
        if not listed:
            screen.line("found nothing left by killed runs here")
    if todo and not yes:
        if screen.as_json or not sys.stdin.isatty():
            raise click.UsageError(f"{plural(len(todo), 'leftover')} to be removed: confirm with --yes")
        screen.note(f"Remove {'it' if len(todo) == 1 else 'them'}? [y/N]")
        if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
            return 1
    cleaned = [clean(leftover) if leftover.outcome == "found" else leftover for leftover in listed]
    if screen.as_json:
        screen.document({"leftovers": [leftover.as_json() for leftover in cleaned]})
        return _code(cleaned)
    for before, after in zip(listed, cleaned, strict=True):
        if before.outcome != "kept":
            screen.line(f"{after.outcome}  {after.path}")
            if after.why:
                screen.line(f"      {after.why}")
    return _code(cleaned)


def _code(cleaned: Sequence[Leftover]) -> int:
    return 0 if all(leftover.outcome in {"removed", "put back"} for leftover in cleaned) else 1


def _print(screen: Screen, leftover: Leftover) -> None:
    screen.line((leftover.path, "bold"), f"  {size(leftover.nbytes)}")
    screen.line(f"      {leftover.what}")
    if leftover.why:
        screen.line(f"      kept: {leftover.why}")
