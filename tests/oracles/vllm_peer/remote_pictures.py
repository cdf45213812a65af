"""Models of text and pictures that vLLM's transformers has no class for, as their published checkpoints are."""

from __future__ import annotations

from collections.abc import Iterator

from tests.oracles.vllm_peer.model import Config, Model
from tests.oracles.vllm_peer.remote_code import STEP, STEP_STORED

_Stored = Iterator[tuple[str, tuple[int, ...]]]
"""Names and shapes of tensors."""


def _linear(name: str, rows: int, columns: int, biased: bool = True) -> _Stored:
    yield f"{name}.weight", (rows, columns)
    if biased:
        yield f"{name}.bias", (rows,)


def _norm(name: str, size: int) -> _Stored:
    yield f"{name}.weight", (size,)
    yield f"{name}.bias", (size,)


def _molmo2_text(text: Config) -> _Stored:
    width, size, inner = text["hidden_size"], text["head_dim"], text["intermediate_size"]
    queries, keys = text["num_attention_heads"] * size, text["num_key_value_heads"] * size
    whole = text["qk_norm_type"] == "olmo"
    yield "model.transformer.wte.embedding", (text["vocab_size"], width)
    yield "model.transformer.wte.new_embedding", (text["additional_vocab_size"], width)
    yield "model.transformer.ln_f.weight", (width,)
    yield "lm_head.weight", (text["vocab_size"], width)
    for layer in range(text["num_hidden_layers"]):
        block = f"model.transformer.blocks.{layer}"
        yield f"{block}.attn_norm.weight", (width,)
        yield f"{block}.ff_norm.weight", (width,)
        yield f"{block}.self_attn.q_norm.weight", (queries if whole else size,)
        yield f"{block}.self_attn.k_norm.weight", (keys if whole else size,)
        yield from _linear(f"{block}.self_attn.att_proj", queries + 2 * keys, width, text["qkv_bias"])
        yield f"{block}.self_attn.attn_out.weight", (width, queries)
        yield f"{block}.mlp.ff_proj.weight", (2 * inner, width)
        yield f"{block}.mlp.ff_out.weight", (width, inner)


def _molmo2_pictures(tower: Config, adapter: Config) -> _Stored:
    width, inner, pooled = tower["hidden_size"], tower["intermediate_size"], adapter["hidden_size"]
    root = "model.vision_backbone"
    depth = max(layer % tower["num_hidden_layers"] for layer in adapter["vit_layers"]) + 1
    yield f"{root}.image_vit.positional_embedding", (tower["image_num_pos"], width)
    yield from _linear(f"{root}.image_vit.patch_embedding", width, 3 * tower["image_patch_size"] ** 2)
    for layer in range(depth):
        block = f"{root}.image_vit.transformer.resblocks.{layer}"
        yield from _norm(f"{block}.attention_norm", width)
        yield from _norm(f"{block}.ffn_norm", width)
        for name in ("wq", "wk", "wv", "wo"):
            yield from _linear(f"{block}.attention.{name}", width, width)
        yield from _linear(f"{block}.feed_forward.w1", inner, width)
        yield from _linear(f"{block}.feed_forward.w2", width, inner)
    for name in ("wq", "wk", "wv"):
        yield from _linear(f"{root}.image_pooling_2d.{name}", pooled, width * len(adapter["vit_layers"]))
    yield from _linear(f"{root}.image_pooling_2d.wo", pooled, pooled)
    for name in ("w1", "w3"):
        yield f"{root}.image_projector.{name}.weight", (adapter["intermediate_size"], pooled)
    yield f"{root}.image_projector.w2.weight", (adapter["text_hidden_size"], adapter["intermediate_size"])


