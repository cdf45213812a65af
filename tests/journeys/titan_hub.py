"""config.json of the models of transformers that torchtitan's registered models are."""

from __future__ import annotations

from typing import Any


def config(package: str, model: Any) -> dict[str, Any]:
    """The config.json of a model of this configuration of torchtitan."""
    attention = next(layer.attention for layer in model.layers if layer.attention is not None)
    shared = {
        "vocab_size": model.vocab_size, "hidden_size": model.dim, "num_hidden_layers": len(model.layers),
        "rms_norm_eps": model.norm.eps, "tie_word_embeddings": model.enable_weight_tying,
        "max_position_embeddings": attention.rope.max_seq_len, "bos_token_id": 0, "eos_token_id": 1,
        "pad_token_id": None,
    }  # fmt: skip
    text = shared | _FAMILIES[package](model)
    tower = getattr(model, "vision_encoder", None)
    if tower is not None:
        return _PICTURES[package](model, tower, text)
    # The hub has no text alone of these: what torchtitan has not are their pictures.
    return _MUSE | {"text_config": text} if package == "muse_glimmer" else text


def _dense(model: Any) -> dict[str, Any]:
    attention = model.layers[0].attention
    (first,) = [layer.feed_forward for layer in model.layers if layer.feed_forward is not None][:1] or [None]
    return {
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads or attention.n_heads,
        "head_dim": attention.qkv_linear.head_dim,
        "rope_parameters": _rope(attention.rope),
    } | ({"intermediate_size": first.w1.out_features} if first else {})


def _rope(rope: Any) -> dict[str, Any]:
    shared = {"rope_theta": float(rope.theta)}
    if rope.scaling == "llama":
        return shared | {
            "rope_type": "llama3",
            "factor": rope.scaling_factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position_embeddings,
        }
    if rope.scaling == "yarn":
        return shared | {
            "rope_type": "yarn", "factor": float(rope.rope_factor), "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow, "truncate": rope.truncate,
            "original_max_position_embeddings": rope.original_seq_len,
        }  # fmt: skip
    return shared | {"rope_type": "default"}


def _experts(model: Any) -> tuple[Any, Any]:
    """The first mixture of experts, and its experts."""
    moe = next(layer.moe for layer in model.layers if layer.moe is not None)
    return moe, moe.routed_experts.inner_experts


def _llama(model: Any) -> dict[str, Any]:
    return {"model_type": "llama", **_dense(model)}


def _qwen(model: Any) -> dict[str, Any]:
    if model.layers[0].moe is None:
        return {"model_type": "qwen3", **_dense(model)}
    moe, experts = _experts(model)
    return {
        "model_type": "qwen3_moe", "moe_intermediate_size": experts.hidden_dim,
        "intermediate_size": experts.hidden_dim, "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.router.top_k, "norm_topk_prob": moe.router.route_norm, "decoder_sparse_step": 1,
        "mlp_only_layers": [], **_dense(model),
    }  # fmt: skip


def _oss(model: Any) -> dict[str, Any]:
    moe, experts = _experts(model)
    return {
        "model_type": "gpt_oss",
        "intermediate_size": experts.hidden_dim,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.router.top_k,
        "sliding_window": model.layers[0].attention.sliding_window_size,
        "layer_types": [
            "full_attention" if layer.attention.sliding_window_size is None else "sliding_attention"
            for layer in model.layers
        ],
        "swiglu_limit": experts.swiglu_limit,
        **_dense(model),
    }


def _deepseek(model: Any) -> dict[str, Any]:
    attention = model.layers[0].attention
    moe, experts = _experts(model)
    router = moe.router
    rope = _rope(attention.rope)
    if rope["rope_type"] == "yarn":
        rope |= {"mscale": attention.mscale, "mscale_all_dim": attention.mscale}
    sigmoid = router.score_func == "sigmoid"
    groups = {"n_group": router.num_expert_groups or 1, "topk_group": router.num_limited_groups or 1}
    second = {"topk_method": "group_limited_greedy" if router.num_expert_groups else "greedy"}
    (dense,) = [layer.feed_forward for layer in model.layers if layer.feed_forward is not None]
    return {
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_heads,
        "q_lora_rank": attention.q_lora_rank or None,
        "kv_lora_rank": attention.kv_lora_rank,
        "qk_nope_head_dim": attention.qk_nope_head_dim,
        "qk_rope_head_dim": attention.qk_rope_head_dim,
        "v_head_dim": attention.v_head_dim,
        "intermediate_size": dense.w1.out_features,
        "moe_intermediate_size": experts.hidden_dim,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_experts.w1.out_features // experts.hidden_dim,
        "num_experts_per_tok": router.top_k,
        "norm_topk_prob": router.route_norm,
        "routed_scaling_factor": router.route_scale,
        "first_k_dense_replace": 1,
        "rope_parameters": rope,
        **groups,
        **({} if sigmoid else second),
    }


