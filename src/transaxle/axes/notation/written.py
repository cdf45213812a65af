"""Families as text: what they inherit from other families, and the families that they mount.

    family glm4_moe like deepseek_v3        # inherits everything, except what is declared below
      dialects hf transformers              # of the inherited dialects, keeps only these
      without q_a q_b                       # excludes these tensors and their mapping rules

    block experts                           # not a family: statements that families inherit
    family mixtral like decoder, experts    # bases further right replace those further left

A mounted family is contained in the current family, as a vision tower is contained in a model beside a language model:

    family llava
    mount llama from text_config                  # with its own names; its config keys are those in text_config
    mount vit as vision from vision_config        # its axes, tensors and formulas become vision_l, vision_q, …
    dialect hf
    mount llama under language_model.             # the mapping rules of its dialect hf, with this prefix
    mount vision under vision_tower. like hf

An overlay replaces inherited statements by the family's own statements.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from threading import RLock

import msgspec

from transaxle.axes.notation.section import Section, Sections, find, overlay_section, overlay_statements, parse_head
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
    KeyedPart,
    Statement,
    in_order,
    keys_left_out,
    own_axes,
    replaceable_parts,
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
"""Words in formulas that are Python syntax, and therefore no config keys."""


class _Mount(msgspec.Struct, frozen=True):
    """A family mounted in a larger family, and how its names and config keys are renamed in the larger family."""

    base: FamilyText
    """The mounted family, as text."""
    prefix: str
    """Prefix for the names of the mounted family, such as `vision_`; may be empty."""
    key: str
    """Config key that contains the config of the mounted family, such as `vision_config`; empty for the top level."""
    names: frozenset[str]
    """Names of the mounted family's axes, tensors and formulas."""

    def rename(self, text: str) -> str:
        """Return a text in which the names of the mounted family have the prefix."""
        return re.sub(WORD, lambda match: self._name(match[0]), text)

    def _name(self, word: str) -> str:
        return f"{self.prefix}{word}" if word in self.names else word

    def formula(self, text: str) -> str:
        """Return a formula with the mounted family's names and config keys renamed for the larger family."""

        def word(match: re.Match[str]) -> str:
            text_found = match[0]
            if text_found[0] in "'\"." or text_found[0].isdigit() or text_found in _GRAMMAR or text_found in ENCODINGS:
                return text_found
            if text_found in self.names:
                return self.prefix + text_found
            return f"{self.key}.{text_found}" if self.key else text_found

        return _TOKEN.sub(word, text)

    def statement(self, statement: Statement) -> Iterable[Statement]:
        """Yield the parts of a statement of the mounted family, with names and config keys of the larger family."""
        for (kind, _), part in replaceable_parts(statement):
            text, when = split_when(part.text)
            if kind in (AXIS, LET):
                head, equals, size = text.partition("=")
                word, name = head.split()
                new_text = f"{word} {self._name(name)}{equals}{self.formula(size)}"
                if word != AXES:
                    new_text = new_text.replace("=", " = ", 1)
            elif kind == TENSOR:
                new_text = self.rename(text)
            elif kind == PRECISE:
                new_text = f"{PRECISE} {self._name(text.split()[1])}"
            else:
                word, _, tail = text.partition(" ")
                mesh, equals, tail = tail.partition("=") if word == CUT else ("", "", tail)
                new_text = f"{word} {mesh}{equals}{self.rename(tail)}"
            yield part.with_text(new_text if when is None else f"{new_text} when {self.formula(when)}")

    def line(self, statement: Statement, under: str) -> Statement:
        """Return a mapping rule of the mounted family, already expanded, with the names of the larger family."""
        word = statement.head if statement.kind == statement.head else ""
        text, when = split_when(statement.text[len(word) :].strip())
        name, equals, tail = text.partition("=")
        expression, lossy, arithmetic = tail.partition(LOSSY)
        name = _HOLE.sub(lambda hole: _IN_HOLE.sub(lambda word: self._name(word[0]), hole[0]), name)
        new_text = f"{word} {under}{name.strip()} {equals} {self.rename(expression.strip())}{lossy}{arithmetic}".strip()
        if word == IGNORE:
            return statement.with_text(new_text)
        return statement.with_text(new_text if when is None else f"{new_text} when {self.formula(when)}")


