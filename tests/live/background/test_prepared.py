"""`prepare_async`: the first background save finds its process and its memory."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import transaxle as tx
from tests.live.ranks import run
from transaxle.errors import refuse
from transaxle.live import asynchronous
from transaxle.live.asynchronous import SaveJob, Saver, estimate_snapshot
from transaxle.live.transport.shared_memory import Region
from transaxle.torch_tensors import local_of


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _saver(rank: int, world: int) -> Saver:
    saver, _ = asynchronous._SAVERS[os.getpid(), tuple(range(world))]
    assert saver._rank == rank
    return saver


def _prepared(rank: int, world: int, folder: str) -> tuple[bool, bool, int]:
    """Whether process and memory stay, and the number of elements that come back as they were at the save."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 8, dtype=torch.float32))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tx.prepare_async(model, optimizer=optimizer)
    saver = _saver(rank, world)
    pid, region = saver._process.pid, saver._region
    assert pid is not None
    assert region is not None
    stays, kept = [], dict[str, torch.Tensor]()
    for step in range(2):
        trained(model, optimizer)
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        tx.async_save(model, Path(folder, str(step)), to="dcp", optimizer=optimizer).result()
        stays.append(_saver(rank, world) is saver and saver._process.pid == pid and saver._region is region)
        tx.prepare_async(model, optimizer=optimizer)  # again, when all is there
    trained(model, optimizer)
    tx.load(model, Path(folder, "1"), optimizer=optimizer)
    pairs = [(local_of(value), local_of(kept[name])) for name, value in model.state_dict().items()]
    equal = sum(int((one == other).sum()) for one, other in pairs)
    return stays[0], stays[1], equal


def test_the_first_save_finds_process_and_memory(tmp_path: Path) -> None:
    """Also for the state that AdamW makes in its first step."""
    found = run(2, _prepared, str(tmp_path))
    assert [each[:2] for each in found] == [(True, True)] * 2
    assert sum(each[2] for each in found) == 4 * 6 + 6 + 6 * 8 + 8


def test_memory_that_is_too_small_is_made_anew(tmp_path: Path) -> None:
    """And so is memory that is larger than the first snapshot, but smaller than a later one."""
    small, large = {"w": torch.arange(10.0)}, {"w": torch.arange(100_000.0)}
    tx.prepare_async(small)
    saver = _saver(0, 1)
    for number, state in enumerate([large, small, large, {**large, "v": torch.ones(7)}]):
        tx.async_save(state, tmp_path / str(number), to="safetensors").result()
        with tx.open(tmp_path / str(number)) as found:
            assert {name: found[name].tobytes() for name in found} == {k: v.numpy().tobytes() for k, v in state.items()}
    tx.prepare_async({"w": torch.ones(1_000_000)})
    region = saver._region
    for number, state in enumerate([small, large, {"w": torch.arange(1_000_000.0)}]):
        tx.async_save(state, tmp_path / f"later{number}", to="safetensors").result()
        assert (tmp_path / f"later{number}").is_dir()
        with tx.open(tmp_path / f"later{number}") as found:
            assert found["w"].tobytes() == state["w"].numpy().tobytes()
    assert saver._region is region
    assert _saver(0, 1) is saver


def opened(region: Region) -> int:
    """How many descriptors this process has of a shared memory: one is that of its mapping."""
    links = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]  # noqa: PTH208 - names are not needed
    return sum(region._name in str(link.readlink()) for link in links if link.is_symlink())


def test_memory_that_was_only_reserved_is_let_go(tmp_path: Path) -> None:
    """An open one would stay, although nobody has mapped it."""
    reserved = list[Region]()
    for size in (2_000_000, 4_000_000):
        tx.prepare_async({"w": torch.ones(size)})
        region = _saver(0, 1)._region
        assert region is not None
        assert opened(region) == 2
        reserved.append(region)
    assert [opened(each) for each in reserved] == [1, 2], "this list still has the first one mapped"
    tx.async_save({"w": torch.ones(4_000_000)}, tmp_path / "out", to="safetensors").result()
    sender = _saver(0, 1)._sender
    assert sender is not None
    sender.join()
    assert [opened(each) for each in reserved] == [1, 1]


