"""Saving to a service, which takes files from their beginning to their end only."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import transaxle as tx
from tests.formats.faulty_proxy import FaultyProxy, proxied
from tests.formats.s3_server import Bucket, reach_s3
from tests.live.load.test_load import FULL, _octets
from tests.live.ranks import DIED, Ranks, ranks, run
from tests.live.save.test_save import _save
from transaxle.errors import TransaxleError, refuse
from transaxle.formats.registry import MANIFEST
from transaxle.formats.store.upload import Upload
from transaxle.live.save import save

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
def test_nothing_remains_if_one_sender_fails(bucket: Bucket, s3_server: str, fails: int, step: str) -> None:
    for error in ranks(2).refusals(_sent, s3_server, f"{bucket.url}/run", fails, step):
        assert f"rank {fails} lost its line" in str(error)
    assert bucket.names() == []
    assert bucket.uploads() == []


def test_a_file_url_and_one_file(tmp_path: Path) -> None:
    run(2, _save, f"{tmp_path}/one.safetensors", (2, 1))
    for key, value in load_file(tmp_path / "one.safetensors").items():
        assert torch.equal(_octets(value), _octets(FULL[key.rpartition(".")[0]])), key
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.safetensors"]


# A store that cannot be reached any more in the middle of a save, or a rank that is lost while files appear there.

WORLD = 2
SHORT = timedelta(seconds=120)
"""How long ranks wait for each other; on a busy machine the store's client takes a third of it to give up."""
SIDE = 256
OLD, NEW = 0.0, 100.0


@pytest.fixture
def short_ranks() -> Iterator[Ranks]:
    """Ranks of this test alone: what they wait for may never come."""
    with Ranks(WORLD, SHORT) as found:
        yield found


@pytest.fixture
def proxy(s3_server: str) -> Iterator[FaultyProxy]:
    """What stands between the ranks and the store."""
    with proxied(s3_server) as found:
        yield found


def _full(add: float) -> dict[str, torch.Tensor]:
    return {f"w{n}": torch.arange(float(SIDE * SIDE)).reshape(SIDE, SIDE) + add + n for n in range(2)}


def _save_two_files(rank: int, world: int, server: str, target: str, add: float, background: bool) -> None:
    """Save two files, so that both ranks send one."""
    reach_s3(server)
    mesh = init_device_mesh("cpu", (world,))
    state = {n: distribute_tensor(each, mesh, [Shard(0)], src_data_rank=None) for n, each in _full(add).items()}
    told: dict[str, Any] = {"to": "safetensors", "shard_size": 4 * SIDE * SIDE, "overwrite": True}
    if background:
        tx.async_save(state, target, **told).result()
    else:
        tx.save(state, target, **told)


def _holds(bucket: Bucket, target: str, add: float) -> bool:
    """Tell whether a checkpoint is whole, by the bytes that the store has."""
    folder = target.removeprefix(f"{bucket.url}/")
    names = [name for name in bucket.names() if name.startswith(f"{folder}/") and name.endswith(".safetensors")]
    found = {key: tensor for name in names for key, tensor in load_bytes(bucket.get(name)).items()}
    alike = found.keys() == _full(add).keys() and all(torch.equal(found[n], each) for n, each in _full(add).items())
    return alike and tx.verify(target).ok


def _until(ends: Callable[[str, str], bool]) -> Callable[[str, str], Any]:
    """Let requests through until one is as told; nothing passes from there on."""
    gone = False

    def fails(method: str, path: str) -> Any:
        nonlocal gone
        gone = gone or ends(method, path)
        return "reset" if gone else None

    return fails


AT = {
    "sending": lambda method, path: method == "PUT" and "partNumber=1" in path,
    "appearing": lambda method, path: method == "POST" and "uploadId=" in path,
}
"""When the store is lost: with the first bytes, or with the first file that is to appear."""


@pytest.mark.oracle
@pytest.mark.parametrize(("at", "background"), [("sending", False), ("sending", True), ("appearing", False)])
def test_a_lost_store_is_an_error_on_every_rank(
    bucket: Bucket, proxy: FaultyProxy, short_ranks: Ranks, at: str, background: bool
) -> None:
    """The former step stays, nothing opens as the new one, and the next save to the same place is well."""
    first, second = f"{bucket.url}/step-1", f"{bucket.url}/step-2"
    short_ranks.run(_save_two_files, proxy.url, first, OLD, background)
    proxy.fails = _until(AT[at])
    errors = short_ranks.refusals(_save_two_files, proxy.url, second, NEW, background)
    assert proxy.failed > 0
    for error in errors:
        assert {refusal.code for refusal in error.refusals} == {"IO"}
        assert "did not answer in time" not in str(error), "what the store's client says, not that a rank is lost"
    assert len(set(map(str, errors))) == 1
    assert _holds(bucket, first, OLD)
    with pytest.raises(TransaxleError):
        tx.open(second)
    proxy.fails = lambda _method, _path: None
    short_ranks.run(_save_two_files, proxy.url, second, NEW, background)
    assert _holds(bucket, second, NEW)
    assert _holds(bucket, first, OLD)


def _dies(rank: int, world: int, server: str, target: str, when: str) -> None:
    """Let the first rank die when its files, which make the others a checkpoint, are there or are about to be."""
    kept = Upload.appear

    def appear(self: Upload) -> None:
        if when == "after":
            kept(self)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 0:
        Upload.appear = appear  # type: ignore[method-assign]
    _save_two_files(rank, world, server, target, NEW, False)


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.oracle), "after"])
def test_a_first_rank_that_dies_leaves_a_whole_checkpoint_or_none(
    bucket: Bucket, s3_server: str, short_ranks: Ranks, when: str
) -> None:
    target = f"{bucket.url}/run"
    (_, died), (fine, error) = short_ranks.answers(_dies, s3_server, target, when)
    assert died == DIED
    assert not fine
    assert isinstance(error, TransaxleError), error
    assert error.code == "IO"
    if when == "after":
        assert f"run/{MANIFEST}" in bucket.names()
        assert _holds(bucket, target, NEW)
    else:
        assert bucket.names() == []
