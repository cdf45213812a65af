"""Checks whether two mapping rules of a dialect match the same stored name, so that either rule could describe the
tensor.

Two name patterns overlap if the texts between their numbers are equal, and each number can have a value that both
patterns allow. Two mapping rules are allowed to match the same name if their conditions (`when …`) can never be true
together.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, product
from math import prod

from transaxle.axes.notation.family import WORDS, Family, Formula, Line, Tie
from transaxle.axes.notation.name import Hole, Name
from transaxle.errors import TransaxleError, refuse

_RUN = re.compile(r"[0-9]+")
_NUMBERS = 40
"""Maximum number of values that are tried for a placeholder in a name pattern, if the end of its range is unknown."""
_NAMES = 200
"""Maximum number of names that two mapping rules both match and for which their conditions are compared."""
_PAIRS = 10_000
"""Maximum number of pairs of mapping rules in a dialect whose names differ only in digits; real tables have a few
dozen.
"""
_ATOMS = 12
"""Maximum number of elementary comparisons (atoms) in conditions, for which all combinations of truth values
are tried.
"""
_MOST_TIED = 50
"""Maximum number of tensors that are tied to one tensor, directly or through further ties; real tables have four."""
_NEGATED: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.NotEq: ast.Eq, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.NotIn: ast.In,
}  # fmt: skip
_Run = tuple[str | Hole, ...]
"""A section of a name pattern that matches only digits: literal digits and placeholders without text between them."""
_LineRuns = tuple[Line, list[_Run]]


def find_overlaps(lines: Iterable[Line], family: Family) -> Iterator[tuple[Line, Line, str]]:
    """Yield each pair of mapping rules that match the same stored name, together with an example of such a name.

    Raises:
        Refused: with the code CORRUPT if so many mapping rules have names that differ only in digits that comparing all
            pairs would take too long.
    """
    pairs = 0
    by_text: dict[str, tuple[list[_LineRuns], dict[str, list[_LineRuns]]]] = {}
    for line in lines:
        texts, runs = _runs(line.name)
        with_holes, without = by_text.setdefault("0".join(texts), ([], {}))
        fixed_name = line.name.text if not line.name.holes else None
        fixed = (
            [entry for patterns in without.values() for entry in patterns]
            if fixed_name is None
            else without.get(fixed_name, [])
        )
        pairs += len(with_holes) + len(fixed)
        if pairs > _PAIRS:
            message = f"{line.text}\nthe names of more than {_PAIRS:,} pairs of lines differ in digits only"
            raise refuse("CORRUPT", message, hint="Write the numbers as holes, as in layers.{l}.")
        for earlier, earlier_runs in (*with_holes, *fixed):
            if line.when is None and earlier.when is None and line.name == earlier.name:
                continue  # if two names are equal, the table parser reports the second
            name = _common(earlier, earlier_runs, line, runs, texts, family)
            if name is not None:
                yield earlier, line, name
        (with_holes if fixed_name is None else without.setdefault(fixed_name, [])).append((line, runs))


def _runs(name: Name) -> tuple[list[str], list[_Run]]:
    """Split a name pattern into the texts without digits, and the runs of digits and placeholders between them."""
    texts, runs = [""], list[_Run]()
    holes = iter(name.holes)
    run: list[str | Hole] = []

    def add_text(piece: str) -> None:
        nonlocal run
        if piece:
            if run:
                runs.append(tuple(run))
                texts.append("")
                run = []
            texts[-1] += piece

    for number, literal in enumerate(name.literals):
        if number:
            run.append(next(holes))
        end = 0
        for digits in _RUN.finditer(literal):
            add_text(literal[end : digits.start()])
            run.append(digits[0])
            end = digits.end()
        add_text(literal[end:])
    if run:
        runs.append(tuple(run))
        texts.append("")
    return texts, runs


def _common(
    first: Line, first_runs: list[_Run], second: Line, second_runs: list[_Run], texts: list[str], family: Family
) -> str | None:
    """Return a name that both mapping rules match; None if there is no such name, or if the rules' conditions exclude
    each other.
    """
    shared = [
        list(islice(_common_digits(a, b, family), _NUMBERS)) for a, b in zip(first_runs, second_runs, strict=True)
    ]
    for digits in islice(product(*shared), _NAMES):
        name = texts[0] + "".join(f"{number}{text}" for number, text in zip(digits, texts[1:], strict=True))
        # Both mapping rules match this name. Two rules that match one name are a fault only if both conditions can be
        # true for the indices in the name.
        if may_all_hold([(line.when, _index(line, name)) for line in (first, second)]):
            return name
    return None


def _common_digits(first: _Run, second: _Run, family: Family) -> Iterator[str]:
    """Yield the digit strings that both sections of digits can match."""
    if len(first) == len(second) == 1 and isinstance(first[0], Hole) and isinstance(second[0], Hole):
        a, b = first[0], second[0]
        if not (_below(a, b, family) or _below(b, a, family)):
            numbers = {number for hole in (a, b) for edge in _range(hole, family) for number in (edge, edge - 1)}
            # If two arithmetic progressions have a common number, one of the first `b.factor` numbers of `a` is common.
            begin, _ = _range(a, family)
            other_begin, _ = _range(b, family)
            begin += max(other_begin - begin, 0) // a.factor * a.factor
            numbers.update(range(begin, begin + (b.factor + 2) * a.factor, a.factor))
            for number in sorted(numbers | set(range(_NUMBERS))):
                if _in(number, a, family) and _in(number, b, family):
                    yield str(number)
        return
    digits_of_both = dict.fromkeys(digits for digits in _digits(first, family) if _matches(second, digits, family))
    yield from digits_of_both or dict.fromkeys(
        digits for digits in _digits(second, family) if _matches(first, digits, family)
    )


def _digits(run: _Run, family: Family) -> Iterator[str]:
    """Yield the digit strings that a section of digits can match, smallest numbers first."""
    choices = [[piece] if isinstance(piece, str) else _numbers(piece, family) for piece in run]
    return ("".join(parts) for parts in product(*choices))


def _numbers(hole: Hole, family: Family) -> list[str]:
    low, high = _range(hole, family)
    return [str(number) for number in range(low, min(high, low + 2 * _NUMBERS * hole.factor), hole.factor)]


def _matches(run: _Run, digits: str, family: Family) -> bool:
    """Return whether a section of digits can match exactly these digits."""
    if not run:
        return not digits
    head, following = run[0], run[1:]
    if isinstance(head, str):
        return digits.startswith(head) and _matches(following, digits[len(head) :], family)
    ends = (end for end in range(1, len(digits) + 1) if str(int(digits[:end])) == digits[:end])
    return any(_in(int(digits[:end]), head, family) and _matches(following, digits[end:], family) for end in ends)


def _in(number: int, hole: Hole, family: Family) -> bool:
    low, high = _range(hole, family)
    return low <= number < high and (hole.shift_axis is not None or (number - low) % hole.factor == 0)


def _range(hole: Hole, family: Family) -> tuple[int, int]:
    """Return the range `[first number, end)` of a placeholder, as far as the rules file determines it without a
    config.
    """
    shift = hole.shift or "+0"
    fixed_shift = int(shift) if shift[1:].isdigit() else None
    sizes = [_constant(family, axis) for axis in (hole.axis, *hole.inner)]
    size = None if None in sizes else prod(size for size in sizes if size is not None)
    if fixed_shift is None:  # the number added to the index is an axis size, which only a config shows
        return 0, 10**10
    high = (size - 1) * hole.factor + fixed_shift + 1 if size is not None else 10**10
    return fixed_shift if fixed_shift >= 0 else fixed_shift % hole.factor, high


def _constant(family: Family, axis: str) -> int | None:
    """Return the size of an axis if the rules file states it as a constant; None if the size depends on a config."""
    formula = family.axes.get(axis)
    try:
        value = None if formula is None or formula.names else formula({})
    except TransaxleError:
        return None
    return value if isinstance(value, int) else None


def _below(first: Hole, second: Hole, family: Family) -> bool:
    """Return whether, for all axis sizes, every number of the placeholder `first` is below every number of `second`."""
    shift_axis = second.shift_axis
    if (
        first.shift is not None
        or first.factor > 1
        or first.inner
        or shift_axis is None
        or (second.shift or "").startswith("-")
    ):
        return False
    sizes = family.axes.get(first.axis), family.axes.get(shift_axis)
    return first.axis == shift_axis or (sizes[0] is not None and sizes[0] == sizes[1])


def _index(line: Line, name: str) -> dict[str, int]:
    """Return axis -> index, for the axes of a mapping rule whose index in a stored name can be computed without a
    config.
    """
    index = {}
    numbers = line.name.match(name) or ()
    for hole, number in zip(line.name.holes, numbers, strict=False):
        shift = hole.shift or "+0"
        if shift[1:].isdigit() and not hole.inner:
            index[hole.axis] = (number - int(shift)) // hole.factor
    return index


class _SubstituteIndex(ast.NodeTransformer):
    """Replaces each axis in a condition by the index that the stored name has for the axis."""

    def __init__(self, index: Mapping[str, int]) -> None:
        self.index = index

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self.index[node.id]) if node.id in self.index else node


Known = Callable[[Formula], bool | None]
"""Function that returns the truth value of a part of a condition, or None if the value is unknown."""


def may_all_hold(conditions: Iterable[tuple[Formula | None, Mapping[str, int]]], evaluate: Known | None = None) -> bool:
    """Return whether several conditions can be true together; also True if checking would take too long.

    Args:
        conditions: the conditions, each with the indices of the axes that occur in the stored name.
        evaluate: returns the truth value of a part of a condition; None means that the value of no part is known.
    """
    trees = [
        _SubstituteIndex(index).visit(ast.parse(ast.unparse(when.tree), mode="eval").body)
        for when, index in conditions
        if when is not None
    ]
    atoms: dict[str, ast.expr] = {}
    for tree in trees:
        _atoms(tree, atoms)
    facts = {key: fact for key in atoms if (fact := _fact(key, evaluate)) is not None}
    unsettled = [key for key in atoms if key not in facts][:_ATOMS]
    # Conditions exclude each other if no combination of truth values of their atoms makes all conditions true.
    for values in product((True, False), repeat=len(unsettled)):
        truth = {**facts, **dict(zip(unsettled, values, strict=True))}
        if _possible(truth, atoms) and all(_value(tree, truth) is not False for tree in trees):
            return True
    return False


def _fact(atom: str, evaluate: Known | None) -> bool | None:
    """Return the truth value of an atom (elementary comparison) if it is known or constant; None otherwise."""
    formula = Formula(atom)
    try:
        if evaluate is not None:
            return evaluate(formula)
        value = None if formula.names else formula({})
    except TransaxleError:
        return None
    return None if value is None else bool(value)


def tie_fault(tie: Tie, ties: Mapping[str, Sequence[Tie]]) -> str:
    """Return what is wrong with a tie, as a phrase that follows the word "expected": a tensor is tied twice at once, or
    ties form a cycle.

    Args:
        tie: the tie (two logical tensors with one value) to check.
        ties: name of a tied tensor -> its ties that precede `tie` in the file.

    Returns:
        The phrase; empty if the tie is valid.
    """
    alias, original = tie.alias, tie.original
    for earlier in ties.get(alias, ()):
        if may_all_hold([(earlier.when, {}), (tie.when, {})]):
            return f"one tie of {alias!r} at a time; above, it is {earlier.original!r}"
    # Each tensor to which `original` is tied, directly or indirectly -> the ties that lead to it.
    ways: dict[str, tuple[Tie, ...]] = {original: (tie,)}
    waiting = [original]
    while waiting:
        name = waiting.pop()
        if name == alias and may_all_hold([(each.when, {}) for each in ways[name]]):
            return f"no circle of ties; {original!r} is {alias!r} already"
        following = [each for each in ties.get(name, ()) if each.original not in ways]
        waiting += [each.original for each in following]
        ways |= {each.original: (*ways[name], each) for each in following}
        if len(ways) > _MOST_TIED:
            return f"at most {_MOST_TIED} tensors tied to one"
    return ""


def _atom(node: ast.expr) -> tuple[str, bool, ast.expr]:
    """Return an elementary comparison as `(key, truth, node)`: `x != 1` becomes the atom `x == 1` with truth False."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _NEGATED:
        positive = ast.Compare(node.left, [_NEGATED[type(node.ops[0])]()], node.comparators)
        return ast.unparse(positive), False, positive
    return ast.unparse(node), True, node


