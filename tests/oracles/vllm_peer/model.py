"""One model that vLLM loads, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Config = dict[str, Any]
Degrees = tuple[int, int]
"""Tensor-parallel ranks, and how many of them share out the experts: 1, or all."""


@dataclass(frozen=True)
class Model:
    """One model."""

    architecture: str
    """What `config.json` says in `architectures`: it picks vLLM's class."""
    config: Config
    """Keys of transformers' config."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Keys of published configs that vLLM reads and transformers does not write."""
    kind: str = ""
    """The class in transformers, where it has another name; of models that it lacks, none."""
    stored: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Tensors of the hub's files that transformers does not make -> their shapes."""
    mended: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of names that this transformers stores by mistake -> those of the hub's files."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of names that transformers stores -> those that vLLM reads, of the hub's own files."""
    transposed: str = ""
    """Ends the names of experts that vLLM reads with their last dims exchanged, as the hub's first files have them."""
    mistral: bool = False
    """vLLM reads Mistral's own files of it."""
    described: bool = False
    """vLLM reads the maker's own config, where transformers would read another one of this type."""
    inside: str = ""
    """The folder of the hub's repository in which vLLM looks for tensors, where it is not the uppermost one."""
    left: str = ""
    """Parameters that vLLM itself leaves as they were: a part of their names."""
    unread: tuple[str, ...] = ()
    """Tensors of the hub that vLLM has nothing for: parts of their names."""
    dtype: str = "float32"
    """What vLLM loads it as, of models that it runs in one type only."""
    spared: tuple[str, ...] = ()
    """Such tensors that the model may lack: it comes back, and these with it."""
    most: int = 4
    """The largest number of ranks: vLLM takes long to put experts into transformers' modules."""

    @property
    def model_type(self) -> str:
        """What `config.json` says."""
        return str({**self.config, **self.more}["model_type"])

    @property
    def degrees(self) -> tuple[Degrees, ...]:
        """The ranks that it is loaded on."""
        keys = self.config.keys() | self.config.get("text_config", {}).keys()
        experts = ((2, 2), (4, 4)) if keys & _COUNTS else ()
        return tuple(each for each in ((1, 1), (2, 1), (4, 1), *experts) if each[0] <= self.most)


_COUNTS = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}
DENSE: Config = {
    "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 90, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def model(
    architecture: str,
    model_type: str,
    *parts: Config,
    more: Config | None = None,
    kind: str = "",
    stored: Mapping[str, tuple[int, ...]] | None = None,
    mended: Mapping[str, str] | None = None,
    left: str = "",
    most: int = 4,
    **config: Any,
) -> Model:
    """A model of text that transformers makes."""
    merged: Config = dict(DENSE)
    for part in (*parts, config):
        merged |= part
    keys = {key: value for key, value in merged.items() if value is not None or key == "q_lora_rank"}
    return Model(
        architecture, {"model_type": model_type, **keys}, more or {}, kind or architecture, stored or {},
        mended or {}, left=left, most=most,
    )  # fmt: skip
