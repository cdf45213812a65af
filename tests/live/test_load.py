"""Loading: every local shard equals the full tensor cut by torch itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.live.ranks import run
from transaxle.live.load import load

FULL = {
    "rows": torch.arange(70, dtype=torch.float32).reshape(10, 7),
    "wide": torch.arange(3 * 4096, dtype=torch.bfloat16).reshape(3, 4096),
    "experts": torch.arange(10 * 6 * 7, dtype=torch.float32).reshape(10, 6, 7),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 3),
    "codes": torch.arange(256, dtype=torch.uint8).reshape(16, 16).view(torch.float8_e4m3fn),
}
PLACEMENTS: dict[str, list[tuple[Any, Any]]] = {
    "rows": [(Shard(0), Shard(0)), (Shard(0), Shard(1)), (_StridedShard(0, split_factor=2), Shard(0))],
    "wide": [(Shard(-1), Replicate()), (Shard(1), Shard(0)), (Replicate(), Replicate())],
    "experts": [(Shard(1), Shard(0)), (Shard(2), Shard(0)), (Shard(-1), Shard(1))],
    "scalar": [(Replicate(), Replicate())],
    "empty": [(Shard(0), Shard(1))],
    "codes": [(Shard(0), Shard(1)), (Replicate(), Shard(0))],
}


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def _dict(rank: int, world: int, folder: str, shape: tuple[int, ...], once: bool) -> dict[str, int]:
    mesh = init_device_mesh("cpu", shape)
    state, truth = {}, {}
    for name, choices in PLACEMENTS.items():
        for number, placements in enumerate(choices):
            key = f"{name}.{number}"
            cut = distribute_tensor(FULL[name].clone(), mesh, placements, src_data_rank=None)
            truth[key] = _octets(cut.to_local()).clone()
            cut.to_local().view(-1).view(torch.uint8).fill_(77)
            state[key] = cut
    report = load(state, folder, broadcast_replicated=once)
    for key, value in state.items():
        assert torch.equal(_octets(value.to_local()), truth[key]), key
    assert report.bytes_written == report.bytes_needed == sum(len(t) for t in truth.values())
    return {"read": report.bytes_read, "needed": report.bytes_needed, "received": report.bytes_received}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("source")
    tensors = {f"{name}.{n}": FULL[name].clone() for name, choices in PLACEMENTS.items() for n in range(len(choices))}
    save_file(tensors, Path(place, "model.safetensors"))
    return str(place)


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize(("world", "shape"), [(1, (1, 1)), (2, (2, 1)), (3, (1, 3)), (4, (2, 2)), (8, (4, 2))])
def test_every_shard_is_the_one_torch_cuts(folder: str, world: int, shape: tuple[int, ...], once: bool) -> None:
    found = run(world, _dict, folder, shape, once)
    if once and world > 1:
        assert sum(each["received"] for each in found) > 0
        assert sum(each["read"] for each in found) < sum(each["needed"] for each in found)
    if not once:
        assert all(each["received"] == 0 for each in found)
