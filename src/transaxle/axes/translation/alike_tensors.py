"""Alike tensors: the layers and experts of one line, which differ in nothing but their numbers.

Where every combination of the numbers is there, and all tensors have one shape and form, all else follows from the
numbers. So no tensor is looked at until its part of a target is read, and a rank of a model of 70,000 tensors plans its
own part without a walk over the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from operator import attrgetter, itemgetter
from typing import overload

import msgspec

from transaxle.axes.layout.bind import Bound, Index
from transaxle.axes.layout.relayout import Origin, Stored
from transaxle.axes.notation.expression import Layout
from transaxle.axes.notation.family import Line
from transaxle.axes.notation.number_format import PLAIN, NumberFormat


class SourceTensor(msgspec.Struct, frozen=True):
    """A stored tensor that holds part of a logical tensor."""

    origin: Origin
    """Where its elements are, with copies along a dim reduced to the first."""
    whole: Layout
    """Layout of the stored tensor with all its copies."""
    sizes: Mapping[str, int]
    """Axis sizes of this stored tensor."""
    form: NumberFormat
    """Its dtype and encoding."""


class Grid(msgspec.Struct, frozen=True):
    """Every combination of some numbers along each axis."""

    numbers: tuple[tuple[int, ...], ...]
    """Along each axis, in order."""

    def __len__(self) -> int:
        return prod(map(len, self.numbers))

    def __iter__(self) -> Iterator[Index]:
        return product(*self.numbers)

    def __contains__(self, index: object) -> bool:
        return (
            isinstance(index, tuple)
            and len(index) == len(self.numbers)
            and all(number in along for number, along in zip(index, self.numbers, strict=True))
        )


def grids(bound: Bound, stored: Mapping[str, Stored]) -> dict[tuple[Line, str], Grid]:
    """Return the numbers of the lines whose tensors are alike: of one shape and form, and without gaps.

    Args:
        bound: the names.
        stored: the tensors.
    """
    found = {}
    for (line, slot), names in bound.names.items():
        if len(names) < 2:
            continue
        along = (set(map(itemgetter(place), names)) for place in range(len(line.name.axes)))
        grid = Grid(tuple(tuple(sorted(numbers)) for numbers in along))
        if len(grid) == len(names) and _have_one_form(names, bound, stored):
            found[line, slot] = grid
    return found


def _have_one_form(names: Mapping[Index, str], bound: Bound, stored: Mapping[str, Stored]) -> bool:
    """Tell whether all tensors have one shape, dtype and encoding."""
    tensors = list(map(stored.__getitem__, names.values()))
    if len(set(map(_DTYPE, tensors))) > 1 or len(set(map(_SHAPE, tensors))) > 1:
        return False
    encodings = bound.encodings
    return not encodings or len({encodings.get(name, PLAIN) for name in names.values()}) == 1


_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")


class AlikeTensors(Mapping[Index, SourceTensor]):
    """The tensors of one line that hold one logical tensor, each made when it is asked for.

    Args:
        names: index -> stored name.
        grid: the indices.
        axes: of the logical tensor in the names, in the order of the name.
        model: one of the tensors; the others differ from it in name and index.

    Attributes:
        made: the tensors that were asked for.
    """

    def __init__(self, names: Mapping[Index, str], grid: Grid, axes: tuple[str, ...], model: SourceTensor) -> None:
        self.grid = grid
        self.axes = axes
        self.model = model
        self.names = names
        self.made: dict[Index, SourceTensor] = {}

    def __getitem__(self, index: Index) -> SourceTensor:
        made = self.made.get(index)
        if made is None:
            origin, model = self.model.origin, self.model
            numbers = dict(zip(self.axes, index, strict=True))
            own = Origin(self.names[index], origin.component, origin.layout, numbers)
            made = self.made[index] = SourceTensor(own, model.whole, model.sizes, model.form)
        return made

    def __len__(self) -> int:
        return len(self.grid)

    def __iter__(self) -> Iterator[Index]:
        return iter(self.grid)

    def keys_along(self, axes: Sequence[str]) -> Iterator[Index]:
        """Return each combination of the numbers along some of the axes, in their order."""
        own = [axis for axis in self.axes if axis in axes]
        numbers = product(*(numbers for axis, numbers in zip(self.axes, self.grid.numbers, strict=True) if axis in own))
        if own == list(axes):
            return numbers
        places = [own.index(axis) for axis in axes]
        return (tuple([each[place] for place in places]) for each in numbers)


class AlikePart(Sequence[Origin]):
    """Some of the tensors of one line, as sources of a target, sorted by their indices.

    Args:
        tensors: all tensors of the line.
        common: the axes in the target's name, with the number that all of them have; they are axes of the tensors.
    """

    __slots__ = ("common", "tensors")

    def __init__(self, tensors: AlikeTensors, common: Mapping[str, int]) -> None:
        self.tensors = tensors
        self.common = common

    @property
    def numbers(self) -> list[tuple[int, ...]]:
        """Those along each axis of the tensors; every combination is there."""
        common, along = self.common, zip(self.tensors.axes, self.tensors.grid.numbers, strict=True)
        return [(common[axis],) if axis in common else numbers for axis, numbers in along]

    @property
    def names(self) -> Iterable[str]:
        """Stored names of the tensors."""
        tensors, common = self.tensors, self.common
        if len(common) == len(tensors.axes):  # one tensor
            return (tensors.names[tuple([common[axis] for axis in tensors.axes])],)
        return map(tensors.names.__getitem__, product(*self.numbers))

    @property
    def sources(self) -> Iterator[SourceTensor]:
        """The tensors."""
        return map(self.tensors.__getitem__, product(*self.numbers))

    def __len__(self) -> int:
        return prod(map(len, self.numbers))

    def __iter__(self) -> Iterator[Origin]:
        return (tensor.origin for tensor in self.sources)

    @overload
    def __getitem__(self, place: int) -> Origin: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Origin]: ...
    def __getitem__(self, place: int | slice) -> Origin | Sequence[Origin]:
        if isinstance(place, slice):
            return tuple(self[each] for each in range(*place.indices(len(self))))
        count = len(self)
        if not -count <= place < count:
            raise IndexError(place)
        place %= count
        index = []
        for numbers in reversed(self.numbers):
            place, at = divmod(place, len(numbers))
            index.append(numbers[at])
        return self.tensors[tuple(reversed(index))].origin
