"""A rank that begins a save in the background, and ends, or waits to be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import transaxle as tx
from transaxle.live import asynchronous

SLOW = 1.0
"""Seconds that a slow save takes."""
_LONG = 3600.0


def run(rank: int, world: int, folder: str, target: str, how: str) -> None:
    errors = os.open(f"{folder}/errors-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, sys.stderr.fileno())
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    asynchronous._JOIN = 0.2
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    full = torch.arange(64.0).reshape(8, 8)
    tx.async_save({"w": distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)}, target, to="safetensors")
    process = asynchronous._SAVERS[os.getpid(), tuple(range(world))][0]._process
    _write(folder, f"begun-{rank}", str(process.pid))
    dist.destroy_process_group()
    if how == "stays":
        time.sleep(_LONG)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    subprocess.Popen(["sh", "-c", f"sleep {SLOW}; kill -CONT {process.pid}"])
    if how == "raises on one" and rank == 1:
        raise ValueError("as ranks do")


def _write(folder: str, name: str, text: str) -> None:
    Path(folder, f"{name}.part").write_text(text)
    Path(folder, f"{name}.part").rename(Path(folder, name))
