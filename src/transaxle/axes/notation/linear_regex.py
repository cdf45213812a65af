"""Regular expressions of a stranger's file, matched in time that is linear in the text.

Config files list modules, and checkpoints list parameters, as regular expressions. Python's `re` backtracks: an
expression of twenty characters can keep it busy for years. Here expressions run as automata, whose states are made when
a name first needs them. What has no automaton (references back, assertions inside) is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

Test = Callable[[str], bool]
"""Tells whether a character is taken."""

_END = ""
"""The input after the last character, for `$`."""
_MAX_STATES = 200_000
"""States of one list of expressions, a hundred for a name of fifty characters; more come from nested counts."""
_MAX_KEPT = 1_000_000
"""States in the sets that are kept; beyond, they are made again, so that memory stays bounded."""
_MAX_WORK = 10_000_000
"""States looked at in making sets: seconds. Lists of modules need a hundredth of it."""
_MAX_COUNT = 1000
_SHOWN = 80
"""Characters of an expression that an error shows."""


class PatternError(ValueError):
    """The text is not an expression that can be run; the message says why."""


class _Graph(msgspec.Struct):
    """States of an automaton: where each leads without input, and on which character."""

    free: list[list[int]] = msgspec.field(default_factory=list)
    taken: list[tuple[Test, int] | None] = msgspec.field(default_factory=list)

    def state(self) -> int:
        if len(self.free) >= _MAX_STATES:
            raise PatternError("there are too many expressions, or they count too far")
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
                raise PatternError(f"`(?{self.peek()}` is not supported")
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
            raise PatternError(f"`\\{letter}` is not supported")
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


class Expressions:
    """Regular expressions, each of which is anchored at the start of the name and may end anywhere in it.

    Args:
        texts: the expressions.

    Raises:
        PatternError: for one that is malformed, or has no automaton.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._graph = _Graph()
        self._number_of: dict[int, int] = {}
        """Accepting state -> number of its expression."""
        starts = []
        for number, text in enumerate(texts):
            try:
                start, end = _parsed(text, self._graph)
            except PatternError as error:
                shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
                raise PatternError(f"{shown!r} cannot be matched: {error}") from None
            starts.append(start)
            self._number_of[end] = number
        self._accept = frozenset(self._number_of)
        self._known: dict[tuple[frozenset[int], str], frozenset[int]] = {}
        self._kept = self._work = 0
        self._first = self._closure(starts)

    def ends(self, name: str) -> Iterator[int]:
        """Yield every position of the name at which a match of any expression may end.

        Raises:
            PatternError: it takes too long.
        """
        return (position for position, _ in self._matches(name))

    def matching(self, name: str) -> list[int]:
        """Return the numbers of the expressions that match the name or the beginning of it.

        Raises:
            PatternError: it takes too long.
        """
        return sorted({self._number_of[state] for _, accepted in self._matches(name) for state in accepted})

    def _matches(self, name: str) -> Iterator[tuple[int, frozenset[int]]]:
        """Yield the positions at which expressions end, and the accepting states of those."""
        states = self._first
        for position, character in enumerate(name):
            if accepted := states & self._accept:
                yield position, accepted
            states = self._after(states, character)
            if not states:
                return
        while not (further := self._after(states, _END)) <= states:  # through `$`, which may stand there repeatedly
            states |= further
        if accepted := states & self._accept:
            yield len(name), accepted

    def _closure(self, states: Iterable[int]) -> frozenset[int]:
        """Return the states that are reached without input, as far as they take a character or accept."""
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
                raise PatternError("matching takes too long")
            self._kept += len(states) + len(found)
            if self._kept > _MAX_KEPT:
                self._known.clear()
                self._kept = 0
            self._known[states, character] = found
        return found


def _parsed(text: str, graph: _Graph) -> tuple[int, int]:
    """Read an expression into a graph; return its first and its accepting state."""
    parser = _Parser(text, graph)
    parser.follows("^")
    start, end = parser.alternatives()
    if parser.at < len(text):
        raise PatternError("a bracket `)` was never opened")
    return start, end
