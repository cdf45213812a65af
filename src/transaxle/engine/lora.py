"""LoRA: the changes that an adapter's files make to a model's weights, interpreted as peft interprets them.

A change of a weight is `scaling * B @ A`. Tensor names and adapter_config.json show which weights change. If several
parameters of one module change (`target_parameters`), peft nests them in the module's order, which no file records. For
such parameters, the shapes must leave only one possible order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import permutations
from math import prod
from typing import Any

from transaxle.encodings.conventions.packed_methods import CONV1D_TYPES
from transaxle.errors import Refusal, Where, gathered
from transaxle.formats.catalog import Entry

PREFIX = "base_model.model."
LINEAR = ("lora_A.weight", "lora_B.weight")
EMBEDDING = ("lora_embedding_A", "lora_embedding_B")
INNER = ".base_layer"
_TWIN_MODULES = ("modules_to_save", "original_module")
"""Wrapper modules of peft that contain a module twice: once trained, and once in its original state. If a vocabulary
was resized, the files contain both modules, and the trained module a second time under the module's own name; peft
loads this last one.
"""
_KNOWN_KEYS = frozenset(
    {
        "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "eva_config",
        "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
        "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "megatron_core", "modules_to_save",
        "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config",
        "target_modules", "target_parameters", "task_type", "use_rslora",
    }
)  # fmt: skip
"""Keys of adapter_config.json that this module reads, or that do not influence how weights change."""
_PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base weights unchanged; every other value subtracts something from the
base weights.
"""
_PATTERN = re.compile(r"(?:\^|\.\*\\\.)?(?:[\w.-]|\\\.)+")
"""Matches patterns that are names or ends of names (patterns that peft writes begin with `.*\\.`). Matching a less
restricted pattern could take exponential time.
"""
DEFAULT_RANK, _LARGEST = 8, 1e9
"""The default of both rank and alpha in peft, and an upper bound for plausible ranks and alphas."""
_CONV1D = frozenset({"c_attn", "c_fc", "c_proj", "q_attn"})
"""Names of modules whose weights are stored as `[in, out]` in models of `CONV1D_TYPES`. peft decides this by the class
of each module; the setting `fan_in_fan_out` describes only the last module that peft has wrapped.
"""
_FLOATS = ("F", "BF")
"""Prefixes of the names of dtypes that store values instead of codes."""
_MAX_PARAMETERS = 6
"""Largest number of parameters in one module for which all orders of the parameters are tried."""
_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)")
_HINT = "Merge the adapter with peft: merge_and_unload(), then save_pretrained()."
_RESIZE = (
    "If the adapter's vocabulary was resized, peft needs a base model that is resized "
    "too: base.resize_token_embeddings({}), then "
    "base.save_pretrained(...), and merge into that."
)
_LACKING = "adapter_config.json names {} modules of this model for which the adapter has nothing"
_SAY = (
    "Get the whole adapter. If these modules are meant to stay unchanged, list in adapter_config.json those that the "
    "adapter changes: by their whole paths in target_modules, or by their layers in layers_to_transform."
)


@dataclass(frozen=True, slots=True)
class LowRank:
    """The low-rank change `scaling * B @ A` of one weight."""

    name: str
    """Name of the changed weight in the base model."""
    first: Entry
    """The factor A, with shape `[matrices * rank, in]`; the rows of one matrix are adjacent."""
    second: Entry
    """The factor B, with shape `[out, rank * matrices]`; the columns of one rank index are adjacent."""
    matrices: int
    """Number of matrices in the weight: 1, or more for a stack of matrices."""
    swapped: bool
    """Whether the weight is stored as `[in, out]` instead of `[out, in]`."""
    scaling: float
    """Factor by which the product `B @ A` is multiplied."""

    def grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the change for a weight with a given shape; for a convolution, each kernel is one row."""
        return shape if len(self.first.shape) == 2 else (shape[0], prod(shape[1:]))

    @property
    def embedding(self) -> bool:
        """Whether the changed weight belongs to an embedding."""
        return self.first.name.endswith(EMBEDDING[0])


@dataclass(frozen=True, slots=True)
class Changes:
    """All changes that an adapter makes to a model."""

    added: Mapping[str, LowRank]
    """Name of a weight -> the low-rank change that is added to the weight."""
    replaced: Mapping[str, Entry]
    """Name of a base tensor -> the adapter's tensor that replaces it (setting `modules_to_save`, and biases). If the
    same weight also has a low-rank change, the change is added to the adapter's tensor, because peft replaces the
    embeddings and heads of the base model by its own copies.
    """
    copies: Mapping[str, Entry]
    """Name of a replaced base tensor -> a second copy of its replacement in the adapter; both copies must be equal."""
    unchanged: Sequence[str]
    """Modules that adapter_config.json may name, but whose weights the adapter does not change."""

    @property
    def names(self) -> Set[str]:
        """Names of all changed tensors, in an order that depends only on the adapter."""
        return dict.fromkeys((*self.added, *self.replaced)).keys()

    @property
    def own_bases(self) -> list[str]:
        """Names of weights whose low-rank change is added to the adapter's own copy of the weight."""
        return sorted(self.added.keys() & self.replaced.keys())


