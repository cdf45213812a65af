"""The plan of a tensor-parallel model: how each parameter is cut over the ranks, and the role of each module.

The table of mapping rules of a model's family lists which logical tensors each parameter contains, and which axes may
be cut in which dims. The user's rules only choose among these cuts. Modules between which activations of a cut axis
flow (q, k, v and o of one layer) form a group: either all modules of the group are cut alike, or none is cut.

An index of an axis is never split: one index of `g` is a group of query heads with the key and value head that they
share. If there are more ranks than such groups of heads, several ranks share a group. Each rank that shares a group of
heads has some of the group's query heads, and its key and value head.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from types import UnionType
from typing import Any, Literal

from torch import nn
from torch.distributed.tensor import DTensor

from transaxle.axes.geometry import Intervals, Ranges, axes_in, count_positions, positions, torch_chunk, whole
from transaxle.axes.layout.bind import bind
from transaxle.axes.notation.expression import Expression, size
from transaxle.axes.notation.family import Cuttable, Family, Sizes
from transaxle.engine.checkpoint.recognise import recognise
from transaxle.errors import Refusal, TransaxleError, Where, gathered, refuse
from transaxle.families import builtin
from transaxle.nn.grouped_linear import GroupedLinear


@dataclass(frozen=True, slots=True)
class Option:
    """A way in which a parameter may be cut."""

    axis: str
    """Name of the axis that is divided over ranks."""
    dim: int
    """Index of the tensor's dim that contains the axis."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter of one module, as the family's mapping rules describe it."""

    module: str
    """Path of the module that owns the parameter."""
    parameter_name: str
    """Name of the parameter in its module."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    expression: Expression
    """The layout expression of the parameter: which logical tensors it contains, in which dims."""
    index: tuple[tuple[str, int], ...]
    """Pairs of an axis that is numbered in the tensor's name, and the index of this parameter, such as its layer."""
    sizes: Mapping[str, int]
    """Axis -> size of the axis in this layer."""
    options: tuple[Option, ...]
    """The possible cuts of the parameter; the plan `auto` uses the first."""

    @property
    def name(self) -> str:
        """Full name of the parameter."""
        return f"{self.module}.{self.parameter_name}" if self.module else self.parameter_name


@dataclass(frozen=True, slots=True)
class Reading:
    """A model's parameters, as the mapping rules of the model's family describe them."""

    family: Family
    """The model's family."""
    weights: tuple[Weight, ...]
    """Every parameter of every module; a tied parameter occurs once for each module that has it."""


def read(model: nn.Module) -> Reading:
    """Find the mapping rules of a model's family that describe its parameters.

    Args:
        model: the whole model, equal on every rank; its family must have a table, and its config determines the sizes.

    Raises:
        UsageError: with the code UNKNOWN_FAMILY, AMBIGUOUS or UNKNOWN_AXIS if no table, or no single table, fits the
            model.
        Refused: with the code UNSUPPORTED if parameters are already sharded or quantized, or the table has no `cut`
            statement; with the code UNEXPECTED_TENSOR if the table lacks a parameter; with the code SHAPE_MISMATCH if a
            parameter has a different shape than in the table.
    """
    config = _config(model)
    owners = {f"{path}.{name}" if path else name: (path, name) for path, name in _parameters(model)}
    recognised = recognise(list(owners), config, builtin())
    if not recognised.family.cuts:
        raise refuse(
            "UNSUPPORTED",
            f"the table of {recognised.family.name} has no `cut` statement, so it does not say how to cut the model",
        )
    sizes = Sizes(recognised.family, config)
    bound = bind(list(owners), recognised.family, recognised.dialect, sizes, recognised.prefix)
    problems = [
        Refusal("UNEXPECTED_TENSOR", f"the table of {recognised.family.name} has no line for it", Where(None, name))
        for name in (*bound.unknown, *bound.ignored)
    ]
    weights = []
    for (line, _), names_by_position in bound.names.items():
        for position, name in names_by_position.items():
            index = line.name.index_at(position)
            axis_sizes = sizes.at(index)
            module, parameter_name = owners[name]
            parameter = model.get_submodule(module)._parameters[parameter_name]
            assert parameter is not None
            shape = tuple(parameter.shape)
            if isinstance(parameter, DTensor) and not _is_shared_out(model.get_submodule(module), parameter):
                message = f"it is already sharded, as {parameter.placements}"
                problems.append(
                    Refusal(
                        "UNSUPPORTED", message, Where(None, name), "Call tensor_parallel before sharding the model."
                    )
                )
                continue
            problems += _check(name, parameter, line.expression, axis_sizes)
            options = tuple(_options(line.expression, recognised.family.cuts))
            weights.append(
                Weight(module, parameter_name, shape, line.expression, tuple(index.items()), axis_sizes, options)
            )
    if problems:
        raise gathered(problems)
    order = {name: number for number, name in enumerate(owners)}
    return Reading(recognised.family, tuple(sorted(weights, key=lambda weight: order[weight.name])))


