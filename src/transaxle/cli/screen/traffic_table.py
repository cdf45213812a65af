"""How much a refit would move, as text: totals, and pairs of ranks, alike ones folded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transaxle.cli.screen.screen import Screen
from transaxle.engine.traffic import Matrix, Traffic
from transaxle.engine.wording import parameters, plural, size

_RUNS = 3
"""Runs of ranks that one cell lists."""


def print_traffic(screen: Screen, found: Traffic, ranks_per_node: int | None) -> None:
    """Print what a refit would move.

    Args:
        screen: where.
        found: what it would move.
        ranks_per_node: how many ranks a machine has; None: not known.
    """
    trainer, engine = found.trainer, found.engine
    screen.line((f"{found.family} · {trainer.dialect} -> {engine.dialect}", "bold"))
    screen.line(f"  {parameters(found.parameters)}, sent as {found.dtype}")
    screen.line(f"  trainer: {plural(trainer.ranks, 'rank')}, {trainer.text}")
    screen.line(f"  engine: {plural(engine.ranks, 'rank')}, {engine.text}{', the same' if found.together else ''}")
    if found.stays:
        screen.some("  the engine does not have", found.stays)
    if found.undecided:
        screen.some("  the config does not say whether the model has these; counted as absent", found.undecided)
    own = f"; {size(found.own)} more are on the right rank already" if found.together else ""
    screen.line(f"  {size(found.total)} are sent in one push{own}")
    if ranks_per_node is not None:
        inside = found.within(ranks_per_node)
        screen.line(f"    {size(inside)} inside machines, {size(found.total - inside)} between them")
    rows = [
        ("", "least", "median", "most"),
        ("a rank of the trainer sends", *_spread(found.sent.sum(axis=1))),
        ("a rank of the engine receives", *_spread(found.sent.sum(axis=0))),
    ]
    screen.table(rows)
    screen.line("  bytes per pair of ranks:")
    pairs = _folded(found.sent)
    left = screen.table(
        [(f"{a} -> {b}", f"{size(count)} each", plural(times, "pair")) for count, times, a, b in pairs],
        indent="    ",
        most=20,
    )
    if left:
        screen.line(f"    … and {left:,} more (--all shows them, --json the whole matrix)")


def _spread(counts: Matrix) -> tuple[str, str, str]:
    return size(int(counts.min())), size(int(np.median(counts))), size(int(counts.max()))


def _folded(matrix: Matrix) -> list[tuple[int, int, str, str]]:
    """Return bytes, number of pairs, and the ranks of both sides; the largest first, those without any left out."""
    sources, columns = _alike(matrix), _alike(matrix.T)
    found = []
    for source in sources:
        targets: dict[int, list[int]] = {}
        for column in columns:
            targets.setdefault(int(matrix[source[0], column[0]]), []).extend(column)
        found += [
            (count, len(source) * len(ranks), ranks_text(source), ranks_text(sorted(ranks)))
            for count, ranks in targets.items()
            if count
        ]
    return sorted(found, key=lambda row: -row[0])


def _alike(matrix: Matrix) -> list[list[int]]:
    """Return the numbers of equal rows together."""
    groups: dict[bytes, list[int]] = {}
    for number, row in enumerate(np.ascontiguousarray(matrix)):
        groups.setdefault(row.tobytes(), []).append(number)
    return list(groups.values())


def ranks_text(ranks: Sequence[int]) -> str:
    """Write ascending numbers of ranks: `0-7`, `0-3, 8-11`, `0, 8, … 248 (32 ranks)`."""
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
