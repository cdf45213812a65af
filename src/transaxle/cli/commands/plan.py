"""`transaxle plan`: shows what a conversion would do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
from click.core import ParameterSource

from transaxle import verbs
from transaxle.cli.command import Command, Seldom, deriving, options_of, printing, profiling
from transaxle.cli.commands.convert import print_counted, print_notes, print_others, print_recoded, print_stayed
from transaxle.cli.screen.refusals import error_document, print_refusals
from transaxle.cli.screen.screen import Screen
from transaxle.engine.checkpoint.settings import settings
from transaxle.engine.execute import Cleared
from transaxle.engine.moves import UNCHANGED, rules, words
from transaxle.engine.plan.planned import Plan
from transaxle.engine.wording import percent, plural, size
from transaxle.errors import gathered
from transaxle.move.workers import Limits, limits
from transaxle.options import select

_GAP = "  "
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
@click.option("--same-ranks", "together", cls=Seldom, is_flag=True, help="With --mesh: both are on the same ranks.")
@click.option(
    "--ranks-per-node",
    cls=Seldom,
    metavar="N",
    type=click.IntRange(1, 1 << 20),
    help="With --mesh: tell what is sent inside machines of so many ranks, and between them.",
)
@click.argument("src", type=click.Path(readable=False))
@click.argument("dst", type=click.Path(readable=False))
@options_of("plan")
@profiling
@printing
@deriving
def command(
    screen: Screen,
    src: str,
    dst: str,
    options: dict[str, Any],
    meshes: tuple[str, ...],
    together: bool,
    ranks_per_node: int | None,
) -> int:
    """Plan a conversion, or a refit."""
    context = click.get_current_context()
    if meshes or together or ranks_per_node:
        return _plan_refit(screen, context, (src, dst), options, (meshes, together, ranks_per_node))
    if options["to"] is None:
        raise click.MissingParameter(
            ctx=context, param=next(each for each in context.command.params if each.name == "to")
        )
    plans: list[Cleared] = []
    screen.on_planned = plans.append
    verbs.plan(src, dst, watch=screen, **options)
    return _show(screen, plans[0], dst, options)


def _show(screen: Screen, prepared: Cleared, dst: str, options: Mapping[str, Any]) -> int:
    """Print a plan.

    Args:
        screen: where it is printed.
        prepared: what is planned.
        dst: the target, as typed.
        options: those of the verb.
    """
    plan, limit = prepared.plan, limits(options["jobs"], options["memory"])
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
        if (path := options["write"]) is not None and error is None:
            screen.line(f"  written into {path}: next  transaxle work {path} --begin")
        if options["report"] is not None:
            screen.line(f"  shown in {options['report']}")
        if prepared.finished:
            screen.line(f"  {dst} already holds exactly this: nothing is left to do")
        if error is not None:
            print_refusals(screen, "  the conversion would be refused", error.refusals, screen.line)
    return 0 if error is None else error.exit_code


# `--to` is left out where a refit is planned.
next(each for each in command.params if each.name == "to").required = False


def _plan_refit(
    screen: Screen,
    context: click.Context,
    dialects: tuple[str, str],
    options: Mapping[str, Any],
    refit: tuple[tuple[str, ...], bool, int | None],
) -> int:
    """Tell what a refit would send.

    Args:
        screen: where it is told.
        context: of the command.
        dialects: of both sides.
        options: those of the verb.
        refit: meshes, whether they are of the same ranks, and the ranks of a machine.
    """
    # No other command waits for these, of which some import this module.
    from transaxle.cli.screen.traffic_table import print_traffic
    from transaxle.engine.traffic import planned_traffic, read_mesh

    typed = {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    others = [option.opts[0] for option in context.command.params if option.name in typed - _OF_REFIT]
    if others:
        raise click.UsageError(f"{', '.join(others)}: not with --mesh, which plans a refit")
    meshes, together, ranks_per_node = refit
    if len(meshes) != 2:
        raise click.UsageError("a refit has two meshes: --mesh of the trainer, and --mesh of the engine")
    if options["config"] is None:
        raise click.UsageError("a refit is planned from a config.json: --config FILE")
    model = settings(**select(options, ("family", "config", "axes", "rules")))
    with screen.working("planning"):
        sides = read_mesh(dialects[0], meshes[0]), read_mesh(dialects[1], meshes[1])
        traffic = planned_traffic(model, sides, dtype=options["dtype"], together=together)
    if screen.as_json:
        screen.document(traffic.as_json(ranks_per_node))
    else:
        print_traffic(screen, traffic, ranks_per_node)
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
