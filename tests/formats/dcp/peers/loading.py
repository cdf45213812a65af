"""What plain torch reads of ours: each rank loads a checkpoint and holds it to the truth.

`run` loads `checkpoint` of a folder twice: into whole tensors, and into DTensors cut along their first dim, their last,
and both ways over a mesh of two dims. Every element on every rank must be that of `truth.pt`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard

from tests.formats.dcp.peers.world import CHECKPOINT, TRUTH, group, line, local, octets


def blank(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same type and shape, and of bytes that no test tensor has."""
    return torch.full((tensor.nbytes,), 0xAA, dtype=torch.uint8).view(tensor.dtype).reshape(tensor.shape)


def cuts(world: int) -> list[tuple[Any, list[Placement]]]:
    """A mesh, and placements over it."""
    found: list[tuple[Any, list[Placement]]] = [(line(world), [Shard(0)]), (line(world), [Shard(-1)])]
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2))
        found += [(mesh, [Shard(0), Shard(0)]), (mesh, [Shard(0), Shard(-1)])]
    return found


def run(rank: int, world: int, folder: str) -> None:
    with group(rank, world, folder):
        truth = torch.load(Path(folder, TRUTH))
        target = str(Path(folder, CHECKPOINT))
        whole = {name: blank(tensor) for name, tensor in truth.items()}
        load(whole, checkpoint_id=target)
        for name, tensor in truth.items():
            assert octets(whole[name]) == octets(tensor), name
        for mesh, placements in cuts(world):
            wanted = {name: local(tensor, mesh, *placements) for name, tensor in truth.items() if tensor.ndim > 1}
            given = {
                name: DTensor.from_local(
                    blank(tensor.to_local()), mesh, placements, shape=tensor.shape, stride=tensor.stride()
                )
                for name, tensor in wanted.items()
            }
            load(given, checkpoint_id=target)
            for name, tensor in wanted.items():
                assert octets(given[name].to_local()) == octets(tensor.to_local()), (name, placements)
