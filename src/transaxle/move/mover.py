"""Move items: their bytes, produced by the ranks that hold them, at the ranks that take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from transaxle.move.endpoint import Bytes, Shared
from transaxle.move.runs import RUN, Item, Run, batches, dense_steps, packed, with_steps
from transaxle.move.strided_fill import scatter
from transaxle.move.transfer import Transfer
from transaxle.move.transport import Deferred, Exchange, Parcel

Consume = Callable[[Run, Bytes], None]
"""Called at each taker with a run's bytes, which are neither written to nor kept."""


def assemble(items: Sequence[Item], memory: Shared, exchange: Exchange, consume: Consume) -> int:
    """Produce items; collective over the exchange's ranks, which must all pass equal items.

    Args:
        items: what to produce.
        memory: the tensors of this rank.
        exchange: moves bytes between the ranks; it is closed at the end.
        consume: takes the runs that this rank takes; runs of an item, and of all items with the same takers, come in
            order.

    Returns:
        bytes received from other ranks.

    Raises:
        Exception: what `memory` or `consume` raised, on this rank alone, when all exchanges are over.
    """
    workshop = _Workshop(memory, exchange, consume)
    for batch in batches(items, exchange.ranks, memory.owner):
        workshop.produce(batch)
    workshop.close()
    workshop.later.check()
    return workshop.received


class _Workshop:
    """Produces runs, batch by batch."""

    def __init__(self, memory: Shared, exchange: Exchange, consume: Consume) -> None:
        self.later = Deferred()
        self.received = 0
        self._memory = memory
        self._consume = consume
        self._exchange = exchange
        self._buffer: Bytes = np.empty(0, np.uint8)

    def produce(self, batch: Sequence[Run]) -> None:
        """Exchange what the runs of a batch need, and hand them over."""
        sent = [(run, rank) for run in batch for rank in run.parts if set(run.takers) - {rank}]
        arrived: dict[tuple[Run, int], Bytes] = {}

        def pack(number: int, buffer: Bytes) -> None:
            run, rank = sent[number]
            for part, at in packed(run.parts[rank]):
                dense = with_steps(part, part.source, at, [source for _, source, _ in part.loops], dense_steps(part))
                self._lay(dense, buffer, 0)

        def take(number: int, buffer: Bytes) -> None:
            arrived[sent[number]] = buffer

        parcels = [
            Parcel(rank, tuple(t for t in run.takers if t != rank), sum(part.size for part in run.parts[rank]))
            for run, rank in sent
        ]
        self.received += self._exchange.round(parcels, self.later(pack), self.later(take))
        for run in batch:
            if self._exchange.rank in run.takers:
                self.later(self._finish)(run, {rank: arrived.get((run, rank)) for rank in run.parts})

    def close(self) -> None:
        """Let go what the batches needed."""
        self._exchange.close()

    def _finish(self, run: Run, arrived: Mapping[int, Bytes | None]) -> None:
        """Put a run together and hand it over."""
        whole = run.whole
        if whole is not None:
            held = arrived[self._memory.owner(whole.file)]
            self._consume(run, self._memory.lend(whole.file, whole.source, whole.width) if held is None else held)
            return
        if len(self._buffer) < run.size:
            self._buffer = np.empty(max(run.size, RUN), np.uint8)
        out = self._buffer[: run.size]
        if run.padded:
            out[:] = 0
        for rank, parts in run.parts.items():
            sent = arrived[rank]
            if sent is None:
                for part in parts:
                    self._lay(part, out, run.start)
                continue
            for part, at in packed(parts):
                spread = with_steps(part, at, part.target, dense_steps(part), [target for *_, target in part.loops])
                scatter(sent[at : at + part.size], spread, out, part.target - run.start)
        self._consume(run, out)

    def _lay(self, part: Transfer, out: Bytes, start: int) -> None:
        """Copy from this rank's memory into a buffer that holds the target's bytes from `start` on."""
        scatter(self._memory.lend(part.file, part.source, part.source_span), part, out, part.target - start)
