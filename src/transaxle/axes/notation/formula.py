"""Formulas: the small arithmetic in which a table says how big an axis is and when a line holds.

    num_attention_heads/num_key_value_heads        exact division, or the size is refused
    head_dim|hidden_size/num_attention_heads       the first of these that is known
    layer_types[l] == "full_attention"             `l` is the index of the tensor at hand
    other_setting.num_heads if sliding else 8
    l in moe_layers                                a list, or the text "3,4,5"
    per_layer_config[l].head_dim | head_dim        an entry of a map: of layer 3, that under "3"
    len(layer_types)                               entries of a list, characters of a text
    hybrid_override_pattern[l] == "M"              a character of a text

The syntax is Python's, read with `ast` and evaluated over config keys by a closed list of operations; nothing is ever
executed. A key that is missing makes the formula unknown (None), which is different from false.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import msgspec

from transaxle.errors import TransaxleError, refuse

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _members(items: Any) -> Any:
    """Return what `in` searches: some configs write a list of numbers as the text "3,4,5"."""
    if isinstance(items, str):
        return [int(item) if item.strip().isdecimal() else item.strip() for item in items.split(",")]
    return items


_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in _members(b),
    ast.NotIn: lambda a, b: a not in _members(b),
}
_PARTS: tuple[type[ast.AST], ...] = (
    ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.BinOp, ast.BoolOp, ast.UnaryOp, ast.Compare,
    ast.IfExp, ast.Tuple, ast.List, ast.Load, ast.And, ast.Or, ast.Not, ast.USub, ast.Div, ast.BitOr,
    ast.Call, *_ARITHMETIC, *_COMPARE,
)  # fmt: skip
"""The closed set of syntax nodes; anything else is refused when the table is read."""
_MOST_NODES = 1_000
"""Cap on the nodes of one formula, those of the formulas it names included; real tables need some twenty."""
_LENGTH = "len"
"""The only function that a formula may call."""


class _InlineNamed(ast.NodeTransformer):
    """Replaces the names of `let` formulas by their syntax trees."""

    def __init__(self, named: Mapping[str, Formula]) -> None:
        self.named = named

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.named[node.id].tree if node.id in self.named else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        node.args = [self.visit(argument) for argument in node.args]
        return node


class Formula(msgspec.Struct, frozen=True, dict=True, eq=False):
    """A formula over config keys and name indices."""

    text: str
    """As written in the table."""
    named: Mapping[str, Formula] = msgspec.field(default_factory=dict)
    """Formulas that the text may call by name (`let`)."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Formula) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    @property
    def always(self) -> bool:
        """Whether it is the word `True`, or a named formula that is."""
        return isinstance(self.tree, ast.Constant) and self.tree.value is True

    @property
    def tree(self) -> ast.expr:
        """The formula as Python's syntax, named formulas put in."""
        return self._parsed[0]

    @cached_property
    def _parsed(self) -> tuple[ast.expr, int, frozenset[str]]:
        """The tree, the number of its nodes, and the names it reads.

        Thirty formulas that each name the last one twice are a tree of a billion nodes: it is never walked.
        """
        try:
            tree, nodes, names = ast.parse(self.text.strip(), mode="eval").body, 0, set[str]()
            functions = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
            for node in ast.walk(tree):
                if not isinstance(node, _PARTS):
                    raise self._fail(f"{type(node).__name__} is not allowed in formulas")
                if isinstance(node, ast.Call) and not _is_length(node):
                    raise self._fail("only the call len(X) is allowed in formulas")
                name = node.id if isinstance(node, ast.Name) and id(node) not in functions else ""
                named_formula = self.named.get(name)
                nodes += 1 if named_formula is None else named_formula._parsed[1]
                names |= {name} if named_formula is None else named_formula.names
            if nodes > _MOST_NODES:
                raise self._fail(
                    f"together with the formulas that it names it has {nodes:,} parts, more than {_MOST_NODES:,}"
                )
            return _InlineNamed(self.named).visit(tree), nodes, frozenset(names - {""})
        except SyntaxError as error:
            raise self._fail(error.msg) from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise self._fail(str(error) or "nested too deeply") from None

    def _fail(self, why: str) -> TransaxleError:
        return refuse("CORRUPT", f"formula {self.text!r}: {why}")

    @property
    def names(self) -> frozenset[str]:
        """The names it reads."""
        return self._parsed[2]

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """Evaluate over `values`; None where a needed value is unknown.

        Raises:
            Refused: SHAPE_MISMATCH where a division is not exact, CORRUPT where the types do not fit.
        """
        try:
            return self._value(self.tree, values)
        except (TypeError, ValueError, ArithmeticError, RecursionError) as error:
            raise self._fail(str(error)) from None

    def _value(self, node: ast.expr, values: Mapping[str, Any]) -> Any:
        match node:
            case ast.Constant(value):
                return value
            case ast.Name(id=name):
                return values.get(name)
            case ast.Attribute(value=base, attr=key):
                inner = self._value(base, values)
                return inner.get(key) if isinstance(inner, Mapping) else None
            case ast.Subscript(value=base, slice=index):
                return _item(self._value(base, values), self._value(index, values))
            case ast.Call(args=[of]) | ast.UnaryOp(operand=of):
                return _turned(node, self._value(of, values))
            case ast.BoolOp(op=op, values=parts):
                return _boolean(isinstance(op, ast.And), (self._value(part, values) for part in parts))
            case ast.IfExp(test=test, body=body, orelse=orelse):
                chosen = self._value(test, values)
                return None if chosen is None else self._value(body if chosen else orelse, values)
            case ast.Tuple(elts=items) | ast.List(elts=items):
                return [self._value(item, values) for item in items]
            case ast.Compare(left=left, ops=ops, comparators=rest):
                operands = [self._value(item, values) for item in (left, *rest)]
                if any(item is None for item in operands):
                    return None
                pairs = zip(ops, operands, operands[1:], strict=False)
                return all(_COMPARE[type(op)](a, b) for op, a, b in pairs)
            case ast.BinOp(left=left, op=op, right=right):
                return self._binary(op, self._value(left, values), right, values)
        raise self._fail(f"{type(node).__name__} is not allowed in formulas")

    def _binary(self, op: ast.operator, left: Any, right: ast.expr, values: Mapping[str, Any]) -> Any:
        """Apply a binary operation; None where an operand is unknown.

        The right operand is passed as syntax, because `a | b` evaluates it only where the left one is unknown.
        """
        if isinstance(op, ast.BitOr):
            return left if left is not None else self._value(right, values)
        right_value = self._value(right, values)
        if left is None or right_value is None:
            return None
        for operand in (left, right_value):
            if not isinstance(operand, int | float):  # `%` and `*` mean other things for text and lists
                raise self._fail(f"{operand!r} is not a number")
        if isinstance(op, ast.Div):
            if left % right_value:
                raise refuse("SHAPE_MISMATCH", f"{self.text}: {left} is not divisible by {right_value}")
            return left // right_value
        result = _ARITHMETIC[type(op)](left, right_value)
        whole = isinstance(result, float) and result.is_integer()  # `mlp_ratio * width`
        return int(result) if whole else result


