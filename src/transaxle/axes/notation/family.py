"""Model families (the logical tensors of a kind of model) and dialects (their names in one framework) as Python
objects.

A family lists the logical tensors of a model with their named axes. A dialect is a table of mapping rules, one line per
stored tensor, which describe how a framework names and packs the logical tensors. `tables.read` builds families and
dialects from text.

A number format is the dtype and encoding of a stored tensor. A layout may depend on the number format: gpt-oss stores
bf16 experts transposed, but does not transpose their MXFP4 codes. So a mapping rule may end in `when mxfp4`, and a
second rule for the same name in `when not mxfp4`. The word `mxfp4` is true if the tensor is stored, or will be written,
in the encoding MXFP4. This package uses only the names of encodings.

**Formulas**: small arithmetic expressions for the size of an axis and for the condition of a mapping rule.

    num_attention_heads/num_key_value_heads        exact division, or the size is refused
    head_dim|hidden_size/num_attention_heads       the first of these that is known
    layer_types[l] == "full_attention"             `l` is the index of the tensor in question
    other_setting.num_heads if sliding else 8
    l in moe_layers                                a list, or the text "3,4,5"
    per_layer_config[l].head_dim | head_dim        an entry of a map: that of layer 3 is under "3"
    len(layer_types)                               entries of a list, characters of a text
    hybrid_override_pattern[l] == "M"              a character of a text

The syntax is Python's, parsed by `ast` and evaluated over config keys by a closed list of operations; no Python code is
ever executed. If a key is missing, the value of the formula is unknown (None), which is different from false.
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
    """Return the items that `in` searches; in a config, the text "3,4,5" counts as a list of numbers."""
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
"""The Python syntax nodes that formulas may contain; a rules file with any other node is refused."""
_MOST_NODES = 1_000
"""Maximum number of syntax nodes in a formula, named formulas inside it included; the built-in families need
about 20.
"""
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
    """A formula whose variables are config keys and the indices (layer, expert) in tensor names."""

    text: str
    """The formula as written in the rules file."""
    let_formulas: Mapping[str, Formula] = msgspec.field(default_factory=dict)
    """Name -> formula, for the named formulas (`let`) that the text may use."""

    def __eq__(self, formula: object) -> bool:
        return isinstance(formula, Formula) and formula.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    @property
    def always(self) -> bool:
        """Whether the formula is always true: either the text `True`, or the name of a formula that is always true."""
        return isinstance(self.tree, ast.Constant) and self.tree.value is True

    @property
    def tree(self) -> ast.expr:
        """Syntax tree of the formula, with named formulas substituted."""
        return self._parse[0]

    @cached_property
    def _parse(self) -> tuple[ast.expr, int, frozenset[str]]:
        """The syntax tree, its number of nodes, and the names in it.

        The tree is never walked: thirty named formulas that each use the previous formula twice form a tree of a
        billion nodes.
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
        """Evaluate the formula over `values`; the result is None if a necessary value is unknown.

        Raises:
            Refused: with the code SHAPE_MISMATCH if a division is not exact; with the code CORRUPT if the types do not
                fit.
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
        """Apply a binary operation; the result is None if an operand is unknown.

        The right operand is a syntax tree, because `a | b` evaluates `b` only if `a` is unknown.
        """
        if isinstance(op, ast.BitOr):
            return left_value if left_value is not None else self._value(right, values)
        right_value = self._value(right, values)
        if left_value is None or right_value is None:
            return None
        for operand in (left_value, right_value):
            if not isinstance(operand, int | float):  # for text and lists, `%` and `*` do not compute numbers
                raise self._fail(f"{operand!r} is not a number")
        if isinstance(op, ast.Div):
            if left_value % right_value:
                raise refuse("SHAPE_MISMATCH", f"{self.text}: {left_value} is not divisible by {right_value}")
            return left_value // right_value
        result = _ARITHMETIC[type(op)](left_value, right_value)
        # A result such as that of `mlp_ratio * width` may be a float, because the ratio is a float.
        whole = isinstance(result, float) and result.is_integer()
        return int(result) if whole else result


def _is_length(node: ast.Call) -> bool:
    names_len = isinstance(node.func, ast.Name) and node.func.id == _LENGTH
    return names_len and len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Starred)


def _apply_unary(node: ast.Call | ast.UnaryOp, value: Any) -> Any:
    """Return the length, the logical negation or the negative of a value; None if the value is unknown."""
    if value is None:
        return None
    if isinstance(node, ast.Call):
        return len(value)
    return not value if isinstance(node.op, ast.Not) else -value


def _item(base: Any, index: Any) -> Any:
    """Return an entry of a mapping or list, or a character of a text; None if it does not exist, as for a missing
    config key.

    The keys of a JSON mapping are texts, so the entry for layer 3 has the key "3".
    """
    if isinstance(base, Mapping):
        value = base.get(index)
        return base.get(str(index)) if value is None and type(index) is int else value
    if isinstance(base, list | tuple | str) and isinstance(index, int) and -len(base) <= index < len(base):
        return base[index]
    return None


def _boolean(conjunction: bool, values: Iterable[Any]) -> bool | None:
    """Evaluate `and` or `or` with values that may be unknown (None), up to the first value that determines the
    result.
    """
    unknown = False
    for value in values:
        if value is None:
            unknown = True
        elif bool(value) is not conjunction:
            return not conjunction
    return None if unknown else conjunction


PLAIN = ""
"""Name that means no encoding: the elements of an unquantized tensor are its values."""
WORDS = ENCODINGS
"""Names of encodings that conditions may contain; axes, tensors and formulas must have different names."""


class NumberFormat(NamedTuple):
    """Dtype and encoding of a stored tensor."""

    dtype: str
    """Safetensors code of the dtype of the tensor's elements, or of its codes if the tensor is quantized."""
    encoding: str = PLAIN
    """Name of the tensor's encoding: one of `WORDS`, or `PLAIN`."""


