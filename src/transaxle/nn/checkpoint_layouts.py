"""Converts state dicts of grouped layers, models and optimizers between the layouts of different frameworks.

`experts_as` converts one layer's experts between the layouts of frameworks and of grouped layers: names, the order of
gate and up, transposes. `transaxle.load`, `transaxle.state_dict_as` and `transaxle.convert` do the same for whole
models, and support DTensors.

`load_state_dict` loads a whole model on all ranks or on none. torch loads and writes module by module, so if the last
module refuses the state dict, all other modules have already changed. `load_state_dict` of this module keeps a copy of
the old values until every module of every rank has loaded.

`optimizer_state_as` regroups the optimizer state of grouped parameters: moments are stacked or split like their
parameters, from N names to one tensor or back. `optimizer_state_as` expects state dicts with parameter names, as
`torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` returns them. `transaxle.load(..., optimizer=...)`
and the DCP planners regroup optimizer state automatically.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.distributed.tensor import DTensor

from transaxle.axes.layout.bind import WEIGHT, bind, group, join_slot, score, split_slot
from transaxle.axes.layout.relayout import Check, Shape
from transaxle.axes.notation.family import Dialect, Family, Sizes
from transaxle.axes.notation.name import own_name
from transaxle.axes.notation.tables import read
from transaxle.axes.translation.grouped import MEMBERS, Regrouping, regroup, stack_name
from transaxle.axes.translation.translate import translate
from transaxle.errors import Refusal, TransaxleError, Where, gathered, refuse
from transaxle.formats.training_state import GROUPS, PARAMS, ParamGroup
from transaxle.formats.training_state import groups_of_equal_settings as groups_of
from transaxle.formats.training_state import rename_parameters as renamed_groups
from transaxle.nn.expert_relayout import Entry, Layer, add_prefix, describe, move, stems
from transaxle.nn.grouped_linear import GroupedLinear
from transaxle.quant.tensor import QuantizedTensor
from transaxle.torch_tensors import Ranks, place_like, positions_of, raw_local, read_group, take, unwrap

_TABLE = "experts.rules"
STACKED = "stacked"
"""Name of the dialect in which the grouped layers `linear_fc1` and `linear_fc2` have one weight for all experts."""
SEPARATE = "separate"
"""Name of the dialect in which the grouped layers `linear_fc1` and `linear_fc2` have one weight per expert."""


@cache
def family() -> Family:
    """Return the family whose dialects are the layouts of experts."""
    (table,) = read(files("transaxle.nn").joinpath(_TABLE).read_text("utf-8"), file=_TABLE)
    return table


def _dialect(label: str) -> Dialect:
    dialect = family().dialect(label)
    if dialect is None:
        raise refuse("AMBIGUOUS", f"there is no expert layout {label!r}; known are {', '.join(family().labels)}")
    return dialect


def recognise_layout(names: list[str]) -> Dialect | None:
    """Return the layout (dialect) that matches the most tensor names; None if no layout matches any name."""
    grouped = group(split_slot(name)[0] for name in names)
    scored = [(score(grouped, dialect), dialect) for dialect in family().dialects]
    fitting = [(matched, dialect) for (matched, prefix), dialect in scored if matched and not prefix]
    return max(fitting, key=lambda pair: pair[0])[1] if fitting else None


def experts_as(state: Mapping[str, Any], layout: str, *, prefix: str = "", source: str | None = None) -> dict[str, Any]:
    """Return a state dict in which one layer's experts have a different layout; other entries are unchanged.

    Args:
        state: a state dict, which is not changed. Optimizer states are named `optim/<parameter>/<state>`.
        layout: `stacked`, `separate`, `hf`, `transformers`, `torchtitan`, `torchtitan@0.2` or `automodel`.
        prefix: prefix of the experts' names, such as `model.layers.0.mlp.experts.`
        source: present layout of the experts; None means that the tensor names determine it.

    Raises:
        Refused: with the code MISSING_TENSOR if experts are missing; with the code SHAPE_MISMATCH if a shape is wrong;
            with the code UNSUPPORTED for DTensors, and for quantized codes, which cannot be moved without their scales.
        UsageError: with the code AMBIGUOUS if the layout is unknown, or the names match no known layout.
    """
    target = _dialect(layout)
    experts, other_entries = _split_prefix(state, prefix)
    origin = recognise_layout(list(experts)) if source is None else _dialect(source)
    if origin is None:
        first = ", ".join(list(experts)[:3]) or "(none)"
        raise refuse(
            "AMBIGUOUS",
            f"no expert layout reads the names {first}",
            hint=f"Give source= one of {', '.join(family().labels)}.",
        )
    sizes = Sizes(family(), {})
    bound = bind(tuple(experts), family(), origin, sizes)
    _refuse_codes({name: value for name, value in experts.items() if name not in bound.unknown})
    moved = move(translate(bound, describe(experts), target, sizes), experts)
    return {**other_entries, **add_prefix(prefix, moved)}


def _split_prefix(state: Mapping[str, Any], prefix: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return two dicts: the tensors whose names have the prefix, with the prefix removed, and all other entries."""
    tensors, other_entries = {}, {}
    for name, value in state.items():
        parameter, slot = split_slot(name)
        if parameter.startswith(prefix) and isinstance(value, torch.Tensor):
            tensors[join_slot(parameter[len(prefix) :], slot)] = value
        else:
            other_entries[name] = value
    return tensors, other_entries


