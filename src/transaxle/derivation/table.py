"""The text of a table: a structure with names.

Derivation: from traces to the text of a table, and what it leaves out.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transaxle.derivation.configs import INDEX, Sizes, axis_letters, first_free, leaves, tensor_names
from transaxle.derivation.fitted_layout import AxisKey, Dim, Layout, PaddingAxis
from transaxle.derivation.patterns import HOLE
from transaxle.derivation.structure import StoredLine, Structure, structure
from transaxle.derivation.traces import HUB, MEMORY, Trace

_COUNTED = re.compile("head|group|expert")
Size = tuple[tuple[int, int], ...]
"""(trace, size) in every trace, for an axis that has one size in each."""


@dataclass(frozen=True)
class Labels:
    """What the table is to be called."""

    family: str
    """Name of the family."""
    model_types: tuple[str, ...] = ()
    """Values of `model_type` that mean it."""
    dialects: tuple[str, str] = ("hf", "transformers")
    """Names of the two dialects."""
    comments: tuple[str, ...] = ()
    """Lines at the top."""


@dataclass
class Writer:
    """Gives names, and writes."""

    structure: Structure
    configs: Sequence[Mapping[str, Any]]
    aliases: Mapping[str, Sequence[str]]
    axes: dict[AxisKey, str] = field(default_factory=dict)
    formulas: dict[AxisKey, str] = field(default_factory=dict)
    sparse: bool = False
    """Whether only the sizes that a conversion needs get formulas; shapes tell the others."""

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
        """Return the size of an axis in each trace; nothing where it has several in one."""
        sizes = self.structure.sizes.get(axis, {})
        if any(len(several) > 1 for several in sizes.values()):
            return {}
        return {trace: next(iter(one)) for trace, one in sizes.items()}

    def _near(self, line: StoredLine) -> str:
        """Return the part of the config that a tensor belongs to, by the words of its name."""
        nested = [key for key, value in self.configs[0].items() if isinstance(value, dict)] if self.configs else []
        for key in nested:
            word = key.removesuffix("_config")
            if word != "text" and word in line.pattern.text:
                return key
        if "vision_config" in nested and "visual" in line.pattern.text:
            return "vision_config"
        return "text_config" if "text_config" in nested else ""

    def _find_formulas(self) -> None:
        """Find formulas: simple ones for whole dims and indices, others where a dim would have two unknown axes."""
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

    def _simple(self, axis: AxisKey, near: str) -> None:
        """Give an axis the one key that has its size."""
        size = self._size(axis)
        constant = len(set(size.values())) == 1 and len(self.configs) > 1
        if axis in self.formulas or not self._known_well(size) or isinstance(axis, PaddingAxis):
            return
        if constant and axis not in self.structure.named:
            return
        found = self.known.formula(size, near)
        if found is not None and constant and isinstance(axis, tuple) and not _speaks_of(found, axis[1]):
            found = str(next(iter(size.values())))  # as many in every model, and a key that happens to be as large
        if found is not None:
            self.formulas[axis] = found

    def _known_well(self, size: Mapping[int, int]) -> bool:
        return bool(self.configs) and len(size) >= min(2, len(self.configs))

    def _complete(self, dim: Dim, near: str) -> None:
        """Find formulas until the shape tells the rest of a dim: numbers first, then heads and the like."""
        axes = list(dict.fromkeys((*dim.axes, *(axis for segment in dim.segments for axis in segment.axes))))
        for attempt in (self._number, self._count, self._deep):
            for axis in axes:
                unknown = [each for each in axes if each not in self.formulas]
                kinds = {tuple(self._size(each).items()) for each in unknown}
                if len(unknown) < 2 or (len(kinds) == 1 and () not in kinds and not dim.axes):
                    return
                if axis in unknown and self._known_well(self._size(axis)):
                    attempt(axis, near)

    def _number(self, axis: AxisKey, _near: str) -> None:
        """Take the size itself where it is 2, 3 or 4 in every config."""
        size = self._size(axis)
        if len(size) > 1 and set(size.values()) <= {2, 3, 4} and len(set(size.values())) == 1:
            self.formulas[axis] = str(next(iter(size.values())))

    def _count(self, axis: AxisKey, near: str) -> None:
        """Take a key that counts heads, groups or experts."""
        found = self.known.formula(self._size(axis), near, deep=True)
        if found is not None and _COUNTED.search(found) and not set("*/+-") & set(found):
            self.formulas[axis] = found

    def _deep(self, axis: AxisKey, near: str) -> None:
        """Take whatever formula fits."""
        found = self.known.formula(self._size(axis), near, deep=True)
        size = set(self._size(axis).values())
        if found is None and len(size) == 1:
            found = str(next(iter(size)))
        if found is not None:
            self.formulas[axis] = found

    def _name_axes(self) -> None:
        """Give axes names; two axes share one if they have the same size everywhere and no tensor has both."""
        taken = {key for config in self.configs for key, _ in leaves(config) if "." not in key} | set(self.tensors)
        together: dict[AxisKey, set[AxisKey]] = defaultdict(set)
        for axes in self.structure.axes.values():
            for axis in axes:
                together[axis] |= set(axes)
        named: dict[object, list[tuple[str, set[AxisKey]]]] = defaultdict(list)
        order = [axis for line in self._every_line() for axis in (*line.places, *line.layout.axes)]
        for axis in dict.fromkeys(order):
            kind = self._kind(axis)
            for name, members in named[kind]:
                if not members & together[axis]:
                    self.axes[axis] = name
                    members.add(axis)
                    break
            else:
                name = first_free(axis_letters(self._source(axis)), taken)
                taken.add(name)
                self.axes[axis] = name
                named[kind].append((name, {axis}))

    def _kind(self, axis: AxisKey) -> object:
        """Return what axes of one name have in common."""
        formula = self.formulas.get(axis)
        if formula is not None:
            return formula
        size = self._size(axis)
        if axis in self.structure.named or not size or isinstance(axis, PaddingAxis):
            return axis
        return tuple(sorted(size.items()))

    def _source(self, axis: AxisKey) -> str:
        if axis in self.structure.named and isinstance(axis, tuple):
            return axis[1].replace(HOLE, "").rstrip(".").rpartition(".")[2]
        formula = self.formulas.get(axis)
        return "" if formula is None else formula.replace("len(", "").split("|")[0]

    # Text.

    def text(self, labels: Labels) -> str:
        """Return the table."""
        lines = [*(f"# {comment}".rstrip() for comment in labels.comments), *([""] if labels.comments else [])]
        lines.append(f"family {labels.family}")
        if labels.model_types:
            lines.append(f"  model_type {' '.join(labels.model_types)}")
        lines += self._axes_text()
        lines += self._tensors_text()
        for tie in self.structure.ties:
            lines.append(f"  tie {self.tensors[tie.alias]} = {self.tensors[tie.original]} when {tie.when}")
        hub = [self._line(line) for line in self.structure.lines[HUB]]
        lines += ["", f"dialect {labels.dialects[0]}", *_aligned(hub)]
        changed = self._changed()
        lines += ["", f"dialect {labels.dialects[1]} like {labels.dialects[0]}", *_aligned(changed)]
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

    def _changed(self) -> list[tuple[str, str]]:
        """Return the lines of the second dialect that are not lines of the first, with all that hangs together."""
        hub = [(self._line(line), frozenset(line.layout.parts)) for line in self.structure.lines[HUB]]
        memory = [(self._line(line), frozenset(line.layout.parts)) for line in self.structure.lines[MEMORY]]
        same = {line for line, _ in hub}
        wanted = {line for line, _ in memory}
        changed = {line for line, _ in memory if line not in same}
        touched: set[int] = set()
        while True:
            touched = {part for line, parts in memory if line in changed for part in parts}
            touched |= {part for line, parts in hub if line not in wanted for part in parts}
            more = {line for line, parts in memory if parts & touched}
            dropped = {part for _, parts in hub if parts & touched for part in parts}
            more |= {line for line, parts in memory if parts & dropped}
            if more == changed:
                return [line for line, _ in memory if line in changed]
            changed = more


def _item(parts: Sequence[str]) -> str:
    """Return some axes as one item; nothing for none."""
    return parts[0] if len(parts) == 1 else f"({' '.join(parts)})" if parts else ""


def _aligned(lines: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Put the equals signs under each other."""
    widest = max((len(name) for name, _ in lines), default=0)
    for name, expression in lines:
        yield f"  {name.ljust(widest)} = {expression}"


