"""Names of the items of a training state, and its parameter groups as text."""

from __future__ import annotations

import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from tests.formats.refusals import refuses
from transaxle.errors import TransaxleError
from transaxle.formats.catalog import number
from transaxle.formats.pickled.descriptors import NOTHING, Global, Object, Scalar
from transaxle.formats.training_state import (
    NAMES,
    PARAMS,
    KeyPath,
    Leaf,
    LeafKind,
    ParamGroup,
    State,
    arrange,
    decode,
    encode,
    group_numbers,
    groups_of_equal_settings,
    plain,
    rename_parameters,
    settings_of,
)

FILE = "checkpoint"


def leaves(nested: Any, path: KeyPath = ()) -> list[Leaf]:
    """Leaves of nested dicts: `T` is a tensor; lists and texts are neither tensors nor numbers."""
    if isinstance(nested, dict):
        return [leaf for key, inner in nested.items() for leaf in leaves(inner, (*path, key))]
    if isinstance(nested, tuple):
        return [leaf for key, inner in enumerate(nested) for leaf in leaves(inner, (*path, key))]
    kind: LeafKind = "tensor" if nested == "T" else "number" if isinstance(nested, int | float) else "other"
    return [Leaf(path, kind, nested, type(nested).__name__)]


def named(nested: Any) -> State:
    return arrange(leaves(nested), file=FILE)


@pytest.mark.parametrize("root", ["model", "module", "state_dict"])
def test_one_container_is_taken_off(root: str) -> None:
    state = named({root: {"a.weight": "T", "b": 3, "c": "text"}, "epoch": 5, "name": "x"})
    assert list(state.leaves) == ["a.weight", "b", "epoch"]
    assert state.root == root
    assert state.left_behind == {"c": "str", "name": "str"}
    beside = {"training_state": ["epoch"]}
    assert state.metadata() == {"root": root, **beside, "left_behind": {"c": "str", "name": "str"}}


STATE: dict[Any, Any] = {"state": {0: {"m": "T"}, 1: {"m": "T"}}}
NAMED = {"state": {"model.norm.weight": {"exp_avg": "T", "step": "T"}, "b": {"deep": {"x": "T"}}}, "param_groups": ()}
NAMES_OF_NAMED = ["optim/model.norm.weight/exp_avg", "optim/model.norm.weight/step", "optim/b/deep.x"]
NUMBERS_OF_STATE = ["optim/#0/m", "optim/#1/m"]
NESTED: tuple[tuple[Any, list[str]], ...] = (
    # Containers that stay.
    ({"model": {"layers": {"0": "T"}, "norm": "T"}}, ["model.layers.0", "model.norm"]),
    ({"model": {"a": "T"}, "module": {"a": "T"}}, ["model.a", "module.a"]),
    ({"weights": {"a": "T"}}, ["weights.a"]),
    ({"model": "T"}, ["model"]),
    ({"model": {"a": 1}}, ["model.a"]),
    ({"x": {"model": {"a": "T"}}}, ["x.model.a"]),
    ({"a": ("T", "T"), 7: "T"}, ["a.0", "a.1", "7"]),
    # Parameters by name, wherever the optimizer lies.
    ({"model": {"b": "T"}, "optimizer": NAMED}, ["b", *NAMES_OF_NAMED]),
    ({"model": {"b": "T"}, "other": {**NAMED, "param_groups": [1]}}, ["b", *NAMES_OF_NAMED]),
    # `torch.distributed.checkpoint` makes texts of all keys.
    ({"optim": {"state": {"0": {"m": "T"}}, "param_groups": ({"params": [0]},)}}, ["optim/#0/m"]),
    # Groups that give names, and names that do not fit, which are not used.
    (
        {**STATE, "param_groups": ({"params": [0], "param_names": ["a"]}, {"params": [1], "param_names": ["b"]})},
        ["optim/a/m", "optim/b/m"],
    ),
    ({**STATE, "param_groups": ({"params": [0, 1], "param_names": ["a"]},)}, NUMBERS_OF_STATE),
    ({**STATE, "param_groups": ({"params": [0], "param_names": ["a"]}, {"params": [1]})}, NUMBERS_OF_STATE),
    ({**STATE, "param_groups": ({"params": [0, 1], "param_names": ["a", 5]},)}, NUMBERS_OF_STATE),
    ({**STATE, "param_groups": ({"params": "01", "param_names": "ab"},)}, NUMBERS_OF_STATE),
    (
        {"optimizer_states": ({"state": {0: {"m": "T"}}, "param_groups": ({"params": [0]},)},) * 2},
        ["optim/#0.0/m", "optim/#1.0/m"],
    ),
    # What is no optimizer.
    ({"state": {"a": {"b": "T"}}}, ["state.a.b"]),
    ({"encoder": {"state.a.b": "T"}}, ["encoder.state.a.b"]),
    ({"optimizer": {"scale": "T", "state": "T"}}, ["optimizer.scale", "optimizer.state"]),
    ({"param_groups": "T"}, ["param_groups"]),
)


