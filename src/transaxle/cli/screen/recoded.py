"""Printing what is decoded, encoded, cast, merged or averaged: tensors folded, with how far their values moved."""

from __future__ import annotations

from collections.abc import Sequence

from transaxle.axes.notation.name import natural
from transaxle.cli.screen.quantities import plural
from transaxle.cli.screen.screen import Screen
from transaxle.encodings.value_steps import Measured, Recoded
from transaxle.engine.fold import fold


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
