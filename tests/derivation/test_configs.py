"""Tiny configs, their sizes and proportions, and conditions: what a config says of where tensors are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from transaxle.derivation.configs import INDEX, Presence, Sizes, condition
from transaxle.derivation.tiny_configs import MORE_VARIANTS, OWN, PROPORTIONED, SMALL, VARIANTS, tiny
from transaxle.derivation.transformers_models import _search, nearest

PICTURE: dict[str, Any] = {
    "model_type": "picture",
    "projection_dim": 512,
    "text_config": {"model_type": "words", "hidden_size": 512, "num_hidden_layers": 12, "type_vocab_size": 1},
    "vision_config": {"model_type": "pixels", "hidden_size": 768, "num_hidden_layers": 12, "patch_size": 32},
}
STAGED: dict[str, Any] = {
    "depths": [2, 2, 6, 2], "num_layers": 4, "embed_dim": 96, "hidden_size": 768, "stage_names": ["stem", "stage1"],
}  # fmt: skip


@pytest.mark.parametrize("variant", range(VARIANTS))
def test_keys_that_are_equal_by_default_have_sizes_of_their_own(variant: int) -> None:
    made = tiny(PICTURE, variant, apart=True)
    sizes = {made["projection_dim"], made["text_config"]["hidden_size"], made["vision_config"]["hidden_size"]}
    assert len(sizes) == 3
    assert made["text_config"]["type_vocab_size"] > 1
    assert made["text_config"]["num_hidden_layers"] != made["vision_config"]["num_hidden_layers"]


@pytest.mark.parametrize("key", ["intermediate_size", "d_ff", "dff"])
def test_widths_of_feed_forward_layers_are_known_by_every_name(key: str) -> None:
    """Of CTRL's, `dff`, nothing was told, and a model of 8,192 took a gigabyte to trace."""
    assert len({tiny({key: 8192}, variant)[key] for variant in range(VARIANTS)}) == VARIANTS
    assert tiny({key: 8192}, PROPORTIONED, sizes=SMALL)[key] < 1024


def test_variants_differ_in_sizes_and_further_ones_in_flags() -> None:
    config = {"hidden_size": 512, **{f"use_{number}": False for number in range(12)}}
    made = [tiny(config, variant, flip=True) for variant in range(MORE_VARIANTS)]
    assert len({each["hidden_size"] for each in made[:VARIANTS]}) == VARIANTS
    assert made[1]["hidden_size"] == made[1 + VARIANTS]["hidden_size"]
    flags = [tuple(each[f"use_{number}"] for each in made) for number in range(12)]
    assert len(set(flags)) == len(flags)


def test_proportions_are_those_of_the_model() -> None:
    made = tiny(PICTURE, PROPORTIONED, sizes=SMALL)
    wide, narrow = made["vision_config"]["hidden_size"], made["text_config"]["hidden_size"]
    assert wide * 512 == narrow * 768
    assert made["projection_dim"] == narrow


def test_stages_stay_as_many_where_their_sizes_are_divided() -> None:
    assert tiny(STAGED, 1, sizes=SMALL) == {**STAGED, "embed_dim": 6, "hidden_size": 48}
    listed = {"depths": [2, 2], "num_layers": 2, "hidden_sizes": [256, 512]}
    assert tiny(listed, 1, sizes=SMALL)["hidden_sizes"] == [16, 32]


def test_widths_that_follow_from_others_are_left_to_transformers() -> None:
    assert tiny(STAGED, 1, sizes=OWN) == {"depths": [2, 2, 6], "embed_dim": 96}


def test_the_nearest_config_has_every_change_that_fits() -> None:
    """Heads must be as many as groups, the layers have a list of their own, and one size must not change."""
    base: dict[str, Any] = {
        "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 512,
        "intermediate_size": 2048, "inner_config": {"hidden_size": 256}, "stage_names": ["a"],
    }  # fmt: skip
    tried: list[Mapping[str, Any]] = []

    def builds(config: Mapping[str, Any]) -> bool:
        tried.append(config)
        alike = config["num_attention_heads"] == config["num_key_value_heads"]
        return bool(alike and config["intermediate_size"] == 2048)

    goals = [tiny(base, 1, sizes=sizes) for sizes in (OWN, SMALL)]
    made = nearest(base, goals, builds)
    assert made == {
        "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 96, "head_dim": 24,
        "intermediate_size": 2048, "inner_config": {"hidden_size": 96},
    }  # fmt: skip
    assert base["inner_config"] == {"hidden_size": 256}
    assert len(tried) < 40


