"""Gathering: the stored tensors that each target tensor of a line is made of, by the indices in the target's name.

Where several stored tensors are copies of each other, one is read and the others must prove equal before anything is
committed. A name alone proves nothing: ties, replicas and steps that become one are compared bit by bit while the data
streams.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product

from msgspec.structs import replace

from transaxle.axes.layout.bind import WEIGHT, Index
from transaxle.axes.layout.relayout import Check, Origin, Target, TargetPart
from transaxle.axes.layout.solve import unknown_axis
from transaxle.axes.notation.family import Line
from transaxle.axes.translation.alike_tensors import SourceTensor
from transaxle.axes.translation.holdings import ComponentSources, Holdings, JoinedSources, LineSources, Sources
from transaxle.errors import Refusal, Where

SourcesByComponent = Mapping[str, Sources]
"""Component -> its sources."""

_SPARED = (
    "Choose a dialect that has both, or keep all names with --to safetensors:identity; if one is out of date, "
    "remove it."
)


class Gathering:
    """Finds the sources of targets.

    Args:
        holdings: the stored tensors.
        tied: logical tensor -> those that it is tied to, in order.
        refuse: receives what is wrong.
    """

    def __init__(
        self,
        holdings: Holdings,
        tied: Mapping[str, Sequence[str]],
        refuse: Callable[[Iterable[Refusal]], None],
    ) -> None:
        self._holdings = holdings
        self._tied = tied
        self._refuse = refuse

    def sources(self, component: str, slot: str, line: Line) -> Mapping[Index, Sources]:
        """Collect the sources of one component of a target line, by the target's index.

        Where several lines of the source hold it, they complete each other; a tensor that two lines hold is taken once.
        """
        gathered: dict[Index, ComponentSources] = {}
        # A tied tensor that is not stored is read from the first that is, of those that it is tied to.
        for name in (component, *self._tied.get(component, ())):
            if (name, slot) in self._holdings.sources:
                break
        held = self._holdings.sources.get((name, slot), ())
        if len(held) == 1 and len(held[0].places) == 1:  # layers and experts are dims of it: all have the same source
            (place,) = held[0].places.values()
            only = ComponentSources(held[0], {frozenset(place.origin.index.items()): place})
            return dict.fromkeys((key for key, _ in self._keyed(held[0], line)), only)
        if len(held) == 1 and (joined := held[0].joined(line.name.axes)):
            return joined
        for line_sources in held:
            for key, place in self._keyed(line_sources, line):
                entry = gathered.get(key) or gathered.setdefault(key, ComponentSources(line_sources, {}))
                # Lines complete each other only if they number the same axes in names: a stack and single tensors would
                # overlap.
                if entry.line_sources is line_sources or set(entry.line_sources.axes) == set(line_sources.axes):
                    self._agree(entry, place)
                    entry.places.setdefault(frozenset(place.origin.index.items()), place)
        return gathered

    def _keyed(self, line_sources: LineSources, line: Line) -> Iterator[tuple[Index, SourceTensor]]:
        """Yield each source with the index of every target tensor that it contributes to.

        Raises:
            UsageError: UNKNOWN_AXIS where an axis is in the target's names, and its size is unknown.
        """
        order = [line_sources.axes.index(axis) if axis in line_sources.axes else None for axis in line.name.axes]
        for position, place in line_sources.places.items():
            # All axes of the target's names are in the source's names too: each source belongs to one target.
            if None not in order:
                yield tuple(position[p] for p in order if p is not None), place
                continue
            ranges = []
            for axis, p in zip(line.name.axes, order, strict=True):
                if p is None and axis not in place.sizes:
                    raise unknown_axis(axis, line.text)
                ranges.append(range(place.sizes[axis]) if p is None else (position[p],))
            yield from ((key, place) for key in product(*ranges))

    def _agree(self, entry: ComponentSources, place: SourceTensor) -> None:
        """Refuse stored tensors of different sizes for one target tensor."""
        # The same dict object means the same line and shape, so there is nothing to compare: the usual case, for every
        # expert but the first.
        if not entry.places or place.sizes is entry.first.sizes:
            return
        origin, expected = place.origin, entry.first
        sized = {axis: count for share in origin.layout.shares[origin.component] for axis, count, _ in share.axes}
        if any(expected.sizes.get(axis) != count for axis, count in sized.items()):
            shapes = (
                f"expected {list(expected.whole.shape)} as in {expected.origin.name}, got {list(place.whole.shape)}"
            )
            message = f"{entry.line_sources.line.text}\n{shapes}"
            self._refuse([Refusal("SHAPE_MISMATCH", message, Where(None, origin.name))])


def shared_by_all(parts: Mapping[str, Mapping[Index, Sources]], keys: Collection[Index]) -> SourcesByComponent:
    """Return the sources of each component, if all targets of a line have the same; nothing otherwise."""
    shared = {}
    for component, by_key in parts.items():
        if isinstance(by_key, JoinedSources):
            return {}
        sources = {id(each): each for each in by_key.values()}
        if len(by_key) != len(keys) or len(sources) != 1:
            return {}
        (shared[component],) = sources.values()
    return shared


def all_joined(parts: Mapping[str, Mapping[Index, Sources]], keys: Collection[Index]) -> Mapping[str, JoinedSources]:
    """Return the sources of each component, if the targets of a line have the same but for their numbers; nothing
    otherwise.
    """
    joined = {component: of_all for component, of_all in parts.items() if isinstance(of_all, JoinedSources)}
    return joined if len(joined) == len(parts) and all(len(each) == len(keys) for each in joined.values()) else {}


def sources_at(parts: Mapping[str, Mapping[Index, Sources]], key: Index) -> SourcesByComponent:
    """Return the sources of the target with an index, of the components that are there."""
    return {component: sources[key] for component, sources in parts.items() if key in sources}


def agreements(holdings: Holdings, tied: Mapping[str, Sequence[str]]) -> tuple[list[Check], list[Refusal]]:
    """Return the checks that redundant copies are equal, and the copies that cannot be.

    Args:
        holdings: the checkpoint.
        tied: logical tensor -> those that it equals, the nearest first.
    """
    outcomes: list[Check | Refusal] = []
    for (component, slot), lines in holdings.sources.items():
        for first, second in [*combinations(lines, 2), *_with_original(holdings, component, slot, tied)]:
            outcomes.extend(_twins(first, second, f"{first.line.text} and {second.line.text} hold the same tensor"))
        for line in lines:
            outcomes.extend(_replicas(line))
    return _sorted(outcomes)


def spared(holdings: Holdings, copies: Mapping[str, Sequence[str]], label: str) -> tuple[list[Check], list[Refusal]]:
    """Return the checks that tensors for which a dialect has no name equal those that it uses in their place, and those
    that cannot.

    Args:
        holdings: the checkpoint.
        copies: these tensors -> those that stand for them, the nearest first.
        label: the dialect.
    """
    outcomes: list[Check | Refusal] = []
    for component in copies:
        for first, second in _with_original(holdings, component, WEIGHT, copies):
            why = f"{label} has no name for {first.line.text}\nand has {second.line.text} in its place"
            outcomes.extend(_twins(first, second, why))
    checks, refusals = _sorted(outcomes)
    return [replace(check, hint=_SPARED) for check in checks], refusals


def _sorted(outcomes: Iterable[Check | Refusal]) -> tuple[list[Check], list[Refusal]]:
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
    """Yield the first line that holds a tensor with that of the nearest stored tensor that it is tied to, which is
    compared with the next one in its turn.
    """
    originals = (holdings.sources.get((name, slot), []) for name in tied.get(component, ()))
    original = next(filter(None, originals), [])
    lines = holdings.sources.get((component, slot), [])
    yield from zip(lines[:1], original[:1], strict=False)


def _read(place: SourceTensor, sources: Sequence[SourceTensor], rule: str) -> Target:
    """Return a logical tensor in the layout of one stored tensor, read from others.

    Its dtype and encoding are those of the sources: copies that differ in them are not equal.
    """
    origin = place.origin
    dtype = " and ".join(sorted({source.form.dtype for source in sources}))
    encoding = " and ".join(sorted({source.form.encoding for source in sources}))
    part = TargetPart(origin.component, tuple(source.origin for source in sources))
    return Target(origin.name, dtype, place.whole, origin.index, (part,), rule, origin.component, encoding)


def _twins(first: LineSources, second: LineSources, why: str) -> Iterator[Check | Refusal]:
    """Compare the tensors of one line with what another line holds of the same logical tensor.

    Args:
        first: the line.
        second: the other one.
        why: why they must be equal.
    """
    common = [axis for axis in first.axes if axis in second.axes]
    others: dict[Index, list[SourceTensor]] = defaultdict(list)
    for place in second.places.values():
        others[tuple(place.origin.index[axis] for axis in common)].append(place)
    for place in first.places.values():
        counterparts = others.get(tuple(place.origin.index[axis] for axis in common), [])
        differing = [other for other in counterparts if not _alike(place, other)]
        for other in differing:
            message = f"{why}\nbut their sizes differ: {list(place.whole.shape)} and {list(other.whole.shape)}"
            yield Refusal("SHAPE_MISMATCH", message, Where(None, other.origin.name))
        if counterparts and not differing:
            yield Check(_read(place, [place], first.line.text), _read(place, counterparts, second.line.text), why)


def _alike(first: SourceTensor, second: SourceTensor) -> bool:
    """Tell whether two stored tensors give the axes that both have the same sizes."""
    first_sizes, second_sizes = (dict(_sized(place.origin)) for place in (first, second))
    return all(second_sizes.get(axis, size) == size for axis, size in first_sizes.items())


def _sized(origin: Origin) -> Iterator[tuple[str, int]]:
    """Yield the axes of an origin with their sizes."""
    return ((axis, size) for share in origin.layout.shares[origin.component] for axis, size, _ in share.axes)


def _replicas(line: LineSources) -> Iterator[Check]:
    """Check the copies within one line: under further names, and along dims that the logical tensor does not have."""
    if line.alike is not None and line.alike.model.whole is line.alike.model.origin.layout:
        return
    rule = line.line.text
    why = f"{rule}: copies are equal"
    firsts = [(place, place) for place in line.places.values() if place.whole is not place.origin.layout]
    for place, original in [*firsts, *((place, line.places[position]) for position, place in line.copies)]:
        with_copies = replace(place, origin=replace(place.origin, layout=place.whole))
        yield Check(_read(place, [with_copies], rule), _read(place, [original], rule), why)
