"""Finds where a checkpoint stores each logical tensor: by which mapping rules, with which indices and layouts.

Everything that depends on stored shapes is computed here, once per stored tensor. The result is a `Holdings` object.

The layers and experts of one mapping rule are usually alike: every combination of their numbers exists, and all tensors
have one shape, dtype and encoding. For similar tensors everything follows from the numbers, and a tensor is visited
only if a target needs it. So a rank of a model with 70,000 tensors plans its own shards without visiting the tensors of
other ranks.

If a checkpoint contains a tensor several times, the first one is read, and the duplicates must equal it before output
is committed. Equal names prove nothing: ties, replicas, and steps that are merged are compared bit by bit while the
data streams.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations, islice, product
from math import prod
from operator import attrgetter, itemgetter
from typing import overload

import msgspec
from msgspec.structs import replace

from transaxle.axes.layout.bind import WEIGHT, BoundNames, Index, split_slot
from transaxle.axes.layout.relayout import (
    JOIN,
    NOTHING,
    Basis,
    Check,
    Origin,
    Shape,
    Stored,
    Target,
    TargetPart,
    factors,
    fill,
    solve,
)
from transaxle.axes.notation.expression import Expression, Layout, Share
from transaxle.axes.notation.family import PLAIN, Formula, Line, NumberFormat, Sizes, words
from transaxle.errors import Refusal, TransaxleError, Where


class SourceTensor(msgspec.Struct, frozen=True):
    """A stored tensor that contains part of a logical tensor."""

    origin: Origin
    """Where the logical tensor's elements lie; if dims contain copies, only the first copy counts."""
    whole: Layout
    """Layout of the stored tensor, including copies of elements along its dims."""
    sizes: Mapping[str, int]
    """Axis -> size, for this stored tensor."""
    form: NumberFormat
    """Dtype and encoding of this stored tensor."""


class Grid(msgspec.Struct, frozen=True):
    """A set of indices that consists of all combinations of certain numbers along each axis."""

    numbers: tuple[tuple[int, ...], ...]
    """For each axis, the numbers that occur, in ascending order."""

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


def grids(bound: BoundNames, stored: Mapping[str, Stored]) -> dict[tuple[Line, str], Grid]:
    """Return the grid of indices for each mapping rule and slot whose tensors have one shape and format, without gaps.

    Args:
        bound: the stored names, matched with the lines of a dialect.
        stored: the stored tensors by name.
    """
    grid_by_key = {}
    for (line, slot), names in bound.names.items():
        if len(names) < 2:
            continue
        along = (set(map(itemgetter(place), names)) for place in range(len(line.name.axes)))
        grid = Grid(tuple(tuple(sorted(numbers)) for numbers in along))
        if len(grid) == len(names) and _have_one_form(names, bound, stored):
            grid_by_key[line, slot] = grid
    return grid_by_key


def _have_one_form(names: Mapping[Index, str], bound: BoundNames, stored: Mapping[str, Stored]) -> bool:
    """Return whether all of the named tensors have the same shape, dtype and encoding."""
    tensors = list(map(stored.__getitem__, names.values()))
    if len(set(map(_DTYPE, tensors))) > 1 or len(set(map(_SHAPE, tensors))) > 1:
        return False
    encodings = bound.encodings
    return not encodings or len({encodings.get(name, PLAIN) for name in names.values()}) == 1


_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")


class AlikeTensors(Mapping[Index, SourceTensor]):
    """Mapping from index to stored tensor, for the similar tensors of one mapping rule; each is created on demand.

    Args:
        names: index (layer, expert) -> stored name.
        grid: the indices of all tensors.
        axes: the axes of the logical tensor that are numbered in the names, in the order of the name.
        model: one of the tensors, as a pattern: all tensors differ from it only in name and index.

    Attributes:
        made: the tensors that have been created so far.
    """

    def __init__(self, names: Mapping[Index, str], grid: Grid, axes: tuple[str, ...], model: SourceTensor) -> None:
        self.grid = grid
        self.axes = axes
        self.model = model
        self.names = names
        self.made: dict[Index, SourceTensor] = {}

    def __getitem__(self, index: Index) -> SourceTensor:
        tensor = self.made.get(index)
        if tensor is None:
            origin, model = self.model.origin, self.model
            numbers = dict(zip(self.axes, index, strict=True))
            new_origin = Origin(self.names[index], origin.component, origin.layout, numbers)
            tensor = self.made[index] = SourceTensor(new_origin, model.whole, model.sizes, model.form)
        return tensor

    def __len__(self) -> int:
        return len(self.grid)

    def __iter__(self) -> Iterator[Index]:
        return iter(self.grid)

    def keys_along(self, axes: Sequence[str]) -> Iterator[Index]:
        """Return every combination of the numbers along some of the axes, in the order of the axes in the names."""
        common = [axis for axis in self.axes if axis in axes]
        numbers = product(
            *(numbers for axis, numbers in zip(self.axes, self.grid.numbers, strict=True) if axis in common)
        )
        if common == list(axes):
            return numbers
        places = [common.index(axis) for axis in axes]
        return (tuple([each[place] for place in places]) for each in numbers)


