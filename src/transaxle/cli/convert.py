"""`transaxle convert` converts a checkpoint; `transaxle plan` shows what a conversion would do, or a refit (sending
live weights to an inference engine); `transaxle supports` says from a config alone whether a conversion works.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from click.core import ParameterSource

from transaxle import verbs
from transaxle.axes.notation.name import natural
from transaxle.cli.command import (
    Command,
    Seldom,
    complete_with,
    options_of,
    targets,
    with_derive,
    with_profile,
    with_screen,
)
from transaxle.cli.refusals import error_document, print_refusals
from transaxle.cli.screen import Screen
from transaxle.encodings.value_steps import MeasuredTensor, RecodedTensor
from transaxle.engine.carry import Report
from transaxle.engine.checkpoint.settings import settings
from transaxle.engine.checkpoint.source_hashes import UNCHECKED
from transaxle.engine.execute import CheckedPlan
from transaxle.engine.moves import UNCHANGED, rules, words
from transaxle.engine.plan.planned import Plan
from transaxle.engine.plan.recoding import NO_CONFIG
from transaxle.engine.support import HUB
from transaxle.engine.wording import duration, fold, fold_to_text, parameters, percent, plural, size, speed
from transaxle.errors import TransaxleError, gathered
from transaxle.formats.storage.storage import without_commit
from transaxle.formats.training_state import OPTIMIZER
from transaxle.move.workers import Limits, limits
from transaxle.options import select

if TYPE_CHECKING:
    from transaxle.engine.traffic import Matrix, Traffic


def _describe_change(recoded: RecodedTensor) -> str:
    """Describe how a conversion changes a tensor's values: by averaging, merging, casting, or a different number
    format.
    """
    if recoded.action == "averaged":
        return f"replicas that differ, {recoded.dtype}"
    if recoded.action == "merged":
        return f"with the adapter, {recoded.dtype}"
    if recoded.action == "cast":
        return f"{recoded.encoding} -> {recoded.dtype}"
    encoded = f"{recoded.encoding} ({recoded.convention})"
    before, after = (encoded, recoded.dtype) if recoded.action == "decoded" else (recoded.dtype, encoded)
    return f"{before} -> {after}"


def print_recoded(screen: Screen, recoded: Sequence[RecodedTensor]) -> None:
    """Print which tensors a plan decodes, encodes, casts, merges or averages."""
    by_name = sorted(recoded, key=lambda tensor: natural(tensor.name))
    rows = fold((tensor.name for tensor in by_name), ((tensor.action, _describe_change(tensor)) for tensor in by_name))
    for (action, change), count in _counts(by_name).items():
        matching_rows = [f"{row.name}  {row.times}".rstrip() for row in rows if row.key == (action, change)]
        screen.some(f"  {plural(count, 'tensor')} will be {action}, {change}", matching_rows)


def print_measured(screen: Screen, measured: Sequence[MeasuredTensor]) -> None:
    """Print which tensors' values have changed, and by how much."""
    ordered = sorted(measured, key=lambda item: natural(item.what.name))
    for (action, change), count in _counts([item.what for item in ordered]).items():
        items_by_name = {
            item.what.name: item
            for item in ordered
            if (item.what.action, _describe_change(item.what)) == (action, change)
        }
        exact = sum(item.error.exact for item in items_by_name.values())
        rows = fold(items_by_name, (item.error.exact for item in items_by_name.values()))
        widths = [max(map(len, column)) for column in zip(*((row.name, row.times) for row in rows), strict=True)]
        errors = [_largest_errors([items_by_name[name] for name in row.names]) for row in rows]
        listed = [
            f"{row.name.ljust(widths[0])}  {row.times.ljust(widths[1])}  {error}"
            for row, error in zip(rows, errors, strict=True)
        ]
        screen.some(f"  {plural(count, 'tensor')} {action}, {change}; {exact:,} exactly", listed)


def _largest_errors(measured: Sequence[MeasuredTensor]) -> str:
    """Describe the largest changes of values among the given tensors."""
    if all(measurement.error.exact for measurement in measured):
        return "exact"
    largest, rms = (
        max(measurement.error.max for measurement in measured),
        max(measurement.error.rms for measurement in measured),
    )
    infinite = sum(measurement.infinite for measurement in measured)
    return f"max |Δ| {largest:.1e}, RMS {rms:.1e}" + (
        f", {infinite:,} finite values became infinite" if infinite else ""
    )


