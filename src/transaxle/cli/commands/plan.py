"""`transaxle plan`: shows what a conversion would do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click
from click.core import ParameterSource

from transaxle.arguments import Overwrite
from transaxle.axes.notation.name import natural
from transaxle.cli import options
from transaxle.cli.command import Command
from transaxle.cli.screen.quantities import percent, plural, size
from transaxle.cli.screen.recoded import print_recoded, print_stayed
from transaxle.cli.screen.refusals import error_document, print_refusals
from transaxle.cli.screen.screen import Screen
from transaxle.engine.checkpoint.checkpoint import open_checkpoint
from transaxle.engine.checkpoint.settings import settings
from transaxle.engine.execute.preflight import Cleared, in_order, preflight
from transaxle.engine.facts.moves import UNCHANGED, rules, words
from transaxle.engine.fold import fold
from transaxle.engine.plan.conversion import make_plan
from transaxle.engine.plan.model_config import NO_CONFIG
from transaxle.engine.plan.planned import Plan
from transaxle.errors import gathered
from transaxle.formats.training_state.state import OPTIMIZER
from transaxle.move.workers import Limits

_GAP = "  "
_EXTRA = "._extra_state"
"""End of the names under which Megatron's modules save what is no tensor."""
_OF_REFIT = frozenset({
    "src", "dst", "meshes", "together", "ranks_per_node", "config", "family", "axes", "rules", "dtype", "as_json",
    "everything", "quiet", "verbose",
})  # fmt: skip
"""Parameters that planning a refit takes."""


@click.command(
    "plan",
    cls=Command,
    examples=(
        ("transaxle plan Qwen3-30B-A3B/ out/ --to dcp:torchtitan", ""),
        ("transaxle plan my-moe/ out/ --to safetensors:joined --rules my.rules", "use a table of your own"),
        ("transaxle plan Qwen3-30B-A3B/ out/ --to hf --json", "print every tensor and every number"),
        ("transaxle plan hf vllm --mesh fsdp=64,ep=8 --mesh tp=8 --config Kimi-K2/", "plan a refit"),
        ("transaxle plan Qwen3-30B-A3B/ out/ --to hf --items 100 --write PLAN", "divide it for `transaxle work`"),
    ),
    help="""Show what a conversion would do, without writing anything.

    Prints, rule by rule, which axes move between names and shapes, how many bytes are read and written, and every
    reason against the conversion: in the tensors, in the files of SRC, and at DST. Takes the options of convert. Exits
    with 0 if the conversion can run, and otherwise with the exit code that convert would return.

    --report FILE also writes the plan as an HTML page to look at in a browser: what becomes what, and how axes move.

    --write PLAN also writes the plan into a file, divided into items, which any number of processes carry out: see
    `transaxle work --help`. They read SRC and write DST under the paths that these have here.

    With --mesh, twice, it tells instead how many bytes a refit of live weights (`tx.Refit`) would send between which
    ranks, from a config.json alone: SRC is then the dialect of the trainer, DST that of the engine, and --to is left
    out. A mesh of a trainer has the dims replicate, pp, fsdp, ep, tp, outermost first as you write them (expert_dim=1:
    FSDP divides experts along dim 1); that of vllm has replicas, dp, pp, tp, and ep=N where its ranks share out the
    experts.""",
)
@click.option(
    "--mesh",
    "meshes",
    metavar="DIM=SIZE,…",
    multiple=True,
    help="Plan a refit: the trainer's mesh, then, given again, the engine's.",
)
@click.option("--same-ranks", "together", is_flag=True, help="With --mesh: both are on the same ranks.")
@click.option(
    "--ranks-per-node",
    metavar="N",
    type=click.IntRange(1, 1 << 20),
    help="With --mesh: tell what is sent inside machines of so many ranks, and between them.",
)
@click.option(
    "--write", "path", metavar="PLAN", type=click.Path(readable=False), help="Write the plan into a file, for `work`."
)
@click.option(
    "--report",
    metavar="FILE",
    type=click.Path(readable=False),
    help="Write the plan as an HTML page; FILE must not exist.",
)
@options.converting
def command(
    screen: Screen,
    src: str,
    dst: str,
    to: str,
    path: str | None,
    report: str | None,
    on: str | None,
    items: int | None,
    overwrite: Overwrite,
    resume: bool,
    check: bool,  # noqa: ARG001 - changes nothing of the plan
    no_sync: bool,
    source_options: dict[str, Any],
    limit: Limits,
    **shaping: Any,
) -> int:
    """Plan a conversion, or a refit."""
    context = click.get_current_context()
    refit = {name: shaping.pop(name) for name in ("meshes", "together", "ranks_per_node")}
    if any(refit.values()):
        return _plan_refit(screen, context, (src, dst), source_options, refit)
    if to is None:
        raise click.MissingParameter(
            ctx=context, param=next(each for each in context.command.params if each.name == "to")
        )
    if items is not None and path is None and on is None:
        raise click.UsageError("--items needs --write or --on: nothing else is divided")
    if report is not None:
        from transaxle.reports.html_page import check_destination

        check_destination(report, overwrite=None)
    stored = None
    if path is not None or on is not None:
        from transaxle.engine.distribute.work_plan import order

        stored = order(src, dst, to, source_options, shaping)
    with in_order(src, dst), open_checkpoint(src, **source_options) as checkpoint, screen.working("planning"):
        planned = make_plan(checkpoint, to, target=dst, **shaping)
        several = stored is not None
        prepared = preflight(planned, dst, overwrite=overwrite, resume=resume, several=several, limit=limit)
        plan = prepared.plan
        if path is not None and stored is not None and not plan.refusals:
            from transaxle.engine.distribute.work_plan import work_plan, write_plan

            how: dict[str, Any] = {"overwrite": overwrite, "sync": not no_sync, "jobs": options.said("jobs")}
            write_plan(work_plan(stored, prepared, items, memory=options.said("memory"), **how), path)
        if report is not None:
            from transaxle.reports.reporting import report as write_report

            write_report(plan, report)
    return _show(screen, prepared, dst, limit, {"work": path, "report": report})


