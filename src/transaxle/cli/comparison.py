"""`transaxle verify` checks a checkpoint against its manifest or compares two checkpoints; `transaxle diff` shows their
differences; `transaxle check` tells whether a program loads a checkpoint.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

from transaxle import verbs
from transaxle.axes.notation.name import natural
from transaxle.cli.command import Command, complete_with, options_of, with_profile, with_screen
from transaxle.cli.refusals import print_refusals
from transaxle.cli.screen import Screen
from transaxle.engine.compare import Comparison, Difference, components_by_name
from transaxle.engine.verification import Verification
from transaxle.engine.wording import duration, fold, fold_to_text, parameters, plural, size
from transaxle.formats.registry import join_names

if TYPE_CHECKING:
    from transaxle.readers.checking import Check
    from transaxle.readers.findings import Finding


@click.command(
    "verify",
    cls=Command,
    examples=(
        ("transaxle verify out/", "check every byte against the manifest"),
        ("transaxle verify Qwen3-30B-A3B/ out/", "compare two checkpoints, whatever their dialects"),
    ),
    help="""Check a checkpoint against its manifest, or compare two checkpoints.

    Exits with 0 if everything matches and with 1 if not. With A alone: reads every file and every copy of every tensor,
    and compares their hashes with the hashes recorded in transaxle.json or, for a single file, in the file itself. If
    no hashes are recorded, only the structure of the files and the checksums of their format are checked. With A and B:
    compares the tensors of both checkpoints bit by bit, whatever the dialect and files of each checkpoint.""",
)
@click.argument("a", type=click.Path(readable=False))
@click.argument("b", type=click.Path(readable=False), required=False)
@options_of("verify")
@with_profile
@with_screen
def verify_command(screen: Screen, a: str, b: str | None, options: dict[str, Any]) -> int:
    """Verify a checkpoint against its hashes, or compare two checkpoints."""
    result = verbs.verify(a, b, watch=screen, **options)
    if screen.as_json:
        screen.document(result.as_json())
    elif result.comparison is None:
        print_verification(screen, result)
    else:
        print_comparison(screen, result.comparison)
    return 0 if result else 1


def print_verification(screen: Screen, result: Verification) -> None:
    """Print the result of a check of a checkpoint against its manifest or other stored hashes."""
    amount = f"{plural(result.tensors, 'tensor')}, {parameters(result.parameters)}, {size(result.bytes_read)} read"
    if result.problems:
        screen.line(("not intact", "red"), f": {amount}")
        print_refusals(screen, "  problems", result.problems, screen.line)
    elif result.against == "manifest":
        screen.line(("intact", "green"), f": {amount}; every hash in the manifest matches (xxh3-128)")
    elif result.against == "digests":
        screen.line(("intact", "green"), f": {amount}; every digest in the file matches (xxh3-128)")
    else:
        screen.line(f"checked the structure only, there are no digests: {amount}")
        screen.line(f"  {_describe_unchecked(result)}: give a second checkpoint to compare with")
    if result.unlisted:
        screen.line(f"  not checked, as the manifest does not list them: {join_names(result.unlisted)}")


def _describe_unchecked(result: Verification) -> str:
    """Describe which bytes of a checkpoint could not be checked because the checkpoint contains no hashes of these
    bytes.
    """
    if not result.unproved:
        return "checksums of the format cover all tensors; nothing covers headers and the files beside them"
    if result.unproved == result.bytes_read:
        return "nothing records what was written, so the data itself is unchecked"
    return f"checksums of the format cover a part; {size(result.unproved)} of the data are unchecked"


def print_comparison(screen: Screen, compared: Comparison) -> None:
    """Print whether two checkpoints are equal; if they differ, also print the command that lists the differences."""
    first, second = (f"{count:,}" for count in compared.stored)
    if compared.equal:
        counts = (
            f"{first} tensors on the left are {second} on the right"
            if first != second
            else plural(compared.stored[0], "tensor")
        )
        screen.line(("equal", "green"), f": {counts}, {parameters(compared.parameters)}")
        print_across(screen, compared)
        return
    screen.line(
        ("different", "red"),
        f": {plural(len(compared.differences), 'tensor')}; {compared.first} has {first}, {compared.second} {second}",
    )
    screen.line(f"  to see where: transaxle diff {compared.first} {compared.second}")
    if compared.optimizer_only:
        screen.line("  all differences are optimizer state that only one of them has: --no-optimizer compares the rest")


def print_across(screen: Screen, comparison: Comparison) -> None:
    """Print how many tensors were compared by value because the two checkpoints encode the tensors differently."""
    for formats, count in comparison.across.items():
        screen.line(f"  {plural(count, 'tensor')} compared by value, stored as {formats}")


_ROWS = 20
_NO_TABLE = "(in no table)"
_ONE_SIDED = frozenset({"only_first", "only_second"})
_UNCOMPARED = _ONE_SIDED | {"encoding"}
"""Kinds of difference between two tensors for which the values of the tensors are not compared."""


@click.command(
    "diff",
    cls=Command,
    examples=(
        ("transaxle diff run-a/ run-b/", "which tensors differ"),
        ("transaxle diff run-a/ run-b/ --stat", "counts per logical tensor, with the largest difference"),
        ("transaxle diff run-a/ run-b/ --numeric", "which tensors differ, and by how much"),
        ("transaxle diff run-a/ run-b/ --report diff.html", "the same as an HTML page"),
    ),
    help="""Show where two checkpoints differ, across formats and dialects.

    Exits with 0 if they are equal and with 1 if not. Reads A in the dialect of B and compares bit by bit: -0.0 and 0.0
    differ, two NaNs with the same bits are equal.

    With --numeric, values are compared instead: quantized tensors are decoded, and the two checkpoints may store a
    tensor in different number formats. For each tensor that differs, the largest absolute difference, the root mean
    square of the difference, and the norm of the difference divided by the norm of B's tensor are printed.

    --report FILE compares values as well, and writes an HTML page: where in the model the two differ, by how much, the
    tensors that differ most, and the tensor names that only one checkpoint has.""",
)
@click.argument("a", type=click.Path(readable=False))
@click.argument("b", type=click.Path(readable=False))
@click.option("--stat", is_flag=True, help="Print counts per logical tensor instead of names.")
@options_of("diff")
@with_profile
@with_screen
def diff_command(screen: Screen, a: str, b: str, stat: bool, options: dict[str, Any]) -> int:
    """Compare two checkpoints."""
    logical_names: dict[str, str] = {}
    if stat:
        options = {**options, "numeric": True}
        screen.on_opened = lambda pair: logical_names.update(components_by_name(pair[1]))
    comparison = verbs.diff(a, b, watch=screen, **options)
    report = options["report"]
    if screen.as_json:
        screen.document(comparison.as_json())
    elif comparison.equal:
        print_comparison(screen, comparison)
    elif stat:
        _print_stat(screen, comparison, logical_names)
    else:
        _print_names(screen, comparison)
    if report is not None and not screen.as_json:
        screen.line(f"  shown in {report}")
    return 0 if comparison else 1


def _print_names(screen: Screen, comparison: Comparison) -> None:
    """Print the names of differing tensors; names that differ only in their numbers share one printed row."""
    by_name = {difference.name: difference for difference in comparison.differences}
    names = sorted(by_name, key=natural)
    folded = fold(names, [_describe(by_name[name], comparison) for name in names])
    cells = [[row.name, row.times, str(row.key), _distances(by_name[name] for name in row.names)] for row in folded]
    hidden_rows = screen.table(cells, limit=_ROWS)
    if hidden_rows:
        screen.line(f"  … and {hidden_rows:,} more rows (--all or --json shows them)")
    equal = comparison.tensors - sum(d.kind not in _UNCOMPARED for d in comparison.differences)
    screen.line(f"  {plural(len(names), 'tensor')} {'differs' if len(names) == 1 else 'differ'}, {equal:,} equal")
    if any(difference.kind == "encoding" for difference in comparison.differences):
        screen.line("  the encodings differ: --numeric compares the values")
    print_across(screen, comparison)


def _describe(difference: Difference, comparison: Comparison) -> str:
    """Describe how a tensor differs between two checkpoints; tensors with equal descriptions share one printed row."""
    match difference.kind:
        case "only_first":
            return f"only in {comparison.first}"
        case "only_second":
            return f"only in {comparison.second}"
        case "values":
            return "values differ"
        case "copies" | "encoding":
            return difference.detail
    return f"{difference.kind} {difference.detail}"


def _distances(group: Iterable[Difference]) -> str:
    """Describe how far the values of a group of tensors differ; return an empty text if no distance was measured."""
    measured = [
        (d.elements, d.max_abs, d.rms or 0.0, d.relative or 0.0)
        for d in group
        if d.elements is not None and d.max_abs is not None
    ]
    if not measured:
        return ""
    elements, furthest, rms, relative = zip(*measured, strict=True)
    words = f"{plural(sum(elements), 'element')}, max |Δ| {max(furthest):.1e}"
    return f"{words}, RMS {max(rms):.1e}, relative {max(relative):.1e}"


def _print_stat(screen: Screen, comparison: Comparison, logical_names: Mapping[str, str]) -> None:
    """Print one row of statistics per logical tensor.

    Args:
        screen: where to print.
        comparison: the comparison of the two checkpoints.
        logical_names: tensor name in the second checkpoint -> names of the logical tensors in it.
    """
    groups: dict[str, list[Difference]] = defaultdict(list)
    uncompared: dict[str, int] = defaultdict(int)
    for difference in comparison.differences:
        if difference.kind in _UNCOMPARED:
            uncompared[_describe(difference, comparison)] += 1
        else:
            groups[logical_names.get(difference.name, _NO_TABLE)].append(difference)
    totals = Counter(logical_names.values())
    cells = [
        [
            component,
            f"{len(group):,} of {max(totals[component], len(group)):,} tensors differ",
            _distances(group) or "; ".join(dict.fromkeys(_describe(difference, comparison) for difference in group)),
        ]
        for component, group in groups.items()
    ]
    cells += [[description, plural(count, "tensor"), ""] for description, count in uncompared.items()]
    equal = comparison.tensors - sum(len(group) for group in groups.values())
    cells.append(["everything else", f"{plural(equal, 'tensor')} equal", ""])
    screen.table(cells)


def _readers() -> list[str]:
    from transaxle.readers.reader import READERS

    return list(READERS)


@click.command(
    "check",
    cls=Command,
    examples=(
        ("transaxle check out/ --for transformers", "does the installed transformers load it?"),
        ("transaxle check out/ --for vllm --python /opt/vllm/bin/python", "does vLLM in its own environment?"),
    ),
    help="""Check whether a program loads every tensor of a checkpoint, each to its place, with its values.

    Runs the program's own loading code on the names, shapes, dtypes and config of SRC, without its data, and on small
    checkpoints with data if tensors are quantized or have names of another dialect. For each finding: the tensors, what
    the program does with them, and what would mend it. Exits with 0 if the program loads SRC as it is, and with 1 if
    not. Results are kept for equal names, configs and versions of the program.""",
)
@click.argument("src", type=click.Path(readable=False))
@click.option(
    "--for", "reader", metavar="READER", required=True, shell_complete=complete_with(_readers),
    help="The program: transformers, compressed-tensors, vllm, peft, torchtitan, automodel, deepspeed, megatron, "
    "llama.cpp or sglang.",
)  # fmt: skip
@options_of("check")
@with_screen
def check_command(screen: Screen, src: str, reader: str, options: dict[str, Any]) -> int:
    """Check whether a program loads a checkpoint as it is."""
    with screen.working(f"loading with {reader}"):
        verdict = verbs.check(src, reader, **options)
    if screen.as_json:
        screen.document(verdict.as_json())
    else:
        print_check(screen, verdict)
    return 0 if verdict else 1


def print_check(screen: Screen, verdict: Check) -> None:
    """Print the verdict, and each finding with the tensors and the remedy."""
    screen.line((verdict.headline, "green" if verdict else "red"))
    for finding in verdict.findings:
        _print_finding(screen, finding)
    if verdict.traced == "run":
        screen.note(f"  {verdict.reader} was run for {duration(verdict.seconds)}; the result is kept")


def _print_finding(screen: Screen, finding: Finding) -> None:
    title = f"  {finding.kind}: {finding.effect}"
    if finding.names:
        screen.some(title, list(fold_to_text(finding.names)))
    else:
        screen.line(title)
    if finding.remedy:
        screen.line(f"    {finding.remedy}")