def print_grafted(screen: Screen, grafted: Mapping[str, str], files: Mapping[str, str]) -> None:
    """Print the names of the tensors and files that come from another checkpoint than the source."""
    for base in dict.fromkeys(grafted.values()):
        screen.some(f"  grafted from {base}: {plural(len(grafted), 'tensor')}", list(fold_to_text(tuple(grafted))))
    for base in dict.fromkeys(files.values()):
        screen.line(f"  files of {base}: {', '.join(files)}")


def print_stayed(screen: Screen, stayed: tuple[str, ...]) -> None:
    """Print the names of plain tensors that keep their dtype although other tensors are cast."""
    if stayed:
        rows = [f"{row.name}  {row.times}".rstrip() for row in fold(sorted(stayed, key=natural))]
        screen.some(f"  {plural(len(stayed), 'plain tensor')} not cast (--only PATTERN chooses what is)", rows)


def _counts(recoded: Sequence[RecodedTensor]) -> dict[tuple[str, str], int]:
    counts: dict[tuple[str, str], int] = {}
    for tensor in recoded:
        key = tensor.action, _describe_change(tensor)
        counts[key] = counts.get(key, 0) + 1
    return counts


def print_counted(screen: Screen, counted: Mapping[str, int]) -> None:
    """Print the axis sizes that were counted from tensor names because no config states the sizes."""
    for axis, count in counted.items():
        screen.line(
            f"  size of {axis} unknown: counted {count} from the names (with --axis {axis}=N or --config FILE a "
            "missing one is noticed)"
        )


def print_others(
    screen: Screen, unconverted: tuple[str, ...], ignored: tuple[str, ...], carried: tuple[str, ...]
) -> None:
    """Print three lists: tensors that keep their names, checkpoint entries that are not converted, and files that are
    copied.
    """
    if unconverted:
        count = plural(len(unconverted), "tensor")
        screen.some(
            f"  {count} without a line in the target dialect, names unchanged (--strict refuses them)",
            list(fold_to_text(unconverted)),
        )
    state = () if screen.everything else tuple(name for name in ignored if name.startswith(OPTIMIZER))
    if state:
        count = plural(len(state), "entry", "entries")
        screen.line(f"  left behind: state of the optimizer, {count} (--all lists them)")
    extra = () if screen.everything else tuple(name for name in ignored if name.endswith(_EXTRA))
    if extra:
        screen.line(f"  left behind: {_EXTRA[1:]} of {plural(len(extra), 'module')} (--all lists them)")
    if left_behind := tuple(sorted({*ignored}.difference(state, extra))):
        screen.some("  left behind", list(fold_to_text(left_behind)))
    if carried:
        shown = ", ".join(carried) if screen.everything or len(carried) <= 8 else f"{', '.join(carried[:8])} …"
        screen.line(f"  carried along: {shown}")


def print_notes(screen: Screen, notes: tuple[str, ...]) -> None:
    """Print the plan's notes for users of the target checkpoint."""
    for note in notes:
        if note.startswith(NO_CONFIG):  # a warning, because such a target cannot be loaded
            screen.note(f"warning: {note}")
        else:
            screen.line(f"  note: {note}")


_EXTRA = "._extra_state"
"""Suffix of the names under which Megatron's modules save state that is not a tensor."""


