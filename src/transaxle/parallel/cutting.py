"""The tensor-parallel cuts of a model's parameters, with collectives and gradient clipping for cut modules.

Each cut module records how its parameters are cut (`ParameterCut`).

Collective operations connect values that all ranks share with values of a single rank; the backward of each operation
is its transpose.

    enter      identity             gradients are summed      before a column-parallel layer
    leave      values are summed    identity                  after a row-parallel layer
    gather     shards are joined    own slice of the gradient after a cut layer without counterpart: logits, embeddings
    scatter    own slice            gradients are joined      before a row-parallel layer whose input is whole
    sum_shared identity             gradients are summed      parameters that several ranks have and use for different
                                    position by position      heads

`clip_grad_norm_` computes the gradient norm of a cut model, in which each element of the whole model counts once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from transaxle.axes.geometry import Intervals, count_positions, torch_chunk, whole
from transaxle.errors import Refusal, refuse
from transaxle.formats.deepspeed.universal_record import Record
from transaxle.nn.grouped_linear import GroupedLinear
from transaxle.quant.joined_parts import cut_share
from transaxle.quant.quantized_modules import CUTS
from transaxle.quant.quantizers import Quantizer
from transaxle.quant.tensor import QuantizedTensor
from transaxle.quant.tp_share import Share, tile_refusal
from transaxle.torch_tensors import (
    Part,
    along,
    as_dtensor,
    local_of,
    local_with_grad,
    mark,
    mark_all,
    placement_of,
    raw_local,
    record_part,
)


def _sum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = tensor.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def _join(part: Tensor, widths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Join all ranks' shards along the last dim; the shards are padded, because gloo and NCCL require equal sizes."""
    width_max = max(widths)
    padded = torch.nn.functional.pad(part, (0, width_max - part.shape[-1])).contiguous()
    parts = [torch.empty_like(padded) for _ in widths]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([each[..., :width] for each, width in zip(parts, widths, strict=True)], -1)


