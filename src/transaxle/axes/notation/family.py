"""Families and dialects as values, and the number formats that a dialect's lines may depend on.

A family lists the logical tensors of a model with their named axes; a dialect says, one line per stored tensor, how a
framework names and packs them. `tables.read` builds both from text.

A number format is the dtype and encoding of a stored tensor. A layout may depend on it: gpt-oss stores bf16 experts
transposed, but not its MXFP4 codes. So a line may end in `when mxfp4`, and another line of the same name in `when not
mxfp4`. The word is true where the tensor at hand is stored, or is about to be written, in that encoding; these words
are all that the algebra knows of encodings.

**Formulas**: the small arithmetic in which a table says how big an axis is and when a line holds.

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
    from transaxle.axes.notation.written import Written


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


PLAIN = ""
"""The encoding of a tensor whose elements are its values."""
WORDS = ENCODINGS
"""Names of the encodings in conditions. They are reserved: no axis, tensor or formula may have one of them."""


class NumberFormat(NamedTuple):
    """The dtype of a stored tensor's elements, and its encoding."""

    dtype: str
    """Safetensors code of its elements, or of its codes."""
    encoding: str = PLAIN
    """One of `WORDS`, or `PLAIN`."""


Recode = Callable[[str, NumberFormat], NumberFormat]
"""(target name, format of the source) -> format in which it is written."""


def same(_: str, form: NumberFormat) -> NumberFormat:
    """Keep every tensor's format: a change of layout changes no number."""
    return form


def words(encoding: str) -> dict[str, bool]:
    """Return the truth of each encoding's word for a tensor of this encoding."""
    return {word: word == encoding for word in WORDS}


class LogicalTensor(msgspec.Struct, frozen=True):
    """A logical tensor of a family."""

    name: str
    """Component name used in expressions."""
    axes: tuple[str, ...]
    """Its axes, in canonical order."""
    when: Formula | None = None
    """Condition under which it must exist; None: always. Where the condition is false, it may still exist."""


class Tie(msgspec.Struct, frozen=True):
    """Two logical tensors that share one value, such as a head tied to the embedding."""

    alias: str
    """The tensor that may be stored as a copy, or not at all."""
    original: str
    """The tensor that is always stored."""
    when: Formula
    """When they are tied."""


class Cuttable(msgspec.Struct, frozen=True):
    """An axis that the ranks of a mesh may share out."""

    mesh: str
    """The mesh axis, `tp` or `ep`; `tp@vllm` where a dialect has a cut of its own."""
    axes: tuple[str, ...]
    """The axis; several axes are cut as one flattened axis, outermost first; none: every rank has all."""
    tensors: frozenset[str] | None = None
    """The tensors it applies to; None: every tensor with the axis."""

    @property
    def text(self) -> str:
        """The cut axes as the table writes them."""
        return self.axes[0] if len(self.axes) == 1 else f"({' '.join(self.axes)})"


class Arithmetic(msgspec.Struct, frozen=True):
    """How stored values follow from logical ones; it never runs unless asked for."""

    text: str
    """As written in the table."""
    steps: AffineSteps
    """From the logical value to the stored one."""


class Line(msgspec.Struct, frozen=True, eq=False, dict=True):
    """One line of a dialect: a name pattern, and the expression of the tensor stored under it."""

    name: Name
    """Pattern of the stored names."""
    expression: Expression
    """What the tensor holds."""
    when: Formula | None = None
    """When the dialect stores it; None: always."""
    lossy: Arithmetic | None = None
    """Arithmetic between the logical and the stored values."""
    read_only: bool = False
    """It is no name of a parameter in files that are written now, but that of older ones, or `of_state`."""
    of_state: bool = False
    """Optimizer state is written under it: the name of a parameter of which files have parts, by other lines."""
    else_zeros: bool = False
    """The dialect's program has this tensor whatever the config says: zeros where the source has none."""

    @property
    def text(self) -> str:
        """The rule as written, for errors."""
        return f"{self.name.text} = {self.expression.text}"

    @property
    def whole(self) -> str:
        """The rule with its condition."""
        return self.text if self.when is None else f"{self.text} when {self.when.text}"

    @cached_property
    def by_form(self) -> bool:
        """Whether its condition asks in which encoding a tensor is."""
        return self.when is not None and not self.when.names.isdisjoint(WORDS)


class Dialect(msgspec.Struct, frozen=True, eq=False, dict=True):
    """How one framework (and one of its versions) stores a family."""

    name: str
    """e.g. `hf`, `torchtitan`."""
    version: str | None
    """e.g. `0.2`; None where only one is known."""
    lines: tuple[Line, ...]
    """One line per stored tensor."""
    ignored: tuple[Name, ...] = ()
    """Stored names that hold nothing of the model (recomputable buffers)."""

    @property
    def label(self) -> str:
        """Name, with the version where there is one: `torchtitan@0.2`."""
        return self.name if self.version is None else f"{self.name}@{self.version}"

    @cached_property
    def by_skeleton(self) -> Mapping[str, tuple[Line, ...]]:
        """Lines a name may match, by the name's skeleton."""
        lines_by_skeleton: dict[str, list[Line]] = defaultdict(list)
        for line in self.lines:
            lines_by_skeleton[line.name.skeleton].append(line)
        return {key: tuple(lines) for key, lines in lines_by_skeleton.items()}

    @cached_property
    def ignored_skeletons(self) -> frozenset[str]:
        """Skeletons of `ignored`."""
        return frozenset(name.skeleton for name in self.ignored)


