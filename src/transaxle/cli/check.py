"""`transaxle check` tells whether a program loads a checkpoint as it is."""

from __future__ import annotations

from typing import Any

import click

from transaxle import verbs
from transaxle.cli.command import Command, complete_with, options_of, with_screen
from transaxle.cli.screen import Screen
from transaxle.engine.wording import duration, fold_to_text
from transaxle.readers.checking import Check
from transaxle.readers.findings import Finding
from transaxle.readers.reader import READERS


@click.command(
    "check",
    cls=Command,
    examples=(
        ("transaxle check out/ --for transformers", "does the installed transformers load it?"),
        ("transaxle check out/ --for vllm --python /opt/vllm/bin/python", "does vLLM in its own environment?"),
    ),
    help="""Check whether a program loads every tensor of a checkpoint, each to its place, with its values.

    Runs the program's own loading code on the names, shapes, dtypes and config of SRC, without its data, and on small
    checkpoints with data if tensors are quantized or have names of another dialect. For each finding: the tensors, what
    the program does with them, and what would mend it. Exits with 0 if the program loads SRC as it is, and with 1 if
    not. Results are kept for equal names, configs and versions of the program.""",
)
@click.argument("src", type=click.Path(readable=False))
@click.option(
    "--for", "reader", metavar="READER", required=True, shell_complete=complete_with(lambda: list(READERS)),
    help=f"The program: {', '.join(READERS)}.",
)  # fmt: skip
@options_of("check")
@with_screen
def check_command(screen: Screen, src: str, reader: str, options: dict[str, Any]) -> int:
    """Check whether a program loads a checkpoint as it is."""
    with screen.working(f"loading with {reader}"):
        verdict = verbs.check(src, reader, **options)
    if screen.as_json:
        screen.document(verdict.as_json())
    else:
        print_check(screen, verdict)
    return 0 if verdict else 1


def print_check(screen: Screen, verdict: Check) -> None:
    """Print the verdict, and each finding with the tensors and the remedy."""
    screen.line((verdict.headline, "green" if verdict else "red"))
    for finding in verdict.findings:
        _print_finding(screen, finding)
    if verdict.traced == "run":
        screen.note(f"  {verdict.reader} was run for {duration(verdict.seconds)}; the result is kept")


def _print_finding(screen: Screen, finding: Finding) -> None:
    title = f"  {finding.kind}: {finding.effect}"
    if finding.names:
        screen.some(title, list(fold_to_text(finding.names)))
    else:
        screen.line(title)
    if finding.remedy:
        screen.line(f"    {finding.remedy}")
