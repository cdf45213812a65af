"""Expressions: text that describes how the axes of logical tensors form the dims of a stored tensor.

    gate[f d]                      two dims of one logical tensor
    q[(g r c) d]                   a merged dim, outermost axis first
    [e d [gate:f | up:f]]          a direct sum: two logical tensors one after the other along a dim
    (f [gate: | up:])              interleaved: empty segments of size 1 inside a merged dim
    [[embed:v | 0:p] d]            padding: the segment `0` belongs to no logical tensor
    conv[x 1 k]                    a dim of size 1; every other size is an axis, so that no dim is left out

`parse` reads the text. `Expression.layout` adds axis sizes; the result contains, for each logical tensor and stored
dim, an offset and a stride per axis. A conversion needs no further facts about a layout.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property

import msgspec

from transaxle.axes.notation.statement import HINT
from transaxle.errors import TransaxleError, refuse

PADDING = "0"
"""Name that expressions use for padding in place of a logical tensor."""


class Axis(msgspec.Struct, frozen=True):
    """A single named axis, as a node of an expression."""

    name: str


class Merge(msgspec.Struct, frozen=True):
    """Several axes merged into one dim, `(a b)`, outermost first. A merge of no axes is a dim of size 1."""

    parts: tuple[Node, ...]


class Sum(msgspec.Struct, frozen=True):
    """Segments that lie one after the other along a dim, as in `[q:a | k:b]`; each segment belongs to one logical
    tensor.
    """

    segments: tuple[tuple[str, Node], ...]


Node = Axis | Merge | Sum
AxisSizes = Mapping[str, int]
Change = Callable[[Merge, tuple[str, ...]], Merge]


class Share(msgspec.Struct, frozen=True):
    """The positions of one stored dim that belong to one logical tensor."""

    offset: int
    """Position in the stored dim where the logical tensor begins."""
    axes: tuple[tuple[str, int, int], ...]
    """The logical tensor's axes in this dim as nested loops `(axis, size, stride)`, outermost first; strides count
    positions of the dim.
    """


class Layout(msgspec.Struct, frozen=True):
    """Where each logical tensor lies in a stored tensor: an expression together with a size for each axis."""

    shape: tuple[int, ...]
    """Shape of the stored tensor."""
    shares: Mapping[str, tuple[Share, ...]]
    """Name of the logical tensor -> its share of each stored dim."""


class Expression(msgspec.Struct, frozen=True, dict=True):
    """The parsed right-hand side of a mapping rule, which describes the dims of a stored tensor."""

    text: str
    """Text of the expression as the user wrote it, for error messages."""
    component: str | None
    """Name of the logical tensor, if the stored tensor contains only one; None if the expression's segments name
    several.
    """
    dims: tuple[Node, ...]
    """For each stored dim, the root node of the expression that describes the dim."""

    @cached_property
    def components(self) -> tuple[str, ...]:
        """Names of the logical tensors in the stored tensor, in stored order, without padding."""
        if self.component is not None:
            return (self.component,)
        return tuple(name for name, _ in self.segments if name != PADDING)

    @cached_property
    def segments(self) -> tuple[tuple[str, Node], ...]:
        """All segments `name:axes` in the expression, in stored order."""
        nodes = [node for dim in self.dims for node in walk(dim)]
        return tuple(segment for node in nodes if isinstance(node, Sum) for segment in node.segments)

    @cached_property
    def axes(self) -> frozenset[str]:
        """Names of all axes in the expression."""
        return frozenset(node.name for dim in self.dims for node in walk(dim) if isinstance(node, Axis))

    @cached_property
    def padding(self) -> frozenset[str]:
        """Axes that occur only in padding, and that are therefore axes of no logical tensor."""
        inside = {n.name for name, part in self.segments if name == PADDING for n in walk(part) if isinstance(n, Axis)}
        return frozenset(inside.difference(*(self.axes_of(component) for component in self.components)))

    def axes_of(self, component: str) -> tuple[str, ...]:
        """Return the axes of one logical tensor that form the dims, in stored order."""
        return tuple(axis for dim in self.dims for axis in _axes_of(dim, component))

    def layout(self, sizes: AxisSizes) -> Layout:
        """Return the layout of the stored tensor for the given axis sizes.

        Args:
            sizes: axis -> size, for every axis of the expression.

        Raises:
            KeyError: if `sizes` lacks an axis of the expression.
        """
        measured = [_measure(dim, sizes) for dim in self.dims]
        return Layout(
            shape=tuple(size for size, _ in measured),
            shares={name: tuple(_share(parts, name) for _, parts in measured) for name in self.components},
        )

    def rewrite(self, change: Change) -> Expression:
        """Return the expression with each merge replaced by `change(merge, names of the logical tensors in the
        merge)`.
        """
        return Expression(self.text, self.component, tuple(_rewrite(dim, change, self.components) for dim in self.dims))


def walk(node: Node) -> Iterator[Node]:
    """Yield a node of an expression and all nodes inside it, in stored order."""
    yield node
    if isinstance(node, Merge):
        for part in node.parts:
            yield from walk(part)
    elif isinstance(node, Sum):
        for _, part in node.segments:
            yield from walk(part)


def size(node: Node, sizes: AxisSizes) -> int:
    """Return the number of positions along the dim that a node of an expression covers."""
    return _measure(node, sizes)[0]


_Parts = dict[str | None, Share]
_WHOLE = Share(0, ())


def _share(parts: _Parts, component: str) -> Share:
    """Return a logical tensor's share of a dim; a dim without segments (key None) belongs to every logical tensor."""
    return parts.get(component) or parts.get(None) or _WHOLE