@click.command(
    "convert",
    cls=Command,
    examples=(
        ("transaxle convert Qwen3-30B-A3B/ out/ --to dcp:torchtitan", ""),
        ("transaxle convert out/ back/ --to hf --verify", "read the result back and compare"),
        ("transaxle convert out/ back/ --to hf --for transformers", "check that it loads there"),
        ("transaxle convert Qwen3-30B-A3B/ out/ --to hf --shard-size 10GB", "change only the file sizes"),
        ("transaxle convert Qwen3-30B-A3B/ out/ --to megatron --resume", "continue after an interruption"),
        ("transaxle convert DeepSeek-V3/ out/ --to hf --decode bf16", "dequantize"),
        ("transaxle convert Qwen3-30B-A3B/ out/ --to hf --encode float8_block", "quantize"),
        ("transaxle convert Llama-NVFP4/ out/ --to hf --restate modelopt", "the same values for other programs"),
        ("transaxle convert run/step-100/ out/ --to hf --dtype bf16", "cast"),
        ("transaxle convert Qwen3-8B/ out/ --to hf --merge adapter/", "merge a LoRA adapter"),
        ("transaxle convert run/step-100/ out/ --to hf --graft GLM-4.5/", "take the layers that training dropped"),
    ),
    help="""Convert a checkpoint, exactly or not at all.

    SRC is a folder or a file; it is never changed. DST is a folder, or a single file if it ends in .safetensors, .pt,
    .pth or .bin. DST must not exist unless you give --overwrite or --resume, and it appears only when it is complete.
    Every reason against the conversion is listed before the first byte is written.

    Quantized tensors keep their codes and scales. --decode turns quantized tensors into plain tensors, --encode
    quantizes plain tensors, --restate stores quantized tensors in a different convention or encoding with the same
    values, --dtype casts plain tensors, and --merge adds the changes of a LoRA adapter to the weights. --graft takes
    the tensors that SRC lacks from another checkpoint of the model.
    The report then lists every tensor whose values changed, with its largest and its RMS error. Finite values that
    would become infinite are refused unless you give --allow-lossy.

    --overwrite replaces a checkpoint and nothing else: if the folder at DST also holds files that belong to no
    checkpoint (notes, adapters, a repository), the conversion is refused, and the error lists these files.
    --overwrite=everything deletes such files too.

    With --resume, an interrupted conversion keeps its finished work, and the same command continues the conversion. If
    there is no unfinished work, the conversion starts from the beginning. Unfinished work of a conversion with
    different options or a different source is refused, and left unchanged. Without --resume, unfinished work beside DST
    is refused too; `transaxle clean` or --overwrite removes such work.

    --report FILE writes an HTML page about the conversion or, if the conversion is refused, about every reason against
    it.""",
)
@click.argument("src", type=click.Path(readable=False))
@click.argument("dst", type=click.Path(readable=False))
@options_of("convert")
@with_profile
@with_screen
@with_derive
def convert_command(screen: Screen, src: str, dst: str, options: dict[str, Any]) -> int:
    """Convert a checkpoint to another layout or format."""
    with _print_once(together := options["on"] == "torchrun"):
        try:
            report = verbs.convert(src, dst, watch=screen, **options)
        except verbs.Unverified as error:
            report = error.report
    if together:
        from transaxle.engine.distribute.driver import is_lead

        if not is_lead():
            return 0
    return _print_result(screen, report, options["report"])


@contextmanager
def _print_once(together: bool) -> Iterator[None]:
    """In a distributed job, let only the first rank print an error that all ranks raise in the `with` block."""
    try:
        yield
    except TransaxleError as error:
        from transaxle.engine.distribute.driver import is_lead

        if together and not is_lead():
            from transaxle.live.transport.world import is_loss

            if not is_loss(error):
                raise click.exceptions.Exit(error.exit_code) from None
        raise


def _print_result(screen: Screen, report: Report, page: str | None) -> int:
    """Print the report of a conversion and its verification; return the exit code."""
    verification = report.verification
    code = 0 if (verification is None or verification.ok) and (report.check is None or report.check) else 1
    if screen.as_json:
        screen.document(report.as_json())
        return code
    for note in report.leftovers:
        screen.note(note)
    print_report(screen, report)
    if verification is not None:
        from transaxle.cli.comparison import print_comparison, print_verification

        print_verification(screen, verification)
        if verification.comparison is not None:
            print_comparison(screen, verification.comparison)
    if report.check is not None:
        from transaxle.cli.comparison import print_check

        print_check(screen, report.check)
    if page is not None:
        screen.line(f"  shown in {page}")
    return code


def print_report(screen: Screen, report: Report) -> None:
    """Print the report of a completed conversion."""
    if without_commit(report.source) != report.source:
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
    print_grafted(screen, report.grafted, report.grafted_files)
    print_stayed(screen, report.stayed)
    print_counted(screen, report.counted)
    print_others(screen, report.kept, report.ignored, report.carried)
    print_notes(screen, report.notes)
    if report.source_against == UNCHECKED:
        screen.line("  source not checked (--no-check-source): damaged bytes of it are in the result too")
    if not report.synced:
        screen.line("  not synced (--no-sync): a power cut in the next minutes may damage the checkpoint")


def print_workers(screen: Screen, workers: Mapping[str, int]) -> None:
    """Print the bytes written by each machine. With `--all`, or if there is only one machine, print those of each
    process.
    """
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


