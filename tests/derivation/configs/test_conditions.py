"""Conditions: what a config says of where tensors are."""

from __future__ import annotations

from typing import Any

import pytest

from transaxle.derivation.configs import INDEX, Presence, Sizes, condition

CASES: tuple[tuple[str, list[tuple[dict[str, Any], int, set[int]]]], ...] = (
    ("attention_bias", [({"attention_bias": True}, 0, {0}), ({"attention_bias": False}, 0, set())]),
    (f"{INDEX} >= first_dense", [({"first_dense": 1}, 4, {1, 2, 3}), ({"first_dense": 2}, 3, {2})]),
    (f'kinds[{INDEX}] == "full"', [({"kinds": ["a", "full"]}, 2, {1}), ({"kinds": ["full", "a", "full"]}, 3, {0, 2})]),
    (f"{INDEX} in sparse_list", [({"sparse_list": [0, 2]}, 3, {0, 2}), ({"sparse_list": [1]}, 3, {1})]),
    (
        f"{INDEX} % attn_period == attn_offset",
        [({"attn_period": 3, "attn_offset": 1}, 6, {1, 4}), ({"attn_period": 2, "attn_offset": 0}, 4, {0, 2})],
    ),
    ("(tied|True)", [({}, 0, {0}), ({"tied": False}, 0, set())]),
    (
        "not use_gate",  # what is tied says nothing of a layer
        [
            ({"tie_word_embeddings": False, "use_gate": False}, 0, {0}),
            ({"tie_word_embeddings": True, "use_gate": True}, 0, set()),
        ],
    ),
    (f"{INDEX} == 0", [({"start_token": 0, "proj_layers": 0}, count, {0}) for count in (3, 4)]),
)


@pytest.mark.parametrize(("expected", "traces"), CASES)
def test_a_condition_is_found(expected: str, traces: list[tuple[dict[str, Any], int, set[int]]]) -> None:
    assert condition([Presence(config, count, frozenset(here)) for config, count, here in traces]) == expected


def test_sizes_are_no_conditions() -> None:
    """That a tensor is there where some size is 3 is an accident."""
    assert condition([Presence({"heads": 3}, 0, frozenset({0})), Presence({"heads": 4}, 0, frozenset())]) is None
    depths = ([2, 2, 6], [2, 6, 2])
    assert condition([Presence({"depths": each}, 3, frozenset({each.index(6)})) for each in depths]) is None
    assert condition([Presence({"depths": [1, 2, 2]}, count, frozenset({1, 2})) for count in (4, 5)]) is None


def test_careful_takes_no_one_of_two() -> None:
    seen = [Presence({"a_bias": True, "b_bias": True}, 0, frozenset({0}))]
    seen.append(Presence({"a_bias": False, "b_bias": False}, 0, frozenset()))
    assert condition(seen, ["b_"]) == "b_bias"
    assert condition(seen, ["b_"], careful=True) is None


def test_a_size_that_two_keys_have_has_no_formula() -> None:
    sizes = Sizes([{"one": 4, "two": 4, "hidden_size": 6}, {"one": 5, "two": 5, "hidden_size": 7}], {})
    assert sizes.formula({0: 4, 1: 5}) is None
    assert sizes.formula({0: 6, 1: 7}) == "hidden_size"
    assert sizes.formula({0: 24, 1: 35}, deep=True) in {"one*hidden_size", "two*hidden_size"}


def test_other_spellings_of_a_key_stand_beside_it() -> None:
    sizes = Sizes([{"num_experts": 4}, {"num_experts": 5}], {"num_experts": ["num_local_experts"]})
    assert sizes.formula({0: 4, 1: 5}) == "num_experts|num_local_experts"