_REPLACEABLE = frozenset({AXIS, LET, TENSOR, TIE, CUT, WITHIN})
"""Kinds of statements by which a family may replace statements of a family that it mounts."""


class Mounts:
    """Expands the `mount` statements of a family, by which the family contains other families.

    Args:
        bases: function that returns the family or block with a name.
        suggest: function that returns a hint with names similar to an unknown name.
        problems: list to which the errors are appended.
    """

    def __init__(
        self, bases: Callable[[str], FamilyText | None], suggest: Callable[[str], str], problems: list[Refusal]
    ) -> None:
        self._bases = bases
        self._suggest = suggest
        self._problems = problems
        self._mounted: dict[str, _Mount] = {}
        self._parts: list[KeyedPart] = []
        self._left_out: frozenset[str] = frozenset()
        self._kept: list[Statement] = []
        self._tensors: dict[str, frozenset[str]] = {}
        self.replaced = False
        """Whether the family replaces or excludes statements of a mounted family."""

    @property
    def lines(self) -> frozenset[int]:
        """`id` of each mapping rule in the dialects that was taken from a mounted family."""
        return frozenset(map(id, self._kept))

    def family(self, statements: Iterable[Statement]) -> list[Statement]:
        """Return the statements of a family; those of mounted families are included unless the family replaces some of
        them.

        A statement below a `mount` replaces the mounted one. Above the `mount`, declaring the same thing is an error.
        """
        spelled: list[Statement] = []
        own_statements: list[Statement] = []
        declared: set[Key] = set()
        left_out: set[Key] = set()
        for statement in statements:
            if statement.head == MOUNT:
                parts = [part for each in self._family(statement) for part in replaceable_parts(each)]
                for kind, name in sorted(declared & {key for key, _ in parts}):
                    expected = f"no {kind} {name!r} above a mount that has one too: below the mount, it replaces it"
                    self._problems.append(statement.problem(expected))
                self._parts.extend(parts)
                spelled.extend(part for _, part in parts)
                continue
            spelled.append(statement)
            own_statements.append(statement)
            if statement.head == WITHOUT:
                left_out.update(keys_left_out(statement))
            elif statement.head != KEEP:
                declared.update(key for key, _ in replaceable_parts(statement) if key[0] in _REPLACEABLE)
        mounted = {key for key, _ in self._parts}
        self._left_out = frozenset(name for kind, name in left_out & mounted if kind == TENSOR)
        self.replaced = bool(mounted and left_out) or not mounted.isdisjoint(declared)
        return own_statements if self.replaced else spelled

    def replace_inherited(self, statements: Iterable[Statement]) -> tuple[Statement, ...]:
        """Return inherited statements; those that a mounted family declares too are replaced by the mounted ones."""
        mounted = {key for key, _ in self._parts}
        inherited = [
            part for statement in statements for key, part in replaceable_parts(statement) if key not in mounted
        ]
        return (*inherited, *(part for _, part in self._parts))

    def _family(self, statement: Statement) -> list[Statement]:
        match = _MOUNT.fullmatch(statement.text)
        if match is None:
            self._problems.append(statement.problem("'mount FAMILY [as NAME] [from CONFIG_KEY]'"))
            return []
        name, alias, key = match.groups()
        base = self._bases(name)
        if base is None:
            expected = f"a known family after 'mount'; {name!r} is none"
            self._problems.append(statement.problem(expected, name, self._suggest(name)))
            return []
        if (alias or name) in self._mounted:
            self._problems.append(statement.problem("each mounted family once; 'as NAME' gives it another name", name))
            return []
        base_parts = [
            part for each in base.statements if each.head not in IDENTIFYING for part in replaceable_parts(each)
        ]
        names = frozenset(name for (kind, name), _ in base_parts if kind in (AXIS, LET, TENSOR))
        mounted = _Mount(base, f"{alias}_" if alias else "", key or "", names)
        self._mounted[alias or name] = mounted
        return [part for _, each in base_parts for part in mounted.statement(each)]

    def dialect(self, label: str, statements: Sequence[Statement]) -> list[Statement]:
        """Return the statements of a dialect; its own mapping rules replace mounted rules for the same tensors."""
        own_tensors = {name for each in statements if each.kind == LINE and each.head != MOUNT for name in each.tensors}
        left_out = tensors_left_out(statements) | self._left_out
        result: list[Statement] = []
        for statement in statements:
            lines = self._dialect(label, statement) if statement.head == MOUNT else []
            for line in lines:
                self._tensors[label] = self._tensors.get(label, frozenset()).union(line.tensors)
                if (own_tensors | left_out).isdisjoint(line.tensors):
                    result.append(line)
                    self._kept.append(line)
                elif lost := [
                    name for name in line.tensors if name not in own_tensors | left_out and line.kind == LINE
                ]:
                    expected = (
                        f"a line for {', '.join(lost)} too, which would go with the line of the mount: {line.text}"
                    )
                    self._problems.append(statement.problem(expected))
            if statement.head != MOUNT:
                result.append(statement)
        return result

    def tensors(self, label: str) -> frozenset[str]:
        """Return the tensors for which a dialect has a mapping rule from a mounted family."""
        return self._tensors.get(label, frozenset())

    def _dialect(self, label: str, statement: Statement) -> list[Statement]:
        match = _UNDER.fullmatch(statement.text)
        if match is None:
            self._problems.append(statement.problem("'mount NAME under PREFIX. [like DIALECT]'"))
            return []
        name, under, like = match.groups()
        mounted = self._mounted.get(name)
        if mounted is None:
            names = ", ".join(self._mounted) or "none"
            self._problems.append(statement.problem(f"a family that is mounted above: {names}", name))
            return []
        section = find(mounted.base.sections, like or label)
        if section is None:
            expected = f"a dialect of {mounted.base.name} after 'like': {', '.join(mounted.base.sections)}"
            self._problems.append(statement.problem(expected, like or ""))
            return []
        lines = Sections(mounted.base.sections, self._problems).flat(section.label)
        return [mounted.line(line, under) for line in lines]


