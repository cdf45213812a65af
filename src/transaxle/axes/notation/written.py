"""Families as they are written: what they take over from others, and tables that they mount.

    family glm4_moe like deepseek_v3        # everything of it, but for what is said here
      dialects hf transformers              # of its dialects, these only
      without q_a q_b                       # these tensors neither, nor their lines
    block experts                           # no family: a part that families take over
    family mixtral like decoder, experts    # what is further right lies over what is further left

A mounted table is another family as a part of one, such as a vision tower beside a language model:

    family llava
    mount llama from text_config                  # with its own names; its config keys are those in text_config
    mount vit as vision from vision_config        # its axes, tensors and formulas are called vision_l, vision_q, …
    dialect hf
    mount llama under language_model.             # the lines of its dialect hf, with this before every name
    mount vision under vision_tower. like hf

An overlay is what the family says itself, laid over what it takes over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from threading import RLock

import msgspec

from transaxle.axes.notation.section import Section, Sections, find, laid_over, merged, opened
from transaxle.axes.notation.statement import (
    ADDED,
    ALIKE,
    AXES,
    AXIS,
    BLOCK,
    CUT,
    DIALECT,
    ENCODINGS,
    FAMILY,
    IDENTIFYING,
    IGNORE,
    KEEP,
    LET,
    LINE,
    LOSSY,
    MODEL_TYPE,
    MOUNT,
    PRECISE,
    TENSOR,
    TIE,
    WITHIN,
    WITHOUT,
    WORD,
    WRAPPER,
    Key,
    Keyed,
    Statement,
    in_order,
    keyed,
    left_out_of,
    own_axes,
    split_when,
    tensors_left_out,
)
from transaxle.errors import Refusal, TransaxleError, Where

_MOUNT = re.compile(rf"mount\s+({WORD})(?:\s+as\s+({WORD}))?(?:\s+from\s+({WORD}(?:\.{WORD})*))?")
_UNDER = re.compile(rf"mount\s+({WORD})\s+under\s+(\S+\.)(?:\s+like\s+({WORD}(?:@[\w.]+)?))?")
_TOKEN = re.compile(rf"'[^']*'|\"[^\"]*\"|\.\s*{WORD}|{WORD}|[0-9]+[A-Za-z_]\w*")
_HOLE = re.compile(r"\{[^{}]*\}")
_IN_HOLE = re.compile(rf"(?<![@\w]){WORD}")
_GRAMMAR = frozenset({"and", "or", "not", "if", "else", "in", "True", "False", "None", "len"})
"""Words of formulas that are no keys."""


class _Mounted(msgspec.Struct, frozen=True):
    """A family that is mounted."""

    base: Written
    """It as it is written."""
    prefix: str
    """What stands before its names: `vision_`, or nothing."""
    key: str
    """The config key under which its own keys are; empty where they are beside the others."""
    names: frozenset[str]
    """Names of its axes, tensors and formulas."""

    def renamed(self, text: str) -> str:
        """Return a text in which its names have their prefix."""
        return re.sub(WORD, lambda match: self._name(match[0]), text)

    def _name(self, word: str) -> str:
        return f"{self.prefix}{word}" if word in self.names else word

    def formula(self, text: str) -> str:
        """Return a formula over its names as they are here, and its keys where they are here."""

        def word(match: re.Match[str]) -> str:
            found = match[0]
            if found[0] in "'\"." or found[0].isdigit() or found in _GRAMMAR or found in ENCODINGS:
                return found
            if found in self.names:
                return self.prefix + found
            return f"{self.key}.{found}" if self.key else found

        return _TOKEN.sub(word, text)

    def statement(self, statement: Statement) -> Iterable[Statement]:
        """Yield a statement of the family in its parts, with the names and keys that they have here."""
        for (kind, _), part in keyed(statement):
            text, when = split_when(part.text)
            if kind in (AXIS, LET):
                head, equals, size = text.partition("=")
                word, name = head.split()
                said = f"{word} {self._name(name)}{equals}{self.formula(size)}"
                if word != AXES:
                    said = said.replace("=", " = ", 1)
            elif kind == TENSOR:
                said = self.renamed(text)
            elif kind == PRECISE:
                said = f"{PRECISE} {self._name(text.split()[1])}"
            else:
                word, _, rest = text.partition(" ")
                mesh, equals, rest = rest.partition("=") if word == CUT else ("", "", rest)
                said = f"{word} {mesh}{equals}{self.renamed(rest)}"
            yield part.saying(said if when is None else f"{said} when {self.formula(when)}")

    def line(self, statement: Statement, under: str) -> Statement:
        """Return a spelled-out line of a dialect of the family as it is here."""
        word = statement.head if statement.kind == statement.head else ""
        text, when = split_when(statement.text[len(word) :].strip())
        name, equals, rest = text.partition("=")
        expression, lossy, arithmetic = rest.partition(LOSSY)
        name = _HOLE.sub(lambda hole: _IN_HOLE.sub(lambda word: self._name(word[0]), hole[0]), name)
        said = f"{word} {under}{name.strip()} {equals} {self.renamed(expression.strip())}{lossy}{arithmetic}".strip()
        if word == IGNORE:
            return statement.saying(said)
        return statement.saying(said if when is None else f"{said} when {self.formula(when)}")


_REPLACED = frozenset({AXIS, LET, TENSOR, TIE, CUT, WITHIN})
"""Kinds of statements that a family may say anew below a mount."""


class Mounts:
    """Replaces a family's `mount` statements by what they stand for.

    Args:
        bases: finds families and blocks.
        meant: returns a hint at the name that may be meant by one that is none of these.
        problems: filled with what is wrong.
    """

    def __init__(
        self, bases: Callable[[str], Written | None], meant: Callable[[str], str], problems: list[Refusal]
    ) -> None:
        self._bases = bases
        self._meant = meant
        self._problems = problems
        self._mounted: dict[str, _Mounted] = {}
        self._parts: list[Keyed] = []
        self._left_out: frozenset[str] = frozenset()
        self._kept: list[Statement] = []
        self._tensors: dict[str, frozenset[str]] = {}
        self.replaced = False
        """Whether the family says some of it anew, or leaves some of it out."""

    @property
    def lines(self) -> frozenset[int]:
        """Identities of the lines of dialects that come from mounted families."""
        return frozenset(map(id, self._kept))

    def family(self, statements: Iterable[Statement]) -> list[Statement]:
        """Return the statements of a family: with those of its mounts, unless it replaces some of these (`replaced`).

        A statement below a mount replaces; one above it, of something that the mount declares too, is an error.
        """
        spelled: list[Statement] = []
        own: list[Statement] = []
        said: set[Key] = set()
        left_out: set[Key] = set()
        for statement in statements:
            if statement.head == MOUNT:
                parts = [part for each in self._family(statement) for part in keyed(each)]
                for kind, name in sorted(said & {key for key, _ in parts}):
                    wanted = f"no {kind} {name!r} above a mount that has one too: below the mount, it replaces it"
                    self._problems.append(statement.problem(wanted))
                self._parts.extend(parts)
                spelled.extend(part for _, part in parts)
                continue
            spelled.append(statement)
            own.append(statement)
            if statement.head == WITHOUT:
                left_out.update(left_out_of(statement))
            elif statement.head != KEEP:
                said.update(key for key, _ in keyed(statement) if key[0] in _REPLACED)
        mounted = {key for key, _ in self._parts}
        self._left_out = frozenset(name for kind, name in left_out & mounted if kind == TENSOR)
        self.replaced = bool(mounted and left_out) or not mounted.isdisjoint(said)
        return own if self.replaced else spelled

    def laid_over(self, statements: Iterable[Statement]) -> tuple[Statement, ...]:
        """Return statements that are taken over with those of the mounts in place of what they replace."""
        mounted = {key for key, _ in self._parts}
        taken = [part for statement in statements for key, part in keyed(statement) if key not in mounted]
        return (*taken, *(part for _, part in self._parts))

    def _family(self, statement: Statement) -> list[Statement]:
        match = _MOUNT.fullmatch(statement.text)
        if match is None:
            self._problems.append(statement.problem("'mount FAMILY [as NAME] [from CONFIG_KEY]'"))
            return []
        name, alias, key = match.groups()
        base = self._bases(name)
        if base is None:
            wanted = f"a known family after 'mount'; {name!r} is none"
            self._problems.append(statement.problem(wanted, name, self._meant(name)))
            return []
        if (alias or name) in self._mounted:
            self._problems.append(statement.problem("each mounted family once; 'as NAME' gives it another name", name))
            return []
        taken = [part for each in base.statements if each.head not in IDENTIFYING for part in keyed(each)]
        names = frozenset(name for (kind, name), _ in taken if kind in (AXIS, LET, TENSOR))
        mounted = _Mounted(base, f"{alias}_" if alias else "", key or "", names)
        self._mounted[alias or name] = mounted
        return [part for _, each in taken for part in mounted.statement(each)]

    def dialect(self, label: str, statements: Sequence[Statement]) -> list[Statement]:
        """Return the statements of a dialect: an own line replaces those of its tensors that come from a mount."""
        own = {name for each in statements if each.kind == LINE and each.head != MOUNT for name in each.held}
        left_out = tensors_left_out(statements) | self._left_out
        result: list[Statement] = []
        for statement in statements:
            lines = self._dialect(label, statement) if statement.head == MOUNT else []
            for line in lines:
                self._tensors[label] = self._tensors.get(label, frozenset()).union(line.held)
                if (own | left_out).isdisjoint(line.held):
                    result.append(line)
                    self._kept.append(line)
                elif lost := [name for name in line.held if name not in own | left_out and line.kind == LINE]:
                    wanted = f"a line for {', '.join(lost)} too, which would go with the line of the mount: {line.text}"
                    self._problems.append(statement.problem(wanted))
            if statement.head != MOUNT:
                result.append(statement)
        return result

    def tensors(self, label: str) -> frozenset[str]:
        """Return the tensors that the mounts of a dialect have lines for."""
        return self._tensors.get(label, frozenset())

    def _dialect(self, label: str, statement: Statement) -> list[Statement]:
        match = _UNDER.fullmatch(statement.text)
        if match is None:
            self._problems.append(statement.problem("'mount NAME under PREFIX. [like DIALECT]'"))
            return []
        name, under, like = match.groups()
        mounted = self._mounted.get(name)
        if mounted is None:
            known = ", ".join(self._mounted) or "none"
            self._problems.append(statement.problem(f"a family that is mounted above: {known}", name))
            return []
        found = find(mounted.base.sections, like or label)
        if found is None:
            wanted = f"a dialect of {mounted.base.name} after 'like': {', '.join(mounted.base.sections)}"
            self._problems.append(statement.problem(wanted, like or ""))
            return []
        lines = Sections(mounted.base.sections, self._problems).flat(found.label)
        return [mounted.line(line, under) for line in lines]


_ORDER = (MODEL_TYPE, WRAPPER, ALIKE, LET, AXIS, TENSOR, TIE, PRECISE, ADDED, CUT, WITHIN)
"""Order of a family's statements where it takes some over."""
_ARTICLES = {AXIS: "an"}

