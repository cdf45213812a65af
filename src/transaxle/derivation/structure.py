"""Structure: what all traces agree on, before anything has a name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

from transaxle.derivation.configs import SOMETIMES, Seen, condition, keys_of, negated
from transaxle.derivation.fitted_layout import AxisKey, Layout, Reading, layout
from transaxle.derivation.moved_parts import IN_NAME, Part, Parts, Unpaired, parts
from transaxle.derivation.patterns import Numbering, Pattern, Patterns, Place
from transaxle.derivation.traces import HUB, MEMORY, SIDES, Trace, Underivable
from transaxle.move.workers import Unions

Indices = tuple[int, ...]
_EVERYWHERE = frozenset({"model", "layers", "weight", "language"})
"""Words of names that tell nothing of a tensor."""


@dataclass(frozen=True)
class StoredLine:
    """One line of a dialect."""

    pattern: Pattern
    """The stored names."""
    places: tuple[AxisKey, ...]
    """The axis of each index in them."""
    layout: Layout
    """What is stored."""
    when: str | None = None
    """Condition; its index is that of the first of `places`."""


@dataclass(frozen=True)
class TiedPart:
    """A tensor of memory that shares the values of another."""

    alias: int
    """Its number."""
    original: int
    """The number of the one that is stored."""
    when: str
    """When they are one."""


@dataclass
class Structure:
    """Everything a table says, but for the names of axes and tensors."""

    parts: list[Part]
    """The logical tensors."""
    axes: dict[int, tuple[AxisKey, ...]]
    """Part -> its axes: those in names first."""
    when: dict[int, tuple[str, AxisKey | None]]
    """Part -> condition and the axis whose index it speaks of, for parts that are not everywhere."""
    lines: dict[str, list[StoredLine]]
    """Side -> its lines."""
    sizes: dict[AxisKey, dict[int, set[int]]]
    """Axis -> trace -> its sizes there."""
    named: set[AxisKey]
    """Axes that are indices of names."""
    ties: list[TiedPart] = field(default_factory=list)
    """Tensors that share values."""
    left_out: list[str] = field(default_factory=list)
    """What the table does not say, in words."""


def structure(traces: Sequence[Trace], *, careful: bool = False) -> Structure:
    """Return the structure of a set of traces.

    Args:
        traces: what a converter did.
        careful: take a condition only where one alone fits.

    Raises:
        Underivable: naming the tensor that no line of the notation describes.
    """
    numbering, first = Numbering(), None
    while True:
        try:
            return Builder(traces, numbering, careful=careful).build()
        except Unpaired as error:
            first = first or error
            more = numbering.with_more(error.numbering)
            known = more.literal == numbering.literal and more.ahead.keys() == numbering.ahead.keys()
            patterns = Patterns(traces)
            if known or not all(patterns.constant(number) for number in error.numbering.literal):
                raise first from None
            numbering = more
        except Underivable as error:
            raise first or error from None


class Builder:
    """Builds the structure of a set of traces."""

    def __init__(self, traces: Sequence[Trace], numbering: Numbering, *, careful: bool = False) -> None:
        self.traces = traces
        self.careful = careful
        self.found: Parts = parts(traces, numbering)
        self.numbers = {part: number for number, part in enumerate(self.found.all)}
        self.joined = Unions[AxisKey]()
        self.reading = Reading(self.numbers, self.joined, {})
        self.counts = self._counts()

    def build(self) -> Structure:
        """Return the structure.

        Raises:
            Underivable: naming the tensor that no line of the notation describes.
        """
        variants = self._layouts()
        aliases = self._aliases()
        for alias, source in aliases:
            self._join_alias(variants[MEMORY], alias, source)
        for side in SIDES:
            self._join_biases(variants[side])
        for place in self.counts:
            self.joined.join(place, self.found.axes.first(place))
        lines = {side: self._lines(self._settled(variants[side])) for side in SIDES}
        structure = Structure(list(self.found.all), {}, {}, lines, self._sizes(), set())
        structure.named = {self.joined.first(place) for place in self.counts}
        for part, number in self.numbers.items():
            structure.axes[number] = self._axes(part)
        tied = self._tie(structure, aliases)
        for part, number in self.numbers.items():
            self._place_part(structure, part, number, tied.get(number, set()))
        self._check_memory(structure)
        return structure

    def _counts(self) -> dict[Place, dict[int, int]]:
        """Return for every index of names how many values it has in each trace."""
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
        """Return how many indices an axis of names has in a trace."""
        return self.counts[self.found.axes.first(place)].get(trace, 0)

    def _sizes(self) -> dict[AxisKey, dict[int, set[int]]]:
        sizes: dict[AxisKey, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        for axis, seen in self.reading.sizes.items():
            for trace, size in seen:
                sizes[self.joined.first(axis)][trace].add(size)
        for place, counts in self.counts.items():
            for trace, count in counts.items():
                sizes[self.joined.first(place)][trace].add(count)
        return sizes

    def _layouts(self) -> dict[str, dict[Pattern, dict[Layout, set[tuple[int, Indices]]]]]:
        """Return for every pattern its layouts, each with the traces and indices that have it."""
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

    def _settled(
        self, variants: Mapping[Pattern, Mapping[Layout, set[tuple[int, Indices]]]]
    ) -> dict[Pattern, dict[Layout, set[tuple[int, Indices]]]]:
        """Return the layouts with every axis replaced by the one that stands for it, now that all are read."""
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
        """Return for each layout of a name when it has that one; where the name is not, nothing is asked."""
        everywhere = {place for where in layouts.values() for place in where}
        hints = [word for read in layouts for part in read.parts for word in _words(self.found.all[part])]
        conditions: list[str | None] = []
        for where in layouts.values():
            seen = []
            for at, trace in enumerate(self.traces):
                here, judged = (
                    frozenset(indices[0] if indices else 0 for trace_at, indices in places if trace_at == at)
                    for places in (where, everywhere)
                )
                count = self.count(pattern.places[0], at) if pattern.places else 0
                seen.append(Seen(trace.config, count, here, judged))
            found = condition(seen, hints)
            if found is None:
                raise Underivable(f"{pattern.text}: it has several layouts, and nothing in the config says which")
            conditions.append(found)
        if len(conditions) == 2 and keys_of(str(conditions[0])) != keys_of(str(conditions[1])):
            conditions[1] = negated(str(conditions[0]))
        return conditions

    def _axes(self, part: Part) -> tuple[AxisKey, ...]:
        """Return a part's axes: indices of names, in the order of the names, then digits."""
        ordered = sorted(part.axes, key=lambda c: (c[0] != IN_NAME, c[1] != HUB, c[2]))
        axes = [self.joined.first(part.axes[coordinate]) for coordinate in ordered]
        which = 1 if any(c[0] != IN_NAME and c[1] == HUB for c in ordered) else 0
        for share in part.instances[0].move.shares[which]:
            axes += [self.joined.first(self.reading.digit(part, part.instances[0], digit)) for digit, _ in share.digits]
        return tuple(dict.fromkeys(axes))

    def _place_part(self, structure: Structure, part: Part, number: int, tied: set[int]) -> None:
        """Find out when a part exists."""
        places = list(dict.fromkeys(self.found.axes.first(place) for place in part.axes.values()))
        coordinates = [next(c for c, p in part.axes.items() if self.found.axes.first(p) == place) for place in places]
        present: list[set[Indices]] = [set() for _ in self.traces]
        for instance in part.instances:
            present[instance.trace].add(tuple(instance.at(coordinate) for coordinate in coordinates))
        whole = [set(product(*(range(self.count(place, at)) for place in places))) for at in range(len(self.traces))]
        for at in tied:
            present[at] = whole[at]
        if all(here == full and here for here, full in zip(present, whole, strict=True)):
            return
        structure.when[number] = self._when(part, places, present)

    def _when(self, part: Part, places: Sequence[Place], present: Sequence[set[Indices]]) -> tuple[str, AxisKey | None]:
        hints = _words(part, SIDES[:1])
        for at, place in enumerate(places):
            seen = []
            for trace, here in enumerate(present):
                projected = frozenset(indices[at] for indices in here)
                others = [range(self.count(p, trace)) if i != at else sorted(projected) for i, p in enumerate(places)]
                if here != set(product(*others)):
                    break
                seen.append(Seen(self.traces[trace].config, self.count(place, trace), projected))
            else:
                found = condition(seen, hints, careful=self.careful)
                if found is not None:
                    return found, self.joined.first(place)
        if not places:
            flags = [
                Seen(trace.config, 0, frozenset({0} if here else ()))
                for trace, here in zip(self.traces, present, strict=True)
            ]
            found = condition(flags, hints, careful=self.careful)
            if found is not None:
                return found, None
        return SOMETIMES, None

    def _aliases(self) -> dict[tuple[Pattern, Pattern], set[int]]:
        """Return the names in memory that share values: (alias, the one that is stored) -> traces in which they do."""
        pairs: dict[tuple[Pattern, Pattern], set[int]] = defaultdict(set)
        for at, trace in enumerate(self.traces):
            firsts: dict[int, str] = {}
            for name in sorted(trace.memory, key=lambda name: name not in trace.hub):
                numbers = trace.memory[name]
                original = firsts.setdefault(int(numbers.flat[0]), name) if numbers.size else name
                if original == name:
                    continue
                (alias, here), (source, there) = (self.found.patterns.pattern(MEMORY, n) for n in (name, original))
                if here != there or trace.memory[original].shape != numbers.shape:
                    numbers_of = [each.number(i) for each in (alias, source) for i in range(len(each.places))]
                    literal = frozenset((side, name, at) for side in SIDES for _, name, at in numbers_of)
                    why = f"{name} shares the values of {original} in another layout or at another index"
                    raise Unpaired(why, Numbering(literal), "") if here != there else Underivable(why)
                pairs[alias, source].add(at)
        return pairs

    def _join_alias(self, variants: Mapping[Pattern, Mapping[Layout, Any]], alias: Pattern, source: Pattern) -> None:
        """Make the axes of an alias, where it is stored of its own, those of the tensor that it shares."""
        for one, other in zip(variants.get(alias, ()), variants.get(source, ()), strict=False):
            for axis, same in zip(one.axes, other.axes, strict=False):
                self.joined.join(axis, same)

    def _join_biases(self, variants: Mapping[Pattern, Mapping[Layout, Any]]) -> None:
        """Make the axes of a bias those of its weight's first dim, where both are of one layout."""
        for pattern, layouts in variants.items():
            weight = variants.get(Pattern(pattern.side, f"{pattern.text.removesuffix('.bias')}.weight"), {})
            if not pattern.text.endswith(".bias") or len(layouts) != 1 or len(weight) != 1:
                continue
            bias, first = next(iter(layouts)).dims, next(iter(weight)).dims[:1]
            pairs = [(list(Layout((), dims).axes)) for dims in (bias, first)]
            segments = [[len(segment.axes) for dim in dims for segment in dim.segments] for dims in (bias, first)]
            if len(bias) != 1 or len(pairs[0]) != len(pairs[1]) or segments[0] != segments[1]:
                continue
            for one, other in zip(*pairs, strict=True):
                if self._alike(one, other):
                    self.joined.join(one, other)

    def _alike(self, one: AxisKey, other: AxisKey) -> bool:
        """Tell whether two axes have one size, and the same, in every trace that has both."""
        sizes: list[dict[int, set[int]]] = [defaultdict(set), defaultdict(set)]
        for found, axis in zip(sizes, (one, other), strict=True):
            for trace, size in self.reading.sizes.get(axis, ()):
                found[trace].add(size)
        common = sizes[0].keys() & sizes[1].keys()
        return bool(common) and all(sizes[0][t] == sizes[1][t] and len(sizes[0][t]) == 1 for t in common)

    def _tie(self, structure: Structure, pairs: Mapping[tuple[Pattern, Pattern], set[int]]) -> dict[int, set[int]]:
        """Add the ties; return for each part that is an alias the traces in which it is one."""
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
        seen = [Seen(t.config, 0, frozenset({0} if at in traces else ())) for at, t in enumerate(self.traces)]
        when = condition(seen, ["tie"])
        if when is None:
            raise Underivable(
                f"{alias.text} shares the values of {source.text} in some configs; nothing in them says so"
            )
        number = line.layout.parts[0]
        structure.ties.append(TiedPart(number, original.layout.parts[0], when))
        structure.lines[HUB] = [
            StoredLine(each.pattern, each.places, each.layout, negated(when)) if number in each.layout.parts else each
            for each in structure.lines[HUB]
        ]
        return {number: traces}

    def _new_alias(self, structure: Structure, alias: Pattern, original: StoredLine) -> dict[int, set[int]]:
        """Add a tensor of memory that shares another's values in every trace."""
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
        """Note the tensors of memory that the hub does not have, and refuse those of which it has a part."""
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
    """Return the words of a part's names that may occur in a flag that decides about it."""
    texts = [pattern.text for pattern in part.patterns if pattern.side in sides]
    words = [word for text in texts for word in text.replace(".", "_").split("_")]
    return [word for word in words if len(word) > 2 and word not in _EVERYWHERE]
