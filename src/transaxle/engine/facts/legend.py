"""What dialects and axes stand for, in words: tables have names and formulas only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from transaxle.axes.notation.family import Family

_TRANSFORMERS, _MEGATRON, _OURS = ("transformers", "5.23.0"), ("megatron-core", "0.16.1"), ("transaxle", "")


class Peer(msgspec.Struct, frozen=True):
    """Whose layout a dialect is."""

    framework: str
    """Name of its package; empty for a dialect of a user's table."""
    version: str
    """Version that the tables were compared with; empty where the layout is nobody's but ours."""
    what: str
    """Which of its layouts."""


PEERS: Mapping[str, Peer] = {
    "hf": Peer(*_TRANSFORMERS, "names and shapes of published checkpoints"),
    "transformers": Peer(*_TRANSFORMERS, "the modules of a model in memory"),
    "torchtitan@0.3": Peer("torchtitan", "0.3.0", "the modules of its models"),
    "torchtitan@0.2": Peer("torchtitan", "0.2.0 to 0.2.2", "the modules of its models"),
    "torchtitan_hf": Peer("torchtitan", "0.3.0", "names of the hub, decoded as its reader does"),
    "automodel": Peer("nemo-automodel", "0.7.0", "the modules of its models"),
    "megatron": Peer(*_MEGATRON, "GPTModel with the layer spec of Transformer Engine, a weight for each expert"),
    "te": Peer(*_MEGATRON, "the same, with one grouped weight for all experts"),
    "megatron_dist": Peer(*_MEGATRON, "folders of dist_checkpointing, layers stacked"),
    "megatron_layers": Peer(*_MEGATRON, "folders of dist_checkpointing, each layer by itself"),
    "vllm": Peer("vllm", "0.32.0", "the modules of its models"),
    "stacked": Peer(*_OURS, "transaxle.nn.MoE in a model of transformers, one tensor for all experts"),
    "separate": Peer(*_OURS, "transaxle.nn.MoE in a model of transformers, a tensor for each expert"),
}
"""Label of each dialect that ships -> whose it is."""
_NOBODY = Peer("", "", "")
_GROUPS = "num_key_value_heads|num_attention_heads"
_WORDS = {
    "num_hidden_layers": "layers",
    "vocab_size": "words of the vocabulary",
    "hidden_size": "hidden size",
    "max_position_embeddings": "positions",
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "groups of attention heads: one for each head of keys and values",
    _GROUPS: "groups of attention heads: one for each head of keys and values",
    "num_attention_heads/num_key_value_heads": "query heads in a group",
    f"num_attention_heads/({_GROUPS})": "query heads in a group",
    "head_dim": "dims of a head",
    "head_dim|hidden_size/num_attention_heads": "dims of a head",
    "hidden_size/num_attention_heads": "dims of a head",
    "intermediate_size": "width of the MLP",
    "moe_intermediate_size": "width of an expert",
    "num_experts": "experts",
    "num_local_experts": "experts",
    "n_routed_experts": "experts",
    "num_experts|num_local_experts": "experts",
    "n_routed_experts|num_experts|num_local_experts": "experts",
    "q_lora_rank": "rank of the queries' projection",
    "kv_lora_rank": "rank of the projection of keys and values",
    "qk_nope_head_dim": "dims of a head without position",
    "v_head_dim": "dims of a head of values",
    "-n % 64": "rows of padding, so that the vocabulary is a multiple of 64",
}
"""Formula of a size -> what there are so many of."""
_PADDING = "rows or columns of padding"


class Axis(msgspec.Struct, frozen=True):
    """One line of the legend."""

    axis: str
    """Its letter, or word."""
    size: str
    """Keys of config.json, or the formula, that give its size; empty where the shapes of tensors do."""
    meaning: str
    """What it counts; empty where the formula must say enough."""


def peer_of(label: str) -> Peer:
    """Return whose layout a dialect is."""
    return PEERS.get(label, _NOBODY)


def axes_of(family: Family) -> tuple[Axis, ...]:
    """Return the legend of a family's axes, in table order."""
    found = []
    padding = {axis for dialect in family.dialects for line in dialect.lines for axis in line.expression.padding}
    for axis, formula in family.axes.items():
        size = "" if formula is None else formula.text
        found.append(Axis(axis, size, _WORDS.get(size, _PADDING if axis in padding else "")))
    return tuple(found)


def dialect_facts(labels: Iterable[str]) -> list[dict[str, Any]]:
    """Return dialects as JSON data."""
    return [{"dialect": label, **msgspec.structs.asdict(peer_of(label))} for label in labels]


def axis_facts(family: Family) -> list[dict[str, Any]]:
    """Return the legend of a family's axes as JSON data."""
    return [msgspec.structs.asdict(axis) for axis in axes_of(family)]


def dialect_rows(labels: Iterable[str]) -> list[list[str]]:
    """Return dialects as rows of a table."""
    peers = [(label, peer_of(label)) for label in labels]
    return [[label, f"{peer.framework} {peer.version}".strip(), peer.what] for label, peer in peers]


def axis_rows(family: Family) -> list[list[str]]:
    """Return the legend of a family's axes as rows of a table."""
    return [[axis.axis, axis.size or "(as the shapes say)", axis.meaning] for axis in axes_of(family)]