_OwnSection = tuple[Section, Sequence[Statement]]


class Replaced(msgspec.Struct, frozen=True):
    """A statement that a family has taken over, and what it says in its place."""

    kind: str
    """`axis`, `let`, `tensor`, `tie` or `cut`."""
    name: str
    """What it speaks of."""
    taken: Statement
    """The statement that is taken over."""
    own: Statement
    """The one that replaces it."""


class Overlay(msgspec.Struct):
    """Lays what one family or block says over another."""

    below: Written
    """What is taken over; empty where nothing is."""
    head: Statement
    """The head of the new family."""
    problems: list[Refusal]
    """Filled with what is wrong."""
    mounts: Mounts | None = None
    """The tables that the new family mounts; None: there are none."""
    adds: bool = False
    """It is the same family, with more dialects: these may not have a label that it has."""

    def result(self, statements: Sequence[Statement], sections: Sequence[_OwnSection]) -> Written:
        """Return the family with these statements and dialects of its own."""
        cut_out = [statement for statement in statements if statement.head == WITHOUT]
        narrowed = [statement for statement in statements if statement.head == KEEP]
        said = [statement for statement in statements if statement.head not in (WITHOUT, KEEP)]
        if self.below.empty:
            wanted = "a family that is like another: this one takes nothing over"
            self.problems.extend(each.problem(wanted, each.head) for each in (*cut_out, *narrowed))
            return replace(self.below, statements=tuple(said), sections=self._with_sections({}, sections, {}))
        taken = [part for statement in self.below.statements for part in keyed(statement)]
        gone = self._gone(cut_out, taken)
        merged_statements, replaced = _replaced(taken, said, gone)
        result = self._with_sections(self._narrowed(narrowed), sections, gone)
        self._refuse_reshaped(result, sections, replaced)
        kept = self.below.statements if self.adds else merged_statements
        return replace(self.below, head=self.head, statements=kept, sections=result, replaced=replaced)

    def _gone(self, cut_out: Sequence[Statement], taken: Sequence[Keyed]) -> dict[Key, Statement]:
        """Return what is left out, each with the statement that says so."""
        gone: dict[Key, Statement] = {}
        known = {key for key, _ in taken}
        for statement in cut_out:
            keys = left_out_of(statement)
            for name in dict.fromkeys(name for _, name in keys):
                found = known.intersection(key for key in keys if key[1] == name)
                if not found:
                    kind = keys[0][0]
                    wanted = f"{_ARTICLES.get(kind, 'a')} {kind} that it takes over; {name!r} is none"
                    self.problems.append(statement.problem(wanted, name))
                gone.update(dict.fromkeys(sorted(found), statement))
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
        gone: Mapping[Key, Statement],
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
            if self.mounts is not None:
                taken |= self.mounts.tensors(section.label)
            for statement in (each for each in statements if each.head == WITHOUT):
                for name in statement.text.split()[1:]:
                    if name not in taken:
                        wanted = f"a tensor that this dialect takes over; {name!r} is none"
                        self.problems.append(statement.problem(wanted, name))
            below = result.get(section.label)
            result[section.label] = whole if below is None else laid_over(below, whole, tensors_gone, self.problems)
        if tensors_gone:
            cause = next(iter(tensors_gone.values()))
            for label in [label for label in result if label not in own]:
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
        of_block = self.head.head == BLOCK or section.head.owner != self.head.owner
        if section.renames and section.like is None and not continues and not of_block:
            return section.head.problem("'like DIALECT' before new prefixes: this dialect takes nothing over")
        return None

    def _refuse_reshaped(
        self, result: Mapping[str, Section], sections: Sequence[_OwnSection], replaced: Iterable[Replaced]
    ) -> None:
        """Refuse to take over a line of a tensor that now has other axes: it might still be read, as something else."""
        reshaped = {
            each.name: each.own
            for each in replaced
            if each.kind == TENSOR and own_axes(each.taken) != own_axes(each.own)
        }
        if not reshaped:
            return
        mounted = frozenset() if self.mounts is None else self.mounts.lines
        own = {id(statement) for _, statements in sections for statement in statements} - mounted
        for label, section in result.items():
            for statement in section.statements:
                for name in statement.held:
                    if name in reshaped and id(statement) not in own:
                        why = f"with other axes than before, {name} cannot take over {statement.text!r}"
                        wanted = f"a line for {name} in dialect {label} too: {why}"
                        self.problems.append(reshaped[name].problem(wanted))


