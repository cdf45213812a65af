"""Arguments of torch's own types: element types, devices and groups of ranks, by any of the names that people use."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from transaxle.arguments import DType, read_float_type, wrong_type

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
