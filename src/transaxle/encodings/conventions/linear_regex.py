r"""Matches regular expressions from untrusted files in time that is linear in the length of the text.

Config files list modules, and checkpoints list parameters, as regular expressions. Python's `re` backtracks, so an
expression of twenty characters can take years to match; RE2 never backtracks. This module translates Python expressions
for RE2. Expressions with features that RE2 lacks (back references, lookarounds) are rejected, with an error that names
the feature. If an expression has `\w`, `\d` or `\s`, which RE2 matches only in ASCII, this module also rejects module
names that are not ASCII.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

_MOST_SECONDS = 5.0
"""Maximum processor time, in seconds, of all slow searches with one list of expressions together."""
_ORDINARY = 1e-5
"""Time per search, in seconds, that does not count towards `_MOST_SECONDS`; a search usually takes two microseconds."""
_MOST_BYTES = 1 << 24
"""Maximum memory, in bytes, of the automaton that RE2 compiles from a whole list of expressions."""
_MOST_EACH = 1 << 20
"""Maximum memory, in bytes, of the automaton that RE2 compiles from one expression."""
_DEEPEST = 100
_SHOWN = 80
"""Maximum number of characters of an expression that an error message shows."""

_TOKEN = re.compile(
    r"\\(?P<escaped>.?)|\(\?(?P<extension>[^:]|$)|[()]|\{,(?P<most>\d*)\}|\[\^?\]?(?:\\.|[^\]\\])*", re.DOTALL
)
_IN_SET = re.compile(r"\\(?P<escaped>.?)|(?<!^)\[", re.DOTALL)
_CLASSES, _CONTROLS = frozenset("wdsWDS"), frozenset("ntrfv")


class PatternError(ValueError):
    """Raised for a regular expression that is malformed, unsupported or too slow; the message states the reason."""


class Expressions:
    """A list of regular expressions, which must match the beginning of a name, but not necessarily the whole name.

    Args:
        texts: the regular expressions, in Python's syntax.

    Raises:
        PatternError: if an expression is malformed, or has a feature that RE2 lacks.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._seconds = 0.0
        self._is_ascii = False
        self._depth = 0
        self._patterns = [self._check(text) for text in texts]
        self._any = self._alternatives("")

    def match(self, name: str) -> bool:
        """Return whether any of the expressions matches the whole name or its beginning.

        Raises:
            PatternError: if the search takes too long, or the name has characters beyond ASCII (see the module's
                docstring).
        """
        return self._search(self._any.match, self._read(name)) is not None

    def ends_at(self, name: str, position: int) -> bool:
        """Return whether any of the expressions can match exactly the first `position` characters; raises the errors of
        `match`.
        """
        if position == len(name):
            return self._search(self._any_whole.match, self._read(name)) is not None
        # A zero byte marks where the match must end. The zero byte is part of the text, so `$` does not match before
        # it.
        return self._search(self._any_marked.match, self._read(name[:position]) + b"\0") is not None

    def find_matches(self, name: str) -> list[int]:
        """Return the list positions of all expressions that match the whole name or its beginning; raises the errors of
        `match`.
        """
        if not self.match(name):
            return []
        numbers: list[int] | None = self._search(self._each.Match, self._read(name))
        if numbers is None:  # RE2's automaton that finds which expressions match would be too large
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
            # no expressions: a character class without characters matches nothing
            return _compile(r"[^\x00-\x{10FFFF}]", _MOST_EACH)
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
        """Translate an expression to RE2's syntax; raise PatternError if that is impossible."""
        began = time.thread_time()
        try:
            self._depth = 0
            pattern = _TOKEN.sub(self._translate, text)
            # Each expression is compiled separately first: two malformed expressions, joined, could be well formed.
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
            raise PatternError(
                rf"`\w`, `\d` and `\s` match ASCII characters only, and the name {name!r} has other characters"
            )
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
