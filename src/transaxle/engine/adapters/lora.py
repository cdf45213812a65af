"""LoRA: what the files of an adapter change of a model's weights, read as peft reads them.

A change is `scaling * B @ A`. Its place is found from names and from adapter_config.json. The parameters of one module
(`target_parameters`) are nested in the order in which the module has them, which no file records: there, shapes must
leave one possibility only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from transaxle.errors import Refusal, Where, gathered
from transaxle.formats.catalog.catalog import Entry

PREFIX = "base_model.model."
LINEAR = ("lora_A.weight", "lora_B.weight")
EMBEDDING = ("lora_embedding_A", "lora_embedding_B")
INNER = ".base_layer"
_HARMLESS = frozenset(
    {
        "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "eva_config",
        "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
        "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "megatron_core", "modules_to_save",
        "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config",
        "target_modules", "target_parameters", "task_type", "use_rslora",
    }
)  # fmt: skip
"""Keys of adapter_config.json that do not change what is added to the weights, or that are read here."""
_PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Ways to start an adapter that leave the base as it is; the others subtract something from it."""
_PATTERN = re.compile(r"(?:\^|\.\*\\\.)?(?:[\w.-]|\\\.)+")
"""Keys of patterns that are names or ends of names (peft's own begin with `.*\\.`); others may take for ever."""
USUAL, _LARGEST = 8, 1e9
"""Rank and alpha where none is said, and what is no real one."""
_CONV1D_MODELS = frozenset({"clvp", "decision_transformer", "gpt2", "imagegpt", "openai-gpt"})
_CONV1D = frozenset({"c_attn", "c_fc", "c_proj", "q_attn"})
"""Models of transformers, and modules in them, whose weights are `[in, out]`. There peft goes by the class of each
module, and `fan_in_fan_out` ends up as the last one needs it.
"""
_MOST = 6
"""Parameters of a module of which all orders are tried."""
_HINT = "Merge it with peft: merge_and_unload(), then save_pretrained()."


@dataclass(frozen=True, slots=True)
class LowRank:
    """The change of one weight."""

    name: str
    """The weight, under the name that the adapter's model has for it."""
    first: Entry
    """`A [matrices * rank, in]`; the ranks of a matrix lie together."""
    second: Entry
    """`B [out, rank * matrices]`; the matrices of a rank lie together."""
    matrices: int
    """How many matrices the weight consists of."""
    swapped: bool
    """Whether the weight is `[in, out]`."""
    scaling: float
    """What the product is multiplied with."""

    @property
    def embedding(self) -> bool:
        """Whether it changes the weight of an embedding."""
        return self.first.name.endswith(EMBEDDING[0])


@dataclass(frozen=True, slots=True)
class Changes:
    """What an adapter does to a model."""

    added: Mapping[str, LowRank]
    """Weight -> what is added to it."""
    replaced: Mapping[str, Entry]
    """Tensor -> the one of the adapter that takes its place (`modules_to_save`, biases)."""

    @property
    def names(self) -> Collection[str]:
        """The tensors that are not what they were."""
        return {*self.added, *self.replaced}


