"""What torchtitan's Qwen3.5 takes from fla, a library of kernels for GPUs, in plain torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from inspect import unwrap
from itertools import pairwise
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from tests.oracles.quiet import quiet


class _Function(torch.autograd.Function):
    """Stands for those that torchtitan registers by name, and nobody calls."""


def _gated_delta_rule(q: Any, k: Any, v: Any, g: Any, beta: Any, *, cu_seqlens: Any, **_: Any) -> tuple[Any, None]:
    """transformers' own form of it, of each sequence by itself."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    rule = unwrap(torch_chunk_gated_delta_rule)  # it would take this one for the kernel of a GPU
    bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    done = [
        rule(
            *(each[:, start:end] for each in (q, k, v)), g=g[:, start:end], beta=beta[:, start:end],
            use_qk_l2norm_in_kernel=True,
        )[0]
        for start, end in pairwise(bounds)
    ]  # fmt: skip
    return torch.cat(done, dim=1), None


def _causal_conv1d(*, x: Any, weight: Any, cu_seqlens: Any, **_: Any) -> tuple[Any, None]:
    bounds = cu_seqlens.tolist()
    done = [
        nn.functional.conv1d(
            nn.functional.pad(x[:, start:end].mT, (weight.shape[1] - 1, 0)), weight[:, None], groups=weight.shape[0]
        ).mT
        for start, end in pairwise(bounds)
    ]
    return nn.functional.silu(torch.cat(done, dim=1)), None


_MODULES: dict[str, dict[str, Any]] = {
    "fla": {},
    "fla.modules": {},
    "fla.modules.conv": {},
    "fla.modules.conv.causal_conv1d": {"causal_conv1d": _causal_conv1d},
    "fla.modules.conv.triton": {},
    "fla.modules.conv.triton.ops": {"CausalConv1dFunction": _Function},
    "fla.ops": {},
    "fla.ops.gated_delta_rule": dict.fromkeys(
        ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"), _gated_delta_rule
    ),
    "fla.ops.gated_delta_rule.chunk": {"ChunkGatedDeltaRuleFunction": _Function},
    "fla.ops.gated_delta_rule.fused_recurrent": {"FusedRecurrentFunction": _Function},
}


@contextmanager
def plain_fla() -> Iterator[None]:
    """Let fla be imported, except by transformers, whose own form is taken."""
    with quiet():
        import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    modules = {}
    for name, content in _MODULES.items():
        modules[name] = ModuleType(name)
        modules[name].__spec__ = ModuleSpec(name, None)
        vars(modules[name]).update(content)
    before = dict(sys.modules)
    with patch.dict(sys.modules, modules):
        yield
        imported = {name: module for name, module in sys.modules.items() if name not in before and name not in modules}
    sys.modules.update(imported)  # other modules stay
