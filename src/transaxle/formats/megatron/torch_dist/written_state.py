"""The state beside the tensors of a distributed checkpoint that is written: arguments, versions, optimizer groups.

Megatron finds the settings of its own parameter groups by what tells them apart (weight decay or none, experts or not),
and takes the number of steps from them.

Megatron's parameter groups, made from those of another optimizer, and what a run must be told to go on with them.

Megatron does not go by order: since 0.19 it finds a group of its own by weight decay or none, experts or not, and
both ends of the learning rate's schedule, which its arguments say. Learning rate and weight decay it takes from those
anew; betas and epsilon from the group that it found. Weight decay is for matrices, and not for vectors and biases.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from transaxle.errors import refuse
from transaxle.formats.catalog import Shape
from transaxle.formats.megatron.rank_parameters import has_experts, has_layers
from transaxle.formats.megatron.written_arguments import arguments
from transaxle.formats.pickled.descriptors import Global, Object
from transaxle.formats.torch_file.draft import surround
from transaxle.formats.training_state import MEGATRON, PARAMS, ParamGroup

_SETTINGS = ("lr", "initial_lr", "betas", "eps", "weight_decay", "bias_correction", "max_lr", "min_lr")
_OF_ALL = ("lr", "initial_lr", "max_lr", "min_lr")
_USUAL = {"betas": (0.9, 0.999), "eps": 1e-8}
"""Megatron's defaults."""
_MOMENTS = frozenset({"exp_avg", "exp_avg_sq"})
"""States of Adam."""
_COUPLED, _AMSGRAD = "decoupled_weight_decay", "amsgrad"
_OTHER_STEPS = (_AMSGRAD, "maximize")
"""Settings of torch's Adam with which a step is another than Megatron's."""
_WEIGHTS_ALONE = "Write the weights alone: --no-optimizer."
_SHOWN = 3
"""Names in a note."""


