"""Megatron's parameter groups, made from those of another optimizer, and what a run must be told to go on with them.

Megatron does not go by order: since 0.19 it finds a group of its own by weight decay or none, experts or not, and both
ends of the learning rate's schedule, which its arguments say. Learning rate and weight decay it takes from those anew;
betas and epsilon from the group that it found. Weight decay is for matrices, and not for vectors and biases.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from transaxle.errors import refuse
from transaxle.formats.catalog import Shape
from transaxle.formats.megatron.flat_buckets.parameter_order import has_experts, has_layers
from transaxle.formats.training_state.state_groups import PARAMS, ParamGroup

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
