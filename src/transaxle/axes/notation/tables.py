"""The text of families and dialects, and its parser.

    family toy
      model_type toy
      wrapper toy_vl                             # models around it, with this one in their text_config
      axes  l=num_layers d=hidden_size f=intermediate_size
      axis  r = heads[l] // kv_heads              # one axis, a formula with spaces
      up    : l f d
      bias  : l f            when mlp_bias
      extra : l f            optional            # all of it or none
      let sparse = (l + 1) % step == 0           # a formula with a name
      tie head = embed       when tie_word_embeddings
      precise extra                              # keeps its number type where all others are cast
      cut tp = f                                 # what tensor-parallel ranks may share out
      cut tp = d of extra                        # this axis in one tensor only

    dialect hf
      layers.{l}.up.weight = up[f d]
      layers.{l}.up.bias   = bias[f]              when mlp_bias
      ignore layers.{l}.inv_freq
    dialect fancy 2.0 like hf                     # every line of hf, but for tensors named here
      blocks.{l}.w = up[d f]                        when not mxfp4
    blocks.{l}.w = up[f d]                        when mxfp4   # where the tensor is stored in this encoding

A file may hold a family, or only more dialects of a known one (`dialect … of FAMILY`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from transaxle.axes.notation.expression import HINT, parse
from transaxle.axes.notation.family import Arithmetic, Cuttable, Dialect, Family, Line, LogicalTensor, Tie
from transaxle.axes.notation.formula import Formula
from transaxle.axes.notation.name import Name
from transaxle.axes.notation.number_format import WORDS
from transaxle.axes.notation.overlap import overlapping
from transaxle.errors import Refusal, TransaxleError, Where, gathered, refuse

_WORD = r"[A-Za-z_][A-Za-z0-9_]*"
_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_FAMILY = re.compile(rf"family\s+({_WORD})")
_DIALECT = re.compile(
    rf"dialect\s+({_WORD})(?:\s+([0-9][\w.]*))?(?:\s+of\s+({_WORD}))?(?:\s+like\s+({_WORD}(?:@[\w.]+)?))?"
)
_LIKE = re.compile(rf"like\s+{_WORD}(?:@[\w.]+)?")
_AXES = re.compile(rf"({_WORD})(?:=(\S+))?")
_NAMED = re.compile(rf"\w+\s+({_WORD})\s*=(.+)")
_TENSOR = re.compile(rf"({_WORD})\s*:\s*((?:{_WORD}\s*)*)")
_TIE = re.compile(rf"tie\s+({_WORD})\s*=\s*({_WORD})")
_CUT_ITEM = rf"{_WORD}\b|\((?:\s*{_WORD}\b)+\s*\)"
_CUT = re.compile(rf"cut\s+(tp)\s*=((?:\s*(?:{_CUT_ITEM}))+?)(?:\s+of((?:\s+{_WORD}\b)+))?")
_WITHIN = re.compile(rf"cut\s+tp\s*=\s*({_WORD})\s+within\s+({_WORD})")
_LOSSY = re.compile(rf"(?:({_NUMBER})\s*\*\s*)?({_WORD})(?:\s*([+-])\s*({_NUMBER}))?")
_LOSSY_MARK = " lossy:"
_OPTIONAL = " optional"
_UNKNOWN = Formula("None")
_WHEN = re.compile(r"(?<!\s)\s+when\s+")

_MOST_LINES, _LONGEST_LINE, _MOST_DIALECTS = 10_000, 1_000, 100
"""Caps on one file, which anybody may have written; the longest table that ships has 224 lines of at most 142
characters.
"""
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
        self.opened = 0
        self.family: Family | None = None
        self.dialect: Dialect | None = None
        self.base: Dialect | None = None
        # What grows with the file. The family refers to the first three, which fill up while its statements are read.
        self.sizes: dict[str, Formula | None] = {}
        self.tensors: dict[str, LogicalTensor] = {}
        self.named: dict[str, Formula] = {}
        self.used: set[str] = set()
        self.always: set[Name] = set()
        self.places: dict[Line, int] = {}
        self.skipping = False
        self.number = 0
        self.raw = ""
        self.statements = {
            "model_type": self.model_type,
            "wrapper": self.wrapper,
            "axes": self.axes,
            "axis": self.axis,
            "let": self.let,
            "tie": self.tie,
            "cut": self.cut,
            "precise": self.precise,
        }

    def read(self, text: str) -> list[Family]:
        for self.number, self.raw in enumerate(text.splitlines(), 1):
            if len(self.problems) >= _MOST_PROBLEMS:
                break
            statement = self.raw.split("#", 1)[0].strip()
            if self.number > _MOST_LINES or len(self.raw) > _LONGEST_LINE:
                self.problems.append(self.too_long())
                break
            if statement:
                try:
                    self.statement(statement)
                except TransaxleError as error:
                    self.keep(error)
        self.close_dialect()
        if self.problems:
            overflow = [
                Refusal("CORRUPT", f"there is more: these are the first {_MOST_PROBLEMS} problems", Where(self.file))
            ]
            raise gathered([*self.problems, *(overflow if len(self.problems) >= _MOST_PROBLEMS else ())])
        return list(self.made.values())

    def keep(self, error: TransaxleError) -> None:
        where = Where(f"{self.file}, line {self.number}")
        self.problems.extend(replace(refusal, where=where) for refusal in error.refusals)

    def too_long(self) -> Refusal:
        """Return the refusal of a file with more, or longer, lines than a table has."""
        message = f"a table has at most {_MOST_LINES:,} lines, of at most {_LONGEST_LINE:,} characters each"
        return Refusal("CORRUPT", message, Where(f"{self.file}, line {self.number}"), "Is this file a table?")

    def expected(self, wanted: str, word: str = "", hint: str = HINT) -> TransaxleError:
        """Build the refusal of the current line; `word` is the wrong word in it, whose last occurrence is marked."""
        places = [match.start() for match in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", self.raw)] if word else []
        column = places[-1] if places else len(self.raw) - len(self.raw.lstrip())
        return refuse("CORRUPT", f"{self.raw}\n{' ' * column}^\ncolumn {column + 1}: expected {wanted}", hint=hint)

    def problem(self, wanted: str, word: str = "") -> None:
        """Keep a problem and go on with the same line."""
        if len(self.problems) < _MOST_PROBLEMS:
            self.keep(self.expected(wanted, word))

    def statement(self, text: str) -> None:
        head = text.split(None, 1)[0]
        if head == "family":
            self.open_family(text)
        elif head == "dialect":
            self.open_dialect(text)
        elif self.skipping:
            return
        elif self.dialect is not None:
            self.dialect_line(text)
        elif self.family is not None:
            self.statements.get(head, self.tensor)(text)
        else:
            self.skipping = True
            raise self.expected("'family NAME' or 'dialect NAME of FAMILY' before anything else")

    def formula(self, text: str) -> Formula:
        formula = Formula(text.strip(), self.family.named if self.family else {})
        try:
            names = formula.names  # an error in it belongs to this line
        except TransaxleError as error:
            raise self.expected(f"a formula; {error.refusals[0].message}", formula.text) from None
        for word in names & set(WORDS) if self.dialect is None else ():
            self.problem(f"no encoding here: only a line of a dialect may depend on {word!r}", word)
        self.used |= names
        return formula

    def unreserved(self, name: str) -> None:
        if name in WORDS:
            self.problem(f"another name: {name!r} is reserved for an encoding", name)

    def split_when(self, text: str) -> tuple[str, Formula | None]:
        """Split off a statement's condition; `optional` is a condition whose value is unknown."""
        if text.endswith(_OPTIONAL):
            return text.removesuffix(_OPTIONAL).strip(), _UNKNOWN
        parts = _WHEN.split(text, maxsplit=1)
        return parts[0].strip(), self.formula(parts[1]) if len(parts) == 2 else None

    def touch(self, family: Family) -> None:
        """Make a family the current one, and record it under its name."""
        self.family = self.made[family.name] = family

    # Families.

    def open_family(self, text: str) -> None:
        self.close_dialect()
        self.family, self.skipping = None, True
        match = _FAMILY.fullmatch(text)
        if match is None:
            raise self.expected("'family NAME'")
        if match[1] in self.made:
            raise self.expected(f"each family once; {match[1]!r} is declared above", match[1])
        self.skipping = False
        self.sizes, self.tensors, self.named, self.used = {}, {}, {}, set()
        self.touch(Family(match[1], (match[1],), self.sizes, self.tensors, named=self.named))

    def model_type(self, text: str) -> None:
        assert self.family is not None
        self.touch(replace(self.family, model_types=tuple(text.split()[1:])))

    def wrapper(self, text: str) -> None:
        assert self.family is not None
        self.touch(replace(self.family, wrappers=tuple(text.split()[1:])))

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
        if match is None or when is None:
            raise self.expected("'tie TENSOR = TENSOR when CONDITION'")
        for name in match.groups():
            if name not in self.family.tensors:
                raise self.expected(f"a tensor of the family, declared above; {name!r} is none", name)
        self.touch(replace(self.family, ties=(*self.family.ties, Tie(match[1], match[2], when))))

    def cut(self, text: str) -> None:
        assert self.family is not None
        nested = _WITHIN.fullmatch(text)
        if nested is not None:
            inner, outer = nested.groups()
            for axis in sorted({inner, outer} - self.family.axes.keys()):
                self.problem(f"declared axes only; {axis!r} is not in 'axes'", axis)
            self.touch(replace(self.family, within={**self.family.within, outer: inner}))
            return
        match = _CUT.fullmatch(text)
        if match is None:
            forms = "'cut tp = AXIS …', 'cut tp = AXIS … of TENSOR …' or 'cut tp = AXIS within AXIS'"
            raise self.expected(f"{forms}; '(AXIS AXIS)' counts through both")
        mesh, items, owners = match.groups()
        tensors = None if owners is None else frozenset(owners.split())
        for name in sorted((tensors or frozenset()) - self.family.tensors.keys()):
            self.problem(f"a tensor of the family, declared above; {name!r} is none", name)
        axes = [tuple(item.strip("()").split()) for item in re.findall(_CUT_ITEM, items)]
        for axis in sorted({axis for names in axes for axis in names} - self.family.axes.keys()):
            self.problem(f"declared axes only; {axis!r} is not in 'axes'", axis)
        cuts = tuple(Cuttable(mesh, names, tensors) for names in axes)
        self.touch(replace(self.family, cuts=self.family.cuts + cuts))

    def precise(self, text: str) -> None:
        assert self.family is not None
        names = text.split()[1:]
        for name in names:
            if name not in self.family.tensors:
                raise self.expected(f"a tensor of the family, declared above; {name!r} is none", name)
        self.touch(replace(self.family, precise=self.family.precise.union(names)))

    def tensor(self, text: str) -> None:
        assert self.family is not None
        statement, when = self.split_when(text)
        match = _TENSOR.fullmatch(statement)
        if match is None:
            wanted = f"{', '.join(map(repr, self.statements))} or 'TENSOR : AXES'"
            head, *words = statement.split()
            colon_forgotten = any(word in self.family.axes for word in words) and not {":", "="} & set(statement)
            raise self.expected(wanted, hint=f"is a ':' missing after {head!r}?" if colon_forgotten else HINT)
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

    def open_dialect(self, text: str) -> None:
        self.close_dialect()
        match = _DIALECT.fullmatch(text)
        family_failed, self.skipping = self.skipping and self.family is None, True
        if match is None:
            raise self.expected("'dialect NAME [VERSION] [of FAMILY] [like DIALECT]'")
        name, version, owner, base = match.groups()
        if owner is not None:
            if owner not in self.made and owner not in self.known:
                known = ", ".join(dict.fromkeys((*self.known, *self.made)))
                raise self.expected(f"a known family after 'of'; these are known: {known}", owner)
            self.family = self.made[owner] if owner in self.made else self.known[owner]
        elif family_failed:
            return
        if self.family is None:
            raise self.expected("'of FAMILY': the file names no family above")
        self.opened += 1
        if self.opened > _MOST_DIALECTS:
            raise self.expected(f"at most {_MOST_DIALECTS} dialects in one file", name)
        dialect = Dialect(name, version, ())
        versions = [known.version for known in self.family.dialects if known.name == name]
        if version in versions or (versions and None in (version, *versions)):
            raise self.expected(f"a new dialect, or another version; {name!r} is declared already", name)
        self.base = self.family.dialect(base) if base else None
        if base and self.base is None:
            raise self.expected(f"a dialect after 'like'; this family has: {', '.join(self.family.labels)}", base)
        self.dialect, self.always, self.skipping = dialect, set(), False

    def close_dialect(self) -> None:
        """Add the dialect to its family, with the lines it takes over from another."""
        if self.dialect is None or self.family is None:
            return
        dialect = self.dialect
        if self.base is not None:
            overridden = {name for line in dialect.lines for name in line.expression.components}
            inherited = tuple(line for line in self.base.lines if overridden.isdisjoint(line.expression.components))
            dialect = replace(dialect, lines=inherited + dialect.lines, ignored=self.base.ignored + dialect.ignored)
        for first, second, name in () if self.checked else overlapping(dialect.lines, self.family):
            message = f"{first.text}\n{second.text}\nboth lines match {name!r} (dialect {dialect.label})"
            hint = (
                "give both lines conditions (when ...) that exclude each other, or write one line for all these names"
            )
            where = Where(f"{self.file}, line {self.places.get(second, self.number)}")
            self.problems.append(Refusal("CORRUPT", message, where, hint))
        self.touch(replace(self.family, dialects=(*self.family.dialects, dialect)))
        self.dialect, self.base = None, None

    def dialect_line(self, text: str) -> None:
        assert self.dialect is not None
        if text.startswith("ignore "):
            pattern = text.removeprefix("ignore ").strip()
            name = Name(pattern, self.raw.index(pattern))
            _ = name.holes  # an error in it belongs to this line
            self.dialect = replace(self.dialect, ignored=(*self.dialect.ignored, name))
            return
        statement, when = self.split_when(text)
        statement, lossy, arithmetic = statement.partition(_LOSSY_MARK)
        pattern, equals, expression = statement.partition("=")
        if not equals:
            raise self.expected("'stored.name = expression'", hint=self.like_hint(text))
        start = self.raw.index("=") + 1 + len(expression) - len(expression.lstrip())
        name = Name(pattern.strip(), len(self.raw) - len(self.raw.lstrip()))
        changed = self.arithmetic(arithmetic) if lossy else None
        line = Line(name, parse(expression.strip(), start), when, changed)
        if not self.checked:
            self.check(line)
        self.places[line] = self.number
        self.dialect = replace(self.dialect, lines=(*self.dialect.lines, line))

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
        if line.when is None:
            if line.name in self.always:
                self.problem(f"each stored name once; another line gives {line.name.text!r}")
            self.always.add(line.name)

    def arithmetic(self, text: str) -> Arithmetic:
        match = _LOSSY.fullmatch(text.strip())
        if match is None or float(match[1] or 1) == 0:  # a factor of zero has no way back
            raise self.expected(f"arithmetic such as 'norm - 1' or '2 * norm + 1' after '{_LOSSY_MARK.strip()}'")
        shift = float(match[4] or 0) * (-1 if match[3] == "-" else 1)
        return Arithmetic(text.strip(), float(match[1] or 1), shift)


def read(
    text: str, *, file: str = "rules", known: Mapping[str, Family] | None = None, checked: bool = False
) -> list[Family]:
    """Parse a table.

    Args:
        text: the grammar above.
        file: name used in errors.
        known: families that `dialect … of FAMILY` may extend.
        checked: the text was read before without a fault: names and axes are not held against each other again.

    Returns:
        The families the text declares or extends, in order.

    Raises:
        Refused: CORRUPT with every problem of the file: line, column, what was expected.
    """
    return _TableParser(known or {}, file, checked=checked).read(text)


def index(families: Iterable[Family]) -> dict[str, Family]:
    """Return families by name."""
    return {family.name: family for family in families}