_ORDER = (MODEL_TYPE, WRAPPER, ALIKE, LET, AXIS, TENSOR, TIE, PRECISE, ADDED, CUT, WITHIN)
"""Order of the kinds of statements in a family that inherits."""
_ARTICLES = {AXIS: "an"}

_SectionStatements = tuple[Section, Sequence[Statement]]


class Replacement(msgspec.Struct, frozen=True):
    """An inherited statement, and the family's own statement that replaces the inherited one."""

    kind: str
    """Kind of the statement: `axis`, `let`, `tensor`, `tie` or `cut`."""
    name: str
    """Name of the axis, formula or tensor that the statement declares."""
    inherited: Statement
    """The inherited statement."""
    replacement: Statement
    """The family's own statement, which replaces the inherited one."""


class Overlay(msgspec.Struct):
    """Combines the declarations of one family or block with the declarations that it inherits."""

    below: FamilyText
    """The inherited family; empty if nothing is inherited."""
    head: Statement
    """Head line of the new family."""
    problems: list[Refusal]
    """List to which errors are appended."""
    mounts: Mounts | None = None
    """The families that the new family mounts; None if the new family mounts no family."""
    adds: bool = False
    """Whether the file only adds dialects to the family, in which case the labels of the dialects must be new."""

    def result(self, statements: Sequence[Statement], sections: Sequence[_SectionStatements]) -> FamilyText:
        """Return the text of the family: the inherited text, in which the family's own statements and dialects replace
        or extend the inherited ones.
        """
        cut_out = [statement for statement in statements if statement.head == WITHOUT]
        narrowed = [statement for statement in statements if statement.head == KEEP]
        own_statements = [statement for statement in statements if statement.head not in (WITHOUT, KEEP)]
        if self.below.empty:
            expected = "a family that is like another: this one takes nothing over"
            self.problems.extend(each.problem(expected, each.head) for each in (*cut_out, *narrowed))
            return replace(self.below, statements=tuple(own_statements), sections=self._with_sections({}, sections, {}))
        inherited = [part for statement in self.below.statements for part in replaceable_parts(statement)]
        gone = self._exclusions(cut_out, inherited)
        merged_statements, replaced = _replace_statements(inherited, own_statements, gone)
        result = self._with_sections(self._select_dialects(narrowed), sections, gone)
        self._refuse_reshaped(result, sections, replaced)
        result_statements = self.below.statements if self.adds else merged_statements
        return replace(self.below, head=self.head, statements=result_statements, sections=result, replaced=replaced)

    def _exclusions(self, cut_out: Sequence[Statement], inherited: Sequence[KeyedPart]) -> dict[Key, Statement]:
        """Return key of each excluded statement -> the `without` statement that excludes it."""
        gone: dict[Key, Statement] = {}
        inherited_keys = {key for key, _ in inherited}
        for statement in cut_out:
            keys = keys_left_out(statement)
            for name in dict.fromkeys(name for _, name in keys):
                keys_found = inherited_keys.intersection(key for key in keys if key[1] == name)
                if not keys_found:
                    kind = keys[0][0]
                    expected = f"{_ARTICLES.get(kind, 'a')} {kind} that it takes over; {name!r} is none"
                    self.problems.append(statement.problem(expected, name))
                gone.update(dict.fromkeys(sorted(keys_found), statement))
        return gone

    def _select_dialects(self, narrowed: Sequence[Statement]) -> dict[str, Section]:
        """Return the inherited dialects to keep; if one is `like` an excluded dialect, it gets that dialect's rules."""
        sections = dict(self.below.sections)
        if not narrowed:
            return sections
        requests = {label: statement for statement in narrowed for label in statement.text.split()[1:]}
        for label, statement in requests.items():
            if find(sections, label) is None:
                message = f"dialects that it takes over, of {', '.join(sections)}; {label!r} is none"
                self.problems.append(statement.problem(message, label))
        sections_left = {label: each for label, each in sections.items() if {label, each.name} & requests.keys()}
        whole = Sections(sections, self.problems)
        for label, section in sections_left.items():
            if section.like is not None and find(sections_left, section.like) is not find(sections, section.like):
                statements = whole.gather(label)
                sections_left[label] = replace(section, like=None, renames=(), used=frozenset(), statements=statements)
        return sections_left

    def _with_sections(
        self,
        inherited: dict[str, Section],
        sections: Sequence[_SectionStatements],
        gone: Mapping[Key, Statement],
    ) -> dict[str, Section]:
        """Return the inherited dialects, extended by the family's own dialects."""
        result = dict(inherited)
        tensors_gone = {name: statement for (kind, name), statement in gone.items() if kind == TENSOR}
        own_labels: set[str] = set()
        for section, statements in sections:
            problem = self._head_fault(section, result, own_labels)
            if problem is not None:
                self.problems.append(problem)
                continue
            own_labels.add(section.label)
            whole = replace(section, statements=tuple(statements))
            removable = (
                _tensors_taken(whole, result)
                if any(section_below.head == WITHOUT for section_below in statements)
                else frozenset()
            )
            if self.mounts is not None:
                removable |= self.mounts.tensors(section.label)
            for statement in (section_below for section_below in statements if section_below.head == WITHOUT):
                for name in statement.text.split()[1:]:
                    if name not in removable:
                        expected = f"a tensor that this dialect takes over; {name!r} is none"
                        self.problems.append(statement.problem(expected, name))
            below = result.get(section.label)
            result[section.label] = (
                whole if below is None else overlay_section(below, whole, tensors_gone, self.problems)
            )
        if tensors_gone:
            cause = next(iter(tensors_gone.values()))
            for label in [label for label in result if label not in own_labels]:
                section_below = result[label]
                statements_left = overlay_statements(section_below.statements, (), cause, tensors_gone, self.problems)
                result[label] = replace(section_below, statements=statements_left)
        return result

    def _head_fault(self, section: Section, above: Mapping[str, Section], own_labels: set[str]) -> Refusal | None:
        """Return the error for the head line of a dialect; None if the line is valid."""
        versions = [each.version for each in above.values() if each.name == section.name]
        continues = section.label in above and section.label not in own_labels and not self.adds
        clashes = section.version in versions or (bool(versions) and None in (section.version, *versions))
        if clashes and not continues:
            expected = f"a new dialect, or another version; {section.name!r} is declared already"
            return section.head.problem(expected, section.name)
        labels = list(above)
        before = labels[: labels.index(section.label)] if continues else labels
        if section.like is not None and find({label: above[label] for label in before}, section.like) is None:
            expected = f"a dialect after 'like'; this family has: {', '.join(before)}"
            return section.head.problem(expected, section.like)
        of_block = self.head.head == BLOCK or section.head.owner != self.head.owner
        if section.renames and section.like is None and not continues and not of_block:
            return section.head.problem("'like DIALECT' before new prefixes: this dialect takes nothing over")
        return None

    def _refuse_reshaped(
        self, result: Mapping[str, Section], sections: Sequence[_SectionStatements], replaced: Iterable[Replacement]
    ) -> None:
        """Refuse inherited mapping rules of a tensor whose axes changed, as these rules might parse with a new
        meaning.
        """
        reshaped = {
            each.name: each.replacement
            for each in replaced
            if each.kind == TENSOR and own_axes(each.inherited) != own_axes(each.replacement)
        }
        if not reshaped:
            return
        mounted = frozenset() if self.mounts is None else self.mounts.lines
        own_lines = {id(statement) for _, statements in sections for statement in statements} - mounted
        for label, section in result.items():
            for statement in section.statements:
                for name in statement.tensors:
                    if name in reshaped and id(statement) not in own_lines:
                        why = f"with other axes than before, {name} cannot take over {statement.text!r}"
                        expected = f"a line for {name} in dialect {label} too: {why}"
                        self.problems.append(reshaped[name].problem(expected))


