"""Small checkpoints as other programs write them, made with numpy and safetensors, never with transaxle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 40,
}  # fmt: skip
"""Sizes of the tiny model, under the keys of its config."""
CONFIG: Mapping[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    **SIZES,
}
EXPERTS_OF_A_LAYER = 3 * SIZES["num_experts"]
TENSORS = 3 + SIZES["num_hidden_layers"] * (9 + EXPERTS_OF_A_LAYER)
"""Stored tensors of the tiny model in dialect hf."""
WHOLE = "model.safetensors"
INDEX = f"{WHOLE}.index.json"
GATE = "model.layers.0.mlp.experts.3.gate_proj.weight"
"""One expert's matrix of the tiny model."""

Tensors = dict[str, np.ndarray]


def shapes(sizes: Mapping[str, int] = SIZES) -> dict[str, tuple[int, ...]]:
    """Return the stored shapes of a Qwen3-MoE in dialect hf."""
    d, f, head = sizes["hidden_size"], sizes["moe_intermediate_size"], sizes["head_dim"]
    q, kv = (sizes[key] * head for key in ("num_attention_heads", "num_key_value_heads"))
    vocabulary, experts = sizes["vocab_size"], sizes["num_experts"]
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, d),
        "model.norm.weight": (d,),
        "lm_head.weight": (vocabulary, d),
    }
    for layer in range(sizes["num_hidden_layers"]):
        base = f"model.layers.{layer}"
        found |= {f"{base}.{norm}.weight": (d,) for norm in ("input_layernorm", "post_attention_layernorm")}
        found |= {f"{base}.self_attn.{norm}.weight": (head,) for norm in ("q_norm", "k_norm")}
        found |= {
            f"{base}.self_attn.q_proj.weight": (q, d),
            f"{base}.self_attn.k_proj.weight": (kv, d),
            f"{base}.self_attn.v_proj.weight": (kv, d),
            f"{base}.self_attn.o_proj.weight": (d, q),
            f"{base}.mlp.gate.weight": (experts, d),
        }
        for expert in range(experts):
            stem = f"{base}.mlp.experts.{expert}"
            found |= {f"{stem}.{half}_proj.weight": (f, d) for half in ("gate", "up")}
            found |= {f"{stem}.down_proj.weight": (d, f)}
    return found


def tensors(sizes: Mapping[str, int] = SIZES) -> Tensors:
    """Return random weights for `shapes`, the same at every call."""
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape).astype(ml_dtypes.bfloat16) for name, shape in shapes(sizes).items()}


def tiny(folder: Path, *, shards: int = 1, config: Mapping[str, Any] | None = CONFIG) -> Path:
    """Write the tiny Qwen3-MoE as transformers saves it: one file, or shards with their index."""
    return write(folder, tensors(), shards=shards, config=config)


def write(folder: Path, held: Tensors, *, shards: int = 1, config: Mapping[str, Any] | None = None) -> Path:
    """Write tensors into a new folder, and a config beside them."""
    folder.mkdir(parents=True)
    names = list(held)
    files = [WHOLE] if shards == 1 else [f"model-{n:05d}-of-{shards:05d}.safetensors" for n in range(1, shards + 1)]
    for number, file in enumerate(files):
        mine = {name: held[name] for name in names[number::shards]}
        save_file(mine, folder / file, metadata={"format": "pt"})
    if shards > 1:
        where = {name: files[number % shards] for number, name in enumerate(names)}
        size = sum(array.nbytes for array in held.values())
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": where}))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def read(folder: Path) -> Tensors:
    """Read every tensor of a folder with the safetensors library."""
    return {name: array for file in sorted(folder.rglob("*.safetensors")) for name, array in load_file(file).items()}


def same(first: Path, second: Path) -> bool:
    """Tell whether two folders hold the same tensors under the same names, bit for bit."""
    a, b = read(first), read(second)
    return a.keys() == b.keys() and all(
        (a[name].dtype, a[name].shape, a[name].tobytes()) == (b[name].dtype, b[name].shape, b[name].tobytes())
        for name in a
    )
