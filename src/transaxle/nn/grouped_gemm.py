"""The product of rows with the weights of their experts, and its gradients.

One `grouped_mm` where the path allows it, or a product of codes, else a product per expert; gradients of weights are
never products of codes. Between forward and backward nothing is kept but the input, the weights themselves (codes where
they are quantized) and the offsets.

Facts about torch's grouped product that this is built around: rows past the last offset are not written, strides must
be multiples of 16 bytes, gradients of stride 0 are refused, and on devices of compute capability 10 the gradient of an
expert without rows is not written (pytorch #172439).

Products of rows with the weights of their experts, all of whose operands are quantized to nvfp4.

Each expert's rows are a matrix of their own, with their own amax; so there is a product for each expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch.nn import functional

from transaxle.errors import refuse
from transaxle.nn.grouped_tensor import Splits, stacked, values
from transaxle.nn.kernel_choice import PER_EXPERT, SCALED, Way, back, backwards, capability_of, product, together
from transaxle.quant import NVFP4BlockScaling, QuantizedTensor
from transaxle.quant.frame import Frame, state_of, taken
from transaxle.quant.nvfp4 import Batch, Products, current
from transaxle.quant.tp_share import Share


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

    def of_input(self, grad: torch.Tensor, weight: QuantizedTensor, features: int) -> torch.Tensor:
        """Return the gradient of the input [rows, in]."""
        result = grad.new_zeros((grad.shape[0], features))
        for expert, rows, products, state in self._experts():
            result[rows] = products.of_input(grad[rows], weight.frame.member(weight.skip + expert), state, grad.dtype)
        return result

    def of_weight(self, grad: torch.Tensor, x: torch.Tensor, features: tuple[int, int]) -> torch.Tensor:
        """Return the gradient of the weights [experts, out, in]."""
        result = x.new_zeros((len(self.counts), *features))
        for expert, rows, products, state in self._experts():
            result[expert] = products.of_weight(grad[rows], x[rows], state, x.dtype)
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
        return replace(self, states=torch.cat([taken(frame).view(-1, 2) for frame in self.frames]))

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
    share, batch = first.frame.share, current()
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
    return weights if operands.way == PER_EXPERT else _aligned(_padded(weights, 1))


def _padded(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return a tensor with zeros at the end of a dim up to a whole number of steps of 16 bytes."""
    more = -x.shape[dim] % (_BYTES // x.element_size())
    return functional.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, more)) if more else x


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose rows are dense and begin at steps of 16 bytes, padded and copied if they are not."""
    x = _padded(x, x.dim() - 1)
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


def of_input(grad: torch.Tensor, weight: torch.Tensor, operands: Operands) -> torch.Tensor:
    """Return the gradient of the input [rows, in]; zeros past the last expert's rows."""
    splits, (out, features) = operands.splits, operands.features
    if operands.codes is not None and isinstance(weight, QuantizedTensor) and weight.numel():
        return operands.codes.of_input(grad, weight, features)
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


def of_weight(grad: torch.Tensor, x: torch.Tensor, operands: Operands) -> torch.Tensor:
    """Return the gradient of the weights [experts, out, in], zeros for experts without rows."""
    splits, (out, features) = operands.splits, operands.features
    experts = splits.offsets.shape[0]
    if operands.codes is not None and out and features and experts:
        return operands.codes.of_weight(grad, x, operands.features)
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


def of_bias(grad: torch.Tensor, operands: Operands) -> torch.Tensor:
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
