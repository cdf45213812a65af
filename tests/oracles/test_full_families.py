"""Tables by hand against the installed transformers: config variants, and what its tensor parallelism cuts.

A variant changes one key of a tiny config. Those that change nothing of what is stored are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.oracles import wrappers
from tests.oracles.peer_bytes import both_ways, memory
from tests.oracles.quiet import quiet
from transaxle.axes.layout.divide import Division
from transaxle.engine.checkpoint.settings import settings
from transaxle.engine.checkpoint.unstated import cutter
from transaxle.errors import TransaxleError
from transaxle.families import builtin
from transaxle.formats.storage.local import LocalStorage

ABSENT = {"step3p5", "step3p7_text", "kimi_k2", "bailing_moe_v2"}
"""Model types of ours that the installed transformers does not know by this word."""
TYPES = sorted({t for e in builtin().entries.values() if not e.traced for t in e.model_types} - ABSENT)
NUMBERS: tuple[tuple[str, Any], ...] = (
    ("num_key_value_heads", 1), ("num_key_value_heads", 4), ("num_hidden_layers", 3), ("head_dim", 16),
    ("first_k_dense_replace", 0), ("first_k_dense_replace", 2), ("mlp_only_layers", [1]), ("decoder_sparse_step", 2),
    ("n_shared_experts", 2), ("num_shared_experts", 2), ("moe_num_shared_experts", 1), ("q_lora_rank", None),
    ("layer_types", ["full_attention", "full_attention"]), ("layer_types", ["sliding_attention", "full_attention"]),
    ("mlp_layer_types", ["dense", "sparse"]), ("mlp_layer_types", ["sparse", "sparse"]), ("moe_layer_freq", 2),
    ("shared_intermediate_size", 0), ("moe_layer_start_index", 1), ("moe_layer_interval", 2),
    ("shared_intermediate_size", 16), ("num_dense_layers", 0), ("moe_layers", [1]), ("moe_layer_end_index", 0),
    ("indexer_types", ["full", "shared"]), ("num_attention_heads_per_layer", [4, 8]), ("gating", "per-element"),
    ("moe_layer_start_index", 0), ("prefix_dense_intermediate_size", 24), ("kv_channels", 16), ("block_size", 8),
    ("tie_word_embeddings", True), ("tie_word_embeddings", False),
    ("layer_types", ["linear_attention", "full_attention"]), ("layer_types", ["conv", "full_attention"]),
    ("layers_block_type", ["full_attention", "mlp"]), ("layers_block_type", ["moe", "linear_attention", "moe"]),
    ("attn_layer_indices", [1]), ("attn_layer_period", 2), ("attn_layer_offset", 1), ("num_experts", 1),
    ("num_dense_layers", 1), ("mamba_n_groups", 2), ("n_groups", 4), ("n_inner", 48),
    ("moe_latent_size", 24), ("num_kv_heads", 1), ("num_ln_in_parallel_attn", 1), ("word_embed_proj_dim", 16),
    ("mamba_d_ssm", 32), ("linear_num_value_heads", 2), ("qk_norm_type", "olmo"),
)  # fmt: skip
"""Keys, with values that change what is stored in some family; every flag is changed as well."""
OTHERS: dict[str, tuple[str, ...]] = {
    "bert": ("BertModel", "BertForMaskedLM", "BertForPreTraining"),
    "roberta": ("RobertaModel", "RobertaForMaskedLM"),
    "xlm-roberta": ("XLMRobertaModel", "XLMRobertaForMaskedLM"),
    "electra": ("ElectraModel", "ElectraForMaskedLM"),
    "distilbert": ("DistilBertForMaskedLM",),
    "modernbert": ("ModernBertForMaskedLM",),
    "nomic_bert": ("NomicBertForMaskedLM",),
    "gte": ("GteForMaskedLM",),
    "bart": ("BartForConditionalGeneration",),
    "whisper": ("WhisperForConditionalGeneration",),
}
"""Model type -> classes besides the one that the automatic classes choose first, where the table has these too."""
_PARTS = ("text_config", "vision_config", "audio_config", "encoder_config", "projector_config")
SENSELESS: tuple[tuple[str, str, Any], ...] = (
    ("mimo_v2_flash", "num_key_value_heads", 4),
    ("olmo_hybrid", "linear_num_value_heads", 2),
)
"""Changes that transformers builds and no table can mean: more kv heads than query heads; widths of q, k and v whose
convolutions it stores in thirds.
"""
BROKEN = {("kimi_k25", "q_lora_rank")}
"""Keys of parts after whose change transformers cannot load what it stores, since its renamings of the tower hit the
text.
"""
_RANKS = 2


def variants(model_type: str) -> Iterator[tuple[str, Any]]:
    """Models of a type: as its tiny config says, and each with one key changed that changes what is stored."""
    base = wrappers.build(model_type)
    assert base is not None
    yield "", base
    config = base.config.to_dict()
    changes = [(key, value) for key, value in NUMBERS if key in config and config[key] != value]
    changes += [(key, not value) for key, value in config.items() if type(value) is bool and key not in dict(NUMBERS)]
    for part in (key for key in _PARTS if isinstance(config.get(key), dict)):
        inner = config[part]
        numbers = [(key, value) for key, value in NUMBERS if (model_type, key) not in BROKEN]
        nested = [(key, value) for key, value in numbers if key in inner and inner[key] != value]
        nested += [(key, not value) for key, value in inner.items() if type(value) is bool]
        changes += [(part, {**inner, key: value}) for key, value in nested]
    seen = {_stored(base)}
    for key, value in changes:
        if (model_type, key, value) in SENSELESS:
            continue
        model = wrappers.build(model_type, **{key: value})
        if model is not None and _stored(model) not in seen:
            seen.add(_stored(model))
            yield f"{key}={value}", model
    yield from _other_classes(model_type, type(base))


def _other_classes(model_type: str, taken: type) -> Iterator[tuple[str, Any]]:
    """Models of a type that other classes of transformers make, of those that `OTHERS` names."""
    import transformers
    from transformers import AutoConfig

    for name in OTHERS.get(model_type, ()):
        assert name != taken.__name__
        with quiet():
            config = wrappers.shrunk(AutoConfig.for_model(model_type))
            for tied in (True, False):
                untied = AutoConfig.for_model(**{**config.to_dict(), "tie_word_embeddings": tied})
                yield f"{name} tie_word_embeddings={tied}", getattr(transformers, name)(untied).eval()


def _stored(model: Any) -> tuple[object, ...]:
    tensors = [(name, tuple(tensor.shape), tensor.data_ptr()) for name, tensor in model.state_dict().items()]
    first: dict[int, int] = {}
    return tuple((name, shape, first.setdefault(at, number)) for number, (name, shape, at) in enumerate(tensors))


def check_variants(model_type: str, folder: Path) -> list[str]:
    """Convert every variant both ways; return those that are refused."""
    refused, wrong = [], []
    for number, (label, model) in enumerate(variants(model_type)):
        try:
            with quiet():
                both_ways(model, folder / str(number), model_type)
        except AssertionError as error:
            wrong.append(f"{model_type} {label}: {error}")
        except TransaxleError as error:
            refused.append(f"{model_type} {label}: {error}")
    assert not wrong, "\n".join(wrong)
    return refused


def check_short_config(model_type: str, folder: Path) -> str:
    """Convert with a config.json without the keys that have transformers' default: right, or refused."""
    model = wrappers.build(model_type)
    defaults = type(model.config)().to_dict()
    kept = {k: v for k, v in model.config.to_dict().items() if k == "model_type" or defaults.get(k, ...) != v}
    try:
        with quiet():
            both_ways(model, folder, config=json.loads(json.dumps(kept)))
    except TransaxleError as error:
        return str(error)
    return ""


