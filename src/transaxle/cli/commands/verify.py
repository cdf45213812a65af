"""`transaxle verify`: a checkpoint against its own manifest, or two against each other."""

from __future__ import annotations

from typing import Any

import click

from transaxle.cli import options
from transaxle.cli.command import Command
from transaxle.cli.screen.quantities import parameters, plural, size
from transaxle.cli.screen.refusals import print_refusals
from transaxle.cli.screen.screen import Screen
from transaxle.engine.checkpoint.checkpoint import open_checkpoint
from transaxle.engine.compare.compare import Comparison
from transaxle.engine.compare.pair import opened_pair
from transaxle.engine.compare.verification import Verification, verify, verify_against
from transaxle.move.workers import Limits


@click.command(
    "verify",
    cls=Command,
    examples=(
        ("transaxle verify out/", "check every byte against the manifest"),
        ("transaxle verify Qwen3-30B-A3B/ out/", "compare two checkpoints, whatever their dialects"),
    ),
    help="""Check a checkpoint against its manifest, or compare two checkpoints.

    Exits with 0 if everything matches and with 1 if not. With A alone: reads every tensor and compares its hash with
    the one recorded in transaxle.json, or, for a single file, in the file itself. If neither is there, only the
    structure is checked. With A and B: compares their tensors bit by bit, whatever the dialect and files of each.""",
)
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path(), required=False)
@options.reading
@options.decoding
@options.working
@options.printing
def command(screen: Screen, a: str, b: str | None, said: dict[str, Any], limit: Limits) -> int:
    """Verify a checkpoint, or compare two."""
    if b is None:
        with open_checkpoint(a, **said) as alone, screen.progress(alone.container.nbytes) as progress:
            found = verify(alone, limit, progress)
    else:
        with opened_pair(a, b, said) as (first, second), screen.progress(first.container.nbytes) as progress:
            found = verify_against(first, second, limit, progress)
    if screen.as_json:
        screen.document(found.as_json())
    elif found.comparison is None:
        print_verification(screen, found)
    else:
        print_comparison(screen, found.comparison)
    return 0 if found else 1


def print_verification(screen: Screen, found: Verification) -> None:
    """Print how a checkpoint compares with its manifest."""
    amount = f"{plural(found.tensors, 'tensor')}, {parameters(found.parameters)}, {size(found.bytes_read)} read"
    if found.problems:
        screen.line(("not intact", "red"), f": {amount}")
        print_refusals(screen, "  problems", found.problems, screen.line)
    elif found.against == "manifest":
        screen.line(("intact", "green"), f": {amount}; every hash in the manifest matches (xxh3-128)")
    elif found.against == "digests":
        screen.line(("intact", "green"), f": {amount}; every digest in the file matches (xxh3-128)")
    else:
        screen.line(f"checked the structure only, there are no digests: {amount}")
        screen.line(
            "  nothing records what was written, so the data itself is unchecked: give a second checkpoint to "
            "compare with"
        )


def print_comparison(screen: Screen, found: Comparison) -> None:
    """Print whether two checkpoints are equal, and if not, where to look."""
    first, second = (f"{count:,}" for count in found.tensors)
    if found.equal:
        counts = f"{first} = {second} tensors" if first != second else plural(found.tensors[0], "tensor")
        screen.line(("equal", "green"), f": {counts}, {parameters(found.parameters)}")
        print_across(screen, found)
        return
    screen.line(
        ("different", "red"),
        f": {plural(len(found.differences), 'tensor')}; {found.first} has {first}, {found.second} {second}",
    )
    screen.line(f"  to see where: transaxle diff {found.first} {found.second}")
    if found.optimizer_only:
        screen.line("  all of it is optimizer state that only one of them has: --no-optimizer compares the rest")


def print_across(screen: Screen, found: Comparison) -> None:
    """Print which tensors were compared by their values, because they are stored in two number formats."""
    for formats, count in found.across.items():
        screen.line(f"  {plural(count, 'tensor')} compared by value, stored as {formats}")
