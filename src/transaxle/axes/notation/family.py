"""Families (the logical tensors of a model) and dialects (their names in one framework) as Python objects.

A family lists the logical tensors of a model with their named axes. A dialect describes, one line per stored tensor,
how a framework names and packs them. `tables.read` builds both from text.

A number format is the dtype and encoding of a stored tensor. A layout may depend on the number format: gpt-oss stores
bf16 experts transposed, but not its MXFP4 codes. So a line may end in `when mxfp4`, and a second line of the same name
in `when not mxfp4`. The word `mxfp4` is true if the tensor is stored, or will be written, in that encoding. This
package knows nothing else of encodings.

**Formulas**: the small arithmetic for the size of an axis and the condition of a line.

    num_attention_heads/num_key_value_heads        exact division, or the size is refused
    head_dim|hidden_size/num_attention_heads       the first of these that is known
    layer_types[l] == "full_attention"             `l` is the index of the tensor in question
    other_setting.num_heads if sliding else 8
    l in moe_layers                                a list, or the text "3,4,5"
    per_layer_config[l].head_dim | head_dim        an entry of a map: that of layer 3 is under "3"
    len(layer_types)                               entries of a list, characters of a text
    hybrid_override_pattern[l] == "M"              a character of a text

The syntax is Python's, parsed by `ast` and evaluated over config keys by a closed list of operations; nothing is ever
executed. A missing key makes the formula unknown (None), which is different from false.
"""

from __future__ import annotations

import ast
import operator
import re
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec

from transaxle.axes.notation.computed import AffineSteps
from transaxle.axes.notation.expression import Expression
from transaxle.axes.notation.name import Name
from transaxle.axes.notation.statement import ENCODINGS
from transaxle.errors import TransaxleError, refuse

if TYPE_CHECKING:
    from transaxle.axes.notation.written import FamilyText


_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _members(items: Any) -> Any:
    """Return the items that `in` searches; a config may contain a list of numbers as the text "3,4,5"."""
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
"""The Python syntax nodes that formulas may contain; a table with any other node is refused."""
_MOST_NODES = 1_000
"""Limit on the syntax nodes of one formula, including the named formulas in it; real tables need about 20."""
_LENGTH = "len"
"""Name of the only function that formulas may call."""


class _InlineNamed(ast.NodeTransformer):
    """Replaces the names of `let` formulas by the syntax trees of these formulas."""

    def __init__(self, let_formulas: Mapping[str, Formula]) -> None:
        self.let_formulas = let_formulas

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.let_formulas[node.id].tree if node.id in self.let_formulas else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        node.args = [self.visit(argument) for argument in node.args]
        return node


class Formula(msgspec.Struct, frozen=True, dict=True, eq=False):
    """A formula that is computed from config keys and the indices (layer, expert) in tensor names."""

    text: str
    """The formula as written in the table."""
    let_formulas: Mapping[str, Formula] = msgspec.field(default_factory=dict)
    """Named formulas (`let`) that the text may use, by name."""

    def __eq__(self, formula: object) -> bool:
        return isinstance(formula, Formula) and formula.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    @property
    def always(self) -> bool:
        """Whether the formula is always true: the text `True`, or the name of such a formula."""
        return isinstance(self.tree, ast.Constant) and self.tree.value is True

    @property
    def tree(self) -> ast.expr:
        """Syntax tree of the formula, with named formulas substituted."""
        return self._parse[0]

    @cached_property
    def _parse(self) -> tuple[ast.expr, int, frozenset[str]]:
        """The syntax tree, its number of nodes, and the names in it.

        Thirty formulas that each use the previous one twice form a tree of a billion nodes, so the tree is never
        walked.
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
                named_formula = self.let_formulas.get(name)
                nodes += 1 if named_formula is None else named_formula._parse[1]
                names |= {name} if named_formula is None else named_formula.names
            if nodes > _MOST_NODES:
                raise self._fail(
                    f"together with the formulas that it names it has {nodes:,} parts, more than {_MOST_NODES:,}"
                )
            return _InlineNamed(self.let_formulas).visit(tree), nodes, frozenset(names - {""})
        except SyntaxError as error:
            raise self._fail(error.msg) from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise self._fail(str(error) or "nested too deeply") from None

    def _fail(self, why: str) -> TransaxleError:
        return refuse("CORRUPT", f"formula {self.text!r}: {why}")

    @property
    def names(self) -> frozenset[str]:
        """Config keys, axes and tensors that the formula reads."""
        return self._parse[2]

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """Evaluate the formula over `values`; None where a necessary value is unknown.

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
                return _apply_unary(node, self._value(of, values))
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

    def _binary(self, op: ast.operator, left_value: Any, right: ast.expr, values: Mapping[str, Any]) -> Any:
        """Apply a binary operation; None where an operand is unknown.

        The right operand is a syntax tree, because `a | b` evaluates it only where the left operand is unknown.
        """
        if isinstance(op, ast.BitOr):
            return left_value if left_value is not None else self._value(right, values)
        right_value = self._value(right, values)
        if left_value is None or right_value is None:
            return None
        for operand in (left_value, right_value):
            if not isinstance(operand, int | float):  # `%` and `*` mean other things for text and lists
                raise self._fail(f"{operand!r} is not a number")
        if isinstance(op, ast.Div):
            if left_value % right_value:
                raise refuse("SHAPE_MISMATCH", f"{self.text}: {left_value} is not divisible by {right_value}")
            return left_value // right_value
        result = _ARITHMETIC[type(op)](left_value, right_value)
        # such as `mlp_ratio * width`, where the ratio is a float
        whole = isinstance(result, float) and result.is_integer()
        return int(result) if whole else result


