"""The norm of a cut model's gradients: every element of the whole model once, whoever holds it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from transaxle.errors import refuse
from transaxle.live.part import mark_all
from transaxle.live.placement import placement_of
from transaxle.parallel.cutting import everything


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients of a cut model down to a norm, in place; collective over all ranks that hold any of it.

    `torch.nn.utils.clip_grad_norm_` does the same where all parameters are DTensors on one mesh. Where some are parts,
    it raises; where none are DTensors, it takes this rank's part for the whole.

    Args:
        model: cut by `tensor_parallel`, perhaps sharded by `fully_shard`.
        max_norm: the largest 2-norm.

    Returns:
        The norm before.

    Raises:
        Refused: UNSUPPORTED for a model that is not cut.
    """
    grads = []
    total: Tensor | None = None
    wide: dict[tuple[int, ...], dist.ProcessGroup] = {}
    mark_all(model)
    rank = dist.get_rank()
    for name, parameter, kept in everything(model):
        grad = parameter.grad
        if grad is None:
            continue
        mine = True
        groups = [kept.group]
        if isinstance(grad, DTensor):
            for number, placement in enumerate(grad.placements):
                mine &= not placement.is_replicate() or grad.device_mesh.get_local_rank(number) == 0
                groups.append(grad.device_mesh.get_group(number))
            grad = grad.to_local()
        wide |= {tuple(dist.get_process_group_ranks(group)): group for group in groups}
        grads.append(grad)
        total = grad.new_zeros((), dtype=torch.float64) if total is None else total
        if mine and grad.dim():
            held = placement_of(parameter, rank, name).held(kept.shape)[rank][kept.dim]
            for start, stop in kept.owned(held):
                total += grad.narrow(kept.dim, start, stop - start).double().square().sum()
    if total is None:
        raise refuse("UNSUPPORTED", "no parameter of this model is cut and has a gradient")
    for group in wide.values():  # the tensor-parallel ranks first, on all ranks: in another order they would wait
        dist.all_reduce(total, group=group)
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(scale.to(grad.dtype))
    return norm.float()
