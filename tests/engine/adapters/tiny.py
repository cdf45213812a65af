"""What the tests of adapters share: sizes of their models, and the files of peft."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 32, "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip
MOE = {**SIZES, "moe_intermediate_size": 12, "num_experts": 3, "num_experts_per_tok": 2, "head_dim": 4}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ADAPTER, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
