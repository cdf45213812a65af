"""Tiny models of transformers with random weights, in two sizes, and the files that it stores of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.oracles import wrappers
from tests.oracles.peer_bytes import Tensors, loaded, published, randomise
from tests.oracles.quiet import quiet

SIZES = {
    "hidden_size": 48, "intermediate_size": 40, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 12,
    "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 61, "ffn_dim": 40,
    "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6, "moe_num_experts": 6,
    "projection_hidden_size": 48, "linear_num_key_heads": 3, "linear_num_value_heads": 9, "mamba_num_heads": 6,
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

    `changes` are values of config keys, also of parts; `more` those of published configs, None for what these have not:
    new keys are of the text. `wider` is the other size.
    """
    model = drawn(model_type, changes, wider=wider)
    with quiet():
        model.save_pretrained(folder / "saved")
    config = json.loads((folder / "saved/config.json").read_text("utf-8"))
    for key, value in more.items():
        if value is None:
            del config[key]
        elif isinstance(value, dict):
            config[key] |= value
        elif key in config:
            config[key] = value
        else:
            _text(config)[key] = value
    return model, published(model_type, loaded(folder / "saved")), config


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that is about the text."""
    part: dict[str, Any] = config.get("text_config", config)
    return part


def drawn(model_type: str, changes: Mapping[str, Any] = MappingProxyType({}), *, wider: bool = False) -> Any:
    """A model with random weights; arguments as those of `made`."""
    model = wrappers.build(model_type)
    if changes or wider:
        config = model.config.to_dict()
        changed = {**changes, **_changed(_changed(config, SIZES if wider else {}, sizes=True), changes)}
        model = wrappers.build(**{**changed, "model_type": model_type})
    assert model is not None
    randomise(model)
    return model


def _changed(config: Mapping[str, Any], changes: Mapping[str, Any], *, sizes: bool = False) -> dict[str, Any]:
    """A config with other values of the keys that it has, also in its parts; in place of numbers only, with `sizes`."""
    changed = {}
    for key, value in config.items():
        new = changes.get(key, value) if not sizes or type(value) is int else value
        inner = new if isinstance(new, dict) and new is not value else {}
        changed[key] = _changed(value, {**changes, **inner}, sizes=sizes) if isinstance(value, dict) else new
    return changed
