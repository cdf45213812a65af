"""Patterns by which config files list modules, matched in time that is linear in the name.

A config file comes from a stranger, and lists modules as regular expressions. Python's `re` backtracks: an expression
of twenty characters can keep it busy for years. These are run as automata, whose states are made when a name first
needs them. What has no automaton (references back, assertions inside) is refused by name.

Three dialects are known: that of transformers (an expression that ends at a module's boundary, or any suffix), that of
compressed-tensors (`re:` and an expression, or a whole name), and ModelOpt's wildcards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

Test = Callable[[str], bool]
"""Tells whether a character is taken."""

EXPRESSION = "re:"
"""What a regular expression starts with where compressed-tensors lists modules."""

_END = ""
"""The input after the last character, for `$`."""
_MAX_STATES = 20_000
"""States of one list of expressions; more come from nested counts, not from names of modules."""
_MAX_KEPT = 1_000_000
"""States in the sets that are kept; beyond, they are made again, so that memory stays bounded."""
_MAX_WORK = 10_000_000
"""States looked at in making sets: seconds. Lists of modules need a hundredth of it."""
_MAX_COUNT = 1000


class PatternError(ValueError):
    """The text is not an expression that can be run; the message says why."""


@dataclass(slots=True)
class _Graph:
    """States of an automaton: where each leads without input, and on which character."""

    free: list[list[int]] = field(default_factory=list)
    taken: list[tuple[Test, int] | None] = field(default_factory=list)

    def state(self) -> int:
        if len(self.free) >= _MAX_STATES:
            raise PatternError("it counts too far")
        self.free.append([])
        self.taken.append(None)
        return len(self.free) - 1

    def take(self, test: Test) -> tuple[int, int]:
        start, end = self.state(), self.state()
        self.taken[start] = (test, end)
        return start, end


def _any(character: str) -> bool:
    return character not in (_END, "\n")


def _at_end(character: str) -> bool:
    return character == _END


def _literal(wanted: str) -> Test:
    return lambda character: character == wanted


def _word(character: str) -> bool:
    return character.isalnum() or character == "_"


def _digit(character: str) -> bool:
    return character.isdecimal()


def _space(character: str) -> bool:
    return character.isspace()


def _not(test: Test) -> Test:
    return lambda character: character != _END and not test(character)


_CLASSES: dict[str, Test] = {"w": _word, "d": _digit, "s": _space}
_CLASSES |= {name.upper(): _not(test) for name, test in _CLASSES.items()}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}


class _Parser:
    """Reads one expression into a graph, from left to right."""

    def __init__(self, text: str, graph: _Graph) -> None:
        self.text = text
        self.at = 0
        self.graph = graph
        self.depth = 0

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def follows(self, word: str) -> bool:
        if self.text.startswith(word, self.at):
            self.at += len(word)
            return True
        return False

    def alternatives(self) -> tuple[int, int]:
        self.depth += 1
        if self.depth > 100:
            raise PatternError("it is nested too deeply")
        start, end = self.graph.state(), self.graph.state()
        while True:
            first, last = self.sequence()
            self.graph.free[start].append(first)
            self.graph.free[last].append(end)
            if not self.follows("|"):
                self.depth -= 1
                return start, end

    def sequence(self) -> tuple[int, int]:
        start = end = self.graph.state()
        while self.peek() not in ("", "|", ")"):
            first, last = self.repeated()
            self.graph.free[end].append(first)
            end = last
        return start, end

    def repeated(self) -> tuple[int, int]:
        began = self.at
        piece = self.piece()
        text = (began, self.at)
        low, high = self.count()
        if (low, high) == (1, 1):
            return piece
        start = end = self.graph.state()
        for number in range(low if high is None else high):
            first, last = piece if number == 0 else self.again(text)
            if number >= low:
                self.graph.free[end].append(skip := self.graph.state())
                self.graph.free[last].append(skip)
                self.graph.free[end].append(first)
                end = skip
            else:
                self.graph.free[end].append(first)
                end = last
        if high is None:
            first, last = piece if low == 0 else self.again(text)
            hub = self.graph.state()
            self.graph.free[end].append(hub)
            self.graph.free[hub].append(first)
            self.graph.free[last].append(hub)
            end = hub
        return start, end

    def again(self, text: tuple[int, int]) -> tuple[int, int]:
        """Read a piece once more, into states of its own."""
        rest, self.at = self.at, text[0]
        piece = self.piece()
        self.at = rest
        return piece

    def count(self) -> tuple[int, int | None]:
        """Read what follows a piece: how often it may come."""
        bounds: tuple[int, int | None] = (1, 1)
        if self.follows("*"):
            bounds = (0, None)
        elif self.follows("+"):
            bounds = (1, None)
        elif self.follows("?"):
            bounds = (0, 1)
        elif self.peek() == "{":
            inside, close, _ = self.text[self.at + 1 :].partition("}")
            low, comma, high = inside.partition(",")
            if close and (low + high).isdecimal():
                self.at += len(inside) + 2
                least = int(low or 0)
                bounds = (least, (int(high) if high else None) if comma else least)
            if max(value or 0 for value in bounds) > _MAX_COUNT or (bounds[1] is not None and bounds[1] < bounds[0]):
                raise PatternError(f"the count {{{inside}}} is out of range")
        if bounds != (1, 1):
            self.follows("?")  # least or most: the same names match
        if bounds != (1, 1) and self.peek() in ("*", "+", "?"):
            raise PatternError("a count follows a count")
        return bounds

    def piece(self) -> tuple[int, int]:
        if self.follows("("):
            if self.follows("?") and not self.follows(":"):
                raise PatternError(f"`(?{self.peek()}` has no automaton here")
            inner = self.alternatives()
            if not self.follows(")"):
                raise PatternError("a bracket `(` is not closed")
            return inner
        return self.graph.take(self.character())

    def character(self) -> Test:
        letter = self.peek()
        self.at += 1
        if letter == "\\":
            return self.escaped()
        if letter == "[":
            return self.members()
        if letter == ".":
            return _any
        if letter == "$":
            return _at_end
        if letter in ("^", "*", "+", "?"):
            raise PatternError(f"`{letter}` stands where it has no meaning")
        return _literal(letter)

    def escaped(self) -> Test:
        letter = self.peek()
        self.at += 1
        if letter in _CLASSES:
            return _CLASSES[letter]
        if letter in _CONTROLS:
            return _literal(_CONTROLS[letter])
        if letter == "Z":
            return _at_end
        if not letter or letter.isalnum():
            raise PatternError(f"`\\{letter}` has no automaton here")
        return _literal(letter)

    def members(self) -> Test:
        """Read what is between square brackets."""
        inverse = self.follows("^")
        tests: list[Test] = []
        first = True
        while first or self.peek() != "]":
            first = False
            if not self.peek():
                raise PatternError("a bracket `[` is not closed")
            tests.append(self.member())
        self.at += 1

        def one_of(character: str) -> bool:
            return character != _END and any(test(character) for test in tests)

        return _not(one_of) if inverse else one_of

    def member(self) -> Test:
        letter = self.peek()
        self.at += 1
        if letter == "\\":
            return self.escaped()
        if self.peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("", "]"):
            last = self.text[self.at + 1]
            self.at += 2
            if last < letter or last == "\\":
                raise PatternError(f"the range `{letter}-{last}` is empty")
            return lambda character: letter <= character <= last
        return _literal(letter)


class Expression:
    """Regular expressions, any of which may match; they are anchored at the start of the name."""

    def __init__(self, texts: Iterable[str]) -> None:
        """Read the expressions.

        Raises:
            PatternError: for one that is malformed, or has no automaton.
        """
        self._graph = _Graph()
        self._start: list[int] = []
        self._accept: set[int] = set()
        for text in texts:
            parser = _Parser(text, self._graph)
            parser.follows("^")
            start, end = parser.alternatives()
            if parser.at < len(text):
                raise PatternError("a bracket `)` was never opened")
            self._start.append(start)
            self._accept.add(end)
        self._known: dict[tuple[frozenset[int], str], frozenset[int]] = {}
        self._kept = self._work = 0
        self._first = self._closure(self._start)

    def _closure(self, states: Iterable[int]) -> frozenset[int]:
        seen: set[int] = set()
        waiting = list(states)
        while waiting:
            state = waiting.pop()
            if state not in seen:
                seen.add(state)
                waiting.extend(self._graph.free[state])
        return frozenset(s for s in seen if self._graph.taken[s] is not None or s in self._accept)

    def _after(self, states: frozenset[int], character: str) -> frozenset[int]:
        found = self._known.get((states, character))
        if found is None:
            steps = (self._graph.taken[state] for state in states)
            found = self._closure([step[1] for step in steps if step is not None and step[0](character)])
            self._work += len(states) + len(found)
            if self._work > _MAX_WORK:
                raise PatternError("it takes too long")
            self._kept += len(states) + len(found)
            if self._kept > _MAX_KEPT:
                self._known.clear()
                self._kept = 0
            self._known[states, character] = found
        return found

    def ends(self, name: str) -> Iterator[int]:
        """Yield every position of the name at which a match that started at its first character may end."""
        states = self._first
        for position, character in enumerate(name):
            if states & self._accept:
                yield position
            states = self._after(states, character)
            if not states:
                return
        if self._accepts_at_end(states):
            yield len(name)

    def _accepts_at_end(self, states: frozenset[int]) -> bool:
        while not states & self._accept:
            further = self._after(states, _END)
            if further <= states:
                return False
            states |= further
        return True


@dataclass(frozen=True)
class Modules:
    """A list of modules as a config file gives it, to be asked as the config's own reader would."""

    names: frozenset[str] = frozenset()
    """Modules named whole."""
    inside: bool = False
    """Whether a name also stands for what is inside that module, and for every name that ends with it."""
    expression: Expression | None = None
    """What matches others."""
    until: Literal["anywhere", "segment", "end"] = "anywhere"
    """Where a match of the expression must end."""

    def __contains__(self, module: str) -> bool:
        """Tell whether the list holds a module.

        Raises:
            PatternError: for an expression that takes too long.
        """
        if self.names and (module in self.names or (self.inside and self._inside(module))):
            return True
        return self.expression is not None and any(self._ends_well(module, at) for at in self.expression.ends(module))

    @cached_property
    def _lengths(self) -> tuple[int, ...]:
        return tuple(sorted({len(name) for name in self.names}))

    def _inside(self, module: str) -> bool:
        dots = (at for at, letter in enumerate(module) if letter == ".")
        starts = (module[:end] for at in dots for end in (at, at + 1))
        return any(start in self.names for start in starts) or any(module[-n:] in self.names for n in self._lengths)

    def _ends_well(self, module: str, at: int) -> bool:
        if self.until == "anywhere" or at == len(module):
            return True
        return self.until == "segment" and (module[at] == "." or module[at - 1 : at] == ".")