def _measure(node: Node, sizes: AxisSizes) -> tuple[int, _Parts]:
    """Return the size of a node, and each logical tensor's share of the node; the key None means all logical
    tensors.
    """
    match node:
        case Axis(name):
            return sizes[name], {None: Share(0, ((name, sizes[name], 1),))}
        case Merge(parts):
            return _measure_merge(parts, sizes)
        case Sum(segments):
            shares: _Parts = {}
            start = 0
            for name, part in segments:
                count, inside = _measure(part, sizes)
                shares[name] = Share(start, _share(inside, name).axes)  # no sum inside a sum: the inner offset is 0
                start += count
            return start, shares


def _measure_merge(parts: tuple[Node, ...], sizes: AxisSizes) -> tuple[int, _Parts]:
    """Compute sizes and shares of a merged dim from right to left: the stride of a node is the product of the sizes to
    the right of the node.
    """
    measured = [_measure(part, sizes) for part in parts]
    component_names = dict.fromkeys(name for _, inside in measured for name in inside if name is not None)
    shares: _Parts = dict.fromkeys(component_names or [None], _WHOLE)
    stride = 1
    for count, inside in reversed(measured):
        for name, share in shares.items():
            share_inside = inside.get(name) or inside.get(None) or _WHOLE
            axes = tuple((axis, length, step * stride) for axis, length, step in share_inside.axes)
            shares[name] = Share(share.offset + share_inside.offset * stride, axes + share.axes)
        # One step of the next node to the left skips all `count` positions of this node.
        stride *= count
    return stride, shares


def _rewrite(node: Node, change: Change, owners: tuple[str, ...]) -> Node:
    match node:
        case Axis():
            return node
        case Merge(parts):
            return change(Merge(tuple(_rewrite(part, change, owners) for part in parts)), owners)
        case Sum(segments):
            return Sum(tuple((name, _rewrite(part, change, (name,))) for name, part in segments))


def _axes_of(node: Node, component: str) -> Iterator[str]:
    match node:
        case Axis(name):
            yield name
        case Merge(parts):
            for part in parts:
                yield from _axes_of(part, component)
        case Sum(segments):
            for name, part in segments:
                if name == component:
                    yield from _axes_of(part, component)


_TOKEN = re.compile(r"\s*(?:([A-Za-z_][A-Za-z0-9_]*)|([0-9]+)|(.))")
_NAME, _NUMBER, _MARK, _END = "name", "number", "mark", "end"
_KINDS = (_END, _NAME, _NUMBER, _MARK)
_ONE = "1"
_DEEPEST = 16
"""Maximum nesting depth of brackets in an expression; the built-in families need three levels."""


