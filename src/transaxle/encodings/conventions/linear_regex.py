r"""Regular expressions from untrusted files, matched in time that is linear in the text.

Config files list modules, and checkpoints list parameters, as regular expressions. Python's `re` backtracks: an
expression of twenty characters can keep it busy for years. RE2 does not. Here a Python expression is translated for
RE2. Features that RE2 lacks (back references, assertions inside) are refused by name, and so is a name beyond ASCII
where the expression has `\w`, `\d` or `\s`, which RE2 matches in ASCII only.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

_MOST_SECONDS = 5.0
"""Cap on the processor time of one list of expressions, in seconds, beyond ordinary searches."""
_ORDINARY = 1e-5
"""Seconds of a search that are not counted: a search usually takes two millionths of a second."""
_MOST_BYTES = 1 << 24
"""Cap on the memory of a list's automaton, and of the automata of its expressions together, in bytes."""
_MOST_EACH = 1 << 20
"""Cap on the memory of the automaton of one expression, in bytes."""
_DEEPEST = 100
_SHOWN = 80
"""Number of characters of an expression that an error shows."""

_TOKEN = re.compile(
    r"\\(?P<escaped>.?)|\(\?(?P<extension>[^:]|$)|[()]|\{,(?P<most>\d*)\}|\[\^?\]?(?:\\.|[^\]\\])*", re.DOTALL
)
_IN_SET = re.compile(r"\\(?P<escaped>.?)|(?<!^)\[", re.DOTALL)
_CLASSES, _CONTROLS = frozenset("wdsWDS"), frozenset("ntrfv")


class PatternError(ValueError):
    """An expression that cannot be run; the message gives the reason."""


class Expressions:
    """Regular expressions, each anchored at the start of a name and free to end anywhere in it.

    Args:
        texts: the expressions.

    Raises:
        PatternError: an expression is malformed, or RE2 cannot run it.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._seconds = 0.0
        self._is_ascii = False
        self._depth = 0
        self._patterns = [self._check(text) for text in texts]
        self._any = self._alternatives("")

    def match(self, name: str) -> bool:
        """Tell whether an expression matches the name or a beginning of it.

        Raises:
            PatternError: the search takes too long, or the name is beyond ASCII.
        """
        return self._search(self._any.match, self._read(name)) is not None

    def ends_at(self, name: str, position: int) -> bool:
        """Tell whether a match of an expression may end at a position of the name; raises as `match`."""
        if position == len(name):
            return self._search(self._any_whole.match, self._read(name)) is not None
        # A mark where the match must end, so that `$` does not match there.
        return self._search(self._any_marked.match, self._read(name[:position]) + b"\0") is not None

    def find_matches(self, name: str) -> list[int]:
        """Return the numbers of the expressions that match the name or a beginning of it; raises as `match`."""
        if not self.match(name):
            return []
        numbers: list[int] | None = self._search(self._each.Match, self._read(name))
        if numbers is None:  # some expression matches, but the automaton for all expressions exceeds its memory
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
            return _compile(r"[^\x00-\x{10FFFF}]", _MOST_EACH)  # a class without any character matches nothing
        together = "|".join(f"(?:{pattern})" for pattern in self._patterns)
        try:
            return _compile(f"(?:{together}){end}", _MOST_BYTES)
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

    def _check(self, text: str) -> str:
        """Return an expression as RE2 expects it, or raise PatternError."""
        began = time.thread_time()
        try:
            self._depth = 0
            pattern = _TOKEN.sub(self._translate, text)
            # compiled separately, because two malformed expressions may be well formed together
            _compile(pattern, _MOST_EACH)
        except PatternError as error:
            shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
            raise PatternError(f"{shown!r} cannot be matched: {error}") from None
        self._spend(began)
        return pattern

    def _translate(self, token: re.Match[str]) -> str:
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
            return _IN_SET.sub(lambda inner: self._escape(inner) if inner["escaped"] is not None else r"\[", text)
        return self._escape(token)

    def _escape(self, token: re.Match[str]) -> str:
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


def _compile(pattern: str, memory: int) -> Any:
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
