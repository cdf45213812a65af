"""Tiny models of every type that transformers has a config for, as far as its sizes can be made small."""

from __future__ import annotations

import copy
import importlib
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.oracles import wrappers

MOST, SLOW = 24_000_000, 20
"""Bytes of the parameters of what still counts as tiny, and seconds of CPU in which it is built."""
_SIZES: dict[str, Any] = {
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embed_dim": 32, "embedding_size": 32,
    "projection_dim": 32, "word_embed_proj_dim": 32, "hidden_dim": 32, "rotary_dim": 8, "d_kv": 8, "head_dim": 8,
    "num_hidden_layers": 2, "n_layer": 2, "num_layers": 2, "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_decoder_layers": 2, "num_encoder_layers": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4,
    "num_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "n_inner": 48, "d_ff": 48, "ffn_dim": 48, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4, "n_routed_experts": 4,
    "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 64, "max_position_embeddings": 64,
    "n_positions": 64, "image_size": 32, "patch_size": 16, "kv_lora_rank": 8, "q_lora_rank": 8, "v_head_dim": 8,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "state_size": 4, "depth": 2, "out_hidden_size": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_KINDS = ("ForConditionalGeneration", "ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForPreTraining", "Model", "")
"""Ends of the names of model classes, the ones taken first first."""


def types() -> list[str]:
    return wrappers.types()


def builder(model_type: str) -> Callable[[], nn.Module] | str:
    """Return what builds a tiny model of a type, on the CPU; where none can be built, why: large, slow or other."""
    from transformers import AutoConfig

    why = "other"
    try:
        with _watched():
            for shrink in (wrappers.shrunk, _tail, _shrunk, _as_it_is):
                try:
                    config = shrink(AutoConfig.for_model(model_type))
                    kinds = _classes(config)
                except Exception:  # noqa: BLE001 - sizes that do not fit together, a library that is missing
                    continue
                for kind in kinds:
                    try:
                        with torch.device("meta"):
                            model = _made(kind, config)
                        if sum(p.numel() * p.element_size() for p in model.parameters()) <= MOST:
                            _made(kind, config)  # on meta no values are drawn
                            return partial(_made, kind, config)
                    except Exception:  # noqa: BLE001 - likewise
                        continue
                    why = "large"
    except _Late:
        return "slow"
    return why


class _Late(BaseException):
    """What is built takes too long; no error that a builder may catch."""


def _made(kind: Any, config: Any) -> nn.Module:
    model: nn.Module = kind(copy.deepcopy(config))
    return model


@contextmanager
def _watched() -> Iterator[None]:
    """Raise `_Late` after so much CPU of this process; time in which others run does not count."""

    def stop(*_: object) -> None:
        raise _Late

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SLOW)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _classes(config: Any) -> list[Any]:
    """Return the classes of models that take a config of this class, those that generate first."""
    from transformers import PreTrainedModel

    module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    found: list[Any] = [
        kind
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, PreTrainedModel) and kind.__module__ == module.__name__
        if getattr(kind, "config_class", None) is type(config) and not name.endswith("PreTrainedModel")
    ]
    order = {kind: next(n for n, end in enumerate(_KINDS) if kind.__name__.endswith(end)) for kind in found}
    return sorted(found, key=lambda kind: order[kind])


def _tail(config: Any) -> Any:
    """Keep the last kinds of layers, not the first: some configs need what only those have."""
    lists = {name: value[-2:] for name, value in vars(config).items() if isinstance(value, list)}
    made = wrappers.shrunk(config)
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        if name in lists:
            setattr(made, name, lists[name])
    for name in getattr(made, "sub_configs", {}) or {}:
        inner = getattr(made, name, None)
        if inner is not None and isinstance(getattr(inner, "layer_types", None), list):
            kinds = type(inner)().layer_types
            inner.layer_types = kinds[-2:]
    return made


def _as_it_is(config: Any) -> Any:
    return config


def _shrunk(config: Any) -> Any:
    for name, size in _SIZES.items():
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, size)
    layers = getattr(config, "num_hidden_layers", None)
    kinds = getattr(config, "layer_types", None)
    if layers and isinstance(kinds, list):
        config.layer_types = kinds[:layers]
    for name in getattr(config, "sub_configs", {}) or {}:
        inner = getattr(config, name, None)
        if inner is not None:
            _shrunk(inner)
    return config
