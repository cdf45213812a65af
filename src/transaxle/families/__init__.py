"""The model families that ship with Transaxle, as tables of mapping rules: hand-written tables, and generated ones.

A hand-written family is a `.rules` file in this folder, or a user's file after `--rules`.
`transaxle.axes.notation.tables` parses these files. A table in `typed/` is selected by a config's `model_type` or by
the family's name, never by tensor names alone.

`generated/` is a flat folder of generated files:

- `NAME.rules.gz`: a table with two dialects, derived by tracing another framework's models. A traced table is selected
  by a config's `model_type` or by the family's name. `make tables` derives these tables anew, and `transaxle info
  --family NAME` prints one of them.
- `NAME.json`: a family from a hand-written table, with everything that it inherits. Reading this file has the same
  result as parsing the table, but is quick: nothing is checked, and no inheritance is resolved.
- `index.json`: for each family its file, the `model_type` values that select it, its dialects and axes, and the
  skeletons (names with each number replaced by 0) of each dialect's tensor names. A family's file is read only when it
  is needed.
- `skeletons.json`: the skeletons of the tensor names of all dialects, by which families that cannot read a checkpoint
  are skipped. It is read only if names alone do not select a family.
- `blocks.json`: block -> file. A block is a list of statements that several families inherit, and is no family itself.

`python docs/generate.py` generates the JSON files from the tables, and a test checks that they are up to date.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property, lru_cache, partial
from pkgutil import get_data
from types import ModuleType
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec.structs import replace

from transaxle.axes.notation import computed
from transaxle.axes.notation.expression import parse
from transaxle.axes.notation.family import Arithmetic, Cuttable, Dialect, Family, Formula, Line, LogicalTensor, Tie
from transaxle.axes.notation.name import Name
from transaxle.axes.notation.statement import BLOCK, FAMILY, WORD
from transaxle.plugins import plugins

if TYPE_CHECKING:
    from transaxle.axes.notation.written import FamilyText, TableFiles


GROUP = "transaxle.families"
"""Entry-point group for packages that add families; each entry point names a Python package with `.rules` files."""
GENERATED = "generated"
"""Folder of generated files: indices, families with resolved inheritance, and tables derived by tracing."""
INDEX = f"{GENERATED}/index.json"
BLOCKS = f"{GENERATED}/blocks.json"
SKELETONS = f"{GENERATED}/skeletons.json"
TYPED = "typed"
"""Folder of hand-written tables that are selected only by `model_type` or family name, because many other models have
the same tensor names but a different layout.
"""
_SUFFIX = ".rules"
TRACED_SUFFIX = ".rules.gz"
"""Suffix of the files of tables that were derived by tracing."""
_DECLARES = re.compile(rf"^({FAMILY}|{BLOCK})\s+({WORD})", re.MULTILINE)


class Entry(msgspec.Struct, frozen=True):
    """The index entry of a family, by which the family can be selected without parsing its table."""

    file: str
    """File with the family's table of mapping rules."""
    model_types: tuple[str, ...]
    """The `model_type` values in a config.json that select the family."""
    axes: tuple[str, ...]
    """Names of the family's axes."""
    dialects: dict[str, tuple[str, ...]]
    """Label of each dialect, in the order of the table -> skeletons of the tensor names that select the dialect. No
    skeletons are listed for traced tables, for tables in `typed/`, and for a family that is declared `alike` a second
    family.
    """

    @property
    def traced(self) -> bool:
        """Whether the table was derived by tracing."""
        return is_traced(self.file)


class Skeletons(msgspec.Struct, frozen=True):
    """The tensor names that the shipped dialects read."""

    dialects: tuple[tuple[str, str], ...]
    """`(family name, label)` of each dialect."""
    readers: dict[str, str]
    """Skeleton -> positions in `dialects` of the dialects with such tensor names, separated by spaces."""
    segments: int
    """Largest number of segments, between dots, of a skeleton."""


def is_traced(file: str) -> bool:
    """Return whether the families in a file were derived by tracing."""
    return file.endswith(TRACED_SUFFIX)


