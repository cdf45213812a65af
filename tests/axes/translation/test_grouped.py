"""Grouped parameters as a table: which names make one, and what the table says of shapes and states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.some import some
from transaxle.axes.layout.relayout import Copier, Target
from transaxle.axes.translation.grouped import (
    COLUMN,
    MEMBERS,
    ROWS,
    STACK,
    Arrangement,
    Packing,
    Regrouping,
    arrange,
    groups,
    regroup,
    split_number,
)

Shapes = dict[str, tuple[int, ...]]


THREE = Regrouping("w", "", 2, 3, MEMBERS, STACK)


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


@pytest.mark.parametrize(("name", "parts"), [
    ("a.b.weight12", ("a.b.weight", 12, "")),
    ("weight0_scale_inv", ("weight", 0, "_scale_inv")),
    ("experts.3.fc.bias1", ("experts.3.fc.bias", 1, "")),
    ("weight", None),
    ("a.3.weight", None),
    ("weight01", None),
    ("a.7", None),
    ("w1_EFD", ("w", 1, "_EFD")),
])  # fmt: skip
def test_numbered_names(name: str, parts: Any) -> None:
    assert split_number(name) == parts


def _found(wanted: Shapes, stored: Shapes) -> Arrangement:
    return arrange(groups(wanted, stored), stored)


MANY: Shapes = {f"a.weight{e}": (3, 4) for e in range(5)}
ONE: Shapes = {"a.weight": (5, 3, 4)}
BELOW: Shapes = {"a.weight": (15, 4)}
SCALES: Shapes = {f"a.weight{e}_scale_inv": (1,) for e in range(5)}
STACKED: Shapes = {"a.weight_scale_inv": (5, 1)}


def test_names_of_both_sides_tell_what_is_grouped() -> None:
    other: Shapes = {"a.norm": (4,)}
    assert _found(ONE | STACKED | other, MANY | SCALES | other).stems == (
        Regrouping("a.weight", "", 2, 5, MEMBERS, STACK),
        Regrouping("a.weight", "_scale_inv", 1, 5, MEMBERS, STACK),
    )
    assert _found(MANY | SCALES, ONE | STACKED).stems == (
        Regrouping("a.weight", "", 2, 5, STACK, MEMBERS),
        Regrouping("a.weight", "_scale_inv", 1, 5, STACK, MEMBERS),
    )
    # buffers that nobody asks for go with the codes
    assert {stem.suffix for stem in _found(ONE, MANY | SCALES).stems} == {"", "_scale_inv"}
    assert {stem.suffix for stem in _found(MANY, ONE | STACKED).stems} == {"", "_scale_inv"}
    for same in (ONE | STACKED | other, MANY | SCALES | other):
        assert _found(same, same) == Arrangement((), (), frozenset())


def test_a_shape_tells_how_one_tensor_holds_experts() -> None:
    biases: Shapes = {f"a.bias{e}": (3,) for e in range(5)}
    cases: list[tuple[Shapes, Shapes, Regrouping]] = [
        (MANY, BELOW, Regrouping("a.weight", "", 2, 5, ROWS, MEMBERS)),
        (ONE, BELOW, Regrouping("a.weight", "", 2, 5, ROWS, STACK)),
        (biases, {"a.bias": (5, 1, 3)}, Regrouping("a.bias", "", 1, 5, COLUMN, MEMBERS)),
        ({"a.bias": (5, 3)}, {"a.bias": (5, 1, 3)}, Regrouping("a.bias", "", 1, 5, COLUMN, STACK)),
        ({"a.bias": (5, 3)}, {"a.bias": (15,)}, Regrouping("a.bias", "", 1, 5, ROWS, STACK)),
        (biases, {"a.bias": (15,)}, Regrouping("a.bias", "", 1, 5, ROWS, MEMBERS)),
    ]
    for wanted, stored, stem in cases:
        assert _found(wanted, stored).stems == (stem,)
    # scales of one row for each expert, below each other: not a stack of rows without a dim
    blocks: Shapes = {f"a.weight{e}_scale_inv": (1, 2) for e in range(5)}
    found = _found(MANY | blocks, BELOW | {"a.weight_scale_inv": (5, 2)}).stems
    assert found[1] == Regrouping("a.weight", "_scale_inv", 2, 5, ROWS, MEMBERS)


def test_other_layers_with_such_names_are_left_alone() -> None:
    """A convolution, a recurrent layer of fewer levels, a linear layer from what is flat."""
    cases: list[tuple[Shapes, Shapes]] = [
        ({"conv.weight": (64, 3, 7)}, {"conv.weight": (32, 3, 7)}),
        ({"conv.weight": (8, 4, 7)}, {"conv.weight": (8, 4)}),
        ({"fc.weight": (3, 4)}, {"fc.weight": (12,)}),
        ({"r.weight_l0": (3, 4)}, {"r.weight_l0": (3, 4), "r.weight_l1": (3, 4)}),
        ({"alpha": (8, 4)}, {"alpha1": (4,)}),
        ({"alpha0": (8,), "alpha1": (8,)}, {"alpha": (16,)}),
        ({"fc.weight": (3, 4)}, {"fc.weight0": (3, 4), "fc.weight1": (3, 4)}),
        ({"a.x0": (2,), "a.x1": (2,)}, {"a.x0": (2,), "a.x1": (2,), "a.x": (3, 2)}),
    ]
    for wanted, stored in cases:
        assert _found(wanted, stored) == Arrangement((), (), frozenset())


@pytest.mark.parametrize(("wanted", "stored", "code", "message"), [
    (MANY, {f"a.weight{e}": (3, 4) for e in range(6)}, "SHAPE_MISMATCH", "has 6 experts, the layer 5"),
    (ONE, {f"a.weight{e}": (3, 4) for e in range(4)}, "SHAPE_MISMATCH", "has 4 experts, the layer 5; 4 are missing"),
    (MANY, {"a.weight": (6, 3, 4)}, "SHAPE_MISMATCH", "has 6 experts, the layer 5"),
    (ONE, {"a.weight": (18, 4)}, "SHAPE_MISMATCH", "has 6 experts, the layer 5"),
    (MANY, {"a.weight": (16, 4)}, "SHAPE_MISMATCH", "has 16 rows, not a whole number of experts"),
    (ONE, {n: s for n, s in MANY.items() if n[-1] not in "13"}, "INCOMPLETE", "experts 1, 3 of 5 are missing"),
    (MANY, {n: s for n, s in MANY.items() if n[-1] not in "13"}, "INCOMPLETE", "experts 1, 3 of 5 are missing"),
    (MANY, ONE | {"a.weight7": (3, 4)}, "SHAPE_MISMATCH", "has at least 8 experts, the layer 5"),
    (MANY | SCALES, ONE | {"a.weight_scale_inv": (1,)}, "UNSUPPORTED", "not one scale for each of 5 experts"),
])  # fmt: skip
def test_another_set_of_experts_is_refused(wanted: Shapes, stored: Shapes, code: str, message: str) -> None:
    found = _found(wanted, stored)
    assert [refusal.code for refusal in found.problems] == [code]
    assert message in found.problems[0].message
    whole = some(found.problems[0].where.tensor)
    assert {name for name in (*wanted, *stored) if name.startswith(whole) and "_scale" not in name} <= found.broken or (
        code == "UNSUPPORTED"
    )


def test_both_forms_are_told_and_states_follow_either() -> None:
    both = MANY | ONE
    for wanted, form in ((MANY, MEMBERS), (ONE, STACK)):
        (stem,) = _found(wanted, both).stems
        assert stem == Regrouping("a.weight", "", 2, 5, STACK, form, (0, 1, 2, 3, 4))
        held = {name: Held(shape) for name, shape in both.items()}
        for states in (MANY, ONE):
            moments = {f"optim/{name}/exp_avg": Held(shape) for name, shape in states.items()}
            found = regroup([stem], held | moments)
            assert not found.refusals
            names = dict.fromkeys(wanted, (5, 3, 4) if form == STACK else (3, 4))
            names |= {f"optim/{name}/exp_avg": shape for name, shape in names.items()}
            assert {name: target.shape for name, target in found.targets.items()} == names
            assert [check.first.name for check in found.checks] == list(MANY)
    unlike = {**{name: Held(shape) for name, shape in both.items()}, "a.weight2": Held((3, 4), "F16")}
    (stem,) = _found(MANY, both).stems
    assert [one.where.tensor for one in regroup([stem], unlike).refusals] == ["a.weight2"]


@pytest.mark.parametrize(("packing", "member", "packed"), [
    (STACK, (3, 4), (5, 3, 4)),
    (ROWS, (3, 4), (15, 4)),
    (ROWS, (3,), (15,)),
    (COLUMN, (3,), (5, 1, 3)),
    (STACK, (), (5,)),
])  # fmt: skip
def test_each_packing_is_what_numpy_makes_of_it(packing: Packing, member: Any, packed: Any) -> None:
    whole = np.arange(int(np.prod(packed))).reshape(packed)
    stem = Regrouping("w", "", len(member), 5, packing, MEMBERS)
    found = regroup([stem], {"w": Held(packed)})
    assert not found.refusals
    assert list(found.targets) == [f"w{e}" for e in range(5)] == stem.targets
    for e, target in enumerate(found.targets.values()):
        assert target.shape == member
        assert np.array_equal(_read(target, whole), whole.reshape(5, *member)[e])
    again = regroup([msgspec.structs.replace(stem, requested=STACK)], {"w": Held(packed)})
    assert np.array_equal(_read(again.targets["w"], whole), whole.reshape(5, *member))
    back = regroup([stem.invert()], {f"w{e}": Held(member) for e in range(5)})
    assert back.targets["w"].shape == packed


def _read(target: Target, whole: np.ndarray) -> np.ndarray:
    """What a target's copies make of one stored tensor, element by element."""
    made = np.full(target.shape, -1).reshape(-1)
    for copy in Copier({"w": Held(whole.shape)}).copies(target):
        for index in np.ndindex(*[size for size, _, _ in copy.move.loops]):
            there, here = (
                sum(i * loop[side] for i, loop in zip(index, copy.move.loops, strict=True)) for side in (1, 2)
            )
            made[copy.move.target_offset + here] = whole.reshape(-1)[copy.move.source_offset + there]
    return made.reshape(target.shape)


