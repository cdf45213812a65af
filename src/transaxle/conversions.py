"""Carries out a conversion that a user has requested: planned, checked for its target, executed, read back.

The functions `plan` and `convert`, and through them the command line, make such a conversion from their options. It
chooses who executes the plan: this process, several worker processes, or the ranks of a torchrun job.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transaxle.arguments import PathLike, read_path, read_source
from transaxle.engine.checkpoint.checkpoint import Checkpoint, CheckpointLike, open_checkpoint, open_source
from transaxle.engine.observers import Progress, Unverified, Watch, report_progress
from transaxle.errors import Refused
from transaxle.options import PLACING, SHAPING, select, select_opening

if TYPE_CHECKING:
    from transaxle.engine.carry import Report
    from transaxle.engine.distribute.work_plan import ConversionOrder
    from transaxle.engine.execute import CheckedPlan
    from transaxle.engine.plan.conversion import Prepared
    from transaxle.engine.verification import Verification
    from transaxle.readers.checking import Check
    from transaxle.reports.reporting import ConversionPage


@contextmanager
def open_and_make_plan(
    src: CheckpointLike,
    to: str,
    target: str | None,
    options: Mapping[str, Any],
    numbers: Mapping[str, Any],
    watch: Watch,
) -> Iterator[Prepared]:
    """Open a source and plan its conversion; files stay open inside the `with` block.

    Args:
        src: path of a checkpoint, or an opened checkpoint.
        to: format and dialect of the target, as `FORMAT[:DIALECT]`.
        target: path or URL of the target; None for a folder that is not written.
        options: option name -> value, for options that differ from their defaults.
        numbers: the arguments `encode` and `degrees` of `make_plan`.
        watch: observer of the run.
    """
    from transaxle.engine.plan.conversion import make_plan

    with open_source("src", src, select_opening(options)) as checkpoint:
        with watch.working("planning"):
            prepared = make_plan(checkpoint, to, target=target, **numbers, **select(options, SHAPING))
        yield prepared


class Conversion:
    """A conversion that the user has requested, with options that have been checked.

    Args:
        src: path of a checkpoint, or an opened checkpoint.
        dst: path or URL of the target.
        options: option name -> value, for options that differ from their defaults.
        numbers: the arguments `encode` and `degrees` of `make_plan`, as `options` states them.
        watch: observer of the run.

    Attributes:
        target: path or URL of the target.
        opening: option name -> value, for opening the source.
        limit: maximum number of workers, and maximum memory.
        page: object that writes the HTML page; None if no page was requested, and on all ranks of a job but the first.
        order: the conversion as plain data for other processes; None if this process converts alone.

    Raises:
        TypeError: if the source is an opened checkpoint, although other processes must open it themselves.
        TransaxleError: if creating `order` fails, or the page cannot be written.
    """

    def __init__(
        self,
        src: CheckpointLike,
        dst: PathLike,
        options: Mapping[str, Any],
        numbers: Mapping[str, Any],
        watch: Watch,
    ) -> None:
        from transaxle.move.workers import limits

        self._src, self._options, self._watch = src, options, watch
        self.target = read_path("dst", dst)
        self._numbers = numbers
        self.opening = select_opening(options)
        self.limit = limits(options.get("jobs"), options.get("memory"))
        self._together = options.get("on") == "torchrun"
        if "reader" in options:
            from transaxle.engine.plan.conversion import parse_to
            from transaxle.readers.checking import require_reader

            require_reader(options["reader"], options.get("python"), parse_to(options["to"])[0], self.target)
        self._leads = True
        if self._together:
            from transaxle.engine.distribute.driver import is_lead

            self._leads = is_lead()
        self.page: ConversionPage | None = self._new_page() if "report" in options and not self._together else None
        self.order: ConversionOrder | None = None
        if "on" in options or "write" in options:
            from transaxle.engine.distribute.driver import check_on
            from transaxle.engine.distribute.work_plan import order

            if "on" in options:
                check_on(options["on"])
            if isinstance(src, Checkpoint):
                needs = "on" if "on" in options else "write"
                raise TypeError(f"{needs} needs the path of src: other processes open it themselves")
            source = read_source("src", src)
            shaping = select(options, SHAPING)
            self.order = order(source, self.target, options["to"], self.opening, shaping, **numbers)

    def _new_page(self) -> ConversionPage:
        from transaxle.reports.reporting import ConversionPage

        return ConversionPage(self._options["report"])

    @contextmanager
    def open_and_plan(self, *, running: bool) -> Iterator[CheckedPlan]:
        """Open the source, plan the conversion, and check the target; files stay open inside the `with` block.

        Args:
            running: whether the plan will be executed next; the value is passed to `preflight`.
        """
        from transaxle.engine.execute import explain_swapped, preflight

        planning = self._src, self._options["to"], self.target, self._options, self._numbers, self._watch
        with explain_swapped(self._src, self.target), open_and_make_plan(*planning) as prepared:
            target = self.target if self.order is None or not running else self.order.target
            state: dict[str, Any] = {"running": running, "several": self.order is not None, "limit": self.limit}
            cleared = preflight(prepared, target, **state, **select(self._options, PLACING))
            self._watch.planned(cleared)
            yield cleared

    def carry_out(self, progress: Progress, way_on: str) -> Report:
        """Carry out the conversion; then, if the user asked for it, read the result back and write the HTML page.

        Args:
            progress: function that is called with the number of bytes written.
            way_on: advice for a user who stops the conversion; empty if it cannot be continued.
        """
        from transaxle.engine.plan.conversion import require_ready

        with ExitStack() as stack:
            prepared: Prepared | None = None
            if self._together:
                self._watch.state("nothing was written", way_on)
                report = self._by_ranks(progress)
                if self._leads and self.order is not None:
                    prepared = stack.enter_context(self.order.prepare())
            else:
                prepared = cleared = stack.enter_context(self.open_and_plan(running=True))
                if self.page is not None:
                    self.page.write_refused(cleared.plan)
                require_ready(cleared)
                self._watch.state("nothing was written", way_on)
                report = self._execute(cleared, progress)
            if prepared is not None and self._options.get("verify", False):
                self._watch.state(f"{self.target} is written, but not verified")
                report = replace(report, verification=self._read_back(prepared))
            if prepared is not None and "reader" in self._options:
                self._watch.state(f"{self.target} is written, but not checked for {self._options['reader']}")
                report = replace(report, check=self._check())
            if prepared is not None and self.page is not None:
                self._watch.state(f"{self.target} is written, but not its report")
                self.page.write(prepared.plan, report)
        self._require_sound(report)
        return report

    def _require_sound(self, report: Report) -> None:
        """Raise `Unverified` if the result is not equal to the source, or the reader would not load it."""
        if report.verification is not None:
            from transaxle.engine.read_back import refuse_unequal

            try:
                refuse_unequal(report.verification, report.path)
            except Refused as error:
                raise Unverified(error.refusals, report) from None
        if report.check is not None and not report.check:
            from transaxle.readers.findings import refusals_of

            raise Unverified(refusals_of(report.check.path, report.check.findings), report)

    def _execute(self, cleared: CheckedPlan, progress: Progress) -> Report:
        """Execute the plan, in this process or by several worker processes."""
        if self.order is not None:
            from transaxle.engine.distribute.driver import convert_on

            with self._watch.workers() as events:
                return convert_on(
                    self.order, cleared, self._options["on"], progress=progress, watch=events, **self._work_options
                )
        from transaxle.engine.execute import execute
        from transaxle.formats.store.staging import takes_parts

        placing = select(self._options, (*PLACING, "sync"))
        total = sum(tensor.nbytes for tensor in cleared.plan.tensors)
        with report_progress(self._watch, progress, total, "copying", stays=True) as counted:
            if takes_parts(self.target):
                from transaxle.engine.distribute.driver import convert_in_parts

                return convert_in_parts(cleared, self.target, limit=self.limit, progress=counted, **placing)
            times = None if self.page is None else self.page.times
            return execute(cleared, self.target, limit=self.limit, progress=counted, times=times, **placing)

    def _by_ranks(self, progress: Progress) -> Report:
        """Convert together with the other ranks of a torchrun job; all ranks must call this method."""
        from transaxle.live.torchrun import convert_together

        assert self.order is not None
        if not self._leads:
            return convert_together(self.order, **self._work_options)
        with self._watch.workers() as events:
            return convert_together(self.order, progress=progress, watch=events, look=self._look, **self._work_options)

    def _look(self, prepared: Prepared) -> None:
        """Prepare the HTML page, and write it at once if the plan has errors; called on a job's first rank."""
        if "report" not in self._options:
            return
        from transaxle.engine.execute import preflight

        self.page, placing = self._new_page(), select(self._options, PLACING)
        self.page.write_refused(preflight(prepared, self.target, several=True, limit=self.limit, **placing).plan)

    @property
    def _work_options(self) -> dict[str, Any]:
        """The options of a conversion by several processes."""
        return select(self._options, ("items", *PLACING, "sync", "jobs", "memory"))

    def _check(self) -> Check:
        """Check whether the reader loads the result."""
        from transaxle.readers.checking import check as check_opened

        reader_options = select(self._options, ("python", "time_limit"))
        with self._watch.working(f"loading with {self._options['reader']}"), open_checkpoint(self.target) as written:
            return check_opened(written, self._options["reader"], **reader_options)

    def _read_back(self, prepared: Prepared) -> Verification:
        """Verify the result by reading it back; the source is opened with the same options as before."""
        from transaxle.engine.read_back import read_back

        opening: Mapping[str, Any] = self.opening
        if isinstance(self._src, Checkpoint):
            opening = self._src.reopening.options if self._src.reopening else {}
        return read_back(prepared, self.target, opening, self.limit, self._watch.progress)
