"""Megatron's groups, made from those of another optimizer: what is known is kept, what is not is said, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import transaxle as tx
from transaxle.errors import Refused
from transaxle.formats.megatron.torch_dist.written_state import groups_in, make_groups, optimizer_settings, step_of

NORM, BIAS, MATRIX = (
    f"decoder.layers.self_attention.{name}"
    for name in ("linear_qkv.layer_norm_weight", "linear_qkv.bias", "linear_proj.weight")
)
EMBEDDING = "embedding.word_embeddings.weight"
SHAPES = {NORM: (4, 20), BIAS: (4, 48), MATRIX: (4, 20, 24), EMBEDDING: (41, 20)}
KNOWN: dict[str, Any] = {"lr": 2e-4, "betas": (0.9, 0.95), "eps": 1e-6}


def _group(decay: float, *names: str, **given: Any) -> dict[str, Any]:
    return {**KNOWN, "weight_decay": decay, "params": list(names), **given}


def test_what_the_source_says_is_kept() -> None:
    schedule = {"max_lr": 1e-3, "min_lr": 1e-5}
    groups = [_group(0.1, MATRIX, EMBEDDING, **schedule), _group(0.0, NORM, BIAS, **schedule)]
    made, notes = make_groups(groups, 7, SHAPES)
    assert [group["wd_mult"] for group in made] == [1.0, 0.0]
    assert [group["weight_decay"] for group in made] == [0.1, 0.0]
    for group in made:
        assert {key: group[key] for key in (*KNOWN, *schedule, "step")} == {**KNOWN, **schedule, "step": 7}
    (note,) = notes
    assert note.startswith("Megatron finds the optimizer's groups by --lr 0.001 --min-lr 1e-05 --weight-decay 0.1; ")


def test_a_schedule_that_is_not_known() -> None:
    for given, highest, guess in (
        ({"initial_lr": 1e-3}, 1e-3, "does not say its schedule: 0 for the lowest)"),
        ({}, 2e-4, "the learning rate of its last step for the highest, 0 for the lowest)"),
        ({"lr": np.float32(0.5)}, 0.5, "the learning rate of its last step for the highest, 0 for the lowest)"),
    ):
        made, notes = make_groups([_group(0.1, MATRIX, EMBEDDING, **given)], 7, SHAPES)
        assert [(group["max_lr"], group["min_lr"]) for group in made] == [(highest, 0.0)] * 2
        assert type(made[0]["lr"]) is float
        assert guess in notes[0]
        assert f"--lr {highest} --min-lr 0.0" in notes[0]


def test_weight_decay_that_megatron_does_otherwise_is_said() -> None:
    _, notes = make_groups([_group(0.1, *SHAPES)], 7, SHAPES)
    assert notes[1:] == [f"{NORM}, {BIAS} had weight decay, which Megatron does not apply to vectors and biases"]
    _, notes = make_groups([_group(0.1, MATRIX), _group(0.0, EMBEDDING, NORM, BIAS)], 7, SHAPES)
    assert notes[1:] == [f"{EMBEDDING} had no weight decay, which Megatron applies to all matrices"]
    _, notes = make_groups([_group(0.0, *SHAPES)], 7, SHAPES)
    assert notes[1:] == []  # --weight-decay 0.0
    many = {f"decoder.layers.{layer}.pre_mlp_layernorm.weight": (20,) for layer in range(5)}
    _, notes = make_groups([_group(0.1, *many)], 7, many)
    assert "and 2 more parameters had weight decay" in notes[1]


def test_settings_that_are_not_known_are_said() -> None:
    made, notes = make_groups([{"lr": 1e-3, "weight_decay": 0.0, "params": [MATRIX]}], 7, SHAPES)
    assert made[0]["betas"] == (0.9, 0.999)
    assert "goes on with betas (0.9, 0.999), eps 1e-08" in notes[1]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "the settings of its optimizer are not there"),
        ([{"params": [MATRIX]}], "the settings of its optimizer are not there"),
        ([_group(0.1, MATRIX), _group(0.1, EMBEDDING, eps=1e-8)], "differ in eps"),
        ([_group(0.1, MATRIX), _group(0.2, EMBEDDING)], "differ in weight_decay"),
        ([_group(0.1, MATRIX), _group(0.0, NORM, lr=1e-3)], "differ in lr"),
    ],
    ids=str,
)
def test_what_megatron_cannot_hold(groups: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(Refused, match=message) as caught:
        make_groups(groups, 7, SHAPES)
    assert caught.value.code == "UNSUPPORTED"
    assert "--no-optimizer" in str(caught.value)


def test_experts_get_groups_of_their_own() -> None:
    """A run without expert parallelism has none for them; one with it looks for them."""
    groups = [{"wd_mult": decay, "lr": 1e-3, "is_expert_parallel": False} for decay in (1.0, 0.0)]
    facts = {"optimizer": {"optimizer": {"param_groups": groups}}}
    shapes = {**SHAPES, "decoder.layers.mlp.experts.experts.linear_fc2.weight": (4, 8, 20, 8)}
    settings, notes = optimizer_settings(shapes, facts, (), 7)
    assert notes == []
    assert groups_in(settings[0]) == groups
    assert groups_in(settings[1]) == [{**groups[0], "is_expert_parallel": True}]
    again, _ = optimizer_settings(shapes, {"optimizer": settings}, (), 7)
    assert again == settings


def test_the_step_is_that_of_the_group_that_made_most() -> None:
    assert step_of({"optimizer": {"param_groups": [{"step": 3}, {"step": 7}, {}]}}) == 7


@pytest.mark.parametrize(
    ("target", "made", "said"),
    [
        ("megatron_torch", lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9), "the state momentum_buffer"),
        ("torch_dist", lambda p: torch.optim.Adamax(p, lr=1e-3), "the state exp_inf"),
        ("torch_dist", lambda p: torch.optim.RAdam(p, lr=1e-3), "RAdam"),
        ("torch_dist", lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True), "amsgrad is set"),
    ],
)
def test_megatron_does_not_go_on_with_adam_from_another_optimizer(
    tmp_path: Path, target: str, made: Callable[[Any], torch.optim.Optimizer], said: str
) -> None:
    torch.manual_seed(0)
    weights = torch.nn.ParameterDict({name.replace(".", "·"): torch.randn(4, 4) for name in SHAPES})
    optimizer = made(weights.parameters())
    for weight in weights.values():
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    tx.save(weights, tmp_path / "run", to="dcp", optimizer=optimizer)
    with pytest.raises(Refused, match=said) as caught:
        tx.convert(tmp_path / "run", tmp_path / "out", to=f"{target}:identity", optimizer=True)
    assert "--no-optimizer" in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_weight_decay_in_the_gradient_is_said() -> None:
    group = _group(0.1, MATRIX, amsgrad=False, decoupled_weight_decay=False)
    _, notes = make_groups([group], 7, SHAPES)
    assert "decoupled_weight_decay=False in OptimizerConfig" in notes[1]
    _, notes = make_groups([{**group, "decoupled_weight_decay": True}], 7, SHAPES)
    assert len(notes) == 1