def _config(model: nn.Module) -> Mapping[str, Any]:
    config = getattr(model, "config", None)
    if config is None:
        return {}
    mapping: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
    return mapping


def _parameters(model: nn.Module) -> Iterator[tuple[str, str]]:
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield path, name


def _is_shared_out(owner: nn.Module, parameter: DTensor) -> bool:
    """Return whether a parameter has been cut by expert parallelism alone."""
    return isinstance(owner, GroupedLinear) and owner.ep is not None and parameter.device_mesh == owner.ep


def _check(name: str, parameter: nn.Parameter, expression: Expression, sizes: Mapping[str, int]) -> Iterator[Refusal]:
    """Yield an error for each reason why a parameter cannot be cut along any axis."""
    where, shape = Where(None, name), list(parameter.shape)
    missing = sorted(axis for axis in expression.axes if axis not in sizes)
    if missing:
        yield Refusal(
            "UNKNOWN_AXIS",
            f"{expression.text}: the model's config does not give the size of {', '.join(missing)}",
            where,
        )
    elif (expected := list(expression.layout(sizes).shape)) != shape:
        yield Refusal(
            "SHAPE_MISMATCH", f"{expression.text}\nexpected {expected} by the model's config, got {shape}", where
        )


def _options(expression: Expression, cuts: tuple[Cuttable, ...]) -> Iterator[Option]:
    """Yield the cuts that a table allows for a tensor; a `cut` statement must apply to all logical tensors in the
    tensor.
    """
    for cut in cuts:
        if len(cut.axes) > 1 or (cut.tensors is not None and not cut.tensors.issuperset(expression.components)):
            continue
        for dim, node in enumerate(expression.dims):
            if cut.axes[0] in axes_in(node):
                yield Option(cut.axes[0], dim)


@dataclass(frozen=True, slots=True)
class Shares:
    """How an axis is divided over ranks."""

    axis: str
    """Name of the axis that is divided."""
    ranges: tuple[Ranges, ...]
    """For each rank, its range of indices along the axis, and along the inner axis if several ranks share an index."""


def share_out(
    axis: str, sizes: Mapping[str, int], ranks: int, inner: str | None, widths: Sequence[int] | None = None
) -> Shares:
    """Divide an axis over ranks.

    Args:
        axis: name of the axis to divide.
        sizes: axis -> size.
        ranks: tensor-parallel degree.
        inner: axis inside `axis` that several ranks may divide if they share an index; None means no such axis.
        widths: number of indices of each rank, if the user specified these numbers; otherwise None.

    Returns:
        The ranges of indices into which `torch.chunk` divides the axis; if a rank would then have no index, ranges
        whose sizes differ by at most one.

    Raises:
        Refused: with the code SHAPE_MISMATCH if a rank would have no index, or the sum of `widths` is not the size of
            the axis.
    """
    count = sizes[axis]
    if widths is not None:
        return Shares(axis, tuple({axis: span} for span in _explicit(axis, count, ranks, widths)))
    if count >= ranks:
        return Shares(axis, tuple({axis: span} for span in _spans(count, ranks)))
    if inner is None or count * sizes[inner] < ranks:
        rank_limit = count if inner is None else count * sizes[inner]
        factors = f"{axis}={count}" if inner is None else f"({axis} {inner})={count}x{sizes[inner]}={rank_limit}"
        raise refuse("SHAPE_MISMATCH", f"{factors} cannot be divided over {ranks} ranks without cutting through one")
    ranges: list[Ranges] = []
    for index, (first, last) in enumerate(_spans(ranks, count)):
        if sizes[inner] < last - first:
            message = f"{last - first} ranks would share one of {axis}={count}, which has only {inner}={sizes[inner]}"
            raise refuse("SHAPE_MISMATCH", f"{message} to divide")
        ranges += [{axis: (index, index + 1), inner: span} for span in _spans(sizes[inner], last - first)]
    return Shares(axis, tuple(ranges))


