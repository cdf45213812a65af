"""Many saves in a row, as in a long run: nothing is left of them but the checkpoints that are kept."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import transaxle as tx
from tests.live.ranks import run

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
    """Bytes of memory, files that are mapped aside."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    sizes = [line.split()[1] for line in lines if line.startswith(("RssAnon:", "RssShmem:"))]
    return sum(map(int, sizes)) << 10


def _counts() -> Counts:
    """What this rank holds, with the processes that it has started."""
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
def test_saves_in_a_loop_leave_nothing(saves: int, tmp_path: Path) -> None:
    """No processes, threads, open files or shared memory, and no bytes that grow with the number of saves."""
    for before, after in run(2, _soak, str(tmp_path), saves):
        grown = {name: after[name] - count for name, count in before.items()}
        assert grown.pop("bytes") < MOST
        assert not any(count > 0 for count in grown.values()), grown
        assert before["shared memory"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{saves - 2}", f"step-{saves - 1}"]
