"""Added tensors: what a program adds on its own account, such as a bias of the router that balances the load.

Zeros of it are the same as none. So a dialect whose program always has it gets zeros where the source has none, and
where a target has no place for it, zeros are left out; what is not zero would change what the model computes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from itertools import product

from msgspec.structs import replace

from transaxle.axes.layout.bind import WEIGHT
from transaxle.axes.layout.relayout import Check, Stored, Target, unchanged
from transaxle.axes.layout.solve import unknown_axis
from transaxle.axes.notation.family import Dialect, Line
from transaxle.axes.translation.holdings import Holdings
from transaxle.axes.translation.undecided_lines import LineConditions
from transaxle.errors import Refusal, Where

_FLOAT = "F32"
"""Type of the zeros: that in which programs add."""
_CORRECT = (
    "If the model has them, correct its config (--config FILE, config=); else remove them, or keep all names with "
    '--to safetensors:identity (to="safetensors:identity").'
)
_NONZERO = (
    "The model computes with these values: choose a dialect that has the tensor, or keep all names with --to "
    'safetensors:identity (to="safetensors:identity").'
)


class AddedTensors:
    """The added tensors of a source and a target dialect.

    Args:
        holdings: the source.
        target: the dialect.
        conditions: of its lines.
    """

    def __init__(self, holdings: Holdings, target: Dialect, conditions: LineConditions) -> None:
        self._holdings = holdings
        self._target = target
        self._conditions = conditions
        self._added = holdings.bound.family.added

    def concern(self, line: Line) -> bool:
        """Tell whether a line is of added tensors."""
        return not self._added.keys().isdisjoint(line.expression.components)

    def have_place(self, line: Line, index: Mapping[str, int]) -> bool:
        """Tell whether the target's program has what a line holds: it may have more than the config says."""
        if line.else_zeros or self._target is self._holdings.bound.dialect:
            return True
        tensors = (self._holdings.bound.family.tensors[component] for component in line.expression.components)
        return all(self._holdings.holds(tensor.when, index) is not False for tensor in tensors)

    def zeros(self) -> Iterator[Target]:
        """Yield the tensors that are written as zeros: those that the target's program has, and the source has not.

        Raises:
            UsageError: UNKNOWN_AXIS where a size is not known.
        """
        for line in self._target.lines:
            (component, *_) = line.expression.components
            if not line.else_zeros or line.read_only or (component, WEIGHT) in self._holdings.sources:
                continue
            sizes = self._holdings.sizes.at({})
            for axis in (*line.name.axes, *sorted(line.expression.axes)):
                if axis not in sizes:
                    raise unknown_axis(axis, line.text)
            layout, when = line.expression.layout(sizes), self._added[component]
            for position in product(*(range(sizes[axis]) for axis in line.name.axes)):
                index = dict(zip(line.name.axes, position, strict=True))
                if self._holdings.holds(when, index) and self._conditions.holds(line, index) is not False:
                    numbers = line.name.numbering(sizes).numbers(position)
                    name = line.name.format(tuple(number or 0 for number in numbers))
                    yield Target(name, _FLOAT, layout, index, (), line.text, component)

    def left_out(self, kept: Collection[str], stored: Mapping[str, Stored]) -> Iterator[tuple[Line, list[Check]]]:
        """Yield the lines of added tensors that have no place in the target, with the checks that each is zero.

        Args:
            kept: the stored tensors that have no place.
            stored: the source's tensors by name.
        """
        for (line, slot), names in self._holdings.bound.names.items() if self._added else ():
            if slot != WEIGHT or not self.concern(line):
                continue
            sources = [unchanged(name, stored[name]) for name in names.values() if name in kept]
            why = f"{line.text}\n{self._target.label} has no such tensor"
            checks = [Check(source, replace(source, parts=()), why, _NONZERO) for source in sources]
            if checks:
                yield line, checks


def ruled_out(holdings: Holdings) -> Iterator[Refusal]:
    """Yield a refusal for each line of the source whose tensors exist although the config says that the model has none.

    Programs leave them out, and what they build computes something else than what was trained. What depends on the
    layer, or on other tensors, is passed over: names say more of it than a table knows.

    Args:
        holdings: the checkpoint.
    """
    family, settings = holdings.bound.family, holdings.sizes.settings
    for (component, slot), lines in holdings.sources.items():
        when = family.tensors[component].when
        if slot != WEIGHT or when is None or component in family.copies:
            continue
        for line in (sources.line for sources in lines):
            if line.else_zeros or (line.read_only and component in family.added):
                continue  # programs have it on their own account
            keys = [(key, settings.get(key)) for key in sorted(when.names - family.tensors.keys())]
            said = [f"{key}: {json.dumps(value)}" for key, value in keys if isinstance(value, bool | int | str)]
            if said and holdings.sizes.holds(when, {}) is False:
                name = next(iter(holdings.bound.names[line, WEIGHT].values()))
                message = f"{line.text}\nis there, but a {family.name} of this config has none ({', '.join(said)})"
                yield Refusal("UNEXPECTED_TENSOR", message, Where(None, name), _CORRECT)
