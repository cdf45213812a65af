"""The files of an adapter as peft writes them: what its tensors are called, and what adapter_config.json says.

Modules and parameters are listed by their whole paths, which mean the same in every model that has them. peft nests the
parameters of one module in the order in which the module has them: here, that of the table's lines.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transaxle.axes.layout.relayout import Target
from transaxle.engine.adapters.factors import Pair
from transaxle.engine.adapters.lora import EMBEDDING, INNER, LINEAR, PREFIX, USUAL
from transaxle.errors import Refusal, Where

_WEIGHT = ".weight"
_HINT = (
    "Choose a dialect with one tensor for all of them, or one module for each; or merge it into the base:  transaxle "
    "convert BASE OUT --to FORMAT:DIALECT --merge ADAPTER."
)
_FLIPPED = "fan_in_fan_out"


@dataclass(frozen=True, slots=True)
class Module:
    """A weight that the adapter changes."""

    name: str
    """The weight's."""
    factors: Pair
    """Its A and B."""

    @property
    def is_parameter(self) -> bool:
        """Whether peft reaches it as a parameter, not as the weight of a linear layer or an embedding."""
        return self.factors.dims != 2 or not self.name.endswith(_WEIGHT)

    @property
    def path(self) -> str:
        """The module that has it."""
        return self.name.rpartition(".")[0]

    @property
    def key(self) -> str:
        """What adapter_config.json calls it."""
        return self.name if self.is_parameter else self.path


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that the adapter has instead of the base's."""

    name: str
    """In the base."""
    target: Target
    """Its values in the adapter's files."""
    is_module: bool
    """Whether its whole module is trained (`modules_to_save`)."""


def problems_of(modules: Sequence[Module], config: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield why peft cannot be told of these modules, with the other settings of adapter_config.json."""
    for each in modules:
        if _alpha(each.factors, config) is None:
            message = f"at rank {each.factors.rank}, no lora_alpha gives the scaling {each.factors.scaling!r} exactly"
            yield Refusal("UNSUPPORTED", message, Where(None, each.name), _HINT)
    for path, inside in _parameters(modules).items():
        shapes = [(each.factors.first.shape, each.factors.second.shape) for each in inside]
        if len(set(shapes)) < len(shapes):
            message = (
                f"{len(inside)} parameters of this module are changed by factors of equal shapes, and no file of "
                "peft's says which belong to which: peft goes by the order in which a model registers them"
            )
            yield Refusal("UNSUPPORTED", message, Where(None, path), _HINT)
        for each in inside:
            if each.factors.dims == 2 and each.factors.swapped:
                message = f"{each.factors.first.rule}\nis [in, out], and peft takes such a parameter for [out, in]"
                yield Refusal("UNSUPPORTED", message, Where(None, each.name), _HINT)
    linear = _linear(modules)
    flipped = {each.factors.swapped for each in linear}
    if len(flipped) > 1 or (flipped == {True} and _parameters(modules)):
        names = ", ".join(each.name for each in linear if each.factors.swapped)
        message = f"some weights are [in, out] and others not, and {_FLIPPED} is for all of them: {names[:300]}"
        yield Refusal("UNSUPPORTED", message, Where(), _HINT)
    for each in modules:
        if each.factors.embedding and (each.is_parameter or not each.factors.swapped):
            message = f"{each.factors.first.rule}\nis no embedding [rows, width], which the adapter changes"
            yield Refusal("UNSUPPORTED", message, Where(None, each.name), _HINT)


def names_of(modules: Sequence[Module], saved: Sequence[Saved]) -> dict[str, Target]:
    """Return the adapter's tensors by the names that peft gives them."""
    named: dict[str, Target] = {}
    wrapped: Counter[str] = Counter()
    for each in modules:
        if not each.is_parameter:
            wrapped[each.path] = 1
            for end, target in zip(_ends(each), (each.factors.first, each.factors.second), strict=True):
                named[f"{PREFIX}{each.path}.{end}"] = target
    for path, inside in _parameters(modules).items():
        wrapped[path] = len(inside)
        for depth, each in enumerate(reversed(inside)):
            for end, target in zip(LINEAR, (each.factors.first, each.factors.second), strict=True):
                named[f"{PREFIX}{path}{INNER * depth}.{end}"] = target
    for kept in saved:
        path, _, last = kept.name.rpartition(".")
        named[f"{PREFIX}{path}{INNER * wrapped[path]}.{last}"] = kept.target
    return named


def is_flipped(modules: Sequence[Module], config: Mapping[str, Any]) -> bool:
    """Tell whether the weights of linear layers are `[in, out]`; where there are none, what the config says."""
    flipped = {each.factors.swapped for each in _linear(modules)}
    return flipped.pop() if flipped else bool(config.get(_FLIPPED))


def config_of(config: Mapping[str, Any], modules: Sequence[Module], saved: Sequence[Saved]) -> bytes:
    """Return the text of adapter_config.json.

    Args:
        config: the one that the adapter had.
        modules: what it changes.
        saved: what it replaces.
    """
    ranks = {each.key: each.factors.rank for each in modules}
    alphas = {each.key: _alpha(each.factors, config) or 0.0 for each in modules}
    usual = {key: _most(values, config.get(key, USUAL)) for key, values in (("r", ranks), ("lora_alpha", alphas))}
    parameters = sorted(each.key for each in modules if each.is_parameter)
    whole = sorted({each.name.rpartition(".")[0] for each in saved if each.is_module})
    changed: dict[str, Any] = {
        **config,
        **usual,
        "rank_pattern": {key: rank for key, rank in ranks.items() if rank != usual["r"]},
        "alpha_pattern": {key: alpha for key, alpha in alphas.items() if alpha != usual["lora_alpha"]},
        "target_modules": sorted(each.key for each in modules if not each.is_parameter),
        "target_parameters": parameters or None,
        "modules_to_save": whole or None,
        _FLIPPED: is_flipped(modules, config) and not parameters,
        "exclude_modules": None,
        "layers_pattern": None,
        "layers_to_transform": None,
    }
    if parameters:
        changed["lora_dropout"] = 0.0  # peft has none for parameters
    return json.dumps(changed, indent=2, sort_keys=True).encode() + b"\n"


def _alpha(factors: Pair, config: Mapping[str, Any]) -> float | None:
    """Return the alpha that gives a scaling, bit by bit, a whole number where that is one; None where there is none."""
    divisor = math.sqrt(factors.rank) if config.get("use_rslora") else factors.rank
    near = factors.scaling * divisor
    for alpha in (round(near), near, math.nextafter(near, 0), math.nextafter(near, math.inf)):
        if alpha > 0 and alpha / divisor == factors.scaling:
            return alpha
    return None


def _most(values: Mapping[str, float], default: float) -> float:
    """Return the most frequent number."""
    return Counter(values.values()).most_common(1)[0][0] if values else default


def _ends(module: Module) -> tuple[str, str]:
    return EMBEDDING if module.factors.embedding else LINEAR


def _linear(modules: Sequence[Module]) -> list[Module]:
    return [each for each in modules if not each.is_parameter and not each.factors.embedding]


def _parameters(modules: Sequence[Module]) -> dict[str, list[Module]]:
    """Return the parameters that are changed, by their modules."""
    inside: dict[str, list[Module]] = defaultdict(list)
    for each in modules:
        if each.is_parameter:
            inside[each.path].append(each)
    return inside
