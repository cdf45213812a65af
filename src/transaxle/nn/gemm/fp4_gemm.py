"""Products of rows with the weights of their experts, all of whose operands are quantized to nvfp4.

Each expert's rows are a matrix of their own, with their own amax; so there is a product for each expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from transaxle.errors import refuse
from transaxle.quant import NVFP4BlockScaling, QuantizedTensor
from transaxle.quant.frame.frame import Frame
from transaxle.quant.frame.rounding_state import state_of, taken
from transaxle.quant.frame.tp_share import Share
from transaxle.quant.nvfp4.batch import Batch, current
from transaxle.quant.nvfp4.products import Products


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
