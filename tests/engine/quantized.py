"""Quantized checkpoints as the hub has them, made with numpy and safetensors, and dequantizers written out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file

from tests import checkpoints

Array = npt.NDArray[Any]
Tensors = dict[str, Array]

SCALE = "_scale_inv"
BLOCKS, SCALES = "_blocks", "_scales"
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)
_TYPES = {torch.bfloat16: BF16, torch.float8_e4m3fn: E4M3, torch.float8_e8m0fnu: np.dtype(ml_dtypes.float8_e8m0fnu)}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
"""Values of codes of four bits, without their sign."""


def random(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def plain(shape: tuple[int, ...], seed: int = 0) -> Array:
    return random(seed).standard_normal(shape).astype(BF16)


def blocks(shape: tuple[int, ...], seed: int = 0, tile: int = 128) -> tuple[Array, Array]:
    """Codes of e4m3 (no NaN) with a float32 scale for each 128 x 128, all of them different."""
    rng = random(seed)
    codes = rng.integers(0, 127, shape, np.uint8) | rng.integers(0, 2, shape, np.uint8) << 7
    grid = tuple(-(-size // tile) for size in shape)
    return codes.view(E4M3), (rng.uniform(1, 2, grid) * np.exp2(rng.integers(-9, 9, grid))).astype(np.float32)


def put(held: Tensors, name: str, shape: tuple[int, ...], seed: int = 0) -> None:
    """Add a weight as DeepSeek-V3 stores it."""
    held[name], held[name + SCALE] = blocks(shape, seed)


def dequantized(codes: Array, scale: Array, tile: int = 128) -> Array:
    """What codes with block scales stand for, in double precision: a plain walk over the last two dims."""
    found: Array = codes.astype(np.float64)
    rows, columns = codes.shape[-2:]
    for i in range(rows):
        for j in range(0, columns, tile):
            found[..., i, j : j + tile] *= scale[..., i // tile, j // tile, None]
    return found


def fours(shape: tuple[int, ...], seed: int = 0) -> tuple[Array, Array]:
    """Codes and exponents of an MXFP4 tensor of gpt-oss: `[..., K/32, 16]` bytes and `[..., K/32]`."""
    rng = random(seed)
    *outer, width = shape
    codes = rng.integers(0, 256, (*outer, width // 32, 16), np.uint8)
    return codes, rng.integers(100, 140, (*outer, width // 32), np.uint8)


def nibbles(packed: Array) -> Array:
    """The codes of packed bytes, the low one first, as values."""
    low, high = packed & 15, packed >> 4
    codes = np.stack([low, high], -1).reshape(*packed.shape[:-1], -1)
    values: Array = E2M1[codes & 7] * np.where(codes & 8, np.float32(-1), np.float32(1))
    return values


def of_fours(codes: Array, scale: Array) -> Array:
    """What `fours` stand for, in double precision, with the last two dims of the codes as one."""
    values: Array = nibbles(codes).astype(np.float64) * np.exp2(scale.astype(np.float64) - 127)[..., None]
    return values.reshape(*codes.shape[:-2], -1)


def llama_config(*, d: int, f: int, g: int, r: int, head: int, layers: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": d, "intermediate_size": f,
        "num_hidden_layers": layers, "num_attention_heads": g * r, "num_key_value_heads": g, "head_dim": head,
        "vocab_size": 48, "tie_word_embeddings": False, "torch_dtype": "bfloat16", **more,
    }  # fmt: skip


def llama_shapes(config: Mapping[str, Any]) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Shapes of the weights of linear layers, and of the others."""
    d, f, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    linear: dict[str, tuple[int, ...]] = {}
    other: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], d),
        "model.norm.weight": (d,),
        "lm_head.weight": (config["vocab_size"], d),
    }
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}."
        other |= {f"{base}{norm}.weight": (d,) for norm in ("input_layernorm", "post_attention_layernorm")}
        linear |= {
            f"{base}self_attn.q_proj.weight": (q, d),
            f"{base}self_attn.k_proj.weight": (kv, d),
            f"{base}self_attn.v_proj.weight": (kv, d),
            f"{base}self_attn.o_proj.weight": (d, q),
            f"{base}mlp.gate_proj.weight": (f, d),
            f"{base}mlp.up_proj.weight": (f, d),
            f"{base}mlp.down_proj.weight": (d, f),
        }
    return linear, other


def llama(**sizes: int) -> tuple[Tensors, dict[str, Any]]:
    """A Llama in FP8 blocks, as DeepSeek-V3's convention has it."""
    config = llama_config(**sizes, quantization_config=FP8)
    linear, other = llama_shapes(config)
    held: Tensors = {}
    for seed, (name, shape) in enumerate(linear.items()):
        put(held, name, shape, seed)
    for seed, (name, shape) in enumerate(other.items(), 100):
        held[name] = plain(shape, seed)
    return held, config


def plain_llama(**sizes: int) -> tuple[Tensors, dict[str, Any]]:
    config = llama_config(**sizes)
    linear, other = llama_shapes(config)
    return {name: plain(shape, seed) for seed, (name, shape) in enumerate({**linear, **other}.items())}, config