def _atoms(node: ast.expr, atoms: dict[str, ast.expr]) -> None:
    """Add the elementary comparisons (atoms) of a condition to the dict `atoms`; the key is the text of the
    comparison.
    """
    if isinstance(node, ast.BoolOp):
        for operand in node.values:
            _atoms(operand, atoms)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        _atoms(node.operand, atoms)
    else:
        key, _, atom = _atom(node)
        atoms[key] = atom


def _value(node: ast.expr, truth: Mapping[str, bool]) -> bool | None:
    """Evaluate a condition from the truth values of its atoms; the result is None if these truth values do not
    determine it.
    """
    if isinstance(node, ast.BoolOp):
        values = [_value(operand, truth) for operand in node.values]
        decides = isinstance(node.op, ast.Or)
        return decides if decides in values else None if None in values else not decides
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        value = _value(node.operand, truth)
        return None if value is None else not value
    key, positive, _ = _atom(node)
    return (truth[key] is positive) if key in truth else None


def _possible(truth: Mapping[str, bool], atoms: Mapping[str, ast.expr]) -> bool:
    """Return whether these truth values are consistent: a config key has one value, and a tensor has one encoding."""
    equal: dict[str, str] = {}
    encodings = 0
    for key, value in truth.items():
        atom = atoms[key]
        encodings += value and key in WORDS
        if value and isinstance(atom, ast.Compare) and isinstance(atom.ops[0], ast.Eq) and len(atom.ops) == 1:
            subject, right = ast.unparse(atom.left), atom.comparators[0]
            if isinstance(right, ast.Constant) and equal.setdefault(subject, ast.unparse(right)) != ast.unparse(right):
                return False
    return encodings <= 1
