"""The dialects `automodel` and `torchtitan` of tables by hand against NeMo Automodel and torchtitan themselves.

Automodel's own model is built from the config.json, its adapter loads the files into it, and its state must equal our
files, bit for bit. Where it has no model of its own, it uses the one of transformers. Of torchtitan, models with
pictures are compared here. Each type has models of two sizes at least, with other numbers of heads and experts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

import transaxle as tx
from tests.oracles import automodel_peer, cases, torchtitan_pictures
from tests.oracles.hub import Tensors
from tests.oracles.peer_bytes import differing, loaded, memory, write
from tests.oracles.test_full_families import ABSENT
from tests.oracles.tiny_models import SIZES, made
from transaxle.errors import TransaxleError
from transaxle.families import builtin

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(bool(cases.MISSING), reason=f"not installed: {', '.join(cases.MISSING)}"),
]

AUTOMODEL = cases.AUTOMODEL
OTHERWISE = {"deepseek_v2"}
"""Model types of a table whose automodel is another type's: Automodel has no model of theirs."""
TYPES = sorted(
    {
        model_type
        for entry in builtin().entries.values()
        if not entry.traced and any(dialect == AUTOMODEL for dialect in entry.dialects)
        for model_type in entry.model_types
    }
    - ABSENT
    - OTHERWISE
)


class Case(NamedTuple):
    """A tiny model: what differs from wrappers' own, and keys of hub files that transformers does not write."""

    changes: Mapping[str, Any] = MappingProxyType({})
    more: Mapping[str, Any] = MappingProxyType({})
    more_tensors: bool = False
    """Automodel's model has more than that of transformers: layers that predict ahead, biases of a router."""


_MLA = {"qk_head_dim": 12}
_PUBLISHED_V4 = {"layer_types": None, "mlp_layer_types": None, "num_nextn_predict_layers": 0}
_LATE = {"mlp_layer_types": ["dense", "sparse"]}
_ALL_SPARSE = {"mlp_layer_types": ["sparse", "sparse"]}
_DENSE = {"first_k_dense_replace": 1}
_NEVER_DENSE = {"first_k_dense_replace": 0}
_BALANCED = {"moe_router_enable_expert_bias": True}
_MIMO = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 8, "swa_v_head_dim": 8}
_FULL_FIRST = {"layer_types": ["full_attention", "linear_attention"]}
_AHEAD = {"mtp_num_hidden_layers": 1}
_NORMED = {"use_qk_norm": True}
_KIMI = {"tie_word_embeddings": False, "qk_head_dim": 12, "num_nextn_predict_layers": 0}
_MOONSHOT = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "vision_config": {"init_pos_emb_height": 64, "init_pos_emb_width": 64},
}
_M3 = {"architectures": ["MiniMaxM3SparseForConditionalGeneration"]}
_MINISTRAL = {"text_config": {"model_type": "ministral3"}}


def _m3(indexed: list[int], experts: list[int] | None = None) -> dict[str, Any]:
    """What the text's part of MiniMax-M3's published config says of its layers."""
    sizes = {"sparse_num_index_heads": 4, "sparse_index_dim": 10, "sparse_block_size": 128, "sparse_topk_blocks": 16}
    chosen = {"sparse_attention_freq": indexed, "sparse_local_block": 1, **sizes}
    return {"num_mtp_modules": 0, "moe_layer_freq": experts or indexed, "sparse_attention_config": chosen}


