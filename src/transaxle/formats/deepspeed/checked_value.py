"""Checked values: members of a stranger's dicts, each of which must exist and have the right type.

A checkpoint's dicts are read in many places. With this class each place states its expectation in one line, and a file
that holds something else is refused with its name and the path inside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import Any

from transaxle.errors import TransaxleError, refuse

_LARGEST = 1 << 62
_SHOWN = 6


class CheckedValue:
    """A value with its path.

    Args:
        value: as a pickle described it.
        file: the file that holds it.
        path: keys and indices that lead to it.
    """

    __slots__ = ("file", "path", "value")

    def __init__(self, value: Any, file: str, path: tuple[str, ...] = ()) -> None:
        self.value = value
        self.file = file
        self.path = path

    def fault(self, message: str) -> TransaxleError:
        """Build the refusal of a file whose content is not what it must be."""
        way = " > ".join(self.path) or "the file"
        return refuse("CORRUPT", f"{way}: {message}", file=self.file)

    def get(self, key: str | int) -> CheckedValue | None:
        """Return a member of a dict; None where it is missing or None.

        Raises:
            Refused: CORRUPT where this is no dict.
        """
        value = self._dict().get(key)
        return None if value is None else CheckedValue(value, self.file, (*self.path, str(key)))

    def __getitem__(self, key: str | int) -> CheckedValue:
        member = self.get(key)
        if member is None:
            raise self.fault(f"{key!r} is missing")
        return member

    def items(self) -> Iterator[tuple[Any, CheckedValue]]:
        """Yield the members of a dict.

        Raises:
            Refused: CORRUPT where this is no dict.
        """
        for key, value in self._dict().items():
            yield key, CheckedValue(value, self.file, (*self.path, str(key)))

    def named(self) -> Iterator[tuple[str, CheckedValue]]:
        """Yield the members of a dict whose keys are texts.

        Raises:
            Refused: CORRUPT where this is no such dict.
        """
        for key, node in self.items():
            if not isinstance(key, str):
                raise self.fault("the keys must be names")
            yield key, node

    def list(self) -> list[CheckedValue]:
        """Return the items of a list or a tuple.

        Raises:
            Refused: CORRUPT where this is neither.
        """
        if not isinstance(self.value, list | tuple):
            raise self.fault(f"expected a list, not {_shown(self.value)}")
        return [CheckedValue(value, self.file, (*self.path, str(index))) for index, value in enumerate(self.value)]

    @property
    def is_dict(self) -> bool:
        """Whether this is a dict."""
        return isinstance(self.value, dict)

    @property
    def is_list(self) -> bool:
        """Whether this is a list or a tuple."""
        return isinstance(self.value, list | tuple)

    def natural(self) -> int:
        """Return a number that counts something.

        Raises:
            Refused: CORRUPT for anything else.
        """
        value = self.value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _LARGEST:
            raise self.fault(f"expected a count, not {_shown(value)}")
        return value

    def real(self) -> float:
        """Return a finite number.

        Raises:
            Refused: CORRUPT for anything else.
        """
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise self.fault(f"expected a finite number, not {_shown(value)}")
        return float(value)

    def text(self) -> str:
        """Return a text.

        Raises:
            Refused: CORRUPT for anything else.
        """
        if not isinstance(self.value, str):
            raise self.fault(f"expected a text, not {_shown(self.value)}")
        return self.value

    def flag(self) -> bool:
        """Return True or False.

        Raises:
            Refused: CORRUPT for anything else.
        """
        if not isinstance(self.value, bool):
            raise self.fault(f"expected True or False, not {_shown(self.value)}")
        return self.value

    def naturals(self) -> tuple[int, ...]:
        """Return a list of counts: a shape, or widths.

        Raises:
            Refused: CORRUPT for anything else.
        """
        return tuple(item.natural() for item in self.list())

    def texts(self) -> tuple[str, ...]:
        """Return a list of texts.

        Raises:
            Refused: CORRUPT for anything else.
        """
        return tuple(item.text() for item in self.list())

    def _dict(self) -> dict[Any, Any]:
        if not isinstance(self.value, dict):
            raise self.fault(f"expected a dict, not {_shown(self.value)}")
        return self.value


def _shown(value: object) -> str:
    """Return a short text about a value; it may be large, or hold itself."""
    if isinstance(value, str | int | float) or value is None:
        text = repr(value) if not isinstance(value, int) or abs(value) < _LARGEST else "a very large number"
        return text if len(text) <= 10 * _SHOWN else f"{text[: 10 * _SHOWN]}…"
    return f"a {type(value).__name__}"
