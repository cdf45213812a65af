"""What each rank's file holds of a checkpoint that is written: its part of the model, and of the optimizer's state.

Local names are those of Megatron's modules, in their order: the optimizer numbers its parameters in it. Some tensors
have further names, so that Transformer Engine's modules and the local ones both find theirs: norms, and experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transaxle.arguments import Degrees
from transaxle.errors import TransaxleError, refuse
from transaxle.formats.catalog import nbytes
from transaxle.formats.deepspeed.checked_value import CheckedValue
from transaxle.formats.megatron.legacy.global_names import is_expert
from transaxle.formats.megatron.legacy.joined_ranks import EMBEDDING, HEAD
from transaxle.formats.megatron.legacy.param_order import LOW, OrderUnknown, Parameter, by_groups
from transaxle.formats.megatron.legacy.rank_file import OPTIMIZER_KEY, STEPS
from transaxle.formats.megatron.legacy.rank_grid import Place
from transaxle.formats.pickled.descriptors import OrderedMap, TensorRef
from transaxle.formats.torch_file.draft import reference
from transaxle.formats.training_state.full_precision import MASTER
from transaxle.formats.training_state.state_groups import PARAMS

Shape = tuple[int, ...]
STEP = "step"
_LAYER = re.compile(r"decoder\.layers\.(\d{1,6})\.(.+)")
_EXPERT = re.compile(r"(.+\.experts\.linear_fc[12]\.(?:weight|bias))(\d{1,6})((?:_[a-z_]+)?)")
"""A parameter of one expert, or a buffer of its encoding: `weight3`, `weight3_scale_inv`."""
_ONE_BY_ONE = re.compile(r"(.+\.experts\.)(linear_fc[12]\.)(weight|bias)(\d+)")
_LAST = ("decoder.final_layernorm.", HEAD, "mtp.")
_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Norm inside a linear layer of Transformer Engine -> the same norm as a module."""
_ORDER = (
    "input_layernorm", "self_attention.linear_proj", "self_attention.linear_qkv", "self_attention.q_layernorm",
    "self_attention.k_layernorm", "pre_mlp_layernorm", "mlp.router", "mlp.experts.linear_fc1",
    "mlp.experts.linear_fc2", "mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2", "mlp.linear_fc1",
    "mlp.linear_fc2",
)  # fmt: skip
"""Modules of a layer, in the order in which Megatron makes them."""
_OWN = ("layer_norm_weight", "layer_norm_bias", "weight", "bias")
"""Parameters of a module, in this order."""
_TOPS = ("embedding.", "decoder.layers.", "decoder.", "mtp.", "output_layer.")
"""Parts of a model, in their order."""
_ALONE = (EMBEDDING, "decoder.final_layernorm.weight", "decoder.final_layernorm.bias", HEAD)
_EXPERTS = "is_expert_parallel"


@dataclass(frozen=True, slots=True)
class Home:
    """The ranks that hold a parameter, and what they call it."""

    stages: tuple[int, ...]
    """Stages of the pipeline; of more than one where the others have copies."""
    expert: int | None
    """The one expert-parallel rank that holds it; None: all hold it."""
    names: tuple[str, ...]
    """Its name in each of the stages."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How the layers and the experts of a model are shared out."""

    degrees: Degrees
    layers: int
    """Of each stage."""
    experts: int
    """Of each expert-parallel rank; 0 without experts."""
    tied: bool
    """Whether the head is the embedding."""

    def home(self, name: str) -> Home:
        """Return where a parameter belongs.

        Raises:
            Refused: UNSUPPORTED for one that no stage is known for.
        """
        last = self.degrees.pp - 1
        match, expert = _LAYER.fullmatch(name), _EXPERT.fullmatch(name)
        rank, local = None, name
        if expert is not None and self.experts:
            rank, number = divmod(int(expert[2]), self.experts)
            local = f"{expert[1]}{number}{expert[3]}"
        if match is not None:
            stage, layer = divmod(int(match[1]), self.layers)
            return Home((stage,), rank, (re.sub(r"\d+", str(layer), local, count=1),))
        if name == EMBEDDING and self.tied and last:
            return Home((0, last), None, (name, HEAD))
        if name.startswith(_LAST):
            return Home((last,), rank, (local,))
        if name.startswith("embedding.") or not last:
            return Home((0,), rank, (local,))
        message = "it is no tensor of Megatron's of which it is known which pipeline stage holds it"
        raise refuse("UNSUPPORTED", message, tensor=name, hint="Write --pp 1, or another format: --to torch_dist.")