def _is_length(node: ast.Call) -> bool:
    names_len = isinstance(node.func, ast.Name) and node.func.id == _LENGTH
    return names_len and len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Starred)


def _apply_unary(node: ast.Call | ast.UnaryOp, value: Any) -> Any:
    """Return the length, the logical negation or the negative of a value; None where the value is unknown."""
    if value is None:
        return None
    if isinstance(node, ast.Call):
        return len(value)
    return not value if isinstance(node.op, ast.Not) else -value


def _item(base: Any, index: Any) -> Any:
    """Return an entry of a mapping or list, or a character of a text; None where it does not exist, like a missing key.

    The keys of a JSON mapping are texts: the entry of layer 3 is under "3".
    """
    if isinstance(base, Mapping):
        value = base.get(index)
        return base.get(str(index)) if value is None and type(index) is int else value
    if isinstance(base, list | tuple | str) and isinstance(index, int) and -len(base) <= index < len(base):
        return base[index]
    return None


def _boolean(conjunction: bool, values: Iterable[Any]) -> bool | None:
    """Evaluate `and` / `or` with values that may be unknown (None), up to the first value that decides."""
    unknown = False
    for value in values:
        if value is None:
            unknown = True
        elif bool(value) is not conjunction:
            return not conjunction
    return None if unknown else conjunction


PLAIN = ""
"""Name for the encoding of an unquantized tensor, whose elements are its values."""
WORDS = ENCODINGS
"""Names of encodings that conditions may contain. No axis, tensor or formula may have one of these names."""


class NumberFormat(NamedTuple):
    """Dtype and encoding of a stored tensor."""

    dtype: str
    """Dtype of the tensor's elements (or of its codes, if it is quantized), as a safetensors code."""
    encoding: str = PLAIN
    """Name of the tensor's encoding: one of `WORDS`, or `PLAIN`."""


Recode = Callable[[str, NumberFormat], NumberFormat]
"""Function from a target's name and the source's number format to the number format in which the target is written."""


def same(_: str, form: NumberFormat) -> NumberFormat:
    """Return the source's format: a change of layout keeps the number format of every tensor."""
    return form


def words(encoding: str) -> dict[str, bool]:
    """Return for each encoding's name whether it is the encoding of a tensor in this encoding."""
    return {word: word == encoding for word in WORDS}


class LogicalTensor(msgspec.Struct, frozen=True):
    """A logical tensor of a family, with named axes."""

    name: str
    """Name of the logical tensor in layout expressions."""
    axes: tuple[str, ...]
    """Names of the tensor's axes, in canonical order."""
    when: Formula | None = None
    """Condition under which the tensor must exist; None: it must always exist. If the condition is false, it may still
    exist.
    """


class Tie(msgspec.Struct, frozen=True):
    """Two logical tensors that always have the same value, such as a head tied to the embedding."""

    alias: str
    """Logical tensor that may be stored as a copy of `original`, or not at all."""
    original: str
    """Logical tensor that is always stored."""
    when: Formula
    """Condition under which the two logical tensors are tied."""


class Cuttable(msgspec.Struct, frozen=True):
    """A `cut` statement: an axis of tensors that may be divided among the ranks along a mesh axis."""

    mesh: str
    """Mesh axis, `tp` or `ep`; a cut in a single dialect is written `tp@vllm`."""
    axes: tuple[str, ...]
    """The axis to cut; several axes, outermost first, are cut as one flattened axis; no axis: every rank has the whole
    tensor.
    """
    tensors: frozenset[str] | None = None
    """Names of the logical tensors to cut; None: all logical tensors that have the axis."""

    @property
    def text(self) -> str:
        """The cut axes as written in the table."""
        return self.axes[0] if len(self.axes) == 1 else f"({' '.join(self.axes)})"


