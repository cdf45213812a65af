"""`transaxle work`: does items of a plan that `transaxle plan --write` has stored."""

from __future__ import annotations

import click

from transaxle.cli.command import Command, printing
from transaxle.cli.commands.convert import print_report
from transaxle.cli.screen.screen import Screen
from transaxle.engine.distribute.driver import begin_work, carry_out, commit_work, refuse_beyond
from transaxle.engine.distribute.executors import Here
from transaxle.engine.distribute.item_work import OpenedPlan
from transaxle.engine.distribute.work_place import refuse_there
from transaxle.engine.distribute.work_plan import WorkPlan, read_plan
from transaxle.engine.wording import duration, plural, size, speed
from transaxle.move.journal import ItemResult


def _numbers(_ctx: click.Context, _param: click.Parameter, typed: str | None) -> tuple[int, ...] | None:
    """Parse numbers of items: `7`, `0-99`, `3,7-9`."""
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
        ("transaxle work PLAN --commit", "let the target appear"),
    ),
    help="""Carry out a conversion in parts, by any number of processes.

    PLAN is the file that `transaxle plan --write PLAN` wrote. --begin creates the target's files in a hidden folder
    beside it; it can be repeated, and keeps what is done. --items does some of the items, in this process; it can run
    many times at once, on all machines that have the source and the target's folder under the same paths. An item that
    is done is not done again, and an item whose worker was killed is done by the next one. --commit writes the index
    and the manifest, and moves the complete checkpoint to its place; it is refused where an item is missing, where a
    worker is still at work, or where the source has changed since the plan was made. Without any of them, everything is
    done here, one item after the other.

    In a Slurm array:  sbatch --array=0-99 --wrap 'transaxle work PLAN --items $SLURM_ARRAY_TASK_ID'""",
)
@click.argument("plan", type=click.Path(readable=False))
@click.option("--begin", is_flag=True, help="Create the target's files, hidden beside it.")
@click.option(
    "--items", metavar="NUMBERS", callback=_numbers, help="Do these items, such as 7, 0-99 or 3,7-9; counted from 0."
)
@click.option("--commit", is_flag=True, help="Let the target appear, when all items are done.")
@printing
def command(screen: Screen, plan: str, begin: bool, items: tuple[int, ...] | None, commit: bool) -> int:
    """Do a part of a plan, or all of it."""
    if begin + commit + (items is not None) > 1:
        raise click.UsageError("--begin, --items and --commit are three steps; give one of them")
    work = read_plan(plan)
    if begin:
        return _begun(screen, plan, work)
    if items is not None:
        return _done(screen, work, items)
    screen.consequence = "the target is as it was"
    if commit:
        with screen.working("committing"):
            report = commit_work(work)
    else:
        refuse_there(work)
        with OpenedPlan(work) as opened:
            total = sum(tensor.nbytes for tensor in opened.prepared.plan.tensors)
            with screen.progress(total, stays=True) as progress:
                report = carry_out(work, opened.prepared, Here(), resume=True, progress=progress)
    if screen.as_json:
        screen.document(report.as_json())
    else:
        print_report(screen, report)
    return 0


def _begun(screen: Screen, path: str, work: WorkPlan) -> int:
    left = begin_work(work)
    if screen.as_json:
        screen.document({"items": len(work.items), "left": left})
    else:
        screen.line(f"{plural(left, 'item')} of {len(work.items):,} left to do")
        screen.line(f"  transaxle work {path} --items 0-{len(work.items) - 1}")
    return 0


def _done(screen: Screen, work: WorkPlan, numbers: tuple[int, ...]) -> int:
    refuse_beyond(work, numbers)
    results: list[ItemResult] = []
    with OpenedPlan(work) as opened, screen.progress(sum(work.items[each].nbytes for each in numbers)) as progress:
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
