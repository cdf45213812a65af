"""`transaxle convert`: converts a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from transaxle.arguments import Overwrite
from transaxle.cli import options
from transaxle.cli.command import Command
from transaxle.cli.commands.plan import print_counted, print_notes, print_others
from transaxle.cli.screen.quantities import duration, plural, size, speed
from transaxle.cli.screen.recoded import print_measured, print_stayed
from transaxle.cli.screen.screen import Screen
from transaxle.engine.checkpoint.checkpoint import open_checkpoint
from transaxle.engine.execute.carry import Report
from transaxle.engine.execute.execute import execute
from transaxle.engine.execute.preflight import in_order, preflight
from transaxle.engine.plan.conversion import Prepared, make_plan, ready
from transaxle.engine.plan.planned import Plan
from transaxle.errors import TransaxleError
from transaxle.formats.staging.location import takes_parts
from transaxle.formats.storage.storage import unpinned
from transaxle.move.workers import Limits

if TYPE_CHECKING:
    from transaxle.engine.distribute.driver import Launch
    from transaxle.engine.distribute.work_plan import ConversionOrder


@click.command(
    "convert",
    cls=Command,
    examples=(
        ("transaxle convert Qwen3-30B-A3B/ out/ --to dcp:torchtitan", ""),
        ("transaxle convert out/ back/ --to hf --verify", "read the result back and compare"),
        ("transaxle convert Qwen3-30B-A3B/ out/ --to hf --shard-size 10GB", "change only the file sizes"),
        ("transaxle convert Qwen3-30B-A3B/ out/ --to megatron --resume", "continue after an interruption"),
        ("transaxle convert DeepSeek-V3/ out/ --to hf --decode bf16", "dequantize"),
        ("transaxle convert Qwen3-30B-A3B/ out/ --to hf --encode float8_block", "quantize"),
        ("transaxle convert run/step-100/ out/ --to hf --dtype bf16", "cast"),
        ("transaxle convert Qwen3-8B/ out/ --to hf --merge adapter/", "merge a LoRA adapter"),
    ),
    help="""Convert a checkpoint, exactly or not at all.

    SRC is a folder or a file; it is never changed. DST is a folder, or a single file if it ends in .safetensors, .pt,
    .pth or .bin. DST must not exist unless you give --overwrite or --resume, and it appears only when it is complete.
    Every reason against the conversion is listed before the first byte is written.

    Quantized tensors keep their codes and scales. --decode turns them into plain tensors, --encode quantizes plain
    ones, --dtype casts plain ones, and --merge adds the changes of a LoRA adapter to the weights. The report then lists
    every tensor whose values changed, with its largest and its RMS error. Finite values that would become infinite are
    refused; --allow-lossy allows them.

    --overwrite replaces a checkpoint and nothing else: if the folder at DST also holds files that belong to no
    checkpoint (notes, adapters, a repository), the conversion is refused and lists them. --overwrite=everything
    deletes them too.

    --resume keeps finished work if it is interrupted, and continues it. If there is nothing to continue it starts from
    the beginning. Unfinished work with other options or from another source is refused, and left as it is. Without
    --resume unfinished work beside DST is refused, too: `transaxle clean` removes it, or --overwrite.

    --report FILE writes an HTML page of what was done, or, if it is refused, of every reason against it.""",
)
@click.option(
    "--report", "page", metavar="FILE", type=click.Path(readable=False), help="Write an HTML page; FILE must not exist."
)
@options.converting
def command(
    screen: Screen,
    src: str,
    dst: str,
    to: str,
    page: str | None,
    on: str | None,
    items: int | None,
    overwrite: Overwrite,
    resume: bool,
    check: bool,
    no_sync: bool,
    source_options: dict[str, Any],
    limit: Limits,
    **shaping: Any,
) -> int:
    """Convert a checkpoint."""
    if items is not None and on is None:
        raise click.UsageError("--items needs --on: nothing else is divided")
    screen.consequence = "nothing was written"
    shown = _shown(page, on)
    work = None
    if on is not None:
        from transaxle.engine.distribute.driver import Launch, is_lead, is_torchrun
        from transaxle.engine.distribute.work_plan import order

        how = Launch(on=on, items=items, overwrite=overwrite, resume=resume, sync=not no_sync)
        how = replace(how, jobs=options.said("jobs"), memory=options.said("memory"))
        work = order(src, dst, to, source_options, shaping), how
        if is_torchrun(on):
            report = _together(screen, *work)
            if not is_lead():
                return 0  # the first rank speaks for all
            if check:
                with work[0].planned() as prepared:
                    report = _verified(screen, prepared, report, dst, source_options, limit)
            return _told(screen, report)
    with in_order(src, dst), open_checkpoint(src, **source_options) as source:
        with screen.working("planning"):
            prepared = make_plan(source, to, target=dst, **shaping)
            if work is None:
                prepared = preflight(prepared, dst, overwrite=overwrite, resume=resume, running=True, limit=limit)
                _refused(prepared, shown)
                ready(prepared)
        if resume:
            screen.way_on = "run the same command again to continue"
        if work is not None:
            from transaxle.engine.distribute.driver import convert_on

            with screen.workers() as watch:
                report = convert_on(work[0], prepared, replace(work[1], watch=watch))
        else:
            with screen.progress(sum(tensor.nbytes for tensor in prepared.plan.tensors), stays=True) as progress:
                written: dict[str, Any] = {"overwrite": overwrite, "resume": resume, "sync": not no_sync}
                report = _carried_out(prepared, dst, {**written, "limit": limit, "progress": progress}, shown)
        if check:
            report = _verified(screen, prepared, report, dst, source_options, limit)
        if shown is not None:
            screen.consequence, screen.way_on = f"{dst} is written, but not its report", ""
            shown.write(prepared.plan, report)
        return _told(screen, report, page)


def _carried_out(prepared: Prepared, dst: str, how: Mapping[str, Any], shown: _Shown | None) -> Report:
    """Carry a plan out in this process; only whole files have times."""
    if takes_parts(dst):
        from transaxle.engine.distribute.driver import convert_in_parts

        return convert_in_parts(prepared, dst, **how)
    return execute(prepared, dst, **how, times=None if shown is None else shown.times)


def _shown(page: str | None, on: str | None) -> _Shown | None:
    """Return the page that the user asked for, if there is one."""
    if page is not None and on is not None:
        raise click.UsageError("--report is for a conversion in this process: not with --on")
    return None if page is None else _Shown(page)


def _refused(prepared: Prepared, shown: _Shown | None) -> None:
    """Write the page of a plan that is refused."""
    if shown is not None and prepared.plan.refusals:
        shown.write(prepared.plan)


class _Shown:
    """The page that the user asked for.

    Args:
        path: the file to write.

    Raises:
        TransaxleError: EXISTS for a file that is there; UNSUPPORTED for a URL, and without Jinja2.
    """

    def __init__(self, path: str) -> None:
        from transaxle.engine.execute.execute import FileTimes
        from transaxle.reports.html_page import check_destination, check_jinja

        check_jinja()
        check_destination(path, overwrite=None)
        self.times = FileTimes()
        self._path = path

    def write(self, plan: Plan, report: Report | None = None) -> None:
        """Write the page of a plan, or of what was done."""
        from transaxle.reports.conversion_page import conversion_page
        from transaxle.reports.finished_page import Finished
        from transaxle.reports.html_page import as_html, write_page

        done = None if report is None else Finished(report, self.times.files)
        write_page(as_html(conversion_page(plan, done)), self._path, overwrite=False)


def _together(screen: Screen, asked: ConversionOrder, how: Launch) -> Report:
    """Convert by the ranks of a job; those that are not the first leave it to that one to say what they all raise."""
    from transaxle.engine.distribute.driver import is_lead
    from transaxle.live.conversion.torchrun import convert_together
    from transaxle.live.transport.world import is_loss

    try:
        if how.resume:
            screen.way_on = "run the same command again to continue"
        with screen.workers() as watch:
            return convert_together(asked, replace(how, watch=watch) if is_lead() else how)
    except TransaxleError as error:
        if is_lead() or is_loss(error):
            raise
        raise click.exceptions.Exit(error.exit_code) from None


def _told(screen: Screen, report: Report, page: str | None = None) -> int:
    """Print what was done, and the file that shows it; return the exit code."""
    found = report.verification
    code = 0 if found is None or found.ok else 1
    if screen.as_json:
        screen.document(report.as_json())
        return code
    for note in report.leftovers:
        screen.note(note)
    print_report(screen, report)
    if found is not None:
        from transaxle.cli.commands.verify import print_comparison, print_verification

        print_verification(screen, found)
        if found.comparison is not None:
            print_comparison(screen, found.comparison)
    if page is not None:
        screen.line(f"  shown in {page}")
    return code


def _verified(
    screen: Screen,
    prepared: Prepared,
    report: Report,
    dst: str,
    reading: Mapping[str, Any],
    limit: Limits,
) -> Report:
    """Read the result back; return the report with what came out."""
    from transaxle.engine.execute.read_back import read_back

    screen.consequence, screen.way_on = f"{dst} is written, but not verified", ""
    return replace(report, verification=read_back(prepared, dst, reading, limit, screen.progress))


def print_report(screen: Screen, report: Report) -> None:
    """Print what is said of a conversion that is done."""
    if unpinned(report.source) != report.source:
        screen.line(f"read {report.source}")
    parts = [
        report.path,
        report.format,
        report.dialect,
        plural(report.tensors, "tensor"),
        size(report.bytes_written),
    ]
    if report.resumed < report.tensors or not report.tensors:
        rate = speed(report.bytes_written, report.seconds)
        parts += [f"{duration(report.seconds)} ({rate})", "hashed while written (xxh3-128)"]
    screen.line((" · ".join(parts), "bold"))
    if report.resumed:
        screen.line(f"  {plural(report.resumed, 'tensor')} had been written by an earlier run")
    if report.workers:
        print_workers(screen, report.workers)
    if report.checks:
        screen.line(f"  {plural(report.checks, 'copy', 'copies')} proved equal")
    print_measured(screen, report.recoded)
    print_stayed(screen, report.stayed)
    print_counted(screen, report.counted)
    print_others(screen, report.kept, report.ignored, report.carried)
    print_notes(screen, report.notes)
    if not report.synced:
        screen.line("  not synced (--no-sync): a power cut in the next minutes may damage the checkpoint")


def print_workers(screen: Screen, workers: Mapping[str, int]) -> None:
    """Print who wrote how much: by machine where there are several, and otherwise, or where all is asked for, each."""
    from transaxle.engine.distribute.driver import node_of

    nodes: dict[str, list[int]] = {}
    for worker, written in workers.items():
        nodes.setdefault(node_of(worker), []).append(written)
    label = f"  written by {plural(len(workers), 'process', 'processes')}"
    if len(nodes) > 1:
        rows = [
            f"{node} {size(sum(shares))} by {plural(len(shares), 'process', 'processes')}"
            for node, shares in nodes.items()
        ]
        screen.some(f"{label} on {plural(len(nodes), 'machine')}", rows)
        if not screen.everything:
            return
        label = "  each process"
    screen.some(label, [f"{worker} {size(written)}" for worker, written in workers.items()])