@click.command(
    "supports",
    cls=Command,
    examples=(
        ("transaxle supports Kimi-K2/config.json --to dcp:torchtitan --decode bf16", ""),
        ("transaxle supports config.json --from torch_dist --to hf", "from a trainer's checkpoint to the hub's"),
        ("transaxle supports config.json --to vllm_sharded --tp 8", "whether 8 ranks can divide the tensors"),
        ("transaxle supports config.json --to hf --encode nvfp4", "whether the rows fit the encoding"),
    ),
    help="""Say from a model's config.json alone, without any checkpoint, whether a conversion works, and why not.

    CONFIG is a config.json or its folder. The tables say which tensors the model has in the source; the conversion of
    these is planned as `plan` plans it for files, and the refusals are the same. Weights are taken to be quantized as
    the config's quantization_config says. Exits with 0 if the conversion works, and otherwise with the exit code that
    `plan` would return.""",
)
@click.argument("config", type=click.Path(readable=False))
@click.option(
    "--from",
    "source",
    metavar="SOURCE",
    default=HUB,
    show_default=True,
    shell_complete=complete_with(targets),
    help="FORMAT, FORMAT:DIALECT, or DIALECT alone, as in --to.",
)
@click.option(
    "--to",
    "target",
    metavar="TARGET",
    required=True,
    shell_complete=complete_with(targets),
    help="FORMAT, FORMAT:DIALECT, or DIALECT alone: `hf` is short for safetensors:hf.",
)
@options_of("supports")
@with_screen
def supports_command(screen: Screen, config: str, source: str, target: str, options: dict[str, Any]) -> int:
    """Say whether a conversion works."""
    with screen.working("planning"):
        answer = verbs.supports(config, target, source, **options)
    error = gathered(answer.refusals) if answer.refusals else None
    if screen.as_json:
        screen.document(answer.as_json())
        return 0 if error is None else error.exit_code
    head = [answer.family or "", f"{answer.source} -> {answer.target}"]
    screen.line((" · ".join(text for text in head if text), "bold"))
    print_notes(screen, answer.notes)
    if answer.plan is not None:
        screen.line(f"  {plural(len(answer.plan.tensors), 'tensor')}, {size(answer.plan.bytes_written)}")
    if error is None:
        screen.line("  supported")
        return 0
    print_refusals(screen, "  not supported", error.refusals, screen.line)
    return error.exit_code


