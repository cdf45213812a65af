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
    """A residual MLP; with tensor parallelism, `up` is cut by its rows and `down` by its columns, as Megatron does."""

    def __init__(self, case: Case, group: Any = None) -> None:
        super().__init__()
        parts = case.launch.tp
        self.group = group
        self.ln = nn.LayerNorm(case.hidden)
        self.up, self.down = nn.Linear(case.hidden, case.inner // parts), nn.Linear(case.inner // parts, case.hidden)
        if parts > 1:
            rank = torch.distributed.get_rank() % parts
            generator = torch.Generator().manual_seed(99 + rank)  # or the ranks would hold the same
            for cut in (self.up.weight, self.up.bias, self.down.weight):
                cut.data.copy_(torch.randn(cut.shape, generator=generator) * 0.1)
                cut.model_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Copied.apply(self.ln(x), self.group)  # type: ignore[no-untyped-call]
        y = functional.linear(functional.gelu(self.up(y)), self.down.weight)
        total: Tensor = Summed.apply(y, self.group)  # type: ignore[no-untyped-call]
        return x + total + self.down.bias


class Copied(torch.autograd.Function):
    """The same on every tensor-parallel rank; gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _summed(grads[0], ctx.group), None


class Summed(torch.autograd.Function):
    """The sum over the tensor-parallel ranks."""

    @staticmethod
    def forward(_: Any, x: Tensor, group: Any) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _summed(x: Tensor, group: Any) -> Tensor:
    if group is None:
        return x
    total = x.clone()
    torch.distributed.all_reduce(total, group=group)
    return total


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
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    torch.manual_seed(1234)
    first = TiedLayerSpec(TIED, Table, case) if case.tied else LayerSpec(Table, case)
    last = TiedLayerSpec(TIED, Table, case, forward_fn=_logits) if case.tied else LayerSpec(Head, case)
    launch = case.launch
    topology = PipeModelDataParallelTopology(launch.pp, launch.tp, launch.dp) if launch.tp > 1 else None
    body = [LayerSpec(Layer, case, _group(case)) for _ in range(2 * case.layers)]
    loss: Callable[[Tensor, Tensor], Tensor] = _loss
    module = PipelineModule(
        [first, *body, last], num_stages=launch.pp, topology=topology, partition_method="uniform", loss_fn=loss
    )
    return module.to(DTYPES[case.dtype])


def _group(case: Case) -> Any:
    """This process's tensor-parallel group: neighbouring ranks."""
    tp = case.launch.tp
    if tp == 1:
        return None
    ranks = range(torch.distributed.get_world_size())
    groups = [torch.distributed.new_group(list(ranks[start : start + tp])) for start in ranks[::tp]]
    return groups[torch.distributed.get_rank() // tp]


def info(case: Case) -> dict[str, Any]:
    """What a framework such as Megatron-DeepSpeed says about its cuts, in the client state; empty without any."""
    if case.launch.tp == 1 or case.launch.pp == 1:
        return {}
    return {
        "universal_checkpoint_info": {
            "universal_checkpoint_version": 0.2,
            "tp_replicated_parameter_patterns": [
                r"\d+.ln.weight", r"\d+.ln.bias", r"\d+.down.bias", r"\d+.weight", r"\d+.lin.weight",
            ],
            "parameter_with_row_parallelism_patterns": [r"\d+.down.weight"],
            "vocabulary_parameter_patterns": [],
        }
    }  # fmt: skip
