"""Chunks of a tensor of several layers or experts: what one module of one layer holds, and no less."""

from __future__ import annotations

from transaxle.axes.layout.relayout import Target, chunk_cuts
from transaxle.axes.notation.expression import parse

SIZES = {"l": 2, "e": 3, "h": 4, "i": 5}
NUMBERED = {"router": {"l"}, "gate": {"l", "e"}, "up": {"l", "e"}, "down": {"l", "e"}}


def target(text: str) -> Target:
    return Target("x", "BF16", parse(text).layout(SIZES), {}, (), "")


def test_what_each_module_holds() -> None:
    targets = {
        "router": target("router[l e h]"),
        "fc1": target("[l e [gate:i | up:i] h]"),
        "fc2": target("down[l e h i]"),
        "norm": target("norm[h]"),
    }
    assert chunk_cuts(targets, NUMBERED) == {
        # A router has a row for each expert, and is one module.
        "router": ((0, 1), (0,)),
        "fc1": ((0, 1), (0, 1, 2), (0, 5)),
        "fc2": ((0, 1), (0, 1, 2), (0,)),
    }
