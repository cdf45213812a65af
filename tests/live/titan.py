"""Tiny models of every family of torchtitan: its debug models, with an eighth of each size, of at most two layers."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

LACKING = {"qwen3_5": "fla"}
"""Families that cannot be imported without a library for GPUs, and that library."""
_SMALLER, _LEAST, _LAYERS = 8, 16, 2
_SIZES = frozenset({
    "axes_dim", "context_in_dim", "dim", "embedding_dim", "head_dim", "hidden_dim", "hidden_size", "in_channels",
    "in_dim", "in_features", "kv_lora_rank", "latent_dim", "merged_dim", "normalized_shape", "num_embeddings",
    "num_experts", "out_channels", "out_features", "output_dim", "pe_dim", "q_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "text_hidden_size", "v_head_dim", "vec_in_dim", "vocab_size", "vt_hidden_size",
})  # fmt: skip
"""Fields that are sizes, all of them linear in each other; numbers of heads stay."""
_BLOCKS = ("layers", "double_blocks", "single_blocks")
"""Fields that are lists of layers."""
_WIDER = frozenset({"AutoEncoder.Config", "Shard"})
"""Classes whose fields of these names are no such sizes."""


def titans() -> dict[str, Callable[[], nn.Module]]:
    """Return what builds each, by family, flavour and how queries, keys and values are held where that is a choice."""
    import torchtitan.models

    found: dict[str, Callable[[], nn.Module]] = {}
    for info in pkgutil.iter_modules(torchtitan.models.__path__):
        if not info.ispkg or info.name in LACKING:
            continue
        family = importlib.import_module(f"torchtitan.models.{info.name}")
        tables = [value for name, value in vars(family).items() if name.endswith("_configs") and type(value) is dict]
        choice = [name for name, value in vars(family).items() if _builds(family, name, value)]
        for flavour, config in {key: value for table in tables for key, value in table.items()}.items():
            if "debug" not in flavour:
                continue
            for fused in (True, False) if choice else (None,):
                kind = {True: " fused", False: " separate", None: ""}[fused]
                found[f"{info.name} {flavour}{kind}"] = partial(_built, family, config, choice, fused)
    return found


def _builds(family: Any, name: str, value: object) -> bool:
    """Say whether this is the family's own builder of layers, with a choice of fused projections."""
    own = inspect.isfunction(value) and value.__module__ == family.__name__ and name.startswith("_build")
    return own and "fuse_qkv" in inspect.signature(value).parameters  # type: ignore[arg-type]


def _built(family: Any, config: Callable[..., Any], choice: list[str], fused: bool | None) -> nn.Module:
    said = {"attn_backend": "flex", "moe_comm_backend": "standard"}
    known = inspect.signature(config).parameters
    builders = {name: _choosing(getattr(family, name), fused) for name in choice}
    with patch.dict(vars(family), builders):
        made = config(**{name: value for name, value in said.items() if name in known})
    shrink(made, set())
    with torch.device("meta"):
        model: nn.Module = made.build()
    return model.to_empty(device="cpu")


def _choosing(builder: Callable[..., Any], fused: bool | None) -> Callable[..., Any]:
    return lambda **options: builder(**{**options, "fuse_qkv": fused})


def shrink(config: Any, done: set[int]) -> None:
    """Make every size of a config smaller, once each: parts are shared."""
    if id(config) in done:
        return
    done.add(id(config))
    if isinstance(config, list | tuple | dict):
        for each in config.values() if isinstance(config, dict) else config:
            shrink(each, done)
    if not is_dataclass(config) or type(config).__qualname__ in _WIDER:
        return
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in _BLOCKS and isinstance(value, list):
            value = value[:_LAYERS]
        if field.name in _SIZES:
            value = _smaller(value)
        object.__setattr__(config, field.name, value)
        shrink(value, done)


def _smaller(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_smaller(each) for each in value)
    small = type(value) is int and (value < _LEAST or value % _SMALLER)
    return value if small or type(value) is not int else value // _SMALLER
