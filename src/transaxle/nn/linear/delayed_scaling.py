"""Delayed gradients of weights: FSDP2 has sharded the parameters again before they exist, so they are reduced here."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from transaxle.errors import refuse
from transaxle.torch_tensors.local_tensor import as_dtensor, placed_like, stored_local

_IGNORED = "_ddp_ignored"
"""Attribute of parameters that DistributedDataParallel was told to ignore."""


def refuse_data_parallel(parameters: Iterable[torch.Tensor]) -> None:
    """Refuse delayed gradients inside DistributedDataParallel, which reduces gradients before these exist.

    Args:
        parameters: the parameters with delayed gradients. Those that DDP was told to ignore are accepted.

    Raises:
        Refused: UNSUPPORTED.
    """
    if DistributedDataParallel._get_active_ddp_module() is None:
        return
    if any(each.requires_grad and not getattr(each, _IGNORED, False) for each in parameters):
        message = (
            "delay_wgrad_compute does not work in DistributedDataParallel: it reduces gradients before backward_dw()"
        )
        raise refuse("UNSUPPORTED", message, hint="Use fully_shard, or delay_wgrad_compute=False.")


def mesh_of(parameter: torch.Tensor) -> DeviceMesh | None:
    """Return the mesh of a parameter; None of one that is not distributed."""
    return parameter.device_mesh if isinstance(parameter, DTensor) else None


def placed(grad: torch.Tensor, parameter: torch.Tensor, before: DeviceMesh | None) -> torch.Tensor:
    """Return a gradient with the placements that its parameter has now; collective if it was sharded since.

    It becomes the mean over the mesh dims that the parameter did not have when it was multiplied. Those are FSDP2's,
    on which each rank computed the gradient from its own rows only.

    Args:
        grad: of all that this rank multiplied; of the parameter's dtype.
        parameter: what it is for.
        before: mesh of the parameter when it was multiplied.
    """
    if not isinstance(parameter, DTensor):
        return grad
    local = _mean(grad, parameter, before).to(stored_local(parameter).device)
    return placed_like(parameter, local)


def _mean(grad: torch.Tensor, parameter: DTensor, before: DeviceMesh | None) -> torch.Tensor:
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    kept = () if before is None else before.mesh_dim_names or ()
    if before is not None and (before == mesh or not names):
        return grad
    added = [dim for dim in range(mesh.ndim) if before is None or names[dim] not in kept]
    if not added:
        return grad
    over = mesh if len(added) == mesh.ndim else mesh[tuple(names[dim] for dim in added)]
    wanted = [_within(parameter.placements[dim]) for dim in added]
    summed = as_dtensor(grad, over, [Partial()] * over.ndim, grad.shape, grad.stride())
    return summed.redistribute(placements=wanted).to_local() / over.size()


def _within(placement: Placement) -> Placement:
    """Return how a mesh dim cuts what the others have left: FSDP2 cuts after expert and tensor parallelism."""
    return Shard(placement.dim) if isinstance(placement, Shard | _StridedShard) else Replicate()
