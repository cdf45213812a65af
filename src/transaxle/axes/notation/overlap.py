"""Overlap: whether two lines of a dialect claim the same stored name, so that the first would swallow the second's
tensor.

Name patterns are unified: the text between digits must agree, and in each run of digits some number must be in the
ranges of both holes. Where two patterns share a name, their conditions decide: the lines may share it if only one of
them can hold.
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
"""How many numbers are tried where the end of a range is unknown, beside those that the lines name."""
_NAMES = 200
"""Cap on the shared names for which the conditions are compared."""
_PAIRS = 10_000
"""Cap on the pairs of lines of one dialect whose names differ in digits only; tables have a few dozen."""
_ATOMS = 12
"""Cap on the atoms of two conditions that are tried in every combination."""
_MOST_TIED = 50
"""Cap on the tensors that may be one by ties; real tables have four."""
_NEGATED: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.NotEq: ast.Eq, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.NotIn: ast.In,
}  # fmt: skip
_Run = tuple[str | Hole, ...]
"""Adjacent digits and holes."""
_LineRuns = tuple[Line, list[_Run]]


def overlapping(lines: Iterable[Line], family: Family) -> Iterator[tuple[Line, Line, str]]:
    """Yield pairs of lines that claim one name, each with such a name.

    Raises:
        Refused: CORRUPT where too many lines have names that differ in digits only.
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
                continue  # the reader of tables says so where the second one stands
            name = _common(earlier, earlier_runs, line, runs, texts, family)
            if name is not None:
                yield earlier, line, name
        (with_holes if fixed_name is None else without.setdefault(fixed_name, [])).append((line, runs))


def _runs(name: Name) -> tuple[list[str], list[_Run]]:
    """Split a pattern into what is no digit, and the runs of digits and holes between."""
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
    """Return a name that both lines hold, or None."""
    shared = [list(islice(_shared(a, b, family), _NUMBERS)) for a, b in zip(first_runs, second_runs, strict=True)]
    for digits in islice(product(*shared), _NAMES):
        name = texts[0] + "".join(f"{number}{text}" for number, text in zip(digits, texts[1:], strict=True))
        # A shared name is an overlap only if both conditions can be true there at once.
        if may_all_hold([(line.when, _index(line, name)) for line in (first, second)]):
            return name
    return None


def _shared(first: _Run, second: _Run, family: Family) -> Iterator[str]:
    """Yield digits that both runs may stand for."""
    if len(first) == len(second) == 1 and isinstance(first[0], Hole) and isinstance(second[0], Hole):
        a, b = first[0], second[0]
        if not (_below(a, b, family) or _below(b, a, family)):
            numbers = {number for hole in (a, b) for edge in _range(hole, family) for number in (edge, edge - 1)}
            # Two progressions that meet at all do so within as many steps of one as the other's factor is.
            begin, _ = _range(a, family)
            other, _ = _range(b, family)
            begin += max(other - begin, 0) // a.factor * a.factor
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
    """Yield the first of the digits that a run may stand for."""
    choices = [[piece] if isinstance(piece, str) else _numbers(piece, family) for piece in run]
    return ("".join(parts) for parts in product(*choices))


def _numbers(hole: Hole, family: Family) -> list[str]:
    low, high = _range(hole, family)
    return [str(number) for number in range(low, min(high, low + 2 * _NUMBERS * hole.factor), hole.factor)]


def _matches(run: _Run, digits: str, family: Family) -> bool:
    """Tell whether a run can produce exactly these digits."""
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
    """Return the first number of a hole and the one after its last, as far as the table itself says them."""
    shift = hole.shift or "+0"
    fixed_shift = int(shift) if shift[1:].isdigit() else None
    sizes = [_constant(family, axis) for axis in (hole.axis, *hole.inner)]
    size = None if None in sizes else prod(size for size in sizes if size is not None)
    if fixed_shift is None:  # it may begin anywhere
        return 0, 10**10
    high = (size - 1) * hole.factor + fixed_shift + 1 if size is not None else 10**10
    return fixed_shift if fixed_shift >= 0 else fixed_shift % hole.factor, high


def _constant(family: Family, axis: str) -> int | None:
    """Return an axis's size where the table itself fixes it; None where it depends on a config."""
    formula = family.axes.get(axis)
    try:
        value = None if formula is None or formula.names else formula({})
    except TransaxleError:
        return None
    return value if isinstance(value, int) else None


