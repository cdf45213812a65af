r"""Name patterns of a stranger's metadata: the part of regular expressions that they use, matched in linear time.

DeepSpeed's own patterns are escaped names. Those of training frameworks have `.`, `\d+` and the like. Python's matcher
would read both, but a pattern that takes it years to match is written in a minute; so the few signs that are needed are
read here, and everything else is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from transaxle.errors import refuse

_CLASSES = {"d": "0123456789", "w": None}
_SPECIAL = frozenset("()[]{}|")
_HINT = "Patterns are escaped names, or names with `.`, `\\d`, `\\w`, and one of `*`, `+`, `?` after any of these."
_LONGEST = 4096
_AT_FIRST, _EACH = 1 << 20, 1 << 12
"""Steps of matching that are allowed at all, and more for each name: real patterns take a few hundred a name."""


@dataclass(frozen=True, slots=True)
class _Atom:
    accepted: str | None
    """Characters; None for a letter, a digit or `_`; empty for any."""
    least: int
    many: bool

    @property
    def plain(self) -> bool:
        """Whether it is one character, once."""
        return self.accepted is not None and len(self.accepted) == self.least == 1 and not self.many

    def takes(self, character: str) -> bool:
        if self.accepted is None:
            return character.isalnum() or character == "_"
        return not self.accepted or character in self.accepted


@dataclass(frozen=True, slots=True)
class Pattern:
    """One pattern. As DeepSpeed uses it, it need only match the beginning of a name unless it ends in `$`."""

    text: str
    atoms: tuple[_Atom, ...]
    full: bool
    """It must match the whole name."""

    @property
    def literal(self) -> str | None:
        """The one name that the pattern matches; None where it may match several."""
        if not self.full or not all(atom.plain for atom in self.atoms):
            return None
        return "".join(atom.accepted or "" for atom in self.atoms)

    def matches(self, name: str) -> bool:
        """Tell whether the pattern matches."""
        return self.walk(name)[0]

    def walk(self, name: str) -> tuple[bool, int]:
        """Tell whether the pattern matches, and how many steps that took."""
        states = self._open({0})
        steps = len(states)
        for character in name:
            if not self.full and len(self.atoms) in states:
                return True, steps
            states = self._open(
                {
                    state if self.atoms[state].many else state + 1
                    for state in states
                    if state < len(self.atoms) and self.atoms[state].takes(character)
                }
                | {
                    state + 1
                    for state in states
                    if state < len(self.atoms) and self.atoms[state].many and self.atoms[state].takes(character)
                }
            )
            steps += len(states)
            if not states:
                return False, steps
        return len(self.atoms) in states, steps

    def _open(self, states: set[int]) -> set[int]:
        """Add the states that are reached by leaving out atoms that may be left out."""
        for state in sorted(states):
            while state < len(self.atoms) and not self.atoms[state].least and state + 1 not in states:
                state += 1
                states.add(state)
        return states


@lru_cache(1 << 16)
def parse(text: str) -> Pattern:
    """Read a pattern.

    Raises:
        Refused: UNSUPPORTED for signs that are not read here.
    """
    if len(text) > _LONGEST:
        raise refuse("UNSUPPORTED", f"a name pattern of {len(text)} characters", hint=_HINT)
    atoms: list[_Atom] = []
    at, stop = int(text.startswith("^")), len(text)
    full = text.endswith("$") and (len(text) - len(text[:-1].rstrip("\\")) - 1) % 2 == 0
    stop -= full
    while at < stop:
        sign = text[at]
        at += 1
        if sign == "\\":
            accepted = _escaped(text, at, stop)
            at += 1
        elif sign in _SPECIAL or sign in "*+?^$":
            raise refuse("UNSUPPORTED", f"the name pattern {text!r} has {sign!r} at {at - 1}", hint=_HINT)
        else:
            accepted = "" if sign == "." else sign
        following = text[at] if at < stop else ""
        if following and following in "*+?":
            at += 1
        atoms.append(_Atom(accepted, 0 if following in ("*", "?") else 1, following in ("*", "+")))
    return Pattern(text, tuple(atoms), full)


def _escaped(text: str, at: int, stop: int) -> str | None:
    if at >= stop or (text[at].isalnum() and text[at] not in _CLASSES):
        message = f"the name pattern {text!r} has an escape at {at - 1} that is not known"
        raise refuse("UNSUPPORTED", message, hint=_HINT)
    return _CLASSES.get(text[at], text[at])


class Patterns:
    """Many patterns, looked up by name: those that are plain names without trying all of them."""

    def __init__(self, texts: Iterable[str]) -> None:
        parsed = [parse(text) for text in dict.fromkeys(texts)]
        self._literal: Mapping[str, str] = {p.literal: p.text for p in parsed if p.literal is not None}
        self._others = [p for p in parsed if p.literal is None]
        self._steps = _AT_FIRST

    def match(self, name: str) -> tuple[str, ...]:
        """Return the patterns that match a name.

        Raises:
            Refused: UNSUPPORTED where that takes far longer than with any real patterns.
        """
        found = [self._literal[name]] if name in self._literal else []
        self._steps += _EACH
        for pattern in self._others:
            matched, steps = pattern.walk(name)
            self._steps -= steps
            if self._steps < 0:
                raise refuse("UNSUPPORTED", "matching its name patterns takes too long", hint=_HINT)
            if matched:
                found.append(pattern.text)
        return tuple(found)


def escaped(name: str) -> str:
    """Return the pattern that matches one name, as DeepSpeed writes it.  Inverse of `Pattern.literal`."""
    return f"^{re.escape(name)}$"
