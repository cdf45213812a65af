"""Derives the tensors that a model has in a dialect from the model's config alone, and treats layers of one kind as
one.

Experts are never enumerated one by one. The experts stay one axis, even in dialects whose tensor names contain the
expert's number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
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
"""Maximum number of layers of one kind; needed because a config file may claim any number of layers."""
_ROWS = 128
"""Megatron pads the vocabulary to a multiple of this number of rows times the number of tensor-parallel ranks."""
AHEAD = ("ahead_", "mtp_")
"""Name prefixes of the logical tensors in multi-token-prediction layers, which inference engines keep as separate
models.
"""
_LAYER, _DEPTH = "l", "L"
"""The axis of layers, and the axis whose size is the number of the first multi-token-prediction layer, if these layers
are numbered after the others.
"""
_ROUNDS = 12
"""Maximum number of rounds in which conditions that depend on the presence of other tensors are evaluated."""


@dataclass(frozen=True)
class TensorKind:
    """The stored tensors that one mapping rule (table line) describes and that differ only in the number of their
    layer.
    """

    line: Line
    """Mapping rule of the dialect that describes these tensors."""
    sizes: Mapping[str, int]
    """Axis -> size of the axis in these layers."""
    layout: Layout
    """Layout of each of these tensors."""
    axes: tuple[str, ...]
    """Axes that number the layers in the names of these tensors."""
    experts: tuple[str, ...]
    """Axes that number the experts in the names of these tensors."""


@dataclass
class Model:
    """The logical tensors that a model has according to its config, and the tensors that store them in a dialect."""

    family: Family
    """Model family, with its tensors and dialects."""
    sizes: Sizes
    """Sizes of the family's axes, from the model's config."""
    tp: int = 1
    """Number of tensor-parallel ranks, on which the padding of the vocabulary depends; 0 means no padding."""
    ahead: bool = False
    """Whether the model has its multi-token-prediction layers, about which a config alone does not decide."""
    stored: frozenset[str] = frozenset()
    """Logical tensors that a checkpoint of the model has in some layer. They are present in all layers in which the
    config does not rule them out.
    """
    encoding: str = PLAIN
    """Encoding of the tensors that may be encoded, on which conditions of mapping rules may depend."""
    _emptied: dict[frozenset[str], Sizes] = field(default_factory=dict)
    undecided: set[str] = field(default_factory=set)
    """Logical tensors whose presence in the model the config does not determine; they are treated as absent."""

    @cached_property
    def experts(self) -> frozenset[str]:
        """Names of the axes that number experts."""
        return frozenset(axis for cut in self.family.other_cuts if cut.mesh.startswith("ep") for axis in cut.axes)

    @cached_property
    def layer_axes(self) -> frozenset[str]:
        """Names of the axes that number layers in stored tensor names."""
        return self.family.name_axes - self.experts

    @cached_property
    def present(self) -> Mapping[str, frozenset[Index]]:
        """Logical tensor -> the layers in which it exists. A tensor tied to another tensor (such as a tied head) is
        absent.

        The condition of a tensor may depend on the presence of other tensors, even in a circle. Tensors whose
        conditions refer only to one another count as absent, unless `ahead` is true. These are the tensors of
        multi-token-prediction layers, which trainers and inference engines keep separately.

        Raises:
            UsageError: with the code UNKNOWN_AXIS if the config does not show the number of layers.
            Refused: with the code UNSUPPORTED if a condition depends on the index of the expert.
        """
        layers: dict[str, set[Index]] = {name: set() for name in self.family.tensors}
        candidates = {name: list(self._indices(self.axes_of(name))) for name in self.family.tensors}
        candidates = {name: indices for name, indices in candidates.items() if name not in self.sizes.originals}
        if self.ahead:  # the circles begin with all tensors present, and those whose conditions are false go
            for name, indices in candidates.items():
                layers[name].update(index for index in indices if self.is_ahead(name, index))
        for _ in range(_ROUNDS):
            before = {name: len(indices) for name, indices in layers.items()}
            self.undecided.clear()
            for name, indices in candidates.items():
                when = self.family.tensors[name].when
                self._refuse_experts(when, name)
                for index in indices:
                    value = self.holds(when, dict(zip(self.axes_of(name), index, strict=True)), layers)
                    if value is None and name not in self.stored:
                        self.undecided.add(name)
                    if value or (value is None and name in self.stored):
                        layers[name].add(index)
                    elif self.ahead:
                        layers[name].discard(index)
            if {name: len(indices) for name, indices in layers.items()} == before:
                break
        return {name: frozenset(indices) for name, indices in layers.items()}

    def is_ahead(self, tensor: str, index: Index) -> bool:
        """Return whether a logical tensor belongs to a multi-token-prediction layer.

        Args:
            tensor: name of the logical tensor.
            index: index of its layer, along the axes of `axes_of`.
        """
        depth = self.sizes.at({}).get(_DEPTH)
        at = dict(zip(self.axes_of(tensor), index, strict=True))
        return tensor.startswith(AHEAD) or (depth is not None and at.get(_LAYER, -1) >= depth)

    def axes_of(self, tensor: str) -> tuple[str, ...]:
        """Return those axes of a logical tensor whose indices are layer numbers."""
        return tuple(axis for axis in self.family.tensors[tensor].axes if axis in self.layer_axes)

    def kinds(self, dialect: Dialect) -> dict[str, dict[Index, TensorKind]]:
        """Return, for each logical tensor and layer, which kind of stored tensor contains it in a dialect.

        Args:
            dialect: a dialect of the family; logical tensors without a mapping rule in this dialect are absent from the
                result.

        Raises:
            Refused: with the code AMBIGUOUS if two mapping rules may store the same tensor; with the code UNSUPPORTED
                if one mapping rule applies to only some of the layers or experts in one stored tensor.
            UsageError: with the code UNKNOWN_AXIS if the size of a necessary axis is unknown.
        """
        kinds: dict[str, dict[Index, TensorKind]] = defaultdict(dict)
        sure: set[tuple[str, Index]] = set()
        alike: dict[tuple[Line, tuple[tuple[str, int], ...]], TensorKind] = {}
        for line in dialect.lines:
            if line.read_only:
                continue
            axes = tuple(axis for axis in line.name.axes if axis in self.layer_axes)
            for index in self._indices(axes) if self._any(line) else ():
                value = self._is_stored(line, dict(zip(axes, index, strict=True)))
                if value is False:
                    continue
                kind = self._kind(line, axes, dict(zip(axes, index, strict=True)), alike)
                for component in line.expression.components:
                    for at in self._layers_of(component, axes, index):
                        earlier = kinds[component].get(at)
                        if earlier is not None and bool(value) == ((component, at) in sure):
                            message = f"{line.whole}\n{earlier.line.whole}\nboth may hold {component}"
                            hint = "Add to the config the keys on which the conditions of the two lines depend."
                            raise refuse("AMBIGUOUS", message, hint=hint)
                        if earlier is None or value:
                            kinds[component][at] = kind
                        if value:
                            sure.add((component, at))
        return kinds

    def stored_shapes(
        self, dialect: Dialect, among: Mapping[str, Collection[Index]] | None = None
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and shape of every tensor that the model has in a dialect; see `kinds_by_name`."""
        return ((name, kind.layout.shape) for name, kind in self.kinds_by_name(dialect, among))

    def kinds_by_name(
        self, dialect: Dialect, among: Mapping[str, Collection[Index]] | None = None
    ) -> Iterator[tuple[str, TensorKind]]:
        """Yield the name and kind of every tensor that the model has in a dialect, including one tensor per expert.

        Args:
            dialect: a dialect of the family.
            among: logical tensor -> layers; only tensors with one of these in them are yielded. None means all.

        Raises:
            TransaxleError: the errors that `kinds` raises.
        """
        yielded: set[tuple[int, Index]] = set()
        for component, by_layer in self.kinds(dialect).items():
            for layer, kind in by_layer.items():
                if among is not None and layer not in among.get(component, ()):
                    continue
                fixed = dict(zip(self.axes_of(component), layer, strict=True))
                key = id(kind.line), tuple(fixed[axis] for axis in kind.axes)
                if key in yielded:
                    continue
                yielded.add(key)
                numbering = kind.line.name.numbering(kind.sizes)
                spans = [
                    (fixed[axis],) if axis in kind.axes else range(kind.sizes[axis]) for axis in kind.line.name.axes
                ]
                for position in product(*spans):
                    numbers = [number for number in numbering.numbers(position) if number is not None]
                    if len(numbers) == len(numbering.counters):
                        yield kind.line.name.format(tuple(numbers)), kind

    def check_decided(self, dialect: Dialect) -> None:
        """Refuse a config that does not determine whether the model has a certain matrix; vectors, which are small, are
        not checked.

        Args:
            dialect: the dialect whose stored matrices are checked.

        Raises:
            UsageError: with the code AMBIGUOUS if the presence of a matrix is undetermined; the message lists the
                missing config keys.
        """
        lines = [line for line in dialect.lines if not line.read_only and len(line.expression.dims) > 1]
        matrices = {component for line in lines for component in line.expression.components}
        open_tensors = sorted(name for name in self.undecided & matrices if not name.startswith(AHEAD))
        if not open_tensors:
            return
        names = set[str]().union(*(when.names for name in open_tensors if (when := self.family.tensors[name].when)))
        other_names = {*self.family.tensors, *self.family.name_axes, *self.family.let_formulas, *self.sizes.at({})}
        keys = sorted(key for key in names - other_names if self.sizes.settings.get(key) is None)
        lacks = f": it lacks {', '.join(keys)}" if keys else ""
        message = f"the config does not say whether the model has {', '.join(open_tensors)}{lacks}"
        raise refuse("AMBIGUOUS", message, hint="Give a config that also has the model's defaults for these keys.")

    def holds(
        self, condition: Formula | None, index: Mapping[str, int], layers: Mapping[str, Iterable[Index]]
    ) -> bool | None:
        """Evaluate a condition for one layer; the result is None if the config does not determine it.

        Args:
            condition: the condition to evaluate; a condition of None is always true.
            index: axis -> index of the layer.
            layers: logical tensor -> the layers in which it exists.
        """
        if condition is None:
            return True
        present = dict(words(self.encoding))
        for name in condition.names & self.family.tensors.keys():
            original = self.sizes.originals.get(name, (name,))[-1]
            axes = self.axes_of(original)
            if all(axis in index for axis in axes):
                present[name] = tuple(index[axis] for axis in axes) in set(layers[original])
            else:
                present[name] = bool(layers[original])
        value = self.sizes.holds(condition, index, present)
        # Configs write null for a feature that the model lacks, but a formula treats null as a missing key.
        empty = [key for key in condition.names if key in self.sizes.settings and self.sizes.settings[key] is None]
        return (
            value
            if value is not None or not empty
            else self._without(frozenset(empty)).holds(condition, index, present)
        )

    def _without(self, keys: frozenset[str]) -> Sizes:
        """Return the axis sizes for a copy of the config in which the given keys are false."""
        if keys not in self._emptied:
            config, settings = self.sizes.config, {**self.sizes.settings, **dict.fromkeys(keys, False)}
            whole = settings if self.sizes.settings is config else {**config, "text_config": settings}
            self._emptied[keys] = Sizes(self.family, whole, self.sizes.overrides)
        return self._emptied[keys]

    def _is_stored(self, line: Line, index: Mapping[str, int]) -> bool | None:
        """Return whether a mapping rule stores a tensor for a layer: the rule's logical tensors exist, and the rule's
        condition is true. None means that the config does not determine whether the rule stores the tensor.
        """
        for component in line.expression.components:
            layers = self.present.get(component, frozenset())
            covered = set(self._layers_of(component, tuple(index), tuple(index.values())))
            if not covered & layers:
                return False
            if not covered <= layers:
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

    def _layers_of(self, component: str, axes: tuple[str, ...], index: Index) -> list[Index]:
        """Return the layers of a logical tensor that one stored tensor contains: one layer, or all layers if they are
        stacked.
        """
        sizes, at = self.sizes.at({}), dict(zip(axes, index, strict=True))
        layer_axes = self.axes_of(component)
        return list(product(*((at[axis],) if axis in at else range(sizes[axis]) for axis in layer_axes)))

    def _any(self, line: Line) -> bool:
        return all(self.present.get(component) for component in line.expression.components)

    def _kind(
        self,
        line: Line,
        axes: tuple[str, ...],
        index: Mapping[str, int],
        alike: dict[tuple[Line, tuple[tuple[str, int], ...]], TensorKind],
    ) -> TensorKind:
        sizes = self._with_padding(line, self.sizes.at(index))
        experts = tuple(axis for axis in line.name.axes if axis in self.experts)
        needed = sorted({*line.expression.axes, *experts})
        for axis in needed:
            if axis not in sizes:
                raise unknown_axis(axis, line.text)
        key = line, tuple((axis, sizes[axis]) for axis in needed)
        if key not in alike:
            alike[key] = TensorKind(line, sizes, line.expression.layout(sizes), axes, experts)
        return alike[key]

    def _with_padding(self, line: Line, sizes: Mapping[str, int]) -> dict[str, int]:
        """Add the size of the vocabulary's padding by Megatron's rule, if the caller did not set that size."""
        padded_sizes = dict(sizes)
        for node in line.expression.dims if line.expression.padding - sizes.keys() else ():
            segments = node.segments if isinstance(node, Sum) else ()
            (*unsized,) = {axis for name, part in segments if name == PADDING for axis in axes_in(part)} - sizes.keys()
            if len(unsized) == 1:
                padded_sizes[unsized[0]] = -size(node, {**sizes, unsized[0]: 0}) % (_ROWS * self.tp or 1)
        return padded_sizes

    def _indices(self, axes: Iterable[str]) -> Iterator[Index]:
        sizes, axes = self.sizes.at({}), tuple(axes)
        for axis in axes:
            if axis not in sizes:
                raise unknown_axis(axis, self.family.name)
        if prod(sizes[axis] for axis in axes) > _MOST_INDICES:
            counts = " x ".join(f"{axis}={sizes[axis]}" for axis in axes)
            raise refuse("UNSUPPORTED", f"{self.family.name}: {counts} is more than {_MOST_INDICES} layers")
        return product(*(range(sizes[axis]) for axis in axes))

    def _refuse_experts(self, condition: Formula | None, rule: str) -> None:
        if condition is not None and not self.experts.isdisjoint(condition.names):
            raise _unlike(rule)


def _unlike(rule: str) -> TransaxleError:
    return refuse(
        "UNSUPPORTED", f"{rule}\nits experts are not alike", hint="Plan a conversion of a checkpoint instead."
    )
