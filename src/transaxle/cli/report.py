"""`transaxle report` writes a report of a checkpoint as one HTML page."""

from __future__ import annotations

import os
import webbrowser
from pathlib import Path
from typing import Any

import click

from transaxle.cli.command import Command, non_default_options, options_of, with_screen
from transaxle.cli.screen import Screen
from transaxle.engine.wording import size
from transaxle.move.workers import no_progress
from transaxle.options import OPENING
from transaxle.reports.reporting import write_report


@click.command(
    "report",
    cls=Command,
    examples=(
        ("transaxle report Qwen3-30B-A3B/", "write Qwen3-30B-A3B.html"),
        ("transaxle report Qwen3-30B-A3B/ --open", "and show it in the browser"),
        ("transaxle report Qwen3-30B-A3B/ --values", "with statistics of each tensor's values"),
        ("transaxle report out/ -o out.html --overwrite", "replace an older report"),
    ),
    help="""Write a report of a checkpoint: one HTML file to look at in a browser.

    SRC is a folder or a file. The page shows where the bytes are, by tensor, layer and expert; the layout in the
    notation of tables; dtypes, encodings, files and ties; and anything unusual. The page loads nothing from the
    network. Only headers are read, unless you give --values: then every tensor is read once, and the page shows
    minimum, maximum, mean and RMS, zeros, NaN and infinite values, and channels that stand out. A refused checkpoint
    gets a page too, with every reason; the exit code is then 3. Needs Jinja2 (pip install jinja2).""",
)
@click.argument("src", type=click.Path(readable=False))
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(readable=False),
    help="File to write.  [default: the name of SRC, with .html]",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing report; other files are never replaced.")
@click.option("--open", "shows", is_flag=True, help="Open the report in the browser.")
@options_of("report", but=("overwrite",))
@with_screen
def report_command(
    screen: Screen, src: str, output: str | None, overwrite: bool, shows: bool, options: dict[str, Any]
) -> int:
    """Write a report of a checkpoint as an HTML page."""
    with screen.working("writing the report"):
        how: dict[str, bool] = {"overwrite": overwrite, "values": options["values"]}
        reading = non_default_options(options, OPENING)
        path, refused = write_report(src, output or _default_file(src), reading, **how, progress=no_progress)
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


def _default_file(src: str) -> str:
    """Return the default path of a report: a file in the current folder, named after the checkpoint SRC."""
    # this function works even if symbolic links form a loop
    name = src.rstrip("/").rpartition("/")[2] if "://" in src else Path(os.path.realpath(src)).name
    return f"{name or 'checkpoint'}.html"