def transformers_modules(texts: Iterable[str]) -> Modules:
    """Return the modules of a list such as `modules_to_not_convert` (`should_convert_module` of transformers 5.23).

    An entry is the name of a module, with all inside it, or the end of one; or else an expression. A dot in a name
    is taken for a dot, where transformers takes it for any character.

    Raises:
        PatternError: for an entry that is malformed.
    """
    listed = frozenset(text for text in texts if text)
    expressions = sorted(text for text in listed if set(text) & _SPECIAL)
    return Modules(listed, inside=True, expression=Expression(expressions) if expressions else None, until="segment")


def compressed_modules(texts: Iterable[str]) -> Modules:
    """Return the modules of a list of compressed-tensors: whole names, and expressions after `re:`.

    Raises:
        PatternError: for an entry that is malformed.
    """
    listed = frozenset(texts)
    expressions = sorted(text.removeprefix(EXPRESSION) for text in listed if text.startswith(EXPRESSION))
    return Modules(listed, expression=Expression(expressions) if expressions else None)


def wildcard_modules(texts: Iterable[str]) -> Modules:
    """Return the modules of a list of ModelOpt's, in which `*` stands for any characters and `?` for one."""
    listed = frozenset(texts)
    wild = sorted(text for text in listed if set(text) & _WILD.keys())
    expressions = ["".join(_WILD.get(letter) or _escaped(letter) for letter in text) for text in wild]
    return Modules(listed, expression=Expression(expressions) if expressions else None, until="end")


_SPECIAL = frozenset("\\^$*+?{}[]()|")
_WILD = {"*": ".*", "?": "."}


def _escaped(letter: str) -> str:
    return letter if letter.isalnum() else "\\" + letter
