"""Rendezvous: where the background processes of all ranks find each other, and where the loss of one is reported.

The first rank's own process serves a store. The store exists before the background processes do, on whatever machines
these run; and a rank whose process waits for a lost one learns of it there.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, if not marked so

from transaxle.live.transport.world import World

_LOST, _GROUP = "lost", "group"
_HERE = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where the store is."""

    host: str
    """Machine."""
    port: int
    """TCP port."""

    def join(self, number: int, size: int, timeout: timedelta) -> None:
        """Form the processes' own group, as number `number` of `size`."""
        shared = TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=timeout)
        store = PrefixStore(_GROUP, shared)
        dist.init_process_group("gloo", store=store, timeout=timeout, rank=number, world_size=size)


class Rendezvous:
    """The store, as the ranks see it; several ranks make it together.

    Args:
        world: the ranks.
        timeout: how long anybody waits for it.
    """

    def __init__(self, world: World, timeout: timedelta) -> None:
        served: TCPStore | None = None
        with world.together():
            if world.rank == world.ranks[0]:
                served = TCPStore(_HERE, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        hosts = world.gather((socket.gethostname(), 0 if served is None else served.port))
        one_machine = len({host for host, _ in hosts}) == 1
        self.address = StoreAddress(_HERE if one_machine else hosts[0][0], hosts[0][1])
        with world.together():
            self._store = served or TCPStore(
                self.address.host, self.address.port, is_master=False, wait_for_workers=False, timeout=timeout
            )

    def report_loss(self, message: str) -> str:
        """Tell all ranks that a process is lost; return what was reported first, which is what all ranks say."""
        with suppress(RuntimeError):  # the first rank is gone: nobody is left to hear it
            return str(self._store.compare_set(_LOST, "", message).decode())
        return message

    @property
    def lost(self) -> str | None:
        """What was reported of a lost process; None where none was."""
        with suppress(RuntimeError):
            if self._store.check([_LOST]):
                return str(self._store.get(_LOST).decode())
        return None
