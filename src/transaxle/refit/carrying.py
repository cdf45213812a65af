"""Carrying a program out: what each rank holds is packed, sent, and laid where it belongs."""

from __future__ import annotations

import torch

from transaxle.live.transport.bucket_exchange import BucketExchange
from transaxle.move.endpoint import Deferred
from transaxle.refit.endpoints import SourceValues, TargetRoom
from transaxle.refit.hops import Program


def carry(program: Program, source: SourceValues, target: TargetRoom, exchange: BucketExchange) -> None:
    """Give this rank's target everything that the program moves into it; collective.

    Raises:
        StorageError: IO where a rank is lost.
        Exception: what an endpoint raised, on this rank alone, when all exchanges are over.
    """
    rounds = program.schedule.rounds

    def copy_own() -> None:
        for _, key, transfers in program.schedule.own:
            for transfer in transfers:
                source.copy(transfer, target.of(key))

    def pack(number: int, parcel: int, buffer: torch.Tensor) -> None:
        for packing, _ in rounds[number][parcel].steps:
            source.copy(packing, buffer)

    def take(number: int, parcel: int, buffer: torch.Tensor) -> None:
        hop = rounds[number][parcel]
        for _, spreading in hop.steps:
            target.lay(hop.key, spreading, buffer)

    # An error of this rank must not end the collective calls, or the others would wait for it.
    later = Deferred()
    later(copy_own)()
    exchange.run(program.route, later(pack), later(take))
    later.check()
