"""Replicas: ranks that hold the same part of a tensor, so that what a rank has itself is never sent to it.

A catalog names one rank for each chunk. A taker that holds the same part reads its own.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from transaxle.live.sharding.global_tensors import Census
from transaxle.live.sharding.memory import file_of, rank_of, tensor_of
from transaxle.move.runs import Item


class Replicas:
    """Which ranks hold the same parts of tensors, by the meshes that these are on.

    Tensors on no one mesh are left out: nothing says that their replicas are equal, and all takers shall have the
    values of one rank.

    Args:
        everything: what all ranks hold.
    """

    def __init__(self, everything: Census) -> None:
        self._holders: dict[str, frozenset[int]] = {}
        for tensor in everything.values():
            for held, ranks in tensor.boxes.items() if not tensor.loose else ():
                alike = frozenset(ranks) - tensor.spare
                if len(alike) > 1:
                    part = tensor.part_name(held)
                    self._holders |= {file_of(rank, part): alike for rank in alike}

    def near(self, item: Item) -> list[Item]:
        """Return an item as one for each rank that holds some of it itself, and one for all others.

        They share its key: no two of them have a taker in common.
        """
        shared = {each.file for each in item.transfers} & self._holders.keys()
        own = {
            taker: {file for file in shared if taker in self._holders[file] and rank_of(file) != taker}
            for taker in item.takers
        }
        if not any(own.values()):
            return [item]
        others = tuple(taker for taker in item.takers if not own[taker])
        found = [replace(item, takers=others)] if others else []
        for taker in filter(own.get, item.takers):
            made_of = [
                msgspec.structs.replace(each, file=file_of(taker, tensor_of(each.file)))
                if each.file in own[taker]
                else each
                for each in item.transfers
            ]
            found.append(replace(item, made_of=made_of, takers=(taker,)))
        return found
