"""`MoE`: a mixture of experts made of two grouped layers. It computes what Qwen3-MoE's does, in readable code.

Rows in the order of their groups, and back again: all of it where the rows are, nothing is read by the host.

Rows on their way to experts of other ranks, and back.

How many rows go where is known to the devices only, and the collective needs it on the host: this is the one place
where a mixture of experts waits for the device, and only where its experts are shared out over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from transaxle.arguments import DType, wrong_type
from transaxle.errors import refuse
from transaxle.nn.checkpoint_layouts import accept_layouts
from transaxle.nn.grouped_linear import GroupedLinear
from transaxle.torch_tensors import Device, read_device, read_optional_dtype


@dataclass(frozen=True, slots=True)
class Order:
    """Rows group by group; within a group they stay as they were."""

    places: torch.Tensor
    """Which row comes at each place, int64 [rows]: `x[places]` is in order."""
    back: torch.Tensor
    """At which place each row is, int64 [rows]: `y[back]` is as it was."""
    counts: torch.Tensor
    """Rows of each group, int64 [groups]."""


def order(groups: torch.Tensor, count: int) -> Order:
    """Sort rows by their groups.

    Args:
        groups: number of each row's group, int64 [rows].
        count: how many groups there are.
    """
    sorted_groups, places = torch.sort(groups, stable=True)
    every = torch.arange(count, device=groups.device)
    ends = torch.searchsorted(sorted_groups, every, right=True)
    rows = torch.arange(len(groups), device=groups.device)
    back = torch.empty_like(places).scatter_(0, places, rows)
    return Order(places, back, torch.diff(ends, prepend=ends.new_zeros(1)))


class _AllToAll(torch.autograd.Function):
    """Rows to all ranks of a group, and rows from them; gradients go the other way."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, _: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        """Return the rows that arrive, those of rank 0 first.

        Args:
            ctx: of autograd.
            rows: those for rank 0 first.
            _: wants a gradient, and gets none: so backward comes here on every rank, whatever it has parameters for.
            received: rows from each rank.
            sent: rows for each rank.
            group: the ranks.
        """
        ctx.swapped = sent, received, group
        return _swapped(rows, received, sent, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Send gradients to where their rows came from."""
        return _swapped(grads[0], *ctx.swapped), None, None, None, None


def _swapped(rows: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


def across(
    experts: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    rows: torch.Tensor,
    counts: torch.Tensor,
    own: int,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Return what experts on all ranks make of this rank's rows; every rank of the group calls it.

    Args:
        experts: those of this rank: rows in their order, and how many each has, to as many rows.
        rows: [rows, features], in the order of all experts.
        counts: rows of each expert, int64 [experts]; ranks share them out as `torch.chunk` does.
        own: experts of this rank.
        group: the ranks.
    """
    ranks = dist.get_world_size(group)
    most = -(-len(counts) // ranks)
    mine = functional.pad(counts, (0, most * ranks - len(counts))).view(ranks, most)
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=group)
    sent, received = torch.stack([mine.sum(1), theirs.sum(1)]).tolist()
    trained = rows.new_empty(0).requires_grad_()
    arrived: torch.Tensor = _AllToAll.apply(rows, trained, received, sent, group)  # type: ignore[no-untyped-call]
    every = torch.arange(most, device=rows.device).repeat(ranks)
    sorted_rows = order(every.repeat_interleave(theirs.flatten(), output_size=sum(received)), most)
    outputs = experts(arrived[sorted_rows.places], sorted_rows.counts[:own])[sorted_rows.back]
    returned: torch.Tensor = _AllToAll.apply(outputs, trained, sent, received, group)  # type: ignore[no-untyped-call]
    return returned


class Experts(nn.Module):
    """Gated experts: `linear_fc1` computes gate and up, `linear_fc2` brings them down.

    It is a separate module so that `fully_shard` can use another mesh for it than for the rest.

    Args:
        hidden_size: of a row.
        intermediate_size: of a row between the two.
        num_experts: how many there are, on all ranks together.
        single_grouped_weight: one parameter for all experts in place of one for each.
        params_dtype: of the parameters; None: torch's default.
        device: of the parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        *,
        single_grouped_weight: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()

        def layer(features: int, out: int) -> GroupedLinear:
            return GroupedLinear(
                num_experts,
                features,
                out,
                bias=False,
                params_dtype=params_dtype,
                device=device,
                single_grouped_weight=single_grouped_weight,
            )

        self.linear_fc1 = layer(hidden_size, 2 * intermediate_size)
        self.linear_fc2 = layer(intermediate_size, hidden_size)
        accept_layouts(self)

    def divide(self, mesh: DeviceMesh) -> None:
        """Keep this rank's experts; see `GroupedLinear.divide`."""
        for layer in (self.linear_fc1, self.linear_fc2):
            layer.divide(mesh)

    def forward(self, rows: torch.Tensor, m_splits: torch.Tensor) -> torch.Tensor:
        """Return [rows, hidden].

        Args:
            rows: [rows, hidden], in the order of the experts of this rank.
            m_splits: rows of each, int64 [experts].
        """
        gate, up = self.linear_fc1(rows, m_splits).chunk(2, -1)
        outputs: torch.Tensor = self.linear_fc2(functional.silu(gate) * up, m_splits)
        return outputs


class Gated(nn.Module):
    """A gated feed-forward layer, through which every token passes in addition to its experts.

    Args:
        hidden_size: of a row.
        intermediate_size: of a row inside.
        params_dtype: of the parameters; None: torch's default.
        device: of the parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False, dtype=params_dtype, device=device)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False, dtype=params_dtype, device=device)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False, dtype=params_dtype, device=device)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [rows, hidden]."""
        outputs: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(rows)) * self.up_proj(rows))
        return outputs