def _speaks_of(formula: str, name: str) -> bool:
    """Tell whether a formula has a word of the segment before an index, or tells how long a list is."""
    words = name.removesuffix(HOLE).rstrip(".").rpartition(".")[2].split("_")
    return "len(" in formula or any(word.rstrip("s") in formula for word in words if len(word) > 3)


@dataclass(frozen=True)
class Derived:
    """A table, and what it does not say."""

    text: str
    """The table in the notation."""
    left_out: tuple[str, ...]
    """What the converter does that no table says: tensors that it drops or invents."""
    traces: int
    """Number of configs that it follows from."""


def derive(
    traces: Sequence[Trace],
    labels: Labels,
    aliases: Mapping[str, Sequence[str]] | None = None,
    *,
    sparse: bool = False,
) -> Derived:
    """Return the table that says what a converter did.

    Args:
        traces: the converter's runs, each with a config of its own.
        labels: what the family and the dialects are to be called.
        aliases: config key -> other keys under which configs have the same.
        sparse: say less: formulas only for sizes that a conversion needs, conditions only where one alone fits.

    Raises:
        Underivable: no table in the notation says it; the message names the tensor.
    """
    found = structure(traces, careful=sparse)
    writer = Writer(found, [trace.config for trace in traces], aliases or {}, sparse=sparse)
    return Derived(writer.text(labels), tuple(found.left_out), len(traces))