def without_unused(family: FamilyText, own_statements: Iterable[Statement]) -> FamilyText:
    """Remove inherited axes that no statement of a family uses, such as the size of padding in mapping rules that are
    gone.

    Args:
        family: the family, including everything that it inherits.
        own_statements: the family's own statements; axes that are declared in these statements are kept.
    """
    declared = {
        name for statement in own_statements for (kind, name), _ in replaceable_parts(statement) if kind == AXIS
    }
    sizes: dict[str, set[str]] = {}
    used = set(declared)
    for statement in family.statements:
        for (kind, name), part in replaceable_parts(statement):
            words = set(re.findall(WORD, re.split("[=:]", part.text, maxsplit=1)[-1] if kind != AXIS else ""))
            if kind == AXIS:
                sizes[name] = set(re.findall(WORD, part.text.partition("=")[2])) - {name}
            used |= words
    for section in family.sections.values():
        for statement in section.statements:
            name, _, tail = statement.text.partition("=")
            used.update(re.findall(WORD, f"{' '.join(_HOLE.findall(name))} {tail}"))
    waiting = [name for name in sizes if name in used]
    while waiting:
        new = sizes[waiting.pop()] & sizes.keys() - used
        used |= new
        waiting += new
    unused = sizes.keys() - used
    if not unused:
        return family
    parts = [each for statement in family.statements for each in replaceable_parts(statement)]
    return replace(family, statements=tuple(part for (kind, name), part in parts if kind != AXIS or name not in unused))