def _show(screen: Screen, prepared: Cleared, dst: str, limit: Limits, files: Mapping[str, str | None]) -> int:
    """Print a plan.

    Args:
        screen: where it is printed.
        prepared: what is planned.
        dst: the target, as typed.
        limit: workers and memory.
        files: what was written of the plan: `work` for workers, `report` for people.
    """
    plan = prepared.plan
    error = gathered(plan.refusals) if plan.refusals else None
    if screen.as_json:
        shown = {
            "target": dst,
            "finished": prepared.finished,
            **plan.as_json(copies=False),
            "buffers": limit.holding(plan.band).peak,
        }
        screen.document(shown if error is None else {**error_document(error), **shown})
    else:
        _print(screen, plan, limit)
        if files["work"] is not None and error is None:
            screen.line(f"  written into {files['work']}: next  transaxle work {files['work']} --begin")
        if files["report"] is not None:
            screen.line(f"  shown in {files['report']}")
        if prepared.finished:
            screen.line(f"  {dst} already holds exactly this: nothing is left to do")
        if error is not None:
            print_refusals(screen, "  the conversion would be refused", error.refusals, screen.line)
    return 0 if error is None else error.exit_code


# `--to` is left out where a refit is planned.
next(each for each in command.params if each.name == "to").required = False