class MoE(nn.Module):
    """A mixture of experts: a router and its experts, in place of a transformer's feed-forward layer.

    Each token goes to the `top_k` experts with the largest softmax probabilities, and becomes the sum of their outputs,
    weighted by these probabilities. Names in a state dict are `gate.weight`, `experts.linear_fc1.weight{e}` and
    `experts.linear_fc2.weight{e}` (without numbers, where experts are one tensor), and `shared_experts.…`; it loads
    experts in the layouts of other frameworks too.

    Args:
        hidden_size: of a token.
        intermediate_size: of a token inside an expert.
        num_experts: how many there are, on all ranks together.
        top_k: experts for each token.
        norm_topk_prob: let the probabilities of a token's experts sum to one.
        shared_intermediate_size: inner size of a layer that all tokens pass through, added to the sum; 0: none.
        single_grouped_weight: one parameter for all experts in place of one for each.
        ep: mesh of one dim over whose ranks the experts are divided as by `torch.chunk`; None: each rank has all.
            Tokens for experts of other ranks are sent there and back, for which the host waits once per forward for
            their numbers.
        params_dtype: of the parameters; None: torch's default.
        device: of the parameters. Unless it is `meta`, each rank briefly holds all experts of the layer.

    Raises:
        Refused: SHAPE_MISMATCH for more experts per token than there are; UNSUPPORTED for a mesh of several dims.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        norm_topk_prob: bool = True,
        shared_intermediate_size: int = 0,
        single_grouped_weight: bool = False,
        ep: DeviceMesh | None = None,
        params_dtype: DType | None = None,
        device: Device | None = None,
    ) -> None:
        super().__init__()
        if not 0 < top_k <= num_experts:
            raise refuse("SHAPE_MISMATCH", f"top_k must be between 1 and num_experts={num_experts}, not {top_k}")
        dtype, where = read_optional_dtype("params_dtype", params_dtype), read_device("device", device)
        self.hidden_size, self.num_experts, self.top_k = hidden_size, num_experts, top_k
        self.norm_topk_prob, self.ep = norm_topk_prob, ep
        self.gate = nn.Linear(hidden_size, num_experts, bias=False, dtype=dtype, device=where)
        self.experts = Experts(
            hidden_size,
            intermediate_size,
            num_experts,
            single_grouped_weight=single_grouped_weight,
            params_dtype=dtype,
            device=where,
        )
        if ep is not None:
            if not isinstance(ep, DeviceMesh):
                raise wrong_type("ep", "a DeviceMesh of one dim", ep)
            self.experts.divide(ep)
        self.shared_experts = (
            Gated(hidden_size, shared_intermediate_size, dtype, where) if shared_intermediate_size else None
        )

    def route(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and numbers of each token's experts, both [tokens, top_k].

        Probabilities are computed in float32; the weights have the type of the tokens.
        """
        scores = self.gate(tokens)
        weights, chosen = scores.softmax(-1, dtype=torch.float32).topk(self.top_k)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(scores.dtype), chosen

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [..., hidden]; with `ep`, all its ranks call this, each with tokens of its own, or with none."""
        tokens = hidden.reshape(-1, self.hidden_size)
        weights, chosen = self.route(tokens)
        sorted_rows = order(chosen.flatten(), self.num_experts)
        rows = tokens[sorted_rows.places // self.top_k]
        if self.ep is None:
            answers = self.experts(rows, sorted_rows.counts)
        else:
            own = len(self.experts.linear_fc1.experts)
            answers = across(self.experts, rows, sorted_rows.counts, own, self.ep.get_group())
        answers = answers[sorted_rows.back].view(-1, self.top_k, self.hidden_size)
        outputs: torch.Tensor = (answers * weights.unsqueeze(-1)).sum(1)
        if self.shared_experts is not None:
            outputs = outputs + self.shared_experts(tokens)
        return outputs.view(hidden.shape)