class Lora:
    """The files of a LoRA adapter.

    Args:
        entries: its tensors.
        config: its adapter_config.json.
        base: the config.json of its base.

    Raises:
        Refused: UNSUPPORTED, CORRUPT: every reason why its change of the weights is not known.
    """

    def __init__(self, entries: Mapping[str, Entry], config: Mapping[str, Any], base: Mapping[str, Any]) -> None:
        self._config = config
        self._has_conv1d = str(base.get("model_type")) in _CONV1D_MODELS
        self._problems = list(_unsupported(config))
        self._low: dict[str, dict[str, Entry]] = {}
        self._replaced: dict[str, Entry] = {}
        for name, entry in entries.items():
            self._sort(name, entry)
        if not self._problems and not self._low:
            self._refuse("CORRUPT", "the adapter has no tensors lora_A and lora_B", None)
        for path, pair in self._low.items():
            if set(pair) not in (set(LINEAR), set(EMBEDDING)) or any(len(each.shape) != 2 for each in pair.values()):
                self._refuse("CORRUPT", f"A and B are needed, each of two dims; it has {', '.join(pair)}", path)
        self._check()
        inside: dict[str, list[str]] = {}
        for path in self._low:
            module = path
            while module.endswith(INNER):
                module = module.removesuffix(INNER)
            inside.setdefault(module, []).append(path)
        self._modules = {module: sorted(paths, key=len, reverse=True) for module, paths in inside.items()}
        found = {name for module in self._modules for name in self._parameters(module)}
        for name in sorted(_target_parameters(config)[0] - found):
            self._refuse("UNSUPPORTED", f"target_parameters has {name}, but the adapter changes none", None)
        self._check()

    def targets(self) -> set[str]:
        """Return the names that the model must have."""
        names = {f"{module}.{name}" for module in self._modules for name in self._parameters(module) or ["weight"]}
        return names | self._replaced.keys()

    def changes(self, shapes: Mapping[str, tuple[int, ...]]) -> Changes:
        """Return what happens to each weight.

        Args:
            shapes: of the model's tensors.

        Raises:
            Refused: SHAPE_MISMATCH; AMBIGUOUS where several parameters of a module fit.
        """
        added = [each for module in self._modules for each in self._of_module(module, shapes)]
        for name, entry in self._replaced.items():
            if shapes[name] != entry.shape:
                self._refuse("SHAPE_MISMATCH", f"{list(entry.shape)}, but the model's has {list(shapes[name])}", name)
        self._check()
        return Changes({each.name: each for each in added}, self._replaced)

    def _sort(self, name: str, entry: Entry) -> None:
        inside = name.removeprefix(PREFIX)
        for end in (*LINEAR, *EMBEDDING):
            if inside.endswith(f".{end}") and inside != name:
                self._low.setdefault(inside.removesuffix(f".{end}"), {})[end] = entry
                return
        if inside == name or ".lora_" in inside or inside.startswith("lora_"):
            self._refuse("UNSUPPORTED", "it belongs to no LoRA that can be merged", name)
        else:
            self._replaced[inside.replace(f"{INNER}.", ".")] = entry

    def _parameters(self, module: str) -> list[str]:
        """Return the parameters of a module that are targets themselves.

        Of mixtures peft writes names without their modules. These are of each module that it did not choose as such.
        """
        bare, whole = _target_parameters(self._config)
        named = {name for path, name in whole if f".{module}".endswith(f".{path}")}
        chosen = any(f".{module}".endswith(f".{each}") for each in self._config.get("target_modules") or ())
        return sorted(named or (set() if chosen else bare))

    def _of_module(self, module: str, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[LowRank]:
        paths = self._modules[module]
        parameters = self._parameters(module)
        if parameters:
            stacks = any(len(shapes[f"{module}.{name}"]) == 3 for name in parameters)
            ways = [False, True] if stacks else [False]
        else:
            ways = [EMBEDDING[0] in self._low[paths[0]] or self._is_flipped(module)]
            parameters = ["weight"]
        possible = []
        for order in permutations(parameters) if len(parameters) == len(paths) <= _MOST else ():
            for swapped in ways:
                pairs = zip(paths, order, strict=True)
                changes = [self._change(path, f"{module}.{name}", shapes, swapped) for path, name in pairs]
                if None not in changes:
                    possible.append([each for each in changes if each is not None])
        if len(possible) > 1:
            message = f"the shapes of {', '.join(parameters)} do not tell what belongs to which, or whether they are "
            self._refuse("AMBIGUOUS", f"{message}[in, out] or [out, in]", module)
        elif not possible:
            factors = "; ".join(
                " and ".join(f"{end} {list(entry.shape)}" for end, entry in self._low[path].items()) for path in paths
            )
            weights = ", ".join(f"{name} {list(shapes[f'{module}.{name}'])}" for name in parameters)
            message = f"{factors} do not fit the model's {weights} at rank {self._rank(f'{module}.{parameters[0]}')}"
            self._refuse("SHAPE_MISMATCH", message, module)
        else:
            yield from possible[0]

    def _is_flipped(self, module: str) -> bool:
        """Tell whether the weight of a module is `[in, out]`."""
        if self._has_conv1d:
            return module.rpartition(".")[2] in _CONV1D
        return bool(self._config.get("fan_in_fan_out"))

    def _change(self, path: str, name: str, shapes: Mapping[str, tuple[int, ...]], swapped: bool) -> LowRank | None:
        """Return the change of a weight by one pair of factors; None where it does not fit."""
        shape, pair = shapes[name], self._low[path]
        first, second = (pair[end] for end in (EMBEDDING if EMBEDDING[0] in pair else LINEAR))
        of_stack = bool(self._parameters(name.rpartition(".")[0]))
        if len(shape) != 2 and (len(shape) != 3 or not of_stack):
            return None
        swapped = swapped and (len(shape) == 3 or not of_stack)
        matrices = 1 if len(shape) == 2 else shape[0]
        rows, columns = reversed(shape[-2:]) if swapped else shape[-2:]
        rank = self._rank(name)
        if (first.shape, second.shape) != ((matrices * rank, columns), (rows, rank * matrices)):
            return None
        return LowRank(name, first, second, matrices, swapped, self._scaling(name, rank))

    def _rank(self, name: str) -> int:
        return int(self._setting("rank_pattern", "r", name))

    def _scaling(self, name: str, rank: int) -> float:
        alpha = float(self._setting("alpha_pattern", "lora_alpha", name))
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def _setting(self, patterns: str, key: str, name: str) -> Any:
        """Return what holds for a weight; peft's patterns name modules, and parameters that are targets themselves."""
        module = name if self._parameters(name.rpartition(".")[0]) else name.rpartition(".")[0]
        for pattern, value in (self._config.get(patterns) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        return self._config.get(key, USUAL)

    def _refuse(self, code: Any, message: str, name: str | None) -> None:
        self._problems.append(Refusal(code, message, Where(None, name), _HINT))

    def _check(self) -> None:
        if self._problems:
            raise gathered(self._problems)


def _unsupported(config: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield what adapter_config.json says that is not merged here."""
    if not config:
        message = "there is no adapter_config.json beside the tensors"
        yield Refusal("UNSUPPORTED", message, Where(), "Give the folder that peft's save_pretrained has written.")
        return
    kind = str(config.get("peft_type"))[:40]
    if kind != "LORA":
        yield Refusal("UNSUPPORTED", f"adapters of type {kind} cannot be merged here, LORA can", Where(), _HINT)
        return
    others = [key for key, value in config.items() if value and key not in _HARMLESS]
    if config.get("init_lora_weights") not in _PLAIN_STARTS:
        others.append(f"init_lora_weights={str(config['init_lora_weights'])[:40]!r}")
    if others:
        message = f"adapter_config.json has {', '.join(others)}: its change of the weights is not B @ A alone"
        yield Refusal("UNSUPPORTED", message, Where(), _HINT)
    parameters, modules = config.get("target_parameters") or [], config.get("target_modules") or []
    if not isinstance(parameters, list) or not all(isinstance(each, str) for each in parameters):
        yield Refusal("UNSUPPORTED", "target_parameters has more than names", Where(), _HINT)
    elif _target_parameters(config)[0] and not isinstance(modules, list):
        message = f"target_modules is {str(modules)[:40]!r}, so it is not known which modules target_parameters means"
        yield Refusal("UNSUPPORTED", message, Where(), _HINT)
    for patterns, key in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
        given = config.get(patterns) or {}
        if not isinstance(given, Mapping) or not all(map(_PATTERN.fullmatch, given)):
            yield Refusal("UNSUPPORTED", f"{patterns} has more than names", Where(), _HINT)
            continue
        numbers = [config.get(key, USUAL), *given.values()]
        if not all(_is_number(value, whole=key == "r") for value in numbers):
            yield Refusal("CORRUPT", f"{key} or {patterns} has something else than positive numbers", Where(), _HINT)


def _target_parameters(config: Mapping[str, Any]) -> tuple[set[str], set[tuple[str, str]]]:
    """Return the targets that are names of parameters, and those with their modules, as (module, name)."""
    targets = [str(target).rpartition(".") for target in config.get("target_parameters") or ()]
    return {name for path, _, name in targets if not path}, {(path, name) for path, _, name in targets if path}


def _is_number(value: object, *, whole: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        return False
    return 0 < value < _LARGEST