class Arithmetic(msgspec.Struct, frozen=True):
    """Arithmetic that turns logical values into stored values, such as `norm - 1`; it is applied only on request."""

    text: str
    """The arithmetic as written in the table."""
    steps: AffineSteps
    """Steps that turn the logical value into the stored value."""


class Line(msgspec.Struct, frozen=True, eq=False, dict=True):
    """One line of a dialect: a name pattern, and the expression of the tensors stored under it."""

    name: Name
    """Name pattern that the names of the stored tensors match."""
    expression: Expression
    """Layout expression of the stored tensors."""
    when: Formula | None = None
    """Condition under which the dialect stores the tensor; None: it always does."""
    lossy: Arithmetic | None = None
    """Arithmetic between logical values and stored values; None if stored values are equal to logical values."""
    read_only: bool = False
    """Whether parameters are only read under this name, never written: old files have it, or only optimizer states
    (`of_state`).
    """
    of_state: bool = False
    """Whether only optimizer states are written under this name, while other lines write the parameter's parts."""
    else_zeros: bool = False
    """Whether the framework always has this tensor, so that zeros are written if the source lacks it."""

    @property
    def text(self) -> str:
        """Text of the line without its condition, for error messages."""
        return f"{self.name.text} = {self.expression.text}"

    @property
    def whole(self) -> str:
        """Text of the line with its condition, for error messages."""
        return self.text if self.when is None else f"{self.text} when {self.when.text}"

    @cached_property
    def by_form(self) -> bool:
        """Whether the condition depends on the encoding of the tensor."""
        return self.when is not None and not self.when.names.isdisjoint(WORDS)


class Dialect(msgspec.Struct, frozen=True, eq=False, dict=True):
    """Names and packing of a family's tensors in one framework, or in one of its versions."""

    name: str
    """Name of the dialect, such as `hf` or `torchtitan`."""
    version: str | None
    """Version of the framework, such as `0.2`; None if the dialect has no versions."""
    lines: tuple[Line, ...]
    """The lines of the dialect, one for each kind of stored tensor."""
    ignored: tuple[Name, ...] = ()
    """Name patterns of stored tensors that are no part of the model, such as buffers that can be recomputed."""

    @property
    def label(self) -> str:
        """Name, followed by `@` and the version where there is one: `torchtitan@0.2`."""
        return self.name if self.version is None else f"{self.name}@{self.version}"

    @cached_property
    def by_skeleton(self) -> Mapping[str, tuple[Line, ...]]:
        """Skeleton of a name -> lines that the name may match."""
        lines_by_skeleton: dict[str, list[Line]] = defaultdict(list)
        for line in self.lines:
            lines_by_skeleton[line.name.skeleton].append(line)
        return {key: tuple(lines) for key, lines in lines_by_skeleton.items()}

    @cached_property
    def skeletons_to_ignore(self) -> frozenset[str]:
        """Skeletons of the `ignored` patterns."""
        return frozenset(name.skeleton for name in self.ignored)


