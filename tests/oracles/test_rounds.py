"""Models through every dialect of their family and back: transformers loads the result and computes the same logits.

Models with each kind of head, OLMo Hybrid as the hub stores it, and layers that predict ahead are compared as well.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import transaxle as tx
from tests.families.test_layers_ahead import SIZES, mellum
from tests.oracles import wrappers
from tests.oracles.every_type import built
from tests.oracles.peer_bytes import differing, loaded, memory, randomise, write
from tests.oracles.quiet import quiet
from tests.oracles.tiny_models import drawn
from transaxle.families import builtin

pytestmark = pytest.mark.peers
TYPES = (
    "llama", "qwen2", "qwen3", "phi3", "gemma3_text", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "glm4_moe",
    "qwen3_next", "qwen3_5_moe_text", "nemotron_h", "qwen3_5", "muse_glimmer", "minimax_m2", "laguna",
)  # fmt: skip

MIXED = frozenset({"deepseek_v3", "glm4_moe", "nemotron_h"})
"""Models of several kinds of layers, which Megatron keeps apart."""
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"head_dim": 4, "num_key_value_heads": 4},
    "laguna": {"gating": "per-head", "num_attention_heads_per_layer": [4, 8]},
    "nemotron_h": {"n_groups": 2},
    "qwen3_5": {"layer_types": ["linear_attention", "full_attention"]},
}
"""What the tiny config of a type says otherwise: dims that are rotated, heads that share nothing, kinds of layers."""


HEADS = (
    "BertForSequenceClassification", "BertForNextSentencePrediction", "RobertaModel", "RobertaForMaskedLM",
    "RobertaForSequenceClassification", "XLMRobertaForTokenClassification", "RobertaForQuestionAnswering",
    "ElectraForPreTraining", "ElectraForSequenceClassification", "DistilBertForMultipleChoice",
    "GteForSequenceClassification", "NomicBertForMaskedLM", "ModernBertForMaskedLM", "CLIPModel",
    "LlavaForConditionalGeneration", "LlamaForSequenceClassification", "Gemma3TextForSequenceClassification",
    "Qwen2ForTokenClassification", "Qwen3MoeForSequenceClassification", "PhiForSequenceClassification",
    "MixtralForQuestionAnswering", "ModernBertForSequenceClassification",
)  # fmt: skip
"""Classes of models with heads and parts that some dialect has no names for, and without."""


def _store(architecture: str, folder: Path) -> Any:
    """A random model of a class of transformers, after it was stored."""
    import transformers

    made = getattr(transformers, architecture)
    with quiet():
        model = made(wrappers.shrunk(made.config_class())).float()
        randomise(model)
        model.save_pretrained(folder)
    return model


@pytest.mark.oracle
@pytest.mark.parametrize("architecture", HEADS)
def test_every_head_comes_back_from_every_dialect_under_its_own_name(architecture: str, tmp_path: Path) -> None:
    model = _store(architecture, tmp_path / "hub")
    (family,) = builtin().of_types([model.config.model_type])
    stored = loaded(tmp_path / "hub")
    for label in family.labels[1:]:
        there, back = tmp_path / label, tmp_path / f"back-{label}"
        tx.convert(tmp_path / "hub", there, to=f"safetensors:{label}", sync=False)
        if label == "transformers":
            assert differing(loaded(there), memory(model)) == []
        tx.convert(there, back, to="safetensors:hf", sync=False)
        assert differing(loaded(back), stored) == []
        assert (back / "config.json").read_bytes() == (tmp_path / "hub/config.json").read_bytes()


@pytest.mark.parametrize("architecture", ["NomicBertForMaskedLM", "RobertaForMaskedLM"])
def test_a_tied_bias_comes_back_by_way_of_two_dialects(architecture: str, tmp_path: Path) -> None:
    source = tmp_path / "hub"
    _store(architecture, source)
    for label in ("transformers", "vllm", "hf"):
        tx.convert(source, tmp_path / label, to=f"safetensors:{label}", sync=False)
        source = tmp_path / label
    assert differing(loaded(source), loaded(tmp_path / "hub")) == []


@pytest.mark.oracle
@pytest.mark.parametrize("model_type", TYPES)
def test_logits_are_equal_after_a_round_through_all_dialects(model_type: str, tmp_path: Path) -> None:
    model = drawn(model_type, CHANGES.get(model_type, {}))
    tokens = torch.arange(12).reshape(2, 6)
    with quiet(), torch.no_grad():
        expected = model(tokens).logits
        model.save_pretrained(tmp_path / "hub")
    (family,) = builtin().of_types([model_type])
    source = tmp_path / "hub"
    lossy = {each.label for each in family.dialects if any(line.lossy for line in each.lines)}
    left_out = lossy | ({"megatron_dist"} if model_type in MIXED else set())
    for number, label in enumerate([*(each for each in family.labels[1:] if each not in left_out), "hf"]):
        target = tmp_path / f"{number}"
        tx.convert(source, target, to=f"safetensors:{label}", family=family.name, sync=False)
        source = target
    assert differing(loaded(source), loaded(tmp_path / "hub")) == []
    with quiet(), torch.no_grad():
        assert torch.equal(type(model).from_pretrained(source).eval()(tokens).logits, expected)


# OLMo Hybrid as the hub has it: q, k and v of a convolution have the sizes of their heads.

CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")


def test_files_of_the_hub_are_what_transformers_loads(tmp_path: Path) -> None:
    model = built("olmo_hybrid")[0]
    randomise(model)
    inside = memory(model)
    model.save_pretrained(tmp_path / "saved")
    hub = loaded(tmp_path / "saved")
    config = model.config
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    assert keys != values
    for name, tensor in inside.items():
        if ".conv1d." in name:
            names = [name.replace("conv1d", word) for word in CONVOLUTIONS]
            hub |= dict(zip(names, torch.split(tensor, [keys, keys, values]), strict=True))
    text = (tmp_path / "saved/config.json").read_text("utf-8")
    write(tmp_path / "hub", hub, text)
    write(tmp_path / "memory", inside, text)
    assert differing(memory(type(model).from_pretrained(tmp_path / "hub").float()), inside) == []
    tx.convert(tmp_path / "hub", tmp_path / "to", to="safetensors:transformers", sync=False)
    assert differing(loaded(tmp_path / "to"), inside) == []
    tx.convert(tmp_path / "memory", tmp_path / "back", to="safetensors:hf", sync=False)
    assert differing(loaded(tmp_path / "back"), hub) == []
    with pytest.raises(tx.TransaxleError, match="conv1d"):
        tx.convert(tmp_path / "saved", tmp_path / "thirds", to="safetensors:transformers", sync=False)


# The layers that predict ahead as transformers builds them, where it does: in a model of their own.

_HUB = (
    (r"^layers\.0\.enorm\.", "mtp.pre_fc_norm_embedding."),
    (r"^layers\.0\.hnorm\.", "mtp.pre_fc_norm_hidden."),
    (r"^layers\.0\.eh_proj\.", "mtp.fc."),
    (r"^layers\.0\.post_norm\.", "mtp.norm."),
    (r"^layers\.(\d+)\.mtp_block\.", r"mtp.layers.\1."),
)
"""Its names -> the hub's: `MtpModel` in transformers' conversion_mapping, the other way round."""


def test_mellum_has_the_tensors_that_its_table_says() -> None:
    with quiet():
        from transformers import MellumConfig, MellumForCausalLM
        from transformers.modeling_layers import MtpModel

        config = MellumConfig(
            **{**SIZES, "num_experts_per_tok": 2, "num_mtp_layers": 1, "mlp_layer_types": ["sparse"] * 2}
        )
        ahead = MtpModel(MellumForCausalLM(config), 1).state_dict()
    found: dict[str, tuple[int, ...]] = {}
    for name, tensor in ahead.items():
        for pattern, hub in _HUB:
            name = re.sub(pattern, hub, name)
        found[name] = tuple(tensor.shape)
    experts, width, inner = found.pop("mtp.layers.0.mlp.experts.down_proj")
    assert found.pop("mtp.layers.0.mlp.experts.gate_up_proj") == (experts, 2 * inner, width)
    for e in range(experts):
        stem = f"mtp.layers.0.mlp.experts.{e}"
        found |= {f"{stem}.{n}_proj.weight": (inner, width) for n in ("gate", "up")}
        found[f"{stem}.down_proj.weight"] = (width, inner)
    shared = {"embed_tokens.weight", "shared_head.weight"}
    assert {name: shape for name, shape in found.items() if name not in shared} == mellum()
