"""Counted axes: numbers of layers or experts that only the names of a checkpoint show.

A gap in the numbers is detected; a missing last layer cannot be, so the reader of a plan is told.
"""

from __future__ import annotations

from collections.abc import Mapping

from transaxle.axes.layout.bind import Bound
from transaxle.axes.notation.family import Sizes


def counted(bound: Bound, given_sizes: Sizes, all_sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the name axes whose size nothing states, with the size that the names show.

    Args:
        bound: the stored names.
        given_sizes: sizes from config, manifest and user.
        all_sizes: all sizes, including those that names and shapes imply.
    """
    named = {axis for line, _ in bound.names for axis in line.name.axes}
    return {axis: all_sizes[axis] for axis in sorted(named & all_sizes.keys() - given_sizes.at({}).keys())}
