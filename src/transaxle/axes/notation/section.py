"""Dialects as text. A dialect has a head line, followed by statements that replace or extend inherited statements.

dialect hf                                       # in a family that inherits: extends the inherited dialect hf
dialect joined like hf                           # has every mapping rule of hf, except for tensors named below
dialect transformers like hf, backbone. = model. # like hf, with a different prefix of names
dialect stacked like hf, layers.{l}. = layers.   # an axis that the new prefix lacks becomes the first dim
without q_norm                                 # excludes the inherited mapping rules of this tensor
place block = layers.{l}      when not enorm   # a prefix that depends on a condition
place block = mtp.{l-L}       when enorm
{block}.norm.weight = ln1[d]                   # two mapping rules, one for each place
(model|backbone).embed = embed[n d]            # both names are read, the first name is written
also transformer.wte = embed[n d]              # this name is read, and never written
state {block}.wqkv = [[q:r | k:c] d]           # this name is read, and written only for optimizer states
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
    join_conditions,
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
"""Maximum number of mapping rules that one line of text with places and alternatives `(a|b)` may expand to."""
FORM = "'dialect NAME [VERSION] [of FAMILY] [like DIALECT] [, PREFIX. = PREFIX.]'"

Renames = tuple[tuple[str, str], ...]
"""Pairs of name prefixes: `(old prefix, new prefix)`."""


@dataclass(frozen=True)
class Section:
    """The text of one dialect: its head line (`dialect …`) and its statements."""

    head: Statement
    """First line of the dialect's text: `dialect …`."""
    name: str
    """Name of the dialect, such as `hf`."""
    version: str | None
    """Version of the framework, such as `0.2`; None if the head line has no version."""
    owner: str | None
    """Name of the family that follows `of` in the head line; None if the line has no `of`."""
    like: str | None
    """Name of the dialect that follows `like` in the head line, whose mapping rules this dialect inherits."""
    renames: tuple[Renames, ...]
    """Replacements of prefixes in the inherited names, in groups that are applied one after the other."""
    statements: tuple[Statement, ...] = ()
    """Statements below the head line."""
    used: frozenset[str] = frozenset()
    """The old prefixes (of `renames`) with which some name in the inherited family begins."""

    @property
    def label(self) -> str:
        """Name of the dialect, followed by `@` and the version if it has one."""
        return self.name if self.version is None else f"{self.name}@{self.version}"


def parse_head(head: Statement) -> Section:
    """Parse the head line of a dialect.

    Raises:
        Refused: with the code CORRUPT if the statement is not a valid head line of a dialect.
    """
    match = _HEAD.fullmatch(head.text)
    if match is None:
        raise head.fail(FORM)
    name, version, owner, like, tail = match.groups()
    renames = []
    for item in tail.split(",")[1:]:
        rename = _RENAME.fullmatch(item.strip())
        if rename is None or not _is_prefix_pair(rename[1], rename[2]):
            raise head.fail("prefixes as 'OLD. = NEW.', or whole names, after the comma", item.strip())
        renames.append((rename[1], rename[2]))
    return Section(head, name, version, owner, like, (tuple(renames),) if renames else ())


def _is_prefix_pair(old: str, new: str) -> bool:
    """Return whether the new prefix may replace the old one: both must end with a dot, or both must be whole names."""
    return (new == "" or new.endswith(".")) if old.endswith(".") else bool(new) and not new.endswith(".")


def find(sections: Mapping[str, Section], label: str) -> Section | None:
    """Return the dialect with the label `name@version`, or the newest version if the label is only a name."""
    versions = [section for section in sections.values() if section.name == label]
    return max(versions, key=lambda section: age(section.version), default=None) or sections.get(label)


class _Place(NamedTuple):
    """A prefix of stored names that a `place` statement declares, such as `layers.{l}`."""

    beginning: str
    """Prefix of the names at this place, such as `layers.{l}`."""
    axes: Sequence[str]
    """Axes that become the first dims of the tensors with this prefix, such as `l` in `place block = layers[l]`."""
    when: str | None
    """Text of the condition under which the prefix is used; None if it is always used."""


