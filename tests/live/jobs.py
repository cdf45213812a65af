"""Two jobs on the ranks of one pool: each gets a torch world of its own, and they share nothing but an address."""

from __future__ import annotations

import socket
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, if not marked so
from torch.distributed import distributed_c10d as c10d

from tests.live.ranks import TIMEOUT

SECRET = "that both jobs of a test know"
_NAME: Any = "joined"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def apart(rank: int, world: int, first: int) -> tuple[int, int]:
    """Leave the pool's process group for one of two worlds: the first ranks, or the others.

    Args:
        rank: in the pool.
        world: size of the pool.
        first: ranks of the first job.

    Returns:
        (job 0 or 1, rank in its world).
    """
    store = c10d._get_default_store()
    dist.destroy_process_group()
    job, own, size = (0, rank, first) if rank < first else (1, rank - first, world - first)
    prefix = PrefixStore(f"job{job}", store)
    dist.init_process_group("gloo", store=prefix, timeout=TIMEOUT, rank=own, world_size=size)
    return job, own


def joined(rank: int, world: int, port: int) -> dist.ProcessGroup:
    """Return a group of ranks of both jobs, made as verl and OpenRLHF make it: torch takes its numbers for ranks."""
    prefix = PrefixStore(_NAME, TCPStore("127.0.0.1", port, world, rank == 0, TIMEOUT))
    helper: Any = c10d._new_process_group_helper
    group: dist.ProcessGroup = helper(world, rank, [], "gloo", prefix, group_name=_NAME, timeout=TIMEOUT)[0]
    c10d._world.pg_group_ranks[group] = {number: number for number in range(world)}
    return group
