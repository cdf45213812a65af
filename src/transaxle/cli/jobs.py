"""`transaxle work` executes work items of a stored plan; `transaxle clean` removes files left by killed runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from transaxle.cli.command import Command, with_screen
from transaxle.cli.convert import print_report
from transaxle.cli.screen import Screen
from transaxle.engine.distribute.driver import begin_work, carry_out, commit_work, refuse_beyond
from transaxle.engine.distribute.executors import InProcess
from transaxle.engine.distribute.item_work import OpenPlan
from transaxle.engine.distribute.work_place import refuse_existing
from transaxle.engine.distribute.work_plan import WorkPlan, read_plan
from transaxle.engine.wording import duration, plural, size, speed
from transaxle.formats.store.leftovers import Leftover, clean_leftover, leftovers
from transaxle.move.journal import ItemResult


def _numbers(_ctx: click.Context, _param: click.Parameter, typed: str | None) -> tuple[int, ...] | None:
    """Parse numbers of work items, such as `7`, `0-99` or `3,7-9`."""
    if typed is None:
        return None
    numbers: dict[int, None] = {}
    for text in typed.split(","):
        first, dash, last = text.strip().partition("-")
        if not all(each.isascii() and each.isdigit() for each in ((first, last) if dash else (first,))):
            raise click.BadParameter(f"{typed!r} are not numbers of items; write for example 7, 0-99 or 3,7-9")
        if dash and int(last) < int(first):
            raise click.BadParameter(f"{text!r} ends before it begins")
        if int(last or first) >= 1 << 20:
            raise click.BadParameter(f"no plan has an item {last or first}")
        numbers.update(dict.fromkeys(range(int(first), int(last or first) + 1)))
    return tuple(numbers)


@click.command(
    "work",
    cls=Command,
    examples=(
        ("transaxle work PLAN --begin", "create the files, hidden beside the target"),
        ("transaxle work PLAN --items 0-99", "do items, in any number of processes and on any machines"),
        ("transaxle work PLAN --commit", "complete the target"),
    ),
    help="""Carry out a conversion in parts, by any number of processes.

    PLAN is the file that `transaxle plan --write PLAN` wrote. --begin creates the target's files in a hidden folder
    beside the target; --begin can be repeated, and keeps finished items. --items does some of the items of the plan in
    this process; many such processes can run at the same time, on all machines that have the source and the target's
    folder under the same paths. A finished item is not done again, and an item whose worker was killed is done by the
    next worker. --commit writes the index and the manifest, and gives the complete checkpoint its final name; --commit
    is refused if an item is missing, if a worker is still running, or if the source has changed since the plan was
    made. Without any of these options, this process does all items, one after the other, and commits.

    In a Slurm array:  sbatch --array=0-99 --wrap 'transaxle work PLAN --items $SLURM_ARRAY_TASK_ID'""",
)
@click.argument("plan", type=click.Path(readable=False))
@click.option("--begin", is_flag=True, help="Create the target's files, hidden beside it.")
@click.option(
    "--items", metavar="NUMBERS", callback=_numbers, help="Do these items, such as 7, 0-99 or 3,7-9; counted from 0."
)
@click.option("--commit", is_flag=True, help="Complete the target, when all items are done.")
@with_screen
def work_command(screen: Screen, plan: str, begin: bool, items: tuple[int, ...] | None, commit: bool) -> int:
    """Execute a stored plan completely, or only some of its work items."""
    if begin + commit + (items is not None) > 1:
        raise click.UsageError("--begin, --items and --commit are three steps; give one of them")
    work = read_plan(plan)
    if begin:
        return _begin(screen, plan, work)
    if items is not None:
        return _do_items(screen, work, items)
    screen.consequence = "the target is as it was"
    if commit:
        with screen.working("committing"):
            report = commit_work(work)
    else:
        refuse_existing(work)
        with OpenPlan(work) as opened:
            total = sum(tensor.nbytes for tensor in opened.prepared.plan.tensors)
            with screen.progress(total, stays=True) as progress:
                report = carry_out(work, opened.prepared, InProcess(), resume=True, progress=progress)
    if screen.as_json:
        screen.document(report.as_json())
    else:
        print_report(screen, report)
    return 0


def _begin(screen: Screen, path: str, work: WorkPlan) -> int:
    unfinished = begin_work(work)
    if screen.as_json:
        screen.document({"items": len(work.items), "left": unfinished})
    else:
        screen.line(f"{plural(unfinished, 'item')} of {len(work.items):,} left to do")
        screen.line(f"  transaxle work {path} --items 0-{len(work.items) - 1}")
    return 0


def _do_items(screen: Screen, work: WorkPlan, numbers: tuple[int, ...]) -> int:
    refuse_beyond(work, numbers)
    results: list[ItemResult] = []
    with OpenPlan(work) as opened, screen.progress(sum(work.items[each].nbytes for each in numbers)) as progress:
        for number in numbers:
            screen.consequence = f"item {number} is not done"
            results.append(opened.do(number))
            progress(work.items[number].nbytes)
    if screen.as_json:
        shown = ("number", "worker", "nbytes", "seconds")
        screen.document({"items": [{name: getattr(result, name) for name in shown} for result in results]})
        return 0
    for result in results:
        rate = f"{duration(result.seconds)} ({speed(result.nbytes, result.seconds)})"
        screen.line(f"item {result.number} · {size(result.nbytes)} · {rate} · {result.worker}")
    return 0


@click.command(
    "clean",
    cls=Command,
    examples=(
        ("transaxle clean out/", "leftovers of a killed conversion to out/"),
        ("transaxle clean checkpoints/", "leftovers beside and inside a folder of checkpoints"),
        ("transaxle clean checkpoints/ --yes", "remove them without asking"),
        ("transaxle clean s3://models/out", "incomplete uploads, and unfinished work"),
    ),
    help="""Remove files that killed runs left behind.

    A run that ends by SIGKILL, a power cut or a batch job's time limit leaves hidden folders beside its target:
    .NAME.transaxle-partial holds the unfinished work, and, where the file system cannot swap two names,
    .NAME.transaxle-old holds the checkpoint that was being replaced.

    The command lists these folders, asks, and removes them. If the old checkpoint was moved aside and the new one
    never took its place, the old one is put back. Folders that a live process is using are kept, and so are folders
    with files that belong to no checkpoint.

    On S3 it lists, and removes, the multipart uploads under a URL that were not completed, and the unfinished work of
    several workers beside it. S3 does not show whether a run is still using an upload; if so, that run will
    fail.

    Exit codes: 0 nothing is left; 1 something is left, because you answered no or because it was kept; 2 standard
    input is not a terminal and --yes is missing.""",
)
@click.argument("path", type=click.Path(readable=False))
@click.option("--yes", is_flag=True, help="Remove without asking.")
@with_screen
def clean_command(screen: Screen, path: str, yes: bool) -> int:
    """Remove files that killed runs left behind."""
    screen.consequence = "nothing was removed"
    listed = leftovers(path)
    todo = [leftover for leftover in listed if leftover.outcome == "found"]
    if not screen.as_json:
        for leftover in listed:
            _print(screen, leftover)
        if not listed:
            screen.line("found nothing left by killed runs here")
    if todo and not yes:
        if screen.as_json or not sys.stdin.isatty():
            raise click.UsageError(f"{plural(len(todo), 'leftover')} to be removed: confirm with --yes")
        screen.note(f"Remove {'it' if len(todo) == 1 else 'them'}? [y/N]")
        if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
            return 1
    cleaned = [clean_leftover(leftover) if leftover.outcome == "found" else leftover for leftover in listed]
    if screen.as_json:
        screen.document({"leftovers": [leftover.as_json() for leftover in cleaned]})
        return _code(cleaned)
    for before, after in zip(listed, cleaned, strict=True):
        if before.outcome != "kept":
            screen.line(f"{after.outcome}  {after.path}")
            if after.why:
                screen.line(f"      {after.why}")
    return _code(cleaned)


def _code(cleaned: Sequence[Leftover]) -> int:
    return 0 if all(leftover.outcome in {"removed", "put back"} for leftover in cleaned) else 1


def _print(screen: Screen, leftover: Leftover) -> None:
    screen.line((leftover.path, "bold"), f"  {size(leftover.nbytes)}")
    screen.line(f"      {leftover.what}")
    if leftover.why:
        screen.line(f"      kept: {leftover.why}")