def _step(width: int, experts: int, ahead: int = 0) -> Case:
    """A model of Step-3.7, whose published config has other keys than transformers writes."""
    heads = {"num_attention_heads": 4, "num_attention_groups": 2, "head_dim": 8}
    used = ("use_moe", "use_moe_router_bias", "use_head_wise_attn_gate", "use_qk_norm")
    text = {
        **dict.fromkeys(used, True), "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
        "num_attention_groups": 2, "moe_num_experts": experts, "moe_top_k": 2, "moe_layers_enum": "1",
        "attention_other_setting": {"attention_type": "sliding_attention", **heads},
        "num_nextn_predict_layers": ahead,
    }  # fmt: skip
    changes = {
        "hidden_size": width, "n_routed_experts": experts, "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"], "projector_bias": bool(ahead), "num_attention_heads": 4,
        "num_sliding_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    more = {"text_config": text, "vision_config": {"layers": 2, "heads": 4, "width": width}}
    return Case(changes, more, more_tensors=bool(ahead))


_USUAL = (Case({"tie_word_embeddings": True}), Case({"tie_word_embeddings": False}))
CASES: dict[str, tuple[Case, ...]] = {
    "deepseek_v3": (Case(_MLA), Case({**_MLA, "q_lora_rank": None})),
    "deepseek_v32": (Case({**_MLA, **_LATE}, _DENSE),),
    "deepseek_v4": (
        Case({}, {**_PUBLISHED_V4, "compress_ratios": [4, 128], "num_hash_layers": 1}),
        Case(
            {
                "layer_types": ["sliding_attention", "compressed_sparse_attention"],
                "mlp_layer_types": ["moe", "moe"],
                "num_experts_per_tok": 3,
            },
            {**_PUBLISHED_V4, "compress_ratios": [0, 4], "num_hash_layers": 0},
        ),
    ),
    "ernie4_5_moe": (Case(),),
    "glm4_moe": (Case(), Case({"use_qk_norm": True, "attention_bias": True}), Case({"n_shared_experts": 2})),
    "glm4_moe_lite": (Case(_MLA), Case({**_MLA, **_ALL_SPARSE}, _NEVER_DENSE)),
    "glm_moe_dsa": (Case({**_MLA, **_LATE}, _DENSE),),
    "gpt_oss": (Case(),),
    "hy_v3": (Case({}, _BALANCED), Case({**_ALL_SPARSE, "num_shared_experts": 2}, {**_BALANCED, **_NEVER_DENSE})),
    "laguna": (Case({"gating": "per-head"}), Case({"gating": "per-element", "num_attention_heads_per_layer": [4, 8]})),
    "mimo_v2_flash": (
        Case(
            {"num_attention_heads": 4, "num_key_value_heads": 2},
            {**_MIMO, "hybrid_layer_pattern": [0, 1], "moe_layer_freq": [0, 1]},
        ),
        Case(
            {"layer_types": ["sliding_attention", "full_attention"], "num_key_value_heads": 1, **_ALL_SPARSE},
            {**_MIMO, "hybrid_layer_pattern": [1, 0], "moe_layer_freq": [1, 1], "swa_num_key_value_heads": 2},
        ),
    ),
    "kimi_k25": (Case(_KIMI, _MOONSHOT), Case({**_KIMI, "first_k_dense_replace": 0}, _MOONSHOT)),
    "minimax_m2": (Case({}, _NORMED),),
    "minimax_m3_vl": (
        Case(
            {"layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "sparse"]},
            {**_M3, "text_config": _m3([0, 1])},
        ),
        Case({"layer_types": ["minimax_m3_sparse", "full_attention"]}, {**_M3, "text_config": _m3([1, 0], [1, 1])}),
    ),
    "ministral3": (Case({"tie_word_embeddings": False}),),
    "mistral3": (*_USUAL, *(Case({**_MINISTRAL, "tie_word_embeddings": tied}) for tied in (True, False))),
    "mistral4": (Case(_MLA, more_tensors=True), Case({**_MLA, **_NEVER_DENSE}, more_tensors=True)),
    "muse_glimmer": (Case(),),
    "nemotron_h": tuple(
        Case(changes)
        for changes in (
            {},
            {"layers_block_type": ["mamba", "attention"], "use_conv_bias": False},
            {"layers_block_type": ["mamba", "mlp"], "mlp_bias": True},
            {"moe_latent_size": 8},
        )
    ),
    **{each: (*_USUAL, Case(_FULL_FIRST), Case({}, _AHEAD, more_tensors=True)) for each in ("qwen3_5", "qwen3_5_text")},
    **{each: (Case(), Case(_FULL_FIRST, _AHEAD, more_tensors=True)) for each in ("qwen3_5_moe", "qwen3_5_moe_text")},
    "step3p7": (_step(32, 4), _step(48, 6, ahead=1)),
    "qwen3_moe": (Case(), Case({"attention_bias": True})),
    "qwen3_vl_moe": (Case(), Case({"mlp_only_layers": [1]})),
    "qwen3_next": (Case(), Case({**_FULL_FIRST, "mlp_only_layers": [1]})),
}
"""Other cases than `_USUAL`."""
UNKNOWN = {
    "deepseek_v3": Case({**_MLA, "attention_bias": True}),
    "deepseek_v32": Case({**_MLA, **_LATE, "attention_bias": True}, _DENSE),
    "glm4_moe_lite": Case({**_MLA, "attention_bias": True}),
    "hy_v3": Case({"mlp_bias": True}, _BALANCED),
    "laguna": Case({"gating": "per-head", "attention_bias": True}),
    "qwen3_5_text": Case({**_FULL_FIRST, "attention_bias": True}),
    "qwen3_next": Case({**_FULL_FIRST, "attention_bias": True}),
}
"""Models with biases that transformers has and Automodel's own model has not."""


def _turned(_: Any, stored: Tensors) -> Tensors:
    return {name: value.mT.contiguous() if ".mlp.experts." in name else value for name, value in stored.items()}


def _stacked(model: Any, stored: Tensors) -> Tensors:
    held = memory(model)
    return {name: held[name] for name in held if name in stored or ".mlp.experts." in name}


FILES: dict[str, Callable[[Any, Tensors], Tensors]] = {
    "qwen3_vl_moe": _turned,
    "qwen3_5_moe": _stacked,
    "qwen3_5_moe_text": _stacked,
}
"""Model type -> the files that Automodel's adapter takes, where transformers stores others: experts turned round, or
stacked as in memory.
"""


ROUNDED = {"kimi_k25"}
"""Model types whose adapter makes bf16 of everything."""


def _converted(
    hub: Tensors, held: Tensors, config: Mapping[str, Any], folder: Path, dialect: str, kept: Tensors
) -> None:
    """Check that the hub's tensors become those of a trainer that it keeps, and all of the trainer's the hub's."""
    folder.mkdir(parents=True)
    write(folder / "hub", hub, json.dumps(config))
    write(folder / "held", held, json.dumps(config))
    tx.convert(folder / "hub", folder / "to", to=f"safetensors:{dialect}", sync=False)
    assert differing(loaded(folder / "to"), kept) == []
    tx.convert(folder / "held", folder / "back", to="safetensors:hf", sync=False)
    assert differing(loaded(folder / "back"), hub) == []


def _check(model_type: str, case: Case, folder: Path, *, wider: bool = False) -> None:
    model, stored, config = made(model_type, case.changes, folder, more=case.more, wider=wider)
    if model_type in ROUNDED:
        stored = {name: value.bfloat16().float() for name, value in stored.items()}
    files = FILES[model_type](model, stored) if model_type in FILES else stored
    if case.more_tensors:
        more = automodel_peer.missing(config, files)
        assert more
        stored, files = {**stored, **more}, {**files, **more}
    held = automodel_peer.held(config, files, model)
    back = automodel_peer.to_hub(config, held)
    assert back is None or differing(back, files) == [], "Automodel does not give back what it took"
    kept = {name: held[name] for name in held if ".rotary_emb." not in name}
    _converted(stored, held, config, folder / "both", AUTOMODEL, kept)


@pytest.mark.oracle
@pytest.mark.parametrize("model_type", TYPES)
def test_automodel_holds_what_we_write(model_type: str, tmp_path: Path) -> None:
    cases = CASES.get(model_type, _USUAL)
    for number, case in enumerate(cases):
        _check(model_type, case, tmp_path / str(number))
    _check(model_type, cases[0], tmp_path / "wider", wider=True)


@pytest.mark.parametrize("model_type", UNKNOWN)
def test_biases_that_automodel_does_not_have_have_no_line(model_type: str, tmp_path: Path) -> None:
    case = UNKNOWN[model_type]
    model, stored, config = made(model_type, case.changes, tmp_path, more=case.more)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*bias"):
        automodel_peer.held(config, stored, model)
    write(tmp_path / "hub", stored, json.dumps(config))
    with pytest.raises(TransaxleError, match="bias"):
        tx.convert(tmp_path / "hub", tmp_path / "to", to=f"safetensors:{AUTOMODEL}", strict=True, sync=False)


# The dialect `torchtitan` of models with pictures against torchtitan's own adapters and models.

DIALECT = "torchtitan@0.3"
TEXTS = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}
"""Text models that torchtitan has as part of a whole one only -> that."""
_KINDS = {"layer_types": ["linear_attention", "full_attention"]}
_MUSE = {"hidden_size": 48, "intermediate_size": 144, "num_attention_heads": 6, "num_key_value_heads": 3}
TITAN_CASES: dict[str, tuple[Mapping[str, Any], ...]] = {
    "qwen3_5": (_KINDS, SIZES | _KINDS, {**_KINDS, "tie_word_embeddings": True}),
    "qwen3_5_moe": (_KINDS, SIZES | _KINDS),
    "kimi_k25": (_KIMI, SIZES | _KIMI),
    "muse_glimmer": ({"intermediate_size": 96}, {**_MUSE, "out_hidden_size": 192}),
}