class AlikePart(Sequence[Origin]):
    """The tensors of one mapping rule that one target reads, sorted by index.

    Args:
        tensors: all stored tensors of the mapping rule.
        common: axis -> index, for the axes that are numbered in the target's name and also in the names of `tensors`.
    """

    __slots__ = ("common", "tensors")

    def __init__(self, tensors: AlikeTensors, common: Mapping[str, int]) -> None:
        self.tensors = tensors
        self.common = common

    @property
    def numbers(self) -> list[tuple[int, ...]]:
        """For each axis of the tensors, the numbers that occur; every combination of these numbers exists."""
        common, along = self.common, zip(self.tensors.axes, self.tensors.grid.numbers, strict=True)
        return [(common[axis],) if axis in common else numbers for axis, numbers in along]

    @property
    def names(self) -> Iterable[str]:
        """Stored names of the tensors that the target reads."""
        tensors, common = self.tensors, self.common
        if len(common) == len(tensors.axes):  # one tensor
            return (tensors.names[tuple([common[axis] for axis in tensors.axes])],)
        return map(tensors.names.__getitem__, product(*self.numbers))

    @property
    def sources(self) -> Iterator[SourceTensor]:
        """The stored tensors that the target reads, sorted by index."""
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


_FACTORED = "\nThis state has another shape than its parameter, as of Adafactor: no table says where its axes are."
_AS_IT_IS = 'To keep names and shapes, choose a target format without a dialect:  --to dcp  (to="dcp").'
_BYTES = "U8"
"""Safetensors code of the dtype in which 4-bit codes are stored, two per byte."""
_ONE_SIZE = (
    "An axis has one size in a model. If this is a file of one rank, it may have only a part of some tensors: convert "
    'the whole checkpoint. To keep names and shapes: --to safetensors:identity (to="safetensors:identity").'
)
_NAMED = 3
"""Maximum number of tensors that an error lists for one axis size."""
Key = tuple[str, str]
"""Name of a logical tensor, and slot (the empty text for the weight, or the name of an optimizer state)."""
_Filled = tuple[Layout, dict[str, int]]
"""The layout and the axis sizes of one stored tensor."""
_Layer = tuple[tuple[str, int], ...]
"""Layer in which an axis has a certain size, as pairs of an axis in stored names and its index."""


