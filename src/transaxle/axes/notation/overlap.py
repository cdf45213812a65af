"""Overlap: whether two lines of a dialect claim one stored name, so that the first would swallow what is the other's.

Name patterns are unified: what is no digit must agree, and in each run of digits some number must be in the ranges of
both holes. Where some name is of both lines, their conditions decide: a name may be of two lines of which only one can
hold.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, product

from transaxle.axes.notation.family import Family, Line
from transaxle.axes.notation.formula import Formula
from transaxle.axes.notation.name import Hole, Name
from transaxle.axes.notation.number_format import WORDS
from transaxle.errors import TransaxleError, refuse

_RUN = re.compile(r"[0-9]+")
_NUMBERS = 40
"""Numbers that are tried where a range has no end that is known, beside those that the lines name."""
_NAMES = 200
"""Common names for which the conditions are held against each other."""
_PAIRS = 10_000
"""Pairs of lines of one dialect whose names differ in digits only; tables have a few dozen."""
_ATOMS = 12
"""Parts of two conditions that are looked at in every combination."""
_NEGATED: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.NotEq: ast.Eq, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.NotIn: ast.In,
}  # fmt: skip
_Run = tuple[str | Hole, ...]
"""Digits and holes that stand next to each other."""
_Seen = tuple[Line, list[_Run]]


def overlapping(lines: Iterable[Line], family: Family) -> Iterator[tuple[Line, Line, str]]:
    """Yield pairs of lines that claim one name, each with such a name.

    Raises:
        Refused: CORRUPT where too many lines have names that differ in digits only.
    """
    pairs = 0
    by_text: dict[str, tuple[list[_Seen], dict[str, list[_Seen]]]] = {}
    for line in lines:
        texts, runs = _runs(line.name)
        with_holes, without = by_text.setdefault("0".join(texts), ([], {}))
        single = line.name.text if not line.name.holes else None
        fixed = [seen for each in without.values() for seen in each] if single is None else without.get(single, [])
        pairs += len(with_holes) + len(fixed)
        if pairs > _PAIRS:
            message = f"{line.text}\nmore than {_PAIRS:,} pairs of lines have names that differ in digits only"
            raise refuse("CORRUPT", message, hint="put the numbers into holes, as in layers.{l}")
        for other, theirs in (*with_holes, *fixed):
            if line.when is None and other.when is None and line.name == other.name:
                continue  # the reader of tables says so where the second one stands
            name = _common(other, theirs, line, runs, texts, family)
            if name is not None:
                yield other, line, name
        (with_holes if single is None else without.setdefault(single, [])).append((line, runs))


def _runs(name: Name) -> tuple[list[str], list[_Run]]:
    """Split a pattern into what is no digit, and the runs of digits and holes between."""
    texts, runs = [""], list[_Run]()
    holes = iter(name.holes)
    run: list[str | Hole] = []

    def text(part: str) -> None:
        nonlocal run
        if part:
            if run:
                runs.append(tuple(run))
                texts.append("")
                run = []
            texts[-1] += part

    for number, literal in enumerate(name.literals):
        if number:
            run.append(next(holes))
        end = 0
        for digits in _RUN.finditer(literal):
            text(literal[end : digits.start()])
            run.append(digits[0])
            end = digits.end()
        text(literal[end:])
    if run:
        runs.append(tuple(run))
        texts.append("")
    return texts, runs


def _common(
    first: Line, theirs: list[_Run], second: Line, runs: list[_Run], texts: list[str], family: Family
) -> str | None:
    """Return a name that both lines hold, or None."""
    shared = [list(islice(_shared(one, two, family), _NUMBERS)) for one, two in zip(theirs, runs, strict=True)]
    for digits in islice(product(*shared), _NAMES):
        name = texts[0] + "".join(f"{number}{text}" for number, text in zip(digits, texts[1:], strict=True))
        if _both_hold([(line, _index(line, name)) for line in (first, second)]):
            return name
    return None


def _shared(one: _Run, two: _Run, family: Family) -> Iterator[str]:
    """Yield digits that both runs may stand for."""
    if len(one) == len(two) == 1 and isinstance(one[0], Hole) and isinstance(two[0], Hole):
        a, b = one[0], two[0]
        if not (_below(a, b, family) or _below(b, a, family)):
            numbers = {number for hole in (a, b) for edge in _range(hole, family) for number in (edge, edge - 1)}
            for number in sorted(numbers | set(range(_NUMBERS))):
                if _in(number, a, family) and _in(number, b, family):
                    yield str(number)
        return
    seen = dict.fromkeys(digits for digits in _digits(one, family) if _matches(two, digits, family))
    yield from seen or dict.fromkeys(digits for digits in _digits(two, family) if _matches(one, digits, family))


def _digits(run: _Run, family: Family) -> Iterator[str]:
    """Yield the first of the digits that a run may stand for."""
    choices = [[part] if isinstance(part, str) else _numbers(part, family) for part in run]
    return ("".join(parts) for parts in product(*choices))


def _numbers(hole: Hole, family: Family) -> list[str]:
    low, high = _range(hole, family)
    return [str(number) for number in range(low, min(high, low + 2 * _NUMBERS))]


def _matches(run: _Run, digits: str, family: Family) -> bool:
    if not run:
        return not digits
    head, rest = run[0], run[1:]
    if isinstance(head, str):
        return digits.startswith(head) and _matches(rest, digits[len(head) :], family)
    ends = (end for end in range(1, len(digits) + 1) if str(int(digits[:end])) == digits[:end])
    return any(_in(int(digits[:end]), head, family) and _matches(rest, digits[end:], family) for end in ends)


def _in(number: int, hole: Hole, family: Family) -> bool:
    low, high = _range(hole, family)
    return low <= number < high


def _range(hole: Hole, family: Family) -> tuple[int, int]:
    """Return the first number of a hole and the one after its last, as far as the table itself says them."""
    shift = hole.shift or "+0"
    known = int(shift) if shift[1:].isdigit() else None
    size = _constant(family, hole.axis)
    high = size + known if size is not None and known is not None else 10**10
    return max(known or 0, 0), high


def _constant(family: Family, axis: str) -> int | None:
    formula = family.axes.get(axis)
    try:
        value = None if formula is None or formula.names else formula({})
    except TransaxleError:
        return None
    return value if isinstance(value, int) else None


def _below(first: Hole, second: Hole, family: Family) -> bool:
    """Tell whether all numbers of one hole are below those of the other, whatever the sizes."""
    other = second.shift_axis
    if first.shift is not None or other is None or (second.shift or "").startswith("-"):
        return False
    sizes = family.axes.get(first.axis), family.axes.get(other)
    return first.axis == other or (sizes[0] is not None and sizes[0] == sizes[1])


def _index(line: Line, name: str) -> dict[str, int]:
    """Return the indices of a line at a name, as far as the table itself says them."""
    found = {}
    numbers = line.name.match(name) or ()
    for hole, number in zip(line.name.holes, numbers, strict=False):
        shift = hole.shift or "+0"
        if shift[1:].isdigit():
            found[hole.axis] = number - int(shift)
    return found


class _Known(ast.NodeTransformer):
    """Puts the indices of a name into a condition."""

    def __init__(self, index: Mapping[str, int]) -> None:
        self.index = index

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self.index[node.id]) if node.id in self.index else node


def _both_hold(lines: list[tuple[Line, dict[str, int]]]) -> bool:
    """Tell whether the conditions of two lines may hold at once."""
    trees = []
    for line, index in lines:
        if line.when is not None:
            trees.append(_Known(index).visit(ast.parse(ast.unparse(line.when.tree), mode="eval").body))
    atoms: dict[str, ast.expr] = {}
    for tree in trees:
        _atoms(tree, atoms)
    keys = list(atoms)[:_ATOMS]
    for values in product((True, False), repeat=len(keys)):
        truth = dict(zip(keys, values, strict=True))
        if _possible(truth, atoms) and all(_value(tree, truth) is not False for tree in trees):
            return True
    return False


def _atom(node: ast.expr) -> tuple[str, bool, ast.expr]:
    """Return what names a part of a condition, whether it is meant as it stands, and the part."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _NEGATED:
        turned = ast.Compare(node.left, [_NEGATED[type(node.ops[0])]()], node.comparators)
        return ast.unparse(turned), False, turned
    return ast.unparse(node), True, node