class Family(msgspec.Struct, frozen=True, eq=False, dict=True):
    """The logical tensors of a model family, and all known dialects."""

    name: str
    """Name of the family, such as `qwen3_moe`."""
    model_types: tuple[str, ...]
    """Values of `model_type` in config.json that identify this family."""
    axes: Mapping[str, Formula | None]
    """Axis -> formula that computes its size from the config; None if only shapes and names show the size."""
    tensors: Mapping[str, LogicalTensor]
    """Name of a logical tensor -> the logical tensor."""
    ties: tuple[Tie, ...] = ()
    """Pairs of logical tensors that may be tied (have the same value)."""
    cuts: tuple[Cuttable, ...] = ()
    """Cuts of axes that may be divided among tensor-parallel ranks."""
    other_cuts: tuple[Cuttable, ...] = ()
    """Cuts of axes that may be divided among expert-parallel ranks, and cuts in a single dialect."""
    within: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Outer axis -> inner axis, for `cut tp = INNER within OUTER`. Where there are more ranks than indices of the outer
    axis (kv heads), ranks with the same outer index divide the inner axis (its query heads) among them, and each has a
    full copy of tensors that only have the outer axis.
    """
    let_formulas: Mapping[str, Formula] = msgspec.field(default_factory=dict)
    """Named formulas (`let`), by name."""
    dialects: tuple[Dialect, ...] = ()
    """Known dialects, in table order."""
    wrappers: tuple[str, ...] = ()
    """Values of `model_type` of larger models with this one under `text_config`, whose names the dialects read too."""
    alike: str = ""
    """Another family with the same tensor names; if only names are known, they are taken to mean that family."""
    precise: frozenset[str] = frozenset()
    """Logical tensors that keep their dtype when all other tensors are cast."""
    added: Mapping[str, Formula] = msgspec.field(default_factory=dict)
    """Optional logical tensor, for which zeros mean the same as absence -> condition for frameworks to have it."""
    text: Callable[[], FamilyText | None] | None = None
    """Returns the table as text; None for a family that was built in memory."""

    @property
    def written(self) -> FamilyText | None:
        """The table as text, with everything that it inherits; None for a family that was built in memory."""
        return None if self.text is None else self.text()

    @cached_property
    def copies(self) -> Mapping[str, str]:
        """Logical tensor -> the tensor that dialects without a name for it use in its place (`tie … when False`)."""
        return {tie.alias: tie.original for tie in self.ties if tie.when.text == "False"}

    def dialect(self, label: str) -> Dialect | None:
        """Return the dialect with a label: `name@version`, or a name, which means its newest version; None if
        unknown.
        """
        versions = [d for d in self.dialects if d.name == label]
        exact = [d for d in self.dialects if d.label == label]
        return max(versions, key=lambda dialect: age(dialect.version), default=None) or next(iter(exact), None)

    def cuts_of(self, mesh: str, dialect: str) -> tuple[Cuttable, ...]:
        """Return the `cut` statements for a mesh axis in a dialect; those for this dialect alone come first.

        Args:
            mesh: `tp` or `ep`.
            dialect: name of the dialect.
        """
        every = (*self.cuts, *self.other_cuts)
        dialect_cuts = tuple(cut for cut in every if cut.mesh == f"{mesh}@{dialect}")
        return dialect_cuts + tuple(cut for cut in every if cut.mesh == mesh)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Labels of the dialects, in table order."""
        return tuple(d.label for d in self.dialects)

    @cached_property
    def name_axes(self) -> frozenset[str]:
        """Axes that occur in stored names of some dialect; in a formula they mean an index, not a size."""
        return frozenset(axis for d in self.dialects for line in d.lines for axis in line.name.axes)

    @cached_property
    def name_axes_by_tensor(self) -> Mapping[str, frozenset[str]]:
        """Logical tensor -> those of its axes that occur in stored names of some dialect, such as layers and
        experts.
        """
        numbered: defaultdict[str, set[str]] = defaultdict(set)
        for line in (line for dialect in self.dialects for line in dialect.lines):
            for component in line.expression.components:
                numbered[component].update(line.name.axes)
        return {component: frozenset(axes) for component, axes in numbered.items()}


_SizesAndValues = tuple[dict[str, int], MutableMapping[str, Any]]
"""Axis sizes, and the values of all names for evaluating formulas."""