class LineSources(msgspec.Struct, frozen=True, eq=False, dict=True):
    """The stored tensors of one mapping rule that contain elements of one logical tensor."""

    line: Line
    """The mapping rule, from the source's dialect."""
    axes: tuple[str, ...]
    """Axes of the logical tensor in the stored name, in the order of the name, except axes that only number copies."""
    scalar: bool
    """Whether each stored tensor is a single number (such as an optimizer's step) and not one number per element."""
    places: Mapping[Index, SourceTensor]
    """Index along `axes` -> stored tensor, sorted by index."""
    copies: Sequence[tuple[Index, SourceTensor]]
    """Duplicates of the tensors in `places` under further names, as `(index, stored tensor)`."""
    present: Collection[Index]
    """All indices for which a stored name exists, even if the shape of the tensor is wrong."""

    @property
    def alike(self) -> AlikeTensors | None:
        """The rule's tensors if they differ only in the numbers in their names; otherwise None."""
        return self.places if isinstance(self.places, AlikeTensors) else None

    def join(self, axes: Sequence[str]) -> JoinedSources | None:
        """Return the sources of targets that each read different similar tensors; None if the rule's tensors are not
        similar.

        Args:
            axes: axes that are numbered in the targets' names.
        """
        if self.alike is None or not set(axes) <= set(self.axes):
            return None
        return JoinedSources(self, self.alike, axes)

    @cached_property
    def _projections(self) -> dict[tuple[str, ...], frozenset[Index]]:
        return {}

    @cached_property
    def _counts(self) -> dict[tuple[str, ...], Counter[Index]]:
        return {}

    def count(self, index: Mapping[str, int]) -> int:
        """Return how many stored tensors have these indices."""
        common = tuple(axis for axis in self.axes if axis in index)
        # `count` is called for every target tensor; without a cache, the cost would be quadratic in the number of
        # experts.
        counts = self._counts.get(common)
        if counts is None:
            order = [self.axes.index(axis) for axis in common]
            counts = self._counts[common] = Counter(tuple(position[p] for p in order) for position in self.places)
        return counts[tuple(index[axis] for axis in common)]

    def at(self, index: Mapping[str, int]) -> bool:
        """Return whether a stored tensor may have elements with these indices."""
        common = tuple(axis for axis in self.axes if axis in index)
        if isinstance(self.present, Grid):
            along = zip(self.axes, self.present.numbers, strict=True)
            return all(index[axis] in numbers for axis, numbers in along if axis in index)
        projection = self._projections.get(common)
        if projection is None:
            order = [self.axes.index(axis) for axis in common]
            projection = frozenset(tuple(position[p] for p in order) for position in self.present)
            self._projections[common] = projection
        return tuple(index[axis] for axis in common) in projection


class ComponentSources(msgspec.Struct, eq=False):
    """The stored tensors from which one logical tensor in one target tensor is read."""

    line_sources: LineSources
    """The stored tensors of the mapping rule from which the logical tensor is read."""
    places: dict[frozenset[tuple[str, int]], SourceTensor]
    """`(axis, index)` pairs of the stored name -> source tensor."""

    @property
    def first(self) -> SourceTensor:
        """The first of the source tensors."""
        return next(iter(self.places.values()))

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the logical tensor's axes, and of the axes in stored names where these sizes are known."""
        return _sizes_of(self.first)

    @property
    def forms(self) -> set[NumberFormat]:
        """All combinations of dtype and encoding that the source tensors have."""
        return {place.form for place in self.places.values()}

    @property
    def origins(self) -> tuple[Origin, ...]:
        """For each source tensor, where its elements lie; sorted by index."""
        origins = (place.origin for place in self.places.values())
        return tuple(sorted(origins, key=lambda origin: [origin.index[axis] for axis in self.line_sources.axes]))


class AlikeSources(msgspec.Struct, eq=False, dict=True):
    """The source tensors of one logical tensor in one target, if they differ only in the numbers in their names."""

    line_sources: LineSources
    """The stored tensors of the mapping rule from which the logical tensor is read."""
    origins: AlikePart
    """For each source tensor, where its elements lie; sorted by index."""

    @cached_property
    def places(self) -> Mapping[frozenset[tuple[str, int]], SourceTensor]:
        """`(axis, index)` pairs of the stored name -> source tensor."""
        return {frozenset(tensor.origin.index.items()): tensor for tensor in self.origins.sources}

    @property
    def first(self) -> SourceTensor:
        """The first of the source tensors."""
        return next(self.origins.sources)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the logical tensor's axes, and of the axes in stored names where these sizes are known."""
        return _sizes_of(self.first)

    @property
    def forms(self) -> set[NumberFormat]:
        """The single combination of dtype and encoding that the source tensors have, as a set."""
        return {self.origins.tensors.model.form}


class JoinedSources(Mapping[Index, AlikeSources]):
    """Mapping from a target's index to the sources of one logical tensor in the target; values are created on demand.

    Args:
        line_sources: the stored tensors of the sources' mapping rule.
        alike: these tensors, indexed by the numbers in their names.
        axes: axes that are numbered in the targets' names.
    """

    def __init__(self, line_sources: LineSources, alike: AlikeTensors, axes: Sequence[str]) -> None:
        self.line_sources = line_sources
        self.alike = alike
        self._axes = axes
        along = dict(zip(alike.axes, alike.grid.numbers, strict=True))
        self._grid = Grid(tuple([along[axis] for axis in axes]))

    def __getitem__(self, index: Index) -> AlikeSources:
        if index not in self._grid:
            raise KeyError(index)
        return AlikeSources(self.line_sources, AlikePart(self.alike, dict(zip(self._axes, index, strict=True))))

    def __contains__(self, index: object) -> bool:
        return index in self._grid

    def __len__(self) -> int:
        return len(self._grid)

    def __iter__(self) -> Iterator[Index]:
        return self.alike.keys_along(self._axes)