# Cuts.


_EVEN = 96
"""A vocabulary that two ranks can share out."""
_CUT_DIMS = {"colwise": -2, "packed_colwise": -2, "rowwise": -1, "packed_rowwise": -1}
_AROUND = ("_gather_output", "_split_input")
"""Ends of the styles that gather what is not theirs: there, parts of a fused tensor need not be the ranks' own."""
_IN_TURN = {"inkling_mm_model": "experts.gate_up_proj"}
"""Model type -> end of the name of a tensor whose stored rows are gate and up in turn: transformers cuts it as it is
stored, so that in memory each rank has some of both.
"""


def _peer_cut(style: str, tensor: torch.Tensor, is_bias: bool) -> torch.Tensor | None:
    """What rank 0 of 2 holds of a parameter; None where it holds all of it.

    Source: transformers 5.24 integrations/tensor_parallel.py, `shard_param` of each style.
    """
    for end in _AROUND:
        style = style.removesuffix(end)
    if style not in _CUT_DIMS or (is_bias and style == "rowwise"):
        return None
    dim = 0 if is_bias else tensor.dim() + _CUT_DIMS[style]
    parts = tensor.chunk(2, dim) if style.startswith("packed") else (tensor,)
    return torch.cat([part.chunk(_RANKS, dim)[0] for part in parts], dim)


