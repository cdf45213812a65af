"""Saving to a service, which takes files from their beginning to their end only."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import transaxle as tx
from tests.formats.s3_server import ENVIRONMENT, Bucket
from tests.live.ranks import ranks, run
from tests.live.test_load import FULL, _octets
from tests.live.test_save import _save
from transaxle.errors import TransaxleError
from transaxle.live.load import load
from transaxle.live.save import save

BIG = torch.arange(3 << 20, dtype=torch.float32).reshape(3 << 10, 1 << 10)


def _state(world: int, dim: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world,))
    cut = distribute_tensor(BIG, mesh, [Shard(dim)], src_data_rank=None)
    return {"big": cut, "bias": torch.arange(7.0)}


def _go(rank: int, world: int, server: str, target: str, dim: int, overwrite: bool) -> tuple[int, int]:
    os.environ.update(ENVIRONMENT, AWS_ENDPOINT_URL=server)
    state = _state(world, dim)
    report = save(state, target, to="safetensors", shard_size=8 << 20, overwrite=overwrite, extra={"at": rank})
    again = _state(world, 1 - dim)
    again["big"].to_local().zero_()
    load(again, target)
    assert torch.equal(again["big"].to_local(), _state(world, 1 - dim)["big"].to_local())
    return report.bytes_own, report.bytes_received


@pytest.mark.parametrize("dim", [0, 1])
def test_files_go_to_a_bucket_through_one_rank(bucket: Bucket, s3_server: str, dim: int) -> None:
    target = f"{bucket.url}/run"
    (own, received), (none, _) = run(2, _go, s3_server, target, dim, False)
    assert (own, none) == (BIG.nbytes + 7 * 4, 0)
    assert received == BIG.nbytes // 2
    assert bucket.uploads() == []
    shards = [name for name in bucket.names() if name.endswith(".safetensors")]
    held = {name: tensor for shard in shards for name, tensor in load_bytes(bucket.get(shard)).items()}
    assert torch.equal(held["big"], BIG)
    assert torch.equal(held["bias"], torch.arange(7.0))
    assert tx.verify(target).ok
    before = {name: bucket.get(name) for name in bucket.names()}
    answers = ranks(2).answers(_go, s3_server, target, dim, False)
    assert [isinstance(error, TransaxleError) and error.code for _, error in answers] == ["EXISTS", "EXISTS"]
    assert {name: bucket.get(name) for name in bucket.names()} == before
    run(2, _go, s3_server, target, 1 - dim, True)


def _fails(rank: int, world: int, server: str, target: str) -> None:
    os.environ.update(ENVIRONMENT, AWS_ENDPOINT_URL=server)
    state = _state(world, 0)
    if rank == 1:
        from transaxle.errors import refuse
        from transaxle.live.memory import Memory

        def broken(self: Memory, name: str, offset: int, view: memoryview) -> None:
            raise refuse("IO", "rank 1 cannot read its memory", file=name)

        kept, Memory.read_into = Memory.read_into, broken  # type: ignore[method-assign]
        try:
            save(state, target, to="safetensors")
        finally:
            Memory.read_into = kept  # type: ignore[method-assign]
    else:
        save(state, target, to="safetensors")


def test_nothing_appears_where_a_rank_fails(bucket: Bucket, s3_server: str) -> None:
    for fine, error in ranks(2).answers(_fails, s3_server, f"{bucket.url}/run"):
        assert not fine
        assert "rank 1 cannot read its memory" in str(error)
    assert bucket.names() == []
    assert bucket.uploads() == []


def test_a_file_url_and_one_file(tmp_path: Path) -> None:
    run(2, _save, f"file://{tmp_path}/out", (2, 1))
    assert tx.verify(tmp_path / "out").ok
    run(2, _save, f"{tmp_path}/one.safetensors", (2, 1))
    for key, value in load_file(tmp_path / "one.safetensors").items():
        assert torch.equal(_octets(value), _octets(FULL[key.rpartition(".")[0]])), key
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.safetensors", "out"]
