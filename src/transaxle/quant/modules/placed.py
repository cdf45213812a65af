"""How a quantized parameter lies on its mesh: among which ranks it is cut, and by whom."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from transaxle.errors import refuse
from transaxle.quant.frame.band import Band
from transaxle.quant.frame.tp_share import Share
from transaxle.quant.tensor.tensor import QuantizedTensor
from transaxle.torch_tensors.local_tensor import stored_local


def share_of(parameter: torch.Tensor) -> Share | None:
    """The share that this rank has of a quantized parameter cut by tensor parallelism; None if it was not cut."""
    inner = stored_local(parameter)
    assert isinstance(inner, QuantizedTensor)
    return inner.frame.share


def cut_along(parameter: DTensor) -> int | None:
    """The dim of the mesh along which tensor parallelism has cut a quantized parameter; None if it does not say so."""
    share = share_of(parameter)
    return None if share is None or tuple(parameter.shape) != share.shape else share.place_in(parameter.device_mesh)


def band_of(parameter: torch.Tensor) -> Band | None:
    """The band that this rank has of a quantized parameter; None if no cut left a part of each row, or each matrix."""
    inner = stored_local(parameter)
    assert isinstance(inner, QuantizedTensor)
    return inner.frame.band


def group_of(parameter: torch.Tensor) -> dist.ProcessGroup | None:
    """The ranks that together hold all of this rank's copy of a parameter (FSDP2's); None without such a cut.

    Ranks of a tensor-parallel cut are not among them; the tensor's share knows those.
    """
    if not isinstance(parameter, DTensor):
        return None
    own = cut_along(parameter)
    cut = [n for n, placement in enumerate(parameter.placements) if not placement.is_replicate() and n != own]
    if not cut:
        return None
    placement, band = parameter.placements[cut[0]], band_of(parameter)
    along = 0 if band is None else band.dim
    if band is None and parameter.device_mesh.size(cut[0]) == 1:
        return None
    if len(cut) > 1 or not isinstance(placement, Shard | _StridedShard) or placement.dim != along:
        raise refuse(
            "UNSUPPORTED",
            f"a quantized parameter cannot have the placements {parameter.placements}",
            hint="Cut it with fully_shard, over one mesh dim.",
        )
    return parameter.device_mesh.get_group(cut[0])