def _tensors_taken(section: Section, above: Mapping[str, Section]) -> frozenset[str]:
    """Return the tensors for which a dialect has an inherited mapping rule."""
    every = Sections(above, [])
    if section.like is None:
        return every.tensors(section.label) if section.label in above else frozenset()
    base = find(above, section.like)
    return frozenset() if base is None else every.tensors(base.label)


def _replace_statements(
    inherited: Sequence[KeyedPart], declared: Sequence[Statement], gone: Mapping[Key, Statement]
) -> tuple[tuple[Statement, ...], tuple[Replacement, ...]]:
    """Replace inherited statements by the family's own ones; return the resulting statements, and the replacements."""
    own_parts = [part for statement in declared for part in replaceable_parts(statement)]
    by_key: dict[Key, list[Statement]] = {}
    for key, statement in own_parts:
        by_key.setdefault(key, []).append(statement)
    tensors_gone = {name for kind, name in gone if kind == TENSOR}
    by_kind: dict[str, list[Statement]] = {kind: [] for kind in _ORDER}
    replaced: dict[Key, Replacement] = {}
    for key, statement in inherited:
        kind, name = key
        if key in by_key:
            if key not in replaced:
                by_kind[kind].extend(by_key[key])
                replaced[key] = Replacement(kind, name, statement, by_key[key][0])
        elif key not in gone:
            by_kind[kind].extend(_without(key, statement, tensors_gone))
    for key, statements in by_key.items():
        if key not in replaced:
            by_kind[key[0]].extend(statements)
    for kind in (LET, AXIS):
        by_kind[kind] = in_order(by_kind[kind])
    differing = (each for each in replaced.values() if each.inherited.text.split() != each.replacement.text.split())
    shown = tuple(each for each in differing if each.kind not in (*IDENTIFYING, PRECISE))
    return tuple(statement for kind in _ORDER for statement in by_kind[kind]), shown