Recode = Callable[[str, NumberFormat], NumberFormat]
"""Function from a target's name and the source's number format to the number format in which the target is written."""


def same(_: str, form: NumberFormat) -> NumberFormat:
    """Return the number format of the source tensor, for conversions that change only the layout."""
    return form


def words(encoding: str) -> dict[str, bool]:
    """Return encoding name -> whether it is `encoding`, for every encoding that conditions may contain."""
    return {word: word == encoding for word in WORDS}


class LogicalTensor(msgspec.Struct, frozen=True):
    """A weight of a model family with named axes, independent of any framework."""

    name: str
    """Name of the logical tensor in layout expressions."""
    axes: tuple[str, ...]
    """Names of the tensor's axes, in canonical order."""
    when: Formula | None = None
    """Condition under which the tensor must exist; None means that it must always exist. Even if the condition is
    false, the tensor may exist.
    """


class Tie(msgspec.Struct, frozen=True):
    """Two logical tensors that always have the same value, such as a head tied to the embedding."""

    alias: str
    """Logical tensor that may be stored as a duplicate of `original`, or may be absent."""
    original: str
    """Logical tensor that is always stored."""
    when: Formula
    """Condition under which the two logical tensors are tied."""


class Cuttable(msgspec.Struct, frozen=True):
    """A `cut` statement: an axis of tensors that may be divided among the ranks along a mesh dim."""

    mesh: str
    """Mesh dim, `tp` or `ep`; a cut that applies to a single dialect is written `tp@vllm`."""
    axes: tuple[str, ...]
    """The axis to cut. Several axes, outermost first, are cut as one flattened axis. No axis means that every rank has
    the whole tensor.
    """
    tensors: frozenset[str] | None = None
    """Names of the logical tensors to cut; None means all logical tensors that have the axis."""

    @property
    def text(self) -> str:
        """The cut axes as written in the rules file."""
        return self.axes[0] if len(self.axes) == 1 else f"({' '.join(self.axes)})"


class Arithmetic(msgspec.Struct, frozen=True):
    """Arithmetic that turns logical values into stored values, such as `norm - 1`; it is applied only if the user asks
    for it.
    """

    text: str
    """The arithmetic as written in the rules file."""
    steps: AffineSteps
    """Steps that turn the logical value into the stored value."""


