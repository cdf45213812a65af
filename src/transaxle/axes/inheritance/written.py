"""Families as they are written, and what they take over from others.

family glm4_moe like deepseek_v3        # everything of it, but for what is said here
  dialects hf transformers              # of its dialects, these only
  without q_a q_b                       # these tensors neither, nor their lines
block experts                           # no family: a part that families take over
family mixtral like decoder, experts    # what is further right lies over what is further left
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from transaxle.axes.inheritance.mount import Mounts
from transaxle.axes.inheritance.section import Section, Sections, find, laid_over, merged, opened
from transaxle.axes.inheritance.statement import (
    ALIKE,
    AXIS,
    CUT,
    IDENTIFYING,
    KEEP,
    LET,
    MODEL_TYPE,
    PRECISE,
    TENSOR,
    TIE,
    WITHIN,
    WITHOUT,
    WORD,
    WRAPPER,
    Statement,
    in_order,
    keyed,
    own_axes,
    split_when,
)  # fmt: skip
from transaxle.errors import Refusal, TransaxleError, Where

_FAMILY = re.compile(rf"(family|block)\s+({WORD})(?:\s+like\s+({WORD}(?:\s*,\s*{WORD})*))?")
_ORDER = (MODEL_TYPE, WRAPPER, ALIKE, LET, AXIS, TENSOR, TIE, PRECISE, CUT, WITHIN)
"""Order of a family's statements where it takes some over."""
_REMOVABLE = frozenset({AXIS, LET, TIE, CUT})
_ARTICLES = {AXIS: "an"}
_MOST_LINES, _LONGEST_LINE, _MOST_DIALECTS = 10_000, 1_000, 100
"""Caps on one file, which anybody may have written; the longest table that ships has some two hundred lines of at most
142 characters.
"""


@dataclass(frozen=True)
class Written:
    """A family or a block as written, with everything that it takes over."""

    head: Statement
    """`family …` or `block …`."""
    name: str
    """Its name."""
    block: bool
    """It is a part of families, and none itself."""
    like: tuple[str, ...] = ()
    """What it takes over, in order."""
    statements: tuple[Statement, ...] = ()
    """Its statements."""
    sections: Mapping[str, Section] = field(default_factory=dict)
    """Its dialects by label, in order."""

    def spelled(self) -> str:
        """Return the whole table as text, nothing taken over from anywhere."""
        lines = [f"family {self.name}", *(f"  {' '.join(each.text.split())}" for each in self.statements)]
        every = Sections(self.sections, [])
        for label, section in self.sections.items():
            version = "" if section.version is None else f" {section.version}"
            lines += ["", f"dialect {section.name}{version}"]
            parts = [each.text.partition("=") for each in every.flat(label)]
            widest = max((len(name.strip()) for name, equals, _ in parts if equals), default=0)
            lines += [
                f"  {name.strip():{widest}} = {rest.strip()}" if equals else f"  {name.strip()}"
                for name, equals, rest in parts
            ]
        return "\n".join(lines) + "\n"


Bases = Callable[[str], Written | None]
"""Finds the family or block that a table names after `like`, as it is written."""


@dataclass
class File:
    """What a file of tables holds."""

    written: dict[str, Written] = field(default_factory=dict)
    """Its families and blocks by name, in order; complete."""
    added: dict[str, Written] = field(default_factory=dict)
    """Families of elsewhere to which it adds dialects, with these dialects."""
    new: dict[str, list[str]] = field(default_factory=dict)
    """Name of such a family -> labels of the dialects that are new."""
    problems: list[Refusal] = field(default_factory=list)
    """What is wrong."""


