"""How the parameters of a cut module are cut over the mesh; the module keeps a record for each.

Collectives between what all ranks compute alike and what each computes for itself; each has its transpose.

    enter     identity             gradients are summed      before a column-parallel layer
    leave     values are summed    identity                  after a row-parallel layer
    gather    parts are joined     own part of the gradient  after what is alone in its cut: logits, hidden embeddings
    scatter   own part             gradients are joined      before a row-parallel layer whose input is whole
    summed    identity             gradients are summed,     parameters that several ranks hold and use for different
                                   each at its place         heads

The gradient norm of a cut model, in which each element of the whole model counts once.
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
    """Join all ranks' parts along the last dim; gloo and NCCL want parts of one size, so they are padded."""
    most = max(widths)
    padded = torch.nn.functional.pad(part, (0, most - part.shape[-1])).contiguous()
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


class _Summed(torch.autograd.Function):
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
    """Return a tensor that is equal on all ranks; from here on each rank computes something of its own with it."""
    entered: Tensor = _Enter.apply(tensor, group)  # type: ignore[no-untyped-call]
    return entered


def leave(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over all ranks; from here on all compute the same with it."""
    total: Tensor = _Leave.apply(tensor, group)  # type: ignore[no-untyped-call]
    return total


def gather(part: Tensor, widths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Return all ranks' parts joined along the last dim; from here on all compute the same with them.

    Args:
        part: this rank's.
        widths: length of the last dim on every rank.
        group: the ranks.
    """
    joined: Tensor = _Gather.apply(part, widths, group)  # type: ignore[no-untyped-call]
    return joined


def scatter(whole: Tensor, widths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of the last dim of a tensor that is equal on all ranks; see `gather`."""
    local_part: Tensor = _Scatter.apply(whole, widths, group)  # type: ignore[no-untyped-call]
    return local_part


def summed(tensor: Tensor, dim: int, positions: Intervals, length: int, group: dist.ProcessGroup) -> Tensor:
    """Return a parameter some of whose elements other ranks hold and use too: the gradients of these are summed.

    Args:
        tensor: this rank's part.
        dim: the dim in which ranks hold different positions.
        positions: the positions that this rank holds.
        length: of that dim in the whole parameter.
        group: the ranks.
    """
    with_summed_gradient: Tensor = _Summed.apply(tensor, dim, positions, length, group)  # type: ignore[no-untyped-call]
    return with_summed_gradient


WEIGHT = "weight"


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """How one parameter of a module is cut."""

    mesh: DeviceMesh
    """The tensor-parallel ranks."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    dim: int
    """The dim in which ranks may hold different positions."""
    held: tuple[Intervals, ...]
    """The positions of each rank."""
    shared: bool
    """Several ranks hold an element and use it for different heads: their gradients are summed."""
    record: Record
    """How it is cut, as DeepSpeed's metadata says it."""

    def __deepcopy__(self, _: Any) -> Kept:
        """A copy of the model is on the same mesh."""
        return self

    @property
    def rank(self) -> int:
        """This rank's place."""
        return self.mesh.get_local_rank()

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks."""
        return self.mesh.get_group()

    @property
    def widths(self) -> tuple[int, ...]:
        """Positions of the dim on every rank."""
        return tuple(count_positions(each) for each in self.held)

    @property
    def first(self) -> bool:
        """Whether this rank is the first that holds its share."""
        return self.held.index(self.held[self.rank]) == self.rank

    def owned(self, positions: Intervals) -> list[tuple[int, int]]:
        """Return those positions of this rank that no rank before it holds.

        Args:
            positions: of the dim, in local order.

        Returns:
            Spans of local positions.
        """
        before = sorted(span for each in self.held[: self.rank] for span in each)
        spans, at = [], 0
        for start, stop in positions:
            base, new = at - start, start  # spans may touch: one of q's and of k's rows may be half another rank's
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
        """The DTensor placement that means this cut; None where none does."""
        count = self.shape[self.dim] if self.shape else 0
        if all(each == whole(count) for each in self.held):
            return Replicate()
        chunks = [torch_chunk(count, len(self.held), rank) for rank in range(len(self.held))]
        return Shard(self.dim) if self.held == tuple((chunk,) for chunk in chunks) else None

    @property
    def share(self) -> Share | None:
        """This rank's share, as quantized tensors know it; None where the rank has everything."""
        if isinstance(self.placement, Replicate):
            return None
        return Share(self.group, self.shape, self.dim, self.held[self.rank])

    def tile_refusal(self, quantizer: Quantizer) -> Refusal | None:
        """Return the refusal of a cut that goes through a tile of a quantizer; None where the cut is between tiles."""
        return None if self.share is None else tile_refusal(quantizer, self.shape, self.dim, self.held)

    def take(self, tensor: Tensor) -> Tensor:
        """Return this rank's share of a whole tensor, in storage of its own; of a quantized one, the codes."""
        if isinstance(tensor, QuantizedTensor):
            share = self.share
            return tensor.clone() if share is None else cut_share(tensor, share)
        if not tensor.dim():
            return tensor.clone()
        return along(tensor, self.dim, self.held[self.rank]).contiguous()


def keep(module: nn.Module, name: str, kept: Kept) -> None:
    """Let a module remember how one of its parameters is cut."""
    module.__dict__.setdefault(CUTS, {})[name] = kept


def kept_by(module: nn.Module) -> Mapping[str, Kept]:
    """Return how a module's own parameters are cut; empty for a module that is not cut."""
    by_name: Mapping[str, Kept] = module.__dict__.get(CUTS, {})
    return by_name


def everything(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Kept]]:
    """Yield (name, parameter, how it is cut) of a cut model; a tied parameter once, under its first name."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for own, kept in kept_by(module).items():
            parameter = module._parameters[own]
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{path}.{own}" if path else own, parameter, kept


def sums_outputs(module: nn.Module) -> bool:
    """Tell whether the gradients of a layer's outputs are summed where ranks share them, not those of its parameters.

    So it is where gradients are quantized before they are multiplied: the sum is, as on one rank, and not its parts.
    """
    kept, weight = kept_by(module).get(WEIGHT), module._parameters.get(WEIGHT)
    if kept is None or weight is None or not kept.shared:
        return False
    own = raw_local(weight)
    return isinstance(own, QuantizedTensor) and own.quantizer.multiplies_codes


def local(module: nn.Module, name: str) -> Tensor | None:
    """Return the tensor that this rank computes with: its part of a parameter."""
    parameter = module._parameters[name]
    if parameter is None:
        return None
    own_values = local_with_grad(parameter)
    kept = kept_by(module).get(name)
    if kept is None or not kept.shared or sums_outputs(module):
        return own_values
    return summed(own_values, kept.dim, kept.held[kept.rank], kept.shape[kept.dim], kept.group)


def replaced(parameter: nn.Parameter, kept: Kept, *, dtensor: bool) -> nn.Parameter:
    """Return the parameter that takes the place of a whole one.

    Args:
        parameter: the whole one.
        kept: how it is cut.
        dtensor: make a DTensor where its placements can say how the parameter is cut.
    """
    if isinstance(parameter, DTensor):
        return _within(parameter, kept)
    own = kept.take(parameter.detach())
    placement = kept.placement
    if dtensor and placement is not None:
        cut_tensor: Tensor = as_dtensor(own, kept.mesh, [placement], parameter.shape, parameter.stride())
        return nn.Parameter(cut_tensor, requires_grad=parameter.requires_grad)
    return nn.Parameter(own, requires_grad=parameter.requires_grad)


def _within(parameter: nn.Parameter, kept: Kept) -> nn.Parameter:
    """Return the parameter for experts that other ranks share out: each expert is cut by itself."""
    assert isinstance(parameter, DTensor)
    if isinstance(kept.placement, Replicate):
        return parameter
    own = kept.take(local_of(parameter))
    shape = (parameter.shape[0], *own.shape[1:])
    cut_tensor = as_dtensor(own, parameter.device_mesh, parameter.placements, shape, own.stride())
    return nn.Parameter(cut_tensor, requires_grad=parameter.requires_grad)


def tell_parts(module: nn.Module) -> None:
    """Mark a module's parameters with the part of the whole that they are, unless a DTensor on the mesh says so."""
    for name, kept in kept_by(module).items():
        parameter = module._parameters[name]
        if parameter is None or isinstance(kept.placement, Replicate):
            continue
        if isinstance(parameter, DTensor) and parameter.device_mesh == kept.mesh:
            continue
        part = Part(kept.shape, positions_of(kept))
        record_part(module, name, part)
        mark(parameter, part)


def positions_of(kept: Kept) -> tuple[Intervals, ...]:
    """Return what this rank holds, per dim."""
    return tuple(kept.held[kept.rank] if dim == kept.dim else whole(count) for dim, count in enumerate(kept.shape))


@dataclass(slots=True)
class _Sum:
    """The squares of gradients whose parts the same ranks hold."""

    squares: Tensor
    """Their sum; of this rank's, until `reduced`."""
    last: dist.ProcessGroup | None
    """Ranks that share out experts: a rank without any takes part, and knows of no others."""
    groups: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    """The other ranks, in the order in which all add them up."""

    def among(self, groups: list[dist.ProcessGroup]) -> None:
        """Add ranks that hold other parts."""
        own = None if self.last is None else dist.get_process_group_ranks(self.last)
        named = ((dist.get_process_group_ranks(group), group) for group in groups)
        self.groups |= {tuple(ranks): group for ranks, group in named if ranks != own}

    def reduced(self) -> Tensor:
        """Return the sum over all ranks."""
        for group in (*self.groups.values(), *([] if self.last is None else [self.last])):
            dist.all_reduce(self.squares, group=group)
        return self.squares


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Clip the gradients of a cut model to a 2-norm, in place; collective over all ranks that hold any of it.

    `torch.nn.utils.clip_grad_norm_` does the same if all parameters are DTensors on one mesh. If only some are, it
    raises; if none are, it would take this rank's part for the whole model.

    Args:
        model: a model cut by `tensor_parallel`; its experts may be divided, and `fully_shard` may have sharded it.
        max_norm: the largest 2-norm.

    Returns:
        The norm before clipping.

    Raises:
        Refused: UNSUPPORTED for a model that is not cut, and for parameters added after the cut.
    """
    mark_all(model)
    found = [(name, parameter, kept) for name, parameter, kept in everything(model) if parameter.grad is not None]
    if not found:
        raise refuse("UNSUPPORTED", "no cut parameter of this model has a gradient")
    known = {id(parameter) for _, parameter, _ in found}
    others = [name for name, each in model.named_parameters() if each.grad is not None and id(each) not in known]
    if others:
        message = f"{len(others)} parameters with gradients were added after the model was cut: {', '.join(others[:4])}"
        raise refuse(
            "UNSUPPORTED", message, hint="Clip their gradients separately; which ranks share them is not known."
        )
    layers = [layer for layer in model.modules() if isinstance(layer, GroupedLinear) and layer.ep is not None]
    none = torch.zeros((), dtype=torch.float64, device=local_of(found[0][1]).device)
    rest, shared_out = _Sum(none.clone(), None), {layer.ep: _Sum(none.clone(), _group(layer)) for layer in layers}
    of = {id(parameter): shared_out[layer.ep] for layer in layers for parameter in layer.parameters()}
    for each in (rest, *shared_out.values()):
        each.among([found[0][2].group])  # the tensor-parallel ranks first: in another order than others they would wait
    rank, grads = dist.get_rank(), []
    for name, parameter, kept in found:
        grad, mine, own = parameter.grad, True, of.get(id(parameter), rest)
        assert grad is not None
        if isinstance(grad, DTensor):
            mesh = grad.device_mesh
            for number, placement in enumerate(grad.placements):
                mine &= not placement.is_replicate() or mesh.get_local_rank(number) == 0
            own.among([mesh.get_group(number) for number in range(mesh.ndim)])
            grad = grad.to_local()
        grads.append(grad)
        if mine and grad.dim():
            held = placement_of(parameter, rank, name).positions(kept.shape)[rank][kept.dim]
            for start, stop in kept.owned(held):
                own.squares += grad.narrow(kept.dim, start, stop - start).double().square().sum()
    norm = torch.stack([each.reduced() for each in (rest, *shared_out.values())]).sum().sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(scale.to(grad.dtype))
    return norm.float()


def _group(layer: GroupedLinear) -> dist.ProcessGroup:
    assert layer.ep is not None
    return layer.ep.get_group()
