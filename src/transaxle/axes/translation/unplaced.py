"""Unplaced tensors: what the target dialect has no place for keeps its name, and is never lost in silence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from transaxle.axes.layout.relayout import Check, Target
from transaxle.axes.notation.family import Dialect, Line
from transaxle.axes.translation.alike_tensors import AlikePart
from transaxle.axes.translation.holdings import AlikeSources, Holdings, LineSources, Sources
from transaxle.errors import Refusal, Where


def _origins(side: Target) -> set[tuple[str, str]]:
    """Return what a side of a check is read from: stored tensors, each with the logical tensor in it."""
    return {(origin.name, origin.component) for part in side.parts for origin in part.origins}


class Unplaced:
    """Finds the stored tensors that no target is made of.

    Args:
        holdings: the stored tensors.
        target: the dialect of the targets.
        lines: those of its lines that are written.

    Attributes:
        empty: tensors that have no elements, and no place for that reason.
        refusals: tensors of which only some parts have a place.
    """

    def __init__(self, holdings: Holdings, target: Dialect, lines: Sequence[Line]) -> None:
        self.empty: list[str] = []
        self.refusals: list[Refusal] = []
        self._holdings = holdings
        self._target = target
        self._lines = lines
        self._used: set[tuple[str, str]] = set()
        self._alike: dict[tuple[LineSources, Line], list[AlikePart]] = defaultdict(list)

    def use(self, line: Line, by_component: Mapping[str, Sources]) -> None:
        """Take the sources of one target of a line for placed."""
        for sources in by_component.values():
            if isinstance(sources, AlikeSources):
                self.parts_taken(line, sources.line_sources).append(sources.origins)
            else:
                origins = (place.origin for place in sources.places.values())
                self._used.update((origin.name, origin.component) for origin in origins)

    def parts_taken(self, line: Line, of: LineSources) -> list[AlikePart]:
        """Return the alike tensors of a stored line that the targets of a line take; those of other targets are added
        by the caller.
        """
        return self._alike[of, line]

    def names(self, checks: Iterable[Check], *, clean: bool) -> Iterator[str]:
        """Yield the tensors that keep their names.

        A tensor of which only some parts have a place cannot be kept whole: that is refused. One without elements has
        no place where its axis of size 0 numbers the target's tensors (zero experts): it is left out.

        Args:
            checks: a copy that only a check reads has the place of the other one.
            clean: nothing was refused so far.
        """
        checked = [(_origins(check.first), _origins(check.second)) for check in checks]
        # The targets of a line take equally many.
        wholly = {of for (of, _), found in self._alike.items() if len(found) * len(found[0]) == len(of.places)}
        left = [(line, slot) for line, slot in self._holdings.bound.names if not self._all_in(wholly, line, slot)]
        asked = {line for line, _ in left}
        used = set(self._used)
        for (of, _), found in self._alike.items():
            if checked or of.line in asked:
                used.update((origin.name, origin.component) for each in found for origin in each)
        for first, second in checked:
            if first <= used or second <= used:
                used |= first | second
            else:  # neither has a place: the second one keeps its name
                used |= first - second
        for line, slot in left:
            yield from self._homeless(line, slot, used, clean=clean)

    def _all_in(self, wholly: Container[LineSources], line: Line, slot: str) -> bool:
        """Tell whether each tensor of a stored line has a place, as far as that is known without a look at them."""
        found = [
            any(
                sources.line is line and sources in wholly
                for sources in self._holdings.sources.get((component, slot), ())
            )
            for component in line.expression.components
        ]
        return all(found)

    def _homeless(self, line: Line, slot: str, used: Container[tuple[str, str]], *, clean: bool) -> Iterator[str]:
        components = line.expression.components
        nowhere = self._numbers_nothing(line)
        for name in self._holdings.bound.names[line, slot].values():
            homeless = [component for component in components if (name, component) not in used]
            if len(homeless) == len(components):
                if nowhere:
                    self.empty.append(name)
                else:
                    yield name
            elif homeless and clean:
                message = f"{line.text}\n{', '.join(homeless)} does not fit into dialect {self._target.label}"
                hint = "Add a line for it with --rules, or choose another dialect."
                self.refusals.append(Refusal("UNSUPPORTED", message, Where(None, name), hint))

    def _numbers_nothing(self, line: Line) -> bool:
        """Tell whether every target tensor of a stored line would have a number of an axis of size 0 in its name."""
        known = self._holdings.sizes.at({})
        empty = {axis for axis in line.expression.axes if known.get(axis) == 0}
        wanted = [
            other
            for other in self._lines
            if not set(other.expression.components).isdisjoint(line.expression.components)
        ]
        return bool(empty and wanted) and all(not empty.isdisjoint(other.name.axes) for other in wanted)
