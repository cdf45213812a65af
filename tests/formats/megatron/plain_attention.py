"""Attention of plain torch, for layers whose own cannot be computed on a CPU."""

from __future__ import annotations

from typing import Any

import torch


class PlainAttention(torch.nn.Module):
    """Softmax attention, which holds no weights: megatron-core's own cannot take keys wider than values on the CPU."""

    def __init__(self, softmax_scale: float, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Causal attention over [tokens, batch, heads, width]."""
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)
