"""Rows that plans and reports of a conversion print alike: tensors whose values change, and what is not converted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from transaxle.axes.notation.name import natural
from transaxle.cli.screen.screen import Screen
from transaxle.encodings.value_steps import Measured, Recoded
from transaxle.engine.fold import fold
from transaxle.engine.number_text import plural
from transaxle.engine.plan.model_config import NO_CONFIG
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
    named = {item.what.name: item for item in sorted(measured, key=lambda item: natural(item.what.name))}
    for (action, change), count in _counts([item.what for item in named.values()]).items():
        matching = [item for item in named.values() if (item.what.action, _how(item.what)) == (action, change)]
        exact = sum(item.error.exact for item in matching)
        rows = fold((item.what.name for item in matching), (item.error.exact for item in matching))
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


def folded(names: tuple[str, ...]) -> Iterator[str]:
    """Yield names, folded into few rows."""
    for row in fold(sorted(names, key=natural)):
        yield f"{row.name}  {row.times}".rstrip()


_EXTRA = "._extra_state"
"""End of the names under which Megatron's modules save what is no tensor."""
