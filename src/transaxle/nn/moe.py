"""`MoE`: a mixture of experts built from two grouped linear layers, which computes the same result as that of
Qwen3-MoE.

The device sorts rows (tokens) by expert, and sorts them back; the host reads no numbers from the device.

With expert parallelism, rows are sent to the ranks of their experts and back. Only the devices have the row counts, but
the collective operation needs these counts on the host. Only in this module the host waits for the device, and only if
experts are divided over ranks.
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
    """A permutation that sorts rows by group (such as expert); rows of the same group keep their order."""

    places: torch.Tensor
    """For each sorted position, its source row, int64 [rows]: `x[places]` is sorted."""
    back: torch.Tensor
    """For each row, its sorted position, int64 [rows]: `y[back]` has the original order."""
    counts: torch.Tensor
    """Number of rows of each group, int64 [groups]."""


def order(groups: torch.Tensor, count: int) -> Order:
    """Sort rows by their groups.

    Args:
        groups: for each row, the index of its group, int64 [rows].
        count: number of groups.
    """
    sorted_groups, places = torch.sort(groups, stable=True)
    every = torch.arange(count, device=groups.device)
    ends = torch.searchsorted(sorted_groups, every, right=True)
    rows = torch.arange(len(groups), device=groups.device)
    back = torch.empty_like(places).scatter_(0, places, rows)
    return Order(places, back, torch.diff(ends, prepend=ends.new_zeros(1)))


class _AllToAll(torch.autograd.Function):
    """Sends rows to all ranks of a group, and receives rows from all ranks; gradients are sent in the opposite
    direction.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        _: torch.Tensor,
        receive_counts: list[int],
        send_counts: list[int],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        """Return the received rows, sorted by sending rank.

        Args:
            ctx: context of autograd.
            rows: rows to send, sorted by receiving rank.
            _: tensor that requires a gradient, so that backward runs on every rank; it receives no gradient.
            receive_counts: number of rows that each rank sends to this rank.
            send_counts: number of rows that this rank sends to each rank.
            group: the ranks that exchange rows.
        """
        ctx.swapped = send_counts, receive_counts, group
        return _exchange(rows, receive_counts, send_counts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Send the gradients of received rows back to the ranks that sent the rows."""
        return _exchange(grads[0], *ctx.swapped), None, None, None, None


def _exchange(
    rows: torch.Tensor, receive_counts: list[int], send_counts: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    arrived = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), receive_counts, send_counts, group=group)
    return arrived


def across(
    experts: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    rows: torch.Tensor,
    counts: torch.Tensor,
    local_experts: int,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Return the outputs for this rank's rows, computed by experts on all ranks; every rank of the group must call
    this.

    Args:
        experts: function that applies this rank's experts to its arguments (rows sorted by expert, number of rows of
            each expert), and returns as many rows.
        rows: [rows, features], sorted by expert.
        counts: number of rows of each expert, int64 [experts]; the experts are divided over ranks as by `torch.chunk`.
        local_experts: number of experts on this rank.
        group: the ranks over which the experts are divided.
    """
    ranks = dist.get_world_size(group)
    experts_per_rank = -(-len(counts) // ranks)
    send_matrix = functional.pad(counts, (0, experts_per_rank * ranks - len(counts))).view(ranks, experts_per_rank)
    receive_matrix = torch.empty_like(send_matrix)
    dist.all_to_all_single(receive_matrix, send_matrix, group=group)
    send_counts, receive_counts = torch.stack([send_matrix.sum(1), receive_matrix.sum(1)]).tolist()
    trained = rows.new_empty(0).requires_grad_()
    arrived: torch.Tensor = _AllToAll.apply(rows, trained, receive_counts, send_counts, group)  # type: ignore[no-untyped-call]
    expert_numbers = torch.arange(experts_per_rank, device=rows.device).repeat(ranks)
    sorted_rows = order(
        expert_numbers.repeat_interleave(receive_matrix.flatten(), output_size=sum(receive_counts)), experts_per_rank
    )
    outputs = experts(arrived[sorted_rows.places], sorted_rows.counts[:local_experts])[sorted_rows.back]
    returned: torch.Tensor = _AllToAll.apply(outputs, trained, send_counts, receive_counts, group)  # type: ignore[no-untyped-call]
    return returned


class Experts(nn.Module):
    """Gated experts: `linear_fc1` computes the gate and up projections, `linear_fc2` computes the output.

    The experts are a separate module, so that `fully_shard` can use a different mesh for experts than for other
    modules.

    Args:
        hidden_size: number of elements of a row.
        intermediate_size: number of elements of a row between the two layers.
        num_experts: number of experts, on all ranks together.
        single_grouped_weight: whether to create one parameter for all experts; otherwise, one per expert.
        params_dtype: dtype of the parameters; None means torch's default.
        device: device of the parameters.
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
        """Divide the experts over ranks, in place, and keep only this rank's experts (see `GroupedLinear.divide`)."""
        for layer in (self.linear_fc1, self.linear_fc2):
            layer.divide(mesh)

    def forward(self, rows: torch.Tensor, m_splits: torch.Tensor) -> torch.Tensor:
        """Return the experts' outputs, [rows, hidden].

        Args:
            rows: [rows, hidden], sorted by this rank's experts.
            m_splits: number of rows of each expert, int64 [experts].
        """
        gate, up = self.linear_fc1(rows, m_splits).chunk(2, -1)
        outputs: torch.Tensor = self.linear_fc2(functional.silu(gate) * up, m_splits)
        return outputs


class Gated(nn.Module):
    """A gated feed-forward layer (shared expert) through which every token passes in addition to its routed experts.

    Args:
        hidden_size: number of elements of a row.
        intermediate_size: number of elements of a row between the two projections.
        params_dtype: dtype of the parameters; None means torch's default.
        device: device of the parameters.
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
        """Return the layer's outputs, [rows, hidden]."""
        outputs: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(rows)) * self.up_proj(rows))
        return outputs


