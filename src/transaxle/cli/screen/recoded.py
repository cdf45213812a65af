"""Printing what is decoded, encoded, cast and averaged: tensors folded, each group with how far its values moved."""

from __future__ import annotations

from collections.abc import Sequence

from transaxle.axes.notation.name import natural
from transaxle.cli.screen.fold import fold
from transaxle.cli.screen.quantities import plural
from transaxle.cli.screen.screen import Screen
from transaxle.engine.plan.output_tensors import Measured, Recoded


def _how(what: Recoded) -> str:
    """Say from which number format to which, or of what it is the mean."""
    if what.action == "averaged":
        return f"replicas that differ, {what.dtype}"
    if what.action == "cast":
        return f"{what.encoding} -> {what.dtype}"
    encoded = f"{what.encoding} ({what.convention})"
    before, after = (encoded, what.dtype) if what.action == "decoded" else (what.dtype, encoded)
    return f"{before} -> {after}"


def print_recoded(screen: Screen, recoded: Sequence[Recoded]) -> None:
    """Print which tensors a plan decodes or encodes."""
    found = sorted(recoded, key=lambda what: natural(what.name))
    rows = fold((what.name for what in found), ((what.action, _how(what)) for what in found))
    for (action, how), count in _counts(found).items():
        mine = [f"{row.name}  {row.times}".rstrip() for row in rows if row.key == (action, how)]
        screen.some(f"  {plural(count, 'tensor')} will be {action}, {how}", mine)


def print_measured(screen: Screen, measured: Sequence[Measured]) -> None:
    """Print which tensors were decoded or encoded, and how far their values moved."""
    found = {each.what.name: each for each in sorted(measured, key=lambda each: natural(each.what.name))}
    for (action, how), count in _counts([each.what for each in found.values()]).items():
        mine = [each for each in found.values() if (each.what.action, _how(each.what)) == (action, how)]
        exact = sum(each.error.exact for each in mine)
        rows = fold((each.what.name for each in mine), (each.error.exact for each in mine))
        widths = [max(map(len, column)) for column in zip(*((row.name, row.times) for row in rows), strict=True)]
        listed = [
            f"{row.name.ljust(widths[0])}  {row.times.ljust(widths[1])}  {_moved([found[name] for name in row.names])}"
            for row in rows
        ]
        screen.some(f"  {plural(count, 'tensor')} {action}, {how}; {exact:,} exactly", listed)


def _moved(measured: Sequence[Measured]) -> str:
    """Say how far the values of tensors moved at most."""
    if all(each.error.exact for each in measured):
        return "exact"
    most, rms = max(each.error.max for each in measured), max(each.error.rms for each in measured)
    infinite = sum(each.infinite for each in measured)
    return f"max |Δ| {most:.1e}, RMS {rms:.1e}" + (f", {infinite:,} finite values became infinite" if infinite else "")


def print_stayed(screen: Screen, stayed: tuple[str, ...]) -> None:
    """Print which plain tensors keep their type where others are cast."""
    if stayed:
        rows = [f"{row.name}  {row.times}".rstrip() for row in fold(sorted(stayed, key=natural))]
        screen.some(f"  {plural(len(stayed), 'plain tensor')} not cast (--only PATTERN chooses what is)", rows)


def _counts(recoded: Sequence[Recoded]) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for what in recoded:
        key = what.action, _how(what)
        found[key] = found.get(key, 0) + 1
    return found
