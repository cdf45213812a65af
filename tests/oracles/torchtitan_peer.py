"""torchtitan 0.3.0: its own state-dict adapters and models, for the families it has.

Adapters: `Llama3StateDictAdapter` (RoPE-permuted q and k), `Qwen3StateDictAdapter` (dense and MoE layers),
`DeepSeekV3StateDictAdapter` and `GptOssStateDictAdapter`. It has none for Qwen2, Mixtral and Step-3.5, and no name for
any bias of a projection but gpt-oss's.

gpt-oss's adapter only renames. Its Hugging Face side is what torch's `QuantizedHuggingFaceStorageReader` makes of MXFP4
files: bf16 in the order of the codes, under their names; plain bf16 files are transposed to that here. And it still has
the names that experts had before 0.3, so that its own `to_hf` drops the experts of its own model (a test shows it):
they are renamed here.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from tests.oracles.hub import Config, Tensors
from tests.oracles.quiet import quiet

BUFFER = ".moe.expert_bias_E"
"""Load-balancing state, which every model with experts has, and which most adapters do not know: it begins at zero."""
_ROUTER = ".moe.router.gate.weight"

_LLAMA, _QWEN, _DEEPSEEK, _OSS = "llama", "qwen3", "deepseek_v3", "gpt_oss"
_BLOCKS = "_blocks"
_EXPERTS = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
_SUFFIXES = {"mlp1_weight": "_EGD", "mlp1_bias": "_EG", "mlp2_weight": "_EDF", "mlp2_bias": "_ED"}
"""What the model's names of gpt-oss's experts have, and the adapter's have not."""
_OLDER = {
    ".attention.qkv_linear.": ".attention.",
    ".moe.routed_experts.inner_experts.w1_EFD": ".moe.experts.w1",
    ".moe.routed_experts.inner_experts.w2_EDF": ".moe.experts.w2",
    ".moe.routed_experts.inner_experts.w3_EFD": ".moe.experts.w3",
    **{f".moe.routed_experts.inner_experts.{name}{end}": f".moe.experts.{name}" for name, end in _SUFFIXES.items()},
    BUFFER: ".moe.expert_bias",
}
"""Names that differ in `from_hf_map` of the adapters of 0.2.0, 0.2.1 and 0.2.2; their layouts do not."""


def from_hf(config: Config, stored: Tensors) -> Tensors:
    """What the adapter makes of HF tensors, with the load-balancing state that the model has besides."""
    if config["model_type"] == _OSS:
        stored = to_blocks(stored)
    with quiet():
        converted: Tensors = adapter(config).from_hf(dict(stored))
    routers = {name: value for name, value in converted.items() if name.endswith(_ROUTER)}
    begun = {name.replace(_ROUTER, BUFFER): torch.zeros(len(value)) for name, value in routers.items()}
    return begun | {f"{name}{_SUFFIXES.get(name.rpartition('.')[2], '')}": value for name, value in converted.items()}


def to_hf(config: Config, native: Tensors) -> Tensors:
    """What the adapter makes of torchtitan's tensors."""
    known = dict(native)
    if config["model_type"] == _OSS:
        for name, end in _SUFFIXES.items():
            known = {key.replace(name + end, name): value for key, value in known.items()}
    with quiet():
        converted: Tensors = adapter(config).to_hf(known)
    return from_blocks(converted) if config["model_type"] == _OSS else converted


def to_blocks(stored: Tensors) -> Tensors:
    """The files that gpt-oss's adapter reads and writes, from plain bf16 files: experts in the order of the codes."""
    return {
        f"{name}{_BLOCKS}" if name.endswith(_EXPERTS) else name: value.mT.contiguous()
        if name.endswith(_EXPERTS)
        else value
        for name, value in stored.items()
    }


def from_blocks(stored: Tensors) -> Tensors:
    """The other way."""
    return {
        name.removesuffix(_BLOCKS): value.mT.contiguous() if name.endswith(_BLOCKS) else value
        for name, value in stored.items()
    }