class _FileReader:
    """Reads a file's statements into families and dialects as they are written."""

    def __init__(self, file: str, known: Iterable[str], bases: Bases) -> None:
        self.file = file
        self.known = known
        self.bases = bases
        self.result = File()
        self.opened = 0
        self.own: dict[str, _Own] = {}
        self.current: _Own | None = None
        self.section: list[Statement] | None = None
        self.skipping = False
        self.failed = False

    def read(self, text: str) -> File:
        for number, raw in enumerate(text.splitlines(), 1):
            if number > _MOST_LINES or len(raw) > _LONGEST_LINE:
                message = f"a table has at most {_MOST_LINES:,} lines, of at most {_LONGEST_LINE:,} characters each"
                where = Where(f"{self.file}, line {number}")
                self.result.problems.append(Refusal("CORRUPT", message, where, "Is this file a table?"))
                break
            said = raw.split("#", 1)[0].strip()
            if said:
                owner = self.current.name if self.current is not None else ""
                statement = Statement(said, raw, self.file, number, owner)
                try:
                    self._statement(statement)
                except TransaxleError as error:
                    self._keep(statement, error)
        for own in self.own.values():
            own.finish(self)
        return self.result

    def _keep(self, statement: Statement, error: TransaxleError) -> None:
        self.result.problems.extend(replace(refusal, where=statement.where) for refusal in error.refusals)

    def _statement(self, statement: Statement) -> None:
        head = statement.head
        if head in ("family", "block"):
            self._open_family(statement)
        elif head == "dialect":
            self._open_dialect(statement)
        elif self.skipping:
            return
        elif self.section is not None:
            self.section.append(statement)
        elif self.current is not None:
            self.current.statements.append(statement)
        else:
            self.skipping = self.failed = True
            raise statement.expected("'family NAME' or 'dialect NAME of FAMILY' before anything else")

    def _open_family(self, head: Statement) -> None:
        self.current, self.section, self.skipping, self.failed = None, None, True, True
        match = _FAMILY.fullmatch(head.text)
        if match is None:
            word = head.head
            raise head.expected(f"'{word} NAME' or '{word} NAME like NAME, NAME'")
        kind, name, like = match.groups()
        if name in self.own:
            raise head.expected(f"each family once; {name!r} is declared above", name)
        self.skipping = self.failed = False
        bases = tuple(word.strip() for word in like.split(",")) if like else ()
        self.current = self.own[name] = _Own(
            Statement(head.text, head.raw, head.file, head.line, name), name, kind == "block", bases
        )

    def _open_dialect(self, head: Statement) -> None:
        self.section, self.skipping = None, True
        section = opened(head)
        owner = section.owner
        if owner is not None:
            if owner not in self.own:
                if owner not in self.known:
                    known = ", ".join(dict.fromkeys((*self.known, *self.own)))
                    raise head.expected(f"a known family after 'of'; these are known: {known}", owner)
                self.own[owner] = _Own(head, owner, block=False, like=(owner,), adds=True)
            self.current = self.own[owner]
        elif self.current is None and self.failed:
            return
        if self.current is None:
            raise head.expected("'of FAMILY': the file names no family above")
        self.opened += 1
        if self.opened > _MOST_DIALECTS:
            raise head.expected(f"at most {_MOST_DIALECTS} dialects in one file", section.name)
        self.section = []
        self.current.sections.append((section, self.section))
        self.skipping = False


@dataclass
class _Own:
    """What a file itself says of a family."""

    head: Statement
    name: str
    block: bool
    like: tuple[str, ...]
    adds: bool = False
    """It is declared elsewhere; the file adds dialects to it."""
    statements: list[Statement] = field(default_factory=list)
    sections: list[tuple[Section, list[Statement]]] = field(default_factory=list)

    def finish(self, reader: _FileReader) -> None:
        """Take over what it is like, lay its own statements over that, and keep the result."""
        problems = reader.result.problems
        below = Written(self.head, self.name, self.block, self.like)
        for base in self.like:
            found = self._find(reader, base)
            if found is None:
                wanted = f"a family or a block after 'like', declared above or known; {base!r} is none"
                problems.append(self.head.problem(wanted, base))
            elif self.adds:
                below = replace(found, head=self.head)
            elif not below.statements and not below.sections:
                below = replace(below, statements=_taken(found.statements), sections=dict(found.sections))
            else:
                over = [(section, section.statements) for section in found.sections.values()]
                below = _Overlay(below, self.head, problems).result(_taken(found.statements), over)
        mounts = Mounts(partial(self._find, reader), problems)
        statements = mounts.family(self.statements)
        sections = [(section, mounts.dialect(section.label, lines)) for section, lines in self.sections]
        ready = _Overlay(below, self.head, problems, self.adds).result(statements, sections)
        if self.adds:
            reader.result.added[self.name] = ready
            reader.result.new[self.name] = [label for label in ready.sections if label not in below.sections]
        else:
            reader.result.written[self.name] = ready

    def _find(self, reader: _FileReader, name: str) -> Written | None:
        """Return a family or block that this one names: declared above, or known from elsewhere."""
        above = reader.result.written.get(name)
        return above if above is not None or (name in reader.own and name != self.name) else reader.bases(name)


def _taken(statements: Iterable[Statement]) -> tuple[Statement, ...]:
    return tuple(statement for statement in statements if statement.head not in IDENTIFYING)


