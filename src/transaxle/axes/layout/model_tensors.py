"""What a model has, from its config alone: the stored tensors of a dialect, those of alike layers as one.

Experts are never enumerated: an axis that expert-parallel ranks share out stays an axis, also where it is in names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod

from transaxle.axes.geometry import axes_in
from transaxle.axes.layout.relayout import unknown_axis
from transaxle.axes.notation.expression import PADDING, Layout, Sum, size
from transaxle.axes.notation.family import PLAIN, Dialect, Family, Formula, Line, Sizes, words
from transaxle.errors import TransaxleError, refuse

Index = tuple[int, ...]
_MOST_INDICES = 100_000
"""Cap on the layers of one kind: a config may claim any number."""
_ROWS = 128
"""Megatron pads a vocabulary to so many rows for each tensor-parallel rank, unless it is told otherwise."""
_AHEAD = "ahead_"
"""Begins the names of layers that predict ahead, which engines keep as models of their own."""
_ROUNDS = 12
"""Cap on the rounds in which conditions that name other tensors settle."""


@dataclass(frozen=True)
class Kind:
    """Stored tensors of one line that are alike but for their layer."""

    line: Line
    """The line."""
    sizes: Mapping[str, int]
    """Size of every axis."""
    layout: Layout
    """Of each of them."""
    axes: tuple[str, ...]
    """Axes in its names that number layers."""
    experts: tuple[str, ...]
    """Axes in its names that number experts."""


@dataclass
class Model:
    """The logical tensors of a model, and where a dialect stores them."""

    family: Family
    """Its family."""
    sizes: Sizes
    """Sizes of its axes, by its config."""
    tp: int = 1
    """Tensor-parallel ranks for which a vocabulary is padded; 0: it is not."""
    _emptied: dict[frozenset[str], Sizes] = field(default_factory=dict)
    undecided: set[str] = field(default_factory=set)
    """Logical tensors that the config neither asks for nor excludes, and which are taken as absent."""

    @cached_property
    def experts(self) -> frozenset[str]:
        """Axes that number experts."""
        return frozenset(axis for cut in self.family.other_cuts if cut.mesh.startswith("ep") for axis in cut.axes)

    @cached_property
    def numbered(self) -> frozenset[str]:
        """Axes in names that number layers."""
        return self.family.name_axes - self.experts

    @cached_property
    def present(self) -> Mapping[str, frozenset[Index]]:
        """Logical tensor -> the layers in which it exists; one that is another by a tie is not there.

        Conditions may name other tensors, in a circle too: what nothing outside of the circle asks for is not there.
        Layers that predict ahead are so, which trainers and engines keep apart.

        Raises:
            UsageError: UNKNOWN_AXIS where a number of layers is not known.
            Refused: UNSUPPORTED where experts of one layer are not alike.
        """
        there: dict[str, set[Index]] = {name: set() for name in self.family.tensors}
        asked = {name: list(self._indices(self.axes_of(name))) for name in self.family.tensors}
        asked = {name: indices for name, indices in asked.items() if name not in self.sizes.originals}
        for _ in range(_ROUNDS):
            before = sum(map(len, there.values()))
            self.undecided.clear()
            for name, indices in asked.items():
                when = self.family.tensors[name].when
                self._refuse_experts(when, name)
                for index in indices:
                    value = self.holds(when, dict(zip(self.axes_of(name), index, strict=True)), there)
                    if value is None:
                        self.undecided.add(name)
                    elif value:
                        there[name].add(index)
            if sum(map(len, there.values())) == before:
                break
        return {name: frozenset(indices) for name, indices in there.items()}

    def axes_of(self, tensor: str) -> tuple[str, ...]:
        """Return the axes of a logical tensor that number layers."""
        return tuple(axis for axis in self.family.tensors[tensor].axes if axis in self.numbered)

    def kinds(self, dialect: Dialect) -> dict[str, dict[Index, Kind]]:
        """Return what stores each logical tensor in a dialect, by its layer.

        Args:
            dialect: a dialect of the family; what it has no line for is absent.

        Raises:
            Refused: AMBIGUOUS, UNSUPPORTED where nothing tells which line holds a tensor.
            UsageError: UNKNOWN_AXIS where a size is not known.
        """
        found: dict[str, dict[Index, Kind]] = defaultdict(dict)
        sure: set[tuple[str, Index]] = set()
        alike: dict[tuple[Line, tuple[tuple[str, int], ...]], Kind] = {}
        for line in dialect.lines:
            if line.read_only:
                continue
            axes = tuple(axis for axis in line.name.axes if axis in self.numbered)
            for index in self._indices(axes) if self._any(line) else ():
                value = self._stored(line, dict(zip(axes, index, strict=True)))
                if value is False:
                    continue
                kind = self._kind(line, axes, dict(zip(axes, index, strict=True)), alike)
                for component in line.expression.components:
                    for at in self._covered(component, axes, index):
                        other = found[component].get(at)
                        if other is not None and bool(value) == ((component, at) in sure):
                            message = f"{line.whole}\n{other.line.whole}\nboth may hold {component}"
                            hint = "The config decides which: complete it."
                            raise refuse("AMBIGUOUS", message, hint=hint)
                        if other is None or value:
                            found[component][at] = kind
                        if value:
                            sure.add((component, at))
        return found

    def stored(self, dialect: Dialect) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and the shape of every stored tensor of a dialect, experts included.

        Raises:
            TransaxleError: as `kinds`.
        """
        done: set[tuple[int, Index]] = set()
        for component, by_layer in self.kinds(dialect).items():
            for layer, kind in by_layer.items():
                fixed = dict(zip(self.axes_of(component), layer, strict=True))
                key = id(kind.line), tuple(fixed[axis] for axis in kind.axes)
                if key in done:
                    continue
                done.add(key)
                numbering = kind.line.name.numbering(kind.sizes)
                spans = [
                    (fixed[axis],) if axis in kind.axes else range(kind.sizes[axis]) for axis in kind.line.name.axes
                ]
                for position in product(*spans):
                    numbers = [number for number in numbering.numbers(position) if number is not None]
                    if len(numbers) == len(numbering.counters):
                        yield kind.line.name.format(tuple(numbers)), kind.layout.shape

    def check_decided(self, dialect: Dialect) -> None:
        """Refuse a config that leaves open whether the model has some matrix; vectors are small enough to be noted.

        Args:
            dialect: one whose tensors count.

        Raises:
            UsageError: AMBIGUOUS, with the keys that it lacks.
        """
        lines = [line for line in dialect.lines if not line.read_only and len(line.expression.dims) > 1]
        matrices = {component for line in lines for component in line.expression.components}
        left = sorted(name for name in self.undecided & matrices if not name.startswith(_AHEAD))
        if not left:
            return
        asked = set[str]().union(*(when.names for name in left if (when := self.family.tensors[name].when)))
        known = {*self.family.tensors, *self.family.name_axes, *self.family.named, *self.sizes.at({})}
        keys = sorted(key for key in asked - known if self.sizes.settings.get(key) is None)
        lacks = f": it lacks {', '.join(keys)}" if keys else ""
        message = f"the config does not say whether the model has {', '.join(left)}{lacks}"
        raise refuse("AMBIGUOUS", message, hint="Add to a copy of the config what the model's defaults are.")

    def holds(
        self, condition: Formula | None, index: Mapping[str, int], there: Mapping[str, Iterable[Index]]
    ) -> bool | None:
        """Evaluate a condition at a layer; None where the config does not tell.

        Args:
            condition: the condition.
            index: the layer.
            there: logical tensor -> the layers in which it exists.
        """
        if condition is None:
            return True
        present = dict(words(PLAIN))
        for name in condition.names & self.family.tensors.keys():
            original = self.sizes.originals.get(name, (name,))[-1]
            axes = self.axes_of(original)
            if all(axis in index for axis in axes):
                present[name] = tuple(index[axis] for axis in axes) in set(there[original])
            else:
                present[name] = bool(there[original])
        value = self.sizes.holds(condition, index, present)
        # A key that is null says that there is none of it; a formula takes it for one that is not there.
        empty = [key for key in condition.names if key in self.sizes.settings and self.sizes.settings[key] is None]
        return (
            value
            if value is not None or not empty
            else self._without(frozenset(empty)).holds(condition, index, present)
        )

    def _without(self, keys: frozenset[str]) -> Sizes:
        """Return sizes by a config in which some keys are false."""
        if keys not in self._emptied:
            config, settings = self.sizes.config, {**self.sizes.settings, **dict.fromkeys(keys, False)}
            whole = settings if self.sizes.settings is config else {**config, "text_config": settings}
            self._emptied[keys] = Sizes(self.family, whole, self.sizes.given)
        return self._emptied[keys]

    def _stored(self, line: Line, index: Mapping[str, int]) -> bool | None:
        """Tell whether a line holds a tensor at a layer: all its parts are there, and its condition holds."""
        for component in line.expression.components:
            layers = self.present.get(component, frozenset())
            wanted = set(self._covered(component, tuple(index), tuple(index.values())))
            if not wanted & layers:
                return False
            if not wanted <= layers:
                message = f"{line.whole}\nis one tensor for all layers, but {component} is in some of them only"
                raise refuse("UNSUPPORTED", message, hint="Choose a dialect that names its layers.")
        self._refuse_experts(line.when, line.whole)
        along = [axis for axis in self.axes_of(line.expression.components[0]) if axis not in index]
        values = {
            self.holds(line.when, {**index, **dict(zip(along, at, strict=True))}, self.present)
            for at in (self._indices(along) if line.when is not None else [(0,) * len(along)])
        }
        if len(values) > 1:
            message = f"{line.whole}\nis one tensor for all of {', '.join(along)}, but holds for some of them only"
            raise refuse("UNSUPPORTED", message, hint="Choose a dialect that names its layers.")
        return next(iter(values), False)

    def _covered(self, component: str, axes: tuple[str, ...], index: Index) -> list[Index]:
        """Return the layers of a logical tensor that a stored tensor of a layer has."""
        known, at = self.sizes.at({}), dict(zip(axes, index, strict=True))
        own = self.axes_of(component)
        return list(product(*((at[axis],) if axis in at else range(known[axis]) for axis in own)))

    def _any(self, line: Line) -> bool:
        return all(self.present.get(component) for component in line.expression.components)

    def _kind(
        self,
        line: Line,
        axes: tuple[str, ...],
        index: Mapping[str, int],
        alike: dict[tuple[Line, tuple[tuple[str, int], ...]], Kind],
    ) -> Kind:
        sizes = self._padded(line, self.sizes.at(index))
        experts = tuple(axis for axis in line.name.axes if axis in self.experts)
        needed = sorted({*line.expression.axes, *experts})
        for axis in needed:
            if axis not in sizes:
                raise unknown_axis(axis, line.text)
        key = line, tuple((axis, sizes[axis]) for axis in needed)
        if key not in alike:
            alike[key] = Kind(line, sizes, line.expression.layout(sizes), axes, experts)
        return alike[key]

    def _padded(self, line: Line, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return sizes with those of padding, where nothing says them: as Megatron pads a vocabulary."""
        found = dict(sizes)
        for node in line.expression.dims if line.expression.padding - sizes.keys() else ():
            segments = node.segments if isinstance(node, Sum) else ()
            (*unsized,) = {axis for name, part in segments if name == PADDING for axis in axes_in(part)} - sizes.keys()
            if len(unsized) == 1:
                found[unsized[0]] = -size(node, {**sizes, unsized[0]: 0}) % (_ROWS * self.tp or 1)
        return found

    def _indices(self, axes: Iterable[str]) -> Iterator[Index]:
        known, axes = self.sizes.at({}), tuple(axes)
        for axis in axes:
            if axis not in known:
                raise unknown_axis(axis, self.family.name)
        if prod(known[axis] for axis in axes) > _MOST_INDICES:
            what = " x ".join(f"{axis}={known[axis]}" for axis in axes)
            raise refuse("UNSUPPORTED", f"{self.family.name}: {what} is more than {_MOST_INDICES} layers")
        return product(*(range(known[axis]) for axis in axes))

    def _refuse_experts(self, condition: Formula | None, what: str) -> None:
        if condition is not None and not self.experts.isdisjoint(condition.names):
            raise _unlike(what)


def _unlike(what: str) -> TransaxleError:
    return refuse("UNSUPPORTED", f"{what}\nits experts are not alike", hint="Plan the conversion of a checkpoint.")
