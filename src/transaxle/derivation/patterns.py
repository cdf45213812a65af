"""Decides which numbers in tensor names are indices (such as a layer's), and which numbers are literal parts of names.

A number is an index if its values differ between traced models (a model with more layers has more names), or if the
numbers 0, 1, 2 … are all followed by the same names. All other numbers are literal, such as the 0 in `mlp.0.weight` and
the 2 in `mlp.2.weight`. This rule may be wrong, for example if one of the two dialects has words for `mlp.0` and
`mlp.1`, or counts from 1. Then derivation is tried again with a `Numbering`, which lists the exceptions.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from transaxle.derivation.traces import SIDES, Trace

HOLE = "{}"
_DIGITS = re.compile(r"[0-9]+")
_CANONICAL = re.compile("0|[1-9][0-9]{0,9}")

Place = tuple[str, str]
"""Place of an index in tensor names, as `(dialect: hub or memory, pattern of the name up to the index)`."""
Number = tuple[str, str, int]
"""A number in tensor names, as `(dialect: hub or memory, name with {} for each number, position among the numbers)`."""


@dataclass(frozen=True)
class Numbering:
    """Exceptions from the rule that decides whether a number in tensor names is an index or a literal."""

    literal: frozenset[Number] = frozenset()
    """Numbers that are literal parts of tensor names, although the rule in this module's docstring would treat them as
    indices.
    """
    ahead: Mapping[Place, int] = field(default_factory=dict)
    """Place of an index (with `{}` for every earlier number) -> what must be added to the index to get the number in
    the name.
    """

    def with_more(self, numbering: Numbering) -> Numbering:
        """Return a numbering with the exceptions of this numbering and of `numbering`."""
        return Numbering(self.literal | numbering.literal, {**self.ahead, **numbering.ahead})


@dataclass(frozen=True)
class Pattern:
    """Names that differ only in their indices, of tensors in one dialect (hub or memory)."""

    side: str
    """The dialect to which the names belong: `hub` or `memory`."""
    text: str
    """The tensor name, with `{}` for every index."""
    ahead: tuple[int, ...] = field(default=(), compare=False)
    """For each index, what must be added to get the number in the tensor name; empty if each number equals its index.
    """

    @property
    def places(self) -> tuple[Place, ...]:
        """Places of the indices in the tensor name, first to last."""
        parts = self.text.split(HOLE)
        return tuple((self.side, HOLE.join(parts[: at + 1])) for at in range(len(parts) - 1))

    def number(self, at: int) -> Number:
        """Return the number in the tensor name that contains the pattern's index at position `at`."""
        before = _DIGITS.sub(HOLE, self.places[at][1])
        return self.side, _DIGITS.sub(HOLE, self.text), before.count(HOLE)

    def numbering_place(self, at: int) -> Place:
        """Return the place of the pattern's index number `at` as `(side, text before the index)`, with `{}` for every
        number, as the keys of `Numbering.ahead` are.
        """
        return self.side, _DIGITS.sub(HOLE, self.places[at][1])


def _numbers(name: str) -> Iterator[tuple[str, int, str]]:
    """Yield each number in a tensor name, with the text before it and after it, in which `{}` replaces all numbers."""
    for match in _DIGITS.finditer(name):
        if _CANONICAL.fullmatch(match[0]):
            before, after = name[: match.start()], name[match.end() :]
            yield _DIGITS.sub(HOLE, before), int(match[0]), _DIGITS.sub(HOLE, after)


class Patterns:
    """Finds the indices in the tensor names of all traces (records of what a converter does with tiny models).

    Args:
        traces: runs of the converter, which show all tensor names.
        numbering: exceptions from the rule that decides whether a number is an index.
    """

    def __init__(self, traces: Sequence[Trace], numbering: Numbering = Numbering()) -> None:
        self._traces = traces
        self._numbering = numbering
        values: dict[Place, list[set[int]]] = defaultdict(lambda: [set() for _ in traces])
        endings: dict[Place, dict[int, set[tuple[str, tuple[int, ...]]]]] = defaultdict(lambda: defaultdict(set))
        for at, trace in enumerate(traces):
            for side in SIDES:
                for name, tensor in trace.side(side).items():
                    for before, number, after in _numbers(name):
                        values[side, before][at].add(number)
                        if at == 0:
                            endings[side, before][number].add((after, tensor.shape))
        single = len(traces) == 1
        self._indices = {
            place
            for place, seen in values.items()
            if _changes(seen) or _alike(place, endings.get(place, {}), single=single)
        }

    def pattern(self, side: str, name: str) -> tuple[Pattern, tuple[int, ...]]:
        """Return the pattern of a tensor name, and the values of the indices in the name."""
        pieces, indices, ahead, start = [], [], [], 0
        whole = _DIGITS.sub(HOLE, name)
        for at, match in enumerate(_DIGITS.finditer(name)):
            place = side, _DIGITS.sub(HOLE, name[: match.start()])
            literal = (side, whole, at) in self._numbering.literal
            if place in self._indices and not literal and _CANONICAL.fullmatch(match[0]):
                pieces += [name[start : match.start()], HOLE]
                ahead.append(self._numbering.ahead.get(place, 0))
                indices.append(int(match[0]) - ahead[-1])
                start = match.end()
        return Pattern(side, "".join([*pieces, name[start:]]), tuple(ahead)), tuple(indices)

    def constant(self, number: Number) -> bool:
        """Return whether a number in tensor names has the same values in every trace with these names; False if there
        is one trace.
        """
        side, whole, at = number
        values_by_trace = []
        for trace in self._traces:
            names = [name for name in trace.side(side) if _DIGITS.sub(HOLE, name) == whole]
            if names:
                values_by_trace.append({_DIGITS.findall(name)[at] for name in names})
        return len(self._traces) > 1 and all(values == values_by_trace[0] for values in values_by_trace)


def _changes(values_by_trace: Sequence[set[int]]) -> bool:
    non_empty = [values for values in values_by_trace if values]
    return any(values != non_empty[0] for values in non_empty) and any(len(values) > 1 for values in non_empty)


def _alike(place: Place, endings: Mapping[int, set[tuple[str, tuple[int, ...]]]], *, single: bool) -> bool:
    """Return whether the numbers at a place count similar modules: 0, 1, 2 …, each followed by the same names and
    shapes.
    """
    segment = not place[1] or place[1].endswith(".")
    if not segment or len(endings) < 2 or sorted(endings) != list(range(len(endings))):
        return False
    kinds = list(endings.values())
    if single:
        return any(kinds.count(kind) > 1 for kind in kinds)
    return all(kind == kinds[0] for kind in kinds)
