"""Ranks that load a checkpoint and a base of it: each shard is what torch cuts from the tensors of both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import transaxle as tx
from tests.live.ranks import run
from tests.readers.planted import DEPTH, FAULTS, retensor, tensors

AHEAD = f"model.layers.{DEPTH}."


def _local_shard(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def _load(rank: int, world: int, source: str, base: str, expected: str) -> tuple[int, int]:
    """Load a shard of every tensor and compare it; return the bytes that this rank read, and all bytes."""
    del rank
    mesh, whole = init_device_mesh("cpu", (world,)), tensors(Path(expected))
    cut = {
        name: distribute_tensor(value, mesh, [Shard(value.dim() - 1)], src_data_rank=None)
        for name, value in whole.items()
    }
    state = {name: torch.zeros_like(value) for name, value in cut.items()}
    report = tx.load(state, source, graft=base)
    for name, value in cut.items():
        assert torch.equal(_local_shard(state[name]), _local_shard(value)), name
    return report.bytes_read, sum(value.nbytes for value in whole.values())


@pytest.mark.parametrize("form", ["hf", "dcp:megatron"])
def test_two_ranks_load_the_source_and_what_it_lacks_from_the_base(form: str, tmp_path: Path) -> None:
    base, source, trained, expected = (tmp_path / name for name in ("base", "source", "trained", "expected"))
    FAULTS["no layer that predicts further tokens"].build(base)
    for folder in (trained, expected):
        FAULTS["no layer that predicts further tokens"].build(folder)
    ahead = {name: value for name, value in tensors(base).items() if name.startswith(AHEAD)}
    retensor(expected, lambda values: values.update({k: -v for k, v in values.items() if k not in ahead}))
    retensor(trained, lambda values: [values.pop(name) for name in ahead])
    retensor(trained, lambda values: values.update({name: -value for name, value in values.items()}))
    tx.convert(trained, source, to=form)
    read = run(2, _load, str(source), str(base), str(expected))
    assert all(of_rank <= 0.6 * whole for of_rank, whole in read)