class Line(msgspec.Struct, frozen=True, eq=False, dict=True):
    """One mapping rule of a dialect (one line of its table): a name pattern, and the expression of tensors with such
    names.
    """

    name: Name
    """Name pattern that the names of the stored tensors match."""
    expression: Expression
    """Layout expression of the stored tensors."""
    when: Formula | None = None
    """Condition under which the dialect stores the tensor; None means that the dialect always stores it."""
    lossy: Arithmetic | None = None
    """Arithmetic between logical values and stored values; None if stored values are equal to logical values."""
    read_only: bool = False
    """Whether parameters are only read under this name, never written, because only old files or only optimizer states
    (`of_state`) have the name.
    """
    of_state: bool = False
    """Whether only optimizer states are written under this name, while further mapping rules write the parameter in
    parts.
    """
    else_zeros: bool = False
    """Whether the framework always has this tensor, so that zeros are written if the source has no such tensor."""

    @property
    def text(self) -> str:
        """Text of the mapping rule without its condition, for error messages."""
        return f"{self.name.text} = {self.expression.text}"

    @property
    def whole(self) -> str:
        """Text of the mapping rule with its condition, for error messages."""
        return self.text if self.when is None else f"{self.text} when {self.when.text}"

    @cached_property
    def by_form(self) -> bool:
        """Whether the condition depends on the encoding of the tensor."""
        return self.when is not None and not self.when.names.isdisjoint(WORDS)


class Dialect(msgspec.Struct, frozen=True, eq=False, dict=True):
    """Names and layouts of a family's tensors in one framework, or in one version of a framework."""

    name: str
    """Name of the dialect, such as `hf` or `torchtitan`."""
    version: str | None
    """Version of the framework, such as `0.2`; None if the dialect has no versions."""
    lines: tuple[Line, ...]
    """The mapping rules of the dialect, one for each kind of stored tensor."""
    ignored: tuple[Name, ...] = ()
    """Name patterns of stored tensors that do not belong to the model, such as buffers that can be recomputed."""

    @property
    def label(self) -> str:
        """Name of the dialect, followed by `@` and the version if it has one, such as `torchtitan@0.2`."""
        return self.name if self.version is None else f"{self.name}@{self.version}"

    @cached_property
    def by_skeleton(self) -> Mapping[str, tuple[Line, ...]]:
        """Skeleton of a name (each number replaced by 0) -> mapping rules that the name may match."""
        lines_by_skeleton: dict[str, list[Line]] = defaultdict(list)
        for line in self.lines:
            lines_by_skeleton[line.name.skeleton].append(line)
        return {key: tuple(lines) for key, lines in lines_by_skeleton.items()}

    @cached_property
    def skeletons_to_ignore(self) -> frozenset[str]:
        """Skeletons (each number replaced by 0) of the patterns of ignored names."""
        return frozenset(name.skeleton for name in self.ignored)


