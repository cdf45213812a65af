"""Shrinks a model's config to tiny configs, in several variants with different sizes, so that tracing the models is
quick.

Each variant changes every size, including the numbers of layers, heads and experts, and inverts some of the flags. So
two sizes that are equal by chance in one variant differ in at least one further variant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transaxle.derivation.configs import leaves

VARIANTS = 4
"""Number of variants with different sizes; the last of these variants serves only to check a derived table."""
MORE_VARIANTS = 8
"""Number of all variants: `VARIANTS` with different sizes, then variants with the same sizes but different flags
inverted.
"""
PROPORTIONED = MORE_VARIANTS
"""Index of the variant that keeps the proportions and the flags of the given config."""
_HIDDEN, _HEADS, _GROUPS, _HEAD = (64, 96, 80, 144), (4, 6, 10, 12), (2, 3, 5, 3), (16, 24, 20, 28)
_LAYERS = (4, 3, 5, 6)
_VOCABULARY, _TOKEN_TYPES = (112, 131, 149, 137), (3, 4, 6, 5)
_SECOND_VOCABULARY = (107, 118, 142, 127)
"""Sizes of a vocabulary beside another one; of an unpadded vocabulary, which is smaller than the padded one."""
_ALONE = (_LAYERS, _VOCABULARY, _SECOND_VOCABULARY, _TOKEN_TYPES)
"""Sizes that are independent of widths: widths need not be divisible by these sizes."""
_RATIOS = (2, 4, 6, 3)
"""For the size choice `RATIO`: the fraction of the original size that each variant has, in eighths."""
OWN, PLAIN, RATIO, DEEP, SMALL = "own", "plain", "ratio", "deep", "small"
"""The ways to choose the sizes of a variant; the function `tiny` documents them."""
_FRACTIONS = {RATIO: 8, DEEP: 8, SMALL: 64}
_LEAST = 4
"""Minimum size that shrinking may result in. A size that would become smaller stays unchanged, because axes of size 1
show nothing.
"""
_OF_STAGES = re.compile(r"(\w+_)?(hidden_sizes|embed_dims|channels|dims|widths)")
"""Pattern for config keys of lists that have one size per backbone stage."""

_RULES: tuple[tuple[tuple[int, ...], str], ...] = (
    (_SECOND_VOCABULARY, "(unpadded|text)_vocab_size"),
    (_VOCABULARY, r"""(?!type_)(\w+_)?vocab_size n_vocab vocab_size_per_layer_input"""),
    (_HIDDEN, """(text_|out_|encoder_|decoder_|backbone_|attention_|rnn_|adapter_)?hidden_size d_model n_embd dim
        lru_width (text_|output_)?embed_dim embedding_size model_dim hidden_dim word_embed_proj_dim"""),
    ((96, 144, 176, 208), """(dense_|ffn_)?intermediate_size(_mlp)? (encoder_|decoder_)?ffn_dim d_?ff n_inner
        ffn_hidden_size mlp_dim d_inner feed_forward_proj_dim"""),
    ((48, 56, 72, 88), """(moe_|shared_|expert_)(shared_)?(expert_)?(intermediate_size|ffn_hidden_size|dim)
        shared_expert_intermediate_size share_expert_dim expert_ffn_hidden_size"""),
    ((72, 104, 88, 136), r"\w+_hidden_size"),
    ((40, 56, 88, 72), "projection_dim"),
    (_TOKEN_TYPES, "type_vocab_size"),
    (_LAYERS, """num_hidden_layers n_layers? num_layers (encoder|decoder|text)_(layers|depth) num_(en|de)coder_layers
        depth num_blocks"""),
    (_HEADS, """((en|de)coder_|swa_)?(num_)?(swa_|sliding_|encoder_|decoder_)?attention_heads n_heads? num_heads
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
    ((1,), "n_group topk_group num_expert_group"),
    ((1, 2, 1, 2), "first_k_dense_replace first_k_dense"),
    ((2, 3, 4, 3), "(moe_)?n(um)?_shared_experts"),
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
    ((20, 28, 24, 36), "hidden_size_per_layer_input"),
)  # fmt: skip
"""Pairs `(size in each variant, regular expressions of the config keys that get these sizes)`."""
_HANG_TOGETHER: dict[tuple[int, ...], str] = {_LAYERS: "layers", _HEADS: "heads", _GROUPS: "heads"}
_COMPILED = [(sizes, re.compile("|".join(f"(?:{key})" for key in keys.split()))) for sizes, keys in _RULES]
_NUMBERS_OF_HEADS = next(pattern for sizes, pattern in _COMPILED if sizes == _HEADS)
_WIDTHS = next(pattern for sizes, pattern in _COMPILED if sizes == _HIDDEN)
_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_KEPT = frozenset(
    {"model_type", "architectures", "dtype", "torch_dtype", "transformers_version", "id2label", "label2id"}
)
_OF_DEFAULT_DEPTH = frozenset({"stage_names", "out_features", "out_indices", "_out_features", "_out_indices"})
"""Config keys that select layers by numbers valid only at the default depth; without these keys, transformers uses the
last layer.
"""
_OF_STEADY_STAGES = frozenset({"grounding-dino", "mm-grounding-dino"})
"""Model types whose number of backbone stages cannot change, because no config key adapts the stages' tensors."""
OF_SHARED_SIZES = frozenset({"molmo2"})
"""Model types with sizes in two sub-configs that must be equal, although a model builds if they are not."""
_FOLLOWS = frozenset({"hidden_size", "num_layers"})
"""Config keys that transformers computes itself, for models whose width doubles from stage to stage."""
_TEXT = ("text_config", "thinker_config", "llm_config", "decoder")
"""Config sections that are, or contain, the config of the text model."""
_TOKEN = re.compile(r"(_token_id|_token_index|_id|_ids|token_index)$")
FLAG = re.compile(r"(?!use_cache)(\w+_)?(bias|tie|tied|norm|gate|gating|use)(_\w+)?")
"""Pattern for config flags that may determine which tensors exist."""
_TIED = "tie_word_embeddings"
_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 32,
    "indexer_compress_ratio": 4,
}  # fmt: skip
_FILLED: dict[str, dict[str, Any]] = {
    "glm4_moe": {"head_dim": 128},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "gemma3n_text": {
        "num_kv_shared_layers": 2, "layer_types": [*["sliding_attention", "full_attention"] * 17, "sliding_attention"],
    },
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": _INDEXER,
    "qwen4_exp_text": _INDEXER,
}  # fmt: skip
"""Model type -> values for config keys that the default config lacks although the model needs them."""
_APART: dict[str, dict[str, tuple[int, ...]]] = {"molmo2_text": {"additional_vocab_size": (16, 13, 11, 15)}}
"""Model type -> config key -> size in each variant, for sizes that would be equal to another size of the model. The sum
of one of these and the vocabulary of the same variant is even: transformers stores the rows of both in two halves.
"""
_TURNED = (0b1010, 0b0100, 0b1110, 0b0010, 0b1100, 0b0110)
"""For one flag after the other, a bit mask of the variants that invert the flag: bit n represents variant n."""


