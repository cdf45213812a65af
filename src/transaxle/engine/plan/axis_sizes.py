"""Sizes of axes: those that are recorded, and those that only the names of a checkpoint show."""

from __future__ import annotations

from collections.abc import Mapping

from transaxle.axes.layout.bind import Bound
from transaxle.axes.notation.family import Dialect, Family, Sizes


def recorded(sizes: Mapping[str, int], family: Family, label: str) -> dict[str, int]:
    """Return the sizes to record with a target dialect: all but the padding of other dialects."""
    target = family.dialect(label)
    if target is None:
        return dict(sizes)
    padding = {axis for dialect in family.dialects for axis in _padding(dialect)} - _padding(target)
    return {axis: size for axis, size in sizes.items() if axis not in padding}


def _padding(dialect: Dialect) -> set[str]:
    return {axis for line in dialect.lines for axis in line.expression.padding}


def counted(bound: Bound, given_sizes: Sizes, all_sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the name axes whose size nothing states (layers, experts), with the size that the names show.

    A gap in their numbers is detected; a missing last layer cannot be, so the reader of a plan is told.

    Args:
        bound: the stored names.
        given_sizes: sizes from config, manifest and user.
        all_sizes: all sizes, including those that names and shapes imply.
    """
    named = {axis for line, _ in bound.names for axis in line.name.axes}
    return {axis: all_sizes[axis] for axis in sorted(named & all_sizes.keys() - given_sizes.at({}).keys())}