def _kimi(_: Any, tower: Any, text: dict[str, Any]) -> dict[str, Any]:
    text.pop("topk_method", None)  # its text is always a DeepSeek-V3
    return {
        "model_type": "kimi_k25",
        "text_config": text | {"model_type": "deepseek_v3", "num_nextn_predict_layers": 0},
        "tie_word_embeddings": text["tie_word_embeddings"],
        "projection_hidden_size": tower.dim,
        "image_token_id": 2,
        "video_token_id": 3,
        "vision_start_token_id": 4,
        "vision_end_token_id": 5,
        "vision_config": {
            "hidden_size": tower.dim, "intermediate_size": tower.block.mlp.fc1.out_features,
            "num_hidden_layers": tower.num_layers, "num_attention_heads": tower.num_heads,
            "patch_size": tower.patch_size, "pos_emb_height": tower.init_pos_emb_height,
            "pos_emb_width": tower.init_pos_emb_width, "merge_kernel_size": tower.merge_kernel_size,
        },
    }  # fmt: skip


def _muse(model: Any) -> dict[str, Any]:
    attentions = [layer.attention for layer in model.layers]
    kinds = {True: "full_attention", False: "sliding_attention"}
    return {
        "model_type": "muse_glimmer_text",
        **_dense(model),
        "layer_types": [kinds[each.window_size is None] for each in attentions],
        "sliding_window": next(each.window_size for each in attentions if each.window_size),
        "layer_rope_theta": [each.rope.theta if each.use_rope else 0 for each in attentions],
        "final_logit_softcapping": model.lm_head.output_soft_cap_temp,
        "output_multiplier": model.lm_head.output_multiplier,
        "qk_scale_factor": attentions[0].scale_query_by,
        "post_norm_eps": model.layers[0].post_ffn_norm.eps,
    }


_MUSE = {
    "model_type": "muse_glimmer",
    "tie_word_embeddings": False,
    "image_token_id": 2,
    "video_token_id": 3,
    "out_hidden_size": 128,
    "projector_hidden_size": 16,
    "vision_config": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 2,
        "layer_types": ["window_attention", "full_attention"],
    },
}  # fmt: skip


def _muse_pictures(model: Any, tower: Any, text: dict[str, Any]) -> dict[str, Any]:
    vision = {
        "hidden_size": tower.latent_dim, "intermediate_size": tower.block.mlp.fc1.out_features,
        "num_hidden_layers": tower.num_layers, "num_attention_heads": tower.num_heads, "patch_size": tower.patch_size,
        "pos_emb_height": tower.pos_emb_grid_h, "pos_emb_width": tower.pos_emb_grid_w,
        "patch_temporal": tower.patch_temporal, "merge_size": tower.downsample_factor,
        "layer_types": ["window_attention", "full_attention"],
    }  # fmt: skip
    sizes = {"out_hidden_size": tower.output_dim, "projector_hidden_size": model.vision_adapter.c_fc.out_features}
    return {**_MUSE, **sizes, "text_config": text, "vision_config": vision}


def _qwen_next(model: Any) -> dict[str, Any]:
    attention = next(layer.attention for layer in model.layers if layer.attention is not None)
    delta = next(layer.delta_net for layer in model.layers if layer.delta_net is not None)
    rope = {"partial_rotary_factor": attention.rotary_dim / attention.head_dim, "mrope_interleaved": True}
    shared = {
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads,
        "head_dim": attention.head_dim,
        "linear_conv_kernel_dim": delta.conv_kernel_size,
        "linear_key_head_dim": delta.key_head_dim,
        "linear_value_head_dim": delta.value_head_dim,
        "linear_num_key_heads": delta.in_proj_q.out_features // delta.key_head_dim,
        "linear_num_value_heads": delta.in_proj_v.out_features // delta.value_head_dim,
        "layer_types": ["linear_attention" if each.attention is None else "full_attention" for each in model.layers],
        "rope_parameters": _rope(attention.rope) | rope | {"mrope_section": attention.rope.mrope_section},
    }
    if model.layers[0].moe is None:
        return shared | {
            "model_type": "qwen3_5_text",
            "intermediate_size": model.layers[0].feed_forward.w1.out_features,
        }
    moe, experts = _experts(model)
    return shared | {
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": experts.hidden_dim,
        "shared_expert_intermediate_size": moe.shared_experts.w1.out_features,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.router.top_k,
    }


def _qwen_pictures(_: Any, tower: Any, text: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": text["model_type"].removesuffix("_text"),
        "text_config": text,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "image_token_id": 2,
        "video_token_id": 3,
        "vision_start_token_id": 4,
        "vision_end_token_id": 5,
        "vision_config": {
            "depth": tower.num_layers, "hidden_size": tower.dim,
            "intermediate_size": tower.block.mlp.fc1.out_features, "num_heads": tower.num_heads,
            "patch_size": tower.patch_size, "spatial_merge_size": tower.spatial_merge_size,
            "temporal_patch_size": tower.temporal_patch_size,
            "num_position_embeddings": tower.num_position_embeddings,
            "out_hidden_size": tower.merger.fc2.out_features,
        },
    }  # fmt: skip


_FAMILIES = {
    "deepseek_v3": _deepseek, "gpt_oss": _oss, "kimi_k2_7": _deepseek, "llama3": _llama, "muse_glimmer": _muse,
    "qwen3": _qwen, "qwen3_5": _qwen_next,
}  # fmt: skip
_PICTURES = {"kimi_k2_7": _kimi, "muse_glimmer": _muse_pictures, "qwen3_5": _qwen_pictures}