class Sections:
    """The dialects of one family, which this class combines with the statements that they inherit.

    Args:
        sections: label of a dialect (name, or name and version) -> text of the dialect.
        problems: list to which syntax errors are appended.
    """

    def __init__(self, sections: Mapping[str, Section], problems: list[Refusal]) -> None:
        self.sections = sections
        self.problems = problems
        self._cache: dict[str, tuple[Statement, ...]] = {}

    def gather(self, label: str) -> tuple[Statement, ...]:
        """Return the statements of a dialect, including the statements that the dialect inherits by `like`."""
        if label not in self._cache:
            section = self.sections[label]
            base = None if section.like is None else find(self._above(label), section.like)
            inherited = () if base is None else self.gather(base.label)
            used = set(section.used)
            for renames in section.renames:
                inherited = tuple(each for statement in inherited for each in rename(statement, renames, used))
            for old in [old for renames in section.renames for old, _ in renames if old not in used]:
                expected = f"a prefix or a name of what this dialect takes over; no name there begins with {old!r}"
                self.problems.append(section.head.problem(expected))
            self._cache[label] = overlay_statements(inherited, section.statements, section.head, (), self.problems)
        return self._cache[label]

    def _above(self, label: str) -> dict[str, Section]:
        """Return the dialects that precede a dialect in the file; it can inherit only from these, so cycles are
        impossible.
        """
        labels = list(self.sections)
        return {above: self.sections[above] for above in labels[: labels.index(label)]}

    def tensors(self, label: str) -> frozenset[str]:
        """Return the logical tensors for which a dialect has a mapping rule."""
        return frozenset(name for statement in self.gather(label) for name in statement.tensors)

    def flat(self, label: str) -> tuple[Statement, ...]:
        """Return the fully expanded mapping rules of a dialect, each with a single stored name, and the patterns of
        ignored names.
        """
        statements = self.gather(label)
        places: dict[str, list[_Place]] = {}
        for statement in statements:
            if statement.kind == PLACE:
                self._keep_place(statement, places)
        spelled: list[Statement] = []
        for statement in statements:
            if statement.kind in (LINE, ALSO, STATE, IGNORE):
                spelled.extend(self._spell_out(statement, places))
        return tuple(spelled)

    def _keep_place(self, statement: Statement, places: dict[str, list[_Place]]) -> None:
        text, when = split_when(statement.text)
        match = _PLACE.fullmatch(text)
        if match is None:
            self.problems.append(statement.problem("'place NAME = BEGINNING when CONDITION'"))
        else:
            places.setdefault(match[1], []).append(_Place(match[2], (match[3] or "").split(), when))

    def _spell_out(self, statement: Statement, places: Mapping[str, Sequence[_Place]]) -> Iterator[Statement]:
        """Yield the mapping rules that a line with places and alternatives expands to; only the first alternative is
        written.
        """
        if "{" not in statement.text and "(" not in statement.text.partition("=")[0]:
            yield statement
            return
        word, name, tail_text = _parts(statement)
        bare, when = split_when(tail_text)
        spelled: list[tuple[bool, str, str, str | None]] = []
        for number, alternative in enumerate(islice(_alternatives(name), _MOST_NAMES + 1)):
            used = list(dict.fromkeys(hole for hole in _HOLE.findall(alternative) if hole in places))
            for at in product(*(places[hole] for hole in used)):
                placed, conditions = alternative, [*(place.when for place in at), when]
                for hole, place in zip(used, at, strict=True):
                    placed = placed.replace(f"{{{hole}}}", place.beginning)
                text = prepend_axes(bare, [axis for place in at for axis in place.axes])
                for second, spelling in enumerate(islice(_alternatives(placed), _MOST_NAMES + 1)):
                    spelled.append((not number and not second, spelling, text, join_conditions(conditions)))
                if len(spelled) > _MOST_NAMES:
                    self.problems.append(statement.problem(f"at most {_MOST_NAMES} names for one line; these are more"))
                    return
        if [spelling for _, spelling, _, _ in spelled] == [name]:
            yield statement
            return
        for first, spelling, text, condition in spelled:
            kind = word if first or word == IGNORE else ALSO
            tail = text if condition is None or word == IGNORE else f"{text} when {condition}"
            yield statement.with_name(" ".join(part for part in (kind, spelling, tail) if part))


def _alternatives(name: str) -> Iterator[str]:
    """Yield all names that a name with alternatives `(a|b)` expands to; alternatives may be nested."""
    choice = _CHOICE.search(name)
    if choice is None:
        yield name
        return
    names = (name[: choice.start()] + option + name[choice.end() :] for option in choice[1].split("|"))
    yield from dict.fromkeys(spelling for each in names for spelling in _alternatives(each))


def _parts(statement: Statement) -> tuple[str, str, str]:
    """Split a statement into its keyword (empty for a mapping rule), the stored name, and the text after the name."""
    kind = statement.kind
    text = statement.text if kind == LINE else statement.text[len(kind) :].strip()
    if kind == IGNORE:
        return kind, text, ""
    name, _, tail = text.partition("=")
    return "" if kind == LINE else kind, name.strip(), f"= {tail.strip()}"


def prepend_axes(text: str, axes: Sequence[str]) -> str:
    """Return the text of an expression with additional axes as the first dims."""
    return text.replace("[", f"[{' '.join(axes)} ", 1) if axes else text