def without_unused(family: Written, own: Iterable[Statement]) -> Written:
    """Return a family without the axes that it takes over and that nothing in it uses: `p` of lines with padding, where
    no such line is left.

    Args:
        family: with all that it takes over.
        own: its own statements; the axes that these declare stay.
    """
    declared = {name for statement in own for (kind, name), _ in keyed(statement) if kind == AXIS}
    sizes: dict[str, set[str]] = {}
    used = set(declared)
    for statement in family.statements:
        for (kind, name), part in keyed(statement):
            words = set(re.findall(WORD, re.split("[=:]", part.text, maxsplit=1)[-1] if kind != AXIS else ""))
            if kind == AXIS:
                sizes[name] = set(re.findall(WORD, part.text.partition("=")[2])) - {name}
            used |= words
    for section in family.sections.values():
        for statement in section.statements:
            name, _, rest = statement.text.partition("=")
            used.update(re.findall(WORD, f"{' '.join(_HOLE.findall(name))} {rest}"))
    waiting = [name for name in sizes if name in used]
    while waiting:
        new = sizes[waiting.pop()] & sizes.keys() - used
        used |= new
        waiting += new
    unused = sizes.keys() - used
    if not unused:
        return family
    parts = [each for statement in family.statements for each in keyed(statement)]
    return replace(family, statements=tuple(part for (kind, name), part in parts if kind != AXIS or name not in unused))


