"""The text format of rules files, which describe families and dialects, and its parser.

    family toy
      model_type toy
      wrapper toy_vl                             # larger models that contain a toy model in their text_config
      alike game                                 # a family with the same names, which names alone are taken for
      axes  l=num_layers d=hidden_size f=intermediate_size
      axis  r = heads[l] // kv_heads              # a single axis, whose formula may contain spaces
      up    : l f d
      bias  : l f            when mlp_bias
      extra : l f            optional            # in all layers or in none
      let sparse = (l + 1) % step == 0           # a formula with a name
      tie head = embed       when tie_word_embeddings
      precise extra                              # keeps its dtype when all other tensors are cast
      added bias             when up             # a tensor of zeros means the same as no tensor
      cut tp = f                                 # an axis that tensor-parallel ranks may divide among them
      cut tp = d of extra                        # an axis that may be divided in one tensor only
      cut tp@fancy = none of extra               # in the dialect fancy, every rank has the whole tensor
      cut ep = e of up                           # an axis that expert-parallel ranks may divide among them

    dialect hf
      layers.{l}.up.weight = up[f d]
      layers.{l}.up.bias   = bias[f]              when mlp_bias
      ignore layers.{l}.inv_freq
    dialect fancy 2.0
      blocks.{l}.w = up[d f]                      when not mxfp4
      blocks.{l}.w = up[f d]                      when mxfp4   # for tensors that are stored in the encoding mxfp4

The modules `written` and `section` resolve inheritance (`like`) before the statements are parsed here. A file contains
families, or only further dialects of a known family (`dialect … of FAMILY`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from msgspec import structs

from transaxle.axes.notation import computed, written
from transaxle.axes.notation.expression import parse
from transaxle.axes.notation.family import (
    WORDS,
    Arithmetic,
    Cuttable,
    Dialect,
    Family,
    Formula,
    Line,
    LogicalTensor,
    Tie,
)
from transaxle.axes.notation.name import Name
from transaxle.axes.notation.overlap import find_overlaps, tie_fault
from transaxle.axes.notation.section import Section, Sections
from transaxle.axes.notation.statement import (
    ALSO,
    ELSE_ZEROS,
    HINT,
    IGNORE,
    LOSSY,
    NONE,
    STATE,
    WORD,
    Statement,
    split_when,
)
from transaxle.axes.notation.written import Bases, FamilyText, TableFile
from transaxle.errors import Refusal, TransaxleError, Where, gathered

_LIKE = re.compile(rf"like\s+{WORD}(?:@[\w.]+)?")
_AXES = re.compile(rf"({WORD})(?:=(\S+))?")
_NAMED = re.compile(rf"\w+\s+({WORD})\s*=(.+)")
_TENSOR = re.compile(rf"({WORD})\s*:\s*((?:{WORD}\s*)*)")
_TIE = re.compile(rf"tie\s+({WORD})\s*=\s*({WORD})")
_CUT_ITEM = rf"{WORD}\b|\((?:\s*{WORD}\b)+\s*\)"
_CUT = re.compile(rf"cut\s+((?:tp|ep)(?:@{WORD})?)\s*=((?:\s*(?:{_CUT_ITEM}))+?)(?:\s+of((?:\s+{WORD}\b)+))?")
_WITHIN = re.compile(rf"cut\s+tp\s*=\s*({WORD})\s+within\s+({WORD})")
_MOST_PROBLEMS = 100
"""Maximum number of syntax errors that are reported."""


class _TableParser:
    """Parses the statements of one rules file; collects all syntax errors, with line and column, instead of
    stopping.
    """

    def __init__(self, known_families: Mapping[str, Family], file: str, *, checked: bool) -> None:
        self.known = known_families
        self.made: dict[str, Family] = {}
        self.file = file
        self.checked = checked
        self.problems: list[Refusal] = []
        self.family: Family | None = None
        self.dialect: Dialect | None = None
        # State of the current family. The record of the family refers to the first three dicts, which grow statement by
        # statement.
        self.sizes: dict[str, Formula | None] = {}
        self.tensors: dict[str, LogicalTensor] = {}
        self.let_formulas: dict[str, Formula] = {}
        self.ties: dict[str, list[Tie]] = {}
        self.used: set[str] = set()
        self.always: set[Name] = set()
        self.places: dict[Line, Statement] = {}
        self.lines: dict[tuple[str, str, int], Line] = {}
        self.current = Statement("", "", file, 1)
        self.statements = {
            "model_type": self.model_type,
            "wrapper": self.wrapper,
            "alike": self.alike,
            "axes": self.axes,
            "axis": self.axis,
            "let": self.let,
            "tie": self.tie,
            "cut": self.cut,
            "precise": self.precise,
            "added": self.added,
        }

    def read(self, file: TableFile) -> list[Family]:
        self.problems.extend(file.problems)
        for owner in file.families.values():
            if not owner.block:
                self.open_family(owner)
                self.read_dialects(owner, tuple(owner.sections))
        for name, added in file.extended.items():
            self.lines = {}
            self.touch(structs.replace(self.known[name], text=partial(_itself, added)))
            self.read_dialects(added, file.new_labels[name])
        if self.problems:
            raise gathered(self.sort_problems())
        return list(self.made.values())

    def sort_problems(self) -> list[Refusal]:
        """Return the problems in the order of the file's lines, then problems of other files, up to a maximum
        number.
        """
        pattern = re.compile(r"(.*), line ([0-9]+)")

        def place(refusal: Refusal) -> tuple[bool, str, int]:
            match = pattern.fullmatch(refusal.where.file or "")
            return (True, "", 0) if match is None else (match[1] != self.file, match[1], int(match[2]))

        problems = sorted(dict.fromkeys(self.problems), key=place)
        if len(problems) < _MOST_PROBLEMS:
            return problems
        omitted = f"there is more: these are the first {_MOST_PROBLEMS} problems"
        return [*problems[:_MOST_PROBLEMS], Refusal("CORRUPT", omitted, Where(self.file))]

    def run(self, statement: Statement) -> None:
        """Parse one statement of the current family or dialect."""
        if len(self.problems) >= _MOST_PROBLEMS:
            return
        self.current = statement
        try:
            if self.dialect is not None:
                self.dialect_line(statement.text)
            else:
                self.statements.get(statement.head, self.tensor)(statement.text)
        except TransaxleError as error:
            self.keep(error)

    def keep(self, error: TransaxleError) -> None:
        hint = ""
        if self.family is not None and self.current.owner not in ("", self.family.name):
            hint = f"Family {self.family.name} takes this over from {self.current.owner}: say it anew, or leave it out."
        self.problems.extend(
            replace(refusal, where=self.current.where, hint=hint or refusal.hint) for refusal in error.refusals
        )

    @property
    def raw(self) -> str:
        """Line of the current statement, exactly as in the rules file."""
        return self.current.raw

    def fail(self, fail: str, word: str = "", hint: str = HINT) -> TransaxleError:
        """Build the error for the current statement; `word` is the faulty text in the statement."""
        return self.current.fail(fail, word, hint)

    def problem(self, fail: str, word: str = "") -> None:
        """Add a problem with the current statement, and continue to parse the statement."""
        if len(self.problems) < _MOST_PROBLEMS:
            self.keep(self.fail(fail, word))

    def formula(self, text: str) -> Formula:
        formula = Formula(text.strip(), self.family.let_formulas if self.family else {})
        try:
            names = formula.names  # parses the formula, so that its errors refer to this statement
        except TransaxleError as error:
            raise self.fail(f"a formula; {error.refusals[0].message}", formula.text) from None
        for word in sorted(names.intersection(WORDS)) if self.dialect is None else ():
            self.problem(f"no encoding here: only a line of a dialect may depend on {word!r}", word)
        self.used |= names
        return formula

    def refuse_reserved(self, name: str) -> None:
        if name in WORDS:
            self.problem(f"another name: {name!r} is reserved for an encoding", name)

    def split_when(self, text: str) -> tuple[str, Formula | None]:
        """Split a statement from its condition; the condition is None if it is always true."""
        statement, condition = split_when(text)
        when = None if condition is None else self.formula(condition)
        return statement, None if when is not None and when.always else when

    def touch(self, family: Family) -> None:
        """Store a changed copy of the current family under the family's name."""
        self.family = self.made[family.name] = family

    # Families.

    def open_family(self, owner: FamilyText) -> None:
        self.dialect = None
        self.sizes, self.tensors, self.let_formulas, self.ties, self.used, self.lines = {}, {}, {}, {}, set(), {}
        name = owner.name
        self.touch(
            Family(
                name, (name,), self.sizes, self.tensors, let_formulas=self.let_formulas, text=partial(_itself, owner)
            )
        )
        for statement in owner.statements:
            self.run(statement)

    def model_type(self, text: str) -> None:
        assert self.family is not None
        self.touch(structs.replace(self.family, model_types=tuple(text.split()[1:])))

    def wrapper(self, text: str) -> None:
        assert self.family is not None
        self.touch(structs.replace(self.family, wrappers=tuple(text.split()[1:])))

    def alike(self, text: str) -> None:
        assert self.family is not None
        words = text.split()[1:]
        if len(words) != 1:
            raise self.fail("'alike FAMILY'")
        self.touch(structs.replace(self.family, alike=words[0]))

    def axes(self, text: str) -> None:
        for item in text.split()[1:]:
            match = _AXES.fullmatch(item)
            if match is None:
                self.problem("axes as NAME or NAME=FORMULA without spaces, or 'axis NAME = FORMULA'", item)
            else:
                self.add_axis(match[1], match[2])

    def axis(self, text: str) -> None:
        match = _NAMED.fullmatch(text)
        if match is None:
            raise self.fail("'axis NAME = FORMULA'")
        self.add_axis(match[1], match[2])

    def add_axis(self, name: str, formula: str | None) -> None:
        self.refuse_reserved(name)
        if name in self.sizes:
            self.problem(f"each axis once; {name!r} is declared above", name)
            return
        try:
            size = None if formula is None else self.formula(formula)
        except TransaxleError as error:
            self.keep(error)
            size = None
        self.sizes[name] = size

    def let(self, text: str) -> None:
        match = _NAMED.fullmatch(text)
        if match is None:
            raise self.fail("'let NAME = FORMULA'")
        name = match[1]
        self.refuse_reserved(name)
        if name in self.let_formulas or name in self.used:
            raise self.fail(f"each 'let' once, and before {name!r} is used", name)
        self.let_formulas[name] = self.formula(match[2])

    def tie(self, text: str) -> None:
        assert self.family is not None
        statement, when = self.split_when(text)
        match = _TIE.fullmatch(statement)
        if match is None:
            raise self.fail("'tie TENSOR = TENSOR' or 'tie TENSOR = TENSOR when CONDITION'")
        for name in match.groups():
            if name not in self.family.tensors:
                raise self.fail(f"a tensor of the family, declared above; {name!r} is none", name)
        tie = Tie(match[1], match[2], when or Formula("True"))
        fault = "" if self.checked else tie_fault(tie, self.ties)
        if fault:
            raise self.fail(fault, tie.alias)
        self.ties.setdefault(tie.alias, []).append(tie)
        self.touch(structs.replace(self.family, ties=(*self.family.ties, tie)))

    def cut(self, text: str) -> None:
        assert self.family is not None
        nested = _WITHIN.fullmatch(text)
        if nested is not None:
            inner, outer = nested.groups()
            for axis in sorted({inner, outer} - self.family.axes.keys()):
                self.problem(f"declared axes only; {axis!r} is not in 'axes'", axis)
            self.touch(structs.replace(self.family, within={**self.family.within, outer: inner}))
            return
        match = _CUT.fullmatch(text)
        if match is None:
            forms = "'cut tp = AXIS …', 'cut tp = AXIS … of TENSOR …' or 'cut tp = AXIS within AXIS'"
            raise self.fail(f"{forms}; '(AXIS AXIS)' counts through both; 'ep' and 'tp@DIALECT' are meshes too")
        mesh, items, owners = match.groups()
        tensors = None if owners is None else frozenset(owners.split())
        for name in sorted((tensors or frozenset()) - self.family.tensors.keys()):
            self.problem(f"a tensor of the family, declared above; {name!r} is none", name)
        axes = [tuple(item.strip("()").split()) for item in re.findall(_CUT_ITEM, items)]
        if axes == [(NONE,)] and tensors is not None:
            axes = [()]
        for axis in sorted({axis for names in axes for axis in names} - self.family.axes.keys()):
            self.problem(f"declared axes only; {axis!r} is not in 'axes'", axis)
        cuts = tuple(Cuttable(mesh, names, tensors) for names in axes)
        if mesh == "tp":
            self.touch(structs.replace(self.family, cuts=self.family.cuts + cuts))
        else:
            self.touch(structs.replace(self.family, other_cuts=self.family.other_cuts + cuts))

    def precise(self, text: str) -> None:
        assert self.family is not None
        names = text.split()[1:]
        for name in names:
            if name not in self.family.tensors:
                raise self.fail(f"a tensor of the family, declared above; {name!r} is none", name)
        self.touch(structs.replace(self.family, precise=self.family.precise.union(names)))

    def added(self, text: str) -> None:
        assert self.family is not None
        statement, when = self.split_when(text)
        _, *names = statement.split()
        if len(names) != 1 or names[0] not in self.family.tensors:
            raise self.fail("'added TENSOR' or 'added TENSOR when CONDITION', with a tensor declared above")
        added = {**self.family.added, names[0]: when or Formula("True")}
        self.touch(structs.replace(self.family, added=added))

    def tensor(self, text: str) -> None:
        assert self.family is not None
        statement, when = self.split_when(text)
        match = _TENSOR.fullmatch(statement)
        if match is None:
            fail = f"{', '.join(map(repr, self.statements))} or 'TENSOR : AXES'"
            head, *words = statement.split()
            colon_forgotten = any(word in self.family.axes for word in words) and not {":", "="} & set(statement)
            raise self.fail(fail, hint=f"Is a ':' missing after {head!r}?" if colon_forgotten else HINT)
        name, axes = match[1], tuple(match[2].split())
        self.refuse_reserved(name)
        if name in self.family.tensors:
            raise self.fail(f"each tensor once; {name!r} is declared above", name)
        for axis, times in Counter(axes).items():
            if axis not in self.family.axes:
                self.problem(f"declared axes only; {axis!r} is not in 'axes'", axis)
            if times > 1:
                self.problem(f"each axis of {name!r} once", axis)
        self.tensors[name] = LogicalTensor(name, axes, when)

    # Dialects.

    def read_dialects(self, owner: FamilyText, labels: Sequence[str]) -> None:
        """Parse dialects of the current family, with the mapping rules that they inherit."""
        problems: list[Refusal] = []
        spelled = Sections(owner.sections, problems)
        for label in labels:
            self.open_dialect(owner.sections[label])
            for statement in spelled.flat(label):
                self.run(statement)
            self.close_dialect(owner.sections[label])
        self.problems.extend(problems)

    def open_dialect(self, section: Section) -> None:
        self.dialect, self.always = Dialect(section.name, section.version, ()), set()

    def close_dialect(self, section: Section) -> None:
        """Check whether mapping rules of the current dialect match the same names, and add the dialect to its
        family.
        """
        assert self.dialect is not None
        assert self.family is not None
        dialect = self.dialect
        self.current = section.head
        try:
            for first, second, name in () if self.checked else find_overlaps(dialect.lines, self.family):
                message = f"{first.text}\n{second.text}\nboth lines match {name!r} (dialect {dialect.label})"
                hint = (
                    "Give both lines conditions (when ...) that exclude each other, or write one line for all these "
                    "names."
                )
                self.problems.append(Refusal("CORRUPT", message, self.places[second].where, hint))
        except TransaxleError as error:
            self.keep(error)
        self.touch(structs.replace(self.family, dialects=(*self.family.dialects, dialect)))
        self.dialect = None

    def dialect_line(self, text: str) -> None:
        assert self.dialect is not None
        if self.current.kind == IGNORE:
            pattern = text.removeprefix(IGNORE).strip()
            name = Name(pattern, max(self.raw.find(pattern), 0))
            _ = name.holes  # parses the pattern, so that its errors refer to this statement
            self.dialect = structs.replace(self.dialect, ignored=(*self.dialect.ignored, name))
            return
        line = self.lines.get(self.current.key)
        if line is None:
            line = self.line(text)
            if not self.checked:
                self.check(line)
            self.lines[self.current.key] = line
            self.places[line] = self.current
        if not self.checked:
            self.check_name(line)
        self.dialect = structs.replace(self.dialect, lines=(*self.dialect.lines, line))

    def line(self, text: str) -> Line:
        """Parse a mapping rule of a dialect."""
        kind = self.current.kind if self.current.kind in (ALSO, STATE) else ""
        statement, when = self.split_when(text.removeprefix(kind))
        else_zeros = statement.endswith(ELSE_ZEROS)
        statement, lossy, arithmetic = statement.removesuffix(ELSE_ZEROS).partition(LOSSY)
        pattern, equals, expression = statement.partition("=")
        if not equals:
            raise self.fail("'stored.name = expression'", hint=self.like_hint(text))
        start = self.raw.index("=") + 1
        start += len(self.raw[start:]) - len(self.raw[start:].lstrip())
        pattern = pattern.strip()
        name = Name(pattern, max(self.raw.find(pattern), len(self.raw) - len(self.raw.lstrip())))
        changed = self.arithmetic(arithmetic) if lossy else None
        stored = parse(expression.strip(), start, checked=self.checked)
        if else_zeros and not (self.family and set(stored.components) <= self.family.added.keys()):
            raise self.fail(f"{ELSE_ZEROS.strip()!r} only of tensors that are 'added'", "zeros")
        return Line(name, stored, when, changed, kind != "", kind == STATE, else_zeros)

    def like_hint(self, text: str) -> str:
        """Return the hint for a line that is not a mapping rule. It explains where `like DIALECT` belongs, or where the
        grammar is documented.
        """
        assert self.family is not None
        assert self.dialect is not None
        if _LIKE.fullmatch(text) is None:
            return HINT
        version = f" {self.dialect.version}" if self.dialect.version else ""
        owner = f" of {self.family.name}" if self.family.name in self.known else ""
        return f"write it in the first line: dialect {self.dialect.name}{version}{owner} {' '.join(text.split())}"

    def check(self, line: Line) -> None:
        """Refuse a mapping rule with an unknown tensor or axis, or one that lacks an axis of its tensor."""
        assert self.family is not None
        assert self.dialect is not None
        in_name, in_dims = set(line.name.axes), line.expression.axes
        for axis in sorted((in_name | in_dims) - self.family.axes.keys()):
            self.problem(f"declared axes only; {axis!r} is not in 'axes'", axis)
        for axis in sorted(in_name & in_dims):
            self.problem(f"each axis in the name or in the dims; {axis!r} is in both", axis)
        for axis in sorted({axis for hole in line.name.holes for axis in hole.inner}):
            size = self.family.axes.get(axis)
            if size is not None and not size.names.isdisjoint(line.name.axes):
                self.problem(f"axes of one size each after the first in '( )'; the size of {axis!r} varies", axis)
        for shift in sorted({hole.shift_axis for hole in line.name.holes if hole.shift_axis}):
            if shift not in self.family.axes:
                self.problem(f"a number or a declared axis after '+' or '-'; {shift!r} is none", shift)
        for name in line.expression.components:
            tensor = self.family.tensors.get(name)
            if tensor is None:
                self.problem(f"a tensor of family {self.family.name}; {name!r} is none", name)
                continue
            placed_axes = in_name.union(line.expression.axes_of(name))
            unplaced = [axis for axis in tensor.axes if axis not in placed_axes]
            if unplaced:
                self.problem(f"every axis of {name!r} in the name or its dims; {', '.join(unplaced)} is left out", name)

    def check_name(self, line: Line) -> None:
        """Refuse two mapping rules with the same name, neither of which has a condition."""
        if line.when is None:
            if line.name in self.always:
                self.problem(f"each stored name once; another line gives {line.name.text!r}")
            self.always.add(line.name)

    def arithmetic(self, text: str) -> Arithmetic:
        steps = computed.parse(text)
        if steps is None:
            forms = "'norm - 1', '2 * norm + 1' or '-exp(A_log)'"
            raise self.fail(f"arithmetic such as {forms} after '{LOSSY.strip()}'")
        return Arithmetic(text.strip(), steps)


def _itself(written: FamilyText) -> FamilyText:
    return written


def read(
    text: str,
    *,
    file: str = "rules",
    known_families: Mapping[str, Family] | None = None,
    checked: bool = False,
    bases: Bases | None = None,
) -> list[Family]:
    """Parse the text of a rules file.

    Args:
        text: contents of the file, in the grammar that this module's docstring shows.
        file: name of the file for error messages.
        known_families: families that `dialect … of FAMILY` may extend.
        checked: whether the text was parsed before without a fault, so that names and axes need no further check.
        bases: function that returns families and blocks from other files, for `like`; None means that only
            `known_families` exist.

    Returns:
        The families that the text declares or extends, in order.

    Raises:
        Refused: with the code CORRUPT if the file has syntax errors; each is listed with line, column and the expected
            text.
    """
    families = known_families or {}

    def find(name: str) -> FamilyText | None:
        base = bases(name) if bases is not None else None
        return base if base is not None or name not in families else families[name].written

    return _TableParser(families, file, checked=checked).read(written.read(text, file, families, find))


def index(families: Iterable[Family]) -> dict[str, Family]:
    """Return name of a family -> family."""
    return {family.name: family for family in families}
