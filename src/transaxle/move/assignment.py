"""Who takes what: things that must stay together, and the one of several that has least to do."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, Self, TypeVar

Thing = TypeVar("Thing", bound=Hashable)


class Unions(Generic[Thing]):
    """Disjoint sets: things that turn out to be one, or to have one owner."""

    def __init__(self) -> None:
        self._above: dict[Thing, Thing] = {}

    def first(self, thing: Thing) -> Thing:
        """Return the one that stands for the set of a thing."""
        self._above.setdefault(thing, thing)
        while self._above[thing] != thing:
            self._above[thing] = self._above[self._above[thing]]
            thing = self._above[thing]
        return thing

    def join(self, one: Thing, other: Thing) -> None:
        """Make two sets one."""
        self._above[self.first(one)] = self.first(other)


class Load(dict[int, int]):
    """Rank -> bytes that it has to do so far.

    The least loaded rank takes what comes next. The rank number breaks ties, since all ranks must choose the same one
    without asking each other.
    """

    @classmethod
    def of(cls, ranks: Iterable[int]) -> Self:
        """Return the load of ranks that have nothing to do yet."""
        return cls(dict.fromkeys(ranks, 0))

    def least(self, ranks: Iterable[int] | None = None) -> int:
        """Return the least loaded rank, of all of them or some."""
        return min(self if ranks is None else ranks, key=lambda rank: (self.get(rank, 0), rank))

    def add(self, rank: int, size: int) -> int:
        """Give a rank so many bytes more, and return it."""
        self[rank] = self.get(rank, 0) + size
        return rank
