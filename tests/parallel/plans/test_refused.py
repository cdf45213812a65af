"""Wrong plans, and models of which too little is known: refused before anything is cut, with the numbers."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.live.ranks import run
from tests.parallel.models import CONFIGS, EVEN, build
from transaxle.errors import TransaxleError
from transaxle.parallel.tensor_parallel import check_type, tensor_parallel
from transaxle.parallel.tp_plan import Plan, Role, make_plan, read

QUERY, KEY, OUT = (f"model.layers.0.self_attn.{name}_proj" for name in "qko")
ATTENTION = "model.layers.*.self_attn.*"


def _plan(config: dict[str, Any], ranks: int, rules: Any = None) -> Plan:
    model = build(config)
    return make_plan(model, read(model), ranks, rules)


def _refused(config: dict[str, Any], ranks: int, rules: Any = None) -> str:
    with pytest.raises(TransaxleError) as caught:
        _plan(config, ranks, rules)
    return str(caught.value)


@pytest.mark.parametrize(
    ("rules", "ranks", "said"),
    [
        ({QUERY: "row"}, 2, (QUERY, "row would cut dim 1 of [64, 32]", "axis d of 32", "allows: g in dim 0")),
        ({OUT: "column"}, 2, (OUT, "column would cut dim 0 of [32, 64]", "allows: g in dim 1")),
        ({"model.layers.9.mlp.up_proj": "column"}, 2, ("model.layers.9.mlp.up_proj", "no such module")),
        ({"model.layers.*.attn.q_proj": "column"}, 2, ("no such module", "the closest is")),
        ({QUERY: "columns"}, 2, ("there is no kind of cut 'columns'", "column, vocabulary, row")),
        ({QUERY: "replicate"}, 2, (QUERY, "g=4 is cut in", "in all or none")),
        (
            {QUERY: ("column", (20, 44))},
            2,
            (QUERY, "20 rows on rank 0 are 1.25 times the 16 rows of one g"),
        ),
        ({QUERY: ("column", (32, 16))}, 2, ("widths [2, 1] do not divide g=4 over 2 ranks",)),
        (
            {QUERY: ("column", (16, 48)), KEY: ("column", (16, 16))},
            2,
            ("divide g=4 in different ways", "[1, 3]", "[2, 2]"),
        ),
        (None, 9, ("(g r)=4x2=8 cannot be divided over 9 ranks", "without cutting through one")),
    ],
)
def test_wrong_plans(rules: Any, ranks: int, said: tuple[str, ...]) -> None:
    message = _refused(EVEN, ranks, rules)
    for text in said:
        assert text in message


def test_all_problems_at_once() -> None:
    message = _refused(EVEN, 2, {QUERY: "row", "nothing.here": "column", OUT: "sideways"})
    assert all(text in message for text in ("row would cut", "nothing.here", "'sideways'"))


def test_what_rules_may_say() -> None:
    rules = {
        ATTENTION: "replicate",
        "model.embed_tokens": "hidden",
        "lm_head": "hidden",
        "model.layers.0.mlp.up_proj": ("column", (8, 40)),
    }
    plan = _plan(EVEN, 2, rules)
    held = {cut.weight.name: cut.positions_by_rank for cut in plan.cuts}
    assert held[f"{QUERY}.weight"] == (((0, 64),), ((0, 64),))
    assert held["model.layers.0.mlp.down_proj.weight"] == (((0, 8),), ((8, 48),))
    assert held["model.layers.1.mlp.down_proj.weight"] == (((0, 24),), ((24, 48),))
    assert plan.roles["model.embed_tokens"] is Role.HIDDEN
    assert plan.roles["lm_head"] is Role.SLICED
    assert plan.heads == ()


def test_a_tied_parameter_is_cut_in_one_way() -> None:
    for found in run(2, _tied):
        assert "it is the same parameter as model.embed_tokens.weight" in found


def _tied(rank: int, world: int) -> str:
    model = build(CONFIGS["gemma3"])
    before = deepcopy(model.state_dict())
    with pytest.raises(TransaxleError) as caught:
        tensor_parallel(model, init_device_mesh("cpu", (world,)), {"lm_head": "replicate"})
    assert model.state_dict().keys() == before.keys()
    assert type(model.lm_head) is nn.Linear
    with pytest.raises(TransaxleError, match=r"one of its dims|takes one"):
        tensor_parallel(model, init_device_mesh("cpu", (world, 1)))
    tensor_parallel(model, init_device_mesh("cpu", (world,)))
    with pytest.raises(TransaxleError, match="already cut"):
        tensor_parallel(model, init_device_mesh("cpu", (world,)))
    return str(caught.value)


def _of_another_type(rank: int, world: int, config: dict[str, Any]) -> str:
    model = build(config)
    with pytest.raises(TransaxleError) as caught:
        tensor_parallel(model, init_device_mesh("cpu", (world,)))
    return str(caught.value)


def test_a_type_of_which_nobody_has_shown_that_it_can_be_cut() -> None:
    """Heads of this one work in pairs: by the table alone it would be cut, and compute something else."""
    for said in run(2, _of_another_type, {**EVEN, "model_type": "diffllama"}):
        assert "models of type diffllama are not cut over ranks" in said
    check_type(build(EVEN))
    check_type(nn.Sequential(nn.Linear(2, 2)))


def test_models_of_which_too_little_is_known() -> None:
    model = build(EVEN)
    model.model.adapter = nn.Linear(4, 4)  # type: ignore[union-attr]
    with pytest.raises(TransaxleError, match="no line for it") as caught:
        read(model)
    assert {refusal.where.tensor for refusal in caught.value.refusals} == {"model.adapter.weight", "model.adapter.bias"}
    with pytest.raises(TransaxleError, match="UNKNOWN_FAMILY"):
        read(nn.Sequential(nn.Linear(2, 2)))
    model = build(EVEN)
    setattr(model.config, "num_key_value_heads", 2)  # noqa: B010 - a module has no such attribute, for mypy
    with pytest.raises(TransaxleError, match=r"expected \[16, 32\] by the model's config, got \[32, 32\]"):
        read(model)
