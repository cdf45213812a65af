"""The product of rows with the weights of their experts, as one autograd function.

The product of rows with the weights of their experts, and its gradients.

One `grouped_mm` where the path allows it, or a product of codes, else a product per expert; gradients of weights are
never products of codes. Between forward and backward nothing is kept but the input, the weights themselves (codes where
they are quantized) and the offsets.

Facts about torch's grouped product that this is built around: rows past the last offset are not written, strides must
be multiples of 16 bytes, gradients of stride 0 are refused, and on devices of compute capability 10 the gradient of an
expert without rows is not written (pytorch #172439).

Products of rows with the weights of their experts, all of whose operands are quantized to nvfp4.

Each expert's rows are a matrix of their own, with their own amax; so there is a product for each expert.

The grouped product as one autograd function.

**Delayed gradients of weights**: FSDP2 has sharded the parameters again before they exist, so they are reduced here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from transaxle.errors import refuse
from transaxle.nn.grouped_tensor import Splits, stacked, values
from transaxle.nn.kernel_choice import (
    GROUPED,
    PER_EXPERT,
    SCALED,
    Way,
    back,
    backwards,
    capability_of,
    product,
    together,
)
from transaxle.quant import NVFP4BlockScaling, QuantizedTensor
from transaxle.quant.frame import Frame, count_rounding, state_of
from transaxle.quant.nvfp4 import Batch, Products, current_batch
from transaxle.quant.tp_share import Share
from transaxle.torch_tensors import as_dtensor, place_like, raw_local


@dataclass(frozen=True, slots=True)
class Codes:
    """How the rows of experts, and their gradients, are quantized."""

    recipe: NVFP4BlockScaling
    """Of the weights."""
    counts: tuple[int, ...]
    """Rows of each expert that are here."""
    share: Share | None
    """What each weight is a part of, where tensor parallelism has cut it."""
    batch: Batch
    """The ranks that have other rows of these experts."""
    firsts: tuple[int, ...]
    """Number, among all rows of each expert, of the first one here."""
    frames: tuple[Frame, ...]
    """Of the parameters: one for all experts, or one for each. They count, even if hooks put copies into backward."""
    states: torch.Tensor | None = None
    """In backward: the experts' states of random rounding, int64 [experts, 2]."""

    def output(
        self, x: torch.Tensor, weight: QuantizedTensor, biases: torch.Tensor | None, features: int
    ) -> torch.Tensor:
        """Return [rows, out]: each row times its expert's weight, plus its bias."""
        result = x.new_zeros((x.shape[0], features))
        for expert, rows, products, _ in self._experts():
            made = products.output(x[rows], weight.frame.member(weight.skip + expert), x.dtype)
            result[rows] = made if biases is None else made + biases[expert].to(x.dtype)
        return result

    def input_gradient(self, grad: torch.Tensor, weight: QuantizedTensor, features: int) -> torch.Tensor:
        """Return the gradient of the input [rows, in]."""
        result = grad.new_zeros((grad.shape[0], features))
        for expert, rows, products, state in self._experts():
            result[rows] = products.input_gradient(
                grad[rows], weight.frame.member(weight.skip + expert), state, grad.dtype
            )
        return result

    def weight_gradient(self, grad: torch.Tensor, x: torch.Tensor, features: tuple[int, int]) -> torch.Tensor:
        """Return the gradient of the weights [experts, out, in]."""
        result = x.new_zeros((len(self.counts), *features))
        for expert, rows, products, state in self._experts():
            result[expert] = products.weight_gradient(grad[rows], x[rows], state, x.dtype)
        return result

    def backward(self, weights: Sequence[torch.Tensor]) -> Codes:
        """Return the same with the states of random rounding, and count the call.

        Args:
            weights: what autograd has kept of the parameters.

        Raises:
            Refused: UNSUPPORTED for values in place of codes.
        """
        if not all(isinstance(weight, QuantizedTensor) for weight in weights):
            raise refuse(
                "UNSUPPORTED",
                "a hook on saved tensors has kept weights' values in place of their codes, which backward multiplies",
                hint="Use save_on_cpu() without pin_memory.",
            )
        if state_of(self.frames[0]) is None:
            return self
        return replace(self, states=torch.cat([count_rounding(frame).view(-1, 2) for frame in self.frames]))

    def _experts(self) -> Iterator[tuple[int, slice, Products, torch.Tensor | None]]:
        """Yield each expert that has rows, on this rank or on others, with its rows and its products."""
        common = self.batch.group is not None
        for expert, start, stop in spans_of(self.counts):
            if start < stop or common:
                products = Products(self.recipe, self.share, self.batch, self.firsts[expert])
                yield expert, slice(start, stop), products, None if self.states is None else self.states[expert]


