"""Rendezvous: where the background processes of all ranks find each other, and where the loss of one is reported.

The first rank's own process serves a store, for those who know a secret that it has told the other ranks. The store
exists before the background processes do, on whatever machines these run; and a rank whose process waits for a lost one
learns of it there.
"""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, if not marked so

from transaxle.live.transport.shared_store import SharedStore, StoreServer, check_connections
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
    secret: bytes = field(repr=False)
    """What all know who come there."""

    def opened(self, number: int, timeout: timedelta) -> SharedStore:
        """Return the store, as one of those who come has it."""
        return SharedStore((self.host, self.port), self.secret, number, "", timeout)

    def join(self, number: int, size: int, timeout: timedelta) -> SharedStore:
        """Form the processes' own group, as number `number` of `size`; return its store, which must live as long."""
        store = self.opened(size + number, timeout)  # the first numbers are those of the ranks themselves
        prefixed = PrefixStore(_GROUP, store)
        dist.init_process_group("gloo", store=prefixed, timeout=timeout, rank=number, world_size=size)
        check_connections(dist.distributed_c10d._get_default_group(), store, self.secret, number, size)
        return store


class Rendezvous:
    """The store, as the ranks see it; several ranks make it together.

    Args:
        world: the ranks.
        timeout: how long anybody waits for it.
    """

    def __init__(self, world: World, timeout: timedelta) -> None:
        hosts = world.gather(socket.gethostname())
        here = len(set(hosts)) == 1
        number, secret = world.ranks.index(world.rank), secrets.token_bytes()
        with world.together():
            if number == 0:
                self._server = StoreServer(_HERE if here else "", 0, secret, 2 * world.size)
        port, secret = world.gather((self._server.port if number == 0 else 0, secret))[0]
        self.address = StoreAddress(_HERE if here else hosts[0], port, secret)
        with world.together():
            self._store = self.address.opened(number, timeout)

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
