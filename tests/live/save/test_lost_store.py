"""A store that cannot be reached any more in the middle of a save, or a rank that is lost while files appear there."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_bytes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import transaxle as tx
from tests.formats.faulty_proxy import FaultyProxy, proxied
from tests.formats.s3_server import Bucket, reach_s3
from tests.live.ranks import DIED, Ranks
from transaxle.errors import TransaxleError
from transaxle.formats.registry import MANIFEST
from transaxle.formats.store.upload import Upload

WORLD = 2
SHORT = timedelta(seconds=120)
"""How long ranks wait for each other; on a busy machine the store's client takes a third of it to give up."""
SIDE = 256
OLD, NEW = 0.0, 100.0


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Ranks of this test alone: what they wait for may never come."""
    found = Ranks(WORLD, SHORT)
    yield found
    found.stop()


@pytest.fixture
def proxy(s3_server: str) -> Iterator[FaultyProxy]:
    """What stands between the ranks and the store."""
    with proxied(s3_server) as found:
        yield found


def _full(add: float) -> dict[str, torch.Tensor]:
    return {f"w{n}": torch.arange(float(SIDE * SIDE)).reshape(SIDE, SIDE) + add + n for n in range(2)}


def _save(rank: int, world: int, server: str, target: str, add: float, background: bool) -> None:
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
def test_a_store_that_is_lost_is_told_on_every_rank(
    bucket: Bucket, proxy: FaultyProxy, ranks: Ranks, at: str, background: bool
) -> None:
    """The former step stays, nothing opens as the new one, and the next save to the same place is well."""
    first, second = f"{bucket.url}/step-1", f"{bucket.url}/step-2"
    ranks.run(_save, proxy.url, first, OLD, background)
    proxy.fails = _until(AT[at])
    answers = ranks.answers(_save, proxy.url, second, NEW, background)
    assert proxy.failed > 0
    for fine, error in answers:
        assert not fine
        assert isinstance(error, TransaxleError), error
        assert {refusal.code for refusal in error.refusals} == {"IO"}
        assert "did not answer in time" not in str(error), "what the store's client says, not that a rank is lost"
    assert len({str(error) for _, error in answers}) == 1
    assert _holds(bucket, first, OLD)
    with pytest.raises(TransaxleError):
        tx.open(second)
    proxy.fails = lambda _method, _path: None
    ranks.run(_save, proxy.url, second, NEW, background)
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
    _save(rank, world, server, target, NEW, False)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_first_rank_that_dies_leaves_a_whole_checkpoint_or_none(
    bucket: Bucket, s3_server: str, ranks: Ranks, when: str
) -> None:
    target = f"{bucket.url}/run"
    (_, died), (fine, error) = ranks.answers(_dies, s3_server, target, when)
    assert died == DIED
    assert not fine
    assert isinstance(error, TransaxleError), error
    assert error.code == "IO"
    if when == "after":
        assert f"run/{MANIFEST}" in bucket.names()
        assert _holds(bucket, target, NEW)
    else:
        assert bucket.names() == []
