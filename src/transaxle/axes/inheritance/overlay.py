"""Overlays: what a family says itself, laid over what it takes over from others and from tables that it mounts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from transaxle.axes.inheritance.mount import Mounts
from transaxle.axes.inheritance.section import Section, Sections, find, laid_over, merged
from transaxle.axes.inheritance.statement import (
    ADDED,
    ALIKE,
    AXIS,
    BLOCK,
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
    Key,
    Keyed,
    Statement,
    in_order,
    keyed,
    left_out_of,
    own_axes,
    split_when,
)
from transaxle.errors import Refusal

if TYPE_CHECKING:
    from transaxle.axes.inheritance.written import Written

_ORDER = (MODEL_TYPE, WRAPPER, ALIKE, LET, AXIS, TENSOR, TIE, PRECISE, ADDED, CUT, WITHIN)
"""Order of a family's statements where it takes some over."""
_ARTICLES = {AXIS: "an"}
_HOLE = re.compile(r"\{[^{}]*\}")
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