def _inverted_in(at: int) -> int:
    """Return a bit mask of the variants that invert the flag with index `at`; neighbouring flags have different
    masks.
    """
    return _TURNED[at % len(_TURNED)] | (3 + 5 * at) % 16 << VARIANTS


def fill_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with values for the keys that the default config of its model type lacks."""
    return {**config, **_FILLED.get(str(config.get("model_type")), {})}


def kind(key: str, value: object) -> str:
    """Return a word for the kind of a config key; keys whose sizes depend on one another have the same kind."""
    if isinstance(value, bool):
        return f"flag {key}"
    rule_sizes = next((sizes for sizes, pattern in _COMPILED if pattern.fullmatch(key)), _LAYERS)
    return _HANG_TOGETHER.get(rule_sizes, str(rule_sizes))


def tiny(
    config: Mapping[str, Any], variant: int, *, sizes: str = OWN, flip: bool = False, apart: bool = False
) -> dict[str, Any]:
    """Return a shrunk copy of a config, with the sizes of one variant.

    Args:
        config: the model's config: the default config of a model type, or the config of a real checkpoint.
        variant: index of the variant, from 0.
        sizes: how sizes are chosen. `OWN`: each key has fixed sizes. `PLAIN`: like `OWN`, but the head size is the
            hidden size divided by the number of heads. `RATIO`: all sizes are multiplied by one ratio, such that
            divisible sizes stay divisible. `DEEP`: like `RATIO`, but with all layers. `SMALL`: an eighth of the sizes
            of `RATIO`.
        flip: whether to invert the flags that this variant inverts.
        apart: whether each sub-config (such as `vision_config`), except the text model's, gets the sizes of a different
            variant.
    """
    config = fill_defaults(config)
    flags = [key for key, value in leaves(config) if isinstance(value, bool) and FLAG.fullmatch(key.rpartition(".")[2])]
    codes = {key: _inverted_in(at) for at, key in enumerate(flags)}
    codes |= {key: 0b01011010 if key == _TIED else 0b00110100 for key in flags if key.endswith(_TIED)}
    turned = {key for key, code in codes.items() if flip and code >> variant & 1}
    if _TIED not in config and flip and variant:
        config[_TIED] = variant in (2, 5)
    staged = sizes == SMALL or config.get("model_type") in _OF_STEADY_STAGES
    small = _Shrinker(variant % VARIANTS, sizes, frozenset(turned), apart, staged).mapping(config)
    own_sizes = _APART.get(str(config.get("model_type")), {})
    return {**small, **{key: several[variant % VARIANTS] for key, several in own_sizes.items()}}


@dataclass(frozen=True)
class _Shrinker:
    """Builds the shrunk config of one variant."""

    variant: int
    sizes: str
    turned: frozenset[str]
    apart: bool
    staged: bool
    """Whether the number of backbone stages must stay unchanged."""
    deep: bool = False
    """Whether the number of layers must stay unchanged."""
    heads: tuple[int, ...] = ()
    """Numbers of heads; if such a number divides a width, it also divides the shrunk width."""

    def mapping(self, config: Mapping[str, Any], path: str = "") -> dict[str, Any]:
        deep = self.sizes == DEEP or (self.staged and "depths" in config)
        counts = (value for key, value in config.items() if _NUMBERS_OF_HEADS.fullmatch(key) and type(value) is int)
        return replace(self, deep=deep, heads=tuple(count for count in counts if count > 0))._mapping(config, path)

    def _mapping(self, config: Mapping[str, Any], path: str) -> dict[str, Any]:
        layers = next((config[key] for key in _COUNTS if isinstance(config.get(key), int)), None)
        wide = any(_WIDTHS.fullmatch(key) for key in config)
        parts = [key for key, value in config.items() if _is_part(key, value) and (wide or key not in _TEXT)]
        doubled = "embed_dim" in config and "depths" in config
        small: dict[str, Any] = {}
        for key, value in config.items():
            if self.sizes in (OWN, PLAIN) and self._is_computed(key, doubled=doubled):
                continue
            if _is_part(key, value):
                step = 1 + parts.index(key) if self.apart and key in parts else 0
                its = replace(self, variant=(self.variant + step) % VARIANTS)
                small[key] = its.mapping(value, f"{path}{key}.")
            else:
                small[key] = self._value(key, value, layers, path)
        if self.sizes == OWN and "num_attention_heads" in config and "hidden_size" in config:
            # Some models read `head_dim` although their config has no default for it.
            small["head_dim"] = small.get("head_dim") or _HEAD[self.variant]
        return small

    def _is_computed(self, key: str, *, doubled: bool) -> bool:
        """Return whether transformers computes a config key itself if the key is absent."""
        return (key in _OF_DEFAULT_DEPTH and not self.deep) or (key in _FOLLOWS and doubled)

    def _value(self, key: str, value: Any, layers: int | None, path: str) -> Any:
        if key in _KEPT:
            return value
        if isinstance(value, bool):
            return value is not (path + key in self.turned)
        if isinstance(value, int):
            return self._number(key, value)
        if isinstance(value, list | tuple) and self.sizes in _FRACTIONS and _OF_STAGES.fullmatch(key):
            return self._stages(list(value))
        if isinstance(value, list) and (_TOKEN.search(key) or not self.deep):
            shorter = _list(key, value, self.variant, layers)
            same = len(value) == layers and type(value[0]) is int and value.count(value[0]) == layers
            return [self._number(key, each) for each in shorter] if same else shorter
        return value

    def _share(self, value: int, heads: Sequence[int]) -> int:
        """Return a width times the variant's ratio; if heads do not divide the result, return a larger fraction or the
        whole width.
        """
        divisors = [each for count in heads for each in (count, 2 * count)]
        for parts in (_FRACTIONS[self.sizes], _FRACTIONS[RATIO]):
            share, remainder = divmod(value * _RATIOS[self.variant], parts)
            if not remainder and share >= _LEAST and not any(share % each and not value % each for each in divisors):
                return share
        return value

    def _stages(self, value: list[Any]) -> list[Any]:
        """Multiply all sizes in a list by the variant's ratio; return the list unchanged unless all results are whole
        numbers.
        """
        scaled = [divmod(each * _RATIOS[self.variant], _FRACTIONS[self.sizes]) for each in value if type(each) is int]
        return [size for size, _ in scaled] if len(scaled) == len(value) and not any(r for _, r in scaled) else value

    def _number(self, key: str, value: int) -> int:
        if _TOKEN.search(key):
            return value if 0 <= value < 100 else 3
        for sizes, pattern in _COMPILED:
            if not pattern.fullmatch(key) or value <= 0:
                continue
            if self.deep and sizes is _LAYERS:
                return value
            if self.sizes in _FRACTIONS and sizes not in _ALONE:
                is_fixed = sizes in (_HEADS, _GROUPS) or len(sizes) == 1
                return value if is_fixed else self._share(value, self.heads if _WIDTHS.fullmatch(key) else ())
            if sizes is _HEAD and self.sizes == PLAIN:
                return _HIDDEN[self.variant] // _HEADS[self.variant]
            return sizes[self.variant % len(sizes)]
        return value


def _is_part(key: str, value: object) -> bool:
    return key not in _KEPT and isinstance(value, Mapping) and ("model_type" in value or key.endswith("_config"))


def _list(key: str, value: list[Any], variant: int, layers: int | None) -> list[Any]:
    """Shorten a list that has one entry per layer, so that at least one entry of every kind remains."""
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
