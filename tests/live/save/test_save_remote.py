"""Saving to a service, which takes files from their beginning to their end only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import transaxle as tx
from tests.formats.s3_server import Bucket, reach_s3
from tests.live.load.test_load import FULL, _octets
from tests.live.ranks import ranks, run
from tests.live.save.test_save import _save
from transaxle.errors import TransaxleError, refuse
from transaxle.formats.store.upload import Upload
from transaxle.live.load import load
from transaxle.live.save import save
from transaxle.torch_tensors import Bytes

BIG = torch.arange(3 << 20, dtype=torch.float32).reshape(3 << 10, 1 << 10)


def _state(world: int, dim: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world,))
    cut = distribute_tensor(BIG, mesh, [Shard(dim)], src_data_rank=None)
    return {"big": cut, "bias": torch.arange(7.0)}


def _go(rank: int, world: int, server: str, target: str, dim: int, overwrite: bool) -> tuple[int, int]:
    reach_s3(server)
    state = _state(world, dim)
    report = save(state, target, to="safetensors", shard_size=8 << 20, overwrite=overwrite, extra={"at": rank})
    again = _state(world, 1 - dim)
    again["big"].to_local().zero_()
    load(again, target)
    assert torch.equal(again["big"].to_local(), _state(world, 1 - dim)["big"].to_local())
    return report.bytes_own, report.bytes_received


@pytest.mark.oracle
@pytest.mark.parametrize("dim", [0, 1])
def test_files_go_to_a_bucket(bucket: Bucket, s3_server: str, dim: int) -> None:
    target = f"{bucket.url}/run"
    (first, to_first), (second, to_second) = run(2, _go, s3_server, target, dim, False)
    assert {first, second} == {7 * 4, BIG.nbytes}  # one file each
    assert to_first + to_second == BIG.nbytes // 2
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
    reach_s3(server)
    state = _state(world, 0)
    if rank == 1:
        from transaxle.live.memory import Memory

        def broken(self: Memory, name: str, offset: int, size: int) -> Bytes:
            raise refuse("IO", "rank 1 cannot read its memory", file=name)

        kept, Memory.lend = Memory.lend, broken  # type: ignore[method-assign]
        try:
            save(state, target, to="safetensors")
        finally:
            Memory.lend = kept  # type: ignore[method-assign]
    else:
        save(state, target, to="safetensors")


def test_nothing_appears_where_a_rank_fails(bucket: Bucket, s3_server: str) -> None:
    for fine, error in ranks(2).answers(_fails, s3_server, f"{bucket.url}/run"):
        assert not fine
        assert "rank 1 cannot read its memory" in str(error)
    assert bucket.names() == []
    assert bucket.uploads() == []


SIZES = {"a": 9 << 20, "b": 5 << 20, "c": 4 << 20, "d": 3 << 20}
"""Bytes of tensors that have a file each."""


def _matrix(name: str) -> torch.Tensor:
    side = SIZES[name] // 4 // 1024
    return torch.arange(side * 1024, dtype=torch.float32).reshape(side, 1024) * (1 + ord(name))


def _sent(rank: int, world: int, server: str, target: str, fails: int, step: str) -> tuple[dict[str, int], int, int]:
    """Save several files; return the bytes of tensors that this rank sent, by file."""
    reach_s3(server)
    mesh = init_device_mesh("cpu", (world,))
    state = {name: distribute_tensor(_matrix(name), mesh, [Shard(1)], src_data_rank=None) for name in SIZES}
    counts: dict[str, int] = {}
    kept_write, kept_step = Upload.pwrite, getattr(Upload, step or "appear")

    def counted(self: Upload, file: str, offset: int, view: memoryview) -> None:
        if view.nbytes > 1 << 16:
            counts[file] = counts.get(file, 0) + view.nbytes
        kept_write(self, file, offset, view)

    def broken(self: Upload, *_: object) -> None:
        if step == "appear":
            kept_step(self)  # it fails when its files are to be seen already
        raise refuse("IO", f"rank {rank} lost its line")

    Upload.pwrite = counted  # type: ignore[method-assign]
    if rank == fails:
        setattr(Upload, step, broken)
    try:
        report = save(state, target, to="safetensors", shard_size=4 << 20)
    finally:
        Upload.pwrite = kept_write  # type: ignore[method-assign]
        setattr(Upload, step or "appear", kept_step)
    return counts, report.bytes_own, report.bytes_received


@pytest.mark.oracle
@pytest.mark.parametrize("world", [2, 3])
def test_each_file_is_sent_by_one_rank(bucket: Bucket, s3_server: str, world: int) -> None:
    target = f"{bucket.url}/run"
    found = run(world, _sent, s3_server, target, -1, "")
    files = [file for counts, *_ in found for file in counts]
    assert len(files) == len(set(files)) == len(SIZES)
    widths = [len(part) for part in torch.arange(1024).chunk(world)]
    for width, (counts, own, received) in zip(widths, found, strict=True):
        assert sum(counts.values()) == own
        assert received == own - own * width // 1024
    owned = sorted(own for _, own, _ in found)
    assert owned == {2: [9 << 20, 12 << 20], 3: [5 << 20, 7 << 20, 9 << 20]}[world]
    assert bucket.uploads() == []
    held = {n: t for s in bucket.names() if s.endswith(".safetensors") for n, t in load_bytes(bucket.get(s)).items()}
    assert all(torch.equal(held[name], _matrix(name)) for name in SIZES)
    assert tx.verify(target).ok


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("fails", "step"), [(0, "pwrite"), (1, "pwrite"), (1, "complete"), (1, "appear"), (0, "appear")]
)
def test_nothing_stays_where_one_sender_fails(bucket: Bucket, s3_server: str, fails: int, step: str) -> None:
    for fine, error in ranks(2).answers(_sent, s3_server, f"{bucket.url}/run", fails, step):
        assert not fine
        assert isinstance(error, TransaxleError), error
        assert f"rank {fails} lost its line" in str(error)
    assert bucket.names() == []
    assert bucket.uploads() == []


def test_a_file_url_and_one_file(tmp_path: Path) -> None:
    run(2, _save, f"file://{tmp_path}/out", (2, 1))
    assert tx.verify(tmp_path / "out").ok
    run(2, _save, f"{tmp_path}/one.safetensors", (2, 1))
    for key, value in load_file(tmp_path / "one.safetensors").items():
        assert torch.equal(_octets(value), _octets(FULL[key.rpartition(".")[0]])), key
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.safetensors", "out"]
