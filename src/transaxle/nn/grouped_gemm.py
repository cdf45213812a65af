"""Multiplies rows by the weights of the experts to which the rows belong, in one autograd function.

The product is one call of `grouped_mm` if possible, or one grouped product of quantized codes, otherwise one product
per expert. Gradients of weights are never products of codes, except in NVFP4 training. Between forward and backward,
only the input, the weights themselves (codes if they are quantized) and the offsets are saved.

This module works around these properties of torch's grouped product: rows after the last offset are not written,
strides must be multiples of 16 bytes, and gradients of stride 0 are refused. On devices of compute capability 10, the
gradient of an expert without rows is not written (pytorch #172439).

**NVFP4 training** quantizes all operands. Each expert's rows are a separate matrix with its own amax (largest absolute
value), so each expert needs a separate product.

**Delayed gradients of weights**: when these gradients are computed, FSDP2 has already sharded the parameters again. So
this module reduces delayed gradients over the ranks.
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
from transaxle.nn.grouped_tensor import Splits, stack_values, values
from transaxle.nn.kernel_choice import (
    GROUPED,
    PER_EXPERT,
    SCALED,
    Way,
    capability_of,
    has_backward_codes,
    multiply,
    multiply_transposed,
    stack_codes,
)
from transaxle.quant import NVFP4BlockScaling, QuantizedTensor
from transaxle.quant.frame import Frame, count_rounding, state_of
from transaxle.quant.nvfp4 import Batch, Products, current_batch
from transaxle.quant.tp_share import Share
from transaxle.torch_tensors import as_dtensor, place_like, raw_local


@dataclass(frozen=True, slots=True)
class QuantizedProducts:
    """Products in which both operands are quantized: how rows of experts, and gradients, are converted to codes."""

    recipe: NVFP4BlockScaling
    """Recipe by which the weights are quantized."""
    counts: tuple[int, ...]
    """Number of rows of each expert on this rank."""
    share: Share | None
    """This rank's share of each weight, if tensor parallelism has cut it."""
    batch: Batch
    """The batch, with the ranks that have further rows for the same experts."""
    firsts: tuple[int, ...]
    """For each expert, the index of this rank's first row among the expert's rows on all ranks."""
    frames: tuple[Frame, ...]
    """The objects that hold the parameters' codes: one for all experts, or one per expert. Backward uses the rounding
    counters of these code buffers, even if hooks replace the weights.
    """
    states: torch.Tensor | None = None
    """The experts' rounding states, int64 [experts, 2]; None except during backward."""

    def output(
        self, x: torch.Tensor, weight: QuantizedTensor, biases: torch.Tensor | None, features: int
    ) -> torch.Tensor:
        """Return [rows, out]: each row times the weight of its expert, plus the expert's bias."""
        result = x.new_zeros((x.shape[0], features))
        for expert, rows, products, _ in self._experts():
            product = products.output(x[rows], weight.frame.member(weight.skip + expert), x.dtype)
            result[rows] = product if biases is None else product + biases[expert].to(x.dtype)
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

    def backward(self, weights: Sequence[torch.Tensor]) -> QuantizedProducts:
        """Return a copy for one backward pass, with the experts' rounding states, whose call counters are incremented.

        Args:
            weights: the parameters as autograd saved them.

        Raises:
            Refused: with the code UNSUPPORTED if a hook has replaced the saved codes by values.
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
        """Yield (expert, rows, products, rounding state) for each expert that has rows on any rank."""
        common = self.batch.group is not None
        for expert, start, stop in spans_of(self.counts):
            if start < stop or common:
                products = Products(self.recipe, self.share, self.batch, self.firsts[expert])
                yield expert, slice(start, stop), products, None if self.states is None else self.states[expert]


def spans_of(counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (expert, first row, row after the last) for each expert."""
    ends = list(accumulate(counts))
    return [(expert, end - count, end) for expert, (count, end) in enumerate(zip(counts, ends, strict=True))]


