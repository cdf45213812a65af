"""Local tensors: what this rank holds of a tensor, and DTensors made of what each rank holds.

A DTensor shows the whole tensor and keeps a part of it; other tensors are their own part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

TO_LOCAL = "to_local"
"""Method that returns the part; DTensors have it, and so has a tensor that `torch.distributed.checkpoint` saves chunk
by chunk (`transaxle.live.sharding.dcp_chunks`)."""


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor: detached, sharing its storage."""
    to_local = getattr(tensor, TO_LOCAL, None)
    if to_local is None:
        return tensor.detach()
    with torch.no_grad():  # a DTensor then gives what it keeps, and no view of it: four times as fast
        local: torch.Tensor = to_local()
    return local.detach()


def local_with_grad(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor, through which gradients flow back into it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def stored_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the very object that a DTensor keeps for this rank, of whatever tensor class; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def as_dtensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
) -> DTensor:
    """Return the DTensor of which this rank holds `local`; no rank is asked whether that is so.

    Args:
        local: what this rank holds; it is not copied.
        mesh: the ranks.
        placements: one for each dim of the mesh.
        shape: of the whole tensor.
        stride: of the whole tensor; None: row-major.
    """
    steps = torch.empty(tuple(shape), device="meta").stride() if stride is None else tuple(stride)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=steps)


def placed_like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of other values as a tensor that has the shape and the placements of `tensor`."""
    if not isinstance(tensor, DTensor):
        return local
    return as_dtensor(local, tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
