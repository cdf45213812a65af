"""Makes the run's state that a new Megatron checkpoint stores: arguments, versions, scheduler and optimizer groups.

If the source is a Megatron run, its optimizer groups are copied; otherwise they are made from the source optimizer's
groups. When Megatron loads a checkpoint, it does not match optimizer groups by position. Since megatron-core 0.19
Megatron matches groups by four properties: whether they have weight decay, whether they contain experts, and the
minimum and the maximum of the learning rate, which Megatron takes from its command line. From its arguments Megatron
then takes the learning rate and the weight decay, and from the matching group betas, epsilon and the number of steps.
Megatron applies weight decay to matrices, not to vectors and biases.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from transaxle.errors import refuse
from transaxle.formats.catalog import Shape
from transaxle.formats.megatron.rank_parameters import has_experts, has_layers
from transaxle.formats.megatron.written_arguments import arguments
from transaxle.formats.pickled.descriptors import Global, Object
from transaxle.formats.torch_file.draft import lay_out_value
from transaxle.formats.training_state import MEGATRON, PARAMS, ParamGroup

_SETTINGS = ("lr", "initial_lr", "betas", "eps", "weight_decay", "bias_correction", "max_lr", "min_lr")
_EQUAL_IN_ALL = ("lr", "initial_lr", "max_lr", "min_lr")
_DEFAULTS = {"betas": (0.9, 0.999), "eps": 1e-8}
"""Megatron's default settings of Adam."""
_MOMENTS = frozenset({"exp_avg", "exp_avg_sq"})
"""Names of Adam's two moments among optimizer states."""
_COUPLED, _AMSGRAD = "decoupled_weight_decay", "amsgrad"
_OTHER_UPDATES = (_AMSGRAD, "maximize")
"""Settings of torch's Adam that change the update rule, and that Megatron's Adam does not have."""
_WEIGHTS_ALONE = "Write the weights alone: --no-optimizer."
_SHOWN = 3
"""Maximum number of parameter names that a note to the user lists."""