def _spans(count: int, parts: int) -> list[tuple[int, int]]:
    spans = [torch_chunk(count, parts, part) for part in range(parts)]
    if spans[-1][0] < spans[-1][1]:
        return spans
    step, remainder = divmod(count, parts)
    ends = [step * (part + 1) + min(part + 1, remainder) for part in range(parts)]
    return list(zip([0, *ends], ends, strict=False))


def _explicit(axis: str, count: int, ranks: int, widths: Sequence[int]) -> list[tuple[int, int]]:
    if len(widths) != ranks or sum(widths) != count or min(widths, default=0) < 1:
        message = f"widths {list(widths)} do not divide {axis}={count} over {ranks} ranks, with at least one for each"
        raise refuse("SHAPE_MISMATCH", message)
    ends = [sum(widths[: rank + 1]) for rank in range(ranks)]
    return list(zip([0, *ends], ends, strict=False))


Kind = Literal["column", "row", "vocabulary", "hidden", "replicate"]
Rules = Mapping[str, "Kind | tuple[Kind, Sequence[int]]"]
"""Path of a module (`*` matches one segment) -> kind of cut, or a pair of the kind and the rows of each rank."""
_DIMS: Mapping[Kind, int | None] = {"column": 0, "vocabulary": 0, "row": 1, "hidden": 1, "replicate": None}
Group = tuple[str, tuple[tuple[str, int], ...]]
"""A cut axis, and the index of the layer as `(axis, index)` pairs; its activations flow between the group's modules."""


class Role(Enum):
    """How a cut module computes, in addition to its own forward."""

    LOCAL = auto()
    """No addition: the module's own forward computes with this rank's shards."""
    COLUMN = auto()
    """The module's input is whole on every rank; its output is only this rank's slice."""
    GATHERED = auto()
    """Like `COLUMN`, but the ranks' outputs are joined into the whole output."""
    ROW = auto()
    """The module's input is only this rank's slice; the ranks' results are summed."""
    SLICED = auto()
    """Like `ROW`, but the module's input is whole, and each rank uses its own slice of the input."""
    VOCABULARY = auto()
    """The embedding looks up the words that this rank has; the ranks' results are summed."""
    HIDDEN = auto()
    """The embedding looks up this rank's columns of every word; the ranks' columns are joined."""
    REGION = auto()
    """The cut axis occurs only inside the module: its input is whole, and the ranks' results are summed."""
    GROUPED_COLUMN = auto()
    """Like `COLUMN`, for every expert's layer in a grouped linear layer."""
    GROUPED_ROW = auto()
    """Like `ROW`, for every expert's layer in a grouped linear layer."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How one parameter is cut over the ranks."""

    weight: Weight
    """The parameter that is cut."""
    option: Option | None
    """The axis and dim along which the parameter is cut; None if every rank has the whole parameter."""
    positions_by_rank: tuple[Intervals, ...]
    """For each rank, the indices along the cut dim that the rank has."""
    shares: Shares | None
    """How the cut axis is divided over ranks; None if every rank has the whole parameter."""
    inside: bool
    """Whether every rank has the whole parameter but uses it only for the rank's own heads, so that gradients are
    summed over ranks.
    """

    @property
    def dim(self) -> int:
        """Index of the dim that is cut; 0 for a parameter that is not cut."""
        return 0 if self.option is None else self.option.dim

    @property
    def replicas(self) -> bool:
        """Whether several ranks have the same element and use it for different heads."""
        cut = self.option is not None
        return self.inside or (cut and sum(map(count_positions, self.positions_by_rank)) > self.weight.shape[self.dim])


