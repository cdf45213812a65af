"""Grouped parameters as a table: which names make one, and what the table says of shapes and states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from transaxle.axes.grouped import STORED, Packing, Stem, numbered, regrouped, stems, table
from transaxle.axes.relayout import Copier
from transaxle.axes.strided import row_major

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Chunk:
    """All of a tensor."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Held:
    """A stored tensor."""

    shape: tuple[int, ...]
    dtype: str = "F32"

    @property
    def extents(self) -> tuple[Chunk, ...]:
        """In one chunk."""
        return (Chunk((0,) * len(self.shape), self.shape),)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a.b.weight12", ("a.b.weight", 12, "")),
        ("weight0_scale_inv", ("weight", 0, "_scale_inv")),
        ("experts.3.fc.bias1", ("experts.3.fc.bias", 1, "")),
        ("weight", None),
        ("a.3.weight", None),
        ("weight01", None),
        ("a.7", None),
        ("w1_EFD", ("w", 1, "_EFD")),
    ],
)
def test_numbered_names(name: str, parts: Any) -> None:
    assert numbered(name) == parts


def test_names_of_both_sides_tell_what_is_grouped() -> None:
    many: Shapes = {f"a.weight{e}": (3, 4) for e in range(5)}
    many |= {f"a.weight{e}_scale_inv": (1,) for e in range(5)}
    one: Shapes = {"a.weight": (5, 3, 4), "a.weight_scale_inv": (5, 1)}
    other: Shapes = {"a.norm": (4,)}
    assert stems(["a.weight", "a.norm"], many | other) == [
        Stem("a.weight", "", 2, None, 5),
        Stem("a.weight", "_scale_inv", 1, None, 5),
    ]
    assert stems(["a.weight0", "a.weight4", "a.norm"], one | other) == [
        Stem("a.weight", "", 2, "stack", 5),
        Stem("a.weight", "_scale_inv", 1, "stack", 5),
    ]
    assert stems(["a.norm"], many | other) == []
    assert stems(["a.weight", "b.weight"], many | other) is None
    assert stems(["c"], one) is None


def test_the_table_reads_as_its_documentation() -> None:
    family = table([Stem("fc1.weight", "", 2, None, 4), Stem("fc1.bias", "", 1, "stack", 4)])
    stored, wanted = family.dialects
    assert stored.name == STORED
    assert [line.text for line in stored.lines] == ["fc1.weight{e0} = t0[x0_0 x0_1]", "fc1.bias = t1[e1 x1_0]"]
    assert [line.text for line in wanted.lines] == ["fc1.weight = t0[e0 x0_0 x0_1]", "fc1.bias{e1} = t1[x1_0]"]


@pytest.mark.parametrize(
    ("packing", "member", "packed"),
    [
        ("stack", (3, 4), (5, 3, 4)),
        ("rows", (3, 4), (15, 4)),
        ("rows", (3,), (15,)),
        ("column", (3,), (5, 1, 3)),
        ("stack", (), (5,)),
    ],
)
def test_each_packing_is_what_numpy_makes_of_it(packing: Packing, member: Any, packed: Any) -> None:
    whole = np.arange(int(np.prod(packed))).reshape(packed)
    found = regrouped([Stem("w", "", len(member), packing, 5)], {"w": Held(packed)})
    assert not found.refusals
    assert list(found.targets) == [f"w{e}" for e in range(5)]
    for e, target in enumerate(found.targets.values()):
        assert target.shape == member
        made = np.full(member, -1).reshape(-1)
        for copy in Copier({"w": Held(packed)}).copies(target):
            sizes = [size for size, _, _ in copy.move.loops]
            for index in np.ndindex(*sizes):
                there, here = (
                    sum(i * loop[side] for i, loop in zip(index, copy.move.loops, strict=True)) for side in (1, 2)
                )
                made[copy.move.target_offset + here] = whole.reshape(-1)[copy.move.source_offset + there]
        assert np.array_equal(made.reshape(member), whole.reshape(5, *member)[e])
        assert len(row_major(member)) == len(member)


def test_states_follow_and_numbers_have_to_agree() -> None:
    names = [f"w{e}" for e in range(3)]
    held = {name: Held((2, 2)) for name in names}
    held |= {f"optim/{name}/exp_avg": Held((2, 2)) for name in names}
    held |= {f"optim/{name}/step": Held(()) for name in names}
    found = regrouped([Stem("w", "", 2, None, 3)], held)
    shapes = {name: target.shape for name, target in found.targets.items()}
    assert shapes == {"w": (3, 2, 2), "optim/w/exp_avg": (3, 2, 2), "optim/w/step": ()}
    assert len(found.checks) == 2  # two steps equal the first
    del held["w1"]
    assert [refusal.code for refusal in regrouped([Stem("w", "", 2, None, 3)], held).refusals] == ["MISSING_TENSOR"]


def test_states_of_codes_of_four_bits_have_twice_their_columns() -> None:
    names = [f"w{e}" for e in range(3)]
    held = {name: Held((2, 4), "U8") for name in names} | {
        f"optim/{name}/master": Held((2, 8), "F32") for name in names
    }
    found = regrouped([Stem("w", "", 2, None, 3)], held)
    assert not found.refusals
    assert {name: target.shape for name, target in found.targets.items()} == {
        "w": (3, 2, 4),
        "optim/w/master": (3, 2, 8),
    }
    for wrong in (Held((2, 7), "F32"), Held((3, 8), "F32")):
        refused = regrouped([Stem("w", "", 2, None, 3)], held | {"optim/w1/master": wrong}).refusals
        assert {refusal.code for refusal in refused} == {"SHAPE_MISMATCH"}
    plain = held | {name: Held((2, 4), "F32") for name in names}
    assert {refusal.code for refusal in regrouped([Stem("w", "", 2, None, 3)], plain).refusals} == {"SHAPE_MISMATCH"}
