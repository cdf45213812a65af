"""nemo-automodel 0.7.0: its own state-dict adapters and models, for the families it has.

Adapters: `Qwen3MoeStateDictAdapter`, `Step3p5StateDictAdapter`, `DeepSeekV3StateDictAdapter`,
`Glm4MoeStateDictAdapter` and `GPTOSSStateDictAdapter`. Its Llama, Qwen2 and Qwen3 keep HF names
and have no adapter; when embeddings are tied, its `ModelState` drops the head before a save. It has no
Mixtral.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch

from tests.oracles import hub
from tests.oracles.hub import Config, Tensors
from tests.oracles.quiet import quiet

ADAPTED = {
    "qwen3_moe": "Qwen3Moe",
    "step3p5": "Step3p5",
    "deepseek_v3": "DeepseekV3",
    "gpt_oss": "GptOss",
    "glm4_moe": "Glm4Moe",
}
_ADAPTERS = {"deepseek_v3": "DeepSeekV3", "gpt_oss": "GPTOSS"}
"""Where an adapter is called otherwise than its model."""
PLAIN = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
HEAD = "lm_head.weight"

_PACKAGE = "nemo_automodel.components.models"


def from_hf(config: Config, stored: Tensors) -> Tensors:
    """What the adapter, where there is one, makes of HF tensors."""
    if config["model_type"] in PLAIN:
        return dict(stored)
    with quiet():
        converted: Tensors = _adapter(config).from_hf(dict(stored))
    return converted


def to_hf(config: Config, native: Tensors) -> Tensors:
    """What the adapter, where there is one, makes of Automodel's tensors."""
    if config["model_type"] in PLAIN:
        return dict(native)
    with quiet():
        converted: Tensors = _adapter(config).to_hf(dict(native))
    return converted


def module(config: Config) -> Any:
    """Automodel's own model of these sizes, on the meta device."""
    family = config["model_type"]
    kind = {**ADAPTED, **PLAIN}[family]
    # Two of its models ask which CUDA device is current before they build anything on the device given.
    with quiet(), torch.device("meta"), patch.object(torch.cuda, "current_device", lambda: 0):
        built = getattr(import_module(f"{_PACKAGE}.{family}.model"), f"{kind}ForCausalLM")
        return built(_configuration(config), backend=_backend(family))


def _adapter(config: Config) -> Any:
    from nemo_automodel.components.moe.config import MoEConfig

    experts = [config.get(key) for key in ("num_local_experts", "num_experts", "moe_num_experts", "n_routed_experts")]
    settings = MoEConfig(
        n_routed_experts=next(count for count in experts if count),
        n_shared_experts=0,
        n_activated_experts=2,
        n_expert_groups=0,
        n_limited_groups=0,
        train_gate=True,
        gate_bias_update_factor=0.0,
        aux_loss_coeff=0.0,
        score_func="softmax",
        route_scale=1.0,
        dim=config["hidden_size"],
        inter_dim=config["intermediate_size"],
        moe_inter_dim=config.get("moe_intermediate_size", config["intermediate_size"]),
        norm_topk_prob=True,
    )
    family = config["model_type"]
    module = import_module(f"{_PACKAGE}.{family}.state_dict_adapter")
    adapter = getattr(module, f"{_ADAPTERS.get(family, ADAPTED[family])}StateDictAdapter")
    return adapter(config, settings, _backend(family), dtype=torch.bfloat16)


def _backend(family: str) -> Any:
    from nemo_automodel.components.models.common import BackendConfig

    attention = "flex" if family == "gpt_oss" else "sdpa"
    return BackendConfig(attn=attention, linear="torch", rms_norm="torch", experts="torch", dispatcher="torch")


def _configuration(config: Config) -> Any:
    if config["model_type"] != hub.STEP:
        return hub.configuration(config)
    from transformers import PreTrainedConfig

    rope = {"rope_theta": 1e4, "rope_type": "default"}
    return PreTrainedConfig(**{**config, "rope_parameters": rope})