class Family(msgspec.Struct, frozen=True, eq=False, dict=True):
    """The logical tensors of a model family, and all dialects that name them."""

    name: str
    """Name of the family, such as `qwen3_moe`."""
    model_types: tuple[str, ...]
    """Values of `model_type` in config.json that identify this family."""
    axes: Mapping[str, Formula | None]
    """Axis -> formula that computes the axis size from the config; None if only shapes and names show the size."""
    tensors: Mapping[str, LogicalTensor]
    """Name of a logical tensor -> its record."""
    ties: tuple[Tie, ...] = ()
    """Pairs of logical tensors that may be tied (have the same value)."""
    cuts: tuple[Cuttable, ...] = ()
    """Cuts of axes that may be divided among tensor-parallel ranks."""
    other_cuts: tuple[Cuttable, ...] = ()
    """Cuts of axes that may be divided among expert-parallel ranks, and cuts that apply to a single dialect."""
    within: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Outer axis -> inner axis, for `cut tp = INNER within OUTER`. If there are more ranks than indices of the outer
    axis (key-value heads), ranks with the same outer index divide the inner axis (query heads) among them. Ranks with
    the same outer index each have a full copy of tensors that have only the outer axis.
    """
    let_formulas: Mapping[str, Formula] = msgspec.field(default_factory=dict)
    """Name -> named formula (`let`)."""
    dialects: tuple[Dialect, ...] = ()
    """Dialects in the order of the rules file."""
    wrappers: tuple[str, ...] = ()
    """Values of `model_type` of larger models that contain this model under `text_config`; the dialects read their
    names too.
    """
    alike: str = ""
    """Name of a second family with the same tensor names; if only names are known, the second family is assumed."""
    precise: frozenset[str] = frozenset()
    """Logical tensors that keep their dtype when all other tensors are cast."""
    added: Mapping[str, Formula] = msgspec.field(default_factory=dict)
    """Optional logical tensor, for which zeros mean the same as absence -> condition under which frameworks have the
    tensor.
    """
    text: Callable[[], FamilyText | None] | None = None
    """Function that returns the family as text; None for a family that was built in memory."""

    @property
    def written(self) -> FamilyText | None:
        """The family as text, with everything that it inherits; None for a family that was built in memory."""
        return None if self.text is None else self.text()

    @cached_property
    def copies(self) -> Mapping[str, str]:
        """Logical tensor -> the tensor that dialects use if they have no name for it (`tie … when False`)."""
        return {tie.alias: tie.original for tie in self.ties if tie.when.text == "False"}

    def dialect(self, label: str) -> Dialect | None:
        """Return the dialect with a label `name@version`, or the newest version with a name; None if there is no such
        dialect.
        """
        versions = [d for d in self.dialects if d.name == label]
        exact = [d for d in self.dialects if d.label == label]
        return max(versions, key=lambda dialect: age(dialect.version), default=None) or next(iter(exact), None)

    def cuts_of(self, mesh: str, dialect: str) -> tuple[Cuttable, ...]:
        """Return the `cut` statements that apply to a mesh dim in a dialect; those for this dialect alone are first.

        Args:
            mesh: `tp` or `ep`.
            dialect: name of the dialect.
        """
        every = (*self.cuts, *self.other_cuts)
        dialect_cuts = tuple(cut for cut in every if cut.mesh == f"{mesh}@{dialect}")
        return dialect_cuts + tuple(cut for cut in every if cut.mesh == mesh)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Labels (name and version) of the dialects, in the order of the rules file."""
        return tuple(d.label for d in self.dialects)

    @cached_property
    def name_axes(self) -> frozenset[str]:
        """Axes that occur in stored names of some dialect; in a formula such an axis means an index, not a size."""
        return frozenset(axis for d in self.dialects for line in d.lines for axis in line.name.axes)

    @cached_property
    def name_axes_by_tensor(self) -> Mapping[str, frozenset[str]]:
        """Logical tensor -> the axes of this tensor that occur in stored names of some dialect, such as layers and
        experts.
        """
        numbered: defaultdict[str, set[str]] = defaultdict(set)
        for line in (line for dialect in self.dialects for line in dialect.lines):
            for component in line.expression.components:
                numbered[component].update(line.name.axes)
        return {component: frozenset(axes) for component, axes in numbered.items()}


_SizesAndValues = tuple[dict[str, int], MutableMapping[str, Any]]
"""Axis sizes, and the values of all names that formulas may contain."""