def spans_of(counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (expert, first row, row after the last) of each expert."""
    ends = list(accumulate(counts))
    return [(expert, end - count, end) for expert, (count, end) in enumerate(zip(counts, ends, strict=True))]


def codes_of(weights: Sequence[torch.Tensor], counts: Sequence[int] | None, device: torch.device) -> Codes | None:
    """Return how rows are quantized for weights; None for those whose recipe says nothing of it.

    Args:
        weights: one parameter for all experts, or one for each.
        counts: rows of each expert.
        device: of the rows.
    """
    first = weights[0]
    recipe = first.quantizer if isinstance(first, QuantizedTensor) else None
    if not isinstance(recipe, NVFP4BlockScaling) or not isinstance(first, QuantizedTensor):
        return None
    assert counts is not None
    share, batch = first.frame.share, current_batch()
    if share is not None and first.frame.matrix is not None:
        share = share.member
    frames = tuple(weight.frame for weight in weights if isinstance(weight, QuantizedTensor))
    return Codes(recipe, tuple(counts), share, batch, tuple(batch.first_rows(counts, device)), frames)


_BYTES = 16
"""Strides of operands are multiples of this."""
_ROWS = 8
"""Rows of ones that sum the rows of a group; one is used, the others are there for the alignment."""
_WRITES_EMPTY = 9
"""Major compute capability up to which experts without rows get their zeros from the kernel."""


@dataclass(frozen=True, slots=True)
class Operands:
    """How an input is multiplied."""

    splits: Splits
    """Rows of each expert."""
    way: Way
    """One grouped product of values or of codes, or one product per expert."""
    features: tuple[int, int]
    """Output and input features."""
    dtype: torch.dtype
    """Of the product."""
    codes: Codes | None = None
    """How inputs and gradients are quantized, where the weights' recipe says so."""


def weights_of(parameters: Sequence[torch.Tensor], operands: Operands) -> torch.Tensor:
    """Return the weights as one plain tensor [experts, out, in] of the product's dtype, copied only where they must be.

    On the grouped path it is padded to whole steps of 16 bytes along both dims. It is codes on the scaled path,
    and where inputs are quantized too.
    """
    if (operands.way == SCALED or operands.codes is not None) and operands.splits.offsets.shape[0]:
        return together(parameters)
    weights = stacked(parameters, 3, operands.dtype)
    return weights if operands.way == PER_EXPERT else _aligned(_pad_bytes(weights, 1))


def _pad_bytes(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return a tensor with zeros at the end of a dim up to a whole number of steps of 16 bytes."""
    more = -x.shape[dim] % (_BYTES // x.element_size())
    return functional.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, more)) if more else x


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose rows are dense and begin at steps of 16 bytes, padded and copied if they are not."""
    x = _pad_bytes(x, x.dim() - 1)
    if torch.compiler.is_compiling():
        return x.contiguous()
    step = _BYTES // x.element_size()
    dense = x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1] and (x.dim() == 2 or x.is_contiguous())
    if dense and not x.stride(-2) % step and not x.storage_offset() % step:
        return x
    return x.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("transaxle::grouped_mm", mutates_args=())
def _opaque(first: torch.Tensor, second: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return functional.grouped_mm(first, second, offs=offsets).contiguous()


@_opaque.register_fake
def _(first: torch.Tensor, second: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    experts = () if second.dim() == 3 else (offsets.shape[0],)
    return first.new_empty((*experts, first.shape[0], second.shape[-1]))


def _grouped_mm(first: torch.Tensor, second: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return torch's grouped product; traced, or of fake tensors, torch knows of no type but bfloat16."""
    if first.dtype != torch.bfloat16 and (torch.compiler.is_compiling() or type(first) is not torch.Tensor):
        result: torch.Tensor = _opaque(first, second, offsets)
        return result
    return functional.grouped_mm(first, second, offs=offsets)


def forward(x: torch.Tensor, weight: torch.Tensor, biases: torch.Tensor | None, operands: Operands) -> torch.Tensor:
    """Return [rows, out]: each row times its expert's weight, plus its bias; zeros past the last expert's rows.

    Args:
        x: [rows, in].
        weight: see `weights_of`.
        biases: [experts, out], or None.
        operands: how they are multiplied.
    """
    splits, (out, _) = operands.splits, operands.features
    if operands.codes is not None and isinstance(weight, QuantizedTensor) and weight.numel():
        return operands.codes.output(x, weight, biases, out)
    if not x.shape[0] or not out or not len(splits.offsets):
        return x.new_zeros((x.shape[0], out))
    if operands.way == PER_EXPERT:
        return _each(x, weight, biases, operands)
    if isinstance(weight, QuantizedTensor):
        result = product(x, weight, splits.offsets)
    else:
        result = _grouped_mm(_aligned(x), weight.transpose(1, 2), splits.offsets)
    if out != result.shape[1]:
        result = result[:, :out].contiguous()
    if biases is None:
        return _ended(result, splits)
    experts = splits.experts()
    if splits.complete:
        return result.add_(biases.index_select(0, experts))
    result.add_(biases.index_select(0, experts.clamp(max=len(biases) - 1)))  # rows past the end lose it again
    return result.masked_fill_((experts == len(biases)).unsqueeze(1), 0)


def _ended(result: torch.Tensor, splits: Splits) -> torch.Tensor:
    """Put zeros into rows past the last expert's, and return them all."""
    return result if splits.complete else result.masked_fill_(splits.past(), 0)


def _each(x: torch.Tensor, weight: torch.Tensor, biases: torch.Tensor | None, operands: Operands) -> torch.Tensor:
    result = x.new_zeros((x.shape[0], operands.features[0]))
    for expert, start, stop in spans(operands.splits):
        bias = None if biases is None else biases[expert].to(x.dtype)
        result[start:stop] = functional.linear(x[start:stop], weight[expert], bias)
    return result


def spans(splits: Splits) -> list[tuple[int, int, int]]:
    """Return (expert, first row, row after the last) of each expert that has rows."""
    assert splits.counts is not None
    return [span for span in spans_of(splits.counts) if span[1] < span[2]]


def input_gradient(grad: torch.Tensor, weight: torch.Tensor, operands: Operands) -> torch.Tensor:
    """Return the gradient of the input [rows, in]; zeros past the last expert's rows."""
    splits, (out, features) = operands.splits, operands.features
    if operands.codes is not None and isinstance(weight, QuantizedTensor) and weight.numel():
        return operands.codes.input_gradient(grad, weight, features)
    if not grad.shape[0] or not out or not len(splits.offsets):
        return grad.new_zeros((grad.shape[0], features))
    if operands.way == PER_EXPERT:
        gradient = grad.new_zeros((grad.shape[0], features))
        for expert, start, stop in spans(splits):
            gradient[start:stop] = grad[start:stop] @ weight[expert]
        return gradient
    if isinstance(weight, QuantizedTensor) and backwards(weight):
        gradient = back(grad, weight, splits.offsets)
    else:
        if isinstance(weight, QuantizedTensor):
            weight = _aligned(values(weight, operands.dtype))
        gradient = _grouped_mm(_aligned(grad), weight, splits.offsets)
    return _ended(gradient if gradient.shape[1] == features else gradient[:, :features].contiguous(), splits)


def weight_gradient(grad: torch.Tensor, x: torch.Tensor, operands: Operands) -> torch.Tensor:
    """Return the gradient of the weights [experts, out, in], zeros for experts without rows."""
    splits, (out, features) = operands.splits, operands.features
    experts = splits.offsets.shape[0]
    if operands.codes is not None and out and features and experts:
        return operands.codes.weight_gradient(grad, x, operands.features)
    if not x.shape[0] or not out or not features or not experts:
        return x.new_zeros((experts, out, features))
    if operands.way == PER_EXPERT:
        gradient = x.new_zeros((experts, out, features))
        for expert, start, stop in spans(splits):
            gradient[expert] = grad[start:stop].t() @ x[start:stop]
        return gradient
    gradient = _grouped_mm(_aligned(grad).t(), _aligned(x), splits.offsets)
    if x.device.type == "cuda" and capability_of(x.device.index)[0] > _WRITES_EMPTY:
        gradient.masked_fill_(splits.empty(), 0)
    return gradient[:, :out, :features].contiguous()


def bias_gradient(grad: torch.Tensor, operands: Operands) -> torch.Tensor:
    """Return the gradient of the biases [experts, out]: the sum of each expert's rows.

    As a product with ones: the sums are taken in float32, in an order that does not change from run to run.
    """
    splits, out = operands.splits, operands.features[0]
    experts = splits.offsets.shape[0]
    if not grad.shape[0] or not out or not experts:
        return grad.new_zeros((experts, out))
    if operands.way == PER_EXPERT:
        gradient = grad.new_zeros((experts, out))
        for expert, start, stop in spans(splits):
            gradient[expert] = grad[start:stop].sum(0)
        return gradient
    ones = torch.ones((grad.shape[0], _ROWS), dtype=grad.dtype, device=grad.device)
    gradient = _grouped_mm(ones.t(), _aligned(grad), splits.offsets)[:, 0, :out]
    if grad.device.type == "cuda" and capability_of(grad.device.index)[0] > _WRITES_EMPTY:
        return gradient.masked_fill(splits.empty().view(-1, 1), 0)
    return gradient.contiguous()


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
        return weight_gradient(self.grad, self.x, self.operands) if self.wanted[0] else None

    def bias(self) -> torch.Tensor | None:
        """Return the gradient of the biases [experts, out]."""
        return bias_gradient(self.grad, self.operands) if self.wanted[1] else None


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
            first = input_gradient(grad, weights_of(weights, operands) if cached is None else cached, operands)
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
    local = _mean(grad, parameter, before).to(raw_local(parameter).device)
    return place_like(parameter, local)


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