def _without(key: Key, statement: Statement, gone: set[str]) -> tuple[Statement, ...]:
    """Return a statement without the excluded tensors; the result is empty if no other tensors are left in it."""
    kind, name = key
    if kind in (PRECISE, ADDED) and name in gone:
        return ()
    if kind == TIE and gone & {name, split_when(statement.text)[0].partition("=")[2].strip()}:
        return ()
    if kind == CUT and gone:
        head, of, tensors = statement.text.partition(" of ")
        if of:
            tensors_left = [tensor for tensor in tensors.split() if tensor not in gone]
            return (statement.with_text(f"{head} of {' '.join(tensors_left)}"),) if tensors_left else ()
    return (statement,)


_FAMILY = re.compile(rf"({FAMILY}|{BLOCK})\s+({WORD})(?:\s+like\s+({WORD}(?:\s*,\s*{WORD})*))?")
_MOST_LINES, _LONGEST_LINE, _MOST_DIALECTS = 10_000, 1_000, 100
"""Limits for one file, which may be from anybody. The longest built-in table has 200 lines of up to 142 characters."""


@dataclass(frozen=True)
class FamilyText:
    """A family or block as text, including everything that it inherits."""

    head: Statement
    """First line of the table, `family …` or `block …`."""
    name: str
    """Name of the family or block."""
    block: bool
    """Whether this is a block: statements that families inherit, but not a family."""
    like: tuple[str, ...] = ()
    """Names after `like`: families and blocks from which this one inherits, in order."""
    statements: tuple[Statement, ...] = ()
    """Statements of the family, including inherited statements."""
    sections: Mapping[str, Section] = field(default_factory=dict)
    """Label -> dialect, in order, including inherited dialects."""
    replaced: tuple[Replacement, ...] = ()
    """Inherited statements that the family's own statements replace, each with its replacement."""

    @property
    def empty(self) -> bool:
        """Whether the family has neither statements nor dialects."""
        return not self.statements and not self.sections

    def spell_out(self) -> str:
        """Return the whole table as text without inheritance."""
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


Bases = Callable[[str], FamilyText | None]
"""Function from a name after `like` to the text of that family or block; the result is None if there is none."""


