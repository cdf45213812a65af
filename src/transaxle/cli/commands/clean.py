"""`transaxle clean`: what killed runs have left behind, and its removal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from transaxle.cli import options
from transaxle.cli.command import Command
from transaxle.cli.screen.quantities import plural, size
from transaxle.cli.screen.screen import Screen
from transaxle.formats.staging.leftovers import Leftover, clean, leftovers


@click.command(
    "clean",
    cls=Command,
    examples=(
        ("transaxle clean out/", "what a killed conversion to out/ left behind"),
        ("transaxle clean checkpoints/", "what is left beside and inside a folder of checkpoints"),
        ("transaxle clean checkpoints/ --yes", "remove it without asking"),
    ),
    help="""Remove what killed runs left behind.

    A run that ends by SIGKILL, a power cut or a batch job's time limit leaves hidden folders beside its target:
    .NAME.transaxle-partial holds the unfinished work, and, where the file system cannot swap two names,
    .NAME.transaxle-old holds the checkpoint that was being replaced.

    The command lists these folders, asks, and removes them. If the old checkpoint was moved aside and the new one
    never took its place, the old one is put back. Folders that a live process is using are kept, and so are folders
    with files that belong to no checkpoint.

    Exit codes: 0 nothing is left; 1 something is left, because you answered no or because it was kept; 2 standard
    input is not a terminal and --yes is missing.""",
)
@click.argument("path", type=click.Path())
@click.option("--yes", is_flag=True, help="Remove without asking.")
@options.printing
def command(screen: Screen, path: str, yes: bool) -> int:
    """Remove what killed runs have left."""
    screen.consequence = "nothing was removed"
    found = leftovers(path)
    todo = [each for each in found if each.outcome == "found"]
    if not screen.as_json:
        for each in found:
            _print(screen, each)
        if not found:
            screen.line("found nothing left by killed runs here")
    if todo and not yes:
        if screen.as_json or not sys.stdin.isatty():
            raise click.UsageError(f"{plural(len(todo), 'leftover')} to be removed: confirm with --yes")
        screen.note(f"Remove {'it' if len(todo) == 1 else 'them'}? [y/N]")
        if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
            return 1
    done = [clean(each) if each.outcome == "found" else each for each in found]
    if screen.as_json:
        screen.document({"leftovers": [each.as_json() for each in done]})
        return _code(done)
    for before, after in zip(found, done, strict=True):
        if before.outcome != "kept":
            screen.line(f"{after.outcome}  {after.path}")
            if after.why:
                screen.line(f"      {after.why}")
    return _code(done)


def _code(done: Sequence[Leftover]) -> int:
    return 0 if all(each.outcome in {"removed", "put back"} for each in done) else 1


def _print(screen: Screen, found: Leftover) -> None:
    screen.line((found.path, "bold"), f"  {size(found.nbytes)}")
    screen.line(f"      {found.what}")
    if found.why:
        screen.line(f"      kept: {found.why}")
