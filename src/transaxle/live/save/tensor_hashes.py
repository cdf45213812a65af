"""Tensors passing by, run by run: where their bytes go, what they hash to, and how many of them this rank has seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import xxhash

from transaxle.engine.plan.conversion import PlannedTensor
from transaxle.move.runs import Item, Run
from transaxle.move.transfer import Transfer
from transaxle.torch_tensors.tensor_bytes import Bytes


class Passing:
    """The tensors of a plan on their way into files.

    Args:
        tensors: of a plan.
        takers: who writes each; nobody: several ranks do, so that none of them sees all of it.
        rank: this rank.
    """

    def __init__(self, tensors: Sequence[PlannedTensor], takers: Sequence[tuple[int, ...]], rank: int) -> None:
        pairs = list(enumerate(zip(tensors, takers, strict=True)))
        self.items = [Item(number, tensor.nbytes, tensor.transfers, to) for number, (tensor, to) in pairs]
        """The tensors, to be assembled."""
        self.scattered = [tensor for _, (tensor, to) in pairs if not to]
        """Those of which no rank sees all."""
        self.own = 0
        """Bytes that this rank has taken."""
        self._mine = {number: (tensor.name, xxhash.xxh3_128()) for number, (tensor, to) in pairs if rank in to}

    def take(self, run: Run, data: Bytes) -> None:
        """Take the next bytes of a tensor."""
        self.own += run.size
        if run.item.key in self._mine:
            self._mine[run.item.key][1].update(data.data)

    def found(self) -> dict[str, str]:
        """Return the hashes of the tensors that this rank has seen all of."""
        return {name: hashed.hexdigest() for name, hashed in self._mine.values()}


def places(planned: Sequence[Transfer], start: int, stop: int) -> Iterator[Transfer]:
    """Yield the parts of a tensor's places that hold its bytes `[start, stop)`."""
    for place in planned:
        low, high = max(start, place.target), min(stop, place.target_end)
        if low < high:
            yield Transfer(place.file, place.source + low - place.target, low, high - low)