def test_towers_of_a_searched_config_have_as_many_layers_as_no_other() -> None:
    """Else one axis would number the layers of both: a class that refuses other rotary widths, as `hy_v4_vl` does."""
    base = {
        "text_config": {"num_hidden_layers": 78, "hidden_size": 512, "qk_rope_head_dim": 64},
        "vision_config": {"num_hidden_layers": 40, "hidden_size": 256},
    }

    def builds(config: Mapping[str, Any]) -> bool:
        return bool(config["text_config"]["qk_rope_head_dim"] == 64)

    for variant in range(VARIANTS):
        (config,) = _search(base, variant, builds)
        text, tower = (config[key]["num_hidden_layers"] for key in base)
        assert text != tower
        assert max(text, tower) < 8


def test_a_config_that_does_not_build_leads_nowhere() -> None:
    assert nearest({"hidden_size": 512}, [{"hidden_size": 64}], lambda _: False) is None


# Conditions: what a config says of where tensors are.

CASES: tuple[tuple[str, list[tuple[dict[str, Any], int, set[int]]]], ...] = (
    ("attention_bias", [({"attention_bias": True}, 0, {0}), ({"attention_bias": False}, 0, set())]),
    (f"{INDEX} >= first_dense", [({"first_dense": 1}, 4, {1, 2, 3}), ({"first_dense": 2}, 3, {2})]),
    (f'kinds[{INDEX}] == "full"', [({"kinds": ["a", "full"]}, 2, {1}), ({"kinds": ["full", "a", "full"]}, 3, {0, 2})]),
    (f"{INDEX} in sparse_list", [({"sparse_list": [0, 2]}, 3, {0, 2}), ({"sparse_list": [1]}, 3, {1})]),
    (f"{INDEX} % attn_period == attn_offset",
     [({"attn_period": 3, "attn_offset": 1}, 6, {1, 4}), ({"attn_period": 2, "attn_offset": 0}, 4, {0, 2})]),
    ("(tied|True)", [({}, 0, {0}), ({"tied": False}, 0, set())]),
    # What is tied says nothing of a layer.
    ("not use_gate", [({"tie_word_embeddings": False, "use_gate": False}, 0, {0}),
                      ({"tie_word_embeddings": True, "use_gate": True}, 0, set())]),
    (f"{INDEX} == 0", [({"start_token": 0, "proj_layers": 0}, count, {0}) for count in (3, 4)]),
)  # fmt: skip


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


def test_modules_between_the_first_and_the_last_are_counted() -> None:
    """Of keys that the module's name speaks of; of two that would do, neither."""
    sizes = Sizes([{"layers": 4, "blocks": 4}, {"layers": 6, "blocks": 6}], {})
    assert sizes.less({0: 2, 1: 4}, "", "layers".__eq__) == "layers-2"
    assert sizes.less({0: 3, 1: 5}, "", "layers".__eq__) == "layers-1"
    assert sizes.less({0: 1, 1: 3}, "", "layers".__eq__) is None
    assert sizes.less({0: 2, 1: 4}, "", {"layers", "blocks"}.__contains__) is None


@pytest.mark.parametrize("variant", range(VARIANTS))
def test_two_vocabularies_of_one_embedding_are_divided_evenly(variant: int) -> None:
    config = {"model_type": "molmo2_text", "vocab_size": 151936, "additional_vocab_size": 128, "hidden_size": 4096}
    small = tiny(config, variant)
    assert small["vocab_size"] != small["additional_vocab_size"]
    assert (small["vocab_size"] + small["additional_vocab_size"]) % 2 == 0


def test_other_spellings_of_a_key_stand_beside_it() -> None:
    sizes = Sizes([{"num_experts": 4}, {"num_experts": 5}], {"num_experts": ["num_local_experts"]})
    assert sizes.formula({0: 4, 1: 5}) == "num_experts|num_local_experts"
