"""The gradient norm of a cut model, in which each element of the whole model counts once."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from transaxle.errors import refuse
from transaxle.nn.grouped_linear import GroupedLinear
from transaxle.parallel.cutting import everything
from transaxle.torch_tensors.local_tensor import local_of
from transaxle.torch_tensors.placement import mark_all, placement_of


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
            held = placement_of(parameter, rank, name).held(kept.shape)[rank][kept.dim]
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
