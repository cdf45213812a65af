"""Expert layouts of frameworks and grouped layers, converted in one step: names, order of gate and up, transposes.

This is for the state dict of one layer's experts. `transaxle.load`, `transaxle.state_dict_as` and `transaxle.convert`
do the same for whole models, and understand DTensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from torch import nn

from transaxle.axes.layout.bind import bind, group, join_slot, score, split_slot
from transaxle.axes.notation.family import Dialect, Family, Sizes
from transaxle.axes.notation.tables import read
from transaxle.axes.translation.translate import translate
from transaxle.errors import refuse
from transaxle.nn.checkpoints.torch_relayout import described, move, under

_TABLE = "experts.rules"
STACKED = "stacked"
"""The dialect of two grouped layers `linear_fc1`, `linear_fc2` with one weight each."""
SEPARATE = "separate"
"""The same, with one weight per expert."""


@cache
def family() -> Family:
    """Return the table of expert layouts."""
    (table,) = read(files("transaxle.nn").joinpath(_TABLE).read_text("utf-8"), file=_TABLE)
    return table


def _dialect(label: str) -> Dialect:
    dialect = family().dialect(label)
    if dialect is None:
        raise refuse("AMBIGUOUS", f"there is no expert layout {label!r}; known are {', '.join(family().labels)}")
    return dialect


def recognised(names: list[str]) -> Dialect | None:
    """Return the layout that reads most of the names; None if no layout reads any."""
    grouped = group(split_slot(name)[0] for name in names)
    scored = [(score(grouped, dialect), dialect) for dialect in family().dialects]
    fitting = [(matched, dialect) for (matched, prefix), dialect in scored if matched and not prefix]
    return max(fitting, key=lambda pair: pair[0])[1] if fitting else None


def experts_as(state: Mapping[str, Any], layout: str, *, prefix: str = "", source: str | None = None) -> dict[str, Any]:
    """Return a state dict with one layer's experts in another layout; other entries stay as they are.

    Args:
        state: any state dict, which is not changed. Optimizer states are named `optim/<parameter>/<state>`.
        layout: `stacked`, `separate`, `hf`, `transformers`, `torchtitan`, `torchtitan@0.2` or `automodel`.
        prefix: prefix of the experts' names, such as `model.layers.0.mlp.experts.`
        source: their present layout; None: it is recognised by the names.

    Raises:
        Refused: MISSING_TENSOR for missing experts; SHAPE_MISMATCH; UNSUPPORTED for DTensors, and for codes, which
            cannot be moved without their scales.
        UsageError: AMBIGUOUS for an unknown layout, or names of no known layout.
    """
    target = _dialect(layout)
    own, rest = _divided(state, prefix)
    origin = recognised(list(own)) if source is None else _dialect(source)
    if origin is None:
        first = ", ".join(list(own)[:3]) or "(none)"
        raise refuse(
            "AMBIGUOUS",
            f"no expert layout reads the names {first}",
            hint=f"Give source= one of {', '.join(family().labels)}.",
        )
    sizes = Sizes(family(), {})
    bound = bind(tuple(own), family(), origin, sizes)
    _refuse_codes({name: value for name, value in own.items() if name not in bound.unknown})
    moved = move(translate(bound, described(own), target, sizes), own)
    return {**rest, **under(prefix, moved)}


def _divided(state: Mapping[str, Any], prefix: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors below a prefix, without it, and all the rest."""
    own, rest = {}, {}
    for name, value in state.items():
        parameter, slot = split_slot(name)
        if parameter.startswith(prefix) and isinstance(value, torch.Tensor):
            own[join_slot(parameter[len(prefix) :], slot)] = value
        else:
            rest[name] = value
    return own, rest


def _refuse_codes(own: Mapping[str, torch.Tensor]) -> None:
    for name, value in own.items():
        if value.dtype.itemsize == 1:
            raise refuse(
                "UNSUPPORTED",
                f"its codes of {value.dtype} cannot be moved without their scales",
                tensor=name,
                hint="Use transaxle.load or transaxle.convert, which move codes and scales together.",
            )


def _translated(owner: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:  # noqa: ARG001
    """Bring experts into the layout `stacked`. A hook of torch, with a name, so that its module can be pickled."""
    own = [name.removeprefix(prefix) for name in state if name.startswith(prefix)]
    layout = recognised(own)
    if layout is None or layout.label in (STACKED, SEPARATE):
        return
    stacked = experts_as(state, STACKED, prefix=prefix)
    for name in [name for name in state if name not in stacked]:
        del state[name]  # torch hands the hooks a copy that is theirs
    state.update(stacked)


def accept_layouts(module: nn.Module) -> nn.Module:
    """Let a module with grouped layers `linear_fc1` and `linear_fc2` load experts in any layout; return the module.

    The hook belongs to this module, since each layer sees only the names below its own.

    Args:
        module: the owner of both layers; the first computes gate and up.
    """
    module.register_load_state_dict_pre_hook(_translated)
    return module