class Lora:
    """The files of a LoRA adapter.

    Args:
        entries: tensor name -> tensor, for the tensors of the adapter.
        config: content of the adapter's adapter_config.json.
        base: content of the base model's config.json.

    Raises:
        Refused: with code UNSUPPORTED or CORRUPT, and every reason, if the adapter's changes cannot be determined.
    """

    def __init__(self, entries: Mapping[str, Entry], config: Mapping[str, Any], base: Mapping[str, Any]) -> None:
        self._config = config
        self._has_conv1d = str(base.get("model_type")) in CONV1D_TYPES
        self._layers = _layers_of(base)
        self._problems = list(_refuse_settings(config))
        self._check()
        self._low: dict[str, dict[str, Entry]] = {}
        self._replaced: dict[str, Entry] = {}
        self._twice: dict[str, Entry] = {}
        for name, entry in entries.items():
            self._classify(name, entry)
        if not self._problems and not self._low:
            self._refuse("CORRUPT", "the adapter has no tensors lora_A and lora_B", None)
        for path, pair in self._low.items():
            dims = {len(each.shape) for each in pair.values()}
            if set(pair) not in (set(LINEAR), set(EMBEDDING)) or len(dims) > 1 or min(dims) < 2:
                listed = ", ".join(f"{end} {list(each.shape)}" for end, each in pair.items())
                self._refuse("CORRUPT", f"A and B need two dims, or those of a kernel; it has {listed}", path)
        for name in sorted(self._twice.keys() - self._replaced.keys()):
            self._refuse("CORRUPT", "peft stores the trained tensor under its own name too, and it is not there", name)
        self._check()
        paths_by_module: dict[str, list[str]] = {}
        for path in self._low:
            paths_by_module.setdefault(_strip_wrappers(path), []).append(path)
        self._modules = {module: sorted(paths, key=len, reverse=True) for module, paths in paths_by_module.items()}
        for name, entry in self._replaced.items():
            if f"{INNER}." in entry.name and name.rpartition(".")[0] not in self._modules:
                self._refuse("INCOMPLETE", "the adapter has this of the base, but no A and B to go with it", entry.name)
        parameter_names = {name for module in self._modules for name in self._parameters(module)}
        for name in sorted(_target_parameters(config)[0] - parameter_names):
            self._refuse("UNSUPPORTED", f"target_parameters has {name}, but the adapter changes none", None)
        self._check()

    def targets(self) -> set[str]:
        """Return the names of the tensors that the base model must have for the adapter to fit."""
        names = {f"{module}.{name}" for module in self._modules for name in self._parameters(module) or ["weight"]}
        return names | self._replaced.keys()

    def changes(self, shapes: Mapping[str, tuple[int, ...]], in_memory: Collection[str] | None = None) -> Changes:
        """Return the changes that the adapter makes to a base model.

        Args:
            shapes: tensor name -> shape, for the base model's tensors.
            in_memory: the tensor names of the base model's class in memory; None if they are unknown.

        Raises:
            Refused: with code SHAPE_MISMATCH, if a change does not fit its weight; with code INCOMPLETE, if the adapter
                lacks modules; with code AMBIGUOUS, if a change fits several parameters of a module.
        """
        added = [each for module in self._modules for each in self._module_changes(module, shapes)]
        for name, entry in self._replaced.items():
            if shapes[name] != entry.shape:
                message = f"the adapter has it as {list(entry.shape)}, and the model as {list(shapes[name])}"
                is_longer = len(entry.shape) == 2 and shapes[name][1:] == entry.shape[1:]
                hint = _RESIZE.format(entry.shape[0]) if is_longer else _HINT
                self._refuse("SHAPE_MISMATCH", message, name, hint)
        lacking, doubtful = self._modules_without_change(shapes, in_memory)
        if lacking:
            self._refuse("INCOMPLETE", f"{_LACKING.format(len(lacking))}: {', '.join(lacking)[:300]}", None, _SAY)
        self._check()
        return Changes({each.name: each for each in added}, self._replaced, self._twice, doubtful)

    def _modules_without_change(
        self, shapes: Mapping[str, tuple[int, ...]], in_memory: Collection[str] | None
    ) -> tuple[list[str], list[str]]:
        """Return the modules that adapter_config.json names but that the adapter does not change; peft only warns about
        them.

        Returns:
            The first list contains modules that the adapter certainly lacks. The second list contains modules that peft
            might ignore: those of layers beyond the config's number of layers (which predict additional tokens), those
            whose names differ in the model's class, and those that only a pattern may match.
        """
        listed = self._config.get("target_modules")
        kinds = {_NUMBERS.sub("*", module) for module in self._modules}
        targets = listed if isinstance(listed, list) else []
        unmatched = [each for each in targets if not any(_ends_with(module, [each]) for module in self._modules)]
        missing, doubtful = dict[str, None](), dict[str, None]()
        for name, shape in shapes.items():
            module, _, last = name.rpartition(".")
            parameters = self._parameters(module)
            alike = _NUMBERS.sub("*", module) in kinds and (parameters or self._is_listed(module))
            if module in self._modules or len(shape) < 2 or last not in (parameters or ["weight"]):
                continue
            if name in self._replaced or self._is_excluded(module) or not (alike or _ends_with(module, unmatched)):
                continue
            beyond = any(int(number) >= self._layers for number in _NUMBERS.findall(name)[:1])
            is_certain = not beyond and (isinstance(listed, list) if alike else name in (in_memory or ()))
            (missing if is_certain else doubtful)[module] = None
        return list(missing), list(doubtful)

    def _is_listed(self, module: str) -> bool:
        """Return whether `target_modules` lists a module, or is a pattern that may match the module."""
        listed = self._config.get("target_modules")
        return isinstance(listed, str) or _ends_with(module, listed or ())

    def _is_excluded(self, module: str) -> bool:
        """Return whether adapter_config.json excludes, or may exclude, a module that its `target_modules` name."""
        excluded, layers = self._config.get("exclude_modules") or (), self._config.get("layers_to_transform")
        if isinstance(excluded, str) or _ends_with(module, excluded):
            return True
        chosen = [layers] if isinstance(layers, int) else layers or []
        return bool(chosen) and {int(number) for number in _NUMBERS.findall(f"{module}.")}.isdisjoint(chosen)

    def _classify(self, name: str, entry: Entry) -> None:
        inner_name = name.removeprefix(PREFIX)
        for end in (*LINEAR, *EMBEDDING):
            if inner_name.endswith(f".{end}") and inner_name != name:
                self._low.setdefault(inner_name.removesuffix(f".{end}"), {})[end] = entry
                return
        bare_name = _strip_wrappers(inner_name)
        wrappers = [part for part in _TWIN_MODULES if f".{part}." in bare_name]
        if inner_name == name or ".lora_" in inner_name or inner_name.startswith("lora_"):
            self._refuse("UNSUPPORTED", "it is not a LoRA tensor that can be merged", name)
        elif not entry.dtype.startswith(_FLOATS):
            self._refuse("UNSUPPORTED", f"{entry.dtype} are codes, and values are needed", name)
        elif wrappers and self._config.get(_TWIN_MODULES[0]):
            if wrappers[0] == _TWIN_MODULES[0]:
                self._twice[bare_name.replace(f".{wrappers[0]}.", ".")] = entry
        elif bare_name in self._replaced:
            self._refuse("NAME_COLLISION", f"the adapter has it twice, as {self._replaced[bare_name].name} too", name)
        else:
            self._replaced[bare_name] = entry

    def _parameters(self, module: str) -> list[str]:
        """Return the parameters of a module that `target_parameters` names.

        For mixtures of experts, peft writes parameter names without their modules. A parameter name without a module
        applies to every module that is not itself a target.
        """
        bare_names, module_parameters = _target_parameters(self._config)
        with_module = {name for path, name in module_parameters if f".{module}".endswith(f".{path}")}
        chosen = any(f".{module}".endswith(f".{each}") for each in self._config.get("target_modules") or ())
        return sorted(with_module or (set() if chosen else bare_names))

    def _module_changes(self, module: str, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[LowRank]:
        paths = self._modules[module]
        parameters = self._parameters(module)
        if parameters:
            stacks = any(len(shapes[f"{module}.{name}"]) == 3 for name in parameters)
            orientations = [False, True] if stacks else [False]
        else:
            orientations = [EMBEDDING[0] in self._low[paths[0]] or self._is_flipped(module)]
            parameters = ["weight"]
        possible = []
        for order in permutations(parameters) if len(parameters) == len(paths) <= _MAX_PARAMETERS else ():
            for swapped in orientations:
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
            groups = _groups(self._low[paths[0]].get(LINEAR[0]), shapes[f"{module}.{parameters[0]}"])
            new = self._replaced.get(f"{module}.weight")
            if new is not None and new.shape != shapes[f"{module}.weight"]:
                return  # the replacement in `_replaced` has a different size, which is refused elsewhere
            if groups > 1:
                message = f"{message}: a convolution of {groups} groups, into which peft cannot merge either"
                self._refuse(
                    "UNSUPPORTED", message, module, ("Leave the module unchanged, or train without this module.")
                )
            else:
                self._refuse("SHAPE_MISMATCH", message, module)
        else:
            yield from possible[0]

    def _is_flipped(self, module: str) -> bool:
        """Return whether the weight of a module is stored as `[in, out]` instead of `[out, in]`."""
        if self._has_conv1d:
            return module.rpartition(".")[2] in _CONV1D
        return bool(self._config.get("fan_in_fan_out"))

    def _change(self, path: str, name: str, shapes: Mapping[str, tuple[int, ...]], swapped: bool) -> LowRank | None:
        """Return the change that a pair of factors A and B makes to a weight; None if the shapes do not fit."""
        shape, pair = shapes[name], self._low[path]
        first, second = (pair[end] for end in (EMBEDDING if EMBEDDING[0] in pair else LINEAR))
        of_stack, rank = bool(self._parameters(name.rpartition(".")[0])), self._rank(name)
        # in a convolution, A has the weight's kernel size, and B has kernels of one element
        if len(shape) > 2 and not of_stack:
            factors = (rank, *shape[1:]), (shape[0], rank, *(1,) * len(shape[2:]))
            fits = (first.shape, second.shape) == factors
            return LowRank(name, first, second, 1, swapped=False, scaling=self._scaling(name, rank)) if fits else None
        if len(shape) not in (2, 3):
            return None
        swapped = swapped and (len(shape) == 3 or not of_stack)
        matrices = 1 if len(shape) == 2 else shape[0]
        rows, columns = reversed(shape[-2:]) if swapped else shape[-2:]
        if (first.shape, second.shape) != ((matrices * rank, columns), (rows, rank * matrices)):
            return None
        return LowRank(name, first, second, matrices, swapped, self._scaling(name, rank))

    def _rank(self, name: str) -> int:
        return int(self._setting("rank_pattern", "r", name))

    def _scaling(self, name: str, rank: int) -> float:
        alpha = float(self._setting("alpha_pattern", "lora_alpha", name))
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def _setting(self, patterns: str, key: str, name: str) -> Any:
        """Return the setting (rank or alpha) of a weight; the patterns in peft's settings match modules or target
        parameters.
        """
        module = name if self._parameters(name.rpartition(".")[0]) else name.rpartition(".")[0]
        for pattern, value in (self._config.get(patterns) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        return self._config.get(key, DEFAULT_RANK)

    def _refuse(self, code: Any, message: str, name: str | None, hint: str = _HINT) -> None:
        self._problems.append(Refusal(code, message, Where(None, name), hint))

    def _check(self) -> None:
        if self._problems:
            raise gathered(self._problems)


def _refuse_settings(config: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield refusals of settings in adapter_config.json that make it impossible to merge the adapter."""
    if not config:
        message = "there is no adapter_config.json beside the tensors"
        yield Refusal("UNSUPPORTED", message, Where(), "Give the folder that peft's save_pretrained has written.")
        return
    kind = str(config.get("peft_type"))[:40]
    if kind != "LORA":
        yield Refusal("UNSUPPORTED", f"adapters of type {kind} cannot be merged here, LORA can", Where(), _HINT)
        return
    other_keys = [key for key, value in config.items() if value and key not in _KNOWN_KEYS]
    if config.get("init_lora_weights") not in _PLAIN_STARTS:
        other_keys.append(f"init_lora_weights={str(config['init_lora_weights'])[:40]!r}")
    if other_keys:
        message = f"adapter_config.json has {', '.join(other_keys)}: its change of the weights is not B @ A alone"
        yield Refusal("UNSUPPORTED", message, Where(), _HINT)
    parameters, modules = config.get("target_parameters") or [], config.get("target_modules") or []
    if not isinstance(parameters, list) or not all(isinstance(each, str) for each in parameters):
        yield Refusal("UNSUPPORTED", "target_parameters has more than names", Where(), _HINT)
    elif _target_parameters(config)[0] and not isinstance(modules, list):
        message = f"target_modules is {str(modules)[:40]!r}, so it is not known which modules target_parameters means"
        yield Refusal("UNSUPPORTED", message, Where(), _HINT)
    for patterns, key in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
        overrides = config.get(patterns) or {}
        if not isinstance(overrides, Mapping) or not all(map(_PATTERN.fullmatch, overrides)):
            yield Refusal("UNSUPPORTED", f"{patterns} has more than names", Where(), _HINT)
            continue
        numbers = [config.get(key, DEFAULT_RANK), *overrides.values()]
        if not all(_is_number(value, whole=key == "r") for value in numbers):
            numbered = "positive numbers" if key == "r" else "numbers"
            yield Refusal("CORRUPT", f"{key} or {patterns} has something else than {numbered}", Where(), _HINT)


def _target_parameters(config: Mapping[str, Any]) -> tuple[set[str], set[tuple[str, str]]]:
    """Return the target parameters that are given without a module, and those with a module, as (module, name)."""
    targets = [str(target).rpartition(".") for target in config.get("target_parameters") or ()]
    return {name for path, _, name in targets if not path}, {(path, name) for path, _, name in targets if path}


def _strip_wrappers(path: str) -> str:
    """Return a module path without peft's wrapper modules."""
    return ".".join(part for part in path.split(".") if part != INNER[1:])


def _ends_with(module: str, paths: Iterable[str]) -> bool:
    """Return whether a module's path ends with one of the paths in a list of peft's config."""
    return any(f".{module}".endswith(f".{path}") for path in paths)


def _groups(first: Entry | None, shape: tuple[int, ...]) -> int:
    """Return the number of groups of a convolution whose factor A has more channels than the weight; otherwise 1."""
    if first is None or len(shape) < 3 or first.shape[2:] != shape[2:] or first.shape[1] % (shape[1] or 1):
        return 1
    return first.shape[1] // (shape[1] or 1)


def _layers_of(config: Mapping[str, Any]) -> float:
    """Return the number of a model's layers to which peft can add an adapter."""
    text_config = config.get("text_config")
    layers = (text_config if isinstance(text_config, Mapping) else config).get("num_hidden_layers")
    return layers if isinstance(layers, int) else math.inf


def _is_number(value: object, *, whole: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        return False
    return 0 < value < _LARGEST if whole else abs(value) < _LARGEST
