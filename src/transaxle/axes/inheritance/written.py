"""Families as they are written, and what they take over from others.

family glm4_moe like deepseek_v3        # everything of it, but for what is said here
  dialects hf transformers              # of its dialects, these only
  without q_a q_b                       # these tensors neither, nor their lines
block experts                           # no family: a part that families take over
family mixtral like decoder, experts    # what is further right lies over what is further left
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial

import msgspec

from transaxle.axes.inheritance.mount import Mounts
from transaxle.axes.inheritance.overlay import Overlay, Replaced, without_unused
from transaxle.axes.inheritance.section import Section, Sections, opened
from transaxle.axes.inheritance.statement import (
    BLOCK,
    DIALECT,
    FAMILY,
    IDENTIFYING,
    KEEP,
    MOUNT,
    WITHOUT,
    WORD,
    Statement,
)
from transaxle.errors import Refusal, TransaxleError, Where

_FAMILY = re.compile(rf"({FAMILY}|{BLOCK})\s+({WORD})(?:\s+like\s+({WORD}(?:\s*,\s*{WORD})*))?")
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
    replaced: tuple[Replaced, ...] = ()
    """What it says anew of what it takes over."""

    @property
    def empty(self) -> bool:
        """Whether nothing stands in it."""
        return not self.statements and not self.sections

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


class File(msgspec.Struct):
    """What a file of tables holds."""

    written: dict[str, Written] = msgspec.field(default_factory=dict)
    """Its families and blocks by name, in order; complete."""
    added: dict[str, Written] = msgspec.field(default_factory=dict)
    """Families of elsewhere to which it adds dialects, with these dialects."""
    new: dict[str, list[str]] = msgspec.field(default_factory=dict)
    """Name of such a family -> labels of the dialects that are new."""
    problems: list[Refusal] = msgspec.field(default_factory=list)
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

    def meant(self, name: str) -> str:
        """Return a hint at the names that may be meant by one that is not known."""
        close = get_close_matches(name, [*self.known, *self.own], 3)
        return f"Did you mean {' or '.join(close)}?" if close else "`transaxle families` lists those that ship."

    def _keep(self, statement: Statement, error: TransaxleError) -> None:
        self.result.problems.extend(replace(refusal, where=statement.where) for refusal in error.refusals)

    def _statement(self, statement: Statement) -> None:
        head = statement.head
        if head in (FAMILY, BLOCK):
            self._open_family(statement)
        elif head == DIALECT:
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
            Statement(head.text, head.raw, head.file, head.line, name), name, kind == BLOCK, bases
        )

    def _open_dialect(self, head: Statement) -> None:
        self.section, self.skipping = None, True
        section = opened(head)
        owner = section.owner
        if owner is not None:
            if owner not in self.own:
                if owner not in self.known:
                    raise head.expected(f"a known family after 'of'; {owner!r} is none", owner, self.meant(owner))
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


class _Own(msgspec.Struct):
    """What a file itself says of a family."""

    head: Statement
    """`family …`, `block …`, or the first `dialect … of FAMILY`."""
    name: str
    """Its name."""
    block: bool
    """It is a part of families, and none itself."""
    like: tuple[str, ...]
    """What it takes over, in order."""
    adds: bool = False
    """It is declared elsewhere; the file adds dialects to it."""
    statements: list[Statement] = msgspec.field(default_factory=list)
    """What stands below its head."""
    sections: list[tuple[Section, list[Statement]]] = msgspec.field(default_factory=list)
    """Its dialects, each with what stands below the head of that."""

    def finish(self, reader: _FileReader) -> None:
        """Take over what it is like, lay its own statements over that, and keep the result."""
        problems = reader.result.problems
        below = Written(self.head, self.name, self.block, self.like)
        for base in self.like:
            found = self._find(reader, base)
            if found is None:
                wanted = f"a family or a block after 'like', declared above or known; {base!r} is none"
                problems.append(self.head.problem(wanted, base, reader.meant(base)))
            elif self.adds:
                below = replace(found, head=self.head)
            elif below.empty:
                below = replace(below, statements=_taken(found.statements), sections=dict(found.sections))
            else:
                over = [(section, section.statements) for section in found.sections.values()]
                below = Overlay(below, self.head, problems).result(_taken(found.statements), over)
        mounts = Mounts(partial(self._find, reader), reader.meant, problems)
        statements = mounts.family(self.statements)
        if mounts.replaced:
            below = replace(below, statements=mounts.laid_over(below.statements))
        sections = [(section, mounts.dialect(section.label, lines)) for section, lines in self.sections]
        ready = Overlay(below, self.head, problems, mounts, self.adds).result(statements, sections)
        if self.adds:
            reader.result.added[self.name] = ready
            reader.result.new[self.name] = [label for label in ready.sections if label not in below.sections]
        else:
            takes_over = bool(self.like) or MOUNT in (statement.head for statement in self.statements)
            own = [statement for statement in self.statements if statement.head not in (MOUNT, WITHOUT, KEEP)]
            whole = ready if self.block or not takes_over else without_unused(ready, own)
            reader.result.written[self.name] = whole

    def _find(self, reader: _FileReader, name: str) -> Written | None:
        """Return a family or block that this one names: declared above, or known from elsewhere."""
        above = reader.result.written.get(name)
        return above if above is not None or (name in reader.own and name != self.name) else reader.bases(name)


def _taken(statements: Iterable[Statement]) -> tuple[Statement, ...]:
    return tuple(statement for statement in statements if statement.head not in IDENTIFYING)


def read(text: str, file: str, known: Iterable[str], bases: Bases) -> File:
    """Read a file of tables into families and dialects as they are written.

    Args:
        text: the file.
        file: its name, for errors.
        known: names of the families that `dialect … of FAMILY` may extend.
        bases: finds the families and blocks of elsewhere.
    """
    return _FileReader(file, known, bases).read(text)