class Families(Mapping[str, Family]):
    """Mapping from family name to family; each table of mapping rules is read when it is first used.

    Families of installed packages are used only for a name, a `model_type` or tensor names that match no shipped family
    and no family of the user. The mapping contains shipped families, the user's families and those of installed
    packages.

    Args:
        entries: index entries of the shipped families, by family name.
        user_families: families of a user's rules file, which replace shipped families with the same names.
        closed: whether to exclude the families of installed packages.
    """

    def __init__(
        self, entries: Mapping[str, Entry], user_families: Mapping[str, Family] | None = None, *, closed: bool = False
    ) -> None:
        user_families = user_families or {}
        self.entries = {**entries, **{name: _own_entry(family, entries) for name, family in user_families.items()}}
        """Family name -> index entry, for the shipped families and the user's families."""
        self._own = user_families
        self._read = dict(user_families)
        self._closed = closed

    @cached_property
    def everything(self) -> Families:
        """The families of this mapping together with those of installed packages.

        Raises:
            Refused: if an installed package with families cannot be used; see `installed_families`.
        """
        if self._closed:
            return self
        added = {name: family for name, family in installed_families().items() if name not in self.entries}
        return Families(self.entries, {**self._own, **added}, closed=True)

    def __getitem__(self, name: str) -> Family:
        if name and name not in self.entries and self.everything is not self:
            return self.everything[name]
        if name not in self._read and name in self.entries:
            self._read[name] = _read_family(name, self.entries[name].file)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.everything.entries)

    def __len__(self) -> int:
        return len(self.everything.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries or (bool(name) and name in self.everything.entries)

    def replaces(self, name: str) -> bool:
        """Return whether a user's rules file replaces a shipped family, and does not merely add dialects to it."""
        user_family = self._own.get(name)
        return user_family is not None and name in builtin().entries and not _adds_dialects(user_family)

    def only(self, name: str) -> Families:
        """Return a mapping that contains only the named family."""
        return Families({}, {name: self[name]}, closed=True)

    def of_types(self, model_types: Iterable[str]) -> list[Family]:
        """Return the families that the given `model_type` values select."""
        types = frozenset(model_types)
        matching = [self[name] for name, entry in self.entries.items() if types & frozenset(entry.model_types)]
        return matching if matching or not types or self.everything is self else self.everything.of_types(types)

    def that_may_read(self, skeletons: Mapping[str, int]) -> Iterator[tuple[int, Family]]:
        """Yield `(upper bound, family)`, largest bound first; a bound is the number of tensor names that a dialect may
        match.

        Families that tensor names never select are skipped: traced tables, tables in `typed/`, and families that are
        declared `alike` a second family.

        Args:
            skeletons: skeleton -> number of tensor names with this skeleton; the names may have a prefix that tables
                lack.
        """
        tails: dict[str, list[int]] = {}
        for key, full_skeleton in enumerate(skeletons):
            tail = full_skeleton
            while True:
                tails.setdefault(tail, []).append(key)
                _, dot, tail = tail.partition(".")
                if not dot:
                    break
        counts = list(skeletons.values())
        bounds = []
        for name, entry in self.entries.items():
            name_count = 0
            for skeletons_read in entry.dialects.values():
                if tails.keys().isdisjoint(skeletons_read):
                    continue
                positions_read = {key for skeleton in skeletons_read for key in tails.get(skeleton, ())}
                name_count = max(name_count, sum(counts[key] for key in positions_read))
            if name_count:
                bounds.append((name_count, name))
        for name_count, name in sorted(bounds, key=lambda bound: -bound[0]):
            yield name_count, self[name]

    def most_names(self, skeletons: Mapping[str, int]) -> dict[tuple[str, str], int]:
        """Return `(family name, dialect label)` -> upper bound of the number of tensor names that the dialect matches.

        This includes families that names never select. Dialects that match no name are absent; a dialect of a user's
        table or of an installed package may match all names.

        Args:
            skeletons: skeleton -> number of tensor names with this skeleton; the names may have a prefix that tables
                lack.
        """
        index = _skeletons()
        with_prefix: dict[tuple[str, str], int] = {}
        for full_skeleton, count in skeletons.items():
            start = len(full_skeleton)
            for _ in range(index.segments):
                start = full_skeleton.rfind(".", 0, start)
                for position in index.readers.get(full_skeleton[start + 1 :], "").split():
                    # All names of a checkpoint have one prefix, so names that need different ones do not add up.
                    key = position, full_skeleton[: start + 1]
                    with_prefix[key] = with_prefix.get(key, 0) + count
                if start < 0:
                    break
        bounds: dict[tuple[str, str], int] = {}
        for (position, _), count in with_prefix.items():
            dialect = index.dialects[int(position)]
            if dialect[0] in self.entries and dialect[0] not in self._own:
                bounds[dialect] = max(bounds.get(dialect, 0), count)
        total = sum(skeletons.values())
        return bounds | {(name, label): total for name in self._own for label in self.entries[name].dialects}


def entry_of(family: Family, file: str = "", *, by_type: bool = False) -> Entry:
    """Return the index entry of a family.

    Args:
        family: the family.
        file: file with the family's table; empty for a user's family.
        by_type: whether only a `model_type` or the family's name selects the family, even if its table is not in
            `typed/`.
    """
    by_type = by_type or bool(family.alike) or is_traced(file) or file.startswith(f"{TYPED}/")
    skeletons = {dialect.label: () if by_type else tuple(dialect.by_skeleton) for dialect in family.dialects}
    return Entry(file, family.model_types, tuple(family.axes), skeletons)


def _own_entry(family: Family, entries: Mapping[str, Entry]) -> Entry:
    """Return the index entry of a user's family; added dialects do not affect what selects a shipped family."""
    shipped_entry = entries.get(family.name)
    silent = shipped_entry is not None and not any(shipped_entry.dialects.values())
    return entry_of(family, by_type=silent and _adds_dialects(family))


def _adds_dialects(family: Family) -> bool:
    """Return whether a user's rules file only adds dialects to a shipped family."""
    return family.name in builtin().entries and family.tensors is builtin()[family.name].tensors


class Tables(msgspec.Struct, frozen=True):
    """All shipped tables of mapping rules, parsed and checked."""

    families: Mapping[str, tuple[Family, str]]
    """Family name -> (family, file with its table), in the order of the index file."""
    blocks: Mapping[str, str]
    """Block name -> file with the block."""

    def index(self) -> dict[str, Entry]:
        """Return the contents of `index.json`."""
        return {name: entry_of(family, file) for name, (family, file) in self.families.items()}

    def skeletons(self) -> Skeletons:
        """Return the contents of `skeletons.json`."""
        dialects = [(name, dialect) for name, (family, _) in self.families.items() for dialect in family.dialects]
        readers: dict[str, list[str]] = {}
        for position, (_, dialect) in enumerate(dialects):
            for skeleton in dialect.by_skeleton:
                readers.setdefault(skeleton, []).append(str(position))
        return Skeletons(
            tuple((name, dialect.label) for name, dialect in dialects),
            {skeleton: " ".join(positions) for skeleton, positions in sorted(readers.items())},
            max(skeleton.count(".") + 1 for skeleton in readers),
        )


def read_all() -> Tables:
    """Parse and check all shipped tables.

    Raises:
        Refused: with the code CORRUPT if a table is faulty; the error lists every problem of the first faulty table.
    """
    from importlib.resources import files

    # Imported late, because the parser is rarely needed: shipped families are read from JSON.
    from transaxle.axes.notation import tables
    from transaxle.axes.notation.written import TableFiles

    top = files(__name__)
    names = [item.name for item in top.iterdir()]
    names += [f"{folder}/{item.name}" for folder in (GENERATED, TYPED) for item in (top / folder).iterdir()]
    texts = {
        file: table_text(file)
        for file in sorted(names, key=lambda file: ("/" in file, file))
        if file.endswith((_SUFFIX, TRACED_SUFFIX))
    }
    declared = [(word, name, file) for file, text in texts.items() for word, name in _DECLARES.findall(text)]
    find = TableFiles({name: file for _, name, file in declared}, texts.__getitem__).base
    families = {
        family.name: (family, file)
        for file, text in texts.items()
        for family in tables.read(text, file=file, bases=find)
    }
    return Tables(families, {name: file for word, name, file in declared if word == BLOCK})


@cache
def builtin() -> Families:
    """Return family name -> family, for the shipped families."""
    return Families(msgspec.json.decode(_read_file(INDEX), type=dict[str, Entry]))


@cache
def blocks() -> Mapping[str, str]:
    """Return block name -> file; a block is a list of statements that several shipped families inherit."""
    return msgspec.json.decode(_read_file(BLOCKS), type=dict[str, str])


@cache
def _skeletons() -> Skeletons:
    return msgspec.json.decode(_read_file(SKELETONS), type=Skeletons)


@cache
def _read_family(name: str, file: str) -> Family:
    """Return a shipped family without checking its table again: it was checked when the index was generated."""
    if not is_traced(file):
        return replace(read_spelled(_read_file(f"{GENERATED}/{name}.json")), text=partial(base, name))
    from transaxle.axes.notation import tables

    (family,) = tables.read(table_text(file), file=file, checked=True, bases=base)
    return family


@cache
def _table_files() -> TableFiles:
    """Return the shipped tables that are uncompressed text files."""
    from transaxle.axes.notation.written import TableFiles

    homes = {**blocks(), **{name: entry.file for name, entry in builtin().entries.items()}}
    return TableFiles(homes, table_text)


def base(name: str) -> FamilyText | None:
    """Return the text of a shipped family or block, including everything that it inherits; None if the name is
    unknown.
    """
    return _table_files().base(name)


def table_text(file: str) -> str:
    """Return the text of a shipped table of mapping rules.

    Args:
        file: path of the table's file, as the index lists it.
    """
    content = _read_file(file)
    if is_traced(file):
        from gzip import decompress

        content = decompress(content)
    return content.decode("utf-8")


def _read_file(file: str) -> bytes:
    """Return the contents of a file in this package, which may be installed as an archive."""
    content = get_data(__name__, file)
    assert content is not None  # a loader that imports this package can read its files
    return content


@cache
def installed_families() -> Mapping[str, Family]:
    """Return family name -> family, for the families of installed packages.

    Raises:
        Refused: with the code UNSUPPORTED if a package cannot be imported or has no tables; with the code CORRUPT if a
            table is faulty; with the code NAME_COLLISION if two families have the same name.
    """
    from importlib.resources import files

    from transaxle.axes.notation import tables

    families: dict[str, Family] = {}
    for plugin in plugins(GROUP):
        package = plugin.load()
        if not isinstance(package, ModuleType) or not hasattr(package, "__path__"):
            raise plugin.refusal("UNSUPPORTED", f"it is {package!r}, and no package with tables in it")
        tables_found = sorted(
            (item for item in files(package).iterdir() if item.name.endswith(_SUFFIX)), key=lambda i: i.name
        )
        if not tables_found:
            raise plugin.refusal("UNSUPPORTED", f"there is no *{_SUFFIX} in the package {package.__name__}")
        for item in tables_found:
            for family in tables.read(item.read_text("utf-8"), file=f"{plugin.package}, {item.name}", bases=base):
                if family.name in families or family.name in builtin().entries:
                    raise plugin.refusal("NAME_COLLISION", f"{item.name}: there is a family {family.name} already")
                families[family.name] = family
    return families


def is_dialect(label: str) -> bool:
    """Return whether a shipped family has a dialect with this label or name."""
    labels = {known for entry in builtin().entries.values() for known in entry.dialects}
    return label in labels or any(known.partition("@")[0] == label for known in labels)


@lru_cache(maxsize=4)
def with_rules(text: str, file: str) -> Families:
    """Return the shipped families, together with the families and dialects of a user's rules file.

    Raises:
        Refused: with the code CORRUPT if the rules file is faulty; the error lists every problem.
    """
    from transaxle.axes.notation import tables

    builtin_families = builtin()
    return Families(
        builtin_families.entries,
        tables.index(tables.read(text, file=file, known_families=builtin_families, bases=base)),
    )


class _Line(msgspec.Struct, array_like=True, frozen=True):
    """A mapping rule in JSON: name pattern, expression, condition, arithmetic, and whether the rule is only for
    reading, or only for optimizer states.
    """

    name: str
    expression: str
    when: str | None
    lossy: str | None
    read_only: bool | Literal["state"]


class _Dialect(msgspec.Struct, frozen=True):
    version: str | None
    ignored: tuple[str, ...]
    lines: tuple[int, ...]
    """Positions of the dialect's mapping rules in the family's list of rules; dialects may share rules."""
    name: str


_Cut = tuple[str, tuple[str, ...], tuple[str, ...] | None]
"""A `cut` statement: mesh dim, tensor axes, and names of the tensors (None means all tensors)."""


class _FamilyData(msgspec.Struct, frozen=True, omit_defaults=True):
    """A family in JSON: the fields of `Family`, with formulas and name patterns as text."""

    name: str
    model_types: tuple[str, ...]
    axes: dict[str, str | None]
    tensors: dict[str, tuple[tuple[str, ...], str | None]]
    lines: tuple[_Line, ...]
    dialects: tuple[_Dialect, ...]
    named: dict[str, str] = {}
    ties: tuple[tuple[str, str, str], ...] = ()
    cuts: tuple[_Cut, ...] = ()
    other_cuts: tuple[_Cut, ...] = ()
    within: dict[str, str] = {}
    precise: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()
    alike: str = ""
    added: dict[str, str] = {}
    else_zeros: tuple[int, ...] = ()
    """Positions of the mapping rules whose tensors are written as zeros if the source lacks them."""


def spell_out(family: Family) -> bytes:
    """Return a family as JSON text, which `read_spelled` converts back."""
    lines = list(dict.fromkeys(line for dialect in family.dialects for line in dialect.lines))
    position = {line: number for number, line in enumerate(lines)}
    spelled = _FamilyData(
        name=family.name,
        model_types=family.model_types,
        axes={axis: _text(formula) for axis, formula in family.axes.items()},
        tensors={name: (each.axes, _text(each.when)) for name, each in family.tensors.items()},
        lines=tuple(map(_line, lines)),
        dialects=tuple(
            _Dialect(d.version, _texts(d.ignored), tuple(position[line] for line in d.lines), d.name)
            for d in family.dialects
        ),
        named={name: formula.text for name, formula in family.let_formulas.items()},
        ties=tuple((tie.alias, tie.original, tie.when.text) for tie in family.ties),
        cuts=tuple(map(_cut, family.cuts)),
        other_cuts=tuple(map(_cut, family.other_cuts)),
        within=dict(family.within),
        precise=tuple(sorted(family.precise)),
        wrappers=family.wrappers,
        alike=family.alike,
        added={name: when.text for name, when in family.added.items()},
        else_zeros=tuple(number for number, line in enumerate(lines) if line.else_zeros),
    )
    return msgspec.json.encode(spelled)


def _line(line: Line) -> _Line:
    lossy = None if line.lossy is None else line.lossy.text
    read_only: bool | Literal["state"] = "state" if line.of_state else line.read_only
    return _Line(line.name.text, line.expression.text, _text(line.when), lossy, read_only)


def _cut(cut: Cuttable) -> _Cut:
    return cut.mesh, cut.axes, None if cut.tensors is None else tuple(sorted(cut.tensors))


def _cuttable(cut: _Cut) -> Cuttable:
    mesh, axes, of = cut
    return Cuttable(mesh, axes, None if of is None else frozenset(of))


def _text(formula: Formula | None) -> str | None:
    return None if formula is None else formula.text


def _texts(names: Iterable[Name]) -> tuple[str, ...]:
    return tuple(name.text for name in names)


def read_spelled(data: bytes) -> Family:
    """Build a family from the JSON of `spell_out`."""
    spelled = msgspec.json.decode(data, type=_FamilyData)
    let_formulas: dict[str, Formula] = {}

    def formula(text: str) -> Formula:
        return Formula(text, let_formulas)

    def condition(text: str | None) -> Formula | None:
        return None if text is None else formula(text)

    def line(number: int, fields: _Line) -> Line:
        expression = parse(fields.expression, checked=True)
        steps = None if fields.lossy is None else computed.parse(fields.lossy)
        lossy = None if fields.lossy is None or steps is None else Arithmetic(fields.lossy, steps)
        of_state, zeros = fields.read_only == "state", number in spelled.else_zeros
        return Line(
            Name(fields.name), expression, condition(fields.when), lossy, bool(fields.read_only), of_state, zeros
        )

    let_formulas.update({name: formula(text) for name, text in spelled.named.items()})
    lines = [line(number, each) for number, each in enumerate(spelled.lines)]
    return Family(
        name=spelled.name,
        model_types=spelled.model_types,
        axes={axis: condition(text) for axis, text in spelled.axes.items()},
        tensors={name: LogicalTensor(name, axes, condition(when)) for name, (axes, when) in spelled.tensors.items()},
        ties=tuple(Tie(alias, original, formula(when)) for alias, original, when in spelled.ties),
        cuts=tuple(map(_cuttable, spelled.cuts)),
        other_cuts=tuple(map(_cuttable, spelled.other_cuts)),
        within=spelled.within,
        let_formulas=let_formulas,
        dialects=tuple(
            Dialect(d.name, d.version, tuple(lines[at] for at in d.lines), tuple(map(Name, d.ignored)))
            for d in spelled.dialects
        ),
        wrappers=spelled.wrappers,
        alike=spelled.alike,
        precise=frozenset(spelled.precise),
        added={name: formula(text) for name, text in spelled.added.items()},
    )