def _plan_refit(
    screen: Screen, context: click.Context, dialects: tuple[str, str], said: dict[str, Any], refit: dict[str, Any]
) -> int:
    """Tell what a refit would send.

    Args:
        screen: where it is told.
        context: of the command.
        dialects: of both sides.
        said: how a checkpoint would be read.
        refit: the options of a refit.
    """
    # No other command waits for these, of which some import this module.
    from transaxle.cli.screen.traffic_table import print_traffic
    from transaxle.engine.capacity.pair_traffic import planned_traffic
    from transaxle.engine.capacity.rank_meshes import read_mesh

    typed = {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    others = [option.opts[0] for option in context.command.params if option.name in typed - _OF_REFIT]
    if others:
        raise click.UsageError(f"{', '.join(others)}: not with --mesh, which plans a refit")
    if len(refit["meshes"]) != 2:
        raise click.UsageError("a refit has two meshes: --mesh of the trainer, and --mesh of the engine")
    if said.get("config") is None:
        raise click.UsageError("a refit is planned from a config.json: --config FILE")
    given = settings(**{name: said[name] for name in ("family", "config", "axes", "rules") if name in said})
    with screen.working("planning"):
        meshes = read_mesh(dialects[0], refit["meshes"][0]), read_mesh(dialects[1], refit["meshes"][1])
        found = planned_traffic(given, meshes, dtype=said.get("dtype"), together=refit["together"])
    if screen.as_json:
        screen.document(found.as_json(refit["ranks_per_node"]))
    else:
        print_traffic(screen, found, refit["ranks_per_node"])
    return 0


def _print(screen: Screen, plan: Plan, limit: Limits) -> None:
    before = f"{plan.source_format}:{plan.from_dialect or 'own names'}"
    head = [plan.family or "", f"{before} -> {plan.format}:{plan.dialect}"]
    screen.line((" · ".join(text for text in head if text), "bold"))
    _print_routes(screen, plan)
    print_stayed(screen, plan.stayed)
    print_counted(screen, plan.counted)
    print_others(screen, plan.kept, plan.ignored, plan.carried)
    print_notes(screen, plan.notes)
    print_recoded(screen, plan.recoded)
    if plan.aliases:
        screen.line(f"  tied: {', '.join(f'{name} = {of}' for name, of in plan.aliases.items())}")
    if plan.compared:
        screen.line(f"  {plural(plan.compared, 'copy', 'copies')} will be checked for equality first")
    amount = [
        f"read {size(plan.bytes_read)}",
        f"write {size(plan.bytes_written)} in {plural(len(plan.files), 'file')}",
        f"{plural(plan.copies, 'copy', 'copies')}, {percent(plan.contiguous, plan.copies)} contiguous",
        f"peak memory {size(limit.holding(plan.band).peak)} of buffers",
    ]
    screen.line(_GAP + _GAP.join(amount if plan.refusals else [*amount, "nothing refused"]))


def _print_routes(screen: Screen, plan: Plan) -> None:
    """Print one row per rule; rules that move nothing are only counted."""
    moving = [(route, words(route, plan.axes)) for route in plan.routes]
    unchanged = [route.component for route, movement in moving if movement == UNCHANGED]
    moving = [(route, movement) for route, movement in moving if movement != UNCHANGED]
    moving.sort(key=lambda item: " " not in item[1] and item[1] == "renamed")
    if moving:
        widths = [
            max(len(cell) for cell in column) for column in zip(*((r.component, w) for r, w in moving), strict=True)
        ]
        for route, movement in moving:
            lead = f"  {route.component.ljust(widths[0])}  {movement.ljust(widths[1])}  "
            sources, target = rules(route)
            one_line = f"{lead}{' + '.join(sources) or '(tied)'} -> {target}"
            if screen.width is None or len(one_line) <= screen.width:
                screen.line(one_line)
                continue
            screen.line(lead.rstrip())
            for source in sources:
                screen.line(f"      {source}")
            screen.line(f"   -> {target}")
    if unchanged:
        screen.line(f"  {plural(len(unchanged), 'rule')} unchanged: {', '.join(unchanged)}")
    if not plan.routes and plan.tensors:
        screen.line(f"  {plural(len(plan.tensors), 'tensor')} with names and shapes unchanged")


def print_counted(screen: Screen, counted: Mapping[str, int]) -> None:
    """Print the axis sizes that only the names show, because no config states them."""
    for axis, count in counted.items():
        screen.line(
            f"  size of {axis} unknown: counted {count} from the names (with --axis {axis}=N or --config FILE a "
            "missing one is noticed)"
        )


def print_others(screen: Screen, kept: tuple[str, ...], ignored: tuple[str, ...], carried: tuple[str, ...]) -> None:
    """Print what is not converted: tensors that keep their names, and files that are copied or left behind."""
    if kept:
        count = plural(len(kept), "tensor")
        screen.some(
            f"  {count} without a line in the target dialect, names unchanged (--strict refuses them)",
            list(folded(kept)),
        )
    state = () if screen.everything else tuple(name for name in ignored if name.startswith(OPTIMIZER))
    if state:
        count = plural(len(state), "entry", "entries")
        screen.line(f"  left behind: state of the optimizer, {count} (--all lists them)")
    extra = () if screen.everything else tuple(name for name in ignored if name.endswith(_EXTRA))
    if extra:
        screen.line(f"  left behind: {_EXTRA[1:]} of {plural(len(extra), 'module')} (--all lists them)")
    if others := tuple(sorted({*ignored}.difference(state, extra))):
        screen.some("  left behind", list(folded(others)))
    if carried:
        shown = ", ".join(carried) if screen.everything or len(carried) <= 8 else f"{', '.join(carried[:8])} …"
        screen.line(f"  carried along: {shown}")


def print_notes(screen: Screen, notes: tuple[str, ...]) -> None:
    """Print what programs that go on with the target must be told."""
    for note in notes:
        if note.startswith(NO_CONFIG):  # the target does not serve its purpose as it is
            screen.note(f"warning: {note}")
        else:
            screen.line(f"  note: {note}")


def folded(names: tuple[str, ...]) -> Iterator[str]:
    """Yield names, folded into few rows."""
    for row in fold(sorted(names, key=natural)):
        yield f"{row.name}  {row.times}".rstrip()
