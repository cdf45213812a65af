"""Programs that end while they save in the background: the save is finished, or the program fails; nothing is left.

Whoever ends here is a process of its own: a script, whose end Python's `atexit` sees, and ranks that are forked, whose
end it does not see.
"""

from __future__ import annotations

import errno
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import transaxle as tx
from tests.forks import context
from tests.live import ended
from tests.live.ended import SLOW
from tests.live.ranks import run
from transaxle.live import asynchronous
from transaxle.live.asynchronous import SaveJob, Saver, estimate_snapshot
from transaxle.live.transport.shared_memory import Region
from transaxle.torch_tensors import local_of

PATIENCE = 600.0
"""Seconds after which what has not happened will not happen; nothing that works waits for them."""

SCRIPT = """
import os, signal, subprocess, sys
import torch
import transaxle as tx
from transaxle.live import asynchronous

print("runs", __file__ == sys.argv[0], flush=True)  # once: without a guard for `__main__`

asynchronous._JOIN = 0.2  # far less than the save takes
target, how = sys.argv[1:]
if how == "prepares":
    tx.prepare_async(torch.nn.Linear(3, 2))
    sys.exit(0)
job = tx.async_save(torch.nn.Linear(3, 2), target, to="safetensors")
(saver, _), = asynchronous._SAVERS.values()
os.kill(saver._process.pid, signal.SIGSTOP)
subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {saver._process.pid}"])
if how == "raises":
    raise ValueError("as scripts do")
if how == "interrupted":
    os.kill(os.getpid(), signal.SIGINT)
if how == "terminated":
    os.kill(os.getpid(), signal.SIGTERM)
if how == "told":
    try:
        job.result()
    except tx.TransaxleError:
        sys.exit(4)
"""

more = pytest.mark.oracle


def _script(folder: Path, target: str, how: str) -> tuple[int, str]:
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, str(folder / "train.py"), target, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "runs True\n"
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("how", "code"),
    [("ends", 0), pytest.param("raises", 1, marks=more), pytest.param("interrupted", -signal.SIGINT, marks=more)],
)
def test_a_script_that_ends_waits_for_its_save(tmp_path: Path, how: str, code: int) -> None:
    found, said = _script(tmp_path, str(tmp_path / "out"), how)
    assert found == code, said
    assert "the save of" in said
    assert "waiting for it" in said
    assert ("Traceback" in said) == (how in ("raises", "interrupted"))
    assert tx.verify(tmp_path / "out").ok


@more
@pytest.mark.parametrize(("how", "code"), [("ends", 120), ("told", 4)])
def test_a_script_whose_last_save_fails_exits_with_an_error(tmp_path: Path, how: str, code: int) -> None:
    found, said = _script(tmp_path, str(tmp_path / "no" / "folder"), how)
    assert found == code, said
    assert ("does not exist" in said) == (how != "told")


@more
@pytest.mark.parametrize(("how", "code"), [("terminated", -signal.SIGTERM), ("prepares", 0)])
def test_a_script_that_is_terminated_or_saves_nothing_leaves_nothing(tmp_path: Path, how: str, code: int) -> None:
    assert _script(tmp_path, str(tmp_path / "out"), how) == (code, "")
    assert not (tmp_path / "out").exists()


def _started(world: int, folder: Path, target: Path, how: str) -> Sequence[BaseProcess]:
    starter = context()
    arguments: list[tuple[Any, ...]] = [(rank, world, str(folder), str(target), how) for rank in range(world)]
    found = [starter.Process(target=ended.run, args=each) for each in arguments]
    for process in found:
        process.start()
    return found


def _codes(processes: Sequence[BaseProcess]) -> list[int | None]:
    for process in processes:
        process.join(3 * PATIENCE)
    return [process.exitcode for process in processes]


def _errors(folder: Path, world: int) -> list[str]:
    return [Path(folder, f"errors-{rank}").read_text() for rank in range(world)]


@more
@pytest.mark.parametrize("how", ["raises on one", "ends"])
def test_ranks_that_end_wait_for_their_save(tmp_path: Path, how: str) -> None:
    codes = _codes(_started(2, tmp_path, tmp_path / "out", how))
    first, second = _errors(tmp_path, 2)
    assert codes == [0, 1 if how == "raises on one" else 0], (first, second)
    assert first.count("waiting for it") == 1
    assert len(first.splitlines()) == 1  # and nothing else: no broken pipe
    assert "waiting for it" not in second  # one of them says it
    assert ("as ranks do" in second) == (how == "raises on one")
    assert tx.verify(tmp_path / "out").ok


