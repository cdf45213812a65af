"""Writes the text of a family's table of mapping rules, from the structure that all traces (traced models) share.

**Derivation**: computes the text of a table from traces, and notes on what the table omits.

**Structure**: what all traces have in common, before names are chosen. A *part* is a logical tensor of the structure.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import prod
from typing import Any

from transaxle.derivation.configs import (
    INDEX,
    SOMETIMES,
    Presence,
    Sizes,
    axis_letters,
    condition,
    first_free,
    holds,
    keys_of,
    leaves,
    negate,
    tensor_names,
)
from transaxle.derivation.moved_parts import (
    IN_NAME,
    AxisKey,
    AxisObservations,
    Dim,
    Layout,
    PaddingAxis,
    Part,
    Parts,
    UnpairedIndex,
    layout,
    parts,
)
from transaxle.derivation.patterns import HOLE, Numbering, Pattern, Patterns, Place
from transaxle.derivation.traces import HUB, MEMORY, SIDES, Trace, Underivable
from transaxle.move.workers import DisjointSets

Indices = tuple[int, ...]
_EVERYWHERE = frozenset({"model", "layers", "weight", "language"})
"""Words in tensor names that occur everywhere, and therefore do not identify a tensor."""


@dataclass(frozen=True)
class StoredLine:
    """One mapping rule of a dialect, whose axes have no names yet."""

    pattern: Pattern
    """Pattern of the stored tensors' names."""
    places: tuple[AxisKey, ...]
    """For each index in the tensor names, its axis."""
    layout: Layout
    """Layout of the stored tensors."""
    when: str | None = None
    """Condition under which the tensors exist; its index counts along the first axis in `places`."""


@dataclass(frozen=True)
class TiedPart:
    """A tensor in memory that shares the values of a second tensor, such as a head tied to the embedding."""

    alias: int
    """Index of the part (logical tensor) for the tied tensor."""
    original: int
    """Index of the part (logical tensor) for the stored tensor with the same values."""
    when: str
    """Condition under which the two tensors are tied."""


@dataclass
class Structure:
    """The contents of a table of mapping rules, without the names of axes and tensors."""

    parts: list[Part]
    """The parts: the logical tensors of the table."""
    axes: dict[int, tuple[AxisKey, ...]]
    """Index of a part -> axes of the part; axes that are indices in names are first."""
    when: dict[int, tuple[str, AxisKey | None]]
    """Index of a part -> (condition, axis of the index in the condition), for parts that do not always exist."""
    lines: dict[str, list[StoredLine]]
    """Dialect (hub or memory) -> its mapping rules."""
    sizes: dict[AxisKey, dict[int, set[int]]]
    """Axis -> index of the trace -> sizes of the axis in this trace."""
    name_axes: set[AxisKey]
    """Axes that are indices in tensor names."""
    ties: list[TiedPart] = field(default_factory=list)
    """Tensors that share the values of a second tensor."""
    left_out: list[str] = field(default_factory=list)
    """Notes on what the converter does but the table does not describe."""


def structure(
    traces: Sequence[Trace], *, careful: bool = False, compared: Mapping[str, str] | None = None
) -> Structure:
    """Return the structure that the given traces have in common.

    Args:
        traces: runs of the converter.
        careful: whether to accept a condition only if it is the only one that fits.
        compared: beginning of tensor names in memory -> known condition of these tensors.

    Raises:
        Underivable: if no mapping rule can describe a tensor; the message names the tensor.
    """
    numbering, first = Numbering(), None
    while True:
        try:
            return Builder(traces, numbering, careful=careful, compared=compared).build()
        except UnpairedIndex as error:
            first = first or error
            merged = numbering.with_more(error.numbering)
            is_known = merged.literal == numbering.literal and merged.ahead.keys() == numbering.ahead.keys()
            patterns = Patterns(traces)
            if is_known or not all(patterns.constant(number) for number in error.numbering.literal):
                raise first from None
            numbering = merged
        except Underivable as error:
            raise first or error from None