class Sizes(msgspec.Struct, frozen=True, dict=True):
    """Axis sizes of one checkpoint, from its config or from the user.

    In a formula, an axis that occurs in stored names means the index of the tensor in question; without a tensor the
    index is unknown. An axis that occurs in no stored name means the axis size.
    """

    family: Family
    """Model family to which the axes belong."""
    config: Mapping[str, Any]
    """Contents of config.json; empty if there is no config.json."""
    overrides: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Axis -> size that replaces the result of the formula: set by the user, or computed from shapes."""

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The section of the config for this family: the whole config, or `text_config` for a nested text model."""
        nested = self.config.get("text_config")
        if isinstance(nested, Mapping) and self.config.get("model_type") not in self.family.model_types:
            return nested
        return self.config

    @cached_property
    def layer_axes(self) -> frozenset[str]:
        """Axes in names on whose index some size depends, such as `l` if the number of heads differs per layer."""
        formulas = [formula for formula in self.family.axes.values() if formula is not None]
        return frozenset(axis for formula in formulas for axis in formula.names & self.family.name_axes)

    def at(self, index: Mapping[str, int]) -> dict[str, int]:
        """Return the known sizes for the tensor at `index` (axis in the name -> index); an empty index selects the
        sizes that all tensors share.

        Raises:
            Refused: if a formula cannot be evaluated, with the code SHAPE_MISMATCH if a division is not exact, or with
                the code CORRUPT if types do not fit.
        """
        return dict(self._measure(index)[0])

    def _measure(self, index: Mapping[str, int]) -> _SizesAndValues:
        """Return the sizes at an index, and the values for formulas at this index; results are cached for similar
        layers.
        """
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
        # The dicts are chained, not copied, because a config may have 100,000 keys, and a checkpoint as many tensors.
        values: ChainMap[str, Any] = ChainMap({**hidden, **index}, cast("dict[str, Any]", self.settings))
        for axis, formula in self.family.axes.items():
            value = self.overrides.get(axis)
            # A size that depends on an index is unknown without the index, even if the formula has a fallback
            # (`heads[l] | heads`).
            if value is None and formula is not None and index.keys() >= self._indices[axis]:
                # A config key may have the same name as the axis.
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
        """Evaluate a condition for the tensor with this index; the result is None if it is unknown.

        Args:
            formula: the condition; a condition of None is always true.
            index: axis in the name -> index.
            present: logical tensor or encoding (`words`) -> whether the tensor exists at this index, or is stored in
                this encoding.
        """
        if formula is None:
            return True
        hidden = dict.fromkeys(self.family.name_axes)
        value = formula(ChainMap({**hidden, **index, **(present or {})}, self._measure(index)[1]))
        return None if value is None else bool(value)

    @cached_property
    def _indices(self) -> Mapping[str, frozenset[str]]:
        """Axis -> axes in names on whose index its size depends, directly or through the sizes of further axes."""
        indices: dict[str, frozenset[str]] = {}
        for axis, formula in self.family.axes.items():
            names = frozenset[str]() if formula is None or axis in self.overrides else formula.names - {axis}
            name_axes = names & self.family.name_axes
            indices[axis] = name_axes.union(*(indices.get(name, frozenset()) for name in names - name_axes))
        return indices

    def indices_of(self, axis: str) -> frozenset[str]:
        """Return the axes in names on whose index the formula of an axis depends, even if the size itself was set."""
        return self._by_formula._indices.get(axis, frozenset())

    def lack_formula(self, axes: Iterable[str]) -> bool:
        """Return whether one of the axes has no formula, so that only shapes show its size."""
        return any(self.family.axes[axis] is None for axis in axes)

    def first_alike(self, axis: str) -> str:
        """Return the first axis of the family that has the same formula as `axis`, and therefore the same size."""
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
        """Logical tensor -> tensors to which ties make it equal, nearest first. With the ties `a = b` and `b = c`, `a`
        -> `(b, c)`. The last of these tensors must be stored. A tie that would close a cycle is ignored.
        """
        nearest: dict[str, str] = {}
        for tie in self.family.ties:
            if self.holds(tie.when, {}) and tie.alias not in (tie.original, *_chain(tie.original, nearest)):
                nearest[tie.alias] = tie.original
        return {alias: _chain(alias, nearest) for alias in nearest}

    def with_solved(self, solved: Mapping[str, int]) -> Sizes:
        """Return these sizes with computed sizes added; sizes that were known before are kept."""
        return Sizes(self.family, self.config, {**solved, **self.overrides})


def _chain(name: str, nearest: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names that are reached from `name` by applying a mapping repeatedly."""
    chain: list[str] = []
    while name in nearest:
        name = nearest[name]
        chain.append(name)
    return tuple(chain)


def age(version: str | None) -> tuple[int, ...]:
    """Return a sort key of versions, by which `0.10` is newer than `0.9`."""
    return tuple(int(number) for number in re.findall("[0-9]+", version or ""))
