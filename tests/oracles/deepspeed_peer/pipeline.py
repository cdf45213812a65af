"""A model cut into pipeline stages by DeepSpeed's own PipelineModule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.oracles.deepspeed_peer.case import Case
from tests.oracles.deepspeed_peer.models import DTYPES

TIED = "embed"


class Table(nn.Module):
    """An embedding; tied, it is the output layer as well."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(case.vocab, case.hidden) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return functional.embedding(x, self.weight)


class Layer(nn.Module):
    """A residual MLP."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(case.hidden)
        self.up, self.down = nn.Linear(case.hidden, case.inner), nn.Linear(case.inner, case.hidden)

    def forward(self, x: Tensor) -> Tensor:
        done: Tensor = x + self.down(functional.gelu(self.up(self.ln(x))))
        return done


class Head(nn.Module):
    """The output layer of an untied model."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.lin = nn.Linear(case.hidden, case.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        done: Tensor = self.lin(x)
        return done


def _logits(module: Table, x: Tensor) -> Tensor:
    return functional.linear(x, module.weight)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), labels.reshape(-1))


def build(case: Case) -> Any:
    """The stage of this process."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    torch.manual_seed(1234)
    first = TiedLayerSpec(TIED, Table, case) if case.tied else LayerSpec(Table, case)
    last = TiedLayerSpec(TIED, Table, case, forward_fn=_logits) if case.tied else LayerSpec(Head, case)
    body = [LayerSpec(Layer, case) for _ in range(2 * case.layers)]
    loss: Callable[[Tensor, Tensor], Tensor] = _loss
    module = PipelineModule([first, *body, last], num_stages=case.launch.pp, partition_method="uniform", loss_fn=loss)
    return module.to(DTYPES[case.dtype])