Sources = ComponentSources | AlikeSources
"""The stored tensors from which one logical tensor in one target tensor is read."""


def _sizes_of(place: SourceTensor) -> dict[str, int]:
    origin, known_sizes = place.origin, place.sizes
    axes = [axis for share in origin.layout.shares[origin.component] for axis, _, _ in share.axes]
    return {axis: known_sizes[axis] for axis in [*axes, *origin.index] if axis in known_sizes}


def solve_sizes(
    bound: BoundNames, stored: Mapping[str, Stored], sizes: Sizes, alike: Mapping[tuple[Line, str], Grid]
) -> Sizes:
    """Add the axis sizes that follow from stored names and shapes.

    Args:
        bound: the stored names, matched with the lines of a dialect.
        stored: the stored tensors by name.
        sizes: the sizes known so far.
        alike: grids of the mapping rules whose tensors differ only in the numbers in their names.
    """
    counted: dict[str, int] = {}
    equations: dict[Expression, dict[Shape, Mapping[str, int]]] = defaultdict(dict)
    for (line, slot), names in bound.names.items():
        for position, axis in enumerate(line.name.axes):
            # The size of an axis that is numbered in names is the highest index plus one.
            grid = alike.get((line, slot))
            highest = grid.numbers[position][-1] if grid else max(map(itemgetter(position), names))
            counted[axis] = max(counted.get(axis, 0), highest + 1)
        weights = bound.names.get((line, WEIGHT), {})
        known_shapes = equations.get(line.expression, {})
        one_is_enough = slot == WEIGHT and (line, slot) in alike
        for index, name in islice(names.items(), 1) if one_is_enough else names.items():
            # One tensor of each shape is enough; further tensors would only repeat the same equation.
            if stored[name].shape in known_shapes:
                continue
            # Optimizer states have the shapes of their weights and add no equation. The exception: the weight is stored
            # as packed 4-bit codes, and only its state shows the number of columns.
            if slot == WEIGHT or (index in weights and _unpacks(stored[name], stored[weights[index]])):
                known_shapes = equations[line.expression]
                known_shapes[stored[name].shape] = line.name.index_at(index)
    known_sizes = sizes.at({})
    return solve(
        equations, sizes.with_solved({axis: count for axis, count in counted.items() if axis not in known_sizes})
    )


def _unpacks(state: Stored, weight: Stored) -> bool:
    """Return whether a weight has packed 4-bit codes, and its optimizer state has twice as many columns."""
    columns = weight.shape[-1:] if weight.dtype == _BYTES else ()
    return columns != () and state.shape == (*weight.shape[:-1], 2 * columns[0])


