"""The text of families and dialects, and its parser.

    family toy
      model_type toy
      wrapper toy_vl                             # models around it, with this one in their text_config
      alike game                                 # has the same names: names alone never mean this one
      axes  l=num_layers d=hidden_size f=intermediate_size
      axis  r = heads[l] // kv_heads              # one axis, a formula with spaces
      up    : l f d
      bias  : l f            when mlp_bias
      extra : l f            optional            # all of it or none
      let sparse = (l + 1) % step == 0           # a formula with a name
      tie head = embed       when tie_word_embeddings
      precise extra                              # keeps its number type where all others are cast
      added bias             when up             # zeros are the same as none
      cut tp = f                                 # what tensor-parallel ranks may share out
      cut tp = d of extra                        # this axis in one tensor only
      cut tp@fancy = none of extra               # in this dialect, every rank has all of it
      cut ep = e of up                           # what expert-parallel ranks may share out

    dialect hf
      layers.{l}.up.weight = up[f d]
      layers.{l}.up.bias   = bias[f]              when mlp_bias
      ignore layers.{l}.inv_freq
    dialect fancy 2.0
      blocks.{l}.w = up[d f]                      when not mxfp4
      blocks.{l}.w = up[f d]                      when mxfp4   # where the tensor is stored in this encoding

What a family or a dialect takes over from another (`like`) is in `written` and `section`: it is
spelled out before anything is read here. A file may hold families, or only more dialects of a known one
(`dialect … of FAMILY`).
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
from transaxle.axes.notation.overlap import overlapping, tie_fault
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
from transaxle.axes.notation.written import Bases, File, Written
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
"""Cap on the number of reported problems."""


class _TableParser:
    """Parses the statements of one file; keeps every problem with its line and column, and reads on."""

    def __init__(self, known: Mapping[str, Family], file: str, *, checked: bool) -> None:
        self.known = known
        self.made: dict[str, Family] = {}
        self.file = file
        self.checked = checked
        self.problems: list[Refusal] = []
        self.family: Family | None = None
        self.dialect: Dialect | None = None
        # What grows with a family. It refers to the first three, which fill up while its statements are read.
        self.sizes: dict[str, Formula | None] = {}
        self.tensors: dict[str, LogicalTensor] = {}
        self.named: dict[str, Formula] = {}
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

    def read(self, file: File) -> list[Family]:
        self.problems.extend(file.problems)
        for owner in file.written.values():
            if not owner.block:
                self.open_family(owner)
                self.read_dialects(owner, tuple(owner.sections))
        for name, added in file.added.items():
            self.lines = {}
            self.touch(structs.replace(self.known[name], text=partial(_itself, added)))
            self.read_dialects(added, file.new[name])
        if self.problems:
            raise gathered(self.sorted_problems())
        return list(self.made.values())

    def sorted_problems(self) -> list[Refusal]:
        """Return the problems in the order of the file's lines, those of other files last; no more than the cap."""
        pattern = re.compile(r"(.*), line ([0-9]+)")

        def place(refusal: Refusal) -> tuple[bool, str, int]:
            match = pattern.fullmatch(refusal.where.file or "")
            return (True, "", 0) if match is None else (match[1] != self.file, match[1], int(match[2]))

        problems = sorted(dict.fromkeys(self.problems), key=place)
        if len(problems) < _MOST_PROBLEMS:
            return problems
        more = f"there is more: these are the first {_MOST_PROBLEMS} problems"
        return [*problems[:_MOST_PROBLEMS], Refusal("CORRUPT", more, Where(self.file))]

    def run(self, statement: Statement) -> None:
        """Read one statement of the current family or dialect."""
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
        """The line of the current statement in its file."""
        return self.current.raw

    def expected(self, wanted: str, word: str = "", hint: str = HINT) -> TransaxleError:
        """Build the refusal of the current statement; `word` is the wrong word in it."""
        return self.current.expected(wanted, word, hint)

    def problem(self, wanted: str, word: str = "") -> None:
        """Keep a problem and go on with the same line."""
        if len(self.problems) < _MOST_PROBLEMS:
            self.keep(self.expected(wanted, word))

    def formula(self, text: str) -> Formula:
        formula = Formula(text.strip(), self.family.named if self.family else {})
        try:
            names = formula.names  # an error in it belongs to this line
        except TransaxleError as error:
            raise self.expected(f"a formula; {error.refusals[0].message}", formula.text) from None
        for word in sorted(names.intersection(WORDS)) if self.dialect is None else ():
            self.problem(f"no encoding here: only a line of a dialect may depend on {word!r}", word)
        self.used |= names
        return formula

    def unreserved(self, name: str) -> None:
        if name in WORDS:
            self.problem(f"another name: {name!r} is reserved for an encoding", name)

    def split_when(self, text: str) -> tuple[str, Formula | None]:
        """Split off a statement's condition; one that is always true is none."""
        statement, condition = split_when(text)
        when = None if condition is None else self.formula(condition)
        return statement, None if when is not None and when.always else when

    def touch(self, family: Family) -> None:
        """Make a family the current one, and record it under its name."""
        self.family = self.made[family.name] = family

    # Families.

    def open_family(self, owner: Written) -> None:
        self.dialect = None
        self.sizes, self.tensors, self.named, self.ties, self.used, self.lines = {}, {}, {}, {}, set(), {}
        name = owner.name
        self.touch(Family(name, (name,), self.sizes, self.tensors, named=self.named, text=partial(_itself, owner)))
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
            raise self.expected("'alike FAMILY'")
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
            raise self.expected("'axis NAME = FORMULA'")
        self.add_axis(match[1], match[2])

    def add_axis(self, name: str, formula: str | None) -> None:
        self.unreserved(name)
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
            raise self.expected("'let NAME = FORMULA'")
        name = match[1]
        self.unreserved(name)
        if name in self.named or name in self.used:
            raise self.expected(f"each 'let' once, and before {name!r} is used", name)
        self.named[name] = self.formula(match[2])

    def tie(self, text: str) -> None:
        assert self.family is not None
        statement, when = self.split_when(text)
        match = _TIE.fullmatch(statement)
        if match is None:
            raise self.expected("'tie TENSOR = TENSOR' or 'tie TENSOR = TENSOR when CONDITION'")
        for name in match.groups():
            if name not in self.family.tensors:
                raise self.expected(f"a tensor of the family, declared above; {name!r} is none", name)
        tie = Tie(match[1], match[2], when or Formula("True"))
        fault = "" if self.checked else tie_fault(tie, self.ties)
        if fault:
            raise self.expected(fault, tie.alias)
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
            raise self.expected(f"{forms}; '(AXIS AXIS)' counts through both; 'ep' and 'tp@DIALECT' are meshes too")
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
                raise self.expected(f"a tensor of the family, declared above; {name!r} is none", name)
        self.touch(structs.replace(self.family, precise=self.family.precise.union(names)))

    def added(self, text: str) -> None:
        assert self.family is not None
        statement, when = self.split_when(text)
        _, *names = statement.split()
        if len(names) != 1 or names[0] not in self.family.tensors:
            raise self.expected("'added TENSOR' or 'added TENSOR when CONDITION', with a tensor declared above")
        added = {**self.family.added, names[0]: when or Formula("True")}
        self.touch(structs.replace(self.family, added=added))

    def tensor(self, text: str) -> None:
        assert self.family is not None
        statement, when = self.split_when(text)
        match = _TENSOR.fullmatch(statement)
        if match is None:
            wanted = f"{', '.join(map(repr, self.statements))} or 'TENSOR : AXES'"
            head, *words = statement.split()
            colon_forgotten = any(word in self.family.axes for word in words) and not {":", "="} & set(statement)
            raise self.expected(wanted, hint=f"Is a ':' missing after {head!r}?" if colon_forgotten else HINT)
        name, axes = match[1], tuple(match[2].split())
        self.unreserved(name)
        if name in self.family.tensors:
            raise self.expected(f"each tensor once; {name!r} is declared above", name)
        for axis, times in Counter(axes).items():
            if axis not in self.family.axes:
                self.problem(f"declared axes only; {axis!r} is not in 'axes'", axis)
            if times > 1:
                self.problem(f"each axis of {name!r} once", axis)
        self.tensors[name] = LogicalTensor(name, axes, when)

    # Dialects.

    def read_dialects(self, owner: Written, labels: Sequence[str]) -> None:
        """Read dialects of the current family, with all that they take over."""
        found: list[Refusal] = []
        spelled = Sections(owner.sections, found)
        for label in labels:
            self.open_dialect(owner.sections[label])
            for statement in spelled.flat(label):
                self.run(statement)
            self.close_dialect(owner.sections[label])
        self.problems.extend(found)

    def open_dialect(self, section: Section) -> None:
        self.dialect, self.always = Dialect(section.name, section.version, ()), set()

    def close_dialect(self, section: Section) -> None:
        """Add the dialect to its family."""
        assert self.dialect is not None
        assert self.family is not None
        dialect = self.dialect
        self.current = section.head
        try:
            for first, second, name in () if self.checked else overlapping(dialect.lines, self.family):
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
            _ = name.holes  # an error in it belongs to this line
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
        """Parse a line of a dialect."""
        kind = self.current.kind if self.current.kind in (ALSO, STATE) else ""
        statement, when = self.split_when(text.removeprefix(kind))
        else_zeros = statement.endswith(ELSE_ZEROS)
        statement, lossy, arithmetic = statement.removesuffix(ELSE_ZEROS).partition(LOSSY)
        pattern, equals, expression = statement.partition("=")
        if not equals:
            raise self.expected("'stored.name = expression'", hint=self.like_hint(text))
        start = self.raw.index("=") + 1
        start += len(self.raw[start:]) - len(self.raw[start:].lstrip())
        pattern = pattern.strip()
        name = Name(pattern, max(self.raw.find(pattern), len(self.raw) - len(self.raw.lstrip())))
        changed = self.arithmetic(arithmetic) if lossy else None
        stored = parse(expression.strip(), start, checked=self.checked)
        if else_zeros and not (self.family and set(stored.components) <= self.family.added.keys()):
            raise self.expected(f"{ELSE_ZEROS.strip()!r} only of tensors that are 'added'", "zeros")
        return Line(name, stored, when, changed, kind != "", kind == STATE, else_zeros)

    def like_hint(self, text: str) -> str:
        """Return where `like DIALECT` belongs, for a line that has it alone; otherwise, where the grammar is."""
        assert self.family is not None
        assert self.dialect is not None
        if _LIKE.fullmatch(text) is None:
            return HINT
        version = f" {self.dialect.version}" if self.dialect.version else ""
        owner = f" of {self.family.name}" if self.family.name in self.known else ""
        return f"write it in the first line: dialect {self.dialect.name}{version}{owner} {' '.join(text.split())}"

    def check(self, line: Line) -> None:
        """Refuse lines that speak of unknown tensors or axes, or leave an axis of a tensor out."""
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
        """Refuse a second line of the same name where both have no condition."""
        if line.when is None:
            if line.name in self.always:
                self.problem(f"each stored name once; another line gives {line.name.text!r}")
            self.always.add(line.name)

    def arithmetic(self, text: str) -> Arithmetic:
        steps = computed.parse(text)
        if steps is None:
            forms = "'norm - 1', '2 * norm + 1' or '-exp(A_log)'"
            raise self.expected(f"arithmetic such as {forms} after '{LOSSY.strip()}'")
        return Arithmetic(text.strip(), steps)


def _itself(written: Written) -> Written:
    return written


def read(
    text: str,
    *,
    file: str = "rules",
    known: Mapping[str, Family] | None = None,
    checked: bool = False,
    bases: Bases | None = None,
) -> list[Family]:
    """Parse a table.

    Args:
        text: the grammar above.
        file: name used in errors.
        known: families that `dialect … of FAMILY` may extend.
        checked: the text was read before without a fault: names and axes are not held against each other again.
        bases: finds the families and blocks of elsewhere that one may be `like`; None: those of `known`.

    Returns:
        The families the text declares or extends, in order.

    Raises:
        Refused: CORRUPT with every problem of the file: line, column, what was expected.
    """
    families = known or {}

    def find(name: str) -> Written | None:
        found = bases(name) if bases is not None else None
        return found if found is not None or name not in families else families[name].written

    return _TableParser(families, file, checked=checked).read(written.read(text, file, families, find))


def index(families: Iterable[Family]) -> dict[str, Family]:
    """Return families by name."""
    return {family.name: family for family in families}
