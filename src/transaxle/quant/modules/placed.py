"""How a parameter lies on its mesh: which ranks share it out, what this one has, and other values placed as it is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from transaxle.axes.geometry.chunk import ChunkRule, Intervals, MeshCut, Replicated, StridedShard, place, whole
from transaxle.axes.geometry.chunk import Shard as Chunk
from transaxle.errors import refuse
from transaxle.quant.frame.tp_share import Share, along
from transaxle.quant.tensor.tensor import QuantizedTensor


def cut_of(placement: Placement, name: str) -> tuple[int | None, ChunkRule]:
    """Return the dim that a torch placement cuts, None for none, and how.

    Args:
        placement: of one mesh dim.
        name: the tensor's name, for refusals.

    Raises:
        Refused: UNSUPPORTED for `Partial`.
    """
    if isinstance(placement, _StridedShard):
        return placement.dim, StridedShard(int(placement.split_factor))
    if placement.is_shard():
        return placement.dim, Chunk()  # type: ignore[attr-defined]  # `is_shard` does not narrow
    if placement.is_replicate():
        return None, Replicated()
    message = f"its placement {placement} is no cut: ranks hold terms of a sum"
    raise refuse("UNSUPPORTED", message, tensor=name, hint="redistribute it to Replicate() or Shard(dim) first")


def held_by(parameter: torch.Tensor) -> tuple[Intervals, ...]:
    """Return for each dim of a whole parameter which positions this rank has, in local order."""
    if not isinstance(parameter, DTensor):
        return tuple(map(whole, parameter.shape))
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # of a rank outside of the mesh there are no parameters
    rules = (cut_of(placement, "") for placement in parameter.placements)
    steps = zip(rules, mesh.shape, coordinate, strict=True)
    return place(tuple(parameter.shape), [MeshCut(dim, size, at, rule) for (dim, rule), size, at in steps])


def take(values: torch.Tensor, held: Sequence[Intervals]) -> torch.Tensor:
    """Return of a whole tensor the positions held, dim by dim; itself, if these are all."""
    for dim, intervals in enumerate(held):
        if intervals != whole(values.shape[dim]):
            values = along(values, dim, intervals)
    return values


def share_of(parameter: torch.Tensor) -> Share | None:
    """What a quantized parameter is a part of, where tensor parallelism has cut it."""
    inner = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    assert isinstance(inner, QuantizedTensor)
    return inner.frame.share


def cut_along(parameter: DTensor) -> int | None:
    """The dim of the mesh along which tensor parallelism has cut a quantized parameter; None if it does not say so."""
    share = share_of(parameter)
    return None if share is None or tuple(parameter.shape) != share.shape else share.place_in(parameter.device_mesh)


def group_of(parameter: torch.Tensor) -> dist.ProcessGroup | None:
    """The ranks that hold the rows of a parameter's copy that this rank has a part of.

    Those among which tensor parallelism has cut it are others, which the tensor itself knows.
    """
    if not isinstance(parameter, DTensor):
        return None
    own = cut_along(parameter)
    cut = [n for n, placement in enumerate(parameter.placements) if not placement.is_replicate() and n != own]
    if not cut:
        return None
    placement = parameter.placements[cut[0]]
    if len(cut) > 1 or not isinstance(placement, Shard | _StridedShard) or placement.dim:
        raise refuse(
            "UNSUPPORTED",
            f"a quantized parameter with placements {parameter.placements}",
            hint="cut it along dim 0, over one mesh dim",
        )
    return parameter.device_mesh.get_group(cut[0])


def placed_like(parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return values of this rank's part as a tensor with the parameter's shape and placements."""
    if not isinstance(parameter, DTensor):
        return values
    return DTensor.from_local(
        values,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