@dataclass(frozen=True, slots=True)
class Heads:
    """An attention module with its numbers of heads."""

    module: str
    """Path of the module."""
    whole: tuple[int, int]
    """Numbers of query heads, and of key-value heads, in the whole model."""
    local: tuple[tuple[int, int], ...]
    """For each rank, its numbers of query heads and of key-value heads."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a model is cut over a number of ranks."""

    ranks: int
    """Tensor-parallel degree."""
    cuts: tuple[Cut, ...]
    """The cut of every parameter."""
    roles: Mapping[str, Role]
    """Path of a module -> how the module computes with shards."""
    heads: tuple[Heads, ...]
    """The attention modules, each with its numbers of heads."""


def make_plan(model: nn.Module, reading: Reading, ranks: int, rules: Rules | None) -> Plan:
    """Plan how a model is cut over the ranks.

    Args:
        model: the model.
        reading: the model's parameters, as the family's mapping rules describe them.
        ranks: tensor-parallel degree.
        rules: the cuts that the user chose; None means the first option of the table for each parameter.

    Raises:
        Refused: with every problem. The code is MISSING_TENSOR if a rule names a module that does not exist, and
            UNSUPPORTED if a cut is not allowed by the table or goes through a head, or a module cannot be cut.
    """
    return _Planner(model, reading, ranks, rules or {}).plan()