def deepseek(*, f: int = 128) -> tuple[Tensors, dict[str, Any]]:
    """A small DeepSeek-V3 in FP8 blocks: a dense layer, a sparse one, and one that predicts ahead."""
    d, heads, nope, rope, wide, a, k, e, inner = 256, 2, 128, 64, 128, 128, 192, 4, 384
    config = {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": d,
        "num_hidden_layers": 2, "num_nextn_predict_layers": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "vocab_size": 48, "intermediate_size": inner, "moe_intermediate_size": f, "n_routed_experts": e,
        "n_shared_experts": 1, "num_attention_heads": heads, "num_key_value_heads": heads, "q_lora_rank": a,
        "kv_lora_rank": k, "qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": wide,
        "topk_method": "noaux_tc", "tie_word_embeddings": False, "quantization_config": FP8,
    }  # fmt: skip
    linear: dict[str, tuple[int, ...]] = {}
    other: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (48, d),
        "model.norm.weight": (d,),
        "lm_head.weight": (48, d),
    }
    for layer in range(3):
        base = f"model.layers.{layer}."
        other |= {f"{base}{norm}.weight": (d,) for norm in ("input_layernorm", "post_attention_layernorm")}
        other |= {f"{base}self_attn.q_a_layernorm.weight": (a,), f"{base}self_attn.kv_a_layernorm.weight": (k,)}
        linear |= {
            f"{base}self_attn.q_a_proj.weight": (a, d),
            f"{base}self_attn.q_b_proj.weight": (heads * (nope + rope), a),
            f"{base}self_attn.kv_a_proj_with_mqa.weight": (k + rope, d),
            f"{base}self_attn.kv_b_proj.weight": (heads * (nope + wide), k),
            f"{base}self_attn.o_proj.weight": (d, heads * wide),
        }
        stems = {f"{base}mlp.": inner}
        if layer:
            other |= {f"{base}mlp.gate.weight": (e, d), f"{base}mlp.gate.e_score_correction_bias": (e,)}
            stems = {f"{base}mlp.shared_experts.": f, **{f"{base}mlp.experts.{n}.": f for n in range(e)}}
        for stem, rows in stems.items():
            linear |= {f"{stem}{half}_proj.weight": (rows, d) for half in ("gate", "up")}
            linear[f"{stem}down_proj.weight"] = (d, rows)
    ahead = "model.layers.2."
    other |= {f"{ahead}{norm}.weight": (d,) for norm in ("enorm", "hnorm", "shared_head.norm")}
    other[f"{ahead}eh_proj.weight"] = (d, 2 * d)
    held: Tensors = {}
    for seed, (name, shape) in enumerate(linear.items()):
        put(held, name, shape, seed)
    return held | {name: plain(shape, seed) for seed, (name, shape) in enumerate(other.items(), 500)}, config


def gpt_oss(*, d: int, f: int, e: int, layers: int = 1) -> tuple[Tensors, dict[str, Any]]:
    """A gpt-oss with its experts in MXFP4, as the hub has it."""
    heads, groups, head = 4, 2, 16
    config = {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": d, "intermediate_size": f,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": head,
        "num_local_experts": e, "vocab_size": 48, "attention_bias": True, "tie_word_embeddings": False,
        "quantization_config": MXFP4,
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (48, d),
        "model.norm.weight": (d,),
        "lm_head.weight": (48, d),
    }
    held: Tensors = {}
    for layer in range(layers):
        base = f"model.layers.{layer}."
        shapes |= {f"{base}{norm}.weight": (d,) for norm in ("input_layernorm", "post_attention_layernorm")}
        for part, rows in {"q": heads * head, "k": groups * head, "v": groups * head}.items():
            shapes |= {f"{base}self_attn.{part}_proj.weight": (rows, d), f"{base}self_attn.{part}_proj.bias": (rows,)}
        shapes |= {
            f"{base}self_attn.o_proj.weight": (d, heads * head), f"{base}self_attn.o_proj.bias": (d,),
            f"{base}self_attn.sinks": (heads,), f"{base}mlp.router.weight": (e, d), f"{base}mlp.router.bias": (e,),
            f"{base}mlp.experts.gate_up_proj_bias": (e, 2 * f), f"{base}mlp.experts.down_proj_bias": (e, d),
        }  # fmt: skip
        for seed, (part, shape) in enumerate({"gate_up_proj": (e, 2 * f, d), "down_proj": (e, d, f)}.items()):
            stem = f"{base}mlp.experts.{part}"
            held[stem + BLOCKS], held[stem + SCALES] = fours(shape, 10 * layer + seed)
    held |= {name: plain(shape, seed) for seed, (name, shape) in enumerate(shapes.items(), 100)}
    return held, config


def store(folder: Path, made: tuple[Tensors, dict[str, Any]], shards: int = 1) -> Path:
    return checkpoints.write(folder, made[0], shards=shards, config=made[1])


def read(folder: Path) -> Tensors:
    """Read every tensor of a folder with the safetensors library; that for numpy knows no types of eight bits."""
    found = {name: t for file in sorted(folder.rglob("*.safetensors")) for name, t in load_file(file).items()}
    return {name: _array(tensor) for name, tensor in found.items()}


def _array(tensor: torch.Tensor) -> Array:
    kind = _TYPES.get(tensor.dtype)
    return (
        tensor.numpy()
        if kind is None
        else tensor.reshape(-1).view(torch.uint8).numpy().view(kind).reshape(tensor.shape)
    )


def same(first: Path, second: Path) -> bool:
    """Tell whether two folders hold the same tensors under the same names, bit for bit."""
    a, b = read(first), read(second)
    return a.keys() == b.keys() and all(
        (a[name].dtype, a[name].shape, a[name].tobytes()) == (b[name].dtype, b[name].shape, b[name].tobytes())
        for name in a
    )


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found