class TableFile(msgspec.Struct):
    """The families in one rules file."""

    families: dict[str, FamilyText] = msgspec.field(default_factory=dict)
    """Name -> family or block that the file declares, in order, including everything that it inherits."""
    extended: dict[str, FamilyText] = msgspec.field(default_factory=dict)
    """Name -> family that a different file declares, with the dialects that this file adds."""
    new_labels: dict[str, list[str]] = msgspec.field(default_factory=dict)
    """Name of a family in `extended` -> labels of the dialects that this file adds."""
    problems: list[Refusal] = msgspec.field(default_factory=list)
    """Errors of the faulty statements in the file."""


class _FileReader:
    """Splits the statements of a file into families and dialects."""

    def __init__(self, file: str, known_families: Iterable[str], bases: Bases) -> None:
        self.file = file
        self.known = known_families
        self.bases = bases
        self.result = TableFile()
        self.parse_head = 0
        self.declarations: dict[str, _Declaration] = {}
        self.current: _Declaration | None = None
        self.section: list[Statement] | None = None
        self.skipping = False
        self.failed = False

    def read(self, text: str) -> TableFile:
        for number, raw in enumerate(text.splitlines(), 1):
            if number > _MOST_LINES or len(raw) > _LONGEST_LINE:
                message = f"a table has at most {_MOST_LINES:,} lines, of at most {_LONGEST_LINE:,} characters each"
                where = Where(f"{self.file}, line {number}")
                self.result.problems.append(Refusal("CORRUPT", message, where, "Is this file a table?"))
                break
            content = raw.split("#", 1)[0].strip()
            if content:
                owner = self.current.name if self.current is not None else ""
                statement = Statement(content, raw, self.file, number, owner)
                try:
                    self._statement(statement)
                except TransaxleError as error:
                    self._keep(statement, error)
        for declaration in self.declarations.values():
            declaration.finish(self)
        return self.result

    def suggest(self, name: str) -> str:
        """Return a hint with known names that are similar to an unknown name."""
        close = get_close_matches(name, [*self.known, *self.declarations], 3)
        return f"Did you mean {' or '.join(close)}?" if close else "`transaxle families` lists the built-in families."

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
            raise statement.fail("'family NAME' or 'dialect NAME of FAMILY' before anything else")

    def _open_family(self, head: Statement) -> None:
        self.current, self.section, self.skipping, self.failed = None, None, True, True
        match = _FAMILY.fullmatch(head.text)
        if match is None:
            word = head.head
            raise head.fail(f"'{word} NAME' or '{word} NAME like NAME, NAME'")
        kind, name, like = match.groups()
        if name in self.declarations:
            raise head.fail(f"each family once; {name!r} is declared above", name)
        self.skipping = self.failed = False
        bases = tuple(word.strip() for word in like.split(",")) if like else ()
        self.current = self.declarations[name] = _Declaration(
            Statement(head.text, head.raw, head.file, head.line, name), name, kind == BLOCK, bases
        )

    def _open_dialect(self, head: Statement) -> None:
        self.section, self.skipping = None, True
        section = parse_head(head)
        owner = section.owner
        if owner is not None:
            if owner not in self.declarations:
                if owner not in self.known:
                    raise head.fail(f"a known family after 'of'; {owner!r} is none", owner, self.suggest(owner))
                self.declarations[owner] = _Declaration(head, owner, block=False, like=(owner,), adds=True)
            self.current = self.declarations[owner]
        elif self.current is None and self.failed:
            return
        if self.current is None:
            raise head.fail("'of FAMILY': the file names no family above")
        self.parse_head += 1
        if self.parse_head > _MOST_DIALECTS:
            raise head.fail(f"at most {_MOST_DIALECTS} dialects in one file", section.name)
        self.section = []
        self.current.sections.append((section, self.section))
        self.skipping = False