def _with_turned_stacks(model: Any, stored: Tensors) -> Tensors:
    """The files that torchtitan's adapter takes of Qwen3.5-MoE: experts stacked and turned round."""
    held = memory(model)
    stacked = {name: held[name].mT.contiguous() for name in held.keys() - stored.keys() if ".mlp.experts." in name}
    return {name: value for name, value in stored.items() if ".mlp.experts." not in name} | stacked


def _text(tensors: Tensors) -> Tensors:
    """The text's part of a whole model's files."""
    names = {name: name.replace("model.language_model.", "model.") for name in tensors if "visual" not in name}
    return {names[name]: tensors[name] for name in names}


@pytest.mark.parametrize("model_type", TITAN_CASES)
def test_torchtitan_holds_what_we_write(model_type: str, tmp_path: Path) -> None:
    for number, changes in enumerate(TITAN_CASES[model_type]):
        folder = tmp_path / str(number)
        model, stored, config = made(model_type, changes, folder)
        files = _with_turned_stacks(model, stored) if model_type == "qwen3_5_moe" else stored
        held = torchtitan_pictures.from_hf(config, files)
        assert differing(torchtitan_pictures.to_hf(config, held), files) == []
        _converted(stored, held, config, folder / "whole", DIALECT, held)
        for text, whole in TEXTS.items():
            if whole == model_type:
                inner = {name: value for name, value in held.items() if not name.startswith("vision_encoder.")}
                tied = {**config["text_config"], "tie_word_embeddings": config["tie_word_embeddings"]}
                _converted(_text(stored), inner, {**tied, "model_type": text}, folder / "text", DIALECT, inner)


def test_every_family_in_torchtitan_is_compared() -> None:
    entries = builtin().entries.items()
    families = {name for name, entry in entries if any(label.startswith("torchtitan") for label in entry.dialects)}
    planned = {name for name, plans in cases.PLANS.items() for plan in plans.values() if "torchtitan" in plan.dialects}
    assert families == planned | TITAN_CASES.keys() | TEXTS.keys()
