"""Counted axes: how many layers or experts there are, where nothing but the names of a checkpoint says it.

A hole between two of them is found; that the last one is missing cannot be, so whoever reads a plan is told.
"""

from __future__ import annotations

from collections.abc import Mapping

from transaxle.axes.layout.bind import Bound
from transaxle.axes.notation.family import Sizes


def counted(bound: Bound, said: Sizes, found: Mapping[str, int]) -> dict[str, int]:
    """Return the axes in stored names whose size nothing says, with how many the names show.

    Args:
        bound: the stored names.
        said: the sizes that config, manifest and user say.
        found: all sizes, those that names and shapes tell included.
    """
    named = {axis for line, _ in bound.names for axis in line.name.axes}
    return {axis: found[axis] for axis in sorted(named & found.keys() - said.at({}).keys())}
