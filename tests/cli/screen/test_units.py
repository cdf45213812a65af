"""Numbers as people write them, and the tree of names that `info --tree` prints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import transaxle as tx
from tests.checkpoints import TENSORS, tensors, tiny, write
from tests.cli.running import USAGE, Transaxle
from transaxle.arguments import parse_size
from transaxle.cli.info import Branch, name_tree
from transaxle.engine import wording as units
from transaxle.engine.wording import fold, index_products, index_ranges


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (27_872, "27.87 kB"), (123_456_789, "123.5 MB"), (1_340_000_000_000, "1.34 TB")],
)
def test_bytes(count: int, text: str) -> None:
    assert units.size(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(1, "1 parameter"), (13_936, "13,936 parameters"), (30_532_122_624, "30.53 B parameters")]
)
def test_parameters(count: int, text: str) -> None:
    assert units.parameters(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.018, "0.02 s"), (25.13, "25.1 s"), (61, "0:01:01"), (3723, "1:02:03")]
)
def test_durations(seconds: float, text: str) -> None:
    assert units.duration(seconds) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"), [(0, 0, "100 %"), (1999, 2000, "99 %"), (2, 2, "100 %"), (1, 3, "33 %")]
)
def test_only_all_of_it_is_a_hundred_percent(part: int, whole: int, text: str) -> None:
    assert units.percent(part, whole) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [("512MB", 512 * 10**6), ("1.5GiB", 3 << 29), ("100", 100), ("5 gb", 5 * 10**9), ("64M", 64 * 10**6)],
)
def test_sizes_are_read(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "GB", "5x", "-5", "1e9", "2i", "5GBB", "५GB"])
def test_texts_that_are_no_size_are_refused(text: str) -> None:
    assert parse_size(text) is None


@given(st.integers(0, 10**15))
def test_printed_sizes_are_read_back(count: int) -> None:
    read = parse_size(units.size(count))
    assert read is not None
    assert abs(read - count) <= 0.005 * count


# `transaxle info --tree`: every byte is in one branch, and names cannot print anything but themselves.


def _leaves(branch: Branch) -> Iterator[Branch]:
    inside = list(branch.branches.values())
    assert not inside or branch.tensors >= sum(each.tensors for each in inside)
    for each in inside:
        yield from _leaves(each)
    if branch.about and not inside:
        yield branch


def test_branches_add_up_to_the_bytes(tmp_path: Path) -> None:
    held = tensors()
    with tx.open(tiny(tmp_path / "tiny")) as checkpoint:
        root = name_tree(checkpoint, "tiny")
    nbytes = sum(each.nbytes for each in held.values())
    assert (root.tensors, root.nbytes) == (TENSORS, nbytes)
    leaves = list(_leaves(root))
    assert (sum(each.tensors for each in leaves), sum(each.nbytes for each in leaves)) == (TENSORS, nbytes)


def test_it_is_printed_largest_first(tmp_path: Path, transaxle: Transaxle) -> None:
    tiny(tmp_path / "tiny")
    lines = transaxle("info", "tiny", "--tree").out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("tiny  "))
    nbytes = sum(each.nbytes for name, each in tensors().items() if ".experts." in name)
    (experts,) = (line for line in lines[start:] if "experts.[0-7]" in line)
    assert f"{nbytes / 1000:.2f} kB" in experts
    assert experts.endswith("  ██████▌  48 tensors")  # 66 % of ten columns, in eighths
    assert "mlp" in lines[start + 3]
    assert transaxle("info", "tiny").out.splitlines() == lines[:start]
    for wrong in (("info", "--tree"), ("info", "tiny", "--tree", "--json")):
        assert transaxle(*wrong).code == USAGE


def test_hostile_names_are_text(tmp_path: Path, transaxle: Transaxle) -> None:
    """Names like rich's markup, escapes, very deep ones, and more branches than a person reads."""
    held = {"[red]a[/red]": np.zeros(9, np.uint8), "b\x1b[31m": np.zeros(8, np.uint8)}
    held |= {f"t{number}x": np.zeros(1, np.uint8) for number in range(30)}
    held |= {".".join("c" * depth): np.zeros(1, np.uint8) for depth in range(1, 1200, 50)}
    write(tmp_path / "odd", held)
    out = transaxle("info", "odd", "--tree").out
    assert "[red]a[/red]  9 B" in out
    assert "\x1b" not in out
    assert "… and 13 more, 13 B (--all)" in out
    assert "… and" not in transaxle("info", "odd", "--tree", "--all").out.split("\nodd  ")[1]