class Builder:
    """Builds the structure that the given traces have in common."""

    def __init__(
        self,
        traces: Sequence[Trace],
        numbering: Numbering,
        *,
        careful: bool = False,
        compared: Mapping[str, str] | None = None,
    ) -> None:
        self.traces = traces
        self.careful = careful
        self.compared = compared or {}
        self.found: Parts = parts(traces, numbering)
        self.numbers = {part: number for number, part in enumerate(self.found.all)}
        self.joined = DisjointSets[AxisKey]()
        self.reading = AxisObservations(self.numbers, self.joined, {})
        self.counts = self._counts()

    def build(self) -> Structure:
        """Return the structure that the traces have in common.

        Raises:
            Underivable: if no mapping rule can describe a tensor; the message names the tensor.
        """
        variants = self._layouts()
        aliases = self._aliases()
        for alias, source in aliases:
            self._join_alias(variants[MEMORY], alias, source)
        for side in SIDES:
            self._join_biases(variants[side])
        for place in self.counts:
            self.joined.join(place, self.found.axes.first(place))
        lines = {side: self._lines(self._settle(variants[side])) for side in SIDES}
        structure = Structure(list(self.found.all), {}, {}, lines, self._sizes(), set())
        structure.name_axes = {self.joined.first(place) for place in self.counts}
        for part, number in self.numbers.items():
            structure.axes[number] = self._axes(part)
        tied = self._tie(structure, aliases)
        for part, number in self.numbers.items():
            self._place_part(structure, part, number, tied.get(number, set()))
        self._check_memory(structure)
        return structure

    def _counts(self) -> dict[Place, dict[int, int]]:
        """Return place of an index in names -> index of the trace -> number of values that the index has."""
        counts: dict[Place, dict[int, int]] = defaultdict(dict)
        for at, trace in enumerate(self.traces):
            for side in SIDES:
                for name in trace.side(side):
                    pattern, indices = self.found.patterns.pattern(side, name)
                    for place, index in zip(pattern.places, indices, strict=True):
                        key = self.found.axes.first(place)
                        counts[key][at] = max(counts[key].get(at, 0), index + 1)
                        counts.setdefault(place, {})
        return counts

    def count(self, place: Place, trace: int) -> int:
        """Return the number of indices of an axis in names, in one trace."""
        return self.counts[self.found.axes.first(place)].get(trace, 0)

    def _sizes(self) -> dict[AxisKey, dict[int, set[int]]]:
        sizes: dict[AxisKey, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        for axis, sizes_by_trace in self.reading.sizes.items():
            for trace, size in sizes_by_trace:
                sizes[self.joined.first(axis)][trace].add(size)
        for place, counts in self.counts.items():
            for trace, count in counts.items():
                sizes[self.joined.first(place)][trace].add(count)
        return sizes

    def _layouts(self) -> dict[str, dict[Pattern, dict[Layout, set[tuple[int, Indices]]]]]:
        """Return the layouts of each name pattern, each with the traces and indices at which tensors have this
        layout.
        """
        variants: dict[str, dict[Pattern, dict[Layout, set[tuple[int, Indices]]]]] = {side: {} for side in SIDES}
        for at, trace in enumerate(self.traces):
            for side in SIDES:
                for name, numbers in trace.side(side).items():
                    contents = self.found.of[at].get((side, name))
                    if contents is None:
                        continue
                    pattern, indices = self.found.patterns.pattern(side, name)
                    read = layout(side, pattern.text, numbers.shape, contents, self.reading)
                    variants[side].setdefault(pattern, {}).setdefault(read, set()).add((at, indices))
        return variants

    def _settle(
        self, variants: Mapping[Pattern, Mapping[Layout, set[tuple[int, Indices]]]]
    ) -> dict[Pattern, dict[Layout, set[tuple[int, Indices]]]]:
        """Return the layouts with every axis replaced by the representative of its set, after all layouts have been
        read.
        """
        settled: dict[Pattern, dict[Layout, set[tuple[int, Indices]]]] = {}
        for pattern, layouts in variants.items():
            for read, where in layouts.items():
                settled.setdefault(pattern, {}).setdefault(read.with_axes(self.joined.first), set()).update(where)
        return settled

    def _lines(self, variants: Mapping[Pattern, Mapping[Layout, set[tuple[int, Indices]]]]) -> list[StoredLine]:
        lines = []
        for pattern, layouts in variants.items():
            places = tuple(self.joined.first(place) for place in pattern.places)
            conditions = self._variants(pattern, layouts) if len(layouts) > 1 else [None]
            for read, when in zip(layouts, conditions, strict=True):
                lines.append(StoredLine(pattern, places, read, when))
        return lines

    def _variants(self, pattern: Pattern, layouts: Mapping[Layout, set[tuple[int, Indices]]]) -> list[str | None]:
        """Return the condition for each layout of a name pattern; indices at which no tensor exists are ignored."""
        everywhere = {place for where in layouts.values() for place in where}
        hints = [word for read in layouts for part in read.parts for word in _words(self.found.all[part])]
        conditions: list[str | None] = []
        for where in layouts.values():
            presences = []
            for at, trace in enumerate(self.traces):
                indices_there, judged = (
                    frozenset(indices[0] if indices else 0 for trace_at, indices in places if trace_at == at)
                    for places in (where, everywhere)
                )
                count = self.count(pattern.places[0], at) if pattern.places else 0
                presences.append(Presence(trace.config, count, indices_there, judged))
            formula = condition(presences, hints)
            if formula is None:
                raise Underivable(f"{pattern.text}: it has several layouts, and nothing in the config says which")
            conditions.append(formula)
        if len(conditions) == 2 and keys_of(str(conditions[0])) != keys_of(str(conditions[1])):
            conditions[1] = negate(str(conditions[0]))
        return conditions

    def _axes(self, part: Part) -> tuple[AxisKey, ...]:
        """Return the axes of a part: first indices of names, in the order of the names, then digits (loops in dims)."""
        ordered = sorted(part.axes, key=lambda c: (c[0] != IN_NAME, c[1] != HUB, c[2]))
        axes = [self.joined.first(part.axes[coordinate]) for coordinate in ordered]
        which = 1 if any(c[0] != IN_NAME and c[1] == HUB for c in ordered) else 0
        for share in part.instances[0].move.shares[which]:
            axes += [self.joined.first(self.reading.digit(part, part.instances[0], digit)) for digit, _ in share.digits]
        return tuple(dict.fromkeys(axes))

    def _place_part(self, structure: Structure, part: Part, number: int, tied: set[int]) -> None:
        """Determine at which indices a part exists, and add the part to the structure."""
        places = list(dict.fromkeys(self.found.axes.first(place) for place in part.axes.values()))
        coordinates = [next(c for c, p in part.axes.items() if self.found.axes.first(p) == place) for place in places]
        present: list[set[Indices]] = [set() for _ in self.traces]
        for instance in part.instances:
            present[instance.trace].add(tuple(instance.at(coordinate) for coordinate in coordinates))
        whole = [set(product(*(range(self.count(place, at)) for place in places))) for at in range(len(self.traces))]
        for at in tied:
            present[at] = whole[at]
        statement = self._find_stated_condition(part, present)
        if statement is not None:
            structure.when[number] = statement, None
            return
        if all(here == full and here for here, full in zip(present, whole, strict=True)):
            return
        structure.when[number] = self._when(part, places, present)

    def _find_stated_condition(self, part: Part, present: Sequence[set[Indices]]) -> str | None:
        """Return the known condition of a part, if the part exists in exactly those traces in which it is true."""
        presences = self._whole_presences(present)
        name = part.patterns[SIDES.index(MEMORY)].text
        statements = (text for beginning, text in self.compared.items() if name.startswith(beginning))
        return next((text for text in statements if all(holds(text, presence) for presence in presences)), None)

    def _whole_presences(self, present: Sequence[set[Indices]]) -> list[Presence]:
        """Return for each trace whether a part exists at all."""
        return [
            Presence(trace.config, 0, frozenset({0} if indices_there else ()))
            for trace, indices_there in zip(self.traces, present, strict=True)
        ]

    def _when(self, part: Part, places: Sequence[Place], present: Sequence[set[Indices]]) -> tuple[str, AxisKey | None]:
        hints = _words(part, SIDES[:1])
        for at, place in enumerate(places):
            presences = []
            for trace, indices_there in enumerate(present):
                projected = frozenset(indices[at] for indices in indices_there)
                other_ranges = [
                    range(self.count(p, trace)) if i != at else sorted(projected) for i, p in enumerate(places)
                ]
                if indices_there != set(product(*other_ranges)):
                    break
                presences.append(Presence(self.traces[trace].config, self.count(place, trace), projected))
            else:
                formula = condition(presences, hints, careful=self.careful)
                if formula is not None:
                    return formula, self.joined.first(place)
        if not places:
            formula = condition(self._whole_presences(present), hints, careful=self.careful)
            if formula is not None:
                return formula, None
        return SOMETIMES, None

    def _aliases(self) -> dict[tuple[Pattern, Pattern], set[int]]:
        """Return (alias, stored name) -> indices of the traces in which the tensors with these two names in memory have
        the same values.
        """
        pairs: dict[tuple[Pattern, Pattern], set[int]] = defaultdict(set)
        for at, trace in enumerate(self.traces):
            firsts: dict[int, str] = {}
            for name in sorted(trace.memory, key=lambda name: name not in trace.hub):
                numbers = trace.memory[name]
                original = firsts.setdefault(int(numbers.flat[0]), name) if numbers.size else name
                if original == name:
                    continue
                (alias, alias_index), (source, source_index) = (
                    self.found.patterns.pattern(MEMORY, n) for n in (name, original)
                )
                if alias_index != source_index or trace.memory[original].shape != numbers.shape:
                    numbers_of = [each.number(i) for each in (alias, source) for i in range(len(each.places))]
                    literal = frozenset((side, name, at) for side in SIDES for _, name, at in numbers_of)
                    why = f"{name} shares the values of {original} in another layout or at another index"
                    raise (
                        UnpairedIndex(why, Numbering(literal), "") if alias_index != source_index else Underivable(why)
                    )
                pairs[alias, source].add(at)
        return pairs

    def _join_alias(self, variants: Mapping[Pattern, Mapping[Layout, Any]], alias: Pattern, source: Pattern) -> None:
        """If an alias is stored separately, join its axes with the axes of the tensor that has the same values."""
        for alias_layout, source_layout in zip(variants.get(alias, ()), variants.get(source, ()), strict=False):
            for axis, same in zip(alias_layout.axes, source_layout.axes, strict=False):
                self.joined.join(axis, same)

    def _join_biases(self, variants: Mapping[Pattern, Mapping[Layout, Any]]) -> None:
        """Join the axes of a bias with the axes of its weight's first dim, if the two have the same layout."""
        for pattern, layouts in variants.items():
            weight = variants.get(Pattern(pattern.side, f"{pattern.text.removesuffix('.bias')}.weight"), {})
            if not pattern.text.endswith(".bias") or len(layouts) != 1 or len(weight) != 1:
                continue
            bias, first = next(iter(layouts)).dims, next(iter(weight)).dims[:1]
            pairs = [(list(Layout((), dims).axes)) for dims in (bias, first)]
            segments = [[len(segment.axes) for dim in dims for segment in dim.segments] for dims in (bias, first)]
            if len(bias) != 1 or len(pairs[0]) != len(pairs[1]) or segments[0] != segments[1]:
                continue
            for bias_layout, weight_layout in zip(*pairs, strict=True):
                if self._alike(bias_layout, weight_layout):
                    self.joined.join(bias_layout, weight_layout)

    def _alike(self, first: AxisKey, second: AxisKey) -> bool:
        """Return whether two axes have the same single size in every trace that has both axes."""
        sizes: list[dict[int, set[int]]] = [defaultdict(set), defaultdict(set)]
        for sizes_found, axis in zip(sizes, (first, second), strict=True):
            for trace, size in self.reading.sizes.get(axis, ()):
                sizes_found[trace].add(size)
        common = sizes[0].keys() & sizes[1].keys()
        return bool(common) and all(sizes[0][t] == sizes[1][t] and len(sizes[0][t]) == 1 for t in common)

    def _tie(self, structure: Structure, pairs: Mapping[tuple[Pattern, Pattern], set[int]]) -> dict[int, set[int]]:
        """Add the ties to the structure; return the traces in which each alias shares the values of its original."""
        tied: dict[int, set[int]] = {}
        for (alias, source), traces in pairs.items():
            tied |= self._tie_pair(structure, alias, source, traces)
        return tied

    def _tie_pair(self, structure: Structure, alias: Pattern, source: Pattern, traces: set[int]) -> dict[int, set[int]]:
        original = next((line for line in structure.lines[MEMORY] if line.pattern == source), None)
        if original is None or len(original.layout.parts) != 1:
            raise Underivable(f"{alias.text} shares the values of {source.text}, which is not stored as one tensor")
        line = next((line for line in structure.lines[MEMORY] if line.pattern == alias), None)
        if line is None:
            return self._new_alias(structure, alias, original)
        if len(line.layout.parts) != 1:
            raise Underivable(
                f"{alias.text} shares the values of {source.text} in some configs and is divided in others"
            )
        presences = [Presence(t.config, 0, frozenset({0} if at in traces else ())) for at, t in enumerate(self.traces)]
        when = condition(presences, ["tie"])
        if when is None:
            raise Underivable(
                f"{alias.text} shares the values of {source.text} in some configs; nothing in them says so"
            )
        number = line.layout.parts[0]
        structure.ties.append(TiedPart(number, original.layout.parts[0], when))
        structure.lines[HUB] = [
            StoredLine(each.pattern, each.places, each.layout, negate(when)) if number in each.layout.parts else each
            for each in structure.lines[HUB]
        ]
        return {number: traces}

    def _new_alias(self, structure: Structure, alias: Pattern, original: StoredLine) -> dict[int, set[int]]:
        """Add a tensor in memory that shares a second tensor's values in every trace."""
        number, source = len(structure.parts), original.layout.parts[0]
        structure.parts.append(Part((alias, alias), structure.parts[source].instances))
        structure.axes[number] = structure.axes[source]
        if source in structure.when:
            structure.when[number] = structure.when[source]
        places = tuple(self.joined.first(place) for place in alias.places)
        if places != original.places and set(places) != set(original.places):
            places = original.places
        dims = original.layout.dims
        structure.lines[MEMORY].append(StoredLine(alias, places, Layout((number,), dims), original.when))
        structure.ties.append(TiedPart(number, source, "True"))
        return {}

    def _check_memory(self, structure: Structure) -> None:
        """Add notes on tensors in memory that the hub lacks, and refuse tensors of which the hub has only some
        elements.
        """
        for at, trace in enumerate(self.traces):
            firsts: set[int] = set()
            for name in sorted(trace.memory, key=lambda name: name not in trace.hub):
                numbers = trace.memory[name]
                if not numbers.size or int(numbers.flat[0]) in firsts:
                    continue
                firsts.add(int(numbers.flat[0]))
                contents = self.found.of[at].get((MEMORY, name), ())
                stored = sum(prod(instance.move.sizes) for _, instance in contents)
                if not contents:
                    note = f"{self.found.patterns.pattern(MEMORY, name)[0].text} is not stored in the hub"
                    if note not in structure.left_out:
                        structure.left_out.append(note)
                elif stored != numbers.size:
                    raise Underivable(f"{name}: the hub has {stored} of its {numbers.size} elements")


def _words(part: Part, sides: Sequence[str] = SIDES) -> list[str]:
    """Return the words in a part's names that may also occur in the name of a config flag for the part."""
    texts = [pattern.text for pattern in part.patterns if pattern.side in sides]
    words = [word for text in texts for word in text.replace(".", "_").split("_")]
    return [word for word in words if len(word) > 2 and word not in _EVERYWHERE]


_COUNTED = re.compile("head|group|expert")
Size = tuple[tuple[int, int], ...]
"""`(index of the trace, size of the axis)` for every trace, for an axis with a single size in each trace."""


@dataclass(frozen=True)
class Labels:
    """The names of the family and of its dialects in a derived table."""

    family: str
    """Name of the family."""
    model_types: tuple[str, ...] = ()
    """The `model_type` values in a config.json that select the family."""
    dialects: tuple[str, str] = ("hf", "transformers")
    """Names of the two dialects."""
    comments: tuple[str, ...] = ()
    """Comment lines at the beginning of the table."""


@dataclass
class Writer:
    """Chooses names and formulas, and writes the text of a table."""

    structure: Structure
    configs: Sequence[Mapping[str, Any]]
    aliases: Mapping[str, Sequence[str]]
    axes: dict[AxisKey, str] = field(default_factory=dict)
    formulas: dict[AxisKey, str] = field(default_factory=dict)
    sparse: bool = False
    """Whether to write formulas only for sizes that a conversion needs, and not for sizes that tensors' shapes show."""

    def __post_init__(self) -> None:
        self.known = Sizes(self.configs, self.aliases)
        numbers = range(len(self.structure.parts))
        patterns = [(p.patterns[0].text, p.patterns[1].text) for p in (self.structure.parts[n] for n in numbers)]
        self.tensors = tensor_names(patterns)
        self._find_formulas()
        self._name_axes()

    def _every_line(self) -> Iterator[StoredLine]:
        for side in (HUB, MEMORY):
            yield from self.structure.lines[side]

    def _size(self, axis: AxisKey) -> dict[int, int]:
        """Return index of the trace -> size of an axis; empty if the axis has several sizes in one trace."""
        sizes = self.structure.sizes.get(axis, {})
        if any(len(several) > 1 for several in sizes.values()):
            return {}
        return {trace: next(iter(one)) for trace, one in sizes.items()}

    def _near(self, line: StoredLine) -> str:
        """Return the config section to which a tensor belongs, according to the words in the tensor's name."""
        nested = [key for key, value in self.configs[0].items() if isinstance(value, dict)] if self.configs else []
        for key in nested:
            word = key.removesuffix("_config")
            if word != "text" and word in line.pattern.text:
                return key
        if "vision_config" in nested and "visual" in line.pattern.text:
            return "vision_config"
        return "text_config" if "text_config" in nested else ""

    def _find_formulas(self) -> None:
        """Find formulas for sizes: simple formulas for whole dims and indices, complex ones if a dim has two unknown
        axes.
        """
        for line in self._every_line():
            near = self._near(line)
            for place in line.places:
                self._simple(place, near)
            for dim in () if self.sparse else line.layout.dims:
                if len(dim.axes) == 1 and not dim.segments:
                    self._simple(dim.axes[0], near)
                for segment in dim.segments if not dim.axes else ():
                    if len(segment.axes) == 1:
                        self._simple(segment.axes[0], near)
        for line in self._every_line():
            for dim in line.layout.dims:
                self._complete(dim, self._near(line))
            for axis in line.layout.axes:
                if isinstance(axis, PaddingAxis) and self._is_well_known(self._size(axis)):
                    self._deep(axis, self._near(line))  # no other tensor's shape shows how much is to be written

    def _simple(self, axis: AxisKey, near: str) -> None:
        """Use a config key as the formula of an axis, if exactly one key has the axis's size as its value."""
        size = self._size(axis)
        constant = len(set(size.values())) == 1 and len(self.configs) > 1
        if axis in self.formulas or not self._is_well_known(size) or isinstance(axis, PaddingAxis):
            return
        if constant and axis not in self.structure.name_axes:
            return
        formula = self.known.formula(size, near)
        if formula is None and isinstance(axis, tuple) and not constant:
            formula = self.known.less(size, near, partial(_speaks_of, name=axis[1]))
        if formula is not None and constant and isinstance(axis, tuple) and not _speaks_of(formula, axis[1]):
            # The size is the same in every model, so a config key with this value is a coincidence.
            formula = str(next(iter(size.values())))
        if formula is not None:
            self.formulas[axis] = formula

    def _is_well_known(self, size: Mapping[int, int]) -> bool:
        return bool(self.configs) and len(size) >= min(2, len(self.configs))

    def _complete(self, dim: Dim, near: str) -> None:
        """Find formulas until the shape determines the one remaining size of a dim: constants first, then numbers of
        heads and similar counts.
        """
        axes = list(dict.fromkeys((*dim.axes, *(axis for segment in dim.segments for axis in segment.axes))))
        for attempt in (self._number, self._count, self._deep):
            for axis in axes:
                unknown = [each for each in axes if each not in self.formulas]
                kinds = {tuple(self._size(each).items()) for each in unknown}
                if len(unknown) < 2 or (len(kinds) == 1 and () not in kinds and not dim.axes):
                    return
                if axis in unknown and self._is_well_known(self._size(axis)):
                    attempt(axis, near)

    def _number(self, axis: AxisKey, _near: str) -> None:
        """Use a constant as the formula of an axis, if the size is the same in every config and is 2, 3 or 4."""
        size = self._size(axis)
        if len(size) > 1 and set(size.values()) <= {2, 3, 4} and len(set(size.values())) == 1:
            self.formulas[axis] = str(next(iter(size.values())))

    def _count(self, axis: AxisKey, near: str) -> None:
        """Use a config key that counts heads, groups or experts as the formula of an axis."""
        formula = self.known.formula(self._size(axis), near, deep=True)
        if formula is not None and _COUNTED.search(formula) and not set("*/+-") & set(formula):
            self.formulas[axis] = formula

    def _deep(self, axis: AxisKey, near: str) -> None:
        """Use any formula that fits the size of an axis."""
        formula = self.known.formula(self._size(axis), near, deep=True)
        size = set(self._size(axis).values())
        if formula is None and len(size) == 1:
            formula = str(next(iter(size)))
        if formula is not None:
            self.formulas[axis] = formula

    def _name_axes(self) -> None:
        """Choose names for axes; two axes get the same name if they always have equal sizes and no tensor has both."""
        used_names = {key for config in self.configs for key, _ in leaves(config) if "." not in key} | set(self.tensors)
        together: dict[AxisKey, set[AxisKey]] = defaultdict(set)
        for axes in self.structure.axes.values():
            for axis in axes:
                together[axis] |= set(axes)
        axes_by_kind: dict[object, list[tuple[str, set[AxisKey]]]] = defaultdict(list)
        order = [axis for line in self._every_line() for axis in (*line.places, *line.layout.axes)]
        for axis in dict.fromkeys(order):
            kind = self._kind(axis)
            for name, members in axes_by_kind[kind]:
                if not members & together[axis]:
                    self.axes[axis] = name
                    members.add(axis)
                    break
            else:
                name = first_free(axis_letters(self._source(axis)), used_names)
                used_names.add(name)
                self.axes[axis] = name
                axes_by_kind[kind].append((name, {axis}))

    def _kind(self, axis: AxisKey) -> object:
        """Return a grouping key for an axis; axes with equal keys may have the same name."""
        formula = self.formulas.get(axis)
        if formula is not None:
            return formula
        size = self._size(axis)
        if axis in self.structure.name_axes or not size or isinstance(axis, PaddingAxis):
            return axis
        return tuple(sorted(size.items()))

    def _source(self, axis: AxisKey) -> str:
        if axis in self.structure.name_axes and isinstance(axis, tuple):
            return axis[1].replace(HOLE, "").rstrip(".").rpartition(".")[2]
        formula = self.formulas.get(axis)
        return "" if formula is None else formula.replace("len(", "").split("|")[0]

    # Text.

    def text(self, labels: Labels) -> str:
        """Return the text of the table."""
        lines = [*(f"# {comment}".rstrip() for comment in labels.comments), *([""] if labels.comments else [])]
        lines.append(f"family {labels.family}")
        if labels.model_types:
            lines.append(f"  model_type {' '.join(labels.model_types)}")
        lines += self._axes_text()
        lines += self._tensors_text()
        for tie in self.structure.ties:
            lines.append(f"  tie {self.tensors[tie.alias]} = {self.tensors[tie.original]} when {tie.when}")
        hub = [self._line(line) for line in self.structure.lines[HUB]]
        lines += ["", f"dialect {labels.dialects[0]}", *_align(hub)]
        changed = self._changes()
        lines += ["", f"dialect {labels.dialects[1]} like {labels.dialects[0]}", *_align(changed)]
        return "\n".join(lines) + "\n"

    def _axes_text(self) -> Iterator[str]:
        used: dict[str, str | None] = {}
        for axis, name in self.axes.items():
            used.setdefault(name, self.formulas.get(axis))
        row = "  axes"
        for name, formula in used.items():
            if formula is not None and " " in formula:
                yield f"  axis {name} = {formula}"
                continue
            item = name if formula is None else f"{name}={formula}"
            if len(row) + len(item) > 110:
                yield row
                row = "  axes"
            row += f" {item}"
        if row != "  axes":
            yield row

    def _tensors_text(self) -> Iterator[str]:
        rows = []
        for number, name in enumerate(self.tensors):
            axes = " ".join(self.axes[axis] for axis in self.structure.axes[number])
            when = self.structure.when.get(number)
            condition = ""
            if when is not None:
                text, axis = when
                condition = f" when {text.replace(INDEX, self.axes[axis]) if axis is not None else text}"
            rows.append((f"{name}", f": {axes}", condition))
        widest = max((len(row[0]) for row in rows), default=0)
        longest = max((len(row[1]) for row in rows), default=0)
        for name, axes, condition in rows:
            yield f"  {name.ljust(widest)} {axes.ljust(longest)}{condition}".rstrip()

    def _line(self, line: StoredLine) -> tuple[str, str]:
        pieces = line.pattern.text.split(HOLE)
        ahead = line.pattern.ahead or (0,) * len(line.places)
        holes = [
            f"{{{self.axes[p]}{f'{more:+d}' if more else ''}}}" for p, more in zip(line.places, ahead, strict=True)
        ]
        name = pieces[0] + "".join(hole + piece for hole, piece in zip(holes, pieces[1:], strict=True))
        when = ""
        if line.when is not None:
            when = " when " + (line.when.replace(INDEX, self.axes[line.places[0]]) if line.places else line.when)
        return name, self._expression(line.layout) + when

    def _expression(self, layout: Layout) -> str:
        single = not any(dim.segments for dim in layout.dims)
        name = self.tensors[layout.parts[0]] if single else ""
        return f"{name}[{' '.join(self._dim(dim) for dim in layout.dims)}]"

    def _dim(self, dim: Dim) -> str:
        items = [self.axes[axis] for axis in dim.axes]
        if dim.segments:
            segments = []
            for segment in dim.segments:
                names = [self.axes[axis] for axis in segment.axes]
                tensor = "0" if segment.part is None else self.tensors[segment.part]
                segments.append(f"{tensor}:{_item(names)}")
            items.append(f"[{' | '.join(segments)}]")
        return _item(items) or "1"

    def _changes(self) -> list[tuple[str, str]]:
        """Return the mapping rules of the second dialect that differ from the first dialect, and all rules that depend
        on these.
        """
        hub = [(self._line(line), frozenset(line.layout.parts)) for line in self.structure.lines[HUB]]
        memory = [(self._line(line), frozenset(line.layout.parts)) for line in self.structure.lines[MEMORY]]
        same = {line for line, _ in hub}
        changed_lines = {line for line, _ in memory}
        changed = {line for line, _ in memory if line not in same}
        touched: set[int] = set()
        while True:
            touched = {part for line, parts in memory if line in changed for part in parts}
            touched |= {part for line, parts in hub if line not in changed_lines for part in parts}
            dependent = {line for line, parts in memory if parts & touched}
            dropped = {part for _, parts in hub if parts & touched for part in parts}
            dependent |= {line for line, parts in memory if parts & dropped}
            if dependent == changed:
                return [line for line, _ in memory if line in changed]
            changed = dependent


def _item(parts: Sequence[str]) -> str:
    """Return several axes as one item of a layout expression; the result is an empty text if there are no axes."""
    return parts[0] if len(parts) == 1 else f"({' '.join(parts)})" if parts else ""


def _align(lines: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Align the equals signs of mapping rules."""
    widest = max((len(name) for name, _ in lines), default=0)
    for name, expression in lines:
        yield f"  {name.ljust(widest)} = {expression}"


def _speaks_of(formula: str, name: str) -> bool:
    """Return whether a formula contains a word of the name segment before an index, or the length of a list."""
    words = name.removesuffix(HOLE).rstrip(".").rpartition(".")[2].split("_")
    return "len(" in formula or any(word.rstrip("s") in formula for word in words if len(word) > 3)


@dataclass(frozen=True)
class DerivedTable:
    """The text of a derived table of mapping rules, with notes on what the table omits."""

    text: str
    """The text of the table, in the notation of rules files."""
    left_out: tuple[str, ...]
    """Notes on what the converter does but no mapping rule can describe: tensors that it drops or creates."""
    traces: int
    """Number of traces from which the table was derived."""


def derive(
    traces: Sequence[Trace],
    labels: Labels,
    aliases: Mapping[str, Sequence[str]] | None = None,
    *,
    sparse: bool = False,
    compared: Mapping[str, str] | None = None,
) -> DerivedTable:
    """Derive the table of mapping rules that describes a converter.

    Args:
        traces: runs of the converter, each with the config of its model.
        labels: names of the family and its two dialects.
        aliases: config key -> further config keys with the same meaning.
        sparse: whether to write formulas only for sizes that a conversion needs, and conditions only if no second
            condition fits.
        compared: beginning of tensor names in memory -> known condition of these tensors.

    Raises:
        Underivable: if no table of mapping rules can describe the converter; the message names the tensor.
    """
    table_structure = structure(traces, careful=sparse, compared=compared)
    writer = Writer(table_structure, [trace.config for trace in traces], aliases or {}, sparse=sparse)
    return DerivedTable(writer.text(labels), tuple(table_structure.left_out), len(traces))
