"""`transaxle convert`: converts a checkpoint; and the rows that it prints as `transaxle plan` does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click

from transaxle import verbs
from transaxle.axes.notation.name import natural
from transaxle.cli.command import Command, deriving, options_of, printing, profiling
from transaxle.cli.screen.screen import Screen
from transaxle.encodings.value_steps import Measured, Recoded
from transaxle.engine.carry import Report
from transaxle.engine.plan.recoding import NO_CONFIG
from transaxle.engine.wording import duration, fold, folded, plural, size, speed
from transaxle.errors import TransaxleError
from transaxle.formats.storage.storage import unpinned
from transaxle.formats.training_state.state import OPTIMIZER


def _how(recoded: Recoded) -> str:
    """Describe the change of number format, or what was averaged."""
    if recoded.action == "averaged":
        return f"replicas that differ, {recoded.dtype}"
    if recoded.action == "merged":
        return f"with the adapter, {recoded.dtype}"
    if recoded.action == "cast":
        return f"{recoded.encoding} -> {recoded.dtype}"
    encoded = f"{recoded.encoding} ({recoded.convention})"
    before, after = (encoded, recoded.dtype) if recoded.action == "decoded" else (recoded.dtype, encoded)
    return f"{before} -> {after}"


def print_recoded(screen: Screen, recoded: Sequence[Recoded]) -> None:
    """Print which tensors a plan decodes or encodes."""
    by_name = sorted(recoded, key=lambda tensor: natural(tensor.name))
    rows = fold((tensor.name for tensor in by_name), ((tensor.action, _how(tensor)) for tensor in by_name))
    for (action, change), count in _counts(by_name).items():
        matching_rows = [f"{row.name}  {row.times}".rstrip() for row in rows if row.key == (action, change)]
        screen.some(f"  {plural(count, 'tensor')} will be {action}, {change}", matching_rows)


def print_measured(screen: Screen, measured: Sequence[Measured]) -> None:
    """Print which tensors were decoded or encoded, and how far their values moved."""
    ordered = sorted(measured, key=lambda item: natural(item.what.name))
    for (action, change), count in _counts([item.what for item in ordered]).items():
        named = {item.what.name: item for item in ordered if (item.what.action, _how(item.what)) == (action, change)}
        exact = sum(item.error.exact for item in named.values())
        rows = fold(named, (item.error.exact for item in named.values()))
        widths = [max(map(len, column)) for column in zip(*((row.name, row.times) for row in rows), strict=True)]
        listed = [
            f"{row.name.ljust(widths[0])}  {row.times.ljust(widths[1])}  {_moved([named[name] for name in row.names])}"
            for row in rows
        ]
        screen.some(f"  {plural(count, 'tensor')} {action}, {change}; {exact:,} exactly", listed)


def _moved(measured: Sequence[Measured]) -> str:
    """Describe how far the values of tensors moved at most."""
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


def print_stayed(screen: Screen, stayed: tuple[str, ...]) -> None:
    """Print which plain tensors keep their type where others are cast."""
    if stayed:
        rows = [f"{row.name}  {row.times}".rstrip() for row in fold(sorted(stayed, key=natural))]
        screen.some(f"  {plural(len(stayed), 'plain tensor')} not cast (--only PATTERN chooses what is)", rows)


def _counts(recoded: Sequence[Recoded]) -> dict[tuple[str, str], int]:
    counts: dict[tuple[str, str], int] = {}
    for tensor in recoded:
        key = tensor.action, _how(tensor)
        counts[key] = counts.get(key, 0) + 1
    return counts


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


_EXTRA = "._extra_state"
"""End of the names under which Megatron's modules save what is no tensor."""


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
@click.argument("src", type=click.Path(readable=False))
@click.argument("dst", type=click.Path(readable=False))
@options_of("convert")
@profiling
@printing
@deriving
def command(screen: Screen, src: str, dst: str, options: dict[str, Any]) -> int:
    """Convert a checkpoint."""
    with _one_voice(together := options["on"] == "torchrun"):
        try:
            report = verbs.convert(src, dst, watch=screen, **options)
        except verbs.Unverified as error:
            report = error.report
    if together and not verbs.is_lead():
        return 0
    return _print(screen, report, options["report"])


@contextmanager
def _one_voice(together: bool) -> Iterator[None]:
    """Let the first rank of a job say what all of them raise."""
    try:
        yield
    except TransaxleError as error:
        if together and not verbs.is_lead():
            from transaxle.live.transport.world import is_loss

            if not is_loss(error):
                raise click.exceptions.Exit(error.exit_code) from None
        raise


def _print(screen: Screen, report: Report, page: str | None) -> int:
    """Print what was done, and the file that shows it; return the exit code."""
    verification = report.verification
    code = 0 if verification is None or verification.ok else 1
    if screen.as_json:
        screen.document(report.as_json())
        return code
    for note in report.leftovers:
        screen.note(note)
    print_report(screen, report)
    if verification is not None:
        from transaxle.cli.commands.verify import print_comparison, print_verification

        print_verification(screen, verification)
        if verification.comparison is not None:
            print_comparison(screen, verification.comparison)
    if page is not None:
        screen.line(f"  shown in {page}")
    return code


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
