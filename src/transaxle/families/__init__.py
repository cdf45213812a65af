"""The families that ship with Transaxle: one `.rules` file each, read by `transaxle.axes.tables`.

Adding a family is adding a file here, or passing it with `--rules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from transaxle.axes import tables
from transaxle.axes.family import Family


@cache
def builtin() -> Mapping[str, Family]:
    """Return every family that ships, by name."""
    found: dict[str, Family] = {}
    for item in sorted(files(__name__).iterdir(), key=lambda item: item.name):
        if item.name.endswith(".rules"):
            found.update(tables.index(tables.read(item.read_text("utf-8"), file=item.name)))
    return found


def with_rules(text: str, file: str) -> Mapping[str, Family]:
    """Return the built-in families with those of a user's rules file added or extended.

    Raises:
        Refused: CORRUPT, with every problem of the file.
    """
    return {**builtin(), **tables.index(tables.read(text, file=file, known=builtin()))}