@pytest.mark.parametrize(("nested", "expected"), NESTED)
def test_names(nested: Any, expected: list[str]) -> None:
    state = named(nested)
    assert (list(state.leaves), state.root) == (expected, "model" if "b" in expected else None)


def test_numbers_of_parameters_stay_numbers() -> None:
    """Nothing is paired by shape or order."""
    groups = ({"lr": 0.1, "betas": [0.9, 0.99], "params": [0, 1]},)
    state = named({"state": {0: {"step": 3, "exp_avg": "T"}, 1: {"exp_avg": "T"}}, "param_groups": groups})
    assert list(state.leaves) == ["optim/#0/step", "optim/#0/exp_avg", "optim/#1/exp_avg"]
    assert state.left_behind == {}
    assert state.groups == [{"lr": 0.1, "betas": [0.9, 0.99], "params": ["#0", "#1"]}]
    assert state.metadata() == {"param_groups": state.groups}


def test_flattened_keys() -> None:
    """`flatten_optimizer_state_dict` joins the keys inside the optimizer."""
    state = named({"optimizer": {"state.layers.0.weight.exp_avg": "T", "param_groups.layers.0.weight.lr": 0.1}})
    assert list(state.leaves) == ["optim/layers.0.weight/exp_avg"]
    assert state.left_behind == {}
    assert state.groups == [{"lr": 0.1, "params": ["layers.0.weight"]}]


def test_settings_are_left_behind_whole() -> None:
    """A container without tensors that holds more than numbers is settings; one of numbers only is state."""
    state = named({"a": "T", "config": {"layers": 2, "name": "x"}, "train": {"step": 5, "tokens": 7}})
    assert list(state.leaves) == ["a", "train.step", "train.tokens"]
    assert state.left_behind == {"config": "settings"}


def test_what_lies_beside_tensors_is_left_behind_by_itself() -> None:
    state = named({"a": {"w": "T", "n": 3, "extra": "x", "more": {"y": "z", "k": 1}}})
    assert list(state.leaves) == ["a.w", "a.n"]
    assert state.left_behind == {"a.extra": "str", "a.more": "settings"}


@pytest.mark.parametrize(
    "nested",
    [
        {"a.b": "T", "a": {"b": "T"}},
        {"1": "T", 1: "T"},
        {"model": {"x": "T"}, "x": 5},
        {"optim/a/m": "T", "optimizer": {"state": {"a": {"m": "T"}}}},
    ],
)
def test_two_items_of_one_name(nested: Any) -> None:
    with refuses("NAME_COLLISION", "two items", file=FILE) as caught:
        named(nested)
    assert caught.value.where.tensor


def test_names_have_an_end() -> None:
    leaf = Leaf(("x" * (1 << 20),), "other", None, "text")
    with refuses("CORRUPT", "characters"):
        arrange([leaf] * 300, file=FILE)


words = st.sampled_from(["a", "b", "model", "state", "optimizer", "param_groups", "params", "a.b", ""])
keys = words | st.integers(0, 2)
trees = st.recursive(
    st.sampled_from(["T", 1, 0.5, "text", True]),
    lambda inner: st.dictionaries(keys, inner, max_size=4) | st.lists(inner, max_size=3).map(tuple),
    max_leaves=12,
)