def _refuse_codes(tensors: Mapping[str, torch.Tensor]) -> None:
    for name, value in tensors.items():
        if value.dtype.itemsize == 1:
            raise refuse(
                "UNSUPPORTED",
                f"its codes of {value.dtype} cannot be moved without their scales",
                tensor=name,
                hint="Use transaxle.load or transaxle.convert, which move codes and scales together.",
            )


def _translated(owner: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:  # noqa: ARG001
    """Convert experts into the layout `stacked`, as a load hook of torch. The hook is a named function, so that a
    module with the hook can be pickled.
    """
    names = [name.removeprefix(prefix) for name in state if name.startswith(prefix)]
    layout = recognise_layout(names)
    if layout is None or layout.label in (STACKED, SEPARATE):
        return
    stacked = experts_as(state, STACKED, prefix=prefix)
    for name in [name for name in state if name not in stacked]:
        del state[name]  # `state` is a copy that torch makes for the hooks
    state.update(stacked)


def accept_layouts(module: nn.Module) -> nn.Module:
    """Register a hook, so that a module with grouped layers `linear_fc1` and `linear_fc2` loads experts in any layout.

    The hook is registered on `module`, because each layer receives only the state-dict names below its own. The
    function returns the module.

    Args:
        module: module that contains the two layers; `linear_fc1` computes gate and up.
    """
    module.register_load_state_dict_pre_hook(_translated)
    return module


def load_state_dict(
    module: nn.Module,
    state: Mapping[str, Any],
    *,
    strict: bool = True,
    assign: bool = False,
    group: Ranks | None = None,
) -> Any:
    """Load a state dict into a module completely on every rank, or change nothing on any rank.

    Until `load_state_dict` returns, it needs memory for one more copy of this rank's shard of the module. If
    torch.distributed is initialized, every rank of the group must call `load_state_dict`.

    Args:
        module: the module to load into; it may be divided or sharded over ranks.
        state: a state dict as `module.load_state_dict` accepts it. For a tensor that the module has sharded, the whole
            tensor is accepted too, and each rank uses its own shard of the tensor.
        strict: as in `torch.nn.Module.load_state_dict`.
        assign: as in `torch.nn.Module.load_state_dict`.
        group: the ranks that load together, as a process group or a mesh of one dim; None means all ranks.

    Returns:
        The result of the module's `load_state_dict`: missing and unexpected names.

    Raises:
        Exception: if a module's `load_state_dict` fails; the exception is that of the first rank on which it fails.
            Parameters and buffers are then the same objects as before, with the same values.
    """
    ranks = read_group("group", group)
    before = _Snapshot(module)
    result, failure = None, None
    try:
        result = module.load_state_dict(_own_parts(module, state), strict=strict, assign=assign)
    except Exception as error:  # noqa: BLE001 - it is raised below, on every rank
        failure = error
    except BaseException:
        before.restore()
        raise
    first_failure = _first_of(failure, ranks)
    if first_failure is not None:
        before.restore()
        raise first_failure
    return result


def _own_parts(module: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state dict in which this rank's shards replace the whole tensors of sharded parameters, because torch
    would refuse whole tensors.
    """
    whole = {name: value for name, value in state.items() if type(value) is torch.Tensor}
    entries = module.state_dict() if whole else {}
    parts = {
        name: place_like(entry, take(value, positions_of(entry)))
        for name, value in whole.items()
        if isinstance(entry := entries.get(name), DTensor) and entry.shape == value.shape
    }
    if not parts:
        return state
    replaced = OrderedDict(state) | parts
    replaced._metadata = getattr(state, "_metadata", None)  # type: ignore[attr-defined]
    return replaced


class _Snapshot:
    """Copy of a module's parameters and buffers, and of their values, for restoring them."""

    def __init__(self, module: nn.Module) -> None:
        tensor_dicts: list[Any] = [
            tensors for each in module.modules() for tensors in (each._parameters, each._buffers)
        ]
        self._tensor_dicts = [(tensors, dict(tensors)) for tensors in tensor_dicts]
        unique_tensors = {
            id(each): each for _, tensors in self._tensor_dicts for each in tensors.values() if each is not None
        }
        self._values = [(memory, memory.clone()) for each in unique_tensors.values() for memory in _local_tensors(each)]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the module's original tensors, with their original values."""
        for tensors, before in self._tensor_dicts:
            tensors.clear()
            tensors.update(before)
        for memory, value in self._values:
            memory.copy_(value)


def _local_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors in which this rank stores the values of a tensor."""
    local = raw_local(tensor.detach())
    parts = [*local.components.values(), *local.state.values()] if isinstance(local, QuantizedTensor) else [local]
    yield from (part for part in parts if part.device.type != "meta")


def _first_of(failure: Exception | None, group: dist.ProcessGroup | None) -> Exception | None:
    """Return the exception of the first rank that failed to load; None if all ranks have loaded."""
    if not dist.is_initialized():
        return failure
    device = torch.device("cuda" if dist.get_backend(group) == dist.Backend.NCCL else "cpu")
    octets = b"" if failure is None else _as_bytes(failure)
    lengths = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
    lengths[dist.get_rank(group)] = len(octets)
    dist.all_reduce(lengths, group=group)
    failed = lengths.nonzero().flatten().tolist()
    if not failed:
        return None
    rank = failed[0] if group is None else dist.get_global_rank(group, failed[0])
    message = torch.zeros(int(lengths[failed[0]]), dtype=torch.uint8)
    if failed[0] == dist.get_rank(group):
        message[:] = torch.frombuffer(bytearray(octets), dtype=torch.uint8)
    message = message.to(device)
    dist.broadcast(message, rank, group=group)
    error = _as_error(message.cpu().numpy().tobytes())
    error.add_note(f"This is rank {failed[0]}; no rank has loaded anything.")
    return error


def _as_bytes(failure: Exception) -> bytes:
    """Serialize an error as JSON, so that other ranks can read the error without unpickling."""
    text: object = str(failure) if isinstance(failure, RuntimeError) else repr(failure)
    if isinstance(failure, TransaxleError):
        text = [(r.code, r.message, r.where.file, r.where.tensor, r.hint) for r in failure.refusals]
    return json.dumps(text).encode()


def _as_error(octets: bytes) -> Exception:
    content = json.loads(octets)
    if isinstance(content, str):
        return RuntimeError(content)
    return gathered(
        [Refusal(code, message, Where(file, tensor), hint) for code, message, file, tensor, hint in content]
    )


STATE = "state"
"""Key of the mapping of parameters' states in torch's optimizer state dicts."""
_FLAT_STATE, _FLAT_GROUPS = f"{STATE}.", f"{GROUPS}."
"""Prefixes of names in flattened state dicts: `state.<parameter>.<state>`, `param_groups.<parameter>.<setting>`."""


def optimizer_state_as(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return an optimizer's state dict in the form that a model's grouped layers have: one stack, or N parameters.

    Args:
        state: `{"state": {parameter: {"exp_avg": tensor, …}}, "param_groups": [{"params": [names], …}]}`; it is not
            changed. The flattened form of `StateDictOptions(flatten_optimizer_state_dict=True)` is accepted too.
        model: the model whose optimizer will load the state dict.

    Returns:
        A new dict, which is flattened if `state` is flattened. If N parameters become one, their scalar states (steps)
        must be equal.

    Raises:
        Refused: with the code UNEQUAL_COPIES if scalar states differ; with the code INCOMPLETE or SHAPE_MISMATCH if the
            set of experts is different; with the code UNSUPPORTED if experts were trained with different settings, or
            parameters have no names.
    """
    if STATE not in state and any(name.startswith((_FLAT_STATE, _FLAT_GROUPS)) for name in state):
        return _flatten(optimizer_state_as(_unflatten(state), model))
    states = {name: dict(slots) for name, slots in state[STATE].items()}
    renamed: dict[str, list[str]] = {}
    trained = {name for group in state.get(GROUPS, []) for name in group[PARAMS]} | states.keys()
    if not all(isinstance(name, str) for name in trained):
        hint = "Use get_optimizer_state_dict of torch.distributed.checkpoint.state_dict, which has names."
        raise refuse(
            "UNSUPPORTED",
            "the state dict numbers its parameters; without their names they cannot be regrouped",
            hint=hint,
        )
    for path, module in unwrap(model).named_modules():
        if isinstance(module, GroupedLinear):
            name, layer = own_name(path), module.layer()
            prefix = f"{name}." if name else ""
            shapes = _shapes(trained, states, prefix, layer)
            for stem in stems(shapes, prefix, layer):
                _move(states, stem, shapes, renamed, layer.local_experts)
    return {**state, STATE: states, GROUPS: _groups(state.get(GROUPS, []), renamed)}


def _shapes(
    trained: Collection[str], states: Mapping[str, Mapping[str, Any]], prefix: str, layer: Layer
) -> dict[str, Shape]:
    """Return parameter name -> shape for a layer's parameters in an optimizer's state dict, inferred from the states.

    Separate experts whose parameters keep their names are omitted, because experts that were not trained have no state.
    """
    shapes = {}
    for name in trained:
        stack = stack_name(name)
        stem, is_member = stack.removeprefix(prefix), stack != name
        if not name.startswith(prefix) or stem not in layer.shapes:
            continue
        if is_member and not layer.single[stem] and stack not in trained:
            continue
        parameter_shape = layer.shapes[stem] if is_member else (layer.count, *layer.shapes[stem])
        values = [value for value in states.get(name, {}).values() if isinstance(value, torch.Tensor) and value.dim()]
        shapes[name] = max((tuple(value.shape) for value in values), key=prod, default=parameter_shape)
    return shapes


def _move(
    states: dict[str, dict[str, Any]],
    stem: Regrouping,
    shapes: Mapping[str, Shape],
    renamed: dict[str, list[str]],
    experts: range,
) -> None:
    """Convert the states of one group of expert parameters between a stack and N tensors, for the experts of
    this rank.
    """
    names = stem.sources
    new_names = [stem.member(expert) for expert in experts] if stem.requested == MEMBERS else stem.targets
    renamed.update(dict.fromkeys(names, new_names))
    old_states = {name: states.pop(name, {}) for name in names}
    lacking = [name for name, state in old_states.items() if not state]
    if len(lacking) == len(names):
        return
    if lacking and not stem.copies:
        raise refuse("INCOMPLETE", f"{', '.join(lacking)} have no state, but the other experts do", tensor=stem.single)
    values = {(name, slot): value for name, state in old_states.items() for slot, value in state.items()}
    number_slots = {slot for (_, slot), value in values.items() if not isinstance(value, torch.Tensor)}
    tensors = {join_slot(*key): torch.as_tensor(value) for key, value in values.items()}
    translation = regroup([stem], describe(tensors) | {name: Entry("", shapes[name]) for name in names})
    targets = {name: target for name, target in translation.targets.items() if split_slot(name)[1] != WEIGHT}
    checks = tuple(check for check in translation.checks if _of_states(check))
    for name, value in move(replace(translation, checks=checks), tensors, targets).items():
        parameter, slot = split_slot(name)
        if parameter in new_names:
            # The step tensor is incremented in place, so each expert needs a separate copy.
            own_value = value if value.dim() else value.clone()
            states.setdefault(parameter, {})[slot] = own_value.item() if slot in number_slots else own_value


def _of_states(check: Check) -> bool:
    """Return whether a check compares optimizer states; checks of parameters are skipped, as optimizer state dicts lack
    parameters.
    """
    return all(split_slot(part.origins[0].name)[1] != WEIGHT for part in check.second.parts)


def _groups(groups: Iterable[ParamGroup], renamed: Mapping[str, list[str]]) -> list[ParamGroup]:
    """Return parameter groups with new parameter names; parameters that become one parameter must be in the
    same group.
    """
    new_groups = renamed_groups(groups, renamed)
    group_of: dict[str, int] = {}
    problems = []
    for number, new_group in enumerate(new_groups):
        for name in new_group[PARAMS]:
            if group_of.setdefault(name, number) != number:
                numbers = f"{group_of[name]} and {number}"
                message = f"its parts are in the parameter groups {numbers}; one parameter can only be in one"
                problems.append(Refusal("UNSUPPORTED", message, Where(None, name)))
    if problems:
        raise gathered(problems)
    return new_groups


def _unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flattened state dict in nested form; parameters with equal settings become one group."""
    states: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    other_entries = {}
    for key, value in flat.items():
        name, _, key_end = key.rpartition(".")
        if key.startswith(_FLAT_STATE):
            states.setdefault(name.removeprefix(_FLAT_STATE), {})[key_end] = value
        elif key.startswith(_FLAT_GROUPS):
            settings.setdefault(name.removeprefix(_FLAT_GROUPS), {})[key_end] = value
        else:
            other_entries[key] = value
    return {**other_entries, STATE: states, GROUPS: groups_of(settings)}


def _flatten(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested optimizer state dict in flattened form, which is the inverse of `_unflatten`."""
    flat = {name: value for name, value in nested.items() if name not in (STATE, GROUPS)}
    for name, slots in nested[STATE].items():
        flat |= {f"{_FLAT_STATE}{name}.{slot}": value for slot, value in slots.items()}
    for settings in nested[GROUPS]:
        for name in settings[PARAMS]:
            flat |= {f"{_FLAT_GROUPS}{name}.{key}": value for key, value in settings.items() if key != PARAMS}
    return flat
