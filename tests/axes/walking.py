"""The plain meaning of an expression: every element visited, one after the other. Slow, and hard to get wrong.

Nothing here knows of offsets and strides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

import numpy as np
from hypothesis import strategies as st

from tests.axes.apply import HOLE, Array, only
from transaxle.axes.notation.expression import Axis, Expression, Merge, Node, Sum, parse
from transaxle.axes.notation.family import Family

Sizes = Mapping[str, int]
Index = tuple[tuple[str, int], ...]
"""An element of a logical tensor: its index along each axis, by axis name."""


def visit(node: Node, sizes: Sizes) -> list[tuple[str | None, Index]]:
    """What stands at each position of a dim: the tensor it belongs to (None: whichever), and its indices."""
    match node:
        case Axis(name):
            return [(None, ((name, i),)) for i in range(sizes[name])]
        case Merge(parts):
            found: list[tuple[str | None, Index]] = []
            for chosen in product(*(visit(part, sizes) for part in parts)):
                owners = [owner for owner, _ in chosen if owner is not None]
                found.append((owners[0] if owners else None, tuple(pair for _, index in chosen for pair in index)))
            return found
        case Sum(segments):
            return [(name, index) for name, part in segments for _, index in visit(part, sizes)]


def elements(expression: Expression, sizes: Sizes) -> Iterator[tuple[int, str, Index]]:
    """Every position of the flattened stored tensor, with the element of a logical tensor that stands there."""
    for position, chosen in enumerate(product(*(visit(dim, sizes) for dim in expression.dims))):
        owners = [owner for owner, _ in chosen if owner is not None]
        owner = expression.component or owners[0]
        yield position, owner, tuple(sorted(pair for _, index in chosen for pair in index))


def places(expression: Expression, sizes: Sizes, component: str) -> dict[Index, int]:
    """Element -> its position in the flattened stored tensor."""
    return {index: position for position, owner, index in elements(expression, sizes) if owner == component}


def shape(expression: Expression, sizes: Sizes) -> tuple[int, ...]:
    """Positions along each dim."""
    return tuple(len(visit(dim, sizes)) for dim in expression.dims)


def ravel(index: Index, sizes: Sizes) -> int:
    """A number for an element: its place where the axes lie in the order of their names."""
    number = 0
    for axis, i in index:
        number = number * sizes[axis] + i
    return number


@st.composite
def split(draw: st.DrawFn, axes: list[str], depth: int = 2) -> str:
    """Axes in some order, merged and nested somehow, as the text of one item."""
    if len(axes) == 1 and draw(st.booleans()):
        return axes[0]
    order = draw(st.permutations(axes))
    texts = []
    while order:
        count = draw(st.integers(1, len(order)))
        group, order = order[:count], order[count:]
        texts.append(group[0] if len(group) == 1 or depth == 0 else draw(split(group, depth - 1)))
        texts.extend(group[1:] if depth == 0 and len(group) > 1 else [])
    return f"({' '.join(texts)})"


@st.composite
def single(draw: st.DrawFn, component: str, axes: list[str]) -> str:
    """An expression of one logical tensor."""
    order = draw(st.permutations(axes))
    dims = []
    while order:
        count = draw(st.integers(1, len(order)))
        dims.append(draw(split(list(order[:count]))))
        order = order[count:]
    if draw(st.booleans()):
        dims.insert(draw(st.integers(0, len(dims))), "1")
    return f"{component}[{' '.join(dims)}]"


@st.composite
def summed(draw: st.DrawFn, tensors: Mapping[str, list[str]], padded: bool = True) -> str:
    """An expression of several logical tensors; the axes that all have may stand outside the sum."""
    common = [axis for axis in next(iter(tensors.values())) if all(axis in axes for axes in tensors.values())]
    outside = draw(st.lists(st.sampled_from(common), unique=True)) if common else []
    segments = []
    for name in draw(st.permutations(list(tensors))):
        inside = [axis for axis in tensors[name] if axis not in outside]
        segments.append(f"{name}:{draw(split(inside)) if inside else ''}")
    if padded and draw(st.booleans()):
        segments.insert(draw(st.integers(0, len(segments))), "0:z")
    cut = draw(st.integers(0, len(outside)))
    merged, dims = outside[:cut], outside[cut:]
    around = draw(st.integers(0, len(merged)))
    total = f"[{' | '.join(segments)}]"
    if merged:
        total = f"({' '.join([*merged[:around], total, *merged[around:]])})"
    dims.insert(draw(st.integers(0, len(dims))), total)
    return f"[{' '.join(dims)}]"


TENSORS = {"x": ["a", "b", "c"], "y": ["a", "b", "e"], "w": ["a", "c"]}
"""Logical tensors of different axes, for laws."""


@st.composite
def expressions(draw: st.DrawFn, names: list[str] | None = None) -> Expression:
    """Any expression of some of `TENSORS`."""
    chosen = names or draw(st.lists(st.sampled_from(list(TENSORS)), min_size=1, max_size=3, unique=True))
    if len(chosen) == 1 and draw(st.booleans()):
        return parse(draw(single(chosen[0], TENSORS[chosen[0]])))
    return parse(draw(summed({name: TENSORS[name] for name in chosen})))


@st.composite
def sizes(draw: st.DrawFn, least: int = 1) -> dict[str, int]:
    """Small sizes of the axes of `TENSORS`, and of padding."""
    return {**{axis: draw(st.integers(least, 4)) for axis in "abce"}, "z": draw(st.integers(0, 2))}


Line = tuple[str, bool, Expression]
"""Name pattern, whether axis `a` is in it, expression."""


@st.composite
def dialects(draw: st.DrawFn) -> list[Line]:
    """Lines that together hold each of `TENSORS` once, perhaps with axis `a` in their names."""
    left = draw(st.permutations(list(TENSORS)))
    lines: list[Line] = []
    while left:
        group, left = (left[: (n := draw(st.integers(1, len(left))))], left[n:])
        named = draw(st.booleans())
        axes = {name: [axis for axis in TENSORS[name] if axis != "a" or not named] for name in group}
        alone = len(group) == 1 and draw(st.booleans())
        text = draw(single(group[0], axes[group[0]]) if alone else summed(axes))
        lines.append((f"{'.'.join(group)}{'.{a}' if named else ''}", named, parse(text)))
    return lines


def _table(name: str, lines: list[Line]) -> str:
    return "\n".join([f"dialect {name}", *(f"  {pattern} = {expression.text}" for pattern, _, expression in lines)])


def stored(lines: list[Line], sizes: dict[str, int], state: int = 0) -> dict[str, Array]:
    """What a dialect stores, written element by element: each holds the number of its tensor and its index."""
    tensors = list(TENSORS)
    found = {}
    for pattern, named, expression in lines:
        for a in range(sizes["a"]) if named else (None,):
            array = np.full(shape(expression, sizes), HOLE)
            for component in expression.components:
                base = 1000 * tensors.index(component) + 10000 * state
                for index, at in places(expression, sizes, component).items():
                    full = index if a is None else (("a", a), *index)
                    array.reshape(-1)[at] = base + ravel(full, sizes)
            found[pattern.format(a=a)] = array
    return found


def family(source: list[Line], target: list[Line]) -> Family:
    """A family of `TENSORS` with two dialects, `one` and `two`."""
    declared = "\n".join(f"  {name} : {' '.join(axes)}" for name, axes in TENSORS.items())
    return only(f"family any\n  axes a=a b=b c=c e=e z\n{declared}\n{_table('one', source)}\n{_table('two', target)}\n")