class Sizes(msgspec.Struct, frozen=True, dict=True):
    """Axis sizes of one checkpoint, from its config or from the user.

    In a formula, an axis that occurs in names means the index of the tensor in question, and is unknown without one;
    any other axis means its size.
    """

    family: Family
    """Family with the axes."""
    config: Mapping[str, Any]
    """Contents of config.json; empty if there is no config.json."""
    overrides: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Sizes that are used instead of the formulas: given by the user, or computed from shapes."""

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The part of the config for this family: a nested text model has its own section."""
        nested = self.config.get("text_config")
        if isinstance(nested, Mapping) and self.config.get("model_type") not in self.family.model_types:
            return nested
        return self.config

    @cached_property
    def layer_axes(self) -> frozenset[str]:
        """Name axes whose index some size depends on, such as `l` where the number of heads differs per layer."""
        formulas = [formula for formula in self.family.axes.values() if formula is not None]
        return frozenset(axis for formula in formulas for axis in formula.names & self.family.name_axes)

    def at(self, index: Mapping[str, int]) -> dict[str, int]:
        """Return the known sizes for the tensor at `index` (name axis -> index); with an empty index, those of all
        tensors.

        Raises:
            Refused: a formula cannot be evaluated (SHAPE_MISMATCH if a division is not exact, CORRUPT if types do not
                fit).
        """
        return dict(self._measure(index)[0])

    def _measure(self, index: Mapping[str, int]) -> _SizesAndValues:
        """Return the sizes at an index, and the values for formulas there; cached for similar layers."""
        key = tuple(index.get(axis) for axis in self._order)
        measured = self._cache.get(key)
        if measured is None:
            measured = self._cache[key] = self._evaluate(index)
        return measured

    @cached_property
    def _cache(self) -> dict[tuple[int | None, ...], _SizesAndValues]:
        return {}

    @cached_property
    def _order(self) -> tuple[str, ...]:
        return tuple(sorted(self.layer_axes))

    def _evaluate(self, index: Mapping[str, int]) -> _SizesAndValues:
        """Evaluate the formulas of all axes at an index."""
        sizes: dict[str, int] = dict(self.overrides)
        hidden = dict.fromkeys(self.family.name_axes)
        # Chained, not copied: a config may have 100,000 keys, and a checkpoint as many tensors.
        values: ChainMap[str, Any] = ChainMap({**hidden, **index}, cast("dict[str, Any]", self.settings))
        for axis, formula in self.family.axes.items():
            value = self.overrides.get(axis)
            # A size that depends on an index is unknown without it, even if `heads[l] | heads` has a fallback.
            if value is None and formula is not None and index.keys() >= self._indices[axis]:
                # a config key may have the same name as the axis
                own_key = {axis: self.settings.get(axis)} if axis in formula.names else {}
                value = formula(ChainMap(own_key, values) if own_key else values)
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                sizes[axis] = value
            if axis not in hidden:
                values[axis] = sizes.get(axis)
        return sizes, values

    def holds(
        self, formula: Formula | None, index: Mapping[str, int], present: Mapping[str, bool] | None = None
    ) -> bool | None:
        """Evaluate a condition for the tensor with this index; None if the condition's value is unknown.

        Args:
            formula: the condition; None is always true.
            index: name axis -> index.
            present: logical tensors and encodings (`words`) -> whether the tensor exists there, or is in this encoding.
        """
        if formula is None:
            return True
        hidden = dict.fromkeys(self.family.name_axes)
        value = formula(ChainMap({**hidden, **index, **(present or {})}, self._measure(index)[1]))
        return None if value is None else bool(value)

    @cached_property
    def _indices(self) -> Mapping[str, frozenset[str]]:
        """Axis -> name axes whose index its size depends on, directly or through other axes."""
        indices: dict[str, frozenset[str]] = {}
        for axis, formula in self.family.axes.items():
            names = frozenset[str]() if formula is None or axis in self.overrides else formula.names - {axis}
            name_axes = names & self.family.name_axes
            indices[axis] = name_axes.union(*(indices.get(name, frozenset()) for name in names - name_axes))
        return indices

    def indices_of(self, axis: str) -> frozenset[str]:
        """Return the name axes whose index the size of an axis depends on by its formula, even if the size is given."""
        return self._by_formula._indices.get(axis, frozenset())

    def lack_formula(self, axes: Iterable[str]) -> bool:
        """Tell whether one of the axes has no formula, so that only shapes show its size."""
        return any(self.family.axes[axis] is None for axis in axes)

    def first_alike(self, axis: str) -> str:
        """Return the first axis of the family with the same formula as an axis, and so with the same size."""
        return self._alike.get(axis, axis)

    @cached_property
    def _by_formula(self) -> Sizes:
        return Sizes(self.family, {})

    @cached_property
    def _alike(self) -> Mapping[str, str]:
        first: dict[str, str] = {}
        formulas = [(axis, formula.text) for axis, formula in self.family.axes.items() if formula is not None]
        return {axis: first.setdefault(text, axis) for axis, text in formulas}

    @cached_property
    def originals(self) -> Mapping[str, tuple[str, ...]]:
        """Logical tensor -> tensors that it equals by ties in force, nearest first: with `a = b` and `b = c`, `a` ->
        `(b, c)`. The last one must be stored. A tie that would close a cycle is ignored.
        """
        nearest: dict[str, str] = {}
        for tie in self.family.ties:
            if self.holds(tie.when, {}) and tie.alias not in (tie.original, *_chain(tie.original, nearest)):
                nearest[tie.alias] = tie.original
        return {alias: _chain(alias, nearest) for alias in nearest}

    def with_solved(self, solved: Mapping[str, int]) -> Sizes:
        """Return these sizes with solved sizes added; a size that was known before is kept."""
        return Sizes(self.family, self.config, {**solved, **self.overrides})


def _chain(name: str, nearest: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names that are reached by applying a mapping to a name again and again."""
    chain: list[str] = []
    while name in nearest:
        name = nearest[name]
        chain.append(name)
    return tuple(chain)


def age(version: str | None) -> tuple[int, ...]:
    """Return a sort key of versions, by which `0.10` is newer than `0.9`."""
    return tuple(int(number) for number in re.findall("[0-9]+", version or ""))
