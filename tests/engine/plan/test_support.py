"""What a config alone says: the tensors that it implies, the refusals of `plan`, and what only files say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import transaxle as tx
from tests.checkpoints import CONFIG as TINY
from tests.checkpoints import SIZES, tensors, tiny, write
from transaxle.errors import Refused, TransaxleError, UsageError

CONFIG: Mapping[str, Any] = {
    **TINY, "attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "dtype": "bfloat16",
}  # fmt: skip
"""The tiny model's config with the defaults that transformers writes into it."""
QWEN3_30B = {
    **CONFIG, "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 128, "moe_intermediate_size": 768, "vocab_size": 151_936,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
    "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048, "intermediate_size": 18_432,
    "vocab_size": 129_280, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "first_k_dense_replace": 3, "moe_layer_freq": 1, "tie_word_embeddings": False,
    "attention_bias": False, "topk_method": "noaux_tc", "dtype": "bfloat16",
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
}  # fmt: skip


def test_published_models_have_the_tensors_of_their_files() -> None:
    """Counts and bytes are those of the files on the hub; DeepSeek-V3's copies of embedding and head are left out."""
    qwen = tx.supports(QWEN3_30B, "hf")
    assert qwen.plan is not None
    assert (len(qwen.plan.tensors), sum(tensor.nbytes for tensor in qwen.plan.tensors)) == (18_867, 61_064_245_248)
    deepseek = tx.supports({**DEEPSEEK_V3, "num_hidden_layers": 5}, "hf")
    assert deepseek.plan is not None
    stored = {tensor.name: (tensor.dtype, tensor.shape) for tensor in deepseek.plan.tensors}
    matrices = 5 + 3  # of attention, and of a dense MLP or shared experts
    assert len(stored) == 5 * (2 * matrices + 4) + 2 * (2 * 3 * 256 + 2) + 3
    assert stored["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"] == ("F8_E4M3", (576, 7168))
    assert stored["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"] == ("F32", (5, 56))
    assert stored["model.layers.4.mlp.gate.weight"] == ("BF16", (256, 7168))
    assert "lm_head.weight_scale_inv" not in stored
    with_ahead = tx.supports({**DEEPSEEK_V3, "num_hidden_layers": 5, "num_nextn_predict_layers": 1}, "hf")
    assert with_ahead.plan is not None
    new = {tensor.name for tensor in with_ahead.plan.tensors} - stored.keys()
    assert {name.rpartition("layers.5.")[0] for name in new} == {"model."}
    assert len(new) == 2 * matrices + 4 + 2 * 3 * 256 + 2 + 4  # enorm, hnorm, eh_proj and shared_head.norm are plain
    assert {"model.layers.5.eh_proj.weight", "model.layers.5.self_attn.o_proj.weight_scale_inv"} <= new
    assert "model.layers.5.eh_proj.weight_scale_inv" not in new
    assert [note for note in with_ahead.notes if "taken as stored" in note]


@pytest.mark.parametrize("encode", ["float8_block", "mxfp8", "nvfp4", "int4"])
def test_quantized_weights_are_those_that_the_config_describes(encode: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 32}
    config = {**CONFIG, **sizes}
    plain = tx.supports(config, "hf", encode=encode)
    source = write(tmp_path / "plain", tensors({**SIZES, **sizes}), config=config)
    tx.convert(source, tmp_path / encode, to="hf", encode=encode, sync=False)
    with tx.open(tmp_path / encode) as files:
        stored = {name: (tensor.dtype, tensor.shape) for name, tensor in files.items()}
    for answer in (plain, tx.supports(tmp_path / encode, "hf")):
        assert answer.plan is not None
        assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in answer.plan.tensors} == stored


TARGETS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("hf", {}), ("dcp:torchtitan", {}), ("torch_dist", {"tp": 2}), ("megatron_torch", {"tp": 3}), ("hf", {"tp": 2}),
    ("vllm_sharded", {"tp": 2, "ep": 4}), ("dcp:hff", {}), ("nonsense:hf", {}), ("deepspeed", {}),
    ("hf", {"encode": "nvfp4"}), ("hf", {"encode": "nvfp4", "only": "*.q_proj.weight"}), ("hf", {"decode": "bf16"}),
)  # fmt: skip


def test_the_refusals_are_those_of_the_files(tmp_path: Path) -> None:
    source = tiny(tmp_path / "source", config=CONFIG)
    codes = set()
    for target, options in TARGETS:
        try:
            refusals = tx.plan(source, tmp_path / "out", to=target, **options).refusals
        except TransaxleError as error:
            refusals = error.refusals
        answer = tx.supports(source, target, **options)
        own_words = [replace(refusal, hint=refusal.hint.replace("(to=", "(target=")) for refusal in refusals]
        assert (bool(answer), [*answer.refusals]) == (not refusals, own_words), target
        codes |= {refusal.code for refusal in refusals}
    assert codes == {"UNSUPPORTED", "AMBIGUOUS"}


def test_a_trainers_checkpoint_may_be_the_source(tmp_path: Path) -> None:
    """As the source, the target of a plan in the other direction."""
    there = tx.supports(QWEN3_30B, "torch_dist")
    back = tx.supports(QWEN3_30B, "hf", source="torch_dist")
    assert there.plan is not None
    assert back.plan is not None
    assert (back.source, back.target) == (there.target, "safetensors:hf")
    assert len(back.plan.tensors) == 18_867
    assert back.plan.bytes_read == sum(tensor.nbytes for tensor in there.plan.tensors)
    deepseek = tx.supports({**DEEPSEEK_V3, "num_hidden_layers": 5, "n_routed_experts": 8}, "hf", source="torch_dist")
    assert (bool(deepseek), deepseek.source) == (True, "torch_dist:megatron_layers"), "dense layers and sparse ones"


def test_a_mesh_has_the_degrees_of_its_dims() -> None:
    torch_mesh: Any = SimpleNamespace(mesh_dim_names=("tp",), shape=(3,))
    by_option = tx.supports(CONFIG, "vllm_sharded", tp=3)
    assert by_option.refusals
    assert {refusal.code for refusal in by_option.refusals} == {"UNSUPPORTED"}
    for mesh in ({"tp": 3}, torch_mesh):
        assert tx.supports(CONFIG, "vllm_sharded", mesh=mesh).refusals == by_option.refusals
    with pytest.raises(UsageError, match="'cp' is no dim"):
        tx.supports(CONFIG, "vllm_sharded", mesh={"cp": 2})


@pytest.mark.parametrize(
    "section",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
        {"quant_method": "torchao", "quant_type": "float8_weight_only"},
    ],
)
def test_what_only_files_say_is_an_error_and_no_answer(section: Mapping[str, Any]) -> None:
    with pytest.raises(Refused, match="not in which buffers") as refused:
        tx.supports({**CONFIG, "quantization_config": section}, "hf")
    assert refused.value.code == "UNSUPPORTED"
    lacking = {key: value for key, value in CONFIG.items() if key != "num_hidden_layers"}
    with pytest.raises(UsageError, match="the size of axis l"):
        tx.supports(lacking, "hf")


def test_a_family_that_no_table_has() -> None:
    answer = tx.supports({**CONFIG, "model_type": "frobnitz"}, "hf")
    assert (bool(answer), answer.family, answer.plan) == (False, None, None)
    assert [refusal.code for refusal in answer.refusals] == ["UNKNOWN_FAMILY"]
    assert tx.supports({**CONFIG, "model_type": "frobnitz"}, "hf", family="qwen3_moe")
