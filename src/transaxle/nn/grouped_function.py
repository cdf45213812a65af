"""The grouped product as one autograd function.

Delayed gradients of weights: FSDP2 has sharded the parameters again before they exist, so they are reduced here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from transaxle.errors import refuse
from transaxle.nn.grouped_gemm import Codes, Operands, forward, of_bias, of_input, of_weight, weights_of
from transaxle.nn.grouped_tensor import Splits, stacked, values
from transaxle.nn.kernel_choice import GROUPED, SCALED, Way
from transaxle.quant import QuantizedTensor
from transaxle.torch_tensors.local_tensor import as_dtensor, placed_like, stored_local


class Sink(Protocol):
    """Receives gradients of weights that do not go to `.grad` at once: delayed ones, and those for `main_grad`."""

    def take(self, pending: Pending) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Accept gradients; return those of weights and biases that autograd should still get."""


@dataclass(frozen=True, slots=True)
class Pending:
    """The tensors from which delayed gradients of weights and biases are computed."""

    grad: torch.Tensor
    """Of the output, [rows, out]."""
    x: torch.Tensor
    """The input, [rows, in]."""
    operands: Operands
    """The rest of what was multiplied."""
    wanted: tuple[bool, bool]
    """Whether weights, and whether biases, are trained."""

    def versions(self) -> tuple[int, ...]:
        """Return version numbers, which change when one of the tensors is changed in place."""
        return tuple(0 if tensor.is_inference() else tensor._version for tensor in (self.grad, self.x))

    def weight(self) -> torch.Tensor | None:
        """Return the gradient of the weights [experts, out, in]."""
        return of_weight(self.grad, self.x, self.operands) if self.wanted[0] else None

    def bias(self) -> torch.Tensor | None:
        """Return the gradient of the biases [experts, out]."""
        return of_bias(self.grad, self.operands) if self.wanted[1] else None


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings of one call."""

    way: Way
    """How it multiplies."""
    features: tuple[int, int]
    """Output and input features."""
    dtype: torch.dtype
    """Of the product."""
    counts: tuple[int, ...] | None
    """Rows of each expert, where the host knows them."""
    weights: int
    """Parameters that are weights: one, or one per expert; those after them are biases."""
    original: bool = False
    """Whether the input is kept as it was given, not as it is multiplied."""
    sink: Sink | None = None
    """What takes gradients of weights; None: autograd."""
    codes: Codes | None = None
    """How inputs and gradients are quantized, where the weights' recipe says so."""


class Product(torch.autograd.Function):
    """Rows times their experts' weights."""

    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        offsets: torch.Tensor,
        cached: torch.Tensor | None,
        dgrad_out: torch.Tensor | None,
        setting: Setting,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        """Return [rows, out].

        Args:
            ctx: of autograd.
            inp: [rows, in]; may be quantized.
            offsets: see `Splits.offsets`.
            cached: the weights as `weights_of` gave them before; None: made here.
            dgrad_out: where the gradient of the input goes, if it is given.
            setting: the settings of the call.
            *parameters: weights, then biases.
        """
        result, x = _multiplied(inp, offsets, cached, setting, parameters)
        ctx.setting, ctx.dgrad_out, ctx.has_cached = setting, dgrad_out, cached is not None
        ctx.save_for_backward(
            inp if setting.original else x, offsets, *(() if cached is None else (cached,)), *parameters
        )
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of the input and of all parameters."""
        setting: Setting = ctx.setting
        inp, offsets, *rest = ctx.saved_tensors
        cached = rest.pop(0) if ctx.has_cached else None
        weights = rest[: setting.weights]
        x = values(inp, setting.dtype)
        operands = _operands(setting, offsets, x.shape[0])
        if cached is None and setting.way == SCALED and not isinstance(weights[0], QuantizedTensor):
            operands = replace(operands, way=GROUPED)  # values, where a hook like `save_on_cpu` has copied the codes
        if setting.codes is not None:
            operands = replace(operands, codes=setting.codes.backward(weights))
        grad = grads[0].to(setting.dtype).contiguous()
        needed = ctx.needs_input_grad
        first = None
        if needed[0]:
            first = of_input(grad, weights_of(weights, operands) if cached is None else cached, operands)
        start = len(needed) - len(rest)
        wanted = any(needed[start : start + setting.weights]), any(needed[start + setting.weights :])
        pending = Pending(grad, x, operands, wanted)
        of_weights, of_biases = (
            (pending.weight(), pending.bias()) if setting.sink is None else setting.sink.take(pending)
        )
        if first is not None and ctx.dgrad_out is not None:
            first = ctx.dgrad_out.copy_(first)  # last: it may lie where the input or the gradient of the output does
        gradients = (*_shared(of_weights, weights), *_shared(of_biases, rest[setting.weights :]))
        kept = (gradient if need else None for gradient, need in zip(gradients, needed[start:], strict=True))
        return (first, *(None,) * (start - 1), *kept)


def grouped_product(
    inp: torch.Tensor,
    offsets: torch.Tensor,
    cached: torch.Tensor | None,
    dgrad_out: torch.Tensor | None,
    setting: Setting,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Return [rows, out]; see `Product.forward`. Where no gradients are wanted, autograd records nothing.

    Args:
        inp: see there, as what follows.
        offsets: see there.
        cached: see there.
        dgrad_out: see there.
        setting: see there.
        weights: one parameter for all experts, or one for each.
        biases: likewise, or none. They are small: a copy of them costs less than telling autograd of each.
    """
    stacked_biases = torch.stack(list(biases)) if len(biases) > 1 else None
    parameters = (*weights, *(biases if stacked_biases is None else (stacked_biases,)))
    if torch.is_grad_enabled():
        result: torch.Tensor = Product.apply(inp, offsets, cached, dgrad_out, setting, *parameters)  # type: ignore[no-untyped-call]
        return result
    return _multiplied(inp, offsets, cached, setting, parameters)[0]


