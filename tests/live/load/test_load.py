"""Loading: every local shard equals the full tensor cut by torch itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
    "rows": [
        (Shard(0), Shard(0)),
        (Shard(0), Shard(1)),
        (Replicate(), Shard(1)),
        (_StridedShard(0, split_factor=2), Shard(0)),
    ],
    "wide": [(Shard(-1), Replicate()), (Shard(1), Shard(0)), (Replicate(), Replicate())],
    "experts": [(Shard(1), Shard(0)), (Shard(2), Shard(0)), (Shard(-1), Shard(1)), (Replicate(), Shard(0))],
    "scalar": [(Replicate(), Replicate())],
    "empty": [(Shard(0), Shard(1))],
    "codes": [(Shard(0), Shard(1)), (Replicate(), Shard(0))],
}
WORLDS = [
    (1, (1, 1)), (2, (2, 1)), (3, (1, 3)), (4, (1, 4)), (4, (2, 2)), (8, (2, 4)), (8, (4, 2)), (8, (2, 2, 2)),
]  # fmt: skip
"""Ranks and their mesh: 7 columns over 3, 10 experts over 4. A third dim in front is one of replicas (HSDP)."""


def on(shape: tuple[int, ...], placements: tuple[Any, Any]) -> tuple[Any, ...]:
    """Placements on a mesh of this shape."""
    return (Replicate(),) * (len(shape) - len(placements)) + placements


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def _dict(rank: int, world: int, folder: str, shape: tuple[int, ...], once: bool) -> dict[str, int]:
    mesh = init_device_mesh("cpu", shape)
    state, truth = {}, {}
    for name, choices in PLACEMENTS.items():
        for number, placements in enumerate(choices):
            key = f"{name}.{number}"
            cut = distribute_tensor(FULL[name].clone(), mesh, on(shape, placements), src_data_rank=None)
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


@pytest.mark.oracle
@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize(("world", "shape"), WORLDS)
def test_every_shard_is_the_one_torch_cuts(folder: str, world: int, shape: tuple[int, ...], once: bool) -> None:
    found = run(world, _dict, folder, shape, once)
    if once and world > 1:
        assert sum(each["received"] for each in found) > 0
        assert sum(each["read"] for each in found) < sum(each["needed"] for each in found)
    if not once:
        assert all(each["received"] == 0 for each in found)


CUTS = {"rows": Shard(0), "columns": Shard(1), "both": Replicate()}
"""How each tensor of `large` is cut."""


class Moved(TorchDispatchMode):
    """Bytes that torch's collectives were given."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            self.bytes += sum(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
        return func(*args, **kwargs or {})


def large() -> dict[str, torch.Tensor]:
    """A matrix of 1.5 MB for each cut."""
    rng = np.random.default_rng(0)
    return {name: torch.from_numpy(rng.standard_normal((601, 640), np.float32)) for name in CUTS}


def _moved(rank: int, world: int, folder: str, once: bool) -> dict[str, int]:
    mesh = init_device_mesh("cpu", (world,))
    whole = large()
    state, truth = {}, {}
    for name, cut in CUTS.items():
        state[name] = distribute_tensor(torch.full_like(whole[name], 77), mesh, [cut], src_data_rank=None)
        truth[name] = distribute_tensor(whole[name], mesh, [cut], src_data_rank=None).to_local()
    with CommDebugMode() as comm, Moved() as moved:
        report = load(state, folder, broadcast_replicated=once)
    for name, tensor in state.items():
        assert torch.equal(tensor.to_local(), truth[name]), name
    return {
        "functional": sum(count for op, count in comm.get_comm_counts().items() if not str(op).startswith("c10d.")),
        "counted": comm.get_total_counts(), "moved": moved.bytes, "read": report.bytes_read,
        "needed": report.bytes_needed, "received": report.bytes_received,
    }  # fmt: skip


@pytest.mark.parametrize("once", [True, False])
def test_no_value_passes_through_a_collective_that_need_not(tmp_path: Path, once: bool) -> None:
    """Cuts are read by those who need them; only what all hold alike is sent, and only where that is asked for."""
    world, whole = 3, large()
    save_file(whole, tmp_path / "model.safetensors")
    found = run(world, _moved, str(tmp_path), once)
    shared = whole["both"].nbytes
    needed = sum(each["needed"] for each in found)
    assert needed == whole["rows"].nbytes + whole["columns"].nbytes + world * shared
    assert all(each["functional"] == 0 < each["counted"] for each in found), "the ranks agree, DTensors send nothing"
    received = sum(each["received"] for each in found)
    assert received == ((world - 1) * shared if once else 0)
    assert sum(each["read"] for each in found) == needed - received
    assert all(0 < each["moved"] < (1 << 18) + 2 * each["received"] for each in found), "names and shapes, no values"


def _columns(rank: int, world: int, folder: str, rows: int, columns: int) -> float:
    mesh = init_device_mesh("cpu", (world,))
    state = {"w": distribute_tensor(torch.zeros(rows, columns), mesh, [Shard(1)], src_data_rank=None)}
    report = load(state, folder)
    return report.bytes_read / report.bytes_needed


@pytest.mark.parametrize(
    ("rows", "columns", "most"), [(512, 4, 2.0), (512, 32, 2.0), (512, 34, 1.0), (512, 256, 1.0), (256, 4, 1.0)]
)
def test_gaps_are_read_along_only_where_they_are_short_and_many(
    tmp_path: Path, rows: int, columns: int, most: float
) -> None:
    save_file({"w": torch.rand(rows, columns)}, tmp_path / "model.safetensors")
    assert all(most - 0.01 < found <= most for found in run(2, _columns, str(tmp_path), rows, columns))
