"""The dialect `torchtitan` of models with pictures against torchtitan's own adapters and models.

What the adapter makes of the files must be what we write, bit for bit, and have the names and shapes of torchtitan's
own model; models of two sizes, with other numbers of heads and experts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import transaxle as tx
from tests.oracles import cases, torchtitan_pictures
from tests.oracles.hub import Tensors
from tests.oracles.peer_bytes import differing, loaded, memory, write
from tests.oracles.tiny_models import SIZES, made
from transaxle.families import builtin

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(bool(cases.MISSING), reason=f"not installed: {', '.join(cases.MISSING)}"),
]

DIALECT = "torchtitan@0.3"
TEXTS = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}
"""Text models that torchtitan has as part of a whole one only -> that."""
_KIMI = {"tie_word_embeddings": False, "num_nextn_predict_layers": 0, "qk_head_dim": 12}
_KINDS = {"layer_types": ["linear_attention", "full_attention"]}
_MUSE = {"hidden_size": 48, "intermediate_size": 144, "num_attention_heads": 6, "num_key_value_heads": 3}
CASES: dict[str, tuple[Mapping[str, Any], ...]] = {
    "qwen3_5": (_KINDS, SIZES | _KINDS, {**_KINDS, "tie_word_embeddings": True}),
    "qwen3_5_moe": (_KINDS, SIZES | _KINDS),
    "kimi_k25": (_KIMI, SIZES | _KIMI),
    "muse_glimmer": ({"intermediate_size": 96}, {**_MUSE, "out_hidden_size": 192}),
}


def _turned(model: Any, stored: Tensors) -> Tensors:
    """The files that torchtitan's adapter takes of Qwen3.5-MoE: experts stacked and turned round."""
    held = memory(model)
    stacked = {name: held[name].mT.contiguous() for name in held.keys() - stored.keys() if ".mlp.experts." in name}
    return {name: value for name, value in stored.items() if ".mlp.experts." not in name} | stacked


def _text(tensors: Tensors) -> Tensors:
    """The text's part of a whole model's files."""
    names = {name: name.replace("model.language_model.", "model.") for name in tensors if "visual" not in name}
    return {names[name]: tensors[name] for name in names}


def _converted(hub: Tensors, held: Tensors, config: Mapping[str, Any], folder: Path) -> None:
    folder.mkdir()
    write(folder / "hub", hub, json.dumps(config))
    write(folder / "held", held, json.dumps(config))
    tx.convert(folder / "hub", folder / "to", to=f"safetensors:{DIALECT}", sync=False)
    assert differing(loaded(folder / "to"), held) == []
    tx.convert(folder / "held", folder / "back", to="safetensors:hf", sync=False)
    assert differing(loaded(folder / "back"), hub) == []


@pytest.mark.parametrize("model_type", CASES)
def test_torchtitan_holds_what_we_write(model_type: str, tmp_path: Path) -> None:
    for number, changes in enumerate(CASES[model_type]):
        folder = tmp_path / str(number)
        model, stored, config = made(model_type, changes, folder)
        files = _turned(model, stored) if model_type == "qwen3_5_moe" else stored
        held = torchtitan_pictures.from_hf(config, files)
        assert differing(torchtitan_pictures.to_hf(config, held), files) == []
        _converted(stored, held, config, folder / "whole")
        for text, whole in TEXTS.items():
            if whole == model_type:
                inner = {name: value for name, value in held.items() if not name.startswith("vision_encoder.")}
                tied = {**config["text_config"], "tie_word_embeddings": config["tie_word_embeddings"]}
                _converted(_text(stored), inner, {**tied, "model_type": text}, folder / "text")


def test_every_family_in_torchtitan_is_compared() -> None:
    found = {
        name
        for name, entry in builtin().entries.items()
        if any(label.startswith("torchtitan") for label in entry.dialects)
    }
    assert (
        found
        == {family for family, plans in cases.PLANS.items() for plan in plans.values() if "torchtitan" in plan.dialects}
        | CASES.keys()
        | TEXTS.keys()
    )
