"""Agreement: which stored tensors are copies of each other and must prove equal before anything is committed.

A name alone proves nothing: ties, replicas and steps that become one are compared bit by bit while the data streams.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from msgspec import structs

from transaxle.axes.layout.bind import Index
from transaxle.axes.layout.relayout import Check, Origin, Target, TargetPart
from transaxle.axes.translation.alike_tensors import SourceTensor
from transaxle.axes.translation.holdings import Holdings, LineSources
from transaxle.errors import Refusal, Where


def agreements(holdings: Holdings, tied: Mapping[str, Sequence[str]]) -> tuple[list[Check], list[Refusal]]:
    """Return the checks that redundant copies are equal, and the copies that cannot be.

    Args:
        holdings: the checkpoint.
        tied: logical tensor -> those that it equals, the nearest first.
    """
    outcomes: list[Check | Refusal] = []
    for (component, slot), lines in holdings.sources.items():
        # The nearest that is stored: it is compared with the next one in its turn.
        originals = (holdings.sources.get((name, slot), []) for name in tied.get(component, ()))
        original = next(filter(None, originals), [])
        for first, second in [*combinations(lines, 2), *((lines[0], original_line) for original_line in original[:1])]:
            outcomes.extend(_twins(first, second))
        for line in lines:
            outcomes.extend(_replicas(line))
    checks = [item for item in outcomes if isinstance(item, Check)]
    return checks, [item for item in outcomes if isinstance(item, Refusal)]


def _read(place: SourceTensor, sources: Sequence[SourceTensor], rule: str) -> Target:
    """Return a logical tensor in the layout of one stored tensor, read from others.

    Its dtype and encoding are those of the sources: copies that differ in them are not equal.
    """
    origin = place.origin
    dtype = " and ".join(sorted({source.form.dtype for source in sources}))
    encoding = " and ".join(sorted({source.form.encoding for source in sources}))
    part = TargetPart(origin.component, tuple(source.origin for source in sources))
    return Target(origin.name, dtype, place.whole, origin.index, (part,), rule, origin.component, encoding)


def _twins(first: LineSources, second: LineSources) -> Iterator[Check | Refusal]:
    """Compare the tensors of one line with what another line holds of the same logical tensor."""
    common = [axis for axis in first.axes if axis in second.axes]
    others: dict[Index, list[SourceTensor]] = defaultdict(list)
    for place in second.places.values():
        others[tuple(place.origin.index[axis] for axis in common)].append(place)
    why = f"{first.line.text} and {second.line.text} hold the same tensor"
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
        with_copies = structs.replace(place, origin=structs.replace(place.origin, layout=place.whole))
        yield Check(_read(place, [with_copies], rule), _read(place, [original], rule), why)