@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.AdamW,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        torch.optim.Adagrad,
    ],
)
def test_state_that_an_optimizer_has_not_made_counts(kind: type[torch.optim.AdamW]) -> None:
    model = torch.nn.Linear(100, 50, dtype=torch.bfloat16)
    optimizer = kind(model.parameters())
    before = estimate_snapshot(model, optimizer)
    model(torch.ones(2, 100, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert before == estimate_snapshot(model, optimizer)
    assert not before.on_gpu
    assert estimate_snapshot(model, None).size == 10_048 + 128  # 10,000 and 100 bytes, up to where tensors begin


def _of_no_use(rank: int, world: int) -> str:
    assert world == 2
    with pytest.raises(tx.TransaxleError) as found:
        tx.prepare_async(torch.nn.LazyLinear(3) if rank else torch.nn.Linear(2, 3))
    return found.value.code


def test_what_cannot_be_saved_is_refused_by_all() -> None:
    assert run(2, _of_no_use) == ["UNSUPPORTED"] * 2


SCRIPT = """
import torch
import transaxle as tx

tx.prepare_async(torch.nn.Linear(3, 2))
print("ready")
"""


def test_a_program_that_saves_nothing_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "train.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ready\n", "")


class _Full(Region):
    def _made(self) -> int:
        raise refuse("NO_SPACE", "no memory is left")


def _full(rank: int, world: int) -> str:
    assert world == 2
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(asynchronous, "Region", _Full)
        with pytest.raises(tx.TransaxleError) as found:
            tx.prepare_async({"w": torch.ones(3_000_000)})
    return str(found.value)


def test_memory_that_one_rank_does_not_get_is_told_to_all() -> None:
    assert all("no memory is left" in each for each in run(2, _full))


def _saved(state: dict[str, torch.Tensor], target: Path) -> bool:
    """Whether a save in the background leaves just these values, and says so."""
    report = tx.async_save(state, target, to="safetensors").result()
    with tx.open(target) as found:
        held = {name: found[name].tobytes() for name in found}
    return report.path == str(target) and held == {name: each.numpy().tobytes() for name, each in state.items()}


def test_a_save_after_one_that_got_no_memory_is_of_its_own_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of the saves before is gone by then, and new memory of the same size takes its place."""
    assert _saved({"w": torch.full((100,), 1.0)}, tmp_path / "first")
    with monkeypatch.context() as patch:
        patch.setattr(asynchronous, "Region", _Refused)
        with pytest.raises(tx.TransaxleError, match=r"no shared memory of 40,000,000 bytes .* Cannot allocate"):
            tx.async_save({"w": torch.ones(10_000_000)}, tmp_path / "large", to="safetensors")
    assert _saved({"w": torch.full((100,), 2.0)}, tmp_path / "second")
    assert not (tmp_path / "large").exists()


class _Refused(Region):
    def _made(self) -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def _interrupted(*_: object) -> bool:
    raise KeyboardInterrupt


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (Saver, "answered", lambda state, _: tx.prepare_async(state)),
        (asynchronous, "_keep", lambda state, target: tx.async_save(state, target, to="safetensors")),
        (SaveJob, "over", lambda state, target: tx.async_save(state, target, to="safetensors")),
    ],
)
def test_what_was_interrupted_answers_for_no_later_save(
    owner: object, name: str, call: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the process starts, has just been told what to write, or still writes what the next save waits for."""
    state = {"w": torch.full((100,), 1.0)}
    job = tx.async_save(state, tmp_path / "before", to="safetensors")
    if owner is not SaveJob:
        job.result()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, _interrupted)
        with pytest.raises(KeyboardInterrupt):
            call(state, tmp_path / "interrupted")
    assert _saved({"w": torch.full((100,), 2.0)}, tmp_path / "after")
    (tmp_path / "file").touch()
    with pytest.raises(tx.TransaxleError, match="Not a directory"):
        tx.async_save(state, tmp_path / "file" / "in-it", to="safetensors").result()
    assert _saved(state, tmp_path / "last")
