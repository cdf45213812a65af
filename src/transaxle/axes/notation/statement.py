"""Statements: the lines of a table as text, each with its file and line number.

A family that inherits from another one is spelled out first: its own statements and the inherited ones become one table
without `like`, and only that table is parsed. So a table always means exactly what its spelled-out form means.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from transaxle.errors import Refusal, TransaxleError, Where, refuse

HINT = "The grammar is on the documentation's page Notation: docs/reference/notation.md."
"""Hint of every error in the grammar: where it is documented."""
WORD = r"[A-Za-z_][A-Za-z0-9_]*"
_TEXT = re.compile(r'"[^"]*"')
FAMILY, BLOCK, DIALECT = "family", "block", "dialect"
"""Keywords that begin a family, a block that families inherit, and a dialect."""
MODEL_TYPE, WRAPPER, ALIKE, AXES, AXIS, LET, TIE, CUT, PRECISE, ADDED = (
    "model_type", "wrapper", "alike", "axes", "axis", "let", "tie", "cut", "precise", "added",
)  # fmt: skip
"""Keywords that begin a family's statements; a statement without one declares a tensor."""
IDENTIFYING = frozenset({MODEL_TYPE, WRAPPER, ALIKE})
"""Keywords of statements that identify a family's models; they are never inherited."""
WITHOUT, KEEP = "without", "dialects"
"""Keywords of statements that exclude inherited tensors or dialects."""
MOUNT = "mount"
"""Keyword before another family that becomes part of this one."""
IGNORE, ALSO, PLACE, STATE = "ignore", "also", "place", "state"
"""Keywords that begin a dialect's statements; a statement without one is a line."""
_KINDS = frozenset({IGNORE, ALSO, PLACE, STATE, WITHOUT})
ENCODINGS = ("float8", "float8_block", "mxfp8", "mxfp4", "nvfp4")
"""Names of encodings in the conditions of a dialect's lines."""
TENSOR, LINE, WITHIN = "tensor", "line", "within"
_REMOVABLE = frozenset({AXIS, LET, TIE, CUT})
"""Keywords after `without` that exclude other statements than tensors."""
OPTIONAL = " optional"
LOSSY = " lossy:"
ELSE_ZEROS = " else zeros"
_WHEN = re.compile(r"(?<!\s)\s+when\s+")
_COMPONENT = re.compile(rf"^\s*({WORD})\s*\[|({WORD})\s*:")
NONE = "none"
"""Replaces the axes in a `cut` statement: every rank has all of these tensors."""
_CUT = re.compile(r"cut\s+([\w@]+)\s*=\s*(.*?)\s*(?:(\bof\b.*|\bwithin\b.*))?")
_CUT_ITEM = re.compile(r"\([^()]*\)|[^\s()]+")