@more
def test_ranks_whose_last_save_fails_exit_with_an_error(tmp_path: Path) -> None:
    codes = _codes(_started(2, tmp_path, tmp_path / "no" / "folder", "ends"))
    said = _errors(tmp_path, 2)
    assert codes == [1, 1], said
    assert all("does not exist" in each for each in said)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def _until(happened: Any) -> bool:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if happened():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="it looks at processes in /proc")
@pytest.mark.parametrize(("world", "when"), [(1, "at once"), pytest.param(2, "later", marks=more)])
def test_a_background_process_ends_with_its_rank(tmp_path: Path, world: int, when: str) -> None:
    processes = _started(world, tmp_path, tmp_path / "out", "stays")
    try:
        places = [tmp_path / f"begun-{rank}" for rank in range(world)]
        assert _until(lambda: all(place.exists() for place in places)), _errors(tmp_path, world)
        pids = [int(place.read_text()) for place in places]
        assert all(map(_lives, pids))
        for number, process in enumerate(processes):
            if when == "later" and number:  # the first rank's waits for one that never comes, or writes
                time.sleep(SLOW)
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            assert _until(lambda number=number: not _lives(pids[number]))
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert "Traceback" not in "".join(_errors(tmp_path, world))


# `prepare_async`: the first background save finds its process and its memory.


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


def test_prepare_async_provides_process_and_memory(tmp_path: Path) -> None:
    """Also for the state that AdamW makes in its first step."""
    found = run(2, _prepared, str(tmp_path))
    assert [each[:2] for each in found] == [(True, True)] * 2
    assert sum(each[2] for each in found) == 4 * 6 + 6 + 6 * 8 + 8


def test_memory_that_is_too_small_is_replaced(tmp_path: Path) -> None:
    """And so is memory that is larger than the first snapshot, but smaller than a later one."""
    small, large = {"w": torch.arange(10.0)}, {"w": torch.arange(100_000.0)}
    tx.prepare_async(small)
    saver = _saver(0, 1)
    for number, state in enumerate([large, small, large, {**large, "v": torch.ones(7)}]):
        assert _saved(state, tmp_path / str(number))
    tx.prepare_async({"w": torch.ones(1_000_000)})
    region = saver._region
    for number, state in enumerate([small, large, {"w": torch.arange(1_000_000.0)}]):
        assert _saved(state, tmp_path / f"later{number}")
    assert saver._region is region
    assert _saver(0, 1) is saver


def opened(region: Region) -> int:
    """How many descriptors this process has of a shared memory: one is that of its mapping."""
    links = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]  # noqa: PTH208 - names are not needed
    return sum(region._name in str(link.readlink()) for link in links if link.is_symlink())