def _tensors_taken(section: Section, above: Mapping[str, Section]) -> frozenset[str]:
    """Return the tensors that a dialect would take over."""
    every = Sections(above, [])
    if section.like is None:
        return every.tensors(section.label) if section.label in above else frozenset()
    base = find(above, section.like)
    return frozenset() if base is None else every.tensors(base.label)


def _replaced(
    taken: Sequence[Keyed], said: Sequence[Statement], gone: Mapping[Key, Statement]
) -> tuple[tuple[Statement, ...], tuple[Replaced, ...]]:
    """Return statements with the own ones in place of those that they replace, and what is replaced."""
    own = [part for statement in said for part in keyed(statement)]
    by_key: dict[Key, list[Statement]] = {}
    for key, statement in own:
        by_key.setdefault(key, []).append(statement)
    tensors_gone = {name for kind, name in gone if kind == TENSOR}
    by_kind: dict[str, list[Statement]] = {kind: [] for kind in _ORDER}
    replaced: dict[Key, Replaced] = {}
    for key, statement in taken:
        kind, name = key
        if key in by_key:
            if key not in replaced:
                by_kind[kind].extend(by_key[key])
                replaced[key] = Replaced(kind, name, statement, by_key[key][0])
        elif key not in gone:
            by_kind[kind].extend(_without(key, statement, tensors_gone))
    for key, statements in by_key.items():
        if key not in replaced:
            by_kind[key[0]].extend(statements)
    for kind in (LET, AXIS):
        by_kind[kind] = in_order(by_kind[kind])
    differing = (each for each in replaced.values() if each.taken.text.split() != each.own.text.split())
    shown = tuple(each for each in differing if each.kind not in (*IDENTIFYING, PRECISE))
    return tuple(statement for kind in _ORDER for statement in by_kind[kind]), shown


