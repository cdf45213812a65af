"""How a parameter lies on its mesh: which ranks share it out, and other values placed as it is."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from transaxle.errors import refuse


def group_of(parameter: torch.Tensor) -> dist.ProcessGroup | None:
    """The ranks that hold the rows of a parameter's copy that this rank has a part of."""
    if not isinstance(parameter, DTensor):
        return None
    cut = [dim for dim, placement in enumerate(parameter.placements) if isinstance(placement, Shard)]
    if not cut:
        return None
    if len(cut) > 1 or parameter.placements[cut[0]] != Shard(0):
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