class _Declaration(msgspec.Struct):
    """The declarations of one family in a file, before inheritance is resolved."""

    head: Statement
    """First line: `family …`, `block …`, or `dialect … of FAMILY`."""
    name: str
    """Name of the family or block."""
    block: bool
    """Whether this is a block: statements that families inherit, but not a family."""
    like: tuple[str, ...]
    """Names after `like`: families and blocks from which this one inherits, in order."""
    adds: bool = False
    """Whether the family is declared in a different file, and this file only adds dialects."""
    statements: list[Statement] = msgspec.field(default_factory=list)
    """The family's own statements, in order."""
    sections: list[tuple[Section, list[Statement]]] = msgspec.field(default_factory=list)
    """Dialects, each with the statements below its head line."""

    def finish(self, reader: _FileReader) -> None:
        """Resolve inheritance and mounts, and store the resulting family in the reader's result."""
        problems = reader.result.problems
        below = FamilyText(self.head, self.name, self.block, self.like)
        for base in self.like:
            base_family = self._find(reader, base)
            if base_family is None:
                expected = f"a family or a block after 'like', declared above or known; {base!r} is none"
                problems.append(self.head.problem(expected, base, reader.suggest(base)))
            elif self.adds:
                below = replace(base_family, head=self.head)
            elif below.empty:
                below = replace(
                    below, statements=_inheritable(base_family.statements), sections=dict(base_family.sections)
                )
            else:
                over = [(section, section.statements) for section in base_family.sections.values()]
                below = Overlay(below, self.head, problems).result(_inheritable(base_family.statements), over)
        mounts = Mounts(partial(self._find, reader), reader.suggest, problems)
        statements = mounts.family(self.statements)
        if mounts.replaced:
            below = replace(below, statements=mounts.replace_inherited(below.statements))
        sections = [(section, mounts.dialect(section.label, lines)) for section, lines in self.sections]
        ready = Overlay(below, self.head, problems, mounts, self.adds).result(statements, sections)
        if self.adds:
            reader.result.extended[self.name] = ready
            reader.result.new_labels[self.name] = [label for label in ready.sections if label not in below.sections]
        else:
            takes_over = bool(self.like) or MOUNT in (statement.head for statement in self.statements)
            own_statements = [
                statement for statement in self.statements if statement.head not in (MOUNT, WITHOUT, KEEP)
            ]
            whole = ready if self.block or not takes_over else without_unused(ready, own_statements)
            reader.result.families[self.name] = whole

    def _find(self, reader: _FileReader, name: str) -> FamilyText | None:
        """Return the family or block with a name: from further up in the file, or from the known ones."""
        above = reader.result.families.get(name)
        return above if above is not None or (name in reader.declarations and name != self.name) else reader.bases(name)


def _inheritable(statements: Iterable[Statement]) -> tuple[Statement, ...]:
    return tuple(statement for statement in statements if statement.head not in IDENTIFYING)


def read(text: str, file: str, known_families: Iterable[str], bases: Bases) -> TableFile:
    """Read the families and dialects in a rules file as text.

    Args:
        text: contents of the file.
        file: name of the file, for error messages.
        known_families: names of the families that `dialect … of FAMILY` may extend.
        bases: function that returns families and blocks from other files.
    """
    return _FileReader(file, known_families, bases).read(text)


class TableFiles:
    """Rules files that may inherit from each other; a file is read when a name in it is first requested.

    Args:
        homes: name of each family and block -> name of the file that contains it.
        text: function that returns the contents of a file.
    """

    def __init__(self, homes: Mapping[str, str], text: Callable[[str], str]) -> None:
        self._homes = homes
        self._text = text
        self._files: dict[str, TableFile] = {}
        self._reading = RLock()

    def base(self, name: str) -> FamilyText | None:
        """Return a family or block as text, including everything that it inherits; None if no file has it."""
        file = self._homes.get(name)
        return None if file is None else self._file(file).families.get(name)

    def _file(self, name: str) -> TableFile:
        with self._reading:
            if name not in self._files:
                # empty while the file is read, so that files that inherit from each other do not recurse
                self._files[name] = TableFile()
                self._files[name] = read(self._text(name), name, (), self.base)
            return self._files[name]
