"""Tiny configs: a model's config with small sizes, in variants whose sizes differ.

A variant changes every size, and with it the numbers of layers, heads and experts; some of the flags are turned over.
What is the same in two variants is no evidence for anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transaxle.derivation.configs.config_values import leaves

VARIANTS = 4
"""Number of variants; the last is for checking only."""
_HIDDEN, _HEADS, _GROUPS, _HEAD = (64, 96, 80, 144), (4, 6, 10, 12), (2, 3, 5, 4), (16, 24, 20, 28)
_LAYERS = (4, 3, 5, 6)
_VOCABULARY = (112, 131, 149, 137)
_RATIOS = (2, 4, 6, 3)
"""Eighths of a size that `RATIO` takes."""
OWN, PLAIN, RATIO, DEEP = "own", "plain", "ratio", "deep"
"""How the sizes of a variant hang together."""

_RULES: tuple[tuple[Sequence[int], str], ...] = (
    (_VOCABULARY, """(text_|entity_|target_|src_|tgt_|tokenizer_)?vocab_size n_vocab vocab_size_per_layer_input"""),
    (_HIDDEN, """(text_|out_|encoder_|decoder_|backbone_|attention_|rnn_|adapter_)?hidden_size d_model n_embd dim
        lru_width (text_|output_)?embed_dim embedding_size projection_dim model_dim hidden_dim word_embed_proj_dim"""),
    ((96, 144, 176, 208), """(dense_|ffn_)?intermediate_size(_mlp)? (encoder_|decoder_)?ffn_dim d_ff n_inner
        ffn_hidden_size mlp_dim d_inner feed_forward_proj_dim"""),
    ((48, 56, 72, 88), """(moe_|shared_|expert_)(shared_)?(expert_)?(intermediate_size|ffn_hidden_size|dim)
        shared_expert_intermediate_size share_expert_dim expert_ffn_hidden_size"""),
    (_LAYERS, """num_hidden_layers n_layers? num_layers (encoder|decoder|text)_(layers|depth) num_(en|de)coder_layers
        depth num_blocks"""),
    (_HEADS, """((en|de)coder_|swa_)?(num_)?(swa_|encoder_|decoder_)?attention_heads n_heads? num_heads
        encoder_num_heads ((en|de)coder_)num_attention_heads linear_num_value_heads"""),
    (_GROUPS, """(swa_|(en|de)coder_)?num_(swa_|global_)?key_value_heads n_kv_heads num_kv_heads n_head_kv
        attention_value_heads linear_num_key_heads"""),
    (_HEAD, """(attention_|swa_|encoder_|index_|v_)?head_dim d_kv linear_(key|value)_head_dim qk_nope_head_dim
        kv_channels attention_head_size"""),
    ((32, 40, 36, 44), "global_head_dim"),
    ((8, 12, 10, 14), "qk_rope_head_dim"),
    ((24, 36, 30, 42), "q_lora_rank"),
    ((40, 60, 50, 70), "kv_lora_rank"),
    ((24, 36, 30, 42), "qk_head_dim"),
    ((4, 5, 6, 7), """num_experts num_local_experts n_routed_experts (moe_)?num_(routed_)?experts n_experts
        num_moe_experts"""),
    ((2,), """num_experts_per_(tok|token|layer) moe_k moe_top_?k top_?k(_experts)? num_selected_experts router_top_k
        num_nextn_predict_layers"""),
    ((1,), "n_group topk_group num_expert_group moe_num_shared_experts"),
    ((1, 2, 1, 2), "first_k_dense_replace first_k_dense"),
    ((1, 2, 3, 2), "n_shared_experts num_shared_experts"),
    ((64,), """max_position_embeddings n_positions max_(source|target)_positions n_ctx context_length
        max_seq(uence)?_len(gth)? seq_length"""),
    ((16, 24, 20, 28), "mamba_d_state state_size ssm_state_size mamba_state_dim"),
    ((16,), "mamba_d_head mamba_head_dim mamba_headdim"),
    ((8, 12, 10, 18), "mamba_n_heads mamba_num_heads"),
    ((128, 192, 160, 288), "mamba_d_ssm"),
    ((2, 4, 2, 3), "mamba_n_groups n_groups mamba_ngroups"),
    ((8, 12, 10, 14), "time_step_rank mamba_dt_rank"),
    ((32,), "index_topk num_mel_bins sliding_window image_size attention_window"),
    ((8,), "index_n_heads patch_size"),
    ((16, 24, 20, 28), "hidden_size_per_layer_input"),
)  # fmt: skip
"""Sizes in each variant, and the keys that have them, as patterns."""
_COMPILED = [(sizes, re.compile("|".join(f"(?:{key})" for key in keys.split()))) for sizes, keys in _RULES]
_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_KEPT = frozenset(
    {"model_type", "architectures", "dtype", "torch_dtype", "transformers_version", "id2label", "label2id"}
)
_OF_DEFAULT_DEPTH = frozenset({"stage_names", "out_features", "out_indices", "_out_features", "_out_indices"})
"""Keys that name layers of the default config; without them, transformers takes the last layer."""
_TOKEN = re.compile(r"(_token_id|_token_index|_id|_ids|token_index)$")
FLAG = re.compile(r"(?!use_cache)(\w+_)?(bias|tie|tied|norm|gate|gating|use)(_\w+)?")
"""Keys of flags that may decide which tensors there are."""
_TIED = "tie_word_embeddings"
_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 32,
    "indexer_compress_ratio": 4,
}  # fmt: skip
_FILLED: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4},
    "qwen4_exp": _INDEXER,
    "qwen4_exp_text": _INDEXER,
}  # fmt: skip
"""Model types whose default config lacks what a model needs, with values for it."""
_TURNED = (0b1010, 0b0100, 0b1110, 0b0010, 0b1100, 0b0110)
"""For one flag after the other, the variants in which it is turned over: bit 1 for variant 1, and so on."""


def tiny(config: Mapping[str, Any], variant: int, *, sizes: str = OWN, flip: bool = False) -> dict[str, Any]:
    """Return a config with the sizes of a variant.

    Args:
        config: the model's config, default or real.
        variant: which sizes, from 0 on.
        sizes: `OWN`: every key has the sizes of its rule; `PLAIN`: but the size of a head is the hidden size divided by
            their number; `RATIO`: what it has, in a ratio that leaves divisors alone;
            `DEEP`: and as many layers.
        flip: turn over the flags that the variant stands for.
    """
    config = {**config, **_FILLED.get(str(config.get("model_type")), {})}
    flags = [key for key, value in leaves(config) if isinstance(value, bool) and FLAG.fullmatch(key.rpartition(".")[2])]
    codes = {key: _TURNED[at % len(_TURNED)] for at, key in enumerate(flags)}
    codes |= {key: 0b1010 if key == _TIED else 0b0100 for key in flags if key.endswith(_TIED)}
    turned = {key for key, code in codes.items() if flip and code >> variant & 1}
    if _TIED not in config and flip and variant:
        config[_TIED] = variant == 2
    return _Shrinking(variant, sizes, frozenset(turned)).mapping(config)


@dataclass(frozen=True)
class _Shrinking:
    """Makes one variant."""

    variant: int
    sizes: str
    turned: frozenset[str]

    def mapping(self, config: Mapping[str, Any], path: str = "") -> dict[str, Any]:
        layers = next((config[key] for key in _COUNTS if isinstance(config.get(key), int)), None)
        small = {
            key: self._value(key, value, layers, path)
            for key, value in config.items()
            if self.sizes in (RATIO, DEEP) or key not in _OF_DEFAULT_DEPTH
        }
        if self.sizes == OWN and "num_attention_heads" in config and "hidden_size" in config:
            small["head_dim"] = (
                small.get("head_dim") or _HEAD[self.variant]
            )  # some models read it though it has no default
        return small

    def _value(self, key: str, value: Any, layers: int | None, path: str) -> Any:
        if key in _KEPT:
            return value
        if isinstance(value, Mapping):
            nested = "model_type" in value or key.endswith("_config")
            return self.mapping(value, f"{path}{key}.") if nested else value
        if isinstance(value, bool):
            return value is not (path + key in self.turned)
        if isinstance(value, int):
            return self._number(key, value)
        return _list(key, value, self.variant, layers) if isinstance(value, list) else value

    def _number(self, key: str, value: int) -> int:
        if _TOKEN.search(key):
            return value if 0 <= value < 100 else 3
        for sizes, pattern in _COMPILED:
            if not pattern.fullmatch(key) or value <= 0:
                continue
            if self.sizes == DEEP and sizes is _LAYERS:
                return value
            if self.sizes in (RATIO, DEEP) and sizes not in (_LAYERS, _VOCABULARY):
                scaled, rest = divmod(value * _RATIOS[self.variant], 8)
                return value if rest or sizes in (_HEADS, _GROUPS) or len(sizes) == 1 else scaled
            if sizes is _HEAD and self.sizes == PLAIN:
                return _HIDDEN[self.variant] // _HEADS[self.variant]
            return sizes[self.variant % len(sizes)]
        return value


def _list(key: str, value: list[Any], variant: int, layers: int | None) -> list[Any]:
    """Shorten a list that has an entry for each layer, so that every kind of entry stays."""
    if _TOKEN.search(key) and all(isinstance(item, int) for item in value):
        return [item if 0 <= item < 100 else 3 for item in value]
    if layers is None or len(value) != layers:
        return value
    count = _LAYERS[variant]
    kinds = [item for at, item in enumerate(value) if item not in value[:at]]
    if len(kinds) == 1 or len(kinds) > count:
        return [kinds[0]] * count if len(kinds) == 1 else value[:count]
    start = value[:count]
    if all(kind in start for kind in kinds) and len(start) == count:
        return start
    return [kinds[at % len(kinds)] for at in range(count)]