def _own(whole: Tensor, widths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    rank = dist.get_rank(group)
    return whole.narrow(-1, sum(widths[:rank]), widths[rank]).contiguous()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum(grads[0], ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(tensor, group)

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, widths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        ctx.settings = widths, group
        return _join(part, widths, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _own(grads[0], *ctx.settings), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, widths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        ctx.settings = widths, group
        return _own(whole, widths, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _join(grads[0], *ctx.settings), None, None


class _SumShared(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, dim: int, positions: Intervals, length: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.settings = dim, positions, length, group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        dim, positions, length, group = ctx.settings
        grad = grads[0]
        shape = [*grad.shape]
        shape[dim] = length
        total, at = grad.new_zeros(shape), 0
        for start, stop in positions:
            total.narrow(dim, start, stop - start).copy_(grad.narrow(dim, at, stop - start))
            at += stop - start
        dist.all_reduce(total, group=group)
        return along(total, dim, positions), None, None, None, None


def enter(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a tensor that is equal on all ranks, as input of a different computation on each rank; backward sums
    gradients.
    """
    entered: Tensor = _Enter.apply(tensor, group)  # type: ignore[no-untyped-call]
    return entered


def leave(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of a tensor over all ranks, as input of the same computation on each rank; backward keeps
    gradients.
    """
    total: Tensor = _Leave.apply(tensor, group)  # type: ignore[no-untyped-call]
    return total


def gather(part: Tensor, widths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Return all ranks' shards joined along the last dim, as input of the same computation on each rank.

    Args:
        part: this rank's shard.
        widths: for each rank, the length of the last dim of its shard.
        group: the process group of the ranks that join their shards.
    """
    joined: Tensor = _Gather.apply(part, widths, group)  # type: ignore[no-untyped-call]
    return joined


def scatter(whole: Tensor, widths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Return this rank's slice, along the last dim, of a tensor that is equal on all ranks; the arguments are those of
    `gather`.
    """
    local_part: Tensor = _Scatter.apply(whole, widths, group)  # type: ignore[no-untyped-call]
    return local_part


def sum_shared(tensor: Tensor, dim: int, positions: Intervals, length: int, group: dist.ProcessGroup) -> Tensor:
    """Return a parameter whose elements several ranks have and use; backward sums the gradients that these ranks
    compute.

    Args:
        tensor: this rank's shard of the parameter.
        dim: the dim along which ranks have different indices.
        positions: the indices along `dim` that this rank has.
        length: length of `dim` in the whole parameter.
        group: the process group of the ranks that have shards of the parameter.
    """
    with_summed_gradient: Tensor = _SumShared.apply(tensor, dim, positions, length, group)  # type: ignore[no-untyped-call]
    return with_summed_gradient


WEIGHT = "weight"


@dataclass(frozen=True, slots=True, eq=False)
class ParameterCut:
    """How one parameter of a module is cut over the tensor-parallel ranks."""

    mesh: DeviceMesh
    """Mesh of the tensor-parallel ranks, with one dim."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    dim: int
    """Index of the dim along which ranks may have different indices."""
    positions_by_rank: tuple[Intervals, ...]
    """For each rank, the indices along `dim` that the rank has."""
    shared: bool
    """Whether several ranks have the same elements and use them for different heads, so that gradients are summed."""
    record: Record
    """The cut as a record of DeepSpeed's universal-checkpoint metadata."""

    def __deepcopy__(self, _: Any) -> ParameterCut:
        """Return the same object, because a copy of the model is on the same mesh."""
        return self

    @property
    def rank(self) -> int:
        """This rank's index in the mesh."""
        return self.mesh.get_local_rank()

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group of the tensor-parallel ranks."""
        return self.mesh.get_group()

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of indices along the cut dim on each rank."""
        return tuple(count_positions(each) for each in self.positions_by_rank)

    @property
    def first(self) -> bool:
        """Whether no lower rank has the same indices as this rank."""
        return self.positions_by_rank.index(self.positions_by_rank[self.rank]) == self.rank

    def unshared_spans(self, positions: Intervals) -> list[tuple[int, int]]:
        """Return which of this rank's indices no lower rank has.

        Args:
            positions: this rank's indices along the cut dim, in local order.

        Returns:
            Ranges `[start, stop)` of indices in this rank's shard.
        """
        before = sorted(span for each in self.positions_by_rank[: self.rank] for span in each)
        spans, at = [], 0
        for start, stop in positions:
            base, new = at - start, start  # ranges of two ranks may overlap partly
            for first, last in before:
                if new < min(first, stop):
                    spans.append((base + new, base + min(first, stop)))
                new = max(new, last)
            if new < stop:
                spans.append((base + new, base + stop))
            at += stop - start
        return spans

    @property
    def placement(self) -> Shard | Replicate | None:
        """The DTensor placement that describes this cut; None if no DTensor placement can describe it."""
        count = self.shape[self.dim] if self.shape else 0
        if all(each == whole(count) for each in self.positions_by_rank):
            return Replicate()
        chunks = [torch_chunk(count, len(self.positions_by_rank), rank) for rank in range(len(self.positions_by_rank))]
        return Shard(self.dim) if self.positions_by_rank == tuple((chunk,) for chunk in chunks) else None

    @property
    def share(self) -> Share | None:
        """This rank's share, in the form that quantized tensors use; None if the rank has the whole parameter."""
        if isinstance(self.placement, Replicate):
            return None
        return Share(self.group, self.shape, self.dim, self.positions_by_rank[self.rank])

    def tile_refusal(self, quantizer: Quantizer) -> Refusal | None:
        """Return the error for a cut that divides a tile of a quantizer; None if all cuts are between tiles."""
        return None if self.share is None else tile_refusal(quantizer, self.shape, self.dim, self.positions_by_rank)

    def take(self, tensor: Tensor) -> Tensor:
        """Copy this rank's shard out of a whole tensor; of a quantized tensor, its codes and scales."""
        if isinstance(tensor, QuantizedTensor):
            share = self.share
            return tensor.clone() if share is None else cut_share(tensor, share)
        if not tensor.dim():
            return tensor.clone()
        return along(tensor, self.dim, self.positions_by_rank[self.rank]).contiguous()


def record_cut(module: nn.Module, name: str, cut: ParameterCut) -> None:
    """Record on a module how one of its parameters is cut."""
    module.__dict__.setdefault(CUTS, {})[name] = cut


def cuts_of(module: nn.Module) -> Mapping[str, ParameterCut]:
    """Return parameter name -> cut, for the parameters directly in a module; empty if the module is not cut."""
    by_name: Mapping[str, ParameterCut] = module.__dict__.get(CUTS, {})
    return by_name


def cut_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, ParameterCut]]:
    """Yield (name, parameter, cut) for each parameter of a cut model; a tied parameter is yielded under its first name
    only.
    """
    yielded: set[int] = set()
    for path, module in model.named_modules():
        for name, cut in cuts_of(module).items():
            parameter = module._parameters[name]
            if parameter is not None and id(parameter) not in yielded:
                yielded.add(id(parameter))
                yield f"{path}.{name}" if path else name, parameter, cut


def sums_outputs(module: nn.Module) -> bool:
    """Return whether ranks that compute the same outputs of a layer sum the outputs' gradients, and not the parameters'
    gradients.

    Ranks sum the outputs' gradients if these gradients are quantized before they are multiplied. In this case the sum
    of the gradients is quantized, as on a single rank, and not the term of each rank.
    """
    cut, weight = cuts_of(module).get(WEIGHT), module._parameters.get(WEIGHT)
    if cut is None or weight is None or not cut.shared:
        return False
    local_weight = raw_local(weight)
    return isinstance(local_weight, QuantizedTensor) and local_weight.quantizer.multiplies_codes


def local(module: nn.Module, name: str) -> Tensor | None:
    """Return this rank's shard of a parameter, with which the rank computes."""
    parameter = module._parameters[name]
    if parameter is None:
        return None
    own_values = local_with_grad(parameter)
    cut = cuts_of(module).get(name)
    if cut is None or not cut.shared or sums_outputs(module):
        return own_values
    return sum_shared(own_values, cut.dim, cut.positions_by_rank[cut.rank], cut.shape[cut.dim], cut.group)


def replace_parameter(parameter: nn.Parameter, cut: ParameterCut, *, dtensor: bool) -> nn.Parameter:
    """Return the cut parameter that replaces a whole parameter.

    Args:
        parameter: the whole parameter.
        cut: how the parameter is cut.
        dtensor: whether to create a DTensor, if placements of a DTensor can describe the cut.
    """
    if isinstance(parameter, DTensor):
        return _within(parameter, cut)
    part = cut.take(parameter.detach())
    placement = cut.placement
    if dtensor and placement is not None:
        cut_tensor: Tensor = as_dtensor(part, cut.mesh, [placement], parameter.shape, parameter.stride())
        return nn.Parameter(cut_tensor, requires_grad=parameter.requires_grad)
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


def _within(parameter: nn.Parameter, cut: ParameterCut) -> nn.Parameter:
    """Return the cut parameter of experts that expert parallelism has divided; each expert is cut separately."""
    assert isinstance(parameter, DTensor)
    if isinstance(cut.placement, Replicate):
        return parameter
    part = cut.take(local_of(parameter))
    shape = (parameter.shape[0], *part.shape[1:])
    cut_tensor = as_dtensor(part, parameter.device_mesh, parameter.placements, shape, part.stride())
    return nn.Parameter(cut_tensor, requires_grad=parameter.requires_grad)


def mark_parts(module: nn.Module) -> None:
    """Mark each parameter of a module with the part of the whole parameter that it is; DTensors that describe their
    part are skipped.
    """
    for name, cut in cuts_of(module).items():
        parameter = module._parameters[name]
        if parameter is None or isinstance(cut.placement, Replicate):
            continue
        if isinstance(parameter, DTensor) and parameter.device_mesh == cut.mesh:
            continue
        part = Part(cut.shape, cut_positions(cut))
        record_part(module, name, part)
        mark(parameter, part)


def cut_positions(cut: ParameterCut) -> tuple[Intervals, ...]:
    """Return, for each dim of the whole parameter, the indices that this rank has."""
    return tuple(
        cut.positions_by_rank[cut.rank] if dim == cut.dim else whole(count) for dim, count in enumerate(cut.shape)
    )


@dataclass(slots=True)
class _Sum:
    """Sum of the squared gradients of all parameters that are divided over the same ranks."""

    squares: Tensor
    """Sum of squares on this rank; after `reduce` was called, over all ranks."""
    last: dist.ProcessGroup | None
    """Ranks over which experts are divided. The sum is reduced over these ranks last, because ranks without experts
    take part in this reduction but in no other.
    """
    groups: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    """Ranks -> process group, for all groups except `last`, in the order in which all ranks reduce over them."""

    def add_groups(self, groups: list[dist.ProcessGroup]) -> None:
        """Add process groups of ranks that have different parts of the same parameters."""
        last_ranks = None if self.last is None else dist.get_process_group_ranks(self.last)
        ranks_of_groups = ((dist.get_process_group_ranks(group), group) for group in groups)
        self.groups |= {tuple(ranks): group for ranks, group in ranks_of_groups if ranks != last_ranks}

    def reduce(self) -> Tensor:
        """Return the sum over the ranks of all groups."""
        for group in (*self.groups.values(), *([] if self.last is None else [self.last])):
            dist.all_reduce(self.squares, group=group)
        return self.squares


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Limit the 2-norm of a cut model's gradients, in place; all ranks that have a part of the model must call this.

    `torch.nn.utils.clip_grad_norm_` does the same if all parameters are DTensors on one mesh. If only some parameters
    are DTensors, torch's function raises; if none are, it would treat this rank's shards as the whole model.

    Args:
        model: a model cut by `tensor_parallel`; its experts may be divided, and `fully_shard` may have sharded it.
        max_norm: the maximum 2-norm.

    Returns:
        The norm of all gradients before clipping.

    Raises:
        Refused: with the code UNSUPPORTED if `tensor_parallel` has not cut the model, or parameters were added after
            the cut.
    """
    mark_all(model)
    trained = [(name, parameter, cut) for name, parameter, cut in cut_parameters(model) if parameter.grad is not None]
    if not trained:
        raise refuse("UNSUPPORTED", "no cut parameter of this model has a gradient")
    trained_ids = {id(parameter) for _, parameter, _ in trained}
    uncut = [
        name for name, total in model.named_parameters() if total.grad is not None and id(total) not in trained_ids
    ]
    if uncut:
        message = f"{len(uncut)} parameters with gradients were added after the model was cut: {', '.join(uncut[:4])}"
        raise refuse(
            "UNSUPPORTED", message, hint="Clip their gradients separately; which ranks share them is not known."
        )
    layers = [layer for layer in model.modules() if isinstance(layer, GroupedLinear) and layer.ep is not None]
    zero = torch.zeros((), dtype=torch.float64, device=local_of(trained[0][1]).device)
    dense_sum, expert_sums = _Sum(zero.clone(), None), {layer.ep: _Sum(zero.clone(), _group(layer)) for layer in layers}
    sum_of_parameter = {id(parameter): expert_sums[layer.ep] for layer in layers for parameter in layer.parameters()}
    for total in (dense_sum, *expert_sums.values()):
        total.add_groups([trained[0][2].group])  # all ranks must reduce in the same order
    rank, grads = dist.get_rank(), []
    for name, parameter, cut in trained:
        grad, counts_here, sum_of_squares = parameter.grad, True, sum_of_parameter.get(id(parameter), dense_sum)
        assert grad is not None
        if isinstance(grad, DTensor):
            mesh = grad.device_mesh
            for number, placement in enumerate(grad.placements):
                counts_here &= not placement.is_replicate() or mesh.get_local_rank(number) == 0
            sum_of_squares.add_groups([mesh.get_group(number) for number in range(mesh.ndim)])
            grad = grad.to_local()
        grads.append(grad)
        if counts_here and grad.dim():
            positions = placement_of(parameter, rank, name).positions(cut.shape)[rank][cut.dim]
            for start, stop in cut.unshared_spans(positions):
                sum_of_squares.squares += grad.narrow(cut.dim, start, stop - start).double().square().sum()
    norm = torch.stack([total.reduce() for total in (dense_sum, *expert_sums.values())]).sum().sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(scale.to(grad.dtype))
    return norm.float()


def _group(layer: GroupedLinear) -> dist.ProcessGroup:
    assert layer.ep is not None
    return layer.ep.get_group()
