"""The report page of a live model's sharding: which rank holds which shard of which tensor, and how many copies of it
exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transaxle.engine.checkpoint_facts import ShardedTensor, Sharding
from transaxle.engine.wording import index_ranges, plural, size, split_name
from transaxle.reports.html_page import Column, Figure, Page, Section, limit_rows, shades

_MOST_GROUPS, _MOST_RANKS = 60, 256
"""Largest number of rows (tensor groups) and of columns (ranks) of the map; the tables of the page have all of them."""
_UNEVEN = 0.1
"""Imbalance above which the page shows a notice; 0.1 means that the fullest rank has 10 % more bytes than the mean."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Tensors whose names differ only in their numbers."""

    name: str
    """Common name of the tensors, with `*` instead of the numbers."""
    tensors: Sequence[ShardedTensor]
    """The tensors of the group."""

    @property
    def nbytes(self) -> int:
        """Total bytes of the group's tensors; each tensor is counted once, however many ranks hold it."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def bytes_by_rank(self) -> dict[int, tuple[int, float]]:
        """Return rank -> (bytes of the group's tensors on the rank, mean number of ranks that hold the same shard)."""
        sums: dict[int, tuple[int, int]] = {}
        for tensor in self.tensors:
            for rank, count in tensor.rank_bytes.items():
                byte_sum, copied = sums.get(rank, (0, 0))
                sums[rank] = byte_sum + count, copied + count * tensor.copies[rank]
        return {rank: (count, copied / count) for rank, (count, copied) in sums.items()}


def sharding_page(sharding: Sharding, title: str = "Live model") -> Page:
    """Return the page of a live model's sharding.

    Args:
        sharding: description of the shards of the model on all ranks.
        title: title of the page.
    """
    groups, rank_bytes = _groups(sharding), sharding.rank_bytes
    fullest = max(rank_bytes.values(), default=0)
    return Page(
        kind="sharding",
        title=title,
        headline=f"{plural(len(sharding.tensors), 'tensor')} on {plural(len(sharding.ranks), 'rank')}",
        tiles=(
            (size(sharding.nbytes), "of the model, once"),
            (size(fullest), "on the fullest rank"),
            (f"{100 * sharding.imbalance:.1f} %", "more there than on average"),
            (size(sharding.spare_bytes), "of copies on all ranks"),
        ),
        first="What is unusual",
        notices=tuple(_notices(sharding)),
        quiet=(
            f"Searched for: empty ranks, ranks more than {_UNEVEN:.0%} above the mean, and tensors that are whole on "
            "every rank. Plain tensors with one name on several ranks count as copies. Gradients, optimizer states and "
            "activations are not counted."
        ),
        sections=tuple(_sections(sharding, groups)),
        facts={
            "bytes": sharding.nbytes, "rank_bytes": {str(rank): count for rank, count in rank_bytes.items()},
            "imbalance": sharding.imbalance, "spare_bytes": sharding.spare_bytes,
        },
    )  # fmt: skip


def _groups(sharding: Sharding) -> list[_Group]:
    by_name: dict[str, list[ShardedTensor]] = {}
    for tensor in sharding.tensors:
        by_name.setdefault("*".join(split_name(tensor.name)[0]), []).append(tensor)
    return [_Group(name, tensors) for name, tensors in by_name.items()]


def _coordinates_text(sharding: Sharding, rank: int) -> str:
    """Return a rank's coordinates on the named mesh dims as text, such as `dp 0, tp 1`; return "" if they are
    unknown.
    """
    return ", ".join(f"{name} {place}" for name, place in sharding.coordinates.get(rank, {}).items())


def _mesh_column(sharding: Sharding) -> tuple[Column, ...]:
    """Return the table column for mesh coordinates; return no column if no rank's coordinates are known."""
    return (Column("mesh"),) if sharding.coordinates else ()


def _mesh_cell(sharding: Sharding, rank: int) -> tuple[str, ...]:
    """Return a rank's cell in the column for mesh coordinates; return no cell if the table has no such column."""
    return (_coordinates_text(sharding, rank),) if sharding.coordinates else ()


def _notices(sharding: Sharding) -> Iterator[tuple[str, str]]:
    rank_bytes = sharding.rank_bytes
    empty = [rank for rank, count in rank_bytes.items() if not count]
    if empty:
        yield "Ranks with nothing", f"{'rank' if len(empty) == 1 else 'ranks'} {index_ranges(empty)}."
    if sharding.imbalance > _UNEVEN:
        fullest = max(rank_bytes, key=lambda rank: rank_bytes[rank])
        mean = size(round(sum(rank_bytes.values()) / len(rank_bytes)))
        yield "Uneven", f"Rank {fullest} holds {size(rank_bytes[fullest])}; the mean is {mean}."
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
    yield _map_section(sharding, groups)
    yield _ranks_section(sharding)
    yield _tensors_section(groups)
    if sharding.aliases:
        columns = Column("name", "name"), Column("is the same tensor as", "name")
        table = limit_rows("aliases", "Names", columns, list(sharding.aliases.items()))
        yield Section("aliases", "Tied tensors", tables=(table,))


def _map_section(sharding: Sharding, groups: Sequence[_Group]) -> Section:
    """Return the section with the map, which has one row per group of tensors, and one column per rank."""
    largest = sorted(groups, key=lambda group: -group.nbytes)[:_MOST_GROUPS]
    largest_ids = set(map(id, largest))
    shown = [group for group in groups if id(group) in largest_ids]
    ranks = sharding.ranks[:_MOST_RANKS]
    cells: list[Any] = []
    for row, group in enumerate(shown):
        bytes_and_copies = group.bytes_by_rank()
        for column, rank in enumerate(ranks):
            count, copies = bytes_and_copies.get(rank, (0, 0.0))
            lines = (f"{size(count)} of {size(group.nbytes)}", plural(len(group.tensors), "tensor"))
            share = count / group.nbytes if group.nbytes else 0.0
            cells.append((column, row, "" if count else "none", (share, copies), lines if count else ()))
    measured = [[values[at] for _, _, state, values, _ in cells if not state] for at in (0, 1)]
    data = {
        "columns": [str(rank) for rank in ranks],
        "rows": [group.name for group in shown],
        "across": "rank",
        "notes": [_coordinates_text(sharding, rank) for rank in ranks],
        "measures": [
            {"title": "Share of the tensors", "kind": "share", **shades(measured[0], "{:.4g} %", 100)},
            {"title": "Ranks with the same part", "kind": "number", **shades(measured[1], "{:.4g}", 1)},
        ],
        "states": {"none": "nothing on this rank"},
        "cells": cells,
    }
    text = (
        "A row stands for all tensors whose names differ only in numbers, a column for a rank; the colour shows the "
        "share of their bytes on that rank, or the number of ranks with the same part."
    )
    if len(shown) < len(groups) or len(ranks) < len(sharding.ranks):
        text += f" The figure has the largest {len(shown)} rows and the first {len(ranks)} ranks; the tables have all."
    label = f"Map of {plural(len(shown), 'kind')} of tensors on {plural(len(ranks), 'rank')}; a table has its numbers."
    heads = (
        Column("tensors", "name"), Column("rank"), *_mesh_column(sharding), Column("bytes", "bytes"),
        Column("share", "number"), Column("copies", "number"),
    )  # fmt: skip
    rows = [
        (group.name, rank, *_mesh_cell(sharding, rank), count, count / group.nbytes, copies)
        for group in groups
        for rank, (count, copies) in sorted(group.bytes_by_rank().items())
    ]
    table = limit_rows("held", "Parts on each rank", heads, rows, 2 + len(_mesh_column(sharding)))
    return Section("map", "Which rank holds which part", text, Figure("heat", label, data), (table,))


def _ranks_section(sharding: Sharding) -> Section:
    rank_bytes = sharding.rank_bytes
    mean = sum(rank_bytes.values()) / len(rank_bytes) if rank_bytes else 0.0
    rows = [
        (rank, *_mesh_cell(sharding, rank), count, count, count / mean - 1 if mean else 0.0)
        for rank, count in rank_bytes.items()
    ]
    columns = (
        Column("rank"), *_mesh_column(sharding), Column("bytes", "bytes"), Column("share", "share"),
        Column("above the mean", "number"),
    )  # fmt: skip
    data = {
        "series": [
            {
                "title": "rank",
                "kind": "bytes",
                "of": "bytes",
                "bars": [(str(rank), count) for rank, count in rank_bytes.items()],
                "notes": [_coordinates_text(sharding, rank) for rank in rank_bytes],
            }
        ]
    }
    label = f"Bars: bytes of parameters on each of {plural(len(rank_bytes), 'rank')}; a table has the numbers."
    table = limit_rows("ranks", "Ranks", columns, rows)
    return Section("ranks", "Bytes by rank", "", Figure("bars", label, data), (table,))


def _tensors_section(groups: Sequence[_Group]) -> Section:
    rows = []
    for group in groups:
        alike: dict[tuple[Any, ...], list[ShardedTensor]] = {}
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
                    " or ".join(map(str, copies)) or "none", index_ranges(ranks).strip("[]") if ranks else "none",
                    len(tensors), total, total, tensors[0].name,
                )
            )  # fmt: skip
    columns = (
        Column("tensors", "name"), Column("type"), Column("shape"), Column("cut"), Column("copies"), Column("ranks"),
        Column("count", "count"), Column("bytes", "bytes"), Column("share", "share"), Column("example", "name"),
    )  # fmt: skip
    text = (
        "For each kind of tensor: into how many different parts it is cut, along which dims, and how many ranks have "
        "the same part."
    )
    return Section("tensors", "How tensors are cut", text, None, (limit_rows("tensors", "Tensors", columns, rows, 7),))
