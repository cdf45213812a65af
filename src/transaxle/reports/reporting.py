"""The public function: a report of a checkpoint, a plan, a comparison or a sharding, as one HTML file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, cast

from transaxle.arguments import (
    Axes,
    Config,
    DType,
    Overwrite,
    PathLike,
    Patterns,
    Weights,
    check_flags,
    read_options,
    read_path,
    suggests,
)
from transaxle.engine.checkpoint.checkpoint import Checkpoint, CheckpointLike, opened
from transaxle.engine.values import measure_values
from transaxle.errors import Refused, TransaxleError
from transaxle.move.workers import Progress, limits, no_progress
from transaxle.options import OPENING, select
from transaxle.reports.html_page import Page, as_html, check_destination, check_jinja, write_page

if TYPE_CHECKING:
    from transaxle.engine.carry import Report
    from transaxle.engine.checkpoint_facts import Sharding
    from transaxle.engine.compare import Comparison
    from transaxle.engine.plan.planned import Plan

Made: TypeAlias = "Plan | Report | Comparison | Sharding"
"""What other functions return, and a report shows."""


@suggests
def report(
    src: CheckpointLike | Made,
    dst: PathLike,
    *,
    overwrite: Overwrite = False,
    values: bool = False,
    progress: Progress = no_progress,
    format: str | None = None,  # noqa: A002 - the contract's name
    family: str | None = None,
    dialect: str | None = None,
    config: Config | None = None,
    axes: Axes | None = None,
    rules: PathLike | None = None,
    weights: Weights | None = None,
    optimizer: bool | None = None,
    average: bool = False,
    decode: DType | None = None,
    dtype: DType | None = None,
    merge: PathLike | None = None,
    only: Patterns = (),
    skip: Patterns = (),
) -> Path:
    """Write a report: one HTML file that opens in a browser and needs nothing else.

    Of a checkpoint it shows where the bytes are, the layout in the notation, types, files, ties, and what is unusual;
    of a plan what becomes what, how axes move, what is left out, and what stands against it. Only headers are read, but
    for `values`. Of a finished conversion it shows what was written, left out and changed in value.
    Of a comparison it shows where in the model values differ, and by how much; of a live model's sharding which rank
    holds what.
    Needs Jinja2: `pip install jinja2`.

    Args:
        src: path, an opened checkpoint, which is shown under its own names, a plan, or what `convert`,
            `diff(..., numeric=True)` or `sharding` returned.
        dst: the file to write, on this machine; it must not exist unless `overwrite`.
        overwrite: replace a report; another file is never replaced.
        values: of a checkpoint: read all of it, and show what values each tensor has.
        progress: called with the bytes of each block read for that, from several threads.

    The other arguments are those of `open`.

    Returns:
        The path of the file.

    Raises:
        TypeError: an argument of a type that it cannot have; a comparison in which values were not measured.
        UsageError: EXISTS.
        Refused: UNSUPPORTED without Jinja2, and for a URL as `dst`; what `open` refuses: the report is then written
            too, and shows every reason.
        StorageError: IO, NO_SPACE.
    """
    check_flags(overwrite=overwrite)
    options = read_options("report", locals())
    reading = select(options, OPENING)
    path, refused = reported(src, dst, reading, overwrite=overwrite is True, values=values, progress=progress)
    if refused is not None:
        raise refused
    return path


class ConversionPage:
    """The page of a conversion, of what is planned, refused or done.

    Args:
        path: the file to write.

    Attributes:
        times: takes note of when each file was written.

    Raises:
        TransaxleError: EXISTS for a file that is there; UNSUPPORTED for a URL, and without Jinja2; IO.
    """

    def __init__(self, path: str) -> None:
        from transaxle.engine.execute import FileTimes

        check_jinja()
        check_destination(path, overwrite=None)
        self.times = FileTimes()
        self._path = path

    def write_refused(self, plan: Plan) -> None:
        """Write the page of a plan, if something stands against it."""
        if plan.refusals:
            self.write(plan)

    def write(self, plan: Plan, report: Report | None = None) -> None:
        """Write the page of a plan, or of what was done."""
        from transaxle.reports.conversion_page import Finished, conversion_page

        done = None if report is None else Finished(report, self.times.files)
        write_page(as_html(conversion_page(plan, done)), self._path, overwrite=False)


def reported(
    src: CheckpointLike | Made,
    dst: PathLike,
    reading: Mapping[str, Any],
    *,
    overwrite: bool,
    values: bool,
    progress: Progress,
) -> tuple[Path, TransaxleError | None]:
    """Write a report as `report` does; return its path, and why a checkpoint is refused whose page tells just that.

    Raises:
        TransaxleError: what `report` raises, where no page can be written or there is nothing to be told.
    """
    path = read_path("dst", dst)
    check_jinja()
    check_destination(path, overwrite=bool(overwrite))
    refused = None
    if _is_made(src):
        if values:
            raise TypeError("values is for a checkpoint")
        html = as_html(_made(src, reading))
    else:
        html, refused = _checkpoint(cast("CheckpointLike", src), reading, progress if values else None)
    write_page(html, path, overwrite=bool(overwrite))
    return Path(path), refused


def _checkpoint(
    src: CheckpointLike, reading: Mapping[str, Any], progress: Progress | None
) -> tuple[bytes, TransaxleError | None]:
    """Return the page of a checkpoint, or that of why it is refused; values are measured where there is `progress`."""
    from transaxle.reports.checkpoint_page import checkpoint_page

    try:
        with opened("src", src, reading) as checkpoint:
            found = measure_values(checkpoint.stored, limits(), progress) if progress is not None else None
            return as_html(checkpoint_page(checkpoint, found)), None
    except Refused as error:
        from transaxle.reports.conversion_page import refused_page

        return as_html(refused_page(src.path if isinstance(src, Checkpoint) else str(src), error)), error


def _is_made(src: CheckpointLike | Made) -> TypeGuard[Made]:
    """Tell whether another function has made it; what plans and conversions need is imported only then."""
    if isinstance(src, str | os.PathLike | Checkpoint):
        return False
    from transaxle.engine.carry import Report
    from transaxle.engine.checkpoint_facts import Sharding
    from transaxle.engine.compare import Comparison
    from transaxle.engine.plan.planned import Plan

    return isinstance(src, Plan | Report | Comparison | Sharding)


def _made(src: Made, reading: Mapping[str, Any]) -> Page:
    """Return the page of what another function has made."""
    from transaxle.engine.carry import Report
    from transaxle.engine.checkpoint_facts import Sharding
    from transaxle.engine.plan.planned import Plan
    from transaxle.reports.conversion_page import Finished, conversion_page, finished_page
    from transaxle.reports.difference_page import difference_page
    from transaxle.reports.sharding_page import sharding_page

    if isinstance(src, Sharding):
        if reading:
            raise TypeError(f"{', '.join(reading)}: a sharding is not read from files")
        return sharding_page(src)
    if isinstance(src, Report):
        if reading:
            raise TypeError(f"{', '.join(reading)}: the conversion is already done")
        return finished_page(Finished(src))
    if isinstance(src, Plan):
        if reading:
            raise TypeError(f"{', '.join(reading)}: pass this to plan() instead; the plan is already made")
        return conversion_page(src)
    if reading:
        raise TypeError(f"{', '.join(reading)}: pass this to diff() instead; the comparison is already made")
    if src.survey is None:
        raise TypeError("a report of a comparison needs measured values: diff(a, b, numeric=True)")
    return difference_page(src)