def test_memory_that_was_only_reserved_is_released(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("kind", [torch.optim.AdamW, lambda parameters: torch.optim.SGD(parameters, lr=0.1)])
def test_the_estimate_includes_future_optimizer_state(kind: type[torch.optim.AdamW]) -> None:
    model = torch.nn.Linear(100, 50, dtype=torch.bfloat16)
    optimizer = kind(model.parameters())
    before = estimate_snapshot(model, optimizer)
    model(torch.ones(2, 100, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert before == estimate_snapshot(model, optimizer)
    assert not before.on_gpu
    assert estimate_snapshot(model, None).size == 10_048 + 128  # 10,000 and 100 bytes, up to where tensors begin


def _saved(state: dict[str, torch.Tensor], target: Path) -> bool:
    """Whether a save in the background leaves just these values, and says so."""
    report = tx.async_save(state, target, to="safetensors").result()
    with tx.open(target) as found:
        held = {name: found[name].tobytes() for name in found}
    return report.path == str(target) and held == {name: each.numpy().tobytes() for name, each in state.items()}


def test_a_save_after_a_failed_allocation_has_its_own_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _saved({"w": torch.full((100,), 1.0)}, tmp_path / "first")
    with monkeypatch.context() as patch:
        patch.setattr(asynchronous, "Region", _Refused)
        with pytest.raises(tx.TransaxleError, match=r"no shared memory of 40,000,000 bytes .* Cannot allocate"):
            tx.async_save({"w": torch.ones(10_000_000)}, tmp_path / "large", to="safetensors")
    assert _saved({"w": torch.full((100,), 2.0)}, tmp_path / "second")
    assert not (tmp_path / "large").exists()


class _Refused(Region):
    def _create(self) -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def _interrupted(*_: object) -> bool:
    raise KeyboardInterrupt


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (Saver, "wait_for_answer", lambda state, _: tx.prepare_async(state)),
        (asynchronous, "_keep", lambda state, target: tx.async_save(state, target, to="safetensors")),
        (SaveJob, "over", lambda state, target: tx.async_save(state, target, to="safetensors")),
    ],
)
def test_an_interrupted_save_does_not_answer_a_later_one(
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


# A save to the place of another one that goes on in the background: the later one is what stays.

STILL = 1.0
"""Seconds for which the background process stands still."""


def stopped() -> int:
    saver, _ = asynchronous._SAVERS[os.getpid(), (0,)]
    pid = saver._process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    return pid


@pytest.mark.parametrize("interrupted", [False, True])
def test_an_earlier_save_never_replaces_a_later_one(tmp_path: Path, interrupted: bool) -> None:
    """The first is committed last if nobody waits for it; a wait that Ctrl-C ends is made again by the next save."""
    state = {"w": torch.ones(3)}
    job = tx.async_save(state, tmp_path / "latest", to="safetensors", overwrite=True)
    pid = stopped()
    state["w"].fill_(2)
    try:
        if interrupted:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(SaveJob, "_wait", _interrupted)
                with pytest.raises(KeyboardInterrupt):
                    tx.save(state, tmp_path / "latest", to="safetensors", overwrite=True)
    finally:
        threading.Timer(STILL, os.kill, (pid, signal.SIGCONT)).start()
    tx.save(state, f"{tmp_path}/latest/", to="safetensors", overwrite=True)
    assert job.done()
    assert job.result().tensors == 1
    state["w"].zero_()
    tx.load(state, tmp_path / "latest")
    assert state["w"].tolist() == [2, 2, 2]


# Many saves in a row, as in a long run: nothing is left of them but the checkpoints that are kept.

WARM = 4
"""Saves after which what is made once is there: the process that saves, its memory, threads."""
WIDTH = 256
MOST = 24 << 20
"""Bytes by which a rank and its processes may grow, however many saves there are; one save has 1.6 MB of each rank."""
_MEMORY = "memfd:"
"""What Linux calls memory that processes share and that has no name."""
Counts = dict[str, int]


def _below(process: int) -> Iterator[int]:
    """A process and all below it."""
    yield process
    for task in Path(f"/proc/{process}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from _below(int(child))


def _resident(process: int) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    sizes = [line.split()[1] for line in lines if line.startswith(("RssAnon:", "RssShmem:"))]
    return sum(map(int, sizes)) << 10


def _counts() -> Counts:
    gc.collect()
    own = list(_below(os.getpid()))
    links = [_target(link) for process in own for link in list(Path(f"/proc/{process}/fd").iterdir())]
    return {
        "processes": len(own),
        "threads": sum(len(list(Path(f"/proc/{process}/task").iterdir())) for process in own),
        "files": len(links),
        "shared memory": sum(_MEMORY in link for link in links),
        "maps": sum(Path(f"/proc/{process}/maps").read_text().count(_MEMORY) for process in own),
        "bytes": sum(map(_resident, own)),
    }


def _target(link: Path) -> str:
    """What an open file is; nothing of the one by which the others are listed."""
    try:
        return str(link.readlink())
    except FileNotFoundError:
        return ""


def _soak(rank: int, world: int, folder: str, saves: int) -> tuple[Counts, Counts]:
    """Save in turns at once and in the background, train in between, keep the last two; count before and after."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters())
    before: Counts = {}
    for step in range(saves):
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        target = Path(folder, f"step-{step}")
        if step % 2:
            tx.async_save(model, target, to="dcp:identity", optimizer=optimizer).result()
        else:
            tx.save(model, target, to="safetensors:identity", optimizer=optimizer)
        torch.distributed.barrier()
        if rank == 0 and step > 1:
            shutil.rmtree(Path(folder, f"step-{step - 2}"))
        if step == WARM:
            before = _counts()
    after = _counts()
    torch.distributed.barrier()
    tx.load(model, Path(folder, f"step-{saves - 1}"), optimizer=optimizer)
    return before, after


@pytest.mark.parametrize("saves", [16, pytest.param(300, marks=pytest.mark.oracle)])
def test_repeated_saves_leak_nothing(saves: int, tmp_path: Path) -> None:
    for before, after in run(2, _soak, str(tmp_path), saves):
        grown = {name: after[name] - count for name, count in before.items()}
        assert grown.pop("bytes") < MOST
        assert not any(count > 0 for count in grown.values()), grown
        assert before["shared memory"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{saves - 2}", f"step-{saves - 1}"]