def make_groups(
    groups: Sequence[ParamGroup], step: int, parameters: Mapping[str, Shape]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Make Megatron's two optimizer groups, one with weight decay and one without, from the groups of a different
    optimizer.

    Args:
        groups: the source's optimizer groups.
        step: number of steps that the source's optimizer has taken.
        parameters: shapes of the trained parameters, under Megatron's names.

    Returns:
        the groups, and notes that tell the user which command-line arguments to pass to Megatron.

    Raises:
        Refused: with the code UNSUPPORTED if no group has a learning rate, or the groups differ in more than weight
            decay.
    """
    settings: dict[bool, dict[str, Any]] = {}
    for group in groups:
        group_settings = {key: _plain(group[key]) for key in _SETTINGS if key in group}
        decays = bool(group_settings.get("weight_decay"))
        first_settings = settings.setdefault(decays, group_settings)
        other_settings = settings.get(not decays, group_settings)
        differ = {key for key in _SETTINGS if first_settings.get(key) != group_settings.get(key)}
        differ |= {key for key in _EQUAL_IN_ALL if other_settings.get(key) != group_settings.get(key)}
        if differ:
            keys = ", ".join(sorted(differ))
            message = f"its optimizer has groups that differ in {keys}; Megatron's differ in decay only"
            raise refuse("UNSUPPORTED", message, hint=_WEIGHTS_ALONE)
    source_settings = settings.get(True) or settings.get(False) or {}
    if "lr" not in source_settings:
        message = "the settings of its optimizer are not there, and Megatron finds its own by the learning rate"
        raise refuse("UNSUPPORTED", message, hint=_WEIGHTS_ALONE)
    result = [_make_group(settings.get(decays, source_settings), decays, step) for decays in (True, False)]
    return result, [
        _advice(source_settings, result),
        *_default_notes(source_settings),
        *_coupling_notes(groups),
        *_decay_notes(groups, parameters),
    ]


def refuse_other_optimizers(groups: Sequence[ParamGroup], states: Collection[str]) -> None:
    """Refuse the state of an optimizer that is not Adam, because Megatron would continue with Adam.

    Args:
        groups: optimizer groups of the source checkpoint.
        states: names of the optimizer states, except steps and copies of weights.

    Raises:
        Refused: with the code UNSUPPORTED if the optimizer is not Adam.
    """
    other_states = sorted(set(states) - _MOMENTS)
    reasons = [f"it has the state {', '.join(other_states)}"] if other_states else []
    if states and not other_states and _MOMENTS - set(states):
        reasons.append(f"it has no {', '.join(sorted(_MOMENTS - set(states)))}")
    reasons += [f"{key} is set" for key in _OTHER_UPDATES if any(group.get(key) for group in groups)]
    # torch's Adam writes both `decoupled_weight_decay` and `amsgrad`
    if any(_COUPLED in group and _AMSGRAD not in group for group in groups):
        reasons.append("its settings are those of torch's RAdam or NAdam")
    if reasons:
        message = f"its optimizer is not the Adam that Megatron would go on with: {'; '.join(reasons)}"
        raise refuse("UNSUPPORTED", message, hint=_WEIGHTS_ALONE)


def _plain(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else value


def _make_group(source_settings: Mapping[str, Any], decays: bool, step: int) -> dict[str, Any]:
    return {
        "is_expert_parallel": False,
        "default_config": True,
        "wd_mult": 1.0 if decays else 0.0,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "max_lr": source_settings.get("max_lr", source_settings.get("initial_lr", source_settings["lr"])),
        "min_lr": source_settings.get("min_lr", 0.0),
        "lr": source_settings["lr"],
        "bias_correction": source_settings.get("bias_correction", True),
        "betas": source_settings.get("betas", _DEFAULTS["betas"]),
        "eps": source_settings.get("eps", _DEFAULTS["eps"]),
        "weight_decay": source_settings.get("weight_decay", 0.0) if decays else 0.0,
        "step": step,
    }


def _advice(source_settings: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> str:
    """Return a note for the user that names the arguments with which Megatron will find the matching groups."""
    group = groups[0]
    lr = f"--lr {group['max_lr']} --min-lr {group['min_lr']} --weight-decay {group['weight_decay']}"
    guessed = (
        []
        if {"max_lr", "initial_lr"} & source_settings.keys()
        else ["the learning rate of its last step for the highest"]
    )
    guessed += [] if "min_lr" in source_settings else ["0 for the lowest"]
    why = f" (the source does not say its schedule: {', '.join(guessed)})" if guessed else ""
    return (
        f"Megatron finds the optimizer's groups by {lr}{why}; it takes the rest of the schedule from its arguments "
        "with --override-opt_param-scheduler"
    )


def _default_notes(source_settings: Mapping[str, Any]) -> list[str]:
    defaults = {key: value for key, value in _DEFAULTS.items() if key not in source_settings}
    text = ", ".join(f"{key} {value}" for key, value in defaults.items())
    return [f"the source does not say all settings of its optimizer: Megatron goes on with {text}"] if defaults else []


def _coupling_notes(groups: Sequence[ParamGroup]) -> list[str]:
    coupled = any(group.get("weight_decay") and not group.get(_COUPLED, True) for group in groups)
    note = f"its weight decay is part of the gradient, and Megatron's is not: set {_COUPLED}=False in OptimizerConfig"
    return [note] if coupled else []


def _decay_notes(groups: Sequence[ParamGroup], parameters: Mapping[str, Shape]) -> list[str]:
    """Return notes on parameters that had weight decay in the source but do not have it in Megatron, or the reverse."""
    differing: dict[bool, list[str]] = {True: [], False: []}
    any_decay = any(_plain(group.get("weight_decay", 0.0)) for group in groups)
    for group in groups:
        decays = bool(_plain(group.get("weight_decay", 0.0)))
        names = [name for name in group.get(PARAMS, ()) if name in parameters]
        differing[decays] += [name for name in names if any_decay and _is_matrix(name, parameters[name]) is not decays]
    texts = {
        True: "had weight decay, which Megatron does not apply to vectors and biases",
        False: "had no weight decay, which Megatron applies to all matrices",
    }
    return [f"{_names_text(names)} {texts[decays]}" for decays, names in differing.items() if names]


def _is_matrix(name: str, shape: Shape) -> bool:
    return len(shape) - has_layers(name) - has_experts(name) > 1 and not name.endswith(".bias")


def _names_text(names: Sequence[str]) -> str:
    hidden = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {hidden} more parameters" if hidden > 0 else "")


SHARDING = "fully_reshardable"
"""Megatron's name for the optimizer layout in which states have the shapes of parameters, and can be loaded with any
parallel degrees."""
_VERSION = 3.0
_GLOBAL_SAMPLES = "global_samples"
_LAYERS = re.compile(r"(?:^|\.)layers\.(\d*)")
"""Pattern of layers in a name, with the number of a layer that has tensors of its own. Megatron asks for those if the
folder says so, or if layers differ; other layers of such a model may then be stacked.
"""
_EXPERTS, _APART = ".experts.", "is_expert_parallel"
_COPIED_FACTS = ("opt_param_scheduler", "num_floating_point_operations_so_far")
_SAMPLES = "consumed_train_samples"


def common_state(
    names: Collection[str],
    config: Mapping[str, Any],
    vocabulary: int | None,
    facts: Mapping[str, Any],
    optimizer: Mapping[str, Any] | None,
) -> bytes:
    """Return the bytes of `common.pt`, the file with that part of the run's state which is not sharded, as `torch.save`
    would write it.

    Args:
        names: tensor names as Megatron uses them.
        config: contents of the model's config.json.
        vocabulary: number of rows of the embedding.
        facts: state of the source's run, if it is a Megatron run; see `run_arguments.RunState`.
        optimizer: the optimizer's settings; None if no optimizer state is written.
    """
    content: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if {bool(match[1]) for name in names for match in _LAYERS.finditer(name)} == {True}:
        content["non_homogeneous_layers"] = True
    state = state_of_run(arguments(config, names, vocabulary), facts, optimizer)
    if optimizer is not None:
        content |= {"distrib_optim_sharding_type": SHARDING, "distrib_optim_fully_reshardable_mem_efficient": False}
        state["optimizer"] = optimizer
    state["content_metadata"] = content
    return b"".join(data for _, data in lay_out_value("common.pt", state, []).fragments)


def state_of_run(
    args: Mapping[str, Any], facts: Mapping[str, Any], optimizer: Mapping[Any, Any] | None
) -> dict[str, Any]:
    """Return a run's counters, scheduler state and arguments, under the keys that a Megatron checkpoint has for them.

    Args:
        args: Megatron's training arguments by name; empty if they are unknown.
        facts: state of the source's run.
        optimizer: the optimizer's settings; None if no optimizer state is written.
    """
    state: dict[str, Any] = {"checkpoint_version": _VERSION, "iteration": facts.get("iteration", 0)}
    arguments_and_counters = dict(args)
    if optimizer is not None:
        state["opt_param_scheduler"] = _scheduler(optimizer, facts.get("counters", {}).get(_SAMPLES, 0))
        state |= {key: facts[key] for key in _COPIED_FACTS if key in facts}
    if optimizer is not None and arguments_and_counters:
        arguments_and_counters |= {
            key: value for key, value in facts.get("counters", {}).items() if key not in arguments_and_counters
        }
    if arguments_and_counters:
        state["args"] = Object(Global("argparse", "Namespace"), state=arguments_and_counters, new=True)
    return state


def optimizer_settings(
    parameters: Mapping[str, Shape],
    facts: Mapping[str, Any],
    groups: Sequence[ParamGroup],
    step: int,
    states: Collection[str] = (),
) -> tuple[dict[Any, Any], list[str]]:
    """Return the optimizer's settings as Megatron stores them, copied from a Megatron run or made from the groups of a
    different optimizer.

    Args:
        parameters: shapes of the trained parameters, under Megatron's names.
        facts: state of the source's run, if it is a Megatron run.
        groups: optimizer groups of the source checkpoint.
        step: number of steps that the source's optimizer has taken.
        states: names of the optimizer states, except steps and copies of weights.

    Returns:
        the settings, and notes that tell the user which command-line arguments to pass to Megatron.

    Raises:
        Refused: with the code UNSUPPORTED if the source's optimizer is not Adam, or its groups differ in ways that
            Megatron's groups cannot.
    """
    has_experts = any(_EXPERTS in name for name in parameters)
    megatron_run_groups = groups_in(facts.get("optimizer"))
    if megatron_run_groups:
        return _chain_groups([*megatron_run_groups, *_expert_groups(megatron_run_groups, has_experts)], has_experts), []
    refuse_other_optimizers(groups, states)
    new_groups, notes = make_groups(groups, step, parameters)
    if _SAMPLES not in facts.get("counters", {}):
        notes.append("the source does not say how many samples it has read: Megatron's data and schedule begin anew")
    return _chain_groups([*new_groups, *_expert_groups(new_groups, has_experts)], has_experts), notes


def run_facts(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a Megatron run; for a DeepSpeed run, return its sample counter under Megatron's key.

    Args:
        run: counters and settings of the source's run, from the source's metadata.
    """
    facts = dict(run.get(MEGATRON, {}))
    if isinstance(samples := run.get(_GLOBAL_SAMPLES), int) and _SAMPLES not in facts.get("counters", {}):
        facts["counters"] = {**facts.get("counters", {}), _SAMPLES: samples}
    return facts


def step_of(optimizer: Mapping[Any, Any]) -> int:
    """Return the number of steps that an optimizer has taken, from its settings."""
    return max((group.get("step", 0) for group in groups_in(optimizer)), default=0)


def _scheduler(optimizer: Mapping[Any, Any], samples: int) -> dict[str, Any]:
    """Return the state of a scheduler with constant learning rate and weight decay; this scheduler counts samples.

    Megatron loads this state if its own scheduler settings are equal, or with `--override-opt_param-scheduler`.
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
    """Return all groups in the settings of Megatron's optimizer, which may be a chain of several optimizers."""
    if not isinstance(optimizer, Mapping):
        return []
    groups = optimizer.get("param_groups")
    if isinstance(groups, list):
        return [dict(group) for group in groups if isinstance(group, Mapping)]
    return [group for inner in optimizer.values() for group in groups_in(inner)]


def _expert_groups(groups: Sequence[Mapping[str, Any]], has_experts: bool) -> list[dict[str, Any]]:
    """Return the expert groups to add: a run without expert parallelism has no groups for experts, but Megatron
    requires them.
    """
    if not has_experts or any(group.get(_APART) for group in groups):
        return []
    return [{**group, _APART: True} for group in groups if group.get("wd_mult", 1.0)]


def _chain_groups(groups: Sequence[dict[str, Any]], has_experts: bool) -> dict[Any, Any]:
    """Return the settings of one optimizer or, if the model has experts, of two chained optimizers (dense and
    experts).
    """

    def of(members: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"optimizer": {"param_groups": list(members)}, "param_state_sharding_type": SHARDING}

    if not has_experts:
        return of(groups)
    dense = [group for group in groups if not group.get(_APART)]
    return {0: of(dense), 1: of([group for group in groups if group.get(_APART)])}
