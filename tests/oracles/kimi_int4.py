"""Small Kimi K2 and K2.5 as Moonshot publishes them: bf16, but for the experts, which compressed-tensors packs in int4.

Nothing of ours is used: transformers builds and stores the model, compressed-tensors 0.20 quantizes, packs and unpacks
each expert's matrix, and the config has the keys of the published ones.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

from tests.oracles.peer_bytes import Tensors, loaded, published
from tests.oracles.quiet import quiet
from tests.oracles.tiny_models import drawn

GROUP = 32
WEIGHTS: dict[str, Any] = {
    "actorder": None, "block_structure": None, "dynamic": False, "group_size": GROUP, "num_bits": 4,
    "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
}  # fmt: skip
IGNORED = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
QUANTIZATION = {
    "config_groups": {
        "group_0": {
            "input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": WEIGHTS,
        }
    },
    "format": "pack-quantized", "ignore": IGNORED, "kv_cache_scheme": None, "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}  # fmt: skip
"""`quantization_config` of Kimi-K2-Thinking; K2.5 and K2.6 have it inside `text_config`."""
SIZES = {
    "hidden_size": 128, "intermediate_size": 96, "moe_intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 4, "num_hidden_layers": 3, "n_routed_experts": 6, "n_group": 1, "topk_group": 1,
    "q_lora_rank": 48, "kv_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "qk_head_dim": 24,
    "v_head_dim": 16, "head_dim": 8, "vocab_size": 64, "first_k_dense_replace": 1, "n_shared_experts": 1,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
REMOTE = {
    "AutoConfig": "configuration_deepseek.DeepseekV3Config",
    "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
}
SCHEME = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**WEIGHTS), format="pack-quantized")
K2, K25 = "kimi_k2", "kimi_k25"


@dataclass(frozen=True)
class Made:
    """A small Kimi."""

    packed: Path
    """Folder with the experts in int4."""
    plain: Path
    """Folder with the values that compressed-tensors unpacks, in bf16."""
    model: Any
    """The class of transformers that loads the plain folder."""
    experts: frozenset[str]
    """Names of the experts' weights."""
    linear: frozenset[str]
    """Names of the weights of all linear layers of the text, experts included."""


def pack(weight: torch.Tensor) -> Tensors:
    """What compressed-tensors stores of a weight, by the ends of names."""
    groups = weight.float().unflatten(-1, (-1, GROUP))
    scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), SCHEME.weights)
    state = {"weight": weight, "weight_scale": scale.to(torch.bfloat16), "weight_zero_point": zero_point}
    return dict(PackedQuantizationCompressor.compress(state, SCHEME))


def unpack(state: Tensors) -> torch.Tensor:
    """The values that compressed-tensors makes of what it stores."""
    weight: torch.Tensor = PackedQuantizationCompressor.decompress(state, SCHEME)["weight"]
    return weight.to(torch.bfloat16)


def make(model_type: str, folder: Path) -> Made:
    """Make one of the two, packed and plain."""
    built_from = "deepseek_v3" if model_type == K2 else K25
    with quiet():
        model = drawn(built_from, SIZES).to(torch.bfloat16)
        model.save_pretrained(folder / "saved")
    tensors = published(built_from, loaded(folder / "saved"))
    config = json.loads((folder / "saved/config.json").read_text("utf-8"))
    text = config if model_type == K2 else config["text_config"]
    text |= {"model_type": K2, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    if model_type == K2:
        text["auto_map"] = REMOTE
    experts = frozenset(name for name in tensors if ".mlp.experts." in name)
    linear = {name for name, value in tensors.items() if value.ndim == 2 and "_proj" in name and "vision" not in name}
    packed, plain = dict(tensors), dict(tensors)
    for name in experts:
        stored = pack(packed.pop(name))
        if model_type == K25:
            stored["weight_shape"] = stored["weight_shape"].int()  # as in the published files
        packed |= {name.removesuffix("weight") + end: value for end, value in stored.items()}
        plain[name] = unpack(stored)
    _save(folder / "plain", plain, config)
    text["quantization_config"] = QUANTIZATION
    _save(folder / "packed", packed, config)
    return Made(folder / "packed", folder / "plain", type(model), experts, frozenset(linear))


def _save(folder: Path, tensors: Tensors, config: dict[str, Any]) -> None:
    folder.mkdir()
    kept = {name: value.contiguous() for name, value in tensors.items()}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1), "utf-8")
