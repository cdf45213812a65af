"""Arguments of torch's own types: element types, devices, groups of ranks, models, by any of the names that people use.

Checkpoints name element types with safetensors codes; a model may come in the wrappers of a trainer.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from transaxle.arguments import DType, read_float_type, wrong_type
from transaxle.axes.notation.name import CHECKPOINTED, COMPILED, FSDP1
from transaxle.errors import refuse

_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
    "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
    "COMPLEX32": "complex32", "COMPLEX128": "complex128",
}  # fmt: skip
_TORCH = {code: getattr(torch, name) for code, name in _NAMES.items() if hasattr(torch, name)}
_CODES = {dtype: code for code, dtype in _TORCH.items()}


def code_of(dtype: torch.dtype) -> str:
    """Return the safetensors code of a torch type; one without a code is named as torch names it, in capitals."""
    return _CODES.get(dtype) or str(dtype).removeprefix("torch.").upper()


def torch_dtype(code: str, *, tensor: str | None = None) -> torch.dtype:
    """Return the torch type of a code.

    Raises:
        Refused: UNSUPPORTED where torch has no such type; `tensor` is named.
    """
    if code not in _TORCH:
        raise refuse("UNSUPPORTED", f"torch has no dtype for {code}", tensor=tensor)
    dtype: torch.dtype = _TORCH[code]
    return dtype


Device: TypeAlias = torch.device | str | int
"""A device: torch's own, its name ("cuda:1"), or the number of an accelerator."""
Ranks: TypeAlias = dist.ProcessGroup | DeviceMesh
"""Ranks that act together: a process group, or a mesh of one dim; a mesh of several must hold all ranks."""

_TORCH_NAMES = {
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64",
    "f8_e4m3": "float8_e4m3fn", "f8_e5m2": "float8_e5m2", "f8_e8m0": "float8_e8m0fnu",
}  # fmt: skip
"""Types whose other names are not torch's."""


def read_dtype(argument: str, given: object) -> torch.dtype:
    """Return an element type.

    Raises:
        TypeError: it is neither a `torch.dtype` nor a text.
        ValueError: torch has no element type of that name.
    """
    if isinstance(given, torch.dtype):
        return given
    name = str(read_float_type(argument, given)).lower() if given is not None else None
    if name is None:
        raise wrong_type(argument, 'an element type such as "bf16" or torch.bfloat16', given)
    dtype = getattr(torch, _TORCH_NAMES.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f'{argument} must be an element type such as "bf16" or torch.bfloat16; got {given!r}')
    return dtype


def read_optional_dtype(argument: str, given: DType | None) -> torch.dtype | None:
    """Return an element type, or None where nothing is given; raises as `read_dtype`."""
    return None if given is None else read_dtype(argument, given)


def read_device(argument: str, given: Device | None) -> torch.device | None:
    """Return a device, or None where nothing is given.

    Raises:
        TypeError: it is neither a `torch.device` nor a name or a number of one.
        ValueError: torch knows no device of that name.
    """
    if given is None or isinstance(given, torch.device):
        return given
    accepted = 'a device such as "cpu", "cuda:1" or torch.device("meta")'
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise wrong_type(argument, accepted, given)
    try:
        return torch.device(given)
    except RuntimeError:
        raise ValueError(f"{argument} must be {accepted}; got {given!r}") from None


def read_group(argument: str, given: Any) -> dist.ProcessGroup | None:
    """Return the group of the ranks that act together; None stands for all.

    Raises:
        TypeError: it is neither a process group nor a mesh.
        ValueError: this rank is not in it, or it is a mesh of several dims that some ranks are not in.
    """
    if given is None or isinstance(given, dist.ProcessGroup):
        return given
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"{argument} is a process group that this rank does not belong to; only its members may call this"
        )
    if not isinstance(given, DeviceMesh):
        raise wrong_type(argument, "a ProcessGroup, a DeviceMesh of one dim, or None for all ranks", given)
    if given.ndim == 1:
        return given.get_group()
    if given.size() == dist.get_world_size():
        return None
    sizes = list(given.mesh.shape)
    raise ValueError(f'{argument} must be a mesh of one dim, such as mesh["dp"]; got one of {given.ndim} dims {sizes}')


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model without DDP and `torch.compile` around it.

    FSDP1 stays: its parameters are flat, and only its own state dict shows those of the model.
    """
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else model._modules.get(COMPILED)
        if inner is None:
            return model
        model = inner


def innermost(model: nn.Module) -> nn.Module:
    """Return the module that the user wrote, without any wrapper: for its class and its attributes."""
    while True:
        model = unwrapped(model)
        inner = [module for name in (FSDP1, CHECKPOINTED) if (module := model._modules.get(name)) is not None]
        if not inner:
            return model
        model = inner[0]
