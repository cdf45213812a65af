"""The public function: a report of a checkpoint or of a plan, as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from transaxle.arguments import Overwrite, PathLike, check_keywords, read_path, shows
from transaxle.engine.checkpoint.checkpoint import CheckpointLike, opened
from transaxle.engine.checkpoint.settings import Reading
from transaxle.engine.plan.planned import Plan
from transaxle.reports.html_page import as_html, check_destination, check_jinja, write_page


@shows(Reading, average=False)
def report(
    src: CheckpointLike | Plan, dst: PathLike, *, overwrite: Overwrite = False, **reading: Unpack[Reading]
) -> Path:
    """Write a report of a checkpoint or a plan: one HTML file that opens in a browser and needs nothing else.

    Of a checkpoint it shows where the bytes are, the layout in the notation, types, files, ties, and what is unusual;
    of a plan what becomes what, how axes move, what is left out, and what stands against it. Only headers are read.
    Needs Jinja2: `pip install 'transaxle[report]'`.

    Args:
        src: path, an opened checkpoint, which is shown under its own names, or a plan.
        dst: the file to write, on this machine; it must not exist unless `overwrite`.
        overwrite: replace a report; another file is never replaced.
        **reading: as for `open`: `format`, `family`, `dialect`, `config`, `axes`, `rules`, `weights`, `optimizer` and
            `average`.

    Returns:
        The path of the file.

    Raises:
        TypeError: an argument of a type that it cannot have.
        UsageError: EXISTS.
        Refused: UNSUPPORTED without Jinja2, and for a URL as `dst`; what `open` refuses.
        StorageError: IO, NO_SPACE.
    """
    from transaxle.reports.checkpoint_page import checkpoint_page
    from transaxle.reports.conversion_page import conversion_page

    check_keywords("report", reading, Reading.__annotations__)
    path = read_path("dst", dst)
    check_jinja()
    check_destination(path, overwrite=bool(overwrite))
    if isinstance(src, Plan):
        if reading:
            raise TypeError(f"{', '.join(reading)}: pass this to plan() instead; the plan is already made")
        html = as_html(conversion_page(src))
    else:
        with opened("src", src, reading) as checkpoint:
            html = as_html(checkpoint_page(checkpoint))
    write_page(html, path, overwrite=bool(overwrite))
    return Path(path)
