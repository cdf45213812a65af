"""Quantized checkpoints as compressed-tensors 0.20, torchao 0.18 and transformers 5.24 make them, and their own values.

Nothing of ours is used: each peer packs, names and stores the weights, and dequantizes them again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.oracles.quiet import quiet

Tensors = dict[str, torch.Tensor]

CONFIG = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 48, "dtype": "bfloat16",
}  # fmt: skip
"""Of a small Llama, whose widths are no multiples of a block of 128 throughout."""
MOE = {
    "model_type": "qwen3_moe", "hidden_size": 128, "moe_intermediate_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 4,
    "num_experts_per_tok": 2, "vocab_size": 48,
}  # fmt: skip
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Made:
    """A checkpoint of a peer's."""

    config: dict[str, Any]
    """Its config.json."""
    tensors: Tensors
    """As stored."""
    values: Tensors
    """What the peer makes of its quantized weights again, by the name of the weight."""
    metadata: Mapping[str, str]
    """Of the file's header."""

    def save(self, folder: Path) -> None:
        """Write the checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, folder / WEIGHTS, dict(self.metadata))


def _model(config: Mapping[str, Any], seed: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = {key: value for key, value in config.items() if key != "model_type"}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **keys)).to(torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return model.eval()


def compressed(groups: Mapping[str, Any], ignore: list[str], seed: int, folder: Path, scale: str = "bfloat16") -> Made:
    """A small Llama, quantized and compressed by compressed-tensors under these groups."""
    with quiet():
        os.environ["TQDM_DISABLE"] = "1"
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

        model = _model(CONFIG, seed)
        apply_quantization_config(model, QuantizationConfig(config_groups=dict(groups), ignore=ignore))
        for _, module in model.named_modules():
            if getattr(module, "quantization_scheme", None) is not None:
                _calibrate(module, getattr(torch, scale))
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        tensors = {name: value.detach().clone() for name, value in model.state_dict().items()}
        (folder / "config.json").write_text(json.dumps(CONFIG))
        compressor.update_config(str(folder))
        compressor.decompress_model(model)
        weights = {name for name, _ in _weights(tensors)}
        values = {name: value.detach().clone() for name, value in model.state_dict().items() if name in weights}
    return Made(json.loads((folder / "config.json").read_text()), tensors, values, {"format": "pt"})


def _weights(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """The quantized weights: those with scales beside them."""
    for name, value in tensors.items():
        if name.endswith("weight_scale"):
            yield name.removesuffix("_scale"), value


def _calibrate(module: Any, scale_dtype: torch.dtype) -> None:
    """Give a module the scales of its weight, by compressed-tensors' own formulas."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = module.quantization_scheme.weights
    weight = module.weight.detach().float()
    whole = None
    if args.strategy == "tensor_group":
        whole = generate_gparam(weight.amin(), weight.amax())
        module.weight_global_scale.data = whole
    if args.strategy == "tensor":
        low, high = weight.amin().reshape(1), weight.amax().reshape(1)
    elif args.strategy == "channel":
        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    else:
        rows, columns = args.block_structure if args.strategy == "block" else (1, args.group_size)
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
        tiles = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        low, high = tiles.amin((1, 3)), tiles.amax((1, 3))
    scale, _ = calculate_qparams(low, high, args, whole)
    module.weight_scale.data = scale.to(scale_dtype if args.strategy != "tensor_group" else scale.dtype)


def torchao(kind: str, seed: int) -> Made:
    """A small Llama whose linears torchao quantized, flattened by torchao for safetensors.

    `kind` is `float8_row`, `float8_tensor`, `float8_block`, `mxfp8`, `mxfp4`, `nvfp4`, `nvfp4_one_level`; or
    `nvfp4_swizzled`, `mxfp8_swizzled`, `mxfp4_swizzled`, as torchao's own configs make them; or `int8`.
    """
    with quiet():
        from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

        model = _model(CONFIG, seed)
        state: dict[str, Any] = {}
        values: Tensors = {}
        for name, value in model.state_dict().items():
            state[name] = value
            fits = not any(size % 128 for size in value.shape) or kind != "float8_block"
            if value.ndim == 2 and ".layers." in name and fits:
                state[name] = _torchao_tensor(value, kind)
                values[name] = state[name].dequantize(torch.float32).clone()
        tensors, metadata = flatten_tensor_state_dict(state)
    config = {**CONFIG, "quantization_config": {"quant_method": "torchao", "quant_type": {"default": {}}}}
    return Made(config, tensors, values, metadata)


