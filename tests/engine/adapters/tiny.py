"""What the tests of adapters share: sizes of their models, and adapters that peft writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.oracles.quiet import quiet

with quiet():
    import peft

Model = tuple[Callable[[], Any], dict[str, Any]]
"""What builds a base, and options of its adapter."""

SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 32, "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip
MOE = {**SIZES, "moe_intermediate_size": 12, "num_experts": 3, "num_experts_per_tok": 2, "head_dim": 4}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ADAPTER, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def train(base: Any, folder: Path, fill: Callable[[torch.Tensor], object], **options: Any) -> Any:
    """Return peft's model of a base, with every trained parameter filled, and write its adapter."""
    saving = {name: options.pop(name) for name in ("save_embedding_layers",) if name in options}
    model = peft.get_peft_model(base, peft.LoraConfig(**{"r": 2, **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                fill(parameter)
    model.save_pretrained(folder / "adapter", **saving)
    return model
