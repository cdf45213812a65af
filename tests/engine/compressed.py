"""Checkpoints of integer codes that compressed-tensors itself packs, and the values that it decompresses them to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from tests.oracles.quiet import quiet

Tensors = dict[str, torch.Tensor]


class Integers(msgspec.Struct, frozen=True):
    """How weights are quantized, in the words of compressed-tensors' `QuantizationArgs`."""

    bits: int = 4
    strategy: str = "group"
    group: int | None = 32
    symmetric: bool = True
    format: str = "pack-quantized"

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments as a config states them."""
        size = {"group_size": self.group} if self.group else {}
        return {"num_bits": self.bits, "type": "int", "strategy": self.strategy, "symmetric": self.symmetric, **size}

    @property
    def section(self) -> dict[str, Any]:
        """The `quantization_config` of a model with such weights."""
        group = {"targets": ["Linear"], "weights": self.arguments, "format": self.format}
        head = {"quant_method": "compressed-tensors", "format": self.format, "quantization_status": "compressed"}
        return {**head, "ignore": ["lm_head"], "config_groups": {"group_0": group}}


def quantize(weight: torch.Tensor, integers: Integers) -> tuple[Tensors, torch.Tensor]:
    """Return the buffers of one weight by their suffixes, and the values that compressed-tensors decompresses."""
    with quiet():
        from compressed_tensors.compressors.naive_quantized import IntQuantizationCompressor
        from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams

        arguments = QuantizationArgs(**integers.arguments)
        scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
        whole = integers.strategy == "tensor"
        rows = weight.flatten() if whole else weight.unflatten(-1, (-1, integers.group or weight.shape[-1]))
        scale, zero_point = calculate_qparams(rows.amin(-1), rows.amax(-1), arguments)
        packed = integers.format == "pack-quantized"
        compressor = PackedQuantizationCompressor if packed else IntQuantizationCompressor
        state = {"weight": weight.clone(), "weight_scale": scale, "weight_zero_point": zero_point}
        stored = compressor.compress(state, scheme)
        names = compressor.compression_param_names(scheme)
        buffers = {name: stored[name].clone(memory_format=torch.contiguous_format) for name in names if name in stored}
        return buffers, compressor.decompress(dict(buffers), scheme)["weight"]


def store(folder: Path, weights: Tensors, config: dict[str, Any], integers: Integers) -> Tensors:
    """Write a checkpoint whose projections are quantized; return the decompressed values of all tensors."""
    stored, values = Tensors(), Tensors()
    for name, weight in weights.items():
        if "_proj" not in name or weight.ndim < 2:
            stored[name] = values[name] = weight
            continue
        buffers, values[name] = quantize(weight, integers)
        prefix = name.removesuffix("weight")
        stored |= {prefix + suffix: buffer for suffix, buffer in buffers.items()}
    folder.mkdir(parents=True)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": integers.section}))
    return values
