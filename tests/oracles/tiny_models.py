"""Tiny models of transformers with random weights, in two sizes, and the files that it stores of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.oracles import wrappers
from tests.oracles.peer_bytes import Tensors, loaded, randomise
from tests.oracles.quiet import quiet

SIZES = {
    "hidden_size": 48, "intermediate_size": 40, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 12,
    "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 61, "ffn_dim": 40,
    "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6, "moe_num_experts": 6,
    "linear_num_key_heads": 3, "linear_num_value_heads": 9, "mamba_num_heads": 6,
}  # fmt: skip
"""Other sizes: other numbers of heads and experts, and hardly a square matrix."""


def made(
    model_type: str,
    changes: Mapping[str, Any],
    folder: Path,
    *,
    more: Mapping[str, Any] = MappingProxyType({}),
    wider: bool = False,
) -> tuple[Any, Tensors, dict[str, Any]]:
    """A model, the files that transformers stores of it, and its config.json.

    Args:
        model_type: of the model.
        changes: config keys with other values than wrappers' own; those that the model's parts have too.
        folder: where files go.
        more: keys of hub files that transformers does not write, beside those of the text.
        wider: in the other size.
    """
    model = _model(model_type, changes, wider=wider)
    with quiet():
        model.save_pretrained(folder / "saved")
    config = json.loads((folder / "saved/config.json").read_text("utf-8"))
    _text(config).update(more)
    return model, loaded(folder / "saved"), config


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that is about the text."""
    part: dict[str, Any] = config.get("text_config", config)
    return part


def _model(model_type: str, changes: Mapping[str, Any], *, wider: bool) -> Any:
    model = wrappers.build(model_type)
    if changes or wider:
        config = model.config.to_dict()
        sizes = {key: value for key, value in SIZES.items() if wider and type(_text(config).get(key)) is int}
        changed = {**changes, **_changed(config, {**sizes, **changes})}
        model = wrappers.build(**{**changed, "model_type": model_type})
    assert model is not None
    randomise(model)
    return model


def _changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A config with other values of the keys that it has, those of its parts included."""
    whole = {key: _changed(value, changes) if isinstance(value, dict) else value for key, value in config.items()}
    return whole | {key: value for key, value in changes.items() if key in config}
