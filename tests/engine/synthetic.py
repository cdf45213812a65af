"""Catalogs of large models without any data: what planning sees of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from tests import checkpoints
from transaxle.axes.geometry import Loop
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.checkpoint.settings import settings
from transaxle.formats.catalog import Container, Entry, Extent
from transaxle.formats.storage.copier import Steps
from transaxle.formats.storage.storage import Listing

FILE = "model.safetensors"
HEAD, HIDDEN, EXPERT, VOCABULARY = 128, 7168, 2048, 129_280
HEADS, GROUPS = 64, 8


class Nothing:
    """A storage of one file that nobody reads."""

    path = single = FILE
    batches_steps = False
    bytes_read = 0

    def listing(self, folder: str = "") -> Listing:
        return Listing((FILE,), (), {})

    def names(self) -> tuple[str, ...]:
        return (FILE,)

    def size(self, name: str) -> int:
        return 0

    def version(self, name: str) -> str:
        return name

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        raise AssertionError("planning reads nothing")

    def add_read(
        self, steps: Steps, name: str, offset: int, view: memoryview, width: int = 0, loops: Sequence[Loop] = ()
    ) -> None:
        raise AssertionError("planning reads nothing")

    def read(self, name: str, offset: int, size: int) -> bytes:
        raise AssertionError("planning reads nothing")

    def recheck(self) -> None:
        """Nothing changes."""

    def close(self) -> None:
        """Nothing is open."""


def config(layers: int, experts: int) -> dict[str, Any]:
    """The config of a Qwen3-MoE of the sizes of the largest open models."""
    return {
        "model_type": "qwen3_moe", "num_hidden_layers": layers, "num_experts": experts, "hidden_size": HIDDEN,
        "moe_intermediate_size": EXPERT, "intermediate_size": EXPERT, "vocab_size": VOCABULARY,
        "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": HEAD, "mlp_only_layers": [],
        "decoder_sparse_step": 1, "tie_word_embeddings": False, "attention_bias": False,
    }  # fmt: skip


def model(layers: int, experts: int) -> Checkpoint:
    """A checkpoint in dialect hf: three matrices an expert, each under its own name."""
    entries: dict[str, Entry] = {}
    end = 0
    for name, shape in checkpoints.shapes(config(layers, experts)).items():
        entries[name] = Entry(name, "BF16", shape, (Extent((0,) * len(shape), shape, FILE, end),))
        end += 2 * prod(shape)
    container = Container("safetensors", FILE, Nothing(), entries, {FILE: end})
    return Checkpoint(container, settings(config=config(layers, experts)), None, None)
