"""`transaxle info --tree`: every byte is in one branch, and names cannot print anything but themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

import transaxle as tx
from tests.checkpoints import TENSORS, tensors, tiny, write
from tests.cli.conftest import here, transaxle  # noqa: F401 - fixtures
from tests.cli.running import USAGE, Transaxle
from transaxle.cli.info import Branch, name_tree


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


def test_it_is_printed_largest_first(tmp_path: Path, transaxle: Transaxle) -> None:  # noqa: F811
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


def test_hostile_names_are_text(tmp_path: Path, transaxle: Transaxle) -> None:  # noqa: F811
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