def _plan(model: Any) -> dict[str, str]:
    """The styles of all modules, by patterns of full names."""
    from transformers import PreTrainedModel

    base = model.base_model_prefix
    prefix = f"{base}." if hasattr(model, base) else "model." if base else ""
    inner = getattr(model.config, "base_model_tp_plan", None) or {}
    outer = getattr(type(model), "_tp_plan", None) or {}
    parts = {
        f"{name}.{key}": style
        for name, part in model.named_modules()
        if isinstance(part, PreTrainedModel) and part.config is not model.config
        for key, style in (getattr(part.config, "base_model_tp_plan", None) or {}).items()
    }
    return {**{f"{prefix}{key}": style for key, style in inner.items()}, **parts, **outer}


def _style(plan: Mapping[str, str], name: str) -> str | None:
    pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
    return plan.get(pattern) or plan.get(pattern.rpartition(".")[0])


def check_cuts(model_type: str, folder: Path) -> int:
    """Hold the table's cuts of every tensor against the peer's; return how many tensors it cuts."""
    model = wrappers.build(model_type, vocab_size=_EVEN) or wrappers.build(model_type)
    if "text_config" in (config := model.config.to_dict()):
        model = wrappers.build(model_type, text_config={**config["text_config"], "vocab_size": _EVEN})
    tensors = memory(model)
    plan = _plan(model)
    config = {**model.config.to_dict(), "model_type": model_type}
    given = settings(dialect="transformers", config=config)
    division = cutter(given)(LocalStorage(str(folder)), list(tensors), {})
    compared, wrong = 0, []
    for name, tensor in tensors.items():
        style = _style(plan, name)
        if style == "colwise" and name.endswith(_IN_TURN.get(model_type, "\0")):
            style = "packed_colwise"
        numbered = torch.arange(tensor.numel()).reshape(tensor.shape)
        held = None if style is None else _peer_cut(style, numbered, name.endswith("bias"))
        if style is None or held is None or held.shape == tensor.shape:
            continue
        shapes = [tuple(held.shape)] * _RANKS
        try:
            ours = _held(division(name, shapes), numbered.numpy())
        except TransaxleError as error:
            wrong.append(f"{name}: {style}: {error}")
            continue
        fused = style.endswith(_AROUND) and ours.shape == held.shape
        compared += 1
        if not np.array_equal(ours, held.numpy()) and not fused:
            wrong.append(f"{name}: {style}")
    assert not wrong, "\n".join(wrong)
    return compared


def _held(division: Division, whole: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if division.dim is None:
        return whole
    size = division.shape[division.dim]
    intervals = division.rule(((0, size),), _RANKS, 0)
    positions = [at for start, stop in intervals for at in range(start, stop)]
    return whole.take(positions, division.dim)


@pytest.mark.oracle
@pytest.mark.parametrize("model_type", TYPES)
def test_a_table_by_hand_is_right_for_every_config(model_type: str, tmp_path: Path) -> None:
    assert check_variants(model_type, tmp_path / "variants") == []
    check_short_config(model_type, tmp_path / "short")
    assert check_cuts(model_type, tmp_path) or model_type not in {"llama", "qwen3_moe", "deepseek_v3"}
