"""Undecided lines: what becomes of a line whose condition the config does not decide.

The source's names may: a tensor that is stored under the name of a line `when x` says that x is true. Where they do not
either, a line may stand only if no other line could hold the same tensor instead; else both names would be written, and
one of them is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from transaxle.axes.layout.bind import WEIGHT, undecided
from transaxle.axes.notation.family import Line
from transaxle.axes.notation.formula import Formula
from transaxle.axes.notation.overlap import may_all_hold
from transaxle.axes.translation.holdings import Holdings
from transaxle.errors import Refusal

_Condition = tuple[Formula, Mapping[str, int]]


class LineConditions:
    """The conditions of a target's lines, as far as the config and the source's names tell.

    Args:
        lines: the lines that may be written.
        holdings: the source.
    """

    def __init__(self, lines: Sequence[Line], holdings: Holdings) -> None:
        self._holdings = holdings
        self._by_component: dict[str, list[Line]] = {}
        for line in lines:
            for component in line.expression.components:
                self._by_component.setdefault(component, []).append(line)
        self._stored = {
            sources.line: sources
            for (_, slot), held in holdings.sources.items()
            for sources in held
            # In which encoding a tensor is stored says nothing about that in which it will be written.
            if slot == WEIGHT and sources.line.when is not None and not sources.line.by_form
        }
        self._known: dict[tuple[Line, str | None, tuple[tuple[str, int], ...]], bool | None] = {}

    def holds(self, line: Line, index: Mapping[str, int], encoding: str | None = None) -> bool | None:
        """Tell whether a line applies at these indices; None where neither the config nor the names tell."""
        if line.when is None:
            return True
        value = self._holdings.holds(line.when, index, encoding)
        if value is not None or not self._stored:
            return value
        key = line, encoding, tuple(index.items())
        if key not in self._known:
            self._known[key] = self._from_names(line.when, index, encoding)
        return self._known[key]

    def _from_names(self, condition: Formula, index: Mapping[str, int], encoding: str | None) -> bool | None:
        """Return what the names of stored tensors say of a condition: lines that are stored apply."""

        def known(part: Formula) -> bool | None:
            return self._holdings.holds(part, index, encoding)

        axes = self._holdings.bound.family.name_axes
        shown: list[_Condition] = [
            (line.when, index)
            for line, sources in self._stored.items()
            if line.when is not None
            and not line.when.names.isdisjoint(condition.names - axes)
            and axes & line.when.names <= index.keys()
            and sources.at(index)
        ]
        if not shown or not may_all_hold(shown, known):
            return None  # names that contradict each other say nothing
        if not may_all_hold([(condition, index), *shown], known):
            return False
        opposite = Formula(f"not ({condition.text})", condition.named)
        return None if may_all_hold([(opposite, index), *shown], known) else True

    def rivals(self, line: Line, index: Mapping[str, int], encoding: str | None) -> list[Refusal]:
        """Return why an undecided line may not be written: others that may hold one of its tensors instead."""
        if self.holds(line, index, encoding) is not None:
            return []
        found = []
        for component in line.expression.components:
            for other in self._by_component[component]:
                at = {axis: index[axis] for axis in other.name.axes if axis in index}
                if other is not line and self.holds(other, at, encoding) is not False:
                    both = sorted((line, other), key=self._by_component[component].index)
                    known = partial(self._holdings.holds, index=index)
                    found.append(undecided(both, f"can hold {component}", self._holdings.bound.family, known))
        return found
