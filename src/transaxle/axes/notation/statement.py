"""Statements: the lines of a rules file, which describes model families and dialects, with file name and line number.

If a family inherits from another family, its own statements and the inherited statements are first combined in one
table without `like`, and only the combined table is parsed. So a table that inherits means exactly what its combined
form means.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from transaxle.errors import Refusal, TransaxleError, Where, refuse

HINT = "The grammar is on the documentation's page Notation: docs/reference/notation.md."
"""Hint in every syntax error of a rules file: where the grammar is documented."""
WORD = r"[A-Za-z_][A-Za-z0-9_]*"
_TEXT = re.compile(r'"[^"]*"')
FAMILY, BLOCK, DIALECT = "family", "block", "dialect"
"""Keywords that begin a family, a block (statements that several families inherit), and a dialect."""
MODEL_TYPE, WRAPPER, ALIKE, AXES, AXIS, LET, TIE, CUT, PRECISE, ADDED = (
    "model_type", "wrapper", "alike", "axes", "axis", "let", "tie", "cut", "precise", "added",
)  # fmt: skip
"""Keywords that begin the statements of a family; a statement without a keyword declares a logical tensor."""
IDENTIFYING = frozenset({MODEL_TYPE, WRAPPER, ALIKE})
"""Keywords of the statements that identify the models of a family; these statements are never inherited."""
WITHOUT, KEEP = "without", "dialects"
"""Keywords: `without` excludes inherited tensors, and `dialects` selects which inherited dialects are kept."""
MOUNT = "mount"
"""Keyword of the statement by which a family contains a second family, such as a vision tower."""
IGNORE, ALSO, PLACE, STATE = "ignore", "also", "place", "state"
"""Keywords of statements in a dialect; a statement without a keyword is a mapping rule `name = expression`."""
_KINDS = frozenset({IGNORE, ALSO, PLACE, STATE, WITHOUT})
ENCODINGS = ("float8", "float8_block", "mxfp8", "mxfp4", "nvfp4", "int4", "int8", "nf4", "fp4")
"""Names of encodings that the condition (`when …`) of a mapping rule may contain."""
TENSOR, LINE, WITHIN = "tensor", "line", "within"
_REMOVABLE = frozenset({AXIS, LET, TIE, CUT})
"""Keywords that may follow `without`, if it excludes statements other than declarations of tensors."""
OPTIONAL = " optional"
LOSSY = " lossy:"
ELSE_ZEROS = " else zeros"
_WHEN = re.compile(r"(?<!\s)\s+when\s+")
_COMPONENT = re.compile(rf"^\s*({WORD})\s*\[|({WORD})\s*:")
NONE = "none"
"""Word in place of the axes of a `cut` statement, which means that every rank has the whole tensor."""
_CUT = re.compile(r"cut\s+([\w@]+)\s*=\s*(.*?)\s*(?:(\bof\b.*|\bwithin\b.*))?")
_CUT_ITEM = re.compile(r"\([^()]*\)|[^\s()]+")


class Statement:
    """One statement of a rules file: a line of its text.

    Args:
        text: the text of the statement, without a comment.
        raw: the statement's line exactly as in the file, which errors show.
        file: name of the rules file.
        line: line number in the file, counted from 1.
        owner: name of the family or block that contains the statement.
        tensors: names of the logical tensors in the statement, if the caller knows them already.
    """

    __slots__ = ("_held", "file", "head", "line", "owner", "raw", "text")

    def __init__(
        self, text: str, raw: str, file: str, line: int, owner: str = "", tensors: tuple[str, ...] | None = None
    ) -> None:
        self.text, self.raw, self.file, self.line, self.owner = text, raw, file, line, owner
        self.head = text.split(None, 1)[0] if text else ""
        self._held = tensors

    def with_text(self, text: str) -> Statement:
        """Return a copy of this statement with a different text, at the same place in the file."""
        return Statement(text, self.raw, self.file, self.line, self.owner)

    def with_name(self, text: str) -> Statement:
        """Return a copy of this mapping rule with a different stored name."""
        return Statement(text, self.raw, self.file, self.line, self.owner, self.tensors)

    @property
    def kind(self) -> str:
        """Kind of a statement in a dialect: the keyword, or `LINE` for a mapping rule, which has no keyword."""
        return self.head if self.head in _KINDS else LINE

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the logical tensors in a mapping rule; empty if the statement is not a mapping rule."""
        if self._held is None:
            is_line = self.head not in _KINDS or self.head in (ALSO, STATE)
            self._held = components(self.text) if is_line else ()
        return self._held

    @property
    def key(self) -> tuple[str, str, int]:
        """Text, file and line of the statement; two statements with equal keys count as the same statement."""
        return self.text, self.file, self.line

    @property
    def where(self) -> Where:
        """File and line of the statement, as error messages show them."""
        return Where(f"{self.file}, line {self.line}")

    def fail(self, expected: str, word: str = "", hint: str = HINT) -> TransaxleError:
        """Build a syntax error for this statement that marks the last occurrence of the faulty text `word`."""
        places = [match.start() for match in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", self.raw)] if word else []
        column = places[-1] if places else len(self.raw) - len(self.raw.lstrip())
        return refuse("CORRUPT", f"{self.raw}\n{' ' * column}^\ncolumn {column + 1}: expected {expected}", hint=hint)

    def problem(self, expected: str, word: str = "", hint: str = HINT) -> Refusal:
        """Build the record of a syntax error in this statement, with the statement's file and line."""
        (refusal,) = self.fail(expected, word, hint).refusals
        return Refusal(refusal.code, refusal.message, self.where, refusal.hint)


def split_when(text: str) -> tuple[str, str | None]:
    """Split a statement from its condition; the word `optional` becomes the condition `None`, whose value is
    unknown.
    """
    if text.endswith(OPTIONAL):
        return text.removesuffix(OPTIONAL).strip(), "None"
    if "when" not in text:
        return text.strip(), None
    parts = _WHEN.split(text, maxsplit=1)
    return parts[0].strip(), parts[1].strip() if len(parts) == 2 else None


def join_conditions(conditions: Iterable[str | None]) -> str | None:
    """Join the texts of conditions with `and`; a condition of None is always true and is omitted."""
    parts = [condition for condition in conditions if condition is not None]
    if len(parts) > 1:
        parts = [f"({part})" if re.search(r"\b(or|if)\b", part) else part for part in parts]
    return " and ".join(parts) or None


def components(text: str) -> tuple[str, ...]:
    """Return the names of the logical tensors in the text of a mapping rule."""
    expression = split_when(text)[0].partition("=")[2].partition(LOSSY)[0]
    return tuple(first or second for first, second in _COMPONENT.findall(expression))


Key = tuple[str, str]
"""Kind of a family's statement, and the name that the statement declares, such as `("axis", "l")`."""
KeyedPart = tuple[Key, Statement]


def replaceable_parts(statement: Statement) -> Iterator[KeyedPart]:
    """Split a family's statement into the parts that an inheriting family can replace, each with its kind and name."""
    head, *words = statement.text.split()
    tail = statement.text[len(head) :].strip()
    if head in (AXES, PRECISE):
        kind = AXIS if head == AXES else PRECISE
        for item in words:
            yield (kind, item.partition("=")[0]), statement.with_text(f"{head} {item}")
    elif head == CUT:
        yield from _keyed_cuts(statement)
    elif head in (AXIS, LET, TIE):
        yield (head, tail.partition("=")[0].strip()), statement
    elif head == ADDED:
        yield (head, split_when(tail)[0]), statement
    elif head in IDENTIFYING:
        yield (head, ""), statement
    else:
        yield (TENSOR, statement.text.partition(":")[0].strip()), statement


def _keyed_cuts(statement: Statement) -> Iterator[KeyedPart]:
    match = _CUT.fullmatch(statement.text)
    if match is None or (match[3] or "").startswith(WITHIN):
        yield (WITHIN, match[2] if match is not None else statement.text), statement
        return
    mesh, items, tensors = match[1], match[2], match[3] or ""
    for item in _CUT_ITEM.findall(items):
        name = " ".join(item.strip("()").split())
        if mesh != "tp":  # only `cut tp` replaces an inherited `cut tp`
            name = f"{mesh} {name} {tensors}".strip() if name == NONE else f"{mesh} {name}"
        yield (CUT, name), statement.with_text(f"cut {mesh} = {item} {tensors}".strip())


def keys_left_out(statement: Statement) -> list[Key]:
    """Return kind and name of each inherited statement that a family's `without` statement excludes."""
    words = statement.text.split()[1:]
    kind = words.pop(0) if len(words) > 1 and words[0] in _REMOVABLE else TENSOR
    kinds = (CUT, WITHIN) if kind == CUT else (kind,)
    return [(each, name) for name in words for each in kinds]


def tensors_left_out(statements: Iterable[Statement]) -> set[str]:
    """Return the logical tensors that a dialect excludes by `without`, together with their inherited mapping rules."""
    return {name for each in statements if each.head == WITHOUT for name in each.text.split()[1:]}


def own_axes(statement: Statement) -> frozenset[str]:
    """Return the names of the axes that a declaration of a logical tensor lists."""
    return frozenset(split_when(statement.text)[0].partition(":")[2].split())


def in_order(statements: Sequence[Statement]) -> list[Statement]:
    """Sort the statements of axes, or of named formulas, so that each statement is after the names that its formula
    uses.
    """
    from graphlib import CycleError, TopologicalSorter

    names = {name: statement for statement in statements for (_, name), _ in replaceable_parts(statement)}
    if len(names) != len(statements):  # a name is declared twice: the table parser will report it
        return list(statements)
    needs = {
        name: set(re.findall(WORD, _TEXT.sub("", statement.text.partition("=")[2]))) & names.keys() - {name}
        for name, statement in names.items()
    }
    try:
        return [names[name] for name in TopologicalSorter(needs).static_order()]
    except CycleError:  # the table parser will report the first statement of the cycle
        return list(statements)