_TEXT: Config = {
    "model_type": "molmo2_text", "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 90, "additional_vocab_size": 6, "qkv_bias": False, "num_hidden_layers": 2,
    "intermediate_size": 96, "hidden_act": "silu", "max_position_embeddings": 64, "rope_theta": 1e4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "use_qk_norm": True, "qk_norm_type": "qwen3",
    "layer_norm_eps": 1e-6, "norm_after": False, "rope_scaling_layers": None,
}  # fmt: skip
_TOWER: Config = {
    "model_type": "molmo2", "hidden_size": 64, "intermediate_size": 56, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6, "image_default_input_size": [16, 16], "image_patch_size": 4, "image_num_pos": 16,
}  # fmt: skip
_ADAPTER: Config = {
    "model_type": "molmo2", "vit_layers": [-3, -2], "pooling_attention_mask": False, "hidden_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 12, "hidden_act": "silu", "intermediate_size": 40,
    "text_hidden_size": 128,
}  # fmt: skip


def molmo2(**text: object) -> Model:
    """Molmo 2, with some keys of the text model's config."""
    inner = {**_TEXT, **text}
    config = {
        "model_type": "molmo2", "image_patch_id": 5, "tie_word_embeddings": False, "text_config": inner,
        "vit_config": _TOWER, "adapter_config": _ADAPTER,
    }  # fmt: skip
    stored = dict((*_molmo2_text(inner), *_molmo2_pictures(_TOWER, _ADAPTER)))
    return Model("Molmo2ForConditionalGeneration", config, stored=stored)


def _step_pictures(tower: Config, text: int) -> _Stored:
    width, inner, root = tower["width"], int(tower["width"] * tower["mlp_ratio"]), "vision_model"
    patch = tower["patch_size"]
    yield f"{root}.conv1.weight", (width, 3, patch, patch)
    yield f"{root}.positional_embedding", ((tower["image_size"] // patch) ** 2, width)
    yield from _norm(f"{root}.ln_pre", width)
    for layer in range(tower["layers"]):
        block = f"{root}.transformer.resblocks.{layer}"
        yield from _norm(f"{block}.ln_1", width)
        yield from _norm(f"{block}.ln_2", width)
        yield f"{block}.attn.in_proj_weight", (3 * width, width)
        yield f"{block}.attn.in_proj_bias", (3 * width,)
        yield from _linear(f"{block}.attn.out_proj", width, width)
        yield f"{block}.ls_1.gamma", (width,)
        yield f"{block}.ls_2.gamma", (width,)
        yield from _linear(f"{block}.mlp.c_fc", inner, width)
        yield from _linear(f"{block}.mlp.c_proj", width, inner)
    for number, size in ((1, width), (2, 2 * width)):
        yield f"{root}.vit_downsampler{number}.weight", (2 * size, size, 3, 3)
        yield f"{root}.vit_downsampler{number}.bias", (2 * size,)
    yield "vit_large_projector.weight", (text, 4 * width)


_STEP_TEXT: Config = {
    **STEP, "architectures": ["Step3p5ForCausalLM"], "att_impl_type": "GQA", "norm_expert_weight": True,
    "use_moe_router_bias": True, "need_fp32_gate": True, "moe_router_scaling_factor": 1.0, "swiglu_limits": [],
    "swiglu_limits_shared": [], "rope_theta": 1e4, "rms_norm_eps": 1e-6,
}  # fmt: skip
_STEP_TOWER: Config = {
    "model_type": "perception_encoder", "width": 64, "layers": 2, "heads": 4, "patch_size": 4, "image_size": 16,
    "mlp_ratio": 1.25, "output_dim": None, "hidden_act": "quick_gelu", "ls_init_value": 0.1, "use_ln_pre": True,
    "use_ln_post": False, "use_abs_posemb": True, "use_cls_token": False, "use_rope2d": True,
}  # fmt: skip
_STEP_WHOLE: Config = {
    "model_type": "step3p7", "projector_bias": False, "tie_word_embeddings": False, "image_token_id": 5,
    "understand_projector_stride": 2, "text_config": _STEP_TEXT, "vision_config": _STEP_TOWER,
}  # fmt: skip

REMOTE_PICTURES = {
    "molmo2": molmo2(),
    "molmo2-olmo": molmo2(qk_norm_type="olmo", qkv_bias=True),
    "step3p7": Model(
        "Step3p7ForConditionalGeneration",
        _STEP_WHOLE,
        stored={**STEP_STORED, **dict(_step_pictures(_STEP_TOWER, STEP["hidden_size"]))},
    ),
}