def _below(first: Hole, second: Hole, family: Family) -> bool:
    """Tell whether all numbers of one hole are below those of the other, whatever the sizes."""
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
    """Return the indices of a line at a name, as far as the table itself says them."""
    index = {}
    numbers = line.name.match(name) or ()
    for hole, number in zip(line.name.holes, numbers, strict=False):
        shift = hole.shift or "+0"
        if shift[1:].isdigit() and not hole.inner:
            index[hole.axis] = (number - int(shift)) // hole.factor
    return index


class _SubstituteIndex(ast.NodeTransformer):
    """Replaces name axes by their indices in a condition."""

    def __init__(self, index: Mapping[str, int]) -> None:
        self.index = index

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self.index[node.id]) if node.id in self.index else node


Known = Callable[[Formula], bool | None]
"""What is known of a part of a condition; None: nothing."""


def may_all_hold(conditions: Iterable[tuple[Formula | None, Mapping[str, int]]], known: Known | None = None) -> bool:
    """Tell whether conditions may be true at once; where that takes too long to find out, they may.

    Args:
        conditions: each with the indices of the name axes in it.
        known: what is known of parts of them; None: only what they say themselves.
    """
    trees = [
        _SubstituteIndex(index).visit(ast.parse(ast.unparse(when.tree), mode="eval").body)
        for when, index in conditions
        if when is not None
    ]
    atoms: dict[str, ast.expr] = {}
    for tree in trees:
        _atoms(tree, atoms)
    facts = {key: fact for key in atoms if (fact := _fact(key, known)) is not None}
    unsettled = [key for key in atoms if key not in facts][:_ATOMS]
    # Conditions exclude each other if no assignment of their atoms makes all of them true.
    for values in product((True, False), repeat=len(unsettled)):
        truth = {**facts, **dict(zip(unsettled, values, strict=True))}
        if _possible(truth, atoms) and all(_value(tree, truth) is not False for tree in trees):
            return True
    return False


def _fact(atom: str, known: Known | None) -> bool | None:
    """Return the truth of an atom that is known, or that the text itself decides; None for any other."""
    formula = Formula(atom)
    try:
        if known is not None:
            return known(formula)
        value = None if formula.names else formula({})
    except TransaxleError:
        return None
    return None if value is None else bool(value)


def tie_fault(tie: Tie, ties: Mapping[str, Sequence[Tie]]) -> str:
    """Return what is expected where a tie ties a tensor to two others at once, or to itself; nothing if it does not.

    Args:
        tie: the tie.
        ties: the ties above it, by their first tensors.
    """
    alias, original = tie.alias, tie.original
    for other in ties.get(alias, ()):
        if may_all_hold([(other.when, {}), (tie.when, {})]):
            return f"one tie of {alias!r} at a time; above, it is {other.original!r}"
    # What the original is tied to, and so on, each with the ties on the way.
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
    """Return an atom of a condition as `(key, truth, node)`: `x != 1` is the atom `x == 1` with truth False."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _NEGATED:
        positive = ast.Compare(node.left, [_NEGATED[type(node.ops[0])]()], node.comparators)
        return ast.unparse(positive), False, positive
    return ast.unparse(node), True, node


def _atoms(node: ast.expr, atoms: dict[str, ast.expr]) -> None:
    """Collect the atoms of a condition by their keys."""
    if isinstance(node, ast.BoolOp):
        for operand in node.values:
            _atoms(operand, atoms)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        _atoms(node.operand, atoms)
    else:
        key, _, atom = _atom(node)
        atoms[key] = atom


def _value(node: ast.expr, truth: Mapping[str, bool]) -> bool | None:
    """Evaluate a condition under a truth assignment of its atoms; None where the assignment leaves it open."""
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
    """Tell whether atoms can have these truth values together: a key equals at most one value, and a tensor has at most
    one encoding.
    """
    equal: dict[str, str] = {}
    encodings = 0
    for key, value in truth.items():
        atom = atoms[key]
        encodings += value and key in WORDS
        if value and isinstance(atom, ast.Compare) and isinstance(atom.ops[0], ast.Eq) and len(atom.ops) == 1:
            left, right = ast.unparse(atom.left), atom.comparators[0]
            if isinstance(right, ast.Constant) and equal.setdefault(left, ast.unparse(right)) != ast.unparse(right):
                return False
    return encodings <= 1
