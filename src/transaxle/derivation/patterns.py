"""Patterns of names: which numbers in them are indices, and which are part of the name.

A number is an index where its values change from trace to trace (more layers, other names), or where all that follows
the numbers 0, 1, 2 … is the same. Every other number stays as it is: of `mlp.0.weight` and `mlp.2.weight`, the 0 and
the 2 are names. Where that is wrong (the other dialect has words for `mlp.0` and `mlp.1`, or counts from 1), what
was found out by trying comes as `Numbering`.
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
"""An index of names: the side, and the pattern up to it."""
Number = tuple[str, str, int]
"""A number in names: the side, the name with `{}` in place of every number, and which of these it is."""


@dataclass(frozen=True)
class Numbering:
    """What numbers in names mean, against their looks."""

    literal: frozenset[Number] = frozenset()
    """Numbers that are part of the name."""
    ahead: Mapping[Place, int] = field(default_factory=dict)
    """Place, with `{}` for every number before it -> how far its numbers are ahead of the index."""

    def with_more(self, other: Numbering) -> Numbering:
        """Return both together."""
        return Numbering(self.literal | other.literal, {**self.ahead, **other.ahead})


@dataclass(frozen=True)
class Pattern:
    """Names of one side that differ in indices only."""

    side: str
    """hub or memory."""
    text: str
    """The name, every index replaced by `{}`."""
    ahead: tuple[int, ...] = field(default=(), compare=False)
    """For each index how far the number in the name is ahead of it; nothing: not at all."""

    @property
    def places(self) -> tuple[Place, ...]:
        """The indices, in order."""
        parts = self.text.split(HOLE)
        return tuple((self.side, HOLE.join(parts[: at + 1])) for at in range(len(parts) - 1))

    def number(self, at: int) -> Number:
        """Return the number that is its index `at`."""
        before = _DIGITS.sub(HOLE, self.places[at][1])
        return self.side, _DIGITS.sub(HOLE, self.text), before.count(HOLE)

    def counted_from(self, at: int) -> Place:
        """Return the place of an index as `Numbering` names it."""
        return self.side, _DIGITS.sub(HOLE, self.places[at][1])


def _numbers(name: str) -> Iterator[tuple[str, int, str]]:
    """Yield each number of a name with the template before it and the one after it."""
    for match in _DIGITS.finditer(name):
        if _CANONICAL.fullmatch(match[0]):
            before, after = name[: match.start()], name[match.end() :]
            yield _DIGITS.sub(HOLE, before), int(match[0]), _DIGITS.sub(HOLE, after)


class Patterns:
    """Which numbers of all names are indices.

    Args:
        traces: all names.
        numbering: what is known of numbers besides.
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
        """Return the pattern of a name, and the indices in it."""
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
        """Tell whether a number has the same values in every trace that has such names; one trace tells nothing."""
        side, whole, at = number
        seen = []
        for trace in self._traces:
            names = [name for name in trace.side(side) if _DIGITS.sub(HOLE, name) == whole]
            if names:
                seen.append({_DIGITS.findall(name)[at] for name in names})
        return len(self._traces) > 1 and all(values == seen[0] for values in seen)


def _changes(seen: Sequence[set[int]]) -> bool:
    there = [values for values in seen if values]
    return any(values != there[0] for values in there) and any(len(values) > 1 for values in there)


def _alike(place: Place, endings: Mapping[int, set[tuple[str, tuple[int, ...]]]], *, single: bool) -> bool:
    """Tell whether the numbers of a place count things of one kind."""
    segment = not place[1] or place[1].endswith(".")
    if not segment or len(endings) < 2 or sorted(endings) != list(range(len(endings))):
        return False
    kinds = list(endings.values())
    if single:
        return any(kinds.count(kind) > 1 for kind in kinds)
    return all(kind == kinds[0] for kind in kinds)