def _torchao_tensor(value: torch.Tensor, kind: str) -> Any:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.quantization import Float8Tensor, Int8Tensor, PerBlock, PerRow, PerTensor

    if kind.startswith("float8"):
        granularity = {"row": PerRow(), "tensor": PerTensor(), "block": PerBlock([128, 128])}[kind.split("_")[1]]
        return Float8Tensor.from_hp(value, granularity=granularity)
    if kind.startswith("mxfp"):
        code = torch.float8_e4m3fn if kind.startswith("mxfp8") else torch.float4_e2m1fn_x2
        return MXTensor.to_mx(value, code, 32, is_swizzled_scales=kind.endswith("swizzled"))
    if kind == "int8":
        return Int8Tensor.from_hp(value, PerRow())
    whole = None if kind.endswith("one_level") else per_tensor_amax_to_scale(value.abs().max())
    return NVFP4Tensor.to_nvfp4(value, per_tensor_scale=whole, is_swizzled_scales=kind.endswith("swizzled"))


def fp8(block: tuple[int, int] | None, scale_fmt: str, seed: int) -> Made:
    """A small Qwen3-MoE with transformers' FP8 modules, quantized by the operation of its own."""
    with quiet():
        from transformers import FineGrainedFP8Config
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize, replace_with_fp8_linear

        config = FineGrainedFP8Config(
            weight_block_size=block, scale_fmt=scale_fmt, modules_to_not_convert=["lm_head", "gate"]
        )
        quantizer = type("Quantizer", (), {"quantization_config": config})()
        dense = _model(MOE, seed)
        state = dense.state_dict()
        names = set(replace_with_fp8_linear(dense, config.modules_to_not_convert, config).state_dict())
        tensors: Tensors = {}
        values: Tensors = {}
        operation, back = Fp8Quantize(quantizer), Fp8Dequantize(quantizer)
        for name, value in state.items():
            scale = f"{name}_scale_inv"
            if scale in names:
                made = operation.convert({name: value})
                tensors |= made
                values[name] = back._dequantize_one(made[name], made[scale], torch.float32)
            else:
                tensors[name] = value
        assert names == set(tensors), "transformers stores other names than its own operation makes"
    section = json.loads(json.dumps(config.to_dict(), default=str))
    return Made({**MOE, "quantization_config": section}, tensors, values, {"format": "pt"})


def gpt_oss(seed: int) -> Made:
    """Experts as gpt-oss stores them, with random bytes, and what transformers makes of them."""
    with quiet():
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        random = torch.Generator().manual_seed(seed)
        tensors: Tensors = {}
        values: Tensors = {}
        for name, (rows, columns) in {"gate_up_proj": (96, 64), "down_proj": (64, 96)}.items():
            base = f"model.layers.0.mlp.experts.{name}"
            blocks = torch.randint(256, (3, rows, columns // 32, 16), dtype=torch.uint8, generator=random)
            scales = torch.randint(118, 130, (3, rows, columns // 32), dtype=torch.uint8, generator=random)
            tensors |= {f"{base}_blocks": blocks, f"{base}_scales": scales}
            tensors[f"{base}_bias"] = torch.randn(3, rows, dtype=torch.bfloat16, generator=random)
            values[base] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2).contiguous()
        tensors["model.layers.0.mlp.router.weight"] = torch.randn(3, 64, dtype=torch.bfloat16, generator=random)
        tensors["model.layers.0.self_attn.q_proj.weight"] = torch.randn(64, 64, dtype=torch.bfloat16, generator=random)
    listed = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    section = {"quant_method": "mxfp4", "modules_to_not_convert": listed}
    return Made({"model_type": "gpt_oss", "quantization_config": section}, tensors, values, {"format": "pt"})
