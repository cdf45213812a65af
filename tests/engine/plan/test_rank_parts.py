"""What the ranks of an inference engine hold, by the tables alone; `tests/oracles/test_vllm.py` asks vLLM itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import transaxle as tx
from tests.checkpoints import tiny
from tests.engine import demand_refusal
from transaxle.axes.layout.divide import share_out
from transaxle.engine.checkpoint.recognise import pick_dialect
from transaxle.engine.plan.rank_parts import config_for_ranks, engine_parts
from transaxle.errors import TransaxleError
from transaxle.families import builtin

VLLM = "vllm"
CONFIG: dict[str, Any] = {
    "model_type": "gpt_oss", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 8, "head_dim": 4,
    "num_key_value_heads": 2, "intermediate_size": 12, "num_local_experts": 6, "vocab_size": 90,
    "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = "model.layers.0.mlp.experts.routed_experts."
BIAS, DOWN, QKV = f"{EXPERTS}w2_bias", f"{EXPERTS}w2_weight", "model.layers.0.attn.qkv_proj.weight"
HEAD, NORM, ROUTER = "lm_head.weight", "model.norm.weight", "model.layers.0.mlp.router.weight"
NAMES = (BIAS, DOWN, QKV, HEAD, NORM, ROUTER)


def parts(**degrees: int) -> Any:
    """What the ranks hold of a small gpt-oss."""
    return engine_parts(builtin()["gpt_oss"], VLLM, CONFIG, NAMES, **degrees)


def test_each_tensor_is_cut_by_its_own_statement() -> None:
    found = parts(tp=2)
    assert found[NORM] is None
    assert found[ROUTER] is None
    assert found[HEAD] == (0, (((0, 64),), ((64, 128),)))
    assert found[DOWN] == (2, (((0, 6),), ((6, 12),)))
    assert found[QKV] == (0, (((0, 16), (32, 36), (40, 44)), ((16, 32), (36, 40), (44, 48))))


def test_a_bias_that_is_added_once_is_on_the_first_rank() -> None:
    """The whole is as long as all ranks' parts together: zeros follow the bias."""
    assert parts(tp=4)[BIAS] == (1, tuple(((8 * rank, 8 * rank + 8),) for rank in range(4)))
    assert parts(tp=1)[BIAS] is None


def test_experts_are_whole_where_ranks_share_them_out() -> None:
    found = parts(tp=4, ep=4)
    shares = (((0, 2),), ((2, 4),), ((4, 5),), ((5, 6),))
    assert found[BIAS] == found[DOWN] == (0, shares)
    assert found[QKV] == parts(tp=4)[QKV]
    # vLLM adds rows of zeros to short experts, but not to experts that are whole on a rank
    config = {**CONFIG, "model_type": "kimi_linear", "moe_intermediate_size": 96, "num_experts": 4}
    down = "model.layers.0.block_sparse_moe.experts.routed_experts.w2_weight"
    expected = {down: (0, (((0, 2),), ((2, 4),)))}
    assert engine_parts(builtin()["kimi_linear"], VLLM, config, [down], tp=2, ep=2) == expected


def test_all_that_does_not_divide_is_listed() -> None:
    with pytest.raises(TransaxleError) as caught:
        parts(tp=3)
    assert {refusal.where.tensor for refusal in caught.value.refusals} == {QKV, HEAD}
    assert all("does not divide over 3 ranks" in refusal.message for refusal in caught.value.refusals)


@pytest.mark.parametrize("dialect", ["hf", "transformers"])
def test_ranks_share_out_what_shapes_tell_as_they_do_what_a_config_says(dialect: str, tmp_path: Path) -> None:
    source = tiny(tmp_path / "ck")
    if dialect != "hf":
        source = Path(tx.convert(source, tmp_path / dialect, to=f"safetensors:{dialect}", sync=False).path)
        (source / "transaxle.json").unlink()
    how: dict[str, Any] = {"to": "megatron_torch", "tp": 2, "family": "qwen3_moe", "sync": False}
    tx.convert(source, tmp_path / "configured", **how)
    config = (source / "config.json").rename(tmp_path / "config.json")
    tx.convert(source, tmp_path / "plain", **how)
    with tx.open(tmp_path / "plain", config=config) as plain:
        assert tx.verify(tmp_path / "configured", plain)


def test_a_size_that_nothing_tells_is_asked_for() -> None:
    family = builtin()["qwen3_moe"]
    (line,) = (line for line in pick_dialect(family, "megatron").lines if "q" in line.expression.components)
    with demand_refusal("UNKNOWN_AXIS", "the size of axis g is needed") as caught:
        share_out(line.expression, family.cuts, {"d": 16, "c": 8, "r": 2, "l": 1}, 2)
    assert "--axis g=N" in caught.value.hint


def test_the_text_of_a_model_with_pictures_has_the_ranks_too() -> None:
    assert config_for_ranks({"text_config": {"hidden_size": 8}}, 2) == {
        "text_config": {"hidden_size": 8, "tensor_parallel_size": 2},
        "tensor_parallel_size": 2,
    }