def _is_length(node: ast.Call) -> bool:
    names_len = isinstance(node.func, ast.Name) and node.func.id == _LENGTH
    return names_len and len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Starred)


def _turned(node: ast.Call | ast.UnaryOp, value: Any) -> Any:
    """Return the length, the logical negation or the negative of a value; None where it is unknown."""
    if value is None:
        return None
    if isinstance(node, ast.Call):
        return len(value)
    return not value if isinstance(node.op, ast.Not) else -value


def _item(base: Any, index: Any) -> Any:
    """Return an entry of a mapping or a list, or a character of a text; None where it does not exist: unknown, like a
    missing key.

    The keys of a mapping in JSON are texts: the entry of layer 3 is under "3".
    """
    if isinstance(base, Mapping):
        value = base.get(index)
        return base.get(str(index)) if value is None and type(index) is int else value
    if isinstance(base, list | tuple | str) and isinstance(index, int) and -len(base) <= index < len(base):
        return base[index]
    return None


def _boolean(conjunction: bool, values: Iterable[Any]) -> bool | None:
    """Evaluate three-valued `and` / `or`, which stops at the first value that decides."""
    unknown = False
    for value in values:
        if value is None:
            unknown = True
        elif bool(value) is not conjunction:
            return not conjunction
    return None if unknown else conjunction