# Folding is a way to write names, never to invent or to lose one.

_SETS = re.compile(r"\[([0-9,-]+)\]")


def _expand(text: str) -> list[str]:
    """Write a row out again: an independent reading of what it says."""
    parts = _SETS.split(text)
    choices = []
    for held in parts[1::2]:
        bounds = [[int(end) for end in run.split("-")] for run in held.split(",")]
        choices.append([str(index) for run in bounds for index in range(run[0], run[-1] + 1)])
    literals = parts[::2]
    return ["".join(map("".join, zip(literals, (*chosen, ""), strict=True))) for chosen in product(*choices)]


SEGMENTS = st.one_of(st.integers(0, 12).map(str), st.sampled_from(["a", "w1", "w2", "007", "weight3", "x12", "bias0"]))
NAMES = st.lists(SEGMENTS, min_size=1, max_size=5).map(".".join)


@given(st.lists(NAMES, unique=True))
def test_rows_stand_for_exactly_the_names(listed: list[str]) -> None:
    rows = fold(listed)
    assert sorted(name for row in rows for name in _expand(row.name)) == sorted(listed)
    assert all(sorted(_expand(row.name)) == sorted(row.names) for row in rows)


@given(st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4))))
def test_products_are_disjoint_and_complete(positions: set[tuple[int, ...]]) -> None:
    found = [position for sets in index_products(positions) for position in product(*sets)]
    assert sorted(found) == sorted(positions)


@pytest.mark.parametrize(
    ("listed", "rows"),
    [
        (["l.0.w", "l.1.w", "l.2.w", "l.5.w"], ["l.[0-2,5].w"]),
        (["l.0.e.0", "l.0.e.1", "l.1.e.0"], ["l.0.e.[0-1]", "l.1.e.0"]),
        (["l.0.e.0", "l.0.e.1", "l.1.e.0", "l.1.e.1"], ["l.[0-1].e.[0-1]"]),
        (["m.w1", "m.w2", "m.w3"], ["m.w1", "m.w2", "m.w3"]),
        (["fc.weight0", "fc.weight1", "fc.bias0"], ["fc.weight[0-1]", "fc.bias0"]),
        (
            ["optim/l.0.w/step", "optim/l.1.w/step", "optim/#0/s", "optim/#1/s"],
            ["optim/l.[0-1].w/step", "optim/#[0-1]/s"],
        ),
        (["l.007.w", "l.7.w"], ["l.007.w", "l.7.w"]),
    ],
)
def test_what_is_an_index(listed: list[str], rows: list[str]) -> None:
    assert [row.name for row in fold(listed)] == rows


def test_unlike_tensors_stay_apart() -> None:
    assert [(row.name, row.key) for row in fold(["l.0.w", "l.1.w", "l.2.w"], ["a", "b", "a"])] == [
        ("l.[0,2].w", "a"),
        ("l.1.w", "b"),
    ]


def test_a_name_of_a_thousand_indices_is_no_trap() -> None:
    name = ".".join(["0"] * 5000)
    assert [row.name for row in fold([name])] == [name]


def test_ranges() -> None:
    assert index_ranges([3]) == "3"
    assert index_ranges([0, 1, 2, 5, 7, 8]) == "[0-2,5,7-8]"