def _multiplied(
    inp: torch.Tensor,
    offsets: torch.Tensor,
    cached: torch.Tensor | None,
    setting: Setting,
    parameters: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the product, and the input as it was multiplied."""
    x = values(inp, setting.dtype)
    operands = _operands(setting, offsets, x.shape[0])
    weights, biases = parameters[: setting.weights], parameters[setting.weights :]
    weight = weights_of(weights, operands) if cached is None else cached
    bias = stacked(biases, 2, setting.dtype) if biases else None
    return forward(x, weight, bias, operands), x


def _operands(setting: Setting, offsets: torch.Tensor, rows: int) -> Operands:
    splits = Splits(offsets, rows, setting.counts)
    return Operands(splits, setting.way, setting.features, setting.dtype, setting.codes)


def _shared(grad: torch.Tensor | None, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradient of each parameter: all of it, or its expert's part."""
    if grad is None or not parameters:
        return [None] * len(parameters)
    if parameters[0].dim() == grad.dim():
        return [grad.to(parameters[0].dtype)]
    return list(grad.to(parameters[0].dtype).unbind(0))


_IGNORED = "_ddp_ignored"
"""Attribute of parameters that DistributedDataParallel was told to ignore."""


def refuse_data_parallel(parameters: Iterable[torch.Tensor]) -> None:
    """Refuse delayed gradients inside DistributedDataParallel, which reduces gradients before these exist.

    Args:
        parameters: the parameters with delayed gradients. Those that DDP was told to ignore are accepted.

    Raises:
        Refused: UNSUPPORTED.
    """
    if DistributedDataParallel._get_active_ddp_module() is None:
        return
    if any(each.requires_grad and not getattr(each, _IGNORED, False) for each in parameters):
        message = (
            "delay_wgrad_compute does not work in DistributedDataParallel: it reduces gradients before backward_dw()"
        )
        raise refuse("UNSUPPORTED", message, hint="Use fully_shard, or delay_wgrad_compute=False.")


def mesh_of(parameter: torch.Tensor) -> DeviceMesh | None:
    """Return the mesh of a parameter; None of one that is not distributed."""
    return parameter.device_mesh if isinstance(parameter, DTensor) else None


def placed(grad: torch.Tensor, parameter: torch.Tensor, before: DeviceMesh | None) -> torch.Tensor:
    """Return a gradient with the placements that its parameter has now; collective if it was sharded since.

    It becomes the mean over the mesh dims that the parameter did not have when it was multiplied. Those are FSDP2's,
    on which each rank computed the gradient from its own rows only.

    Args:
        grad: of all that this rank multiplied; of the parameter's dtype.
        parameter: what it is for.
        before: mesh of the parameter when it was multiplied.
    """
    if not isinstance(parameter, DTensor):
        return grad
    local = _mean(grad, parameter, before).to(stored_local(parameter).device)
    return placed_like(parameter, local)


def _mean(grad: torch.Tensor, parameter: DTensor, before: DeviceMesh | None) -> torch.Tensor:
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    kept = () if before is None else before.mesh_dim_names or ()
    if before is not None and (before == mesh or not names):
        return grad
    added = [dim for dim in range(mesh.ndim) if before is None or names[dim] not in kept]
    if not added:
        return grad
    over = mesh if len(added) == mesh.ndim else mesh[tuple(names[dim] for dim in added)]
    wanted = [_within(parameter.placements[dim]) for dim in added]
    summed = as_dtensor(grad, over, [Partial()] * over.ndim, grad.shape, grad.stride())
    return summed.redistribute(placements=wanted).to_local() / over.size()


def _within(placement: Placement) -> Placement:
    """Return how a mesh dim cuts what the others have left: FSDP2 cuts after expert and tensor parallelism."""
    return Shard(placement.dim) if isinstance(placement, Shard | _StridedShard) else Replicate()
