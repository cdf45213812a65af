"""Parameter groups as text: what is written comes back with its types, and nothing else is taken for it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transaxle.formats.pickled.descriptors import NOTHING, Global, Object, Scalar
from transaxle.formats.training_state import (
    NAMES,
    PARAMS,
    ParamGroup,
    decode,
    encode,
    group_numbers,
    groups_of_equal_settings,
    plain,
    rename_parameters,
    settings_of,
)

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
