"""Sets of things that turned out to be one."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class Unions(Generic[Item]):
    """Disjoint sets."""

    def __init__(self) -> None:
        self._above: dict[Item, Item] = {}

    def first(self, item: Item) -> Item:
        """Return the one that stands for the set of an item."""
        self._above.setdefault(item, item)
        while self._above[item] != item:
            self._above[item] = self._above[self._above[item]]
            item = self._above[item]
        return item

    def join(self, one: Item, other: Item) -> None:
        """Make two sets one."""
        self._above[self.first(one)] = self.first(other)
