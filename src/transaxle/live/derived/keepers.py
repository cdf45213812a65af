"""Keepers: libraries that keep the values of a model's parameters somewhere else than in the parameters.

What is written into such a parameter is replaced at the next forward pass or step, without a word. They are known by
the marks that they leave, and none of them is imported.

DeepSpeed ZeRO-3 leaves each rank a range of a parameter's elements, and nothing in the module. The ranges can be read:
what the optimizer updates are these, in the type that the model computes with.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from transaxle.axes.notation.name import own_name
from transaxle.errors import Refusal, Where
from transaxle.torch_tensors.local_tensor import stored_local
from transaxle.torch_tensors.placement import Part, mark

_HOOK, _HOOKS, _OFFLOAD = "_hf_hook", "hooks", "offload"
"""accelerate: a module's hook, those that are one, and whether it brings the weights for each forward pass."""
_MASTER = "_hp_mapping"
"""DeepSpeed: where the optimizer has the values of a parameter (ZeRO-1 and 2, bf16)."""
_DEEPSPEED = "deepspeed.runtime"
_MEGATRON, _MEGATRON_STATE = "megatron.core.", "megatron.core.parallel_state"
"""Megatron: what the names of its modules begin with, and the module that knows the degrees of parallelism."""
_FSDP, _STATES = "torch.distributed.fsdp._fully_shard._fsdp_state", "torch.distributed._composable_state"
"""FSDP2: the module of its states, and the one that has those of all modules."""
_WHILE_GATHERED = ("_unsharded_param", "_sharded_post_forward_param")
"""FSDP2: what takes the place of a parameter from its forward pass until it is sharded again."""
_BEFORE = (
    "Load into the model before deepspeed.initialize; to resume an engine, use a universal checkpoint (--to deepspeed)."
)
PARTITION = "ds_id"
"""What DeepSpeed calls a parameter that it has taken apart."""
_AVAILABLE = "AVAILABLE"


def gathered_for_now(parameters: Mapping[str, torch.Tensor]) -> list[Refusal]:
    """Refuse parameters that FSDP2 has gathered for a forward pass: it frees them, with what is written into them.

    A model's `state_dict` shards its parameters again; only who takes the parameters themselves gets these.

    Args:
        parameters: those in a state dict, by name.
    """
    if _FSDP not in sys.modules:
        return []
    memory = set(_gathered_memory())
    message = "FSDP2 has gathered this parameter for a forward pass, and frees it, with what is written into it"
    hint = "Give the model itself, or its state_dict(), which shards the parameters again."
    return [
        Refusal("UNSUPPORTED", message, Where(None, name), hint)
        for name, tensor in (parameters.items() if memory else ())
        if _memory(tensor) in memory
    ]


def _gathered_memory() -> Iterator[int]:
    """Yield where the parameters lie that FSDP2 has gathered, in all models."""
    for reference in list(sys.modules[_STATES]._module_state_mapping.values()):
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for each in (parameter for group in groups if group is not None for parameter in group.fsdp_params):
            held = () if each.sharded_state.name == "SHARDED" else _WHILE_GATHERED
            found = (getattr(each, name, None) for name in held)
            yield from (address for tensor in found if tensor is not None and (address := _memory(tensor)))


def _memory(tensor: torch.Tensor) -> int:
    local = stored_local(tensor)
    return local.untyped_storage().data_ptr() if local.layout == torch.strided and not local.is_meta else 0


def partitioned(model: nn.Module) -> list[Refusal]:
    """Return a refusal for each parameter that has no values: ZeRO-3 has taken them."""
    hint = "Load before deepspeed.initialize; to continue a run, convert DeepSpeed's own checkpoint."
    return [
        Refusal(
            "UNSUPPORTED", "DeepSpeed ZeRO-3 has taken its values out of the module", Where(None, own_name(name)), hint
        )
        for name, parameter in model.named_parameters()
        if is_taken_apart(parameter)
    ]


