"""Dialects as they are written: a head, and statements that replace or add to what the dialect takes over.

dialect hf                                       # in a family that is like another: goes on with its dialect hf
dialect joined like hf                           # every line of hf, but for the tensors named here
dialect transformers like hf, backbone. = model. # and with another prefix
dialect stacked like hf, layers.{l}. = layers.   # an axis that the new prefix lacks is the first dim instead
  without q_norm                                 # takes over no line of this tensor
  place block = layers.{l}      when not enorm   # a beginning of names that depends on a condition
  place block = mtp.{l-L}       when enorm
  {block}.norm.weight = ln1[d]                   # two lines, one for each place
  (model|backbone).embed = embed[n d]            # reads both names, writes the first
  also transformer.wte = embed[n d]              # is read, and never written
  state {block}.wqkv = [[q:r | k:c] d]           # is read, and written for optimizer state alone
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import NamedTuple

from transaxle.axes.notation.family import age
from transaxle.axes.notation.statement import (
    ALSO,
    IGNORE,
    LINE,
    PLACE,
    STATE,
    WITHOUT,
    WORD,
    Statement,
    both,
    split_when,
    tensors_left_out,
)
from transaxle.errors import Refusal

_HEAD = re.compile(
    rf"dialect\s+({WORD})(?:\s+([0-9][\w.]*))?(?:\s+of\s+({WORD}))?(?:\s+like\s+({WORD}(?:@[\w.]+)?))?((?:\s*,[^,]*)*)"
)
_RENAME = re.compile(r"([^\s=]+)\s*=\s*([^\s=]*)")
_PLACE = re.compile(rf"place\s+({WORD})\s*=\s*((?:\{{[^{{}}]*\}}|[^\s\[])+)(?:\[\s*({WORD}(?:\s+{WORD})*)\s*\])?")
_HOLE = re.compile(rf"\{{({WORD})\}}")
_OPTION = r"(?:[^(){}|]|\{[^{}]*\})*"
_CHOICE = re.compile(rf"\(({_OPTION}(?:\|{_OPTION})+)\)")
_MOST_NAMES = 64
"""Cap on the lines that one line with places and alternatives stands for."""
FORM = "'dialect NAME [VERSION] [of FAMILY] [like DIALECT] [, PREFIX. = PREFIX.]'"

Renames = tuple[tuple[str, str], ...]
"""Beginning of names -> what replaces it."""


@dataclass(frozen=True)
class Section:
    """A dialect as written."""

    head: Statement
    """`dialect …`."""
    name: str
    """e.g. `hf`."""
    version: str | None
    """e.g. `0.2`."""
    owner: str | None
    """The family that `of` names."""
    like: str | None
    """The dialect that `like` names."""
    renames: tuple[Renames, ...]
    """New prefixes of what it takes over, one step after the other."""
    statements: tuple[Statement, ...] = ()
    """What stands below the head."""
    used: frozenset[str] = frozenset()
    """Old prefixes that names of the family taken over begin with."""

    @property
    def label(self) -> str:
        """Name, with the version where there is one."""
        return self.name if self.version is None else f"{self.name}@{self.version}"


def opened(head: Statement) -> Section:
    """Read the head of a dialect.

    Raises:
        Refused: CORRUPT where it is none.
    """
    match = _HEAD.fullmatch(head.text)
    if match is None:
        raise head.expected(FORM)
    name, version, owner, like, tail = match.groups()
    renames = []
    for item in tail.split(",")[1:]:
        rename = _RENAME.fullmatch(item.strip())
        if rename is None or not _is_prefix_pair(rename[1], rename[2]):
            raise head.expected("prefixes as 'OLD. = NEW.', or whole names, after the comma", item.strip())
        renames.append((rename[1], rename[2]))
    return Section(head, name, version, owner, like, (tuple(renames),) if renames else ())


def _is_prefix_pair(old: str, new: str) -> bool:
    """Tell whether one beginning can replace the other: both end at a dot, or both are whole names."""
    return (new == "" or new.endswith(".")) if old.endswith(".") else bool(new) and not new.endswith(".")


def find(sections: Mapping[str, Section], label: str) -> Section | None:
    """Return a dialect by its name (the newest version of it) or `name@version`."""
    named = [section for section in sections.values() if section.name == label]
    return max(named, key=lambda section: age(section.version), default=None) or sections.get(label)


class _Place(NamedTuple):
    """A beginning of names that a `place` statement gives."""

    beginning: str
    """e.g. `layers.{l}`."""
    axes: Sequence[str]
    """Axes that are the first dims of its tensors, e.g. `l` in `place block = layers[l]`."""
    when: str | None
    """Its condition."""


class Sections:
    """The dialects of one family, each with all that it takes over.

    Args:
        sections: label -> dialect.
        problems: filled with what is wrong.
    """

    def __init__(self, sections: Mapping[str, Section], problems: list[Refusal]) -> None:
        self.sections = sections
        self.problems = problems
        self._gathered: dict[str, tuple[Statement, ...]] = {}

    def gathered(self, label: str) -> tuple[Statement, ...]:
        """Return the statements of a dialect, those that it takes over by `like` included."""
        if label not in self._gathered:
            section = self.sections[label]
            base = None if section.like is None else find(self._above(label), section.like)
            taken = () if base is None else self.gathered(base.label)
            used = set(section.used)
            for renames in section.renames:
                taken = tuple(each for statement in taken for each in renamed(statement, renames, used))
            for old in [old for renames in section.renames for old, _ in renames if old not in used]:
                wanted = f"a prefix or a name of what this dialect takes over; no name there begins with {old!r}"
                self.problems.append(section.head.problem(wanted))
            self._gathered[label] = merged(taken, section.statements, section.head, (), self.problems)
        return self._gathered[label]

    def _above(self, label: str) -> dict[str, Section]:
        """Return the dialects that stand above one; only these can be taken over, so that there is no circle."""
        labels = list(self.sections)
        return {above: self.sections[above] for above in labels[: labels.index(label)]}

    def tensors(self, label: str) -> frozenset[str]:
        """Return the tensors that a dialect has a line for."""
        return frozenset(name for statement in self.gathered(label) for name in statement.held)

    def flat(self, label: str) -> tuple[Statement, ...]:
        """Return the lines of a dialect spelled out: one stored name each, and names that are ignored."""
        statements = self.gathered(label)
        places: dict[str, list[_Place]] = {}
        for statement in statements:
            if statement.kind == PLACE:
                self._keep_place(statement, places)
        spelled: list[Statement] = []
        for statement in statements:
            if statement.kind in (LINE, ALSO, STATE, IGNORE):
                spelled.extend(self._spelled(statement, places))
        return tuple(spelled)

    def _keep_place(self, statement: Statement, places: dict[str, list[_Place]]) -> None:
        text, when = split_when(statement.text)
        match = _PLACE.fullmatch(text)
        if match is None:
            self.problems.append(statement.problem("'place NAME = BEGINNING when CONDITION'"))
        else:
            places.setdefault(match[1], []).append(_Place(match[2], (match[3] or "").split(), when))

    def _spelled(self, statement: Statement, places: Mapping[str, Sequence[_Place]]) -> Iterator[Statement]:
        """Yield the lines that one with places and alternatives stands for: the first alternative is written, the
        others are read only.
        """
        if "{" not in statement.text and "(" not in statement.text.partition("=")[0]:
            yield statement
            return
        word, name, rest = _parts(statement)
        bare, when = split_when(rest)
        spelled: list[tuple[bool, str, str, str | None]] = []
        for number, alternative in enumerate(islice(_alternatives(name), _MOST_NAMES + 1)):
            used = list(dict.fromkeys(hole for hole in _HOLE.findall(alternative) if hole in places))
            for at in product(*(places[hole] for hole in used)):
                placed, conditions = alternative, [*(place.when for place in at), when]
                for hole, place in zip(used, at, strict=True):
                    placed = placed.replace(f"{{{hole}}}", place.beginning)
                text = stacked(bare, [axis for place in at for axis in place.axes])
                for second, spelling in enumerate(islice(_alternatives(placed), _MOST_NAMES + 1)):
                    spelled.append((not number and not second, spelling, text, both(conditions)))
                if len(spelled) > _MOST_NAMES:
                    self.problems.append(statement.problem(f"at most {_MOST_NAMES} names for one line; these are more"))
                    return
        if [spelling for _, spelling, _, _ in spelled] == [name]:
            yield statement
            return
        for first, spelling, text, condition in spelled:
            kind = word if first or word == IGNORE else ALSO
            tail = text if condition is None or word == IGNORE else f"{text} when {condition}"
            yield statement.named(" ".join(part for part in (kind, spelling, tail) if part))


def _alternatives(name: str) -> Iterator[str]:
    """Yield the names that one with alternatives stands for, which may be inside each other."""
    choice = _CHOICE.search(name)
    if choice is None:
        yield name
        return
    names = (name[: choice.start()] + option + name[choice.end() :] for option in choice[1].split("|"))
    yield from dict.fromkeys(spelling for each in names for spelling in _alternatives(each))


def _parts(statement: Statement) -> tuple[str, str, str]:
    """Split a statement into the word it begins with ('' for a line), its name, and the rest."""
    kind = statement.kind
    text = statement.text if kind == LINE else statement.text[len(kind) :].strip()
    if kind == IGNORE:
        return kind, text, ""
    name, _, rest = text.partition("=")
    return "" if kind == LINE else kind, name.strip(), f"= {rest.strip()}"


def stacked(text: str, axes: Sequence[str]) -> str:
    """Return the expression of a line with further axes as its first dims."""
    return text.replace("[", f"[{' '.join(axes)} ", 1) if axes else text


def renamed(statement: Statement, renames: Renames, used: set[str]) -> Iterator[Statement]:
    """Yield a statement with the longest prefix that its name has replaced; add the old one to `used`.

    A name that begins with alternatives is taken apart where one of them is concerned: the first is written. Axes that
    the old prefix numbers and the new one does not become the first dims.
    """
    if statement.kind == WITHOUT:
        yield statement
        return
    word, name, rest = _parts(statement)
    place = statement.kind == PLACE
    if place:
        beginning, condition = split_when(rest[1:])
        word, name, rest = f"{word} {name} =", f"{beginning}.", f"when {condition}" if condition else ""
    names = list(islice(_alternatives(name), _MOST_NAMES)) if name.startswith("(") and not place else [name]
    changed = [_with_prefix(each, renames, used) for each in names]
    if [each for each, _ in changed] == names:
        yield statement
        return
    for number, (each, moved) in enumerate(changed):
        first = word if not number or word == IGNORE else ALSO
        if place:
            parts = (first, each.removesuffix(".") + (f"[{' '.join(moved)}]" if moved else ""), rest)
        else:
            parts = (first, each, rest if word == IGNORE else stacked(rest, moved))
        yield statement.named(" ".join(part for part in parts if part))


def _with_prefix(name: str, renames: Renames, used: set[str]) -> tuple[str, list[str]]:
    """Return a name with its new prefix, and the axes that this prefix lacks."""
    fitting = [(old, new) for old, new in renames if name == old or (old.endswith(".") and name.startswith(old))]
    if not fitting:
        return name, []
    old, new = max(fitting, key=lambda pair: len(pair[0]))
    used.add(old)
    return new + name[len(old) :], [axis for axis in _HOLE.findall(old) if f"{{{axis}}}" not in new]


def merged(
    below: Sequence[Statement],
    own: Sequence[Statement],
    head: Statement,
    gone: Iterable[str],
    problems: list[Refusal],
) -> tuple[Statement, ...]:
    """Lay a dialect's own statements over those that it takes over.

    A line replaces the lines of its tensors. It stands where the first of these stood; a new one, beside its like.

    Args:
        below: what is taken over.
        own: what the dialect says itself.
        head: where problems are shown that no statement of `own` causes.
        gone: tensors that the family no longer has.
        problems: filled with the lines that would lose a tensor silently.
    """
    by_tensor: dict[str, list[int]] = {}
    for number, statement in enumerate(own):
        if statement.kind == LINE:
            for name in statement.held:
                by_tensor.setdefault(name, []).append(number)
    left_out = tensors_left_out(own).union(gone)
    concerned = left_out.union(by_tensor)
    placed = {_parts(statement)[1] for statement in own if statement.kind == PLACE}
    result: list[Statement] = []
    done: set[int] = set()
    for statement in below:
        tensors = statement.held
        if statement.kind == PLACE and _parts(statement)[1] in placed:
            continue
        if statement.kind == WITHOUT or concerned.isdisjoint(tensors):
            result.append(statement)
            continue
        numbers = sorted({number for name in tensors for number in by_tensor.get(name, ())})
        lost = [name for name in tensors if name not in by_tensor and name not in left_out]
        if lost and statement.kind == LINE:
            cause = own[numbers[0]] if numbers else head
            names = ", ".join(lost)
            wanted = f"a line for {names} too: without one, {names} would go with the line taken over: {statement.text}"
            problems.append(cause.problem(wanted))
        result.extend(own[number] for number in numbers if number not in done)
        done.update(numbers)
    known = {statement.text for statement in result if statement.kind == IGNORE}
    left = [statement for number, statement in enumerate(own) if number not in done]
    return _beside(result, [each for each in left if each.kind != IGNORE or each.text not in known])


def _beside(statements: Sequence[Statement], new: Sequence[Statement]) -> tuple[Statement, ...]:
    """Add new lines, each below those whose names have most in common with its own: tables are read by people."""
    if not statements or not new:
        return (*statements, *new)
    last: dict[str, int] = {}
    for number, statement in enumerate(statements):
        if statement.kind == LINE:
            last.update(dict.fromkeys(_beginnings(statement), number))
    below: dict[int, list[Statement]] = {}
    for statement in new:
        beginnings = _beginnings(statement) if statement.kind == LINE else ()
        place = next((last[beginning] for beginning in beginnings if beginning in last), len(statements) - 1)
        below.setdefault(place, []).append(statement)
    result: list[Statement] = []
    for number, statement in enumerate(statements):
        result.append(statement)
        result.extend(below.get(number, ()))
    return tuple(result)


def _beginnings(statement: Statement) -> list[str]:
    """Return the modules that a name is in, the innermost first."""
    segments = statement.text.partition("=")[0].strip().split(".")
    return [".".join(segments[:count]) for count in range(len(segments) - 1, 0, -1)]


def laid_over(below: Section, own: Section, gone: Iterable[str], problems: list[Refusal]) -> Section:
    """Return a dialect that goes on with the one of the same label of the family that is taken over."""
    if own.like is not None:
        return own
    used: set[str] = set(below.used)
    statements = below.statements
    for renames in own.renames:
        statements = tuple(each for statement in statements for each in renamed(statement, renames, used))
    return replace(
        below,
        head=own.head,
        renames=below.renames + own.renames,
        statements=merged(statements, own.statements, own.head, gone, problems),
        used=frozenset(used),
    )