@dataclass
class _Overlay:
    """Lays what one family or block says over another."""

    below: Written
    """What is taken over; empty where nothing is."""
    head: Statement
    """The head of the new family."""
    problems: list[Refusal]
    """Filled with what is wrong."""
    adds: bool = False
    """It is the same family, with more dialects: these may not have a label that it has."""

    def result(self, statements: Sequence[Statement], sections: Sequence[_OwnSection]) -> Written:
        """Return the family with these statements and dialects of its own."""
        cut_out = [statement for statement in statements if statement.head == WITHOUT]
        narrowed = [statement for statement in statements if statement.head == KEEP]
        said = [statement for statement in statements if statement.head not in (WITHOUT, KEEP)]
        if not self.below.statements and not self.below.sections:
            wanted = "a family that is like another: this one takes nothing over"
            self.problems.extend(each.problem(wanted, each.head) for each in (*cut_out, *narrowed))
            return replace(self.below, statements=tuple(said), sections=self._with_sections({}, sections, {}))
        taken = [part for statement in self.below.statements for part in keyed(statement)]
        gone = self._gone(cut_out, taken)
        merged_statements, reshaped = _replaced(taken, said, gone)
        result = self._with_sections(self._narrowed(narrowed), sections, gone)
        self._refuse_reshaped(result, sections, reshaped)
        kept = self.below.statements if self.adds else merged_statements
        return replace(self.below, head=self.head, statements=kept, sections=result)

    def _gone(self, cut_out: Sequence[Statement], taken: Sequence[_Keyed]) -> dict[tuple[str, str], Statement]:
        """Return what is left out, each with the statement that says so."""
        gone: dict[tuple[str, str], Statement] = {}
        known = {key for key, _ in taken}
        for statement in cut_out:
            words = statement.text.split()[1:]
            kind = words.pop(0) if len(words) > 1 and words[0] in _REMOVABLE else TENSOR
            for name in words:
                keys = {(each, name) for each in ((CUT, WITHIN) if kind == CUT else (kind,))} & known
                if not keys:
                    wanted = f"{_ARTICLES.get(kind, 'a')} {kind} that it takes over; {name!r} is none"
                    self.problems.append(statement.problem(wanted, name))
                gone.update(dict.fromkeys(keys, statement))
        return gone

    def _narrowed(self, narrowed: Sequence[Statement]) -> dict[str, Section]:
        """Return the dialects that are taken over; one that is like another stays whole without it."""
        sections = dict(self.below.sections)
        if not narrowed:
            return sections
        wanted = {label: statement for statement in narrowed for label in statement.text.split()[1:]}
        for label, statement in wanted.items():
            if find(sections, label) is None:
                message = f"dialects that it takes over, of {', '.join(sections)}; {label!r} is none"
                self.problems.append(statement.problem(message, label))
        kept = {label: each for label, each in sections.items() if {label, each.name} & wanted.keys()}
        whole = Sections(sections, self.problems)
        for label, section in kept.items():
            if section.like is not None and find(kept, section.like) is not find(sections, section.like):
                statements = whole.gathered(label)
                kept[label] = replace(section, like=None, renames=(), used=frozenset(), statements=statements)
        return kept

    def _with_sections(
        self,
        kept: dict[str, Section],
        sections: Sequence[_OwnSection],
        gone: Mapping[tuple[str, str], Statement],
    ) -> dict[str, Section]:
        """Return the dialects that are taken over with the own ones laid over them, and with the new ones."""
        result = dict(kept)
        tensors_gone = {name: statement for (kind, name), statement in gone.items() if kind == TENSOR}
        own: set[str] = set()
        for section, statements in sections:
            problem = self._refused(section, result, own)
            if problem is not None:
                self.problems.append(problem)
                continue
            own.add(section.label)
            whole = replace(section, statements=tuple(statements))
            taken = _tensors_taken(whole, result) if any(each.head == WITHOUT for each in statements) else frozenset()
            for statement in (each for each in statements if each.head == WITHOUT):
                for name in statement.text.split()[1:]:
                    if name not in taken:
                        wanted = f"a tensor that this dialect takes over; {name!r} is none"
                        self.problems.append(statement.problem(wanted, name))
            below = result.get(section.label)
            result[section.label] = whole if below is None else laid_over(below, whole, tensors_gone, self.problems)
        if tensors_gone:
            cause = next(iter(tensors_gone.values()))
            for label in result.keys() - own:
                each = result[label]
                left = merged(each.statements, (), cause, tensors_gone, self.problems)
                result[label] = replace(each, statements=left)
        return result

    def _refused(self, section: Section, above: Mapping[str, Section], own: set[str]) -> Refusal | None:
        """Return what is wrong with the head of a dialect."""
        versions = [each.version for each in above.values() if each.name == section.name]
        continues = section.label in above and section.label not in own and not self.adds
        clashes = section.version in versions or (bool(versions) and None in (section.version, *versions))
        if clashes and not continues:
            wanted = f"a new dialect, or another version; {section.name!r} is declared already"
            return section.head.problem(wanted, section.name)
        labels = list(above)
        before = labels[: labels.index(section.label)] if continues else labels
        if section.like is not None and find({label: above[label] for label in before}, section.like) is None:
            wanted = f"a dialect after 'like'; this family has: {', '.join(before)}"
            return section.head.problem(wanted, section.like)
        if section.renames and section.like is None and not continues:
            return section.head.problem("'like DIALECT' before new prefixes: this dialect takes nothing over")
        return None

    def _refuse_reshaped(
        self, result: Mapping[str, Section], sections: Sequence[_OwnSection], reshaped: Mapping[str, Statement]
    ) -> None:
        """Refuse to take over a line of a tensor that now has other axes: it might still be read, as something else."""
        if not reshaped:
            return
        own = {id(statement) for _, statements in sections for statement in statements}
        for label, section in result.items():
            for statement in section.statements:
                for name in statement.held:
                    if name in reshaped and id(statement) not in own:
                        why = f"with other axes than before, {name} cannot take over {statement.text!r}"
                        wanted = f"a line for {name} in dialect {label} too: {why}"
                        self.problems.append(reshaped[name].problem(wanted))


