"""Statements: the lines of a table as text, each with the place where it stands.

A family that builds on another is first spelled out: its statements and those that it takes over become one table
without `like`, and only that table is read. So nothing can mean anything else than its spelled-out form.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from transaxle.errors import Refusal, TransaxleError, Where, refuse

HINT = "The grammar is on the documentation's page Notation: docs/reference/notation.md."
"""Where errors of the grammar send the reader."""
WORD = r"[A-Za-z_][A-Za-z0-9_]*"
_TEXT = re.compile(r'"[^"]*"')
FAMILY, BLOCK, DIALECT = "family", "block", "dialect"
"""Words that begin a family, a part that families take over, and a dialect."""
MODEL_TYPE, WRAPPER, ALIKE, AXES, AXIS, LET, TIE, CUT, PRECISE, ADDED = (
    "model_type", "wrapper", "alike", "axes", "axis", "let", "tie", "cut", "precise", "added",
)  # fmt: skip
"""Words that begin a family's statements; whatever begins with none of them declares a tensor."""
IDENTIFYING = frozenset({MODEL_TYPE, WRAPPER, ALIKE})
"""Those that say which models a family is of; no other family takes them over."""
WITHOUT, KEEP = "without", "dialects"
"""Words that begin what a family leaves out of what it takes over."""
MOUNT = "mount"
"""The word before another family that is a part of this one."""
IGNORE, ALSO, PLACE, STATE = "ignore", "also", "place", "state"
"""Words that begin a dialect's statements; whatever begins with none of them is a line."""
_KINDS = frozenset({IGNORE, ALSO, PLACE, STATE, WITHOUT})
ENCODINGS = ("float8", "float8_block", "mxfp8", "mxfp4", "nvfp4")
"""Words that mean encodings in the conditions of a dialect's lines."""
TENSOR, LINE, WITHIN = "tensor", "line", "within"
_REMOVABLE = frozenset({AXIS, LET, TIE, CUT})
"""Words after `without` that say that no tensor is left out."""
OPTIONAL = " optional"
LOSSY = " lossy:"
ELSE_ZEROS = " else zeros"
_WHEN = re.compile(r"(?<!\s)\s+when\s+")
_COMPONENT = re.compile(rf"^\s*({WORD})\s*\[|({WORD})\s*:")
NONE = "none"
"""In place of the axes of a `cut`: every rank has all of these tensors."""
_CUT = re.compile(r"cut\s+([\w@]+)\s*=\s*(.*?)\s*(?:(\bof\b.*|\bwithin\b.*))?")
_CUT_ITEM = re.compile(r"\([^()]*\)|[^\s()]+")


