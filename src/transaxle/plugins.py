"""Installed packages that add to Transaxle: each names what it adds in its metadata, under an entry point.

Looking for them reads the metadata of every installed distribution. That is done once in a process, and only where
nothing that ships with Transaxle answers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from transaxle.errors import Code, TransaxleError, refuse


@dataclass(frozen=True)
class Plugin:
    """One entry point of an installed package."""

    group: str
    """What kind of addition it is, e.g. `transaxle.formats`."""
    name: str
    """Its name in that group."""
    package: str
    """Distribution that it comes from, with its version."""
    _load: Callable[[], Any] = field(repr=False)

    def load(self) -> Any:
        """Import what it names.

        Raises:
            Refused: UNSUPPORTED where that cannot be imported.
        """
        try:
            with aside():
                return self._load()
        except BaseException as error:
            if is_users(error):
                raise
            raise self.refusal("UNSUPPORTED", f"it cannot be imported: {error!r}") from error

    def refusal(self, code: Code, message: str) -> TransaxleError:
        """Build the refusal of what a package adds, which says which package that is."""
        place = f"{self.package}, entry point {self.name} of {self.group}"
        hint = f"Repair or remove the package {self.package.partition(' ')[0]}."
        return refuse(code, f"{place}: {message}", hint=hint)


def is_users(error: BaseException) -> bool:
    """Tell whether what installed code has raised is the user's doing, or the machine's; anything else is its own."""
    return isinstance(error, KeyboardInterrupt | GeneratorExit | MemoryError)


def aside() -> AbstractContextManager[object]:
    """Let what installed code prints appear beside the result, which a program may read."""
    return redirect_stdout(sys.stderr)


@cache
def plugins(group: str) -> tuple[Plugin, ...]:
    """Return the entry points of a group, by name.

    Raises:
        Refused: NAME_COLLISION where two packages have one of the same name.
    """
    from importlib.metadata import entry_points

    known: dict[str, Plugin] = {}
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        package = f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value
        plugin = Plugin(group, point.name, package, point.load)
        other = known.setdefault(point.name, plugin)
        if other is not plugin:
            raise plugin.refusal("NAME_COLLISION", f"{other.package} has an entry point of this name too")
    return tuple(known.values())
