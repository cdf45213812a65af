"""Tables as they are written: finds families and blocks by name, so that others can be like them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import RLock

from transaxle.axes.notation import written
from transaxle.axes.notation.written import File, Written


class WrittenTables:
    """Files of tables that may build on each other. A file is read once, when something in it is asked for.

    Args:
        homes: name of each family and block -> the file it is in.
        text: returns the contents of a file.
    """

    def __init__(self, homes: Mapping[str, str], text: Callable[[str], str]) -> None:
        self._homes = homes
        self._text = text
        self._files: dict[str, File] = {}
        self._reading = RLock()

    def base(self, name: str) -> Written | None:
        """Return a family or a block as it is written, with all that it takes over; None where there is none."""
        file = self._homes.get(name)
        return None if file is None else self._file(file).written.get(name)

    def _file(self, name: str) -> File:
        with self._reading:
            if name not in self._files:
                self._files[name] = File()  # tables that are like each other find nothing here
                self._files[name] = written.read(self._text(name), name, (), self.base)
            return self._files[name]