_Keyed = tuple[tuple[str, str], Statement]
_OwnSection = tuple[Section, Sequence[Statement]]


def _tensors_taken(section: Section, above: Mapping[str, Section]) -> frozenset[str]:
    """Return the tensors that a dialect would take over."""
    every = Sections(above, [])
    if section.like is None:
        return every.tensors(section.label) if section.label in above else frozenset()
    base = find(above, section.like)
    return frozenset() if base is None else every.tensors(base.label)


def _replaced(
    taken: Sequence[_Keyed], said: Sequence[Statement], gone: Mapping[tuple[str, str], Statement]
) -> tuple[tuple[Statement, ...], dict[str, Statement]]:
    """Return statements with the own ones in place of those that they replace, and the tensors whose axes differ."""
    own = [part for statement in said for part in keyed(statement)]
    by_key: dict[tuple[str, str], list[Statement]] = {}
    for key, statement in own:
        by_key.setdefault(key, []).append(statement)
    tensors_gone = {name for kind, name in gone if kind == TENSOR}
    by_kind: dict[str, list[Statement]] = {kind: [] for kind in _ORDER}
    reshaped: dict[str, Statement] = {}
    placed: set[tuple[str, str]] = set()
    for key, statement in taken:
        if key in by_key:
            if key not in placed:
                by_kind[key[0]].extend(by_key[key])
            if key[0] == TENSOR and own_axes(statement) != own_axes(by_key[key][0]):
                reshaped[key[1]] = by_key[key][0]
            placed.add(key)
        elif key not in gone:
            by_kind[key[0]].extend(_without(key, statement, tensors_gone))
    for key, statements in by_key.items():
        if key not in placed:
            by_kind[key[0]].extend(statements)
    for kind in (LET, AXIS):
        by_kind[kind] = in_order(by_kind[kind])
    return tuple(statement for kind in _ORDER for statement in by_kind[kind]), reshaped


def _without(key: tuple[str, str], statement: Statement, gone: set[str]) -> tuple[Statement, ...]:
    """Return a statement without tensors that are gone; nothing where it speaks of these only."""
    kind, name = key
    if kind == PRECISE and name in gone:
        return ()
    if kind == TIE and gone & {name, split_when(statement.text)[0].partition("=")[2].strip()}:
        return ()
    if kind == CUT and gone:
        head, of, tensors = statement.text.partition(" of ")
        if of:
            left = [tensor for tensor in tensors.split() if tensor not in gone]
            return (statement.saying(f"{head} of {' '.join(left)}"),) if left else ()
    return (statement,)


def read(text: str, file: str, known: Iterable[str], bases: Bases) -> File:
    """Read a file of tables into families and dialects as they are written.

    Args:
        text: the file.
        file: its name, for errors.
        known: names of the families that `dialect … of FAMILY` may extend.
        bases: finds the families and blocks of elsewhere.
    """
    return _FileReader(file, known, bases).read(text)


def nothing(_name: str) -> Written | None:
    """Find no family."""
    return None
