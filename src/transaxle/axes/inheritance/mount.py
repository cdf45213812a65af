"""Mounted tables: another family as a part of one, such as a vision tower beside a language model.

family llava
mount llama from text_config                  # with its own names; its config keys are those in text_config
mount vit as vision from vision_config        # its axes, tensors and formulas are called vision_l, vision_q, …
dialect hf
mount llama under language_model.             # the lines of its dialect hf, with this before every name
mount vision under vision_tower. like hf
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from transaxle.axes.inheritance.section import Sections, find
from transaxle.axes.inheritance.statement import (
    AXES,
    AXIS,
    CUT,
    ENCODINGS,
    IDENTIFYING,
    IGNORE,
    KEEP,
    LET,
    LINE,
    LOSSY,
    MOUNT,
    PRECISE,
    TENSOR,
    TIE,
    WITHIN,
    WITHOUT,
    WORD,
    Key,
    Keyed,
    Statement,
    keyed,
    left_out_of,
    split_when,
    tensors_left_out,
)
from transaxle.errors import Refusal

if TYPE_CHECKING:
    from transaxle.axes.inheritance.written import Written

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