def _without(key: Key, statement: Statement, gone: set[str]) -> tuple[Statement, ...]:
    """Return a statement without tensors that are gone; nothing where it speaks of these only."""
    kind, name = key
    if kind in (PRECISE, ADDED) and name in gone:
        return ()
    if kind == TIE and gone & {name, split_when(statement.text)[0].partition("=")[2].strip()}:
        return ()
    if kind == CUT and gone:
        head, of, tensors = statement.text.partition(" of ")
        if of:
            left = [tensor for tensor in tensors.split() if tensor not in gone]
            return (statement.saying(f"{head} of {' '.join(left)}"),) if left else ()
    return (statement,)


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


class WrittenTables:
    """Files of tables that may build on each other. A file is read once, when something in it is asked for.

    Args:
        homes: name of each family and block -> the file it is in.
        text: returns the contents of a file.
    """

    def __init__(self, homes: Mapping[str, str], text: Callable[[str], str]) -> None:
        self._homes = homes
        self._text = text
        self._files: dict[str, File] = {}
        self._reading = RLock()

    def base(self, name: str) -> Written | None:
        """Return a family or a block as it is written, with all that it takes over; None where there is none."""
        file = self._homes.get(name)
        return None if file is None else self._file(file).written.get(name)

    def _file(self, name: str) -> File:
        with self._reading:
            if name not in self._files:
                self._files[name] = File()  # tables that are like each other find nothing here
                self._files[name] = read(self._text(name), name, (), self.base)
            return self._files[name]