def older(native: Tensors) -> Tensors:
    """The same tensors under the names of torchtitan 0.2."""
    renamed = {}
    for name, value in native.items():
        for new, old in _OLDER.items():
            name = name.replace(new, old)
        renamed["output.weight" if name == "lm_head.weight" else name] = value
    return renamed


def module(config: Config) -> Any:
    """torchtitan's own model of these sizes, on the meta device."""
    with quiet(), torch.device("meta"):
        return _configuration(config).build()


def adapter(config: Config) -> Any:
    """torchtitan's own adapter."""
    family = _FAMILIES[config["model_type"]]
    names = {_LLAMA: "Llama3", _QWEN: "Qwen3", _DEEPSEEK: "DeepSeekV3", _OSS: "GptOss"}
    package = "llama3" if family == _LLAMA else family
    module = import_module(f"torchtitan.models.{package}.state_dict_adapter")
    return getattr(module, f"{names[family]}StateDictAdapter")(_configuration(config), None)


_FAMILIES = {
    _LLAMA: _LLAMA, _QWEN: _QWEN, "qwen3_moe": _QWEN, _DEEPSEEK: _DEEPSEEK, "deepseek_v2": _DEEPSEEK, _OSS: _OSS,
}  # fmt: skip


PACKAGES = {"llama3", "qwen3", "deepseek_v3", "gpt_oss"}
"""torchtitan's packages of these families."""


def _configuration(config: Config) -> Any:
    """torchtitan's model config, built by its own helpers as its model registries do."""
    from torchtitan.models.common import Embedding, Linear, RMSNorm

    init = {"weight": nn.init.normal_}
    width, vocabulary = config["hidden_size"], config["vocab_size"]
    model, layers = _LAYERS[_FAMILIES[config["model_type"]]](config)
    return model(
        dim=width, vocab_size=vocabulary, enable_weight_tying=config["tie_word_embeddings"],
        tok_embeddings=Embedding.Config(num_embeddings=vocabulary, embedding_dim=width, param_init=init),
        norm=RMSNorm.Config(normalized_shape=width, param_init=init),
        lm_head=Linear.Config(in_features=width, out_features=vocabulary, param_init=init), **layers,
    )  # fmt: skip


def _llama(config: Config) -> tuple[Any, dict[str, Any]]:
    from torchtitan.models.common import ComplexRoPE
    from torchtitan.models.llama3.model import Llama3Model

    rope = ComplexRoPE.Config(dim=_head(config), max_seq_len=64, theta=1e4)
    return Llama3Model.Config, {"layers": [_layer(config, layer, rope) for layer in range(_depth(config))]}


def _qwen(config: Config) -> tuple[Any, dict[str, Any]]:
    from torchtitan.models.common import CosSinRoPE
    from torchtitan.models.qwen3.model import Qwen3Model

    rope = CosSinRoPE.Config(dim=_head(config), max_seq_len=64, theta=1e4)
    return Qwen3Model.Config, {"layers": [_layer(config, layer, rope) for layer in range(_depth(config))]}


def _deepseek(config: Config) -> tuple[Any, dict[str, Any]]:
    from torchtitan.models import deepseek_v3
    from torchtitan.models.common import ComplexRoPE

    keys = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    init = {"weight": nn.init.normal_}
    layers = deepseek_v3.build_mla_moe_layers(
        **{key: config[key] for key in keys}, q_lora_rank=config["q_lora_rank"] or 0, n_layers=_depth(config),
        n_dense_layers=config["first_k_dense_replace"], dim=config["hidden_size"],
        n_heads=config["num_attention_heads"], mscale=1.0, dense_hidden_dim=config["intermediate_size"],
        moe_hidden_dim=config["moe_intermediate_size"], num_experts=config["n_routed_experts"],
        num_shared_experts=config["n_shared_experts"], router_top_k=config["num_experts_per_tok"],
        router_score_func="sigmoid", attn_backend="flex", moe_comm_backend="standard",
        non_blocking_capacity_factor=None, linear_init=init, norm_init=init, depth_init=lambda _: init,
        depth_experts_init=lambda _: dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), nn.init.normal_),
        rope=ComplexRoPE.Config(dim=config["qk_rope_head_dim"], max_seq_len=64, theta=1e4),
    )  # fmt: skip
    ahead = deepseek_v3._build_mtp_layers(
        layers[-1], dim=config["hidden_size"], num_mtp_layers=config["num_nextn_predict_layers"]
    )
    return deepseek_v3.DeepSeekV3Model.Config, {"layers": layers, "mtp_layers": ahead}