class Family(msgspec.Struct, frozen=True, eq=False, dict=True):
    """The logical tensors of a model family, and every dialect known for it."""

    name: str
    """e.g. `qwen3_moe`."""
    model_types: tuple[str, ...]
    """Values of config.json's `model_type` that mean this family."""
    axes: Mapping[str, Formula | None]
    """Axis -> its size as a formula over the config; None: only shapes and names tell."""
    tensors: Mapping[str, LogicalTensor]
    """Logical tensors by name."""
    ties: tuple[Tie, ...] = ()
    """Tensors that may be one."""
    cuts: tuple[Cuttable, ...] = ()
    """Axes that tensor-parallel ranks may share out."""
    other_cuts: tuple[Cuttable, ...] = ()
    """Axes that expert-parallel ranks may share out, and the cuts of single dialects."""
    within: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Outer axis -> inner axis, for `cut tp = INNER within OUTER`: where there are more ranks than indices of the
    outer axis (kv heads), the ranks that get the same outer index divide the inner axis (its query heads) among
    them, and each keeps a full copy of tensors that have the outer axis only.
    """
    named: Mapping[str, Formula] = msgspec.field(default_factory=dict)
    """Formulas with a name (`let`)."""
    dialects: tuple[Dialect, ...] = ()
    """Known dialects, in table order."""
    wrappers: tuple[str, ...] = ()
    """Values of `model_type` of larger models that contain this one under `text_config`, and whose tensor names the
    dialects read as well.
    """
    alike: str = ""
    """Another family with the same names, for which names of tensors alone never mean this one."""
    precise: frozenset[str] = frozenset()
    """Logical tensors that keep their dtype where all others are cast."""
    added: Mapping[str, Formula] = msgspec.field(default_factory=dict)
    """Logical tensors that a model adds, so that zeros are the same as none -> where a program may have them."""
    text: Callable[[], Written | None] | None = None
    """Finds the table as text; None for a family that was made in memory."""

    @property
    def written(self) -> Written | None:
        """The table as text, with all that it takes over; None for a family that was made in memory."""
        return None if self.text is None else self.text()

    @cached_property
    def copies(self) -> Mapping[str, str]:
        """Logical tensor -> the one that dialects without a name for it have in its place: ties that never hold."""
        return {tie.alias: tie.original for tie in self.ties if tie.when.text == "False"}

    def dialect(self, label: str) -> Dialect | None:
        """Return the dialect of that name (its newest version) or `name@version`; None where there is none."""
        named = [d for d in self.dialects if d.name == label]
        exact = [d for d in self.dialects if d.label == label]
        return max(named, key=lambda dialect: age(dialect.version), default=None) or next(iter(exact), None)

    def cuts_of(self, mesh: str, dialect: str) -> tuple[Cuttable, ...]:
        """Return what the ranks of a mesh axis share out in a dialect; what it says itself comes first.

        Args:
            mesh: `tp` or `ep`.
            dialect: its name.
        """
        every = (*self.cuts, *self.other_cuts)
        own = tuple(cut for cut in every if cut.mesh == f"{mesh}@{dialect}")
        return own + tuple(cut for cut in every if cut.mesh == mesh)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Labels of the dialects, in table order."""
        return tuple(d.label for d in self.dialects)

    @cached_property
    def name_axes(self) -> frozenset[str]:
        """Axes that some dialect keeps in its stored names; in a formula they mean an index, not a size."""
        return frozenset(axis for d in self.dialects for line in d.lines for axis in line.name.axes)

    @cached_property
    def numbered_axes(self) -> Mapping[str, frozenset[str]]:
        """Logical tensor -> axes that some dialect keeps in its stored names: which modules have one of their own."""
        numbered: defaultdict[str, set[str]] = defaultdict(set)
        for line in (line for dialect in self.dialects for line in dialect.lines):
            for component in line.expression.components:
                numbered[component].update(line.name.axes)
        return {component: frozenset(axes) for component, axes in numbered.items()}


_Measured = tuple[dict[str, int], MutableMapping[str, Any]]
"""Sizes, and the values that formulas see."""


