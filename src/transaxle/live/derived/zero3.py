"""ZeRO-3: parameters of which DeepSpeed has left each rank a range of the elements, and nothing in the module.

The ranges can be read. What the optimizer updates are these, in the type that the model computes with.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from transaxle.axes.notation.name import own_name
from transaxle.errors import Refusal, Where
from transaxle.torch_tensors.placement import Part, mark

PARTITION = "ds_id"
"""What DeepSpeed calls a parameter that it has taken apart."""
_AVAILABLE = "AVAILABLE"


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
