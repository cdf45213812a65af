"""The page of a live model's sharding: which rank holds how much of what, and what there are copies of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transaxle.engine.checkpoint_facts import HeldTensor, Sharding
from transaxle.engine.wording import plural, ranges, size, taken_apart
from transaxle.reports.html_page import Column, Figure, Page, Section, capped, shades

_MOST_GROUPS, _MOST_RANKS = 60, 256
"""Rows and columns of the map; what is beyond is in the tables."""
_UNEVEN = 0.1
"""From which imbalance on it is said."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Tensors whose names differ in numbers only."""

    name: str
    """Their name, with `*` for numbers."""
    tensors: Sequence[HeldTensor]
    """All of them."""

    @property
    def nbytes(self) -> int:
        """Bytes of one copy of each."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def held(self) -> dict[int, tuple[int, float]]:
        """Return rank -> bytes that it holds, and on how many ranks these are, on average."""
        found: dict[int, tuple[int, int]] = {}
        for tensor in self.tensors:
            for rank, count in tensor.rank_bytes.items():
                before, copied = found.get(rank, (0, 0))
                found[rank] = before + count, copied + count * tensor.copies[rank]
        return {rank: (count, copied / count) for rank, (count, copied) in found.items()}


def sharding_page(sharding: Sharding, title: str = "Live model") -> Page:
    """Return the page of a live model's sharding.

    Args:
        sharding: what the ranks have told.
        title: what the page is called.
    """
    groups, held = _groups(sharding), sharding.rank_bytes
    most = max(held.values(), default=0)
    return Page(
        kind="sharding",
        title=title,
        headline=f"{plural(len(sharding.tensors), 'tensor')} on {plural(len(sharding.ranks), 'rank')}",
        tiles=(
            (size(sharding.nbytes), "of the model, once"),
            (size(most), "on the fullest rank"),
            (f"{100 * sharding.imbalance:.1f} %", "more there than on average"),
            (size(sharding.spare_bytes), "of copies on all ranks"),
        ),
        first="What to look at",
        notices=tuple(_notices(sharding)),
        quiet=(
            f"Looked for: ranks with nothing, ranks more than {_UNEVEN:.0%} above the mean, and tensors that are whole "
            "on every rank. Plain tensors that several ranks have under one name count as copies. Gradients, optimizer "
            "states and activations are not counted."
        ),
        sections=tuple(_sections(sharding, groups)),
        facts={
            "bytes": sharding.nbytes, "rank_bytes": {str(rank): count for rank, count in held.items()},
            "imbalance": sharding.imbalance, "spare_bytes": sharding.spare_bytes,
        },
    )  # fmt: skip


def _groups(sharding: Sharding) -> list[_Group]:
    by_name: dict[str, list[HeldTensor]] = {}
    for tensor in sharding.tensors:
        by_name.setdefault("*".join(taken_apart(tensor.name)[0]), []).append(tensor)
    return [_Group(name, tensors) for name, tensors in by_name.items()]


def _place(sharding: Sharding, rank: int) -> str:
    """Return where a rank is on the meshes' named dims: `dp 0, tp 1`; empty where that is not known."""
    return ", ".join(f"{name} {place}" for name, place in sharding.coordinates.get(rank, {}).items())


def _mesh(sharding: Sharding) -> tuple[Column, ...]:
    """Return the column of what `_place` says, where anything is known."""
    return (Column("mesh"),) if sharding.coordinates else ()


def _places(sharding: Sharding, rank: int) -> tuple[str, ...]:
    """Return its value for a rank."""
    return (_place(sharding, rank),) if sharding.coordinates else ()


def _notices(sharding: Sharding) -> Iterator[tuple[str, str]]:
    held = sharding.rank_bytes
    empty = [rank for rank, count in held.items() if not count]
    if empty:
        yield "Ranks with nothing", f"{'rank' if len(empty) == 1 else 'ranks'} {ranges(empty)}."
    if sharding.imbalance > _UNEVEN:
        fullest = max(held, key=lambda rank: held[rank])
        mean = size(round(sum(held.values()) / len(held)))
        yield "Uneven", f"Rank {fullest} holds {size(held[fullest])}; the mean is {mean}."
    ranks = set(sharding.ranks)
    whole = [
        tensor
        for tensor in sharding.tensors
        if len(ranks) > 1 and tensor.rank_bytes.keys() == ranks and set(tensor.rank_bytes.values()) == {tensor.nbytes}
    ]
    if whole:
        largest = max(whole, key=lambda tensor: tensor.nbytes)
        amount = size(sum(tensor.nbytes for tensor in whole))
        text = f"{plural(len(whole), 'tensor')} of {amount} together, the largest of which is {largest.name}."
        yield "Whole on every rank", text


def _sections(sharding: Sharding, groups: Sequence[_Group]) -> Iterator[Section]:
    yield _map(sharding, groups)
    yield _ranks(sharding)
    yield _tensors(groups)
    if sharding.aliases:
        columns = Column("name", "name"), Column("is the same tensor as", "name")
        table = capped("aliases", "Names", columns, list(sharding.aliases.items()))
        yield Section("aliases", "Tied tensors", tables=(table,))