def codes_of(
    weights: Sequence[torch.Tensor], counts: Sequence[int] | None, device: torch.device
) -> QuantizedProducts | None:
    """Return how input rows are quantized for these weights; None if the weights' recipe does not quantize rows.

    Args:
        weights: one parameter for all experts, or one per expert.
        counts: number of rows of each expert.
        device: device of the rows.
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
    return QuantizedProducts(recipe, tuple(counts), share, batch, tuple(batch.first_rows(counts, device)), frames)


_BYTES = 16
"""Number of bytes: strides of operands must be multiples of it."""
_ROWS = 8
"""Number of rows of a matrix of ones that sums the rows of a group; only the first row of the result is used."""
_WRITES_EMPTY = 9
"""Highest major compute capability on which torch's kernel writes zero gradients for experts without rows."""


@dataclass(frozen=True, slots=True)
class Operands:
    """Settings of one grouped product: rows, dtype and method."""

    splits: Splits
    """The rows of each expert."""
    way: Way
    """How to multiply: by one grouped product of values, by one of codes, or by one product per expert."""
    features: tuple[int, int]
    """Number of output and of input features."""
    dtype: torch.dtype
    """Dtype of the product."""
    codes: QuantizedProducts | None = None
    """How inputs and gradients are quantized; None if the weights' recipe does not quantize them."""


def weights_of(parameters: Sequence[torch.Tensor], operands: Operands) -> torch.Tensor:
    """Return the weights as one tensor [experts, out, in] of the product's dtype; copied only if necessary.

    For a grouped product, both dims of each weight are padded to multiples of 16 bytes. For a grouped product of codes,
    or if inputs are quantized too, the result is a quantized tensor.
    """
    if (operands.way == SCALED or operands.codes is not None) and operands.splits.offsets.shape[0]:
        return stack_codes(parameters)
    weights = stack_values(parameters, 3, operands.dtype)
    return weights if operands.way == PER_EXPERT else _align(_pad(weights, 1))


