"""Tensor parallelism: a model whose family has a table, cut over the ranks of a mesh."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.live.part import mark_all, parts_in
from transaxle.live.runs import Runs, runs
from transaxle.parallel.alone import Alone
from transaxle.parallel.cutting import Kept, keep, kept_by, replaced, tell_parts
from transaxle.parallel.metadata import record_of, universal_checkpoint_info
from transaxle.parallel.modules import count_heads, cut_module, is_cut
from transaxle.parallel.plan import Plan, Rules, make_plan
from transaxle.parallel.reading import read


def tensor_parallel(
    model: nn.Module, mesh: DeviceMesh, plan: Literal["auto"] | Rules = "auto", *, dtensor: bool = True
) -> nn.Module:
    """Cut a model over the ranks of a mesh, in place.

    Every rank gives the same whole model (on the meta device, if its weights are loaded afterwards) and keeps its part.
    Inputs and outputs stay what they were, the same on all ranks. Which axes may be cut says the model's table.

    Args:
        model: of a family that has a table; not sharded or quantized yet.
        mesh: of one dim, the tensor-parallel ranks.
        plan: `auto`; or for paths of modules (`*` stands for any one part of a path) how they are cut: `column`, `row`,
            `vocabulary`, `hidden`, `replicate`, or such a word with the rows of each rank. Modules that are not named
            are cut as by `auto`.
        dtensor: parameters are DTensors on the mesh where a DTensor can say how they are cut, otherwise ordinary
            tensors of this rank's part, of which `model.state_dict()` says which part they are. With False all are
            ordinary tensors, in state dicts too, as DeepSpeed's engine needs it: of such a model only `tx.save` and
            `tx.load` know the whole, and `torch.distributed.checkpoint` is refused.

    Returns:
        The model.

    Raises:
        UsageError: UNKNOWN_FAMILY, AMBIGUOUS, UNKNOWN_AXIS.
        Refused: before anything is changed, with every problem: cuts that the table does not allow or that would go
            through a head, modules that are not there or not known, parameters that are not in the table.
    """
    if mesh.ndim != 1:
        message = f"a mesh of {mesh.ndim} dims {list(mesh.mesh.shape)}; tensor parallelism takes one"
        raise refuse("UNSUPPORTED", message, hint='Give one of its dims, mesh["tp"].')
    if any(is_cut(module) for module in model.modules()):
        raise refuse("UNSUPPORTED", f"this {type(model).__name__} is cut already")
    made = make_plan(model, read(model), mesh.size(), None if plan == "auto" else plan)
    _check_ties(model, made)
    _apply(model, mesh, made, dtensor=dtensor)
    universal_checkpoint_info(model)
    return model


def _check_ties(model: nn.Module, plan: Plan) -> None:
    """Refuse parameters that are one and would be cut in two ways."""
    first: dict[int, Any] = {}
    problems = []
    for cut in plan.cuts:
        parameter = model.get_submodule(cut.weight.module)._parameters[cut.weight.own]
        known = first.setdefault(id(parameter), cut)
        if (known.option, known.held) != (cut.option, cut.held):
            ways = " and ".join("whole" if c.option is None else f"along dim {c.dim}" for c in (known, cut))
            message = f"it is one with {known.weight.name}, and they would be cut in two ways: {ways}"
            problems.append(Refusal("UNSUPPORTED", message, Where(None, cut.weight.name)))
    if problems:
        raise gathered(problems)


def _apply(model: nn.Module, mesh: DeviceMesh, plan: Plan, *, dtensor: bool) -> None:
    made: dict[int, nn.Parameter] = {}
    for cut in plan.cuts:
        module = model.get_submodule(cut.weight.module)
        parameter = module._parameters[cut.weight.own]
        assert parameter is not None
        record = record_of(cut, cut.shares, plan.ranks)
        kept = Kept(mesh, cut.weight.shape, cut.dim, cut.held, cut.replicas, record)
        keep(module, cut.weight.own, kept)
        if id(parameter) not in made:
            made[id(parameter)] = replaced(parameter, kept, dtensor=dtensor)
            made[id(made[id(parameter)])] = made[id(parameter)]
        module._parameters[cut.weight.own] = made[id(parameter)]
    for path, role in plan.roles.items():
        module = model.get_submodule(path)
        cut_module(module, role)
        tell_parts(module)
        if any(True for _ in parts_in(module)):
            module.register_state_dict_post_hook(_as_runs if dtensor else _as_alone)
            if dtensor:
                module.register_load_state_dict_pre_hook(_from_runs)
    rank = mesh.get_local_rank()
    for heads in plan.heads:
        count_heads(model.get_submodule(heads.module), heads.whole, heads.local[rank])


def _as_runs(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Let a state dict say of each part which part it is, so that `torch.distributed.checkpoint` saves it right."""
    mark_all(module)
    for name, _part in parts_in(module):
        value, parameter = state.get(prefix + name), module._parameters[name]
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and parameter is not None:
            state[prefix + name] = runs(parameter, prefix + name)


def _as_alone(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Let `torch.distributed.checkpoint` refuse what it would take for the whole."""
    mark_all(module)
    for name, _part in parts_in(module):
        value = state.get(prefix + name)
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            state[prefix + name] = value.as_subclass(Alone)


def _from_runs(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take a part out of a state dict that says which part it is, or that has the whole."""
    kept = kept_by(module)
    for name, _part in parts_in(module):
        value, parameter = state.get(prefix + name), module._parameters[name]
        if isinstance(value, Runs):
            state[prefix + name] = value.to_local()
        elif isinstance(value, torch.Tensor) and parameter is not None and value.shape == kept[name].shape:
            state[prefix + name] = kept[name].take(value)