@given(st.dictionaries(keys, trees, max_size=4))
def test_nothing_is_lost(nested: dict[Any, Any]) -> None:
    """Every tensor has one name; every number has one, or belongs to settings; the rest is listed."""
    given = leaves(nested)
    try:
        state = arrange(given, file=FILE)
    except TransaxleError as error:
        if error.code != "NAME_COLLISION":
            raise
        reject()
    kept = list(state.leaves.values())
    tensors = [leaf for leaf in given if leaf.kind == "tensor" and "param_groups" not in leaf.path]
    assert all(leaf in kept for leaf in tensors)
    assert [leaf for leaf in given if leaf in kept] == kept
    assert bool(state.left_behind or state.groups) or len(kept) == len(given)


@given(st.integers())
def test_integers(value: int) -> None:
    found = number(value)
    if -(2**63) <= value < 2**64:
        assert found is not None
        assert found[0] == ("I64" if value < 2**63 else "U64")
        assert int.from_bytes(found[1], "little", signed=found[0] == "I64") == value
    else:
        assert found is None


@given(st.floats())
def test_floats_and_truth_values(value: float) -> None:
    assert number(value) == ("F64", struct.pack("<d", value))
    assert (number(False), number(True)) == (("BOOL", b"\0"), ("BOOL", b"\1"))


# Parameter groups as text.

NUMBERS = [np.float32(0.1), np.int64(-7), np.float64("nan"), np.bool_(True), ml_dtypes.bfloat16(1.5)]
settings = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(NUMBERS),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
groups = st.lists(
    st.dictionaries(st.sampled_from(["lr", "betas", "x"]), settings).map(lambda g: {**g, "params": ["a"]})
)


def typed(value: Any) -> Any:
    """A value with the type of every part, so that 1, 1.0 and True differ, and NaN equals itself."""
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [typed(item) for item in value]
    return type(value).__name__, repr(value)


@given(groups)
def test_text_and_back(given: list[ParamGroup]) -> None:
    assert typed(decode(encode(given))) == typed(given)


@pytest.mark.parametrize(
    "text", ["", "x", "3", "{}", "[1]", '[{"lr": 1}]', '[{"params": [1]}]', '[{"params": {}}]', "[" * 9999]
)
def test_other_text_is_not_taken_for_it(text: str) -> None:
    assert decode(text) in (None, [])


def test_what_a_setting_may_be() -> None:
    held = {"a": [1, (2.5, None)], "b": "x"}
    assert typed(plain(held)) == typed(held)
    assert typed(plain(Scalar("F32", np.float32(0.1).tobytes()))) == typed(np.float32(0.1))
    deep: object = 1
    for _ in range(20):
        deep = [deep]
    for odd in (Object(Global("a", "b")), [Object(Global("a", "b"))], {"a": b"x"}, {1: 2}, deep, {1, 2}):
        assert plain(odd) is NOTHING


def test_a_list_that_is_shared_again_and_again_is_no_setting() -> None:
    wide: object = [0] * 50
    for _ in range(5):
        wide = [wide] * 50
    assert plain(wide) is NOTHING
    assert plain({"a": wide}) is NOTHING


def test_parameters_with_equal_settings_are_a_group() -> None:
    wide, other = {"lr": 0.1, "fused": None}, {"lr": 1, "fused": None}
    found = groups_of_equal_settings(
        {"a": wide, "b": other, "c": dict(reversed(wide.items())), "d": {"lr": 1.0, "fused": None}}
    )
    assert found == [
        {**wide, "params": ["a", "c"]},
        {**other, "params": ["b"]},
        {"lr": 1.0, "fused": None, "params": ["d"]},
    ]


def test_new_names() -> None:
    old = [{"lr": 1, "params": ["a", "b", "c"]}, {"lr": 2, "params": ["d"]}]
    assert rename_parameters(old, {"a": ["x"], "b": ["x"], "d": ["y", "z"]}) == [
        {"lr": 1, "params": ["x", "c"]},
        {"lr": 2, "params": ["y", "z"]},
    ]
    assert old[0]["params"] == ["a", "b", "c"]


def test_settings_and_membership_of_groups() -> None:
    groups = [{"lr": 0.1, PARAMS: ["a", "b"]}, {"lr": 0.1, NAMES: ["x"], PARAMS: ["c"]}]
    assert [settings_of(group) for group in groups] == [{"lr": 0.1}, {"lr": 0.1}]
    assert group_numbers(groups) == {"a": 0, "b": 0, "c": 1}
