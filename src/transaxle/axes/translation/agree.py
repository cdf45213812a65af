"""Agreement: which stored tensors are copies of each other and must prove equal before anything is committed.

Nothing is assumed to be a copy because its name says so: ties, replicas and steps that become one are compared bit by
bit while the data streams.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from transaxle.axes.layout.bind import Index
from transaxle.axes.layout.relayout import Check, Origin, Part, Target
from transaxle.axes.translation.holdings import Held, Holdings, Place
from transaxle.errors import Refusal, Where


def agreements(holdings: Holdings, tied: Mapping[str, str]) -> tuple[list[Check], list[Refusal]]:
    """Return the checks that redundant copies are equal, and the copies that cannot be.

    Args:
        holdings: the checkpoint.
        tied: logical tensor -> the one it equals.
    """
    found: list[Check | Refusal] = []
    for (component, slot), helds in holdings.held.items():
        original = holdings.held.get((tied.get(component, ""), slot), [])
        for first, second in [*combinations(helds, 2), *((helds[0], other) for other in original[:1])]:
            found.extend(_twins(first, second))
        for held in helds:
            found.extend(_replicas(held))
    checks = [item for item in found if isinstance(item, Check)]
    return checks, [item for item in found if isinstance(item, Refusal)]


def _read(place: Place, sources: Sequence[Place], rule: str) -> Target:
    """Return a logical tensor in the layout of one stored tensor, read from others.

    Its form is that of the sources: where it is not the same on both sides of a check, they are not equal.
    """
    own = place.origin
    dtype = " and ".join(sorted({source.form.dtype for source in sources}))
    encoding = " and ".join(sorted({source.form.encoding for source in sources}))
    part = Part(own.component, tuple(source.origin for source in sources))
    return Target(own.name, dtype, place.whole, own.index, (part,), rule, own.component, encoding)


def _twins(first: Held, second: Held) -> Iterator[Check | Refusal]:
    """Compare the tensors of one line with what another line holds of the same logical tensor."""
    common = [axis for axis in first.axes if axis in second.axes]
    others: dict[Index, list[Place]] = defaultdict(list)
    for place in second.places.values():
        others[tuple(place.origin.index[axis] for axis in common)].append(place)
    why = f"{first.line.text} and {second.line.text} hold the same tensor"
    for place in first.places.values():
        found = others.get(tuple(place.origin.index[axis] for axis in common), [])
        odd = [other for other in found if not _alike(place, other)]
        for other in odd:
            message = f"{why}\nbut their sizes differ: {list(place.whole.shape)} and {list(other.whole.shape)}"
            yield Refusal("SHAPE_MISMATCH", message, Where(None, other.origin.name))
        if found and not odd:
            yield Check(_read(place, [place], first.line.text), _read(place, found, second.line.text), why)


def _alike(first: Place, second: Place) -> bool:
    """Tell whether two stored tensors give the axes that both have the same sizes."""
    one, two = (dict(_sized(place.origin)) for place in (first, second))
    return all(two.get(axis, size) == size for axis, size in one.items())


def _sized(origin: Origin) -> Iterator[tuple[str, int]]:
    return ((axis, size) for share in origin.layout.shares[origin.component] for axis, size, _ in share.axes)


def _replicas(held: Held) -> Iterator[Check]:
    """Compare the copies that one line stores: under further names, and along dims the logical tensor does not have."""
    rule = held.line.text
    why = f"{rule}: copies are equal"
    firsts = [(place, place) for place in held.places.values() if place.whole is not place.origin.layout]
    for place, original in [*firsts, *((place, held.places[position]) for position, place in held.copies)]:
        every = replace(place, origin=replace(place.origin, layout=place.whole))
        yield Check(_read(place, [every], rule), _read(place, [original], rule), why)