class Holdings:
    """Where a checkpoint stores each logical tensor, with errors for tensors that do not fit.

    Args:
        bound: the stored names, matched with the lines of a dialect.
        stored: the stored tensors by name.
        sizes: the axis sizes known so far.
        basis: the axes of the conversion, after axes that it never separates have been joined.
        whole: expression with a sum that is never separated -> its replacement, for use if sizes are unknown.
        alike: grids of the mapping rules whose tensors differ only in the numbers in their names.

    Attributes:
        sources: `(logical tensor, slot)` -> stored tensors by mapping rule; several rules may store the same elements.
        refusals: errors for stored tensors that do not fit their mapping rules.
        broken: `(logical tensor, slot)` of each tensor in `refusals`.
        contradictions: errors for axes for which tensors show several sizes.
    """

    def __init__(
        self,
        bound: BoundNames,
        stored: Mapping[str, Stored],
        sizes: Sizes,
        basis: Basis,
        whole: Mapping[Expression, Expression],
        alike: Mapping[tuple[Line, str], Grid],
    ) -> None:
        self.bound = bound
        self.stored = stored
        self.sizes = sizes
        self._whole = whole
        self.refusals: list[Refusal] = []
        self.broken: set[Key] = set()
        self.sources: dict[Key, list[LineSources]] = defaultdict(list)
        self._varying = tuple(sorted(sizes.layer_axes))
        self._shown: dict[tuple[str, _Layer], dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        self._filled: dict[tuple[int, bool, Shape, tuple[int | None, ...]], _Filled] = {}
        self._originals: dict[tuple[int, str], Layout] = {}
        for (line, slot), names in bound.names.items():
            expression = basis.rewrite(line.expression)
            scalar = slot != WEIGHT and self._is_scalar(line, names)
            grid = None if scalar or not set(self._varying).isdisjoint(line.name.axes) else alike.get((line, slot))
            first = dict(islice(names.items(), 1 if grid else None))
            usable = dict(self._layouts(line, expression, first, scalar))
            if grid and not usable:  # no tensor of the grid fits the rule: each gets an error
                grid = None
                usable = dict(self._layouts(line, expression, dict(islice(names.items(), 1, None)), scalar))
            if len(usable) < len(first if grid else names):
                self.broken.update((component, slot) for component in line.expression.components)
            for component in line.expression.components:
                if grid and set(line.name.axes) <= set(bound.family.tensors[component].axes):
                    model = self._line_sources(line, component, first, usable, scalar)
                    self.sources[component, slot].append(_all_like(model, names, grid))
                    continue
                of_all = dict.fromkeys(names.values(), *usable.values()) if grid else usable
                self.sources[component, slot].append(self._line_sources(line, component, names, of_all, scalar))
        self.contradictions = tuple(_contradictions(self._shown, sizes.at({})))

    def at(self, component: str, index: Mapping[str, int]) -> bool:
        """Return whether a logical tensor is stored for these indices."""
        return any(sources.at(index) for sources in self.sources.get((component, WEIGHT), ()))

    def holds(self, condition: Formula | None, index: Mapping[str, int], encoding: str | None = None) -> bool | None:
        """Evaluate the condition of a mapping rule or of a tensor; the result is None if it is unknown.

        In a condition, the name of a tensor means that the tensor is stored at this index. The name of an encoding
        means that the tensor in question has the encoding; this is unknown if `encoding` is None.
        """
        if condition is None:
            return True
        # A tensor's name in a condition is true if the tensor is stored at this index.
        tensor_names = condition.names & self.bound.family.tensors.keys()
        truth = {name: self.at(name, index) for name in tensor_names}
        return self.sizes.holds(condition, index, truth if encoding is None else truth | words(encoding))

    def _is_scalar(self, line: Line, names: Mapping[Index, str]) -> bool:
        """Return whether a slot has one number per tensor: a single element, unlike the shape of the parameter."""
        weights = self.bound.names.get((line, WEIGHT), {})
        shapes = {index: self.stored[name].shape for index, name in names.items()}
        alike = any(index in weights and self.stored[weights[index]].shape == shapes[index] for index in shapes)
        return not alike and all(prod(shape) == 1 for shape in shapes.values())

    def _layouts(
        self, line: Line, expression: Expression, names: Mapping[Index, str], scalar: bool
    ) -> Iterator[tuple[str, _Filled]]:
        """Yield each stored tensor's layout and axis sizes; add errors for tensors that do not fit their rule."""
        places = {axis: place for place, axis in enumerate(line.name.axes)}
        varying = [places.get(axis) for axis in self._varying]
        for position, name in names.items():
            shape = self.stored[name].shape
            # Tensors with equal keys have equal layouts. Models have few shapes, so each is solved once and not once
            # per layer.
            key = id(line), scalar, shape, tuple([None if place is None else position[place] for place in varying])
            if key not in self._filled:
                index = line.name.index_at(position)
                try:
                    self._filled[key] = self._fill(line, expression, name, index, scalar)
                except TransaxleError as error:
                    self.refusals.extend(self._misfits(name, shape, error))
                    continue
            yield name, self._filled[key]

    def _misfits(self, name: str, shape: Shape, error: TransaxleError) -> Iterator[Refusal]:
        """Yield the errors for a stored tensor that does not fit its rule, such as a factored optimizer state."""
        parameter, slot = split_slot(name)
        whole = self.stored.get(parameter)
        is_factored = slot != WEIGHT and whole is not None and whole.shape != shape
        for refusal in error.refusals:
            if is_factored and refusal.code == "SHAPE_MISMATCH":
                yield Refusal(refusal.code, refusal.message + _FACTORED, Where(None, name), _AS_IT_IS)
            else:
                yield Refusal(refusal.code, refusal.message, Where(None, name), refusal.hint)

    def _fill(self, line: Line, expression: Expression, name: str, index: Mapping[str, int], scalar: bool) -> _Filled:
        sizes, shape = self.sizes.at(index), self.stored[name].shape
        if scalar:
            dim_shares = tuple(Share(0, ()) for _ in shape)
            return Layout(shape, dict.fromkeys(expression.components, dim_shares)), sizes
        try:
            sizes = fill(expression, shape, sizes)
        except TransaxleError as error:
            if error.code != "UNKNOWN_AXIS" or line.expression not in self._whole:
                raise
            expression = self._whole[line.expression]
            sizes = fill(expression, shape, {**sizes, NOTHING: 0})
        self._note(line, expression, name, index, sizes)
        return expression.layout(sizes), sizes

    def _note(
        self, line: Line, expression: Expression, name: str, index: Mapping[str, int], sizes: Mapping[str, int]
    ) -> None:
        """Record the axis sizes that a tensor shows: one per axis, or per layer if the formula depends on the layer.

        Axes without a formula are skipped: in traced rules, one axis is used for all dims of equal size.
        """
        parameter, slot = split_slot(name)
        if slot != WEIGHT and parameter in self.stored and _unpacks(self.stored[name], self.stored[parameter]):
            return  # packed codes have half as many columns as the state, so the shapes cannot agree
        for axis in sorted(expression.axes - expression.padding - {NOTHING}):
            axes = [axis for axis in factors(axis) if axis in self.sizes.family.axes]
            if self.sizes.lack_formula(axes):
                continue
            along = frozenset[str]().union(*map(self.sizes.indices_of, axes or line.expression.axes))
            layer = tuple([(name_axis, index.get(name_axis, -1)) for name_axis in sorted(along)])
            label = JOIN.join(map(self.sizes.first_alike, axes)) or axis
            self._shown[label, layer][sizes[axis]].append(name)

    def _line_sources(
        self,
        line: Line,
        component: str,
        names: Mapping[Index, str],
        usable: Mapping[str, _Filled],
        scalar: bool,
    ) -> LineSources:
        tensor_axes = self.bound.family.tensors[component].axes
        # An axis that is in the stored name but not in the logical tensor only numbers copies of the tensor.
        axis_positions = [position for position, axis in enumerate(line.name.axes) if axis in tensor_axes]
        axes = tuple(line.name.axes[position] for position in axis_positions)
        places: dict[Index, SourceTensor] = {}
        copies: list[tuple[Index, SourceTensor]] = []
        present = set()
        has_all = len(axes) == len(line.name.axes)
        for position, name in sorted(names.items()):
            index = position if has_all else tuple(position[p] for p in axis_positions)
            present.add(index)
            if name not in usable:
                continue
            full_layout, sizes = usable[name]
            # In an inseparable sum, the axes do not belong to the logical tensor, but do not number copies either.
            layout = full_layout if NOTHING in sizes else self._without_copies(full_layout, component, tensor_axes)
            origin = Origin(name, component, layout, dict(zip(axes, index, strict=True)))
            form = NumberFormat(self.stored[name].dtype, self.bound.encodings.get(name, PLAIN))
            place = SourceTensor(origin, full_layout, sizes, form)
            # The first tensor is read; tensors with the same index must be equal to it.
            if places.setdefault(index, place) is not place:
                copies.append((index, place))
        in_order = places if has_all else dict(sorted(places.items()))
        return LineSources(line, axes, scalar, in_order, copies, frozenset(present))

    def _without_copies(self, full_layout: Layout, component: str, tensor_axes: Sequence[str]) -> Layout:
        """Return the layout reduced to the first index of every axis that the logical tensor does not have."""
        key = id(full_layout), component
        if key not in self._originals:
            shares = full_layout.shares[component]
            trimmed = tuple(
                Share(
                    share.offset,
                    tuple(item for item in share.axes if not set(factors(item[0])).isdisjoint(tensor_axes)),
                )
                for share in shares
            )
            self._originals[key] = full_layout if trimmed == shares else Layout(full_layout.shape, {component: trimmed})
        return self._originals[key]


def _contradictions(
    shown: Mapping[tuple[str, _Layer], Mapping[int, Sequence[str]]], known_sizes: Mapping[str, int]
) -> Iterator[Refusal]:
    """Yield an error for each axis whose size differs between tensors, and for each product axis of wrong size.

    Args:
        shown: `(axis, layer)` -> size -> stored tensors with that size; layer is `()` if layers do not differ in size.
        known_sizes: sizes from the config and the user.
    """
    agreed: dict[_Layer, dict[str, tuple[int, str]]] = {(): {axis: (size, "") for axis, size in known_sizes.items()}}
    for (axis, layer), names in shown.items():
        if len(names) > 1:
            # Most tensors have the right size, so the message lists those with unusual sizes first.
            *unusual, usual = sorted(names, key=lambda size: (len(names[size]), size))
            few = "; ".join(f"{size} in {', '.join(names[size][:_NAMED])}" for size in unusual)
            message = f"axis {axis} has several sizes: {few}; but {usual} in {', '.join(names[usual][:_NAMED])}"
            yield Refusal("SHAPE_MISMATCH", message, Where(None, names[unusual[0]][0]), _ONE_SIZE)
        else:
            ((size, tensors),) = names.items()
            agreed.setdefault(layer, {})[axis] = size, tensors[0]
    for layer, layer_sizes in agreed.items():
        joined = [axis for axis in layer_sizes if JOIN in axis]
        if joined:
            yield from _no_products(joined, agreed[()] | layer_sizes if layer else layer_sizes)


def _no_products(joined: Iterable[str], agreed: Mapping[str, tuple[int, str]]) -> Iterator[Refusal]:
    """Yield an error for each product axis whose size is not the product of the sizes of its factors.

    Args:
        joined: product axes (such as `g*r`).
        agreed: axis -> its size, and a tensor that shows it; the name is empty if the size does not come from a tensor.
    """
    products = {axis: Counter(factors(axis)) for axis in agreed}
    for axis in joined:
        parts, (size, name) = products[axis], agreed[axis]
        smaller = [other for other, less in products.items() if less < parts]
        alone = [agreed[factor][0] for factor in parts.elements() if factor in agreed]
        wrong = next((other for other in smaller if size % (agreed[other][0] or 1)), None)
        if len(alone) == parts.total() > 1 and prod(alone) != size:
            wrong = wrong or next(iter(parts))
        if wrong is not None and name:
            where = f" in {agreed[wrong][1]}" if agreed[wrong][1] else ""
            message = f"{axis} is {size}, but {wrong} is {agreed[wrong][0]}{where}: that is no part of it"
            yield Refusal("SHAPE_MISMATCH", message, Where(None, name), _ONE_SIZE)


def _all_like(model: LineSources, names: Mapping[Index, str], grid: Grid) -> LineSources:
    """Return the sources for all targets of a mapping rule, derived from the sources of the first target."""
    (place,) = model.places.values()
    return replace(model, places=AlikeTensors(names, grid, model.axes, place), present=grid)


_SPARED = (
    "Choose a dialect that has both tensors, or keep all names with --to safetensors:identity. If one of the two is "
    "outdated, remove it."
)


def agreements(holdings: Holdings, tied: Mapping[str, Sequence[str]]) -> tuple[list[Check], list[Refusal]]:
    """Return checks that duplicates of a tensor are equal, and errors for duplicates that cannot be compared.

    Args:
        holdings: where the checkpoint stores each logical tensor.
        tied: logical tensor -> tensors that must equal it, nearest first.
    """
    outcomes: list[Check | Refusal] = []
    for (component, slot), lines in holdings.sources.items():
        for first, second in [*combinations(lines, 2), *_with_original(holdings, component, slot, tied)]:
            outcomes.extend(_twins(first, second, f"{first.line.text} and {second.line.text} hold the same tensor"))
        for line in lines:
            outcomes.extend(_replicas(line))
    return _split_outcomes(outcomes)


def check_substitutes(
    holdings: Holdings, copies: Mapping[str, Sequence[str]], label: str
) -> tuple[list[Check], list[Refusal]]:
    """Check that tensors that a dialect cannot name equal the tensors that the dialect uses instead.

    Args:
        holdings: where the checkpoint stores each logical tensor.
        copies: logical tensor that the dialect cannot name -> tensors that the dialect uses instead, nearest first.
        label: label of the dialect.
    """
    outcomes: list[Check | Refusal] = []
    for component in copies:
        for first, second in _with_original(holdings, component, WEIGHT, copies):
            why = f"{label} has no name for {first.line.text}\nand has {second.line.text} in its place"
            outcomes.extend(_twins(first, second, why))
    checks, refusals = _split_outcomes(outcomes)
    return [replace(check, hint=_SPARED) for check in checks], refusals


def _split_outcomes(outcomes: Iterable[Check | Refusal]) -> tuple[list[Check], list[Refusal]]:
    checks, refusals = list[Check](), list[Refusal]()
    for outcome in outcomes:
        if isinstance(outcome, Check):
            checks.append(outcome)
        else:
            refusals.append(outcome)
    return checks, refusals


def _with_original(
    holdings: Holdings, component: str, slot: str, tied: Mapping[str, Sequence[str]]
) -> Iterator[tuple[LineSources, LineSources]]:
    """Yield the first rule of a tensor, with the first rule of the nearest stored tensor to which it is tied."""
    originals = (holdings.sources.get((name, slot), []) for name in tied.get(component, ()))
    original = next(filter(None, originals), [])
    lines = holdings.sources.get((component, slot), [])
    yield from zip(lines[:1], original[:1], strict=False)


def _twins(first: LineSources, second: LineSources, why: str) -> Iterator[Check | Refusal]:
    """Yield checks that the tensors of two mapping rules, which store the same logical tensor, are equal."""
    common = [axis for axis in first.axes if axis in second.axes]
    candidates: dict[Index, list[SourceTensor]] = defaultdict(list)
    for place in second.places.values():
        candidates[tuple(place.origin.index[axis] for axis in common)].append(place)
    for place in first.places.values():
        counterparts = candidates.get(tuple(place.origin.index[axis] for axis in common), [])
        differing = [copy for copy in counterparts if not _alike(place, copy)]
        for copy in differing:
            message = f"{why}\nbut their sizes differ: {list(place.whole.shape)} and {list(copy.whole.shape)}"
            yield Refusal("SHAPE_MISMATCH", message, Where(None, copy.origin.name))
        if counterparts and not differing:
            yield Check(_read(place, [place], first.line.text), _read(place, counterparts, second.line.text), why)


def _read(place: SourceTensor, sources: Sequence[SourceTensor], rule: str) -> Target:
    """Return a target that has the layout of one stored tensor, but is read from other stored tensors.

    The target keeps the sources' dtype and encoding, because duplicates that differ in dtype or encoding are not equal.
    """
    origin = place.origin
    dtype = " and ".join(sorted({source.form.dtype for source in sources}))
    encoding = " and ".join(sorted({source.form.encoding for source in sources}))
    part = TargetPart(origin.component, tuple(source.origin for source in sources))
    return Target(origin.name, dtype, place.whole, origin.index, (part,), rule, origin.component, encoding)


def _alike(first: SourceTensor, second: SourceTensor) -> bool:
    """Return whether two stored tensors have equal sizes along all axes that they share."""
    first_sizes, second_sizes = (dict(_axis_sizes(place.origin)) for place in (first, second))
    return all(second_sizes.get(axis, size) == size for axis, size in first_sizes.items())


def _axis_sizes(origin: Origin) -> Iterator[tuple[str, int]]:
    return ((axis, size) for share in origin.layout.shares[origin.component] for axis, size, _ in share.axes)


def _replicas(line: LineSources) -> Iterator[Check]:
    """Yield checks that duplicates in one rule are equal: under more names, and along dims that repeat a tensor."""
    if line.alike is not None and line.alike.model.whole is line.alike.model.origin.layout:
        return
    rule = line.line.text
    why = f"{rule}: copies are equal"
    firsts = [(place, place) for place in line.places.values() if place.whole is not place.origin.layout]
    for place, original in [*firsts, *((place, line.places[position]) for position, place in line.copies)]:
        with_copies = replace(place, origin=replace(place.origin, layout=place.whole))
        yield Check(_read(place, [with_copies], rule), _read(place, [original], rule), why)