class MoE(nn.Module):
    """A mixture of experts: a router and its experts, which replace a transformer's feed-forward layer.

    Each token is sent to the `top_k` experts with the largest softmax probabilities. The result is the sum of these
    experts' outputs, weighted by the probabilities. Names in a state dict are `gate.weight`,
    `experts.linear_fc1.weight{e}` and `experts.linear_fc2.weight{e}` (without `{e}` if experts are one tensor), and
    `shared_experts.…`. The module also loads experts in the layouts of other frameworks.

    Args:
        hidden_size: number of elements of a token.
        intermediate_size: number of elements of a token inside an expert.
        num_experts: number of experts, on all ranks together.
        top_k: number of experts for each token.
        norm_topk_prob: whether to scale the probabilities of a token's chosen experts so that their sum is one.
        shared_intermediate_size: inner size of a shared layer whose output is added for each token; 0 means no shared
            layer.
        single_grouped_weight: whether to create one parameter for all experts; otherwise, one per expert.
        ep: mesh of one dim whose ranks divide the experts as `torch.chunk` does; None means that each rank has all
            experts. Tokens for experts of other ranks are sent to these ranks and back; the host waits for the row
            counts once per forward.
        params_dtype: dtype of the parameters; None means torch's default.
        device: device of the parameters. On any device except `meta`, each rank temporarily has all experts of the
            layer in memory.

    Raises:
        Refused: with the code SHAPE_MISMATCH if `top_k` exceeds `num_experts`; with the code UNSUPPORTED if the mesh
            has several dims.
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
        """Return the weights and the indices of each token's chosen experts, both as [tokens, top_k].

        Probabilities are computed in float32; the weights have the dtype of the tokens.
        """
        scores = self.gate(tokens)
        weights, chosen = scores.softmax(-1, dtype=torch.float32).topk(self.top_k)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(scores.dtype), chosen

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [..., hidden]. With `ep`, every rank of the mesh must call `forward`, with its own tokens or with
        none.
        """
        tokens = hidden.reshape(-1, self.hidden_size)
        weights, chosen = self.route(tokens)
        sorted_rows = order(chosen.flatten(), self.num_experts)
        rows = tokens[sorted_rows.places // self.top_k]
        if self.ep is None:
            answers = self.experts(rows, sorted_rows.counts)
        else:
            local_experts = len(self.experts.linear_fc1.experts)
            answers = across(self.experts, rows, sorted_rows.counts, local_experts, self.ep.get_group())
        answers = answers[sorted_rows.back].view(-1, self.top_k, self.hidden_size)
        outputs: torch.Tensor = (answers * weights.unsqueeze(-1)).sum(1)
        if self.shared_experts is not None:
            outputs = outputs + self.shared_experts(tokens)
        return outputs.view(hidden.shape)