def _atoms(node: ast.expr, found: dict[str, ast.expr]) -> None:
    if isinstance(node, ast.BoolOp):
        for part in node.values:
            _atoms(part, found)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        _atoms(node.operand, found)
    else:
        key, _, atom = _atom(node)
        found[key] = atom


def _value(node: ast.expr, truth: Mapping[str, bool]) -> bool | None:
    if isinstance(node, ast.BoolOp):
        values = [_value(part, truth) for part in node.values]
        decides = isinstance(node.op, ast.Or)
        return decides if decides in values else None if None in values else not decides
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        value = _value(node.operand, truth)
        return None if value is None else not value
    key, plain, _ = _atom(node)
    return (truth[key] is plain) if key in truth else None


def _possible(truth: Mapping[str, bool], atoms: Mapping[str, ast.expr]) -> bool:
    """Tell whether parts can be so together: numbers compare as they do, one thing equals one value, one encoding."""
    equal: dict[str, str] = {}
    encodings = 0
    for key, value in truth.items():
        atom = atoms[key]
        formula = Formula(key)
        if not formula.names:
            try:
                told = formula({})
            except TransaxleError:
                told = None
            if told is not None and bool(told) is not value:
                return False
        encodings += value and key in WORDS
        if value and isinstance(atom, ast.Compare) and isinstance(atom.ops[0], ast.Eq) and len(atom.ops) == 1:
            left, right = ast.unparse(atom.left), atom.comparators[0]
            if isinstance(right, ast.Constant) and equal.setdefault(left, ast.unparse(right)) != ast.unparse(right):
                return False
    return encodings <= 1