def sharing(names: Sequence[str], degrees: Degrees) -> Sharing:
    """Return how the layers and experts with these names are shared out.

    Raises:
        Refused: UNSUPPORTED where they do not divide.
    """
    layers = 1 + max((int(match[1]) for name in names if (match := _LAYER.fullmatch(name))), default=-1)
    experts = 1 + max((int(match[2]) for name in names if (match := _EXPERT.fullmatch(name))), default=-1)
    if layers % degrees.pp or (degrees.pp > 1 and not layers):
        raise _uneven(f"{layers} layers", degrees.pp, "pipeline stages", "--pp")
    if experts % degrees.ep or (degrees.ep > 1 and not experts):
        raise _uneven(f"{experts} experts", degrees.ep, "expert-parallel ranks", "--ep")
    if degrees.pp > 1 and any(name.startswith("mtp.") for name in names):
        message = "layers that predict ahead are written for one pipeline stage only"
        raise refuse("UNSUPPORTED", message, hint="Write --pp 1, or another format: --to torch_dist.")
    return Sharing(degrees, layers // degrees.pp or 1, experts // degrees.ep, HEAD not in names)


def _uneven(what: str, ranks: int, of: str, option: str) -> TransaxleError:
    return refuse("UNSUPPORTED", f"{what} do not divide into {ranks} {of}", hint=f"Choose another {option}.")


@dataclass(slots=True)
class RankContents:
    """One rank's file, as far as it is known."""

    place: Place
    storages: list[int | bytes] = field(default_factory=list)
    """Bytes of each storage: how many."""
    model: dict[str, TensorRef] = field(default_factory=dict)
    """Local name -> weight."""
    parameters: dict[str, tuple[str, Shape]] = field(default_factory=dict)
    """Local name -> dtype and shape."""
    states: dict[str, dict[str, TensorRef]] = field(default_factory=dict)
    """Local name -> state -> tensor."""

    def add(self, local: str, state: str, dtype: str, shape: Shape) -> int:
        """Add a tensor; return the number of its storage."""
        key = len(self.storages)
        self.storages.append(nbytes(dtype, shape))
        if state:
            self.states.setdefault(local, {})[state] = reference(dtype, shape, key)
        else:
            self.model[local] = reference(dtype, shape, key)
            self.parameters[local] = dtype, shape
        return key

    def state_dict(self) -> OrderedMap:
        """Return the model's part of the file."""
        found = OrderedMap()
        for name in sorted(self.model, key=_module_order):
            found[name] = self.model[name]
            found.update(dict.fromkeys(_other_names(name), self.model[name]))
        return found

    def optimizer(self, groups: Sequence[Mapping[str, Any]], *, apart: bool, torch_steps: bool) -> dict[str, Any]:
        """Return the optimizer's part of the file: states by number, and full-precision copies by group.

        Args:
            groups: settings.
            apart: experts have an optimizer of their own.
            torch_steps: each state has the number of steps, as torch's optimizers have it; otherwise groups have it,
                and the tensors are kept besides.

        Raises:
            Refused: UNSUPPORTED where the order of the parameters is not known, or Megatron could not hold the state.
        """
        parts, steps = [], []
        for experts in (False, True) if apart else (None,):
            own = [group for group in groups if experts is None or bool(group.get(_EXPERTS)) is experts]
            names = [name for name in self.states if experts is None or is_expert(name) is experts]
            part, numbers = self._part(own, sorted(names, key=_module_order), experts=bool(experts))
            for number, step in numbers.items() if torch_steps else ():
                part[OPTIMIZER_KEY]["state"][number][STEP] = step
            parts.append(part if self._is_low(names) else part[OPTIMIZER_KEY])
            steps.append(numbers)
        found = {OPTIMIZER_KEY: parts if apart else parts[0]}
        return found if torch_steps else {**found, STEPS: steps}

    def _is_low(self, names: Sequence[str]) -> bool:
        """Tell whether Megatron keeps full-precision copies: also of no parameters, as of a stage without experts."""
        return not names or any(self.parameters[name][0] in LOW for name in names)

    def _part(
        self, groups: Sequence[Mapping[str, Any]], names: Sequence[str], *, experts: bool
    ) -> tuple[dict[str, Any], dict[int, TensorRef]]:
        """Return one of the optimizers, and the steps of its parameters by number."""
        unknown = next((name for name in names if not _has_order(name)), None)
        if unknown is not None:
            raise _no_order(f"the place of {unknown} among Megatron's parameters is not known")
        parameters = [Parameter(0, name, *self.parameters[name], expert=experts) for name in names]
        try:
            members = by_groups(parameters, [CheckedValue(dict(group), "the optimizer") for group in groups], {})
        except OrderUnknown as reason:
            raise _no_order(str(reason)) from None
        states: dict[int, dict[str, TensorRef]] = {}
        steps: dict[int, TensorRef] = {}
        settings = []
        for group, listed in zip(groups, members, strict=True):
            numbers = range(len(states), len(states) + len(listed))
            for number, each in zip(numbers, listed, strict=True):
                kept = self.states[each.name]
                states[number] = {state: ref for state, ref in kept.items() if state not in (MASTER, STEP)}
                if STEP in kept:
                    steps[number] = kept[STEP]
            settings.append({**group, PARAMS: list(numbers)})
        copies = [[self._copy(each) for each in group if each.dtype in LOW] for group in members]
        part = {OPTIMIZER_KEY: {"state": states, "param_groups": settings}, "fp32_from_fp16_params": copies}
        return part, steps

    def _copy(self, parameter: Parameter) -> TensorRef:
        master = self.states[parameter.name].get(MASTER)
        if master is None:
            message = "the optimizer's state has no full-precision copy of this weight, and Megatron needs one"
            hint = "Write the weights alone: --no-optimizer."
            raise refuse("UNSUPPORTED", message, tensor=parameter.name, hint=hint)
        return master


def _no_order(why: str) -> TransaxleError:
    message = f"the optimizer's state cannot be written in Megatron's order: {why}"
    hint = "Write the weights alone (--no-optimizer), or another format: --to torch_dist."
    return refuse("UNSUPPORTED", message, hint=hint)


def _module_order(name: str) -> tuple[int, int, int, int, int, str]:
    """Return where a parameter is in the order of Megatron's modules: top, layer, module, expert, parameter."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return next((place for place, top in enumerate(_TOPS) if name.startswith(top)), len(_TOPS)), 0, 0, 0, 0, name
    module, _, own = match[2].rpartition(".")
    bare = own.rstrip("0123456789")
    places = (order.index(key) if key in order else len(order) for key, order in ((module, _ORDER), (bare, _OWN)))
    in_layer, in_module = places
    return _TOPS.index("decoder.layers."), int(match[1]), in_layer, int(own[len(bare) :] or 0), in_module, name


def _has_order(name: str) -> bool:
    """Tell whether the place of a parameter among all is known."""
    in_layer, _, in_module = _module_order(name)[2:5]
    return name in _ALONE or (_LAYER.fullmatch(name) is not None and in_layer < len(_ORDER) and in_module < len(_OWN))


def _other_names(name: str) -> Iterator[str]:
    """Yield further names of a tensor in other kinds of modules."""
    match = _LAYER.fullmatch(name)
    if match is not None and match[2] in _NORMS:
        yield f"decoder.layers.{match[1]}.{_NORMS[match[2]]}"
    expert = _ONE_BY_ONE.fullmatch(name)
    if expert is not None:
        yield f"{expert[1]}local_experts.{expert[4]}.{expert[2]}{expert[3]}"
