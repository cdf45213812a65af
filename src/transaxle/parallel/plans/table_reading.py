"""Reads a model through its family's table: which logical tensors its parameters hold, and which axes may be cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from transaxle.axes.geometry.ranges import axes_in
from transaxle.axes.layout.bind import bind
from transaxle.axes.notation.expression import Expression
from transaxle.axes.notation.family import Cuttable, Family, Sizes
from transaxle.engine.checkpoint.recognise import recognise
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.families import builtin
from transaxle.nn.linear.grouped_linear import GroupedLinear


@dataclass(frozen=True, slots=True)
class Option:
    """A way in which a parameter may be cut."""

    axis: str
    """The axis that ranks share out."""
    dim: int
    """The dim it lies in."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter of one module, as the table has it."""

    module: str
    """Path of the module that owns it."""
    own: str
    """Its name there."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    expression: Expression
    """What it holds."""
    index: tuple[tuple[str, int], ...]
    """Name axis -> index: the layer."""
    sizes: Mapping[str, int]
    """Axis -> size, of that layer."""
    options: tuple[Option, ...]
    """How it may be cut; `auto` takes the first."""

    @property
    def name(self) -> str:
        """Its full name."""
        return f"{self.module}.{self.own}" if self.module else self.own


@dataclass(frozen=True, slots=True)
class Reading:
    """A model, read through its table."""

    family: Family
    """Its family."""
    weights: tuple[Weight, ...]
    """Every parameter of every module; a tied one once for each module."""


def read(model: nn.Module) -> Reading:
    """Read a model's parameters.

    Args:
        model: whole, on every rank, and of a family that has a table; its config tells the sizes.

    Raises:
        UsageError: UNKNOWN_FAMILY, AMBIGUOUS, UNKNOWN_AXIS.
        Refused: UNSUPPORTED for parameters that are sharded or quantized already, and for tables without `cut`;
            UNEXPECTED_TENSOR for parameters that the table does not have; SHAPE_MISMATCH.
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
            index = dict(zip(line.name.axes, position, strict=True))
            known = sizes.at(index)
            module, own = owners[name]
            parameter = model.get_submodule(module)._parameters[own]
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
            problems += _check(name, parameter, line.expression, known)
            options = tuple(_options(line.expression, recognised.family.cuts))
            weights.append(Weight(module, own, shape, line.expression, tuple(index.items()), known, options))
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
    """Tell whether nothing but expert parallelism has cut a parameter."""
    return isinstance(owner, GroupedLinear) and owner.ep is not None and parameter.device_mesh == owner.ep


def _check(name: str, parameter: nn.Parameter, expression: Expression, sizes: Mapping[str, int]) -> Iterator[Refusal]:
    """Yield the reasons why a parameter cannot be cut at all."""
    where, shape = Where(None, name), list(parameter.shape)
    lacking = sorted(axis for axis in expression.axes if axis not in sizes)
    if lacking:
        yield Refusal(
            "UNKNOWN_AXIS",
            f"{expression.text}: the model's config does not give the size of {', '.join(lacking)}",
            where,
        )
    elif (wanted := list(expression.layout(sizes).shape)) != shape:
        yield Refusal(
            "SHAPE_MISMATCH", f"{expression.text}\nexpected {wanted} by the model's config, got {shape}", where
        )


def _options(expression: Expression, cuts: tuple[Cuttable, ...]) -> Iterator[Option]:
    """Yield the ways in which a table lets a tensor be cut; a way that fits only a part of it does not count."""
    for cut in cuts:
        if len(cut.axes) > 1 or (cut.tensors is not None and not cut.tensors.issuperset(expression.components)):
            continue
        for dim, node in enumerate(expression.dims):
            if cut.axes[0] in axes_in(node):
                yield Option(cut.axes[0], dim)
