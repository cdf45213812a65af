"""The state beside the tensors of a distributed checkpoint that is written: arguments, versions, optimizer groups.

Megatron finds the settings of its own parameter groups by what tells them apart (weight decay or none, experts or not),
and takes the number of steps from them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from transaxle.formats.catalog import Shape
from transaxle.formats.megatron.torch_dist.made_groups import made_groups, refuse_other_optimizers
from transaxle.formats.megatron.written_arguments import arguments
from transaxle.formats.pickled.descriptors import Global, Object
from transaxle.formats.torch_file.draft import surround
from transaxle.formats.training_state.state import MEGATRON
from transaxle.formats.training_state.state_groups import ParamGroup

SHARDING = "fully_reshardable"
"""The form of the optimizer's state that loads at any degrees: in the model's shapes."""
_VERSION = 3.0
_GLOBAL_SAMPLES = "global_samples"
_EXPERTS, _APART = ".experts.", "is_expert_parallel"
_KEPT = ("opt_param_scheduler", "num_floating_point_operations_so_far")
_SAMPLES = "consumed_train_samples"


def common_state(
    names: Collection[str],
    config: Mapping[str, Any],
    vocabulary: int | None,
    facts: Mapping[str, Any],
    optimizer: Mapping[str, Any] | None,
) -> bytes:
    """Return the state beside the tensors, as `torch.save` writes it.

    Args:
        names: Megatron's names of the tensors.
        config: the model's config.json.
        vocabulary: rows of the embedding.
        facts: what the source says of its run, if it is Megatron's; see `arguments_of_run.RunState`.
        optimizer: the optimizer's settings; None where it is not written.
    """
    content: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    state = state_of_run(arguments(config, names, vocabulary), facts, optimizer)
    if optimizer is not None:
        content |= {"distrib_optim_sharding_type": SHARDING, "distrib_optim_fully_reshardable_mem_efficient": False}
        state["optimizer"] = optimizer
    state["content_metadata"] = content
    return b"".join(data for _, data in surround("common.pt", state, []).known)


def state_of_run(
    args: Mapping[str, Any], facts: Mapping[str, Any], optimizer: Mapping[Any, Any] | None
) -> dict[str, Any]:
    """Return the counters, the scheduler and the arguments of a run.

    Args:
        args: Megatron's arguments; empty where they are not known.
        facts: what the source says of its run.
        optimizer: the optimizer's settings; None where it is not written.
    """
    state: dict[str, Any] = {"checkpoint_version": _VERSION, "iteration": facts.get("iteration", 0)}
    found = dict(args)
    if optimizer is not None:
        state["opt_param_scheduler"] = _scheduler(optimizer, facts.get("counters", {}).get(_SAMPLES, 0))
        state |= {key: facts[key] for key in _KEPT if key in facts}
    if optimizer is not None and found:
        found |= {key: value for key, value in facts.get("counters", {}).items() if key not in found}
    if found:
        state["args"] = Object(Global("argparse", "Namespace"), state=found, new=True)
    return state


def optimizer_settings(
    parameters: Mapping[str, Shape],
    facts: Mapping[str, Any],
    groups: Sequence[ParamGroup],
    step: int,
    states: Collection[str] = (),
) -> tuple[dict[Any, Any], list[str]]:
    """Return the optimizer's settings as Megatron keeps them: those of the source's own run, or made from its groups.

    Args:
        parameters: the trained parameters, under Megatron's names.
        facts: what the source says of its run, if it is Megatron's.
        groups: settings of the source's optimizer.
        step: steps it has made.
        states: names of its states, beside steps and copies of weights.

    Returns:
        The settings, and notes on what Megatron must be told to go on with them.

    Raises:
        Refused: UNSUPPORTED where the source's optimizer is not Adam, or its groups differ in a way that Megatron's
            cannot.
    """
    has_experts = any(_EXPERTS in name for name in parameters)
    own = groups_in(facts.get("optimizer"))
    if own:
        return _chained([*own, *_of_experts(own, has_experts)], has_experts), []
    refuse_other_optimizers(groups, states)
    made, notes = made_groups(groups, step, parameters)
    if _SAMPLES not in facts.get("counters", {}):
        notes.append("the source does not say how many samples it has read: Megatron's data and schedule begin anew")
    return _chained([*made, *_of_experts(made, has_experts)], has_experts), notes


def counted(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run of Megatron says of itself, or what one of DeepSpeed counts under Megatron's names.

    Args:
        run: what the source says of its run.
    """
    facts = dict(run.get(MEGATRON, {}))
    if isinstance(samples := run.get(_GLOBAL_SAMPLES), int) and _SAMPLES not in facts.get("counters", {}):
        facts["counters"] = {**facts.get("counters", {}), _SAMPLES: samples}
    return facts


def step_of(optimizer: Mapping[Any, Any]) -> int:
    """Return the steps that an optimizer has made, from its settings."""
    return max((group.get("step", 0) for group in groups_in(optimizer)), default=0)


def _scheduler(optimizer: Mapping[Any, Any], samples: int) -> dict[str, Any]:
    """Return the state of a scheduler, which counts samples, with the learning rate and decay as they are.

    Megatron asks that its own settings equal these, or for `--override-opt_param-scheduler`.
    """
    group: Mapping[str, Any] = next(iter(groups_in(optimizer)), {})
    decay = group.get("weight_decay", 0.0)
    return {
        "max_lr": group.get("max_lr", 0.0),
        "min_lr": group.get("min_lr", 0.0),
        "lr_warmup_steps": 0,
        "num_steps": samples,
        "lr_decay_style": "constant",
        "lr_decay_steps": max(samples, 1),
        "start_wd": decay,
        "end_wd": decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": max(samples, 1),
    }


def groups_in(optimizer: object) -> list[dict[str, Any]]:
    """Return all groups in the settings of Megatron's optimizer, which may be a chain of several."""
    if not isinstance(optimizer, Mapping):
        return []
    groups = optimizer.get("param_groups")
    if isinstance(groups, list):
        return [dict(group) for group in groups if isinstance(group, Mapping)]
    return [group for inner in optimizer.values() for group in groups_in(inner)]


def _of_experts(groups: Sequence[Mapping[str, Any]], has_experts: bool) -> list[dict[str, Any]]:
    """Return the groups of experts that a run without expert parallelism does not keep apart."""
    if not has_experts or any(group.get(_APART) for group in groups):
        return []
    return [{**group, _APART: True} for group in groups if group.get("wd_mult", 1.0)]


def _chained(groups: Sequence[dict[str, Any]], has_experts: bool) -> dict[Any, Any]:
    """Return the settings of one optimizer; with experts there are two of them."""

    def of(wanted: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"optimizer": {"param_groups": list(wanted)}, "param_state_sharding_type": SHARDING}

    if not has_experts:
        return of(groups)
    dense = [group for group in groups if not group.get(_APART)]
    return {0: of(dense), 1: of([group for group in groups if group.get(_APART)])}
