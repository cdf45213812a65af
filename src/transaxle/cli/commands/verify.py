"""`transaxle verify`: checks a checkpoint against its own manifest, or compares two."""

from __future__ import annotations

from typing import Any

import click

from transaxle import verbs
from transaxle.cli.command import Command, options_of, printing, profiling
from transaxle.cli.screen.refusals import print_refusals
from transaxle.cli.screen.screen import Screen
from transaxle.engine.compare import Comparison
from transaxle.engine.verification import Verification
from transaxle.engine.wording import parameters, plural, size
from transaxle.formats.step_parts import listed


@click.command(
    "verify",
    cls=Command,
    examples=(
        ("transaxle verify out/", "check every byte against the manifest"),
        ("transaxle verify Qwen3-30B-A3B/ out/", "compare two checkpoints, whatever their dialects"),
    ),
    help="""Check a checkpoint against its manifest, or compare two checkpoints.

    Exits with 0 if everything matches and with 1 if not. With A alone: reads every file, and every copy of every
    tensor, and compares hashes with those recorded in transaxle.json, or, for a single file, in the file itself. If
    neither is there, only the structure, and checksums of the format, are checked. With A and B: compares their
    tensors bit by bit, whatever the dialect and files of each.""",
)
@click.argument("a", type=click.Path(readable=False))
@click.argument("b", type=click.Path(readable=False), required=False)
@options_of("verify")
@profiling
@printing
def command(screen: Screen, a: str, b: str | None, options: dict[str, Any]) -> int:
    """Verify a checkpoint, or compare two."""
    result = verbs.verify(a, b, watch=screen, **options)
    if screen.as_json:
        screen.document(result.as_json())
    elif result.comparison is None:
        print_verification(screen, result)
    else:
        print_comparison(screen, result.comparison)
    return 0 if result else 1


def print_verification(screen: Screen, result: Verification) -> None:
    """Print the outcome of checking a checkpoint against its manifest."""
    amount = f"{plural(result.tensors, 'tensor')}, {parameters(result.parameters)}, {size(result.bytes_read)} read"
    if result.problems:
        screen.line(("not intact", "red"), f": {amount}")
        print_refusals(screen, "  problems", result.problems, screen.line)
    elif result.against == "manifest":
        screen.line(("intact", "green"), f": {amount}; every hash in the manifest matches (xxh3-128)")
    elif result.against == "digests":
        screen.line(("intact", "green"), f": {amount}; every digest in the file matches (xxh3-128)")
    else:
        screen.line(f"checked the structure only, there are no digests: {amount}")
        screen.line(f"  {_unproved(result)}: give a second checkpoint to compare with")
    if result.unlisted:
        screen.line(f"  not checked, as the manifest does not list them: {listed(result.unlisted)}")


def _unproved(result: Verification) -> str:
    """Say what nothing proves of a checkpoint without hashes."""
    if not result.unproved:
        return "checksums of the format cover all tensors; nothing covers headers and the files beside them"
    if result.unproved == result.bytes_read:
        return "nothing records what was written, so the data itself is unchecked"
    return f"checksums of the format cover a part; {size(result.unproved)} of the data are unchecked"


def print_comparison(screen: Screen, compared: Comparison) -> None:
    """Print whether two checkpoints are equal, and if not, where to look."""
    first, second = (f"{count:,}" for count in compared.stored)
    if compared.equal:
        counts = f"{first} = {second} tensors" if first != second else plural(compared.stored[0], "tensor")
        screen.line(("equal", "green"), f": {counts}, {parameters(compared.parameters)}")
        print_across(screen, compared)
        return
    screen.line(
        ("different", "red"),
        f": {plural(len(compared.differences), 'tensor')}; {compared.first} has {first}, {compared.second} {second}",
    )
    screen.line(f"  to see where: transaxle diff {compared.first} {compared.second}")
    if compared.optimizer_only:
        screen.line("  all of it is optimizer state that only one of them has: --no-optimizer compares the rest")


def print_across(screen: Screen, comparison: Comparison) -> None:
    """Print which tensors were compared by value because they are stored in two number formats."""
    for formats, count in comparison.across.items():
        screen.line(f"  {plural(count, 'tensor')} compared by value, stored as {formats}")
