"""The public function: a report of a checkpoint, a plan, a comparison or a sharding, as one HTML file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias, Unpack

from transaxle.arguments import Overwrite, PathLike, check_keywords, read_path, shows
from transaxle.engine.checkpoint.checkpoint import CheckpointLike, opened
from transaxle.engine.checkpoint.settings import Reading
from transaxle.engine.compare.compare import Comparison
from transaxle.engine.facts.sharding_facts import Sharding
from transaxle.engine.plan.planned import Plan
from transaxle.reports.html_page import Page, as_html, check_destination, check_jinja, write_page

Made: TypeAlias = Plan | Comparison | Sharding
"""What other functions return, and a report shows."""


@shows(Reading, average=False)
def report(
    src: CheckpointLike | Plan | Comparison | Sharding,
    dst: PathLike,
    *,
    overwrite: Overwrite = False,
    **reading: Unpack[Reading],
) -> Path:
    """Write a report: one HTML file that opens in a browser and needs nothing else.

    Of a checkpoint it shows where the bytes are, the layout in the notation, types, files, ties, and what is unusual;
    of a plan what becomes what, how axes move, what is left out, and what stands against it. Only headers are read.
    Of a comparison it shows where in the model values differ, and by how much; of a live model's sharding which rank
    holds what.
    Needs Jinja2: `pip install 'transaxle[report]'`.

    Args:
        src: path, an opened checkpoint, which is shown under its own names, a plan, or what `diff(..., numeric=True)`
            or `sharding` returned.
        dst: the file to write, on this machine; it must not exist unless `overwrite`.
        overwrite: replace a report; another file is never replaced.
        **reading: as for `open`: `format`, `family`, `dialect`, `config`, `axes`, `rules`, `weights`, `optimizer` and
            `average`.

    Returns:
        The path of the file.

    Raises:
        TypeError: an argument of a type that it cannot have; a comparison in which values were not measured.
        UsageError: EXISTS.
        Refused: UNSUPPORTED without Jinja2, and for a URL as `dst`; what `open` refuses.
        StorageError: IO, NO_SPACE.
    """
    from transaxle.reports.checkpoint_page import checkpoint_page

    check_keywords("report", reading, Reading.__annotations__)
    path = read_path("dst", dst)
    check_jinja()
    check_destination(path, overwrite=bool(overwrite))
    if isinstance(src, Made):
        html = as_html(_made(src, reading))
    else:
        with opened("src", src, reading) as checkpoint:
            html = as_html(checkpoint_page(checkpoint))
    write_page(html, path, overwrite=bool(overwrite))
    return Path(path)


def _made(src: Made, reading: Mapping[str, Any]) -> Page:
    """Return the page of what another function has made."""
    from transaxle.reports.conversion_page import conversion_page
    from transaxle.reports.difference_page import difference_page
    from transaxle.reports.sharding_page import sharding_page

    if isinstance(src, Sharding):
        if reading:
            raise TypeError(f"{', '.join(reading)}: a sharding is not read from files")
        return sharding_page(src)
    if isinstance(src, Plan):
        if reading:
            raise TypeError(f"{', '.join(reading)}: pass this to plan() instead; the plan is already made")
        return conversion_page(src)
    if reading:
        raise TypeError(f"{', '.join(reading)}: pass this to diff() instead; the comparison is already made")
    if src.survey is None:
        raise TypeError("a report of a comparison needs measured values: diff(a, b, numeric=True)")
    return difference_page(src)