def _oss(config: Config) -> tuple[Any, dict[str, Any]]:
    """The layers of torchtitan's smallest gpt-oss, in other sizes."""
    from torchtitan.models import gpt_oss
    from torchtitan.models.common import CosSinRoPE

    rope = CosSinRoPE.Config(dim=_head(config), max_seq_len=64, theta=1e4)
    heads = {
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "head_dim": _head(config),
    }
    layers = gpt_oss._build_gptoss_layers(
        dim=config["hidden_size"], n_layers=_depth(config), hidden_dim=config["intermediate_size"],
        num_experts=_experts(config), top_k=config["num_experts_per_tok"], load_balance_coeff=1e-3,
        attn_backend="flex", moe_comm_backend="standard", rope=rope,
    )  # fmt: skip
    for number, layer in enumerate(layers):
        layer.attention = gpt_oss._make_gptoss_attn_config(
            dim=config["hidden_size"], layer_id=number, attn_backend="flex", rope=rope, **heads
        )
    return gpt_oss.GptOssModel.Config, {"layers": layers}


_LAYERS = {_LLAMA: _llama, _QWEN: _qwen, _DEEPSEEK: _deepseek, _OSS: _oss}


def _depth(config: Config) -> int:
    return int(config["num_hidden_layers"])


def _layer(config: Config, layer: int, rope: Any) -> Any:
    from torchtitan.models.common import RMSNorm
    from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
    from torchtitan.models.llama3.model import Llama3TransformerBlock
    from torchtitan.models.qwen3.model import Qwen3TransformerBlock

    init = {"weight": nn.init.normal_}
    llama = config["model_type"] == _LLAMA
    norm = partial(RMSNorm.Config, param_init=init)
    width = config["hidden_size"]
    attention = make_gqa_config(
        dim=width, n_heads=config["num_attention_heads"], n_kv_heads=config["num_key_value_heads"],
        head_dim=_head(config), wqkv_param_init=init, wo_param_init=init,
        inner_attention=get_attention_config("flex"), fuse_qkv=True, rope=rope,
        qk_norm=None if llama else norm(normalized_shape=_head(config)),
    )  # fmt: skip
    if _sparse(config, layer):
        mlp = {"moe": _moe(config)}
    else:
        ffn = make_ffn_config(
            dim=width, hidden_dim=config["intermediate_size"], w1_param_init=init, w2w3_param_init=init
        )
        mlp = {"feed_forward": ffn}
    block = Llama3TransformerBlock if llama else Qwen3TransformerBlock
    return block.Config(
        attention=attention, attention_norm=norm(normalized_shape=width), ffn_norm=norm(normalized_shape=width), **mlp
    )


def _moe(config: Config) -> Any:
    from torchtitan.models.common.config_utils import make_moe_config, make_routed_experts_config, make_router_config

    init = {"weight": nn.init.normal_}
    experts = dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), nn.init.normal_)
    sizes = {"dim": config["hidden_size"], "num_experts": _experts(config), "top_k": config["num_experts_per_tok"]}
    return make_moe_config(
        num_experts=sizes["num_experts"],
        router=make_router_config(gate_param_init=init, score_func="softmax", route_norm=True, **sizes),
        routed_experts=make_routed_experts_config(
            hidden_dim=config["moe_intermediate_size"], param_init=experts, comm_backend="standard", **sizes
        ),
    )


def _experts(config: Config) -> int:
    return int(config.get("num_local_experts") or config.get("num_experts") or 0)


def _sparse(config: Config, layer: int) -> bool:
    """`Qwen3MoeDecoderLayer.__init__` of transformers: which layers hold experts."""
    return (
        _experts(config) > 0
        and layer not in config["mlp_only_layers"]
        and (layer + 1) % config["decoder_sparse_step"] == 0
    )


def _head(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