class _Planner:
    def __init__(self, model: nn.Module, reading: Reading, ranks: int, rules: Rules) -> None:
        self._model, self._ranks = model, ranks
        self._family = reading.family
        self._weights = reading.weights
        self._modules: dict[str, list[Weight]] = defaultdict(list)
        for weight in reading.weights:
            self._modules[weight.module].append(weight)
        self._problems: list[Refusal] = []
        self._rule_of = self._match_rules(rules)
        self._chosen: dict[str, Option | None] = {
            weight.name: self._choose_option(weight) for weight in reading.weights
        }

    def plan(self) -> Plan:
        groups = self._groups()
        shares = {group: self._shares(group, members) for group, members in groups.items()}
        self._raise_problems()
        inner = self._inner(groups)
        cuts = tuple(self._cut(weight, shares, inner) for weight in self._weights)
        roles = {path: self._role(path, weights, groups) for path, weights in self._modules.items()}
        heads = tuple(self._heads(groups, shares))
        self._raise_problems()
        return Plan(self._ranks, cuts, roles, heads)

    def _raise_problems(self) -> None:
        if self._problems:
            raise gathered(self._problems)

    def _refuse(self, where: str, message: str, code: Literal["UNSUPPORTED", "MISSING_TENSOR"] = "UNSUPPORTED") -> None:
        self._problems.append(Refusal(code, message, Where(None, where)))

    # Methods that apply the user's rules.

    def _match_rules(self, rules: Rules) -> dict[str, tuple[str, Kind, tuple[int, ...] | None]]:
        """Return module path -> (rule, kind, rows); if several rules match a module, the last rule applies."""
        modules = self._model.named_modules()
        without_experts = [path for path, module in modules if isinstance(module, GroupedLinear) and not module.experts]
        by_module: dict[str, tuple[str, Kind, tuple[int, ...] | None]] = {}
        for pattern, rule in rules.items():
            kind, rows = (rule, None) if isinstance(rule, str) else (rule[0], tuple(rule[1]))
            regex = re.compile(r"\.".join("[^.]+" if part == "*" else re.escape(part) for part in pattern.split(".")))
            matched = [path for path in (*self._modules, *without_experts) if regex.fullmatch(path)]
            if not matched:
                close = difflib.get_close_matches(pattern, self._modules, 1)
                hint = f"; the closest is {close[0]}" if close else ""
                self._refuse(pattern, f"the model has no such module with parameters{hint}", "MISSING_TENSOR")
            if kind not in _DIMS:
                self._refuse(pattern, f"there is no kind of cut {kind!r}; known are {', '.join(_DIMS)}")
                continue
            by_module |= dict.fromkeys(matched, (pattern, kind, rows))
        return by_module

    def _choose_option(self, weight: Weight) -> Option | None:
        """Return the option by which a parameter is cut; a bias is cut like the weight of its module."""
        if weight.module not in self._rule_of:
            return weight.options[0] if weight.options else None
        rule, kind, _ = self._rule_of[weight.module]
        dim = _DIMS[kind]
        if dim is None or (len(weight.shape) == 1 and dim == 1):
            return None
        for option in weight.options:
            if option.dim == dim:
                return option
        allowed = ", ".join(f"{o.axis} in dim {o.dim}" for o in weight.options) or "none"
        if len(weight.shape) > 1:
            axes = " ".join(sorted(axes_in(weight.expression.dims[dim])))
            message = f"{rule}: {kind} would cut dim {dim} of {list(weight.shape)} = {weight.expression.text}"
            self._refuse(
                weight.module,
                f"{message}, axis {axes} of {weight.shape[dim]}; the table of {self._family.name} allows: {allowed}",
            )
        return None

    # Groups.

    def _groups(self) -> dict[Group, list[Weight]]:
        """Return group -> parameters; add an error for a group in which some parameters are cut and others are not."""
        groups: dict[Group, list[Weight]] = defaultdict(list)
        for weight in self._weights:
            option = self._chosen[weight.name]
            if option is not None:
                groups[option.axis, weight.index].append(weight)
        for (axis, index), members in groups.items():
            if not self._flows(members):
                continue
            cut_names = {member.name for member in members}
            for weight in self._weights:
                could = any(option.axis == axis for option in weight.options) and weight.index == index
                if could and weight.name not in cut_names:
                    neighbours = ", ".join(sorted(cut_names - {weight.name})[:4])
                    self._refuse(
                        weight.module,
                        f"{axis}={weight.sizes[axis]} is cut in {neighbours}, but not here; cut it in all or none",
                    )
        return dict(groups)

    def _flows(self, members: Sequence[Weight]) -> bool:
        """Return whether activations along the group's axis flow from one module to another."""
        return self._takes(members) and self._gives(members)

    def _takes(self, members: Sequence[Weight]) -> bool:
        """Return whether a layer of the group has an input along the axis."""
        return any(self._is(member, nn.Linear | GroupedLinear) and self._inward(member) for member in members)

    def _gives(self, members: Sequence[Weight]) -> bool:
        """Return whether a layer of the group has an output along the axis."""
        return any(self._is(member, nn.Linear | GroupedLinear) and not self._inward(member) for member in members)

    def _inward(self, weight: Weight) -> bool:
        """Return whether a layer's weight is cut along the layer's input dim, which a bias does not have."""
        return len(weight.shape) > 1 and self._dim(weight) == len(weight.shape) - 1

    def _is(self, weight: Weight, kind: type[nn.Module] | UnionType) -> bool:
        return isinstance(self._model.get_submodule(weight.module), kind)

    def _dim(self, weight: Weight) -> int | None:
        option = self._chosen[weight.name]
        return None if option is None else option.dim

    def _shares(self, group: Group, members: Sequence[Weight]) -> Shares | None:
        """Return how a group's axis is divided over ranks; None if the division is not possible, in which case an error
        is added.
        """
        axis, _ = group
        sizes = members[0].sizes
        widths = {each.module: rows for each in members for rows in [self._indices(each, axis)] if rows is not None}
        if len(set(widths.values())) > 1:
            texts = ", ".join(f"{module} {list(rows)}" for module, rows in widths.items())
            self._refuse(members[0].module, f"the rules divide {axis}={sizes[axis]} in different ways: {texts}")
            return None
        try:
            return share_out(axis, sizes, self._ranks, self._family.within.get(axis), next(iter(widths.values()), None))
        except TransaxleError as error:
            self._refuse(members[0].module, error.refusals[0].message)
            return None

    def _indices(self, weight: Weight, axis: str) -> tuple[int, ...] | None:
        """Return the number of indices of the axis for each rank, computed from the rows in the rule for a module."""
        rows = self._rule_of[weight.module][2] if weight.module in self._rule_of else None
        option = self._chosen[weight.name]
        if rows is None or option is None or len(weight.shape) < 2:
            return None
        unit = size(weight.expression.dims[option.dim], {**weight.sizes, axis: 1})
        for rank, count in enumerate(rows):
            if count % unit:
                message = f"{count} rows on rank {rank} are {count / unit:g} times the {unit} rows of one {axis}"
                self._refuse(weight.module, f"{message} in {weight.expression.text}; give a multiple")
                return None
        return tuple(count // unit for count in rows)

    def _inner(self, groups: Mapping[Group, Sequence[Weight]]) -> frozenset[str]:
        """Return the axes that share a dim with a cut axis, such as the axis inside a head, without the cut axes."""
        inner_axes: set[str] = set()
        for (axis, _), members in groups.items():
            for member in members:
                node = member.expression.dims[self._dim(member) or 0]
                inner_axes |= axes_in(node) - {axis, self._family.within.get(axis)}
        return frozenset(inner_axes)

    # Methods that compute cuts, roles and heads from the chosen options.

    def _cut(self, weight: Weight, shares: Mapping[Group, Shares | None], inner: frozenset[str]) -> Cut:
        option = self._chosen[weight.name]
        if option is None:
            axes = weight.expression.axes
            count = weight.shape[0] if weight.shape else 0
            return Cut(weight, None, (whole(count),) * self._ranks, None, bool(axes) and axes <= inner)
        node = weight.expression.dims[option.dim]
        share = shares[option.axis, weight.index]
        assert share is not None
        ranges = [{a: span for a, span in each.items() if a in axes_in(node)} for each in share.ranges]
        held_positions = tuple(positions(node, weight.sizes, each) for each in ranges)
        return Cut(weight, option, held_positions, Shares(share.axis, tuple(ranges)), inside=False)

    def _role(self, path: str, weights: Sequence[Weight], groups: Mapping[Group, Sequence[Weight]]) -> Role:
        module = self._model.get_submodule(path)
        dims = {self._dim(weight) for weight in weights}
        if dims == {None}:
            return Role.LOCAL
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
            main = next(weight for weight in weights if len(weight.shape) > 1)
            option = self._chosen[main.name]
            members = [] if option is None else groups[option.axis, main.index]
            if option is not None and option.dim == 0:
                return Role.COLUMN if self._takes(members) else Role.GATHERED
            return Role.ROW if self._gives(members) else Role.SLICED
        if isinstance(module, GroupedLinear) and len(inward := {self._inward(weight) for weight in weights}) == 1:
            return Role.GROUPED_ROW if inward == {True} else Role.GROUPED_COLUMN
        if isinstance(module, nn.Embedding):
            return Role.VOCABULARY if dims == {0} else Role.HIDDEN
        # The only dim of a vector is not a dim of inputs, although it is the last.
        last = {len(weight.shape) - 1 == self._dim(weight) for weight in weights if len(weight.shape) > 1}
        if None not in dims and last == {True, False}:
            return Role.REGION
        shapes = ", ".join(f"{weight.parameter_name} {list(weight.shape)}" for weight in weights)
        self._refuse(path, f"it is not known how to cut a {type(module).__name__} with {shapes}")
        return Role.LOCAL

    def _heads(
        self, groups: Mapping[Group, Sequence[Weight]], shares: Mapping[Group, Shares | None]
    ) -> Iterator[Heads]:
        """Yield the attention modules with heads; add an error for head axes that the table does not describe."""
        for group, members in groups.items():
            axis, _ = group
            nested = [m for m in members if len(axes_in(m.expression.dims[self._dim(m) or 0])) > 1]
            if not nested:
                continue
            inner = self._family.within.get(axis)
            parents = {member.module.rpartition(".")[0] for member in members}
            share = shares[group]
            if inner is None or len(parents) > 1 or share is None:
                text = nested[0].expression.text
                self._refuse(
                    nested[0].module, f"{axis} counts heads ({text}), but the table has no `cut tp = … within {axis}`"
                )
                continue
            sizes = members[0].sizes
            local = []
            for ranges in share.ranges:
                key_heads, ratio = (
                    stop - start for start, stop in (ranges[axis], ranges.get(inner, (0, sizes[inner])))
                )
                local.append((key_heads * ratio, key_heads))
            yield Heads(parents.pop(), (sizes[axis] * sizes[inner], sizes[axis]), tuple(local))