def shared_out(model: nn.Module) -> list[Refusal]:
    """Return a refusal for a model of Megatron's of which each rank has a part which its state dict does not tell."""
    state = sys.modules.get(_MEGATRON_STATE)
    if state is None or not state.model_parallel_is_initialized():
        return []
    if not any(type(module).__module__.startswith(_MEGATRON) for module in model.modules()):
        return []
    degrees = {
        "TP": state.get_tensor_model_parallel_world_size(),
        "PP": state.get_pipeline_model_parallel_world_size(),
        "EP": state.get_expert_model_parallel_world_size(),
    }
    shared = " x ".join(f"{axis} {size}" for axis, size in degrees.items() if size > 1)
    message = f"Megatron has shared the model out over {shared}; its state dict does not say what this rank holds"
    hint = "Give model.sharded_state_dict() in place of the model."
    return [Refusal("UNSUPPORTED", message, Where(None, None), hint)] if shared else []


def kept_elsewhere(model: nn.Module) -> list[Refusal]:
    """Return a refusal for each parameter, or for the model, where what is loaded would be overwritten."""
    return [*_offloaded(model), *_mastered(model)]


def _offloaded(model: nn.Module) -> Iterator[Refusal]:
    message = "accelerate keeps its weights elsewhere and copies them in for each forward pass"
    hint = "Load first, then call dispatch_model, cpu_offload or disk_offload."
    for path, module in model.named_modules():
        hook = module.__dict__.get(_HOOK)
        every = getattr(hook, _HOOKS, (hook,))
        held = [own_name(f"{path}.{name}".lstrip(".")) for name, _ in module.named_parameters(recurse=False)]
        if held and any(getattr(each, _OFFLOAD, False) is True for each in every):
            yield Refusal("UNSUPPORTED", f"{message} ({', '.join(held)})", Where(None, path or None), hint)


def _mastered(model: nn.Module) -> Iterator[Refusal]:
    message = "DeepSpeed's optimizer has its own copy of the weights; its next step would overwrite the loaded values"
    keeper: object = getattr(model, "optimizer", None)
    if type(model).__module__.startswith(_DEEPSPEED) and type(keeper).__module__.startswith(_DEEPSPEED):
        yield Refusal("UNSUPPORTED", message, Where(None, None), _BEFORE)
        return
    for name, parameter in model.named_parameters():
        if getattr(parameter, _MASTER, None) is not None:
            yield Refusal("UNSUPPORTED", message, Where(None, own_name(name)), _BEFORE)


def is_taken_apart(value: object) -> bool:
    """Tell whether DeepSpeed has taken a parameter apart."""
    return hasattr(value, PARTITION)


def refused_parts(model: nn.Module) -> list[Refusal]:
    """Return a refusal for each parameter whose range this rank cannot read."""
    problems = []
    for name, parameter in model.named_parameters():
        own: Any = getattr(parameter, "ds_tensor", None)
        if not is_taken_apart(parameter):
            continue
        if own is None or own.status.name != _AVAILABLE:
            message, hint = "DeepSpeed ZeRO-3 has it on a disk now", "Keep parameters in memory: no offload to nvme."
        elif hasattr(own, "ds_quant_scale"):
            message, hint = "DeepSpeed ZeRO-3 keeps it quantized", "Turn zero_quantized_weights off."
        else:
            continue
        problems.append(Refusal("UNSUPPORTED", message, Where(None, own_name(name)), hint))
    return problems


def own_range(parameter: Any) -> torch.Tensor:
    """Return what this rank holds of a parameter that is taken apart: its elements in one dim, marked as that part."""
    whole, own = int(parameter.ds_numel), parameter.ds_tensor
    first = min(dist.get_rank(parameter.ds_process_group) * int(own.ds_numel), whole)
    stop = min(first + int(own.ds_numel), whole)
    return mark(own.detach().view(-1)[: stop - first], Part(tuple(parameter.ds_shape), (((first, stop),),)))