def rename(statement: Statement, renames: Renames, used: set[str]) -> Iterator[Statement]:
    """Replace the longest matching old prefix of a statement's name; add that old prefix to `used`.

    A name that begins with alternatives is split into one statement per alternative if an alternative has an old
    prefix. The first of these names is written, the others are only read. Axes that are numbered in the old prefix but
    not in the new prefix become the first dims.
    """
    if statement.kind == WITHOUT:
        yield statement
        return
    word, name, tail = _parts(statement)
    place = statement.kind == PLACE
    if place:
        beginning, condition = split_when(tail[1:])
        word, name, tail = f"{word} {name} =", f"{beginning}.", f"when {condition}" if condition else ""
    names = list(islice(_alternatives(name), _MOST_NAMES)) if name.startswith("(") and not place else [name]
    changed = [_with_prefix(new_name, renames, used) for new_name in names]
    if [new_name for new_name, _ in changed] == names:
        yield statement
        return
    for number, (new_name, moved) in enumerate(changed):
        first = word if not number or word == IGNORE else ALSO
        if place:
            parts = (first, new_name.removesuffix(".") + (f"[{' '.join(moved)}]" if moved else ""), tail)
        else:
            parts = (first, new_name, tail if word == IGNORE else prepend_axes(tail, moved))
        yield statement.with_name(" ".join(part for part in parts if part))


def _with_prefix(name: str, renames: Renames, used: set[str]) -> tuple[str, list[str]]:
    """Return a name with its prefix replaced, and the axes that are in the old prefix but not in the new prefix."""
    fitting = [(old, new) for old, new in renames if name == old or (old.endswith(".") and name.startswith(old))]
    if not fitting:
        return name, []
    old, new = max(fitting, key=lambda pair: len(pair[0]))
    used.add(old)
    return new + name[len(old) :], [axis for axis in _HOLE.findall(old) if f"{{{axis}}}" not in new]


def overlay_statements(
    below: Sequence[Statement],
    new_statements: Sequence[Statement],
    head: Statement,
    gone: Iterable[str],
    problems: list[Refusal],
) -> tuple[Statement, ...]:
    """Combine a dialect's own statements with the inherited statements, which the own statements replace or extend.

    A mapping rule replaces the inherited rules for the same logical tensors. A rule for new tensors is inserted beside
    rules with similar names.

    Args:
        below: the statements that the dialect inherits.
        new_statements: the statements in the dialect itself.
        head: head line of the dialect; errors that no statement below it causes refer to this line.
        gone: logical tensors of the base family that the inheriting family excludes.
        problems: list to which an error is appended for each mapping rule whose replacement would silently lose a
            tensor.
    """
    by_tensor: dict[str, list[int]] = {}
    for number, statement in enumerate(new_statements):
        if statement.kind == LINE:
            for name in statement.tensors:
                by_tensor.setdefault(name, []).append(number)
    left_out = tensors_left_out(new_statements).union(gone)
    concerned = left_out.union(by_tensor)
    placed = {_parts(statement)[1] for statement in new_statements if statement.kind == PLACE}
    result: list[Statement] = []
    placed_numbers: set[int] = set()
    for statement in below:
        tensors = statement.tensors
        if statement.kind == PLACE and _parts(statement)[1] in placed:
            continue
        if statement.kind == WITHOUT or concerned.isdisjoint(tensors):
            result.append(statement)
            continue
        numbers = sorted({number for name in tensors for number in by_tensor.get(name, ())})
        lost = [name for name in tensors if name not in by_tensor and name not in left_out]
        if lost and statement.kind == LINE:
            cause = new_statements[numbers[0]] if numbers else head
            names = ", ".join(lost)
            expected = (
                f"a line for {names} too: without one, {names} would go with the line taken over: {statement.text}"
            )
            problems.append(cause.problem(expected))
        result.extend(new_statements[number] for number in numbers if number not in placed_numbers)
        placed_numbers.update(numbers)
    ignored_texts = {statement.text for statement in result if statement.kind == IGNORE}
    remaining = [statement for number, statement in enumerate(new_statements) if number not in placed_numbers]
    return _beside(result, [each for each in remaining if each.kind != IGNORE or each.text not in ignored_texts])


def _beside(statements: Sequence[Statement], new: Sequence[Statement]) -> tuple[Statement, ...]:
    """Insert each new mapping rule after the rules with the most similar names, so that people find it in the combined
    table.
    """
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
    """Return the names of the modules that contain the tensor of a mapping rule, innermost module first."""
    segments = statement.text.partition("=")[0].strip().split(".")
    return [".".join(segments[:count]) for count in range(len(segments) - 1, 0, -1)]


def overlay_section(below: Section, overlay: Section, gone: Iterable[str], problems: list[Refusal]) -> Section:
    """Combine a dialect with the inherited dialect of the same label, which the dialect replaces or extends."""
    if overlay.like is not None:
        return overlay
    used: set[str] = set(below.used)
    statements = below.statements
    for renames in overlay.renames:
        statements = tuple(each for statement in statements for each in rename(statement, renames, used))
    return replace(
        below,
        head=overlay.head,
        renames=below.renames + overlay.renames,
        statements=overlay_statements(statements, overlay.statements, overlay.head, gone, problems),
        used=frozenset(used),
    )