class Sizes(msgspec.Struct, frozen=True, dict=True):
    """Axis sizes of one checkpoint: what its config, or the user, says.

    In a formula, an axis that lives in names means the index of the tensor at hand, and is unknown without one; any
    other axis means its size.
    """

    family: Family
    """The family whose axes are meant."""
    config: Mapping[str, Any]
    """config.json; empty where there is none."""
    given: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Sizes that win over the formulas: the user's, or those solved from shapes."""

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The part of the config that speaks of this family: nested text models have their own."""
        nested = self.config.get("text_config")
        if isinstance(nested, Mapping) and self.config.get("model_type") not in self.family.model_types:
            return nested
        return self.config

    @cached_property
    def varying(self) -> frozenset[str]:
        """Name axes on which some size depends (`l`, where heads differ per layer)."""
        formulas = [formula for formula in self.family.axes.values() if formula is not None]
        return frozenset(axis for formula in formulas for axis in formula.names & self.family.name_axes)

    def at(self, index: Mapping[str, int]) -> dict[str, int]:
        """Return every size known for the tensor at `index` (name axis -> its index); at none, those of all tensors.

        Raises:
            Refused: what a formula refuses.
        """
        return dict(self._measured(index)[0])

    def _measured(self, index: Mapping[str, int]) -> _Measured:
        """Return the sizes at an index, and the values that formulas see there; cached for layers that are alike."""
        key = tuple(index.get(axis) for axis in self._order)
        measured = self._known.get(key)
        if measured is None:
            measured = self._known[key] = self._evaluated(index)
        return measured

    @cached_property
    def _known(self) -> dict[tuple[int | None, ...], _Measured]:
        return {}

    @cached_property
    def _order(self) -> tuple[str, ...]:
        return tuple(sorted(self.varying))

    def _evaluated(self, index: Mapping[str, int]) -> _Measured:
        """Evaluate the formula of every axis."""
        sizes: dict[str, int] = dict(self.given)
        hidden = dict.fromkeys(self.family.name_axes)
        # Chained, not copied: a config may have a hundred thousand keys, and a checkpoint as many tensors.
        values: ChainMap[str, Any] = ChainMap({**hidden, **index}, cast("dict[str, Any]", self.settings))
        for axis, formula in self.family.axes.items():
            value = self.given.get(axis)
            # A size that depends on an index has no value without it, whatever `heads[l] | heads` falls back to.
            if value is None and formula is not None and index.keys() >= self._indices[axis]:
                own_key = {axis: self.settings.get(axis)} if axis in formula.names else {}  # a key of the same name
                value = formula(ChainMap(own_key, values) if own_key else values)
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                sizes[axis] = value
            if axis not in hidden:
                values[axis] = sizes.get(axis)
        return sizes, values

    def holds(
        self, formula: Formula | None, index: Mapping[str, int], present: Mapping[str, bool] | None = None
    ) -> bool | None:
        """Evaluate a condition for the tensor at `index`; None where the config does not tell.

        Args:
            formula: the condition; None always holds.
            index: name axis -> index.
            present: words of the condition that mean something at hand -> whether it is so: logical tensors that
                exist there, and encodings (`words`).
        """
        if formula is None:
            return True
        hidden = dict.fromkeys(self.family.name_axes)
        value = formula(ChainMap({**hidden, **index, **(present or {})}, self._measured(index)[1]))
        return None if value is None else bool(value)

    @cached_property
    def _indices(self) -> Mapping[str, frozenset[str]]:
        """Axis -> name axes on whose index its size depends, itself or through other axes."""
        indices: dict[str, frozenset[str]] = {}
        for axis, formula in self.family.axes.items():
            names = frozenset[str]() if formula is None or axis in self.given else formula.names - {axis}
            own = names & self.family.name_axes
            indices[axis] = own.union(*(indices.get(name, frozenset()) for name in names - own))
        return indices

    def indices_of(self, axis: str) -> frozenset[str]:
        """Return the name axes on whose index the size of an axis depends by its formula, whatever is given."""
        return self._by_formula._indices.get(axis, frozenset())

    def unsized(self, axes: Iterable[str]) -> bool:
        """Tell whether one of some axes has no formula: only shapes tell its size."""
        return any(self.family.axes[axis] is None for axis in axes)

    def first_alike(self, axis: str) -> str:
        """Return the first axis of the family that has the formula of an axis, and so its size."""
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
        """Logical tensor -> those that it is by ties that hold, the nearest first: of `a = b` and `b = c`, `a` is `b`
        and `c`. The last one of a chain must be stored; a tie that would close a circle is none.
        """
        nearest: dict[str, str] = {}
        for tie in self.family.ties:
            if self.holds(tie.when, {}) and tie.alias not in (tie.original, *_chain(tie.original, nearest)):
                nearest[tie.alias] = tie.original
        return {alias: _chain(alias, nearest) for alias in nearest}

    def giving(self, solved: Mapping[str, int]) -> Sizes:
        """Return these sizes extended by solved ones; sizes given before win."""
        return Sizes(self.family, self.config, {**solved, **self.given})


def _chain(name: str, nearest: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names that follow one, each the next of the one before."""
    chain: list[str] = []
    while name in nearest:
        name = nearest[name]
        chain.append(name)
    return tuple(chain)


def age(version: str | None) -> tuple[int, ...]:
    """Return a key that sorts versions: `0.10` is newer than `0.9`."""
    return tuple(int(number) for number in re.findall("[0-9]+", version or ""))
