"""`transaxle report`: a checkpoint as one HTML page."""

from __future__ import annotations

import os
import webbrowser
from pathlib import Path
from typing import Any

import click

from transaxle.cli.command import Command, given, options_of, printing
from transaxle.cli.screen import Screen
from transaxle.engine.wording import size
from transaxle.move.workers import no_progress
from transaxle.options import OPENING
from transaxle.reports.reporting import reported


@click.command(
    "report",
    cls=Command,
    examples=(
        ("transaxle report Qwen3-30B-A3B/", "write Qwen3-30B-A3B.html"),
        ("transaxle report Qwen3-30B-A3B/ --open", "and show it in the browser"),
        ("transaxle report Qwen3-30B-A3B/ --values", "with what values each tensor has"),
        ("transaxle report out/ -o out.html --overwrite", "replace an older report"),
    ),
    help="""Write a report of a checkpoint: one HTML file to look at in a browser.

    SRC is a folder or a file. The page shows where the bytes are, by tensor, layer and expert, the layout in the
    notation of tables, types, encodings, files and ties, and what is unusual. It loads nothing from the network. Reads
    only headers, unless --values is given: then it reads every tensor once, and shows minimum, maximum, mean and RMS,
    zeros, NaN and infinite values, and channels that stand out. What is refused has a page too, with every reason;
    the exit code is 3 as ever. Needs Jinja2 (pip install jinja2).""",
)
@click.argument("src", type=click.Path(readable=False))
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(readable=False),
    help="File to write.  [default: the name of SRC, with .html]",
)
@click.option("--overwrite", is_flag=True, help="Replace the report that is there; other files are never replaced.")
@click.option("--open", "shows", is_flag=True, help="Show it in the browser.")
@options_of("report", but=("overwrite",))
@printing
def report_command(
    screen: Screen, src: str, output: str | None, overwrite: bool, shows: bool, options: dict[str, Any]
) -> int:
    """Report on a checkpoint."""
    with screen.working("writing the report"):
        how: dict[str, bool] = {"overwrite": overwrite, "values": options["values"]}
        reading = given(options, OPENING)
        path, refused = reported(src, output or _named_after(src), reading, **how, progress=no_progress)
    amount = path.stat().st_size
    if not screen.as_json:
        screen.line(f"{path} · {size(amount)}")
    elif refused is None:
        screen.document({"path": str(path), "bytes": amount})
    if shows:
        webbrowser.open(path.resolve().as_uri())
    if refused is not None:
        raise refused
    return 0


def _named_after(src: str) -> str:
    """Return the file for a report that the user did not name: in the current folder."""
    name = src.rstrip("/").rpartition("/")[2] if "://" in src else Path(os.path.realpath(src)).name  # of a loop too
    return f"{name or 'checkpoint'}.html"
