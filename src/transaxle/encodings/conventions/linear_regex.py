r"""Regular expressions of a stranger's file, matched in time that is linear in the text.

Config files list modules, and checkpoints list parameters, as regular expressions. Python's `re` backtracks: an
expression of twenty characters can keep it busy for years. RE2 does not. Here an expression of Python's is written as
RE2 reads it; what RE2 has not (references back, assertions inside) is refused by name, and so is a name beyond ASCII
where the expression has `\w`, `\d` or `\s`, which RE2 reads as ASCII alone.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

_MOST_SECONDS = 5.0
"""Processor time for one list of expressions, beyond what its searches usually take."""
_ORDINARY = 1e-5
"""Seconds of a search that do not count: usually it takes two millionths, however many are made of one list."""
_MOST_BYTES = 1 << 24
"""Memory of the automaton of a list, and of those of its expressions together."""
_MOST_EACH = 1 << 20
"""Memory of the automaton of one expression."""
_DEEPEST = 100
_SHOWN = 80
"""Characters of an expression that an error shows."""

_TOKEN = re.compile(
    r"\\(?P<escaped>.?)|\(\?(?P<extension>[^:]|$)|[()]|\{,(?P<most>\d*)\}|\[\^?\]?(?:\\.|[^\]\\])*", re.DOTALL
)
_IN_SET = re.compile(r"\\(?P<escaped>.?)|(?<!^)\[", re.DOTALL)
_CLASSES, _CONTROLS = frozenset("wdsWDS"), frozenset("ntrfv")


class PatternError(ValueError):
    """The text is not an expression that can be run; the message says why."""


class Expressions:
    """Regular expressions, each of which is anchored at the start of the name and may end anywhere in it.

    Args:
        texts: the expressions.

    Raises:
        PatternError: for one that is malformed, or that RE2 cannot run.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._seconds = 0.0
        self._is_ascii = False
        self._depth = 0
        self._patterns = [self._checked(text) for text in texts]
        self._any = self._alternatives("")

    def match(self, name: str) -> bool:
        """Tell whether an expression matches the name or the beginning of it.

        Raises:
            PatternError: it takes too long, or the name is beyond ASCII.
        """
        return self._search(self._any.match, self._read(name)) is not None

    def ends_at(self, name: str, position: int) -> bool:
        """Tell whether a match of an expression may end at a position of the name; raises as `match`."""
        if position == len(name):
            return self._search(self._any_whole.match, self._read(name)) is not None
        # A mark where the match must end, so that `$` does not take the position for the end of the name.
        return self._search(self._any_marked.match, self._read(name[:position]) + b"\0") is not None

    def matching(self, name: str) -> list[int]:
        """Return the numbers of the expressions that match the name or the beginning of it; raises as `match`."""
        if not self.match(name):
            return []
        numbers: list[int] | None = self._search(self._each.Match, self._read(name))
        if numbers is None:  # one of them does: the automaton of all has outgrown its memory
            raise PatternError("there are too many expressions to tell which of them match")
        return sorted(numbers)

    @cached_property
    def _any_whole(self) -> Any:
        return self._alternatives(r"\z")

    @cached_property
    def _any_marked(self) -> Any:
        return self._alternatives(r"\x00\z")

    def _alternatives(self, end: str) -> Any:
        if not self._patterns:
            return _compiled(r"[^\x00-\x{10FFFF}]", _MOST_EACH)  # no character: nothing matches
        together = "|".join(f"(?:{pattern})" for pattern in self._patterns)
        try:
            return _compiled(f"(?:{together}){end}", _MOST_BYTES)
        except PatternError:
            raise PatternError("there are too many expressions, or they count too far") from None

    @cached_property
    def _each(self) -> Any:
        import re2

        automaton = re2.Set.MatchSet(_options(_MOST_BYTES))
        try:
            for pattern in self._patterns:
                automaton.Add(_as_bytes(pattern))
            automaton.Compile()
        except re2.error:
            raise PatternError("there are too many expressions to tell which of them match") from None
        return automaton

    def _checked(self, text: str) -> str:
        """Return an expression as RE2 reads it."""
        began = time.thread_time()
        try:
            self._depth = 0
            pattern = _TOKEN.sub(self._translated, text)
            _compiled(pattern, _MOST_EACH)  # alone, as two that are malformed may be well formed together
        except PatternError as error:
            shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
            raise PatternError(f"{shown!r} cannot be matched: {error}") from None
        self._spend(began)
        return pattern

    def _translated(self, token: re.Match[str]) -> str:
        text = token[0]
        if token["extension"] is not None:
            raise PatternError(f"`{text}` is not supported")
        if token["most"] is not None:
            return f"{{0,{token['most']}}}"
        if text in ("(", ")"):
            self._depth += 1 if text == "(" else -1
            if self._depth > _DEEPEST:
                raise PatternError("it is nested too deeply")
            return text
        if text.startswith("["):
            return _IN_SET.sub(lambda inner: self._escaped(inner) if inner["escaped"] is not None else r"\[", text)
        return self._escaped(token)

    def _escaped(self, token: re.Match[str]) -> str:
        letter = token["escaped"]
        if letter in _CLASSES:
            self._is_ascii = True
        elif letter == "Z":
            return r"\z"
        elif not letter or (letter.isascii() and letter.isalnum() and letter not in _CONTROLS):
            raise PatternError(f"`\\{letter}` is not supported")
        elif letter not in _CONTROLS:
            return f"\\x{{{ord(letter):x}}}"
        return token[0]

    def _read(self, name: str) -> bytes:
        if self._is_ascii and not (name.isascii() and name.isprintable()):
            raise PatternError(rf"`\w`, `\d` and `\s` are matched in ASCII alone, and the name {name!r} is beyond it")
        return _as_bytes(name)

    def _search(self, search: Callable[[bytes], Any], text: bytes) -> Any:
        began = time.thread_time() + _ORDINARY
        result = search(text)
        self._spend(began)
        return result

    def _spend(self, began: float) -> None:
        self._seconds += max(time.thread_time() - began, 0.0)
        if self._seconds > _MOST_SECONDS:
            raise PatternError("matching takes too long")


def _compiled(pattern: str, memory: int) -> Any:
    import re2

    try:
        return re2.compile(_as_bytes(pattern), _options(memory))
    except re2.error as error:
        raise PatternError(error.args[0].decode(errors="replace")) from None


def _options(memory: int) -> Any:
    import re2

    options = re2.Options()
    options.max_mem, options.never_capture, options.log_errors = memory, True, False
    return options


def _as_bytes(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise PatternError(f"{text!r} is not Unicode") from None