def test_states_follow_and_numbers_have_to_agree() -> None:
    names = [f"w{e}" for e in range(3)]
    held = {name: Held((2, 2)) for name in names}
    held |= {f"optim/{name}/exp_avg": Held((2, 2)) for name in names}
    held |= {f"optim/{name}/step": Held(()) for name in names}
    found = regroup([THREE], held)
    shapes = {name: target.shape for name, target in found.targets.items()}
    assert shapes == {"w": (3, 2, 2), "optim/w/exp_avg": (3, 2, 2), "optim/w/step": ()}
    assert len(found.checks) == 2  # two steps equal the first
    del held["w1"]
    assert [refusal.code for refusal in regroup([THREE], held).refusals] == ["MISSING_TENSOR"]


def test_states_of_codes_of_four_bits_have_twice_their_columns() -> None:
    names = [f"w{e}" for e in range(3)]
    held = {name: Held((2, 4), "U8") for name in names}
    held |= {f"optim/{name}/master": Held((2, 8), "F32") for name in names}
    found = regroup([THREE], held)
    assert not found.refusals
    shapes = {name: target.shape for name, target in found.targets.items()}
    assert shapes == {"w": (3, 2, 4), "optim/w/master": (3, 2, 8)}
    for wrong in (Held((2, 7), "F32"), Held((3, 8), "F32")):
        refused = regroup([THREE], held | {"optim/w1/master": wrong}).refusals
        assert {refusal.code for refusal in refused} == {"SHAPE_MISMATCH"}
    plain = held | {name: Held((2, 4), "F32") for name in names}
    assert {refusal.code for refusal in regroup([THREE], plain).refusals} == {"SHAPE_MISMATCH"}