class Statement:
    """One statement of a table.

    Args:
        text: the statement without its comment.
        raw: its line in the file, as errors show it.
        file: name of the file.
        line: number of the line, from 1.
        owner: the family or block that the statement is written in.
        tensors: the logical tensors in it, where already known.
    """

    __slots__ = ("_held", "file", "head", "line", "owner", "raw", "text")

    def __init__(
        self, text: str, raw: str, file: str, line: int, owner: str = "", tensors: tuple[str, ...] | None = None
    ) -> None:
        self.text, self.raw, self.file, self.line, self.owner = text, raw, file, line, owner
        self.head = text.split(None, 1)[0] if text else ""
        self._held = tensors

    def with_text(self, text: str) -> Statement:
        """Return another statement at the same place in the file."""
        return Statement(text, self.raw, self.file, self.line, self.owner)

    def with_name(self, text: str) -> Statement:
        """Return this line of a dialect with another stored name."""
        return Statement(text, self.raw, self.file, self.line, self.owner, self.tensors)

    @property
    def kind(self) -> str:
        """Kind of a dialect's statement: its keyword, or `LINE`."""
        return self.head if self.head in _KINDS else LINE

    @property
    def tensors(self) -> tuple[str, ...]:
        """The logical tensors in a line of a dialect; empty for other statements."""
        if self._held is None:
            is_line = self.head not in _KINDS or self.head in (ALSO, STATE)
            self._held = components(self.text) if is_line else ()
        return self._held

    @property
    def key(self) -> tuple[str, str, int]:
        """Key that is equal for two equal statements from the same line of a file."""
        return self.text, self.file, self.line

    @property
    def where(self) -> Where:
        """File and line, for errors."""
        return Where(f"{self.file}, line {self.line}")

    def fail(self, expected: str, word: str = "", hint: str = HINT) -> TransaxleError:
        """Build the error for this statement; it marks the last occurrence of `word`, the wrong word."""
        places = [match.start() for match in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", self.raw)] if word else []
        column = places[-1] if places else len(self.raw) - len(self.raw.lstrip())
        return refuse("CORRUPT", f"{self.raw}\n{' ' * column}^\ncolumn {column + 1}: expected {expected}", hint=hint)

    def problem(self, expected: str, word: str = "", hint: str = HINT) -> Refusal:
        """Build the refusal for this statement, with its file and line."""
        (refusal,) = self.fail(expected, word, hint).refusals
        return Refusal(refusal.code, refusal.message, self.where, refusal.hint)


def split_when(text: str) -> tuple[str, str | None]:
    """Split off a statement's condition; `optional` becomes the condition `None`, whose value is never known."""
    if text.endswith(OPTIONAL):
        return text.removesuffix(OPTIONAL).strip(), "None"
    if "when" not in text:
        return text.strip(), None
    parts = _WHEN.split(text, maxsplit=1)
    return parts[0].strip(), parts[1].strip() if len(parts) == 2 else None


def join_conditions(conditions: Iterable[str | None]) -> str | None:
    """Join conditions with `and`; None is always true."""
    parts = [condition for condition in conditions if condition is not None]
    if len(parts) > 1:
        parts = [f"({part})" if re.search(r"\b(or|if)\b", part) else part for part in parts]
    return " and ".join(parts) or None


def components(text: str) -> tuple[str, ...]:
    """Return the names of the logical tensors in a line of a dialect."""
    expression = split_when(text)[0].partition("=")[2].partition(LOSSY)[0]
    return tuple(first or second for first, second in _COMPONENT.findall(expression))


Key = tuple[str, str]
"""Kind and name of a family's statement: `("axis", "l")`."""
KeyedPart = tuple[Key, Statement]


def replaceable_parts(statement: Statement) -> Iterator[KeyedPart]:
    """Split a family's statement into parts that can be replaced separately, each with its kind and name."""
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
        if mesh != "tp":  # other meshes add to the cuts along `tp` and do not replace them
            name = f"{mesh} {name} {tensors}".strip() if name == NONE else f"{mesh} {name}"
        yield (CUT, name), statement.with_text(f"cut {mesh} = {item} {tensors}".strip())


def keys_left_out(statement: Statement) -> list[Key]:
    """Return the keys of the inherited statements that a family's `without` excludes."""
    words = statement.text.split()[1:]
    kind = words.pop(0) if len(words) > 1 and words[0] in _REMOVABLE else TENSOR
    kinds = (CUT, WITHIN) if kind == CUT else (kind,)
    return [(each, name) for name in words for each in kinds]


def tensors_left_out(statements: Iterable[Statement]) -> set[str]:
    """Return the tensors whose inherited lines a dialect excludes."""
    return {name for each in statements if each.head == WITHOUT for name in each.text.split()[1:]}


def own_axes(statement: Statement) -> frozenset[str]:
    """Return the axes of the tensor that a statement declares."""
    return frozenset(split_when(statement.text)[0].partition(":")[2].split())


def in_order(statements: Sequence[Statement]) -> list[Statement]:
    """Sort a family's axes, or its named formulas, so that each one follows those in its formula."""
    from graphlib import CycleError, TopologicalSorter

    names = {name: statement for statement in statements for (_, name), _ in replaceable_parts(statement)}
    if len(names) != len(statements):  # a name is declared twice, which the table parser refuses
        return list(statements)
    needs = {
        name: set(re.findall(WORD, _TEXT.sub("", statement.text.partition("=")[2]))) & names.keys() - {name}
        for name, statement in names.items()
    }
    try:
        return [names[name] for name in TopologicalSorter(needs).static_order()]
    except CycleError:  # the table parser refuses the first statement in the cycle
        return list(statements)