class _Parser:
    """Recursive-descent parser with one method per rule of the grammar, which the reference documentation has
    in EBNF.
    """

    def __init__(self, text: str, start: int, *, checked: bool) -> None:
        self.checked = checked
        self.text = text.rstrip()
        self.start = start
        self.tokens: list[tuple[str, str, int]] = []
        for match in _TOKEN.finditer(self.text):
            group = match.lastindex or 0
            self.tokens.append((_KINDS[group], match.group(group), match.start(group)))
        self.tokens.append((_END, "the end", len(self.text)))
        self.at = 0
        self.depth = 0

    def fail(self, expected: str) -> TransaxleError:
        """Build a syntax error that marks the current token."""
        kind, token, position = self.tokens[self.at]
        token = token if kind == _END else repr(token)
        pointer = f"{' ' * position}^\ncolumn {self.start + position + 1}"
        return refuse("CORRUPT", f"{self.text}\n{pointer}: expected {expected}, found {token}", hint=HINT)

    def peek(self, *marks: str) -> bool:
        return self.tokens[self.at][0] == _MARK and self.tokens[self.at][1] in marks

    def take(self, mark: str) -> None:
        if not self.peek(mark):
            raise self.fail(repr(mark))
        self.at += 1

    def word(self) -> str | None:
        kind, text, _ = self.tokens[self.at]
        if kind != _NAME:
            return None
        self.at += 1
        return text

    def expression(self) -> Expression:
        component = self.word()
        dims = self.items("[", "]")
        if self.tokens[self.at][0] != _END:
            raise self.fail("the end of the expression")
        expression = Expression(self.text.strip(), component, dims)
        if not self.checked:
            self.check(expression)
        return expression

    def items(self, opening: str, closing: str) -> tuple[Node, ...]:
        self.take(opening)
        nodes: list[Node] = []
        while not self.peek(closing):
            nodes.append(self.item(closing))
        self.take(closing)
        return tuple(nodes)

    def item(self, closing: str) -> Node:
        kind, text, _ = self.tokens[self.at]
        if kind == _NAME:
            self.at += 1
            return Axis(text)
        if kind == _NUMBER and text == _ONE:
            self.at += 1
            return Merge(())
        if kind == _NUMBER:
            raise self.fail("'1' or an axis: other sizes, even fixed ones, have a name ('axes two=2')")
        if not self.peek("(", "["):
            raise self.fail(f"an axis, '1', '(', '[' or {closing!r}")
        if self.depth == _DEEPEST:
            raise self.fail(f"at most {_DEEPEST} brackets inside brackets")
        self.depth += 1
        node = Merge(self.items("(", ")")) if self.peek("(") else self.sum()
        self.depth -= 1
        return node

    def sum(self) -> Sum:
        self.take("[")
        segments = [self.segment()]
        while self.peek("|"):
            self.at += 1
            segments.append(self.segment())
        self.take("]")
        return Sum(tuple(segments))

    def segment(self) -> tuple[str, Node]:
        kind, name, _ = self.tokens[self.at]
        if kind != _NAME and (kind, name) != (_NUMBER, PADDING):
            raise self.fail("'tensor:' naming the logical tensor of this segment, or '0:' for padding")
        self.at += 1
        self.take(":")
        node = Merge(()) if self.peek("|", "]") else self.item("]")
        if not self.peek("|", "]"):
            raise self.fail("'|' or ']': a segment is one item, several are merged in '( )'")
        return name, node

    def check(self, expression: Expression) -> None:
        """Refuse an expression without a meaning: without a logical tensor, with a tensor or axis twice, or with
        segments inside segments.
        """
        for problem in _problems(expression):
            raise refuse("CORRUPT", f"{self.text}\ncolumn {self.start + 1}: expected {problem}", hint=HINT)


def _problems(expression: Expression) -> Iterator[str]:
    """Yield the faults of an expression whose syntax is correct; each fault is a phrase that follows the word
    "expected".
    """
    names = expression.components
    sums = [node for dim in expression.dims for node in walk(dim) if isinstance(node, Sum)]
    if expression.component is not None and sums:
        yield "no sum inside the dims of one tensor: a sum names its tensors itself"
    if any(isinstance(inner, Sum) for _, part in expression.segments for inner in walk(part)):
        yield "no sum inside a sum"
    if expression.component is None and len(sums) != 1:
        yield "exactly one sum '[a:… | b:…]' where no tensor is named before '['"
    if not names:
        yield "a logical tensor beside the padding"
    for name, times in Counter(names).items():
        if times > 1:
            yield f"each logical tensor once; {name!r} occurs twice"
        for axis, places in Counter(expression.axes_of(name)).items():
            if places > 1:
                yield f"each axis of {name!r} once; {axis!r} occurs twice"


def parse(text: str, start: int = 0, *, checked: bool = False) -> Expression:
    """Parse the text of an expression.

    Args:
        text: the right-hand side of a mapping rule.
        start: column at which the text begins in its line of the file, so that errors name the right column.
        checked: whether the text was parsed before without a fault; then only the syntax is checked again.

    Raises:
        Refused: with the code CORRUPT if the expression is malformed; the message shows the text, the column and the
            expected token.
    """
    return _Parser(text, start, checked=checked).expression()