def _map(sharding: Sharding, groups: Sequence[_Group]) -> Section:
    """Return the map: a row for tensors of one kind, a column for each rank."""
    largest = sorted(groups, key=lambda group: -group.nbytes)[:_MOST_GROUPS]
    kept = set(map(id, largest))
    shown = [group for group in groups if id(group) in kept]
    ranks = sharding.ranks[:_MOST_RANKS]
    cells: list[Any] = []
    for row, group in enumerate(shown):
        held = group.held()
        for column, rank in enumerate(ranks):
            count, copies = held.get(rank, (0, 0.0))
            lines = (f"{size(count)} of {size(group.nbytes)}", plural(len(group.tensors), "tensor"))
            share = count / group.nbytes if group.nbytes else 0.0
            cells.append((column, row, "" if count else "none", (share, copies), lines if count else ()))
    measured = [[values[at] for _, _, state, values, _ in cells if not state] for at in (0, 1)]
    data = {
        "columns": [str(rank) for rank in ranks],
        "rows": [group.name for group in shown],
        "across": "rank",
        "notes": [_place(sharding, rank) for rank in ranks],
        "measures": [
            {"title": "Share of the tensors", "kind": "share", **shades(measured[0], "{:.4g} %", 100)},
            {"title": "Ranks with the same part", "kind": "number", **shades(measured[1], "{:.4g}", 1)},
        ],
        "states": {"none": "nothing on this rank"},
        "cells": cells,
    }
    text = (
        "A row stands for all tensors whose names differ in numbers only, a column for a rank; the colour says which "
        "share of their bytes the rank holds, or how many ranks hold the same."
    )
    if len(shown) < len(groups) or len(ranks) < len(sharding.ranks):
        text += f" The figure has the largest {len(shown)} rows and the first {len(ranks)} ranks; the tables have all."
    label = f"Map of {plural(len(shown), 'kind')} of tensors on {plural(len(ranks), 'rank')}; a table has its numbers."
    heads = (
        Column("tensors", "name"), Column("rank"), *_mesh(sharding), Column("bytes", "bytes"),
        Column("share of them", "number"), Column("ranks with the same", "number"),
    )  # fmt: skip
    rows = [
        (group.name, rank, *_places(sharding, rank), count, count / group.nbytes, copies)
        for group in groups
        for rank, (count, copies) in sorted(group.held().items())
    ]
    table = capped("held", "What each rank holds", heads, rows, 2 + len(_mesh(sharding)))
    return Section("map", "Who holds what", text, Figure("heat", label, data), (table,))


def _ranks(sharding: Sharding) -> Section:
    held = sharding.rank_bytes
    mean = sum(held.values()) / len(held) if held else 0.0
    rows = [
        (rank, *_places(sharding, rank), count, count, count / mean - 1 if mean else 0.0)
        for rank, count in held.items()
    ]
    columns = (
        Column("rank"), *_mesh(sharding), Column("bytes", "bytes"), Column("share", "share"),
        Column("above the mean", "number"),
    )  # fmt: skip
    data = {
        "series": [
            {
                "title": "rank",
                "kind": "bytes",
                "of": "bytes",
                "bars": [(str(rank), count) for rank, count in held.items()],
                "notes": [_place(sharding, rank) for rank in held],
            }
        ]
    }
    label = f"Bars: bytes of parameters on each of {plural(len(held), 'rank')}; a table has the numbers."
    table = capped("ranks", "Ranks", columns, rows)
    return Section("ranks", "Bytes by rank", "", Figure("bars", label, data), (table,))


def _tensors(groups: Sequence[_Group]) -> Section:
    rows = []
    for group in groups:
        alike: dict[tuple[Any, ...], list[HeldTensor]] = {}
        for tensor in group.tensors:
            copies = sorted(set(tensor.copies.values()))
            alike.setdefault((tensor.dtype, tensor.shape, tensor.parts, tuple(copies)), []).append(tensor)
        for (dtype, shape, parts, copies), tensors in alike.items():
            ranks = sorted({rank for tensor in tensors for rank in tensor.rank_bytes})
            cuts = ", ".join(f"dim {dim} in {count}" for dim, count in enumerate(parts) if count > 1) or "whole"
            total = sum(tensor.nbytes for tensor in tensors)
            rows.append(
                (
                    group.name, dtype, " x ".join(map(str, shape)) or "1", cuts,
                    " or ".join(map(str, copies)) or "none", ranges(ranks).strip("[]") if ranks else "none",
                    len(tensors), total, total, tensors[0].name,
                )
            )  # fmt: skip
    columns = (
        Column("tensors", "name"), Column("type"), Column("shape"), Column("cut"), Column("copies"), Column("ranks"),
        Column("count", "count"), Column("bytes", "bytes"), Column("share", "share"), Column("example", "name"),
    )  # fmt: skip
    text = (
        "How each kind of tensor is cut, into how many different parts along which dims, and on how many ranks there "
        "is the same part."
    )
    return Section("tensors", "How tensors are cut", text, None, (capped("tensors", "Tensors", columns, rows, 7),))