def made_groups(
    groups: Sequence[ParamGroup], step: int, parameters: Mapping[str, Shape]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return Megatron's two groups, with weight decay and without, and notes on what it must be told.

    Args:
        groups: settings of the source's optimizer.
        step: steps it has made.
        parameters: the trained ones, under Megatron's names.

    Raises:
        Refused: UNSUPPORTED where no group has a learning rate, or they differ in a way that Megatron's cannot.
    """
    settings: dict[bool, dict[str, Any]] = {}
    for group in groups:
        found = {key: _plain(group[key]) for key in _SETTINGS if key in group}
        decays = bool(found.get("weight_decay"))
        same = settings.setdefault(decays, found)
        other = settings.get(not decays, found)
        differ = sorted({key for key in _SETTINGS if same.get(key) != found.get(key)}
                        | {key for key in _OF_ALL if other.get(key) != found.get(key)})  # fmt: skip
        if differ:
            message = f"its optimizer has groups that differ in {', '.join(differ)}; Megatron's differ in decay only"
            raise refuse("UNSUPPORTED", message, hint=_WEIGHTS_ALONE)
    known = settings.get(True) or settings.get(False) or {}
    if "lr" not in known:
        message = "the settings of its optimizer are not there, and Megatron finds its own by the learning rate"
        raise refuse("UNSUPPORTED", message, hint=_WEIGHTS_ALONE)
    made = [_made(settings.get(decays, known), decays, step) for decays in (True, False)]
    return made, [_advice(known, made), *_unknown(known), *_coupled(groups), *_decayed_otherwise(groups, parameters)]


def refuse_other_optimizers(groups: Sequence[ParamGroup], states: Collection[str]) -> None:
    """Refuse the state of an optimizer that is not Adam: Megatron would go on as if it were.

    Args:
        groups: settings of the source's optimizer.
        states: names of its states, beside steps and copies of weights.

    Raises:
        Refused: UNSUPPORTED.
    """
    others = sorted(set(states) - _MOMENTS)
    why = [f"it has the state {', '.join(others)}"] if others else []
    if states and not others and _MOMENTS - set(states):
        why.append(f"it has no {', '.join(sorted(_MOMENTS - set(states)))}")
    why += [f"{key} is set" for key in _OTHER_STEPS if any(group.get(key) for group in groups)]
    if any(_COUPLED in group and _AMSGRAD not in group for group in groups):  # torch's Adam has both
        why.append("its settings are those of torch's RAdam or NAdam")
    if why:
        message = f"its optimizer is not the Adam that Megatron would go on with: {'; '.join(why)}"
        raise refuse("UNSUPPORTED", message, hint=_WEIGHTS_ALONE)


def _plain(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else value


def _made(found: Mapping[str, Any], decays: bool, step: int) -> dict[str, Any]:
    return {
        "is_expert_parallel": False,
        "default_config": True,
        "wd_mult": 1.0 if decays else 0.0,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "max_lr": found.get("max_lr", found.get("initial_lr", found["lr"])),
        "min_lr": found.get("min_lr", 0.0),
        "lr": found["lr"],
        "bias_correction": found.get("bias_correction", True),
        "betas": found.get("betas", _USUAL["betas"]),
        "eps": found.get("eps", _USUAL["eps"]),
        "weight_decay": found.get("weight_decay", 0.0) if decays else 0.0,
        "step": step,
    }


def _advice(known: Mapping[str, Any], made: Sequence[Mapping[str, Any]]) -> str:
    """Return what to give Megatron, so that it finds the groups."""
    group = made[0]
    lr = f"--lr {group['max_lr']} --min-lr {group['min_lr']} --weight-decay {group['weight_decay']}"
    guessed = [] if {"max_lr", "initial_lr"} & known.keys() else ["the learning rate of its last step for the highest"]
    guessed += [] if "min_lr" in known else ["0 for the lowest"]
    why = f" (the source does not say its schedule: {', '.join(guessed)})" if guessed else ""
    return (
        f"Megatron finds the optimizer's groups by {lr}{why}; it takes the rest of the schedule from its arguments "
        "with --override-opt_param-scheduler"
    )


def _unknown(known: Mapping[str, Any]) -> list[str]:
    lacking = {key: value for key, value in _USUAL.items() if key not in known}
    taken = ", ".join(f"{key} {value}" for key, value in lacking.items())
    return [f"the source does not say all settings of its optimizer: Megatron goes on with {taken}"] if lacking else []


def _coupled(groups: Sequence[ParamGroup]) -> list[str]:
    coupled = any(group.get("weight_decay") and not group.get(_COUPLED, True) for group in groups)
    note = f"its weight decay is part of the gradient, and Megatron's is not: set {_COUPLED}=False in OptimizerConfig"
    return [note] if coupled else []


def _decayed_otherwise(groups: Sequence[ParamGroup], parameters: Mapping[str, Shape]) -> list[str]:
    """Return notes on the parameters whose weight decay is not the one that Megatron gives them."""
    decayed: dict[bool, list[str]] = {True: [], False: []}
    any_decay = any(_plain(group.get("weight_decay", 0.0)) for group in groups)
    for group in groups:
        decays = bool(_plain(group.get("weight_decay", 0.0)))
        names = [name for name in group.get(PARAMS, ()) if name in parameters]
        decayed[decays] += [name for name in names if any_decay and _is_matrix(name, parameters[name]) is not decays]
    said = {
        True: "had weight decay, which Megatron does not apply to vectors and biases",
        False: "had no weight decay, which Megatron applies to all matrices",
    }
    return [f"{_listed(names)} {said[decays]}" for decays, names in decayed.items() if names]


def _is_matrix(name: str, shape: Shape) -> bool:
    return len(shape) - has_layers(name) - has_experts(name) > 1 and not name.endswith(".bias")


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more parameters" if rest > 0 else "")


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
