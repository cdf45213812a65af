"""The public function `report`: writes a page about a checkpoint, plan, conversion, comparison or sharding as one HTML
file.
"""

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
from transaxle.engine.checkpoint.checkpoint import Checkpoint, CheckpointLike, open_source
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

VerbResult: TypeAlias = "Plan | Report | Comparison | Sharding"
"""Results of the public functions `plan`, `convert`, `diff` and `sharding`, which `report` can show."""


@suggests
def report(
    src: CheckpointLike | VerbResult,
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
    ranks: str | None = None,
    graft: PathLike | None = None,
    graft_over: Patterns = (),
    decode: DType | None = None,
    restate: str | None = None,
    dtype: DType | None = None,
    merge: PathLike | None = None,
    only: Patterns = (),
    skip: Patterns = (),
) -> Path:
    """Write a report: one HTML file that a browser opens without any other file.

    For a checkpoint, the report shows where the bytes are, the layout of the tensors, dtypes, files, ties and unusual
    things. For a plan, it shows which tensors become which, how axes move, names of tensors that are not converted, and
    refusals. Of a checkpoint, only the headers are read, unless `values` is given. For a finished conversion, the
    report shows written files, names of tensors that were not converted, and changed values; for a comparison, where in
    the model values differ, and by how much; for a live model's sharding, which rank holds which shard of each tensor.
    The package Jinja2 must be installed: `pip install jinja2`.

    Args:
        src: path of a checkpoint, or an open checkpoint, which is shown under its stored names; or a result of `plan`,
            `convert`, `diff(..., numeric=True)` or `sharding`.
        dst: path of the file to write, on this machine; it must not exist unless `overwrite` is given.
        overwrite: whether to replace an existing report; other files are never replaced.
        values: for a checkpoint, whether to read all tensors and show statistics of their values.
        progress: function called, by several threads, with the number of bytes of each block that is read for `values`.

    All other arguments are those of `open`.

    Returns:
        The path of the file that was written.

    Raises:
        TypeError: if an argument has the wrong type, or a comparison has no measured values.
        UsageError: with code EXISTS, if `dst` exists and may not be replaced.
        Refused: with code UNSUPPORTED, without Jinja2 or if `dst` is a URL. For any refusal of `open`, a report is
            written too, which lists every reason.
        StorageError: with code IO or NO_SPACE, if the file cannot be written.
    """
    check_flags(overwrite=overwrite)
    options = read_options("report", locals())
    reading = select(options, OPENING)
    path, refused = write_report(src, dst, reading, overwrite=overwrite is True, values=values, progress=progress)
    if refused is not None:
        raise refused
    return path


class ConversionPage:
    """Writes the HTML page of a conversion: a page of its plan, its refusals or its result.

    Args:
        path: path of the file to write.

    Attributes:
        times: records when each file of the conversion is written.

    Raises:
        TransaxleError: with code EXISTS, if the file exists; with code UNSUPPORTED, if the path is a URL, or Jinja2 is
            not installed; with code IO, if the path cannot be used.
    """

    def __init__(self, path: str) -> None:
        from transaxle.engine.execute import FileTimes

        check_jinja()
        check_destination(path, overwrite=None)
        self.times = FileTimes()
        self._path = path

    def write_refused(self, plan: Plan) -> None:
        """Write the page of a plan that has refusals; do nothing for a plan without refusals."""
        if plan.refusals:
            self.write(plan)

    def write(self, plan: Plan, report: Report | None = None) -> None:
        """Write the page of a plan or, if the report of a conversion is given, the page of the finished conversion."""
        from transaxle.reports.conversion_page import Finished, conversion_page

        finished = None if report is None else Finished(report, self.times.files)
        write_page(as_html(conversion_page(plan, finished)), self._path, overwrite=False)


def write_report(
    src: CheckpointLike | VerbResult,
    dst: PathLike,
    reading: Mapping[str, Any],
    *,
    overwrite: bool,
    values: bool,
    progress: Progress,
) -> tuple[Path, TransaxleError | None]:
    """Write a page as `report` does; return its path, and the refusal if the page explains why `src` cannot be read.

    Raises:
        TransaxleError: any error that `report` raises, if no page can be written.
    """
    path = read_path("dst", dst)
    check_jinja()
    check_destination(path, overwrite=bool(overwrite))
    refused = None
    if _is_verb_result(src):
        if values:
            raise TypeError("values is for a checkpoint")
        html = as_html(_result_html_page(src, reading))
    else:
        html, refused = _checkpoint_html(cast("CheckpointLike", src), reading, progress if values else None)
    write_page(html, path, overwrite=bool(overwrite))
    return Path(path), refused


def _checkpoint_html(
    src: CheckpointLike, reading: Mapping[str, Any], progress: Progress | None
) -> tuple[bytes, TransaxleError | None]:
    """Return (page of the checkpoint, None), or (page of a refusal, the refusal); with `progress`, the page has value
    statistics.
    """
    from transaxle.reports.checkpoint_page import checkpoint_page

    try:
        with open_source("src", src, reading) as checkpoint:
            statistics = measure_values(checkpoint.stored, limits(), progress) if progress is not None else None
            return as_html(checkpoint_page(checkpoint, statistics)), None
    except Refused as error:
        from transaxle.reports.conversion_page import refusal_page

        return as_html(refusal_page(src.path if isinstance(src, Checkpoint) else str(src), error)), error


def _is_verb_result(src: CheckpointLike | VerbResult) -> TypeGuard[VerbResult]:
    """Return whether `src` is a result of `plan`, `convert`, `diff` or `sharding`; modules are imported only when
    needed.
    """
    if isinstance(src, str | os.PathLike | Checkpoint):
        return False
    from transaxle.engine.carry import Report
    from transaxle.engine.checkpoint_facts import Sharding
    from transaxle.engine.compare import Comparison
    from transaxle.engine.plan.planned import Plan

    return isinstance(src, Plan | Report | Comparison | Sharding)


def _result_html_page(src: VerbResult, reading: Mapping[str, Any]) -> Page:
    """Return the page of a result of `plan`, `convert`, `diff` or `sharding`."""
    from transaxle.engine.carry import Report
    from transaxle.engine.checkpoint_facts import Sharding
    from transaxle.engine.plan.planned import Plan
    from transaxle.reports.conversion_page import Finished, conversion_page, result_page
    from transaxle.reports.difference_page import difference_page
    from transaxle.reports.sharding_page import sharding_page

    if isinstance(src, Sharding):
        if reading:
            raise TypeError(f"{', '.join(reading)}: a sharding is not read from files")
        return sharding_page(src)
    if isinstance(src, Report):
        if reading:
            raise TypeError(f"{', '.join(reading)}: the conversion is already done")
        return result_page(Finished(src))
    if isinstance(src, Plan):
        if reading:
            raise TypeError(f"{', '.join(reading)}: pass this to plan() instead; the plan is already made")
        return conversion_page(src)
    if reading:
        raise TypeError(f"{', '.join(reading)}: pass this to diff() instead; the comparison is already made")
    if src.survey is None:
        raise TypeError("a report of a comparison needs measured values: diff(a, b, numeric=True)")
    return difference_page(src)