class Statement:
    """One statement of a table.

    Args:
        text: what it says, without its comment.
        raw: its line in the file, which errors show.
        file: name of the file.
        line: number of the line, from 1.
        owner: the family or block in which it is written.
        held: the logical tensors in it, where they are known already.
    """

    __slots__ = ("_held", "file", "head", "line", "owner", "raw", "text")

    def __init__(
        self, text: str, raw: str, file: str, line: int, owner: str = "", held: tuple[str, ...] | None = None
    ) -> None:
        self.text, self.raw, self.file, self.line, self.owner = text, raw, file, line, owner
        self.head = text.split(None, 1)[0] if text else ""
        self._held = held

    def saying(self, text: str) -> Statement:
        """Return another statement of the same place."""
        return Statement(text, self.raw, self.file, self.line, self.owner)

    def named(self, text: str) -> Statement:
        """Return this line of a dialect under another name."""
        return Statement(text, self.raw, self.file, self.line, self.owner, self.held)

    @property
    def kind(self) -> str:
        """Which kind of a dialect's statements it is: the word it begins with, or `LINE`."""
        return self.head if self.head in _KINDS else LINE

    @property
    def held(self) -> tuple[str, ...]:
        """The logical tensors in it; none where it is no line of a dialect."""
        if self._held is None:
            is_line = self.head not in _KINDS or self.head in (ALSO, STATE)
            self._held = components(self.text) if is_line else ()
        return self._held

    @property
    def key(self) -> tuple[str, str, int]:
        """What it says, and where: equal for two that are spelled out alike from one place."""
        return self.text, self.file, self.line

    @property
    def where(self) -> Where:
        """Its place, for errors."""
        return Where(f"{self.file}, line {self.line}")

    def expected(self, wanted: str, word: str = "", hint: str = HINT) -> TransaxleError:
        """Build the refusal of this statement; `word` is the wrong word in it, whose last occurrence is marked."""
        places = [match.start() for match in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", self.raw)] if word else []
        column = places[-1] if places else len(self.raw) - len(self.raw.lstrip())
        return refuse("CORRUPT", f"{self.raw}\n{' ' * column}^\ncolumn {column + 1}: expected {wanted}", hint=hint)

    def problem(self, wanted: str, word: str = "", hint: str = HINT) -> Refusal:
        """Return the refusal of this statement, with its place."""
        (refusal,) = self.expected(wanted, word, hint).refusals
        return Refusal(refusal.code, refusal.message, self.where, refusal.hint)


def split_when(text: str) -> tuple[str, str | None]:
    """Split off a statement's condition; `optional` is the condition `None`, whose value is never known."""
    if text.endswith(OPTIONAL):
        return text.removesuffix(OPTIONAL).strip(), "None"
    if "when" not in text:
        return text.strip(), None
    parts = _WHEN.split(text, maxsplit=1)
    return parts[0].strip(), parts[1].strip() if len(parts) == 2 else None


def both(conditions: Iterable[str | None]) -> str | None:
    """Join conditions that must all hold; None always does."""
    parts = [condition for condition in conditions if condition is not None]
    if len(parts) > 1:
        parts = [f"({part})" if re.search(r"\b(or|if)\b", part) else part for part in parts]
    return " and ".join(parts) or None


def components(text: str) -> tuple[str, ...]:
    """Return the logical tensors in a line of a dialect."""
    expression = split_when(text)[0].partition("=")[2].partition(LOSSY)[0]
    return tuple(first or second for first, second in _COMPONENT.findall(expression))


Key = tuple[str, str]
"""Kind of a family's statement, and what it speaks of: `("axis", "l")`."""
Keyed = tuple[Key, Statement]


def keyed(statement: Statement) -> Iterator[Keyed]:
    """Yield a family's statement in parts that can be replaced, each with its kind and what it speaks of."""
    head, *words = statement.text.split()
    rest = statement.text[len(head) :].strip()
    if head in (AXES, PRECISE):
        kind = AXIS if head == AXES else PRECISE
        for item in words:
            yield (kind, item.partition("=")[0]), statement.saying(f"{head} {item}")
    elif head == CUT:
        yield from _keyed_cuts(statement)
    elif head in (AXIS, LET, TIE):
        yield (head, rest.partition("=")[0].strip()), statement
    elif head == ADDED:
        yield (head, split_when(rest)[0]), statement
    elif head in IDENTIFYING:
        yield (head, ""), statement
    else:
        yield (TENSOR, statement.text.partition(":")[0].strip()), statement


def _keyed_cuts(statement: Statement) -> Iterator[Keyed]:
    match = _CUT.fullmatch(statement.text)
    if match is None or (match[3] or "").startswith(WITHIN):
        yield (WITHIN, match[2] if match is not None else statement.text), statement
        return
    mesh, items, tensors = match[1], match[2], match[3] or ""
    for item in _CUT_ITEM.findall(items):
        name = " ".join(item.strip("()").split())
        if mesh != "tp":  # beside the cuts of all dialects, not in their place
            name = f"{mesh} {name} {tensors}".strip() if name == NONE else f"{mesh} {name}"
        yield (CUT, name), statement.saying(f"cut {mesh} = {item} {tensors}".strip())


def left_out_of(statement: Statement) -> list[Key]:
    """Return what a family's `without` leaves out."""
    words = statement.text.split()[1:]
    kind = words.pop(0) if len(words) > 1 and words[0] in _REMOVABLE else TENSOR
    kinds = (CUT, WITHIN) if kind == CUT else (kind,)
    return [(each, name) for name in words for each in kinds]


def tensors_left_out(statements: Iterable[Statement]) -> set[str]:
    """Return the tensors of which a dialect says that it takes no line over."""
    return {name for each in statements if each.head == WITHOUT for name in each.text.split()[1:]}


def own_axes(statement: Statement) -> frozenset[str]:
    """Return the axes of the tensor that a statement declares."""
    return frozenset(split_when(statement.text)[0].partition(":")[2].split())


def in_order(statements: Sequence[Statement]) -> list[Statement]:
    """Sort the axes, or the named formulas, of a family so that each comes after those that its formula names."""
    from graphlib import CycleError, TopologicalSorter

    names = {name: statement for statement in statements for (_, name), _ in keyed(statement)}
    if len(names) != len(statements):  # one is declared twice: the reader of tables says so
        return list(statements)
    needs = {
        name: set(re.findall(WORD, _TEXT.sub("", statement.text.partition("=")[2]))) & names.keys() - {name}
        for name, statement in names.items()
    }
    try:
        return [names[name] for name in TopologicalSorter(needs).static_order()]
    except CycleError:  # the first of the circle that the reader meets is refused
        return list(statements)
