"""Portions of work: what one worker does from beginning to end before it takes something else.

Where a target takes bytes at any offset, each tensor is a portion, and workers share even a single file. A service
takes the bytes of a file in order only: there all tensors of a file are one portion, so each file has one owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from transaxle.engine.plan.conversion import PlannedTensor

Item = TypeVar("Item")
Buffers = TypeVar("Buffers")


def portions(tensors: Sequence[PlannedTensor], *, ordered: bool) -> list[list[PlannedTensor]]:
    """Split tensors into portions.

    Args:
        tensors: in the order in which they lie in their files.
        ordered: the bytes of a file must be written in order.

    Post-condition: each tensor is in one portion, in the given order; if `ordered`, so are all tensors of a file, and
    with them those of the next file that a tensor goes on in.
    """
    if not ordered:
        return [[tensor] for tensor in tensors]
    owners: dict[str, list[PlannedTensor]] = {}
    found: list[list[PlannedTensor]] = []
    for tensor in tensors:
        files = dict.fromkeys(place.file for place in tensor.places)
        known = list({id(owner): owner for file in files if (owner := owners.get(file)) is not None}.values())
        portion = known[0] if known else []
        if not known:
            found.append(portion)
        for other in known[1:]:
            portion.extend(other)
            other.clear()
            owners.update((file, portion) for file, owner in owners.items() if owner is other)
        portion.append(tensor)
        owners.update(dict.fromkeys(files, portion))
    return [portion for portion in found if portion]


def in_turn(work: Callable[[Buffers, Item], None]) -> Callable[[Buffers, Iterable[Item]], None]:
    """Return what does to all items of a portion, one after another, what `work` does to one."""

    def all_of_it(buffers: Buffers, portion: Iterable[Item]) -> None:
        for item in portion:
            work(buffers, item)

    return all_of_it