_GAP = "  "
_OF_REFIT = frozenset({
    "src", "dst", "meshes", "together", "ranks_per_node", "config", "family", "axes", "rules", "dtype", "as_json",
    "everything", "quiet", "verbose",
})  # fmt: skip
"""Parameters of the command `plan` that apply only to planning a refit."""


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
    reason against the conversion: in the tensors, in the files of SRC, and at DST. Accepts the options of convert.
    Exits with 0 if the conversion can run, and otherwise with the exit code that convert would return.

    --report FILE also writes the plan as an HTML page: which tensors become which, and how axes move.

    --write PLAN also writes the plan into a file, divided into items for any number of processes: see `transaxle work
    --help`. These processes must find SRC and DST under the same paths.

    If --mesh is given twice, the command shows instead how many bytes a refit of live weights (`tx.Refit`)
    would send between which ranks, from a config.json alone: SRC is then the dialect of the trainer, DST that
    of the engine, and --to is omitted. The mesh of a trainer has the dims replicate, pp, fsdp, ep, tp,
    outermost first (expert_dim=1: FSDP shards experts along dim 1); that of vllm has replicas, dp, pp, tp, and
    ep=N if its ranks distribute the experts.""",
)
@click.option(
    "--mesh",
    "meshes",
    metavar="DIM=SIZE,…",
    multiple=True,
    help="Plan a refit: give the option twice, with the trainer's mesh and then with the engine's mesh.",
)
@click.option(
    "--same-ranks", "together", cls=Seldom, is_flag=True, help="With --mesh: trainer and engine run on the same ranks."
)
@click.option(
    "--ranks-per-node",
    cls=Seldom,
    metavar="N",
    type=click.IntRange(1, 1 << 20),
    help="With --mesh: show bytes inside and between machines of N ranks each.",
)
@click.argument("src", type=click.Path(readable=False))
@click.argument("dst", type=click.Path(readable=False))
@options_of("plan")
@with_profile
@with_screen
@with_derive
def plan_command(
    screen: Screen,
    src: str,
    dst: str,
    options: dict[str, Any],
    meshes: tuple[str, ...],
    together: bool,
    ranks_per_node: int | None,
) -> int:
    """Plan the conversion of a checkpoint, or a refit (sending live weights to an inference engine)."""
    context = click.get_current_context()
    if meshes or together or ranks_per_node:
        return _plan_refit(screen, context, (src, dst), options, (meshes, together, ranks_per_node))
    if options["to"] is None:
        raise click.MissingParameter(
            ctx=context, param=next(each for each in context.command.params if each.name == "to")
        )
    plans: list[CheckedPlan] = []
    screen.on_planned = plans.append
    verbs.plan(src, dst, watch=screen, **options)
    return _show(screen, plans[0], dst, options)


def _show(screen: Screen, prepared: CheckedPlan, dst: str, options: Mapping[str, Any]) -> int:
    """Print the plan of a conversion; return the exit code.

    Args:
        screen: where to print.
        prepared: the plan of the conversion, with the state of the target path.
        dst: path or URL of the target, as the user typed it.
        options: options of the public function `plan`.
    """
    plan, limit = prepared.plan, limits(options["jobs"], options["memory"])
    error = gathered(plan.refusals) if plan.refusals else None
    if screen.as_json:
        shown = {
            "target": dst,
            "finished": prepared.finished,
            **plan.as_json(copies=False),
            "buffers": limit.with_min_block(plan.band).peak,
        }
        screen.document(shown if error is None else {**error_document(error), **shown})
    else:
        _print_plan(screen, plan, limit)
        if (path := options["write"]) is not None and error is None:
            screen.line(f"  written into {path}: next  transaxle work {path} --begin")
        if options["report"] is not None:
            screen.line(f"  shown in {options['report']}")
        if prepared.finished:
            screen.line(f"  {dst} already holds exactly this: nothing is left to do")
        if error is not None:
            print_refusals(screen, "  the conversion would be refused", error.refusals, screen.line)
    return 0 if error is None else error.exit_code


# `--to` may be omitted only when a refit is planned.
next(each for each in plan_command.params if each.name == "to").required = False


def _plan_refit(
    screen: Screen,
    context: click.Context,
    dialects: tuple[str, str],
    options: Mapping[str, Any],
    refit: tuple[tuple[str, ...], bool, int | None],
) -> int:
    """Print how many bytes a refit (sending live weights to an inference engine) would send between ranks; return the
    exit code.

    Args:
        screen: where to print.
        context: click's context of the command.
        dialects: dialects (tensor names and layouts) of the trainer and of the engine.
        options: options of the public function `plan`.
        refit: values of the options `--mesh`, `--same-ranks` and `--ranks-per-node`.
    """
    # imported inside the function, because no other command needs it
    from transaxle.engine.traffic import plan_traffic, read_mesh

    typed = {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    unrelated = [option.opts[0] for option in context.command.params if option.name in typed - _OF_REFIT]
    if unrelated:
        raise click.UsageError(f"{', '.join(unrelated)}: not with --mesh, which plans a refit")
    meshes, together, ranks_per_node = refit
    if len(meshes) != 2:
        raise click.UsageError("a refit has two meshes: --mesh of the trainer, and --mesh of the engine")
    if options["config"] is None:
        raise click.UsageError("a refit is planned from a config.json: --config FILE")
    model = settings(**select(options, ("family", "config", "axes", "rules")))
    with screen.working("planning"):
        sides = read_mesh(dialects[0], meshes[0]), read_mesh(dialects[1], meshes[1])
        traffic = plan_traffic(model, sides, dtype=options["dtype"], together=together)
    if screen.as_json:
        screen.document(traffic.as_json(ranks_per_node))
    else:
        print_traffic(screen, traffic, ranks_per_node)
    return 0


def print_plan_notes(screen: Screen, plan: Plan) -> None:
    """Print what a plan takes, leaves and changes besides the moves of axes, and its notes."""
    print_grafted(screen, plan.grafted, plan.grafted_files)
    print_stayed(screen, plan.stayed)
    print_counted(screen, plan.counted)
    print_others(screen, plan.kept, plan.ignored, plan.carried)
    print_notes(screen, plan.notes)
    print_recoded(screen, plan.recoded)


def _print_plan(screen: Screen, plan: Plan, limit: Limits) -> None:
    before = f"{plan.source_format}:{plan.from_dialect or 'own names'}"
    head = [plan.family or "", f"{before} -> {plan.format}:{plan.dialect}"]
    screen.line((" · ".join(text for text in head if text), "bold"))
    _print_routes(screen, plan)
    print_plan_notes(screen, plan)
    if plan.aliases:
        screen.line(f"  tied: {', '.join(f'{name} = {of}' for name, of in plan.aliases.items())}")
    if plan.compared:
        screen.line(f"  {plural(plan.compared, 'copy', 'copies')} will be checked for equality first")
    amount = [
        f"read {size(plan.bytes_read)}",
        f"write {size(plan.bytes_written)} in {plural(len(plan.files), 'file')}",
        f"{plural(plan.copies, 'copy', 'copies')}, {percent(plan.contiguous, plan.copies)} contiguous",
        f"peak memory {size(limit.with_min_block(plan.band).peak)} of buffers",
    ]
    screen.line(_GAP + _GAP.join(amount if plan.refusals else [*amount, "nothing refused"]))


def _print_routes(screen: Screen, plan: Plan) -> None:
    """Print one row for each line of the conversion table that the plan uses; lines that change nothing share one
    row.
    """
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


_RUNS = 3
"""Largest number of rank ranges that one cell of the printed table lists."""


def print_traffic(screen: Screen, traffic: Traffic, ranks_per_node: int | None) -> None:
    """Print how many bytes a refit would send between which ranks.

    Args:
        screen: where to print.
        traffic: number of bytes sent from each rank to each rank.
        ranks_per_node: number of ranks per machine; None if it is unknown.
    """
    trainer, engine = traffic.trainer, traffic.engine
    screen.line((f"{traffic.family} · {trainer.dialect} -> {engine.dialect}", "bold"))
    screen.line(f"  {parameters(traffic.parameters)}, sent as {traffic.dtype}")
    screen.line(f"  trainer: {plural(trainer.ranks, 'rank')}, {trainer.text}")
    screen.line(f"  engine: {plural(engine.ranks, 'rank')}, {engine.text}{', the same' if traffic.together else ''}")
    if traffic.trainer_only:
        screen.some("  the engine does not have", traffic.trainer_only)
    if traffic.undecided:
        screen.some("  the config does not say whether the model has these; counted as absent", traffic.undecided)
    local_note = f"; {size(traffic.own)} more are on the right rank already" if traffic.together else ""
    screen.line(f"  {size(traffic.total)} are sent in one push{local_note}")
    if ranks_per_node is not None:
        inside = traffic.within(ranks_per_node)
        screen.line(f"    {size(inside)} inside machines, {size(traffic.total - inside)} between them")
    rows = [
        ("", "least", "median", "most"),
        ("a rank of the trainer sends", *_spread(traffic.between_ranks.sum(axis=1))),
        ("a rank of the engine receives", *_spread(traffic.between_ranks.sum(axis=0))),
    ]
    screen.table(rows)
    screen.line("  bytes per pair of ranks:")
    pairs = _fold_pairs(traffic.between_ranks)
    hidden_pairs = screen.table(
        [(f"{a} -> {b}", f"{size(count)} each", plural(times, "pair")) for count, times, a, b in pairs],
        indent="    ",
        limit=20,
    )
    if hidden_pairs:
        screen.line(f"    … and {hidden_pairs:,} more (--all shows them, --json the whole matrix)")


def _spread(counts: Matrix) -> tuple[str, str, str]:
    return size(int(counts.min())), size(int(np.median(counts))), size(int(counts.max()))


def _fold_pairs(matrix: Matrix) -> list[tuple[int, int, str, str]]:
    """Return rows (bytes, number of rank pairs, senders, receivers), the largest number of bytes first. Equal pairs
    share a row.
    """
    sources, columns = _group_equal_rows(matrix), _group_equal_rows(matrix.T)
    rows = []
    for source in sources:
        targets: dict[int, list[int]] = {}
        for column in columns:
            targets.setdefault(int(matrix[source[0], column[0]]), []).extend(column)
        rows += [
            (count, len(source) * len(ranks), ranks_text(source), ranks_text(sorted(ranks)))
            for count, ranks in targets.items()
            if count
        ]
    return sorted(rows, key=lambda row: -row[0])


def _group_equal_rows(matrix: Matrix) -> list[list[int]]:
    """Return lists of row indices of a matrix; the rows of each list are equal."""
    groups: dict[bytes, list[int]] = {}
    for number, row in enumerate(np.ascontiguousarray(matrix)):
        groups.setdefault(row.tobytes(), []).append(number)
    return list(groups.values())


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ascending rank numbers as text, such as `0-7`, `0-3, 8-11` or `0, 8, … 248 (32 ranks)`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] + 1 == rank:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    if len(words) <= _RUNS:
        return ", ".join(words)
    return f"{words[0]}, {words[1]}, … {words[-1]} ({len(ranks):,} ranks)"