def _pad(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Pad a dim with zeros to a multiple of 16 bytes."""
    padding = -x.shape[dim] % (_BYTES // x.element_size())
    return functional.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, padding)) if padding else x


def _align(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose rows are dense and aligned to 16 bytes; it is padded and copied only if necessary."""
    x = _pad(x, x.dim() - 1)
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


def _multiply_groups(first: torch.Tensor, second: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Call torch's grouped product. For traced or fake tensors, torch accepts only bfloat16, so products of other
    dtypes are registered as an opaque operation.
    """
    if first.dtype != torch.bfloat16 and (torch.compiler.is_compiling() or type(first) is not torch.Tensor):
        result: torch.Tensor = _opaque(first, second, offsets)
        return result
    return functional.grouped_mm(first, second, offs=offsets)


def forward(x: torch.Tensor, weight: torch.Tensor, biases: torch.Tensor | None, operands: Operands) -> torch.Tensor:
    """Return [rows, out]: each row times its expert's weight, plus the expert's bias; zeros after the last expert's
    rows.

    Args:
        x: [rows, in].
        weight: weights of all experts, as `weights_of` returns them.
        biases: biases of all experts, [experts, out]; None if the layer has no biases.
        operands: rows, dtypes and method of the product.
    """
    splits, (out, _) = operands.splits, operands.features
    if operands.codes is not None and isinstance(weight, QuantizedTensor) and weight.numel():
        return operands.codes.output(x, weight, biases, out)
    if not x.shape[0] or not out or not len(splits.offsets):
        return x.new_zeros((x.shape[0], out))
    if operands.way == PER_EXPERT:
        return _multiply_each(x, weight, biases, operands)
    if isinstance(weight, QuantizedTensor):
        result = multiply(x, weight, splits.offsets)
    else:
        result = _multiply_groups(_align(x), weight.transpose(1, 2), splits.offsets)
    if out != result.shape[1]:
        result = result[:, :out].contiguous()
    if biases is None:
        return _zero_tail(result, splits)
    experts = splits.experts()
    if splits.complete:
        return result.add_(biases.index_select(0, experts))
    # Rows after the last expert's rows are set to zero below.
    result.add_(biases.index_select(0, experts.clamp(max=len(biases) - 1)))
    return result.masked_fill_((experts == len(biases)).unsqueeze(1), 0)


def _zero_tail(result: torch.Tensor, splits: Splits) -> torch.Tensor:
    """Set the rows after the last expert's rows to zero, in place; return all rows."""
    return result if splits.complete else result.masked_fill_(splits.past(), 0)


def _multiply_each(
    x: torch.Tensor, weight: torch.Tensor, biases: torch.Tensor | None, operands: Operands
) -> torch.Tensor:
    result = x.new_zeros((x.shape[0], operands.features[0]))
    for expert, start, stop in spans(operands.splits):
        bias = None if biases is None else biases[expert].to(x.dtype)
        result[start:stop] = functional.linear(x[start:stop], weight[expert], bias)
    return result


def spans(splits: Splits) -> list[tuple[int, int, int]]:
    """Return (expert, first row, row after the last) for each expert that has rows."""
    assert splits.counts is not None
    return [span for span in spans_of(splits.counts) if span[1] < span[2]]


def input_gradient(grad: torch.Tensor, weight: torch.Tensor, operands: Operands) -> torch.Tensor:
    """Return the gradient of the input [rows, in], with zeros after the last expert's rows."""
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
    if isinstance(weight, QuantizedTensor) and has_backward_codes(weight):
        gradient = multiply_transposed(grad, weight, splits.offsets)
    else:
        if isinstance(weight, QuantizedTensor):
            weight = _align(values(weight, operands.dtype))
        gradient = _multiply_groups(_align(grad), weight, splits.offsets)
    return _zero_tail(gradient if gradient.shape[1] == features else gradient[:, :features].contiguous(), splits)


def weight_gradient(grad: torch.Tensor, x: torch.Tensor, operands: Operands) -> torch.Tensor:
    """Return the gradient of the weights [experts, out, in], with zeros for experts without rows."""
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
    gradient = _multiply_groups(_align(grad).t(), _align(x), splits.offsets)
    if x.device.type == "cuda" and capability_of(x.device.index)[0] > _WRITES_EMPTY:
        gradient.masked_fill_(splits.empty(), 0)
    return gradient[:, :out, :features].contiguous()


def bias_gradient(grad: torch.Tensor, operands: Operands) -> torch.Tensor:
    """Return the gradient of the biases [experts, out]: for each expert, the sum of its rows of `grad`.

    The sum is computed as a product with ones, which adds in float32 and in an order that does not change from run to
    run.
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
    gradient = _multiply_groups(ones.t(), _align(grad), splits.offsets)[:, 0, :out]
    if grad.device.type == "cuda" and capability_of(grad.device.index)[0] > _WRITES_EMPTY:
        return gradient.masked_fill(splits.empty().view(-1, 1), 0)
    return gradient.contiguous()


class Sink(Protocol):
    """Receiver of weight gradients that are not written to `.grad` at once: delayed gradients, and gradients for
    `main_grad`.
    """

    def take(self, pending: PendingGradients) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Accept pending gradients; return the gradients of weights and of biases that autograd must still receive."""


@dataclass(frozen=True, slots=True)
class PendingGradients:
    """The tensors from which delayed gradients of weights and biases are computed."""

    grad: torch.Tensor
    """Gradient of the output, [rows, out]."""
    x: torch.Tensor
    """The input, [rows, in]."""
    operands: Operands
    """Rows, dtypes and method of the product."""
    trained: tuple[bool, bool]
    """Two flags: whether weights are trained, and whether biases are trained."""

    def versions(self) -> tuple[int, ...]:
        """Return the version numbers of the saved tensors, which change if a tensor is changed in place."""
        return tuple(0 if tensor.is_inference() else tensor._version for tensor in (self.grad, self.x))

    def weight(self) -> torch.Tensor | None:
        """Return the gradient of the weights [experts, out, in]; None if the weights are not trained."""
        return weight_gradient(self.grad, self.x, self.operands) if self.trained[0] else None

    def bias(self) -> torch.Tensor | None:
        """Return the gradient of the biases [experts, out]; None if the biases are not trained."""
        return bias_gradient(self.grad, self.operands) if self.trained[1] else None


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings of one call of the product."""

    way: Way
    """How to multiply: by one grouped product of values, by one of codes, or by one product per expert."""
    features: tuple[int, int]
    """Number of output and of input features."""
    dtype: torch.dtype
    """Dtype of the product."""
    counts: tuple[int, ...] | None
    """Number of rows of each expert; None if only the device has these numbers."""
    weights: int
    """Number of parameters that are weights (one, or one per expert); the remaining parameters are biases."""
    original: bool = False
    """Whether to save the given input for backward, and not the cast or quantized input."""
    sink: Sink | None = None
    """Receiver of the gradients of weights; None means that autograd gets the gradients."""
    codes: QuantizedProducts | None = None
    """How inputs and gradients are quantized; None if the weights' recipe does not quantize them."""


class Product(torch.autograd.Function):
    """Autograd function that multiplies rows by their experts' weights."""

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
        """Return the product [rows, out].

        Args:
            ctx: context of autograd.
            inp: [rows, in]; may be quantized.
            offsets: for each expert, the row after its last row (see `Splits.offsets`).
            cached: an earlier result of `weights_of`; None means that the function is called.
            dgrad_out: buffer for the gradient of the input; None means that a buffer is allocated.
            setting: the settings of the call.
            *parameters: weights, then biases.
        """
        result, x = _multiply(inp, offsets, cached, setting, parameters)
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
        inp, offsets, *parameters = ctx.saved_tensors
        cached = parameters.pop(0) if ctx.has_cached else None
        weights = parameters[: setting.weights]
        x = values(inp, setting.dtype)
        operands = _operands(setting, offsets, x.shape[0])
        if cached is None and setting.way == SCALED and not isinstance(weights[0], QuantizedTensor):
            operands = replace(operands, way=GROUPED)  # a hook on saved tensors replaced the codes by values
        if setting.codes is not None:
            operands = replace(operands, codes=setting.codes.backward(weights))
        grad = grads[0].to(setting.dtype).contiguous()
        needed = ctx.needs_input_grad
        input_grad = None
        if needed[0]:
            input_grad = input_gradient(grad, weights_of(weights, operands) if cached is None else cached, operands)
        start = len(needed) - len(parameters)
        trained = any(needed[start : start + setting.weights]), any(needed[start + setting.weights :])
        pending = PendingGradients(grad, x, operands, trained)
        of_weights, of_biases = (
            (pending.weight(), pending.bias()) if setting.sink is None else setting.sink.take(pending)
        )
        if input_grad is not None and ctx.dgrad_out is not None:
            # The caller's buffer is written last, because it may share memory with the input or the output's gradient.
            input_grad = ctx.dgrad_out.copy_(input_grad)
        gradients = (*_split_gradient(of_weights, weights), *_split_gradient(of_biases, parameters[setting.weights :]))
        needed_gradients = (
            gradient if need else None for gradient, need in zip(gradients, needed[start:], strict=True)
        )
        return (input_grad, *(None,) * (start - 1), *needed_gradients)


def apply_product(
    inp: torch.Tensor,
    offsets: torch.Tensor,
    cached: torch.Tensor | None,
    dgrad_out: torch.Tensor | None,
    setting: Setting,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Return the product [rows, out] (see `Product.forward`). If no gradients are needed, autograd is bypassed.

    Args:
        inp: [rows, in]; may be quantized.
        offsets: for each expert, the row after its last row (see `Splits.offsets`).
        cached: an earlier result of `weights_of`; None means that the function is called.
        dgrad_out: buffer for the gradient of the input; None means that a buffer is allocated.
        setting: the settings of the call.
        weights: one parameter for all experts, or one per expert.
        biases: one parameter for all experts, one per expert, or none. Biases are small, so stacking them costs less
            than passing each bias to autograd.
    """
    stacked_biases = torch.stack(list(biases)) if len(biases) > 1 else None
    parameters = (*weights, *(biases if stacked_biases is None else (stacked_biases,)))
    if torch.is_grad_enabled():
        result: torch.Tensor = Product.apply(inp, offsets, cached, dgrad_out, setting, *parameters)  # type: ignore[no-untyped-call]
        return result
    return _multiply(inp, offsets, cached, setting, parameters)[0]


def _multiply(
    inp: torch.Tensor,
    offsets: torch.Tensor,
    cached: torch.Tensor | None,
    setting: Setting,
    parameters: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the product, and the cast or quantized input that was multiplied."""
    x = values(inp, setting.dtype)
    operands = _operands(setting, offsets, x.shape[0])
    weights, biases = parameters[: setting.weights], parameters[setting.weights :]
    weight = weights_of(weights, operands) if cached is None else cached
    bias = stack_values(biases, 2, setting.dtype) if biases else None
    return forward(x, weight, bias, operands), x


def _operands(setting: Setting, offsets: torch.Tensor, rows: int) -> Operands:
    splits = Splits(offsets, rows, setting.counts)
    return Operands(splits, setting.way, setting.features, setting.dtype, setting.codes)


def _split_gradient(grad: torch.Tensor | None, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Split a gradient over its parameters: a single parameter gets all of it, several get the slices of their
    experts.
    """
    if grad is None or not parameters:
        return [None] * len(parameters)
    if parameters[0].dim() == grad.dim():
        return [grad.to(parameters[0].dtype)]
    return list(grad.to(parameters[0].dtype).unbind(0))


_IGNORED = "_ddp_ignored"
"""Name of the attribute by which DistributedDataParallel marks parameters that it ignores."""


def refuse_data_parallel(parameters: Iterable[torch.Tensor]) -> None:
    """Refuse delayed gradients inside DistributedDataParallel, which reduces gradients before delayed gradients are
    computed.

    Args:
        parameters: the parameters with delayed gradients. Parameters that DDP ignores are accepted.

    Raises:
        Refused: with the code UNSUPPORTED if DistributedDataParallel would reduce a parameter.
    """
    if DistributedDataParallel._get_active_ddp_module() is None:
        return
    if any(each.requires_grad and not getattr(each, _IGNORED, False) for each in parameters):
        message = (
            "delay_wgrad_compute does not work in DistributedDataParallel: it reduces gradients before backward_dw()"
        )
        raise refuse("UNSUPPORTED", message, hint="Use fully_shard, or delay_wgrad_compute=False.")


def mesh_of(parameter: torch.Tensor) -> DeviceMesh | None:
    """Return the mesh of a parameter; None if the parameter is not a DTensor."""
    return parameter.device_mesh if isinstance(parameter, DTensor) else None


def place_gradient(grad: torch.Tensor, parameter: torch.Tensor, before: DeviceMesh | None) -> torch.Tensor:
    """Return a gradient with its parameter's present placements. All ranks must call this function if FSDP2 sharded the
    parameter after the product.

    The result is the mean over the mesh dims by which FSDP2 has sharded the parameter since the product. Each rank
    along these mesh dims has computed the gradient from its own rows only.

    Args:
        grad: gradient of everything that this rank multiplied, in the parameter's dtype.
        parameter: the parameter.
        before: mesh of the parameter during the product.
    """
    if not isinstance(parameter, DTensor):
        return grad
    local = _mean(grad, parameter, before).to(raw_local(parameter).device)
    return place_like(parameter, local)


def _mean(grad: torch.Tensor, parameter: DTensor, before: DeviceMesh | None) -> torch.Tensor:
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    old_names = () if before is None else before.mesh_dim_names or ()
    if before is not None and (before == mesh or not names):
        return grad
    added = [dim for dim in range(mesh.ndim) if before is None or names[dim] not in old_names]
    if not added:
        return grad
    over = mesh if len(added) == mesh.ndim else mesh[tuple(names[dim] for dim in added)]
    placements = [_within(parameter.placements[dim]) for dim in added]
    summed = as_dtensor(grad, over, [Partial()] * over.ndim, grad.shape, grad.stride())
    return summed.redistribute(placements=placements).to_local() / over.size()


def _within(placement: Placement) -> Placement:
    """Return the placement on a mesh dim as if it were the only one: FSDP2 cuts after expert and tensor parallelism
    have cut.
    """
    return Shard(placement.dim) if isinstance(placement, Shard | _StridedShard) else Replicate()
