"""Plugins: entry points of installed packages that extend Transaxle.

A search for plugins reads the metadata of all installed distributions. The search happens at most once per process, and
only if no format or model family that ships with Transaxle fits the checkpoint.
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
    """Name of the entry point group, such as `transaxle.formats`."""
    name: str
    """Name of the entry point inside its group."""
    package: str
    """Name and version of the distribution that declares the entry point."""
    _load: Callable[[], Any] = field(repr=False)

    def load(self) -> Any:
        """Import the object that the entry point names.

        Raises:
            Refused: with the code UNSUPPORTED if the object cannot be imported.
        """
        try:
            with aside():
                return self._load()
        except BaseException as error:
            if is_users(error):
                raise
            raise self.refusal("UNSUPPORTED", f"it cannot be imported: {error!r}") from error

    def refusal(self, code: Code, message: str) -> TransaxleError:
        """Build the error that refuses this plugin; its message names the plugin's package and entry point."""
        place = f"{self.package}, entry point {self.name} of {self.group}"
        hint = f"Repair or remove the package {self.package.partition(' ')[0]}."
        return refuse(code, f"{place}: {message}", hint=hint)


def is_users(error: BaseException) -> bool:
    """Return whether an error in a plugin was caused by the user or the machine (Ctrl-C, no memory) and not by the
    plugin.
    """
    return isinstance(error, KeyboardInterrupt | GeneratorExit | MemoryError)


def aside() -> AbstractContextManager[object]:
    """Redirect a plugin's output to standard error, because other programs may read results from standard output."""
    return redirect_stdout(sys.stderr)


@cache
def plugins(group: str) -> tuple[Plugin, ...]:
    """Return the entry points of a group, sorted by name.

    Raises:
        Refused: with the code NAME_COLLISION if two packages have entry points with the same name.
    """
    from importlib.metadata import entry_points

    by_name: dict[str, Plugin] = {}
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        package = f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value
        plugin = Plugin(group, point.name, package, point.load)
        first = by_name.setdefault(point.name, plugin)
        if first is not plugin:
            raise plugin.refusal("NAME_COLLISION", f"{first.package} has an entry point of this name too")
    return tuple(by_name.values())
