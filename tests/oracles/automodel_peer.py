"""nemo-automodel 0.7.0: its own state-dict adapters and models, for the families it has.

Adapters: `Qwen3MoeStateDictAdapter`, `Step3p5StateDictAdapter`, `DeepSeekV3StateDictAdapter`,
`Glm4MoeStateDictAdapter` and `GPTOSSStateDictAdapter`. Its Llama, Qwen2 and Qwen3 keep HF names
and have no adapter; when embeddings are tied, its `ModelState` drops the head before a save. It has no
Mixtral.

`held` and `to_hub` need no list of families: they take Automodel's own class for a config.json, where its registry has
one, with the adapter that this class makes for itself, and transformers' class where it has none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch

from tests.oracles import hub
from tests.oracles.hub import Config, Tensors
from tests.oracles.quiet import quiet

ADAPTED = {
    "qwen3_moe": "Qwen3Moe", "step3p5": "Step3p5", "deepseek_v3": "DeepseekV3", "gpt_oss": "GptOss",
    "glm4_moe": "Glm4Moe",
}  # fmt: skip
_ADAPTERS = {"deepseek_v3": "DeepSeekV3", "gpt_oss": "GPTOSS"}
"""Where an adapter is called otherwise than its model."""
PLAIN = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
HEAD = "lm_head.weight"

_PACKAGE = "nemo_automodel.components.models"
_WHOLE = {"mistral4": "language_model."}
"""Model type -> what its adapter puts before the names of the text: those of the model with pictures."""
_MODELS = "transformers.models"
_OUTPUTS = {
    f"{_MODELS}.qwen3_vl.modeling_qwen3_vl": "Qwen3VLCausalLMOutputWithPast",
    f"{_MODELS}.qwen3_vl_moe.modeling_qwen3_vl_moe": "Qwen3VLMoeModelOutputWithPast",
    f"{_MODELS}.qwen3_5_moe.modeling_qwen3_5_moe": "Qwen3_5MoeModelOutputWithPast",
}
"""Modules of transformers, with a class of outputs that Automodel imports and the installed transformers has not. What
a model holds does not depend on it.
"""


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


def models() -> set[str]:
    """Names of Automodel's own models."""
    with undisturbed():
        from nemo_automodel._transformers import registry

        return {name for _, name, *_ in registry.MODEL_ARCH_MAPPING.values()}


def own(config: Config) -> Any | None:
    """Automodel's own model for a config.json, of fp32 weights; None where it trains transformers'."""
    with undisturbed():
        from nemo_automodel._transformers import model_init, registry

        configured = _read(config, registry.resolve_custom_config_cls(config["model_type"]))
        kind = model_init._resolve_custom_model_cls_for_config(configured)
        if kind is None:
            module, *_ = registry.MODEL_ARCH_MAPPING.get(config["architectures"][0], (_PACKAGE,))
            import_module(module)  # where its module cannot be imported, Automodel's registry says that it has none
            return None
        takes = signature(kind.__init__).parameters
        given = {"backend": _backend(config["model_type"])} if "backend" in takes else {}
        with patch.object(kind, "initialize_weights", lambda *_, **__: None, create=True):  # some need a CUDA device
            built = kind(configured, **given).float()
    adapter = getattr(built, "state_dict_adapter", None)
    for each in (adapter, getattr(adapter, "text_adapter", None)):
        if each is not None:
            each.dtype = torch.float32
    return built


def held(config: Config, stored: Tensors, trained: Any) -> Tensors:
    """What Automodel's `ModelState` says that its model of a config.json holds, once it holds these HF tensors.

    `trained` is transformers' model of them, which Automodel trains where it has none of its own.
    """
    model = own(config)
    with undisturbed():
        from nemo_automodel.components.checkpoint.stateful_wrappers import ModelState

        if model is not None:
            adapter = getattr(model, "state_dict_adapter", None)
            native = dict(stored) if adapter is None else adapter.from_hf(dict(stored))
            # No file has the head of a model that ties it, and loading the embedding loads it too.
            tied = {HEAD: model.state_dict()[HEAD]} if config.get("tie_word_embeddings") else {}
            model.load_state_dict({**tied, **native})
        state: Tensors = ModelState(trained if model is None else model).state_dict()
    return {name: value.detach() for name, value in state.items() if not name.endswith("_extra_state")}


def load_from_hub(folder: Path) -> Tensors | None:
    """What the adapter of Automodel's own model writes once Automodel has loaded a hub folder into it, in one process.

    Parameters that get no tensor are NaN. None without a model of its own.
    """
    model = own(json.loads((folder / "config.json").read_text("utf-8")))
    if model is None:
        return None
    adapter = getattr(model, "state_dict_adapter", None)
    with undisturbed(), torch.no_grad():
        from nemo_automodel.components.checkpoint.checkpointing import Checkpointer, CheckpointingConfig

        for parameter in model.parameters():
            parameter.fill_(torch.nan)
        Checkpointer(CheckpointingConfig(save_consolidated=False), 0, 0, 0).load_model(
            model, str(folder), is_init_step=True
        )
        state = dict(model.state_dict())
        written: Tensors = state if adapter is None else adapter.to_hf(state)
    return written


def missing(config: Config, stored: Tensors) -> Tensors:
    """HF tensors with random values, of what Automodel's own model has and these files have not."""
    model = own(config)
    assert model is not None
    with undisturbed():
        values = {name: torch.randn_like(value) for name, value in model.state_dict().items() if name != HEAD}
    more = to_hub(config, values)
    assert more is not None
    return {name: value for name, value in more.items() if name not in stored}


def to_hub(config: Config, native: Tensors) -> Tensors | None:
    """What the adapter of Automodel's own model makes of its tensors; None without one."""
    adapter = getattr(own(config), "state_dict_adapter", None)
    if adapter is None:
        return None
    adapter.mtp_expert_hf_layout = "split"
    with undisturbed():
        converted: Tensors = adapter.to_hf(dict(native))
    return {name.removeprefix(_WHOLE.get(config["model_type"], "")): value for name, value in converted.items()}


def _read(config: Config, kind: Any | None) -> Any:
    """A config.json as `from_pretrained` reads it."""
    from transformers import AutoConfig

    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), "utf-8")
        return (kind or AutoConfig).from_pretrained(folder)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Without noise, without a CUDA device, and with transformers' own config classes where Automodel puts others."""
    from transformers.modeling_outputs import BaseModelOutputWithPast
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    classes = dict(CONFIG_MAPPING._extra_content)
    try:
        with quiet(), patch.object(torch.cuda, "current_device", lambda: 0), ExitStack() as stack:
            for module, name in _OUTPUTS.items():
                stack.enter_context(patch.object(import_module(module), name, BaseModelOutputWithPast, create=True))
            yield
    finally:
        CONFIG_MAPPING._extra_content = classes


def _adapter(config: Config) -> Any:
    from nemo_automodel.components.moe.config import MoEConfig

    experts = [config.get(key) for key in ("num_local_experts", "num_experts", "moe_num_experts", "n_routed_experts")]
    settings = MoEConfig(
        n_routed_experts=next(count for count in experts if count), n_shared_experts=0, n_activated_experts=2,
        n_expert_groups=0, n_limited_groups=0, train_gate=True, gate_bias_update_factor=0.0, aux_loss_coeff=0.0,
        score_func="softmax", route_scale=1.0, dim=config["hidden_size"], inter_dim=config["intermediate_size"],
        moe_inter_dim=config.get("moe_intermediate_size", config["intermediate_size"]), norm_topk_prob=True,
    )  # fmt: skip
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
