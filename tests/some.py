"""Values that may be None or of another class, for type checkers, and are not: a test fails where they are."""

from __future__ import annotations

from typing import TypeVar

_Value = TypeVar("_Value")


def some(value: _Value | None) -> _Value:
    """The value, which is there."""
    assert value is not None
    return value


def a(kind: type[_Value], value: object) -> _Value:
    """The value, which is an instance of a class."""
    assert isinstance(value, kind)
    return value
