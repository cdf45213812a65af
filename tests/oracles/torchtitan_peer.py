"""torchtitan 0.3.0: its own state-dict adapters and models, for the families it has.

Adapters: `Llama3StateDictAdapter` (RoPE-permuted q and k), `Qwen3StateDictAdapter` (dense and MoE layers),
`DeepSeekV3StateDictAdapter` and `GptOssStateDictAdapter`. It has none for Qwen2, Mixtral and Step-3.5, and no name for
any bias of a projection but gpt-oss's.

gpt-oss's adapter only renames. Its Hugging Face side is what torch's `QuantizedHuggingFaceStorageReader` makes of MXFP4
files: bf16 in the order of the codes, under their names; plain bf16 files are transposed to that here. And it still has
the names that experts had before 0.3, so that its own `to_hf` drops the experts of its own model (a test shows it):
they are renamed here.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.oracles.hub import Config, Tensors
from tests.oracles.quiet import quiet

BUFFER = ".moe.expert_bias_E"
"""Load-balancing state, which every model with experts has, and which most adapters do not know: it begins at zero."""
_ROUTER = ".moe.router.gate.weight"

_OSS = "gpt_oss"
_BLOCKS = "_blocks"
_EXPERTS = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
_SUFFIXES = {"mlp1_weight": "_EGD", "mlp1_bias": "_EG", "mlp2_weight": "_EDF", "mlp2_bias": "_ED"}
"""What the model's names of gpt-oss's experts have, and the adapter's have not."""
_OLDER = {
    ".attention.qkv_linear.": ".attention.",
    ".moe.routed_experts.inner_experts.w1_EFD": ".moe.experts.w1",
    ".moe.routed_experts.inner_experts.w2_EDF": ".moe.experts.w2",
    ".moe.routed_experts.inner_experts.w3_EFD": ".moe.experts.w3",
    **{f".moe.routed_experts.inner_experts.{name}{end}": f".moe.experts.{name}" for name, end in _SUFFIXES.items()},
    BUFFER: ".moe.expert_bias",
}
"""Names that differ in `from_hf_map` of the adapters of 0.2.0, 0.2.1 and 0.2.2; their layouts do not."""


def from_hf(config: Config, stored: Tensors) -> Tensors:
    """What the adapter makes of HF tensors, with the load-balancing state that the model has besides."""
    if config["model_type"] == _OSS:
        stored = to_blocks(stored)
    with quiet():
        converted: Tensors = adapter(config).from_hf(dict(stored))
    routers = {name: value for name, value in converted.items() if name.endswith(_ROUTER)}
    begun = {name.replace(_ROUTER, BUFFER): torch.zeros(len(value)) for name, value in routers.items()}
    return begun | {f"{name}{_SUFFIXES.get(name.rpartition('.')[2], '')}": value for name, value in converted.items()}


def to_hf(config: Config, native: Tensors) -> Tensors:
    """What the adapter makes of torchtitan's tensors."""
    known = dict(native)
    if config["model_type"] == _OSS:
        for name, end in _SUFFIXES.items():
            known = {key.replace(name + end, name): value for key, value in known.items()}
    with quiet():
        converted: Tensors = adapter(config).to_hf(known)
    return from_blocks(converted) if config["model_type"] == _OSS else converted


def to_blocks(stored: Tensors) -> Tensors:
    """The files that gpt-oss's adapter reads and writes, from plain bf16 files: experts in the order of the codes."""
    return {
        f"{name}{_BLOCKS}" if name.endswith(_EXPERTS) else name: value.mT.contiguous()
        if name.endswith(_EXPERTS)
        else value
        for name, value in stored.items()
    }


def from_blocks(stored: Tensors) -> Tensors:
    """The other way."""
    return {
        name.removesuffix(_BLOCKS): value.mT.contiguous() if name.endswith(_BLOCKS) else value
        for name, value in stored.items()
    }


def older(native: Tensors) -> Tensors:
    """The same tensors under the names of torchtitan 0.2."""
    renamed = {}
    for name, value in native.items():
        for new, old in _OLDER.items():
            name = name.replace(new, old)
        renamed["output.weight" if name == "lm_head.weight" else name] = value
    return renamed


def module(config: Config) -> Any:
    """torchtitan's own model of these sizes, on the meta device."""
    with quiet():
        return _models().build(config)


def adapter(config: Config) -> Any:
    """torchtitan's own adapter."""
    return _models().adapter_of(config)


def _models() -> Any:
    """How torchtitan's models are made from a config; imported late, because Transaxle is not in vLLM's environment."""
    from transaxle.readers.probes import titan_models

    return titan_models


PACKAGES = {"llama3", "qwen3", "deepseek_v3", "gpt_oss"}
"""torchtitan's packages of these families."""
