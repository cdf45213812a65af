"""torchtitan's own loading code against every layout of a model, as a test of torchtitan could run it.

    python titan_testkit.py
    python -m transaxle.testkit titan_testkit:load_hub config.json

The model is torchtitan's `debugmodel` of Qwen3 with two layers.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torchtitan.models.qwen3 import Qwen3StateDictAdapter, qwen3_configs

LAYERS = 2
SIZES = {
    "hidden_size": 256, "vocab_size": 2048, "intermediate_size": 3072, "num_hidden_layers": LAYERS,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
CONFIG = {"model_type": "qwen3", "tie_word_embeddings": True, "rope_theta": 1000000.0, **SIZES}
"""What a hub would have as config.json of that model."""


def load_hub(folder: Path) -> dict[str, torch.Tensor]:
    """Load a hub folder as torchtitan's checkpoint manager does, and return the model's state dict."""
    config = qwen3_configs["debugmodel"]("flex")
    config.layers = config.layers[:LAYERS]
    model = config.build()
    adapter = Qwen3StateDictAdapter(config, str(folder))
    files = adapter.to_hf(model.state_dict())
    load(files, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    model.load_state_dict(adapter.from_hf(files))
    return model.state_dict()


if __name__ == "__main__":
    from transaxle import testkit

    print(testkit.run(load_hub, CONFIG))
