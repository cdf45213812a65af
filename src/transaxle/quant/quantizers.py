"""Quantizers: classes that define how a matrix is converted to codes and scales, one class for each kind of scaling.

A quantizer refers to an encoding of `transaxle.encodings`, and adds what the encoding does not define: how many
elements share an amax, whether there are codes for both directions, and whether scales are computed from current or
earlier values. A quantizer has no tensors; the encoding defines the arithmetic.

This module also lists the buffers of a quantized matrix: names, dtypes, shapes, and which buffers are cut when rows are
cut.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import torch

from transaxle.encodings import encoding as encodings
from transaxle.encodings.conventions.convention import ASIDE
from transaxle.encodings.encoding import Encoding
from transaxle.quant.kernels.components import columnwise_of, layout
from transaxle.torch_tensors import Ranks, read_group

if TYPE_CHECKING:
    from transaxle.quant.tensor import QuantizedTensor


_MAKER: list[Callable[..., QuantizedTensor]] = []
"""The function that creates quantized tensors; `transaxle.quant.tensor`, which imports this module, registers it."""


def makes_tensors(maker: Callable[..., QuantizedTensor]) -> Callable[..., QuantizedTensor]:
    """Decorator that registers a function as the one that `Quantizer.quantize` calls."""
    _MAKER[:] = [maker]
    return maker


Float8Code = Literal["F8_E4M3", "F8_E5M2"]
"""Safetensors code of a float8 dtype."""


class Quantizer(ABC):
    """Defines how a matrix is quantized: its encoding, and how scales are computed. Equal quantizers compute equal
    codes.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def encoding(self) -> Encoding:
        """The encoding (dtypes and arithmetic) of the codes and scales."""

    @property
    def over(self) -> tuple[int, int] | None:
        """Numbers of rows and columns that share an amax, if more than one tile; None if each tile has a
        separate amax.
        """
        return None

    @property
    def columnwise(self) -> bool:
        """Whether codes are computed both along rows and along columns."""
        return False

    @property
    def state_sizes(self) -> Mapping[str, int]:
        """Buffer name -> length, for float32 buffers with state for scaling the next values; empty if there is no
        state.
        """
        return {}

    @property
    def multiplies_codes(self) -> bool:
        """Whether inputs and gradients are quantized too, like the weights, in every product of a layer."""
        return False

    @property
    def rounding_seed(self) -> int | None:
        """Seed of the random numbers with which gradients are rounded; None if gradients are not rounded at random."""
        return None

    @property
    def grain(self) -> tuple[int, int]:
        """Numbers of rows and columns that share an amax; 0 means all rows or all columns of the matrix."""
        rows, columns = self.encoding.tile if self.over is None else self.over
        return rows, columns

    def quantize(
        self,
        x: torch.Tensor,
        *,
        group: Ranks | None = None,
        start: int | None = None,
        whole: int | None = None,
    ) -> QuantizedTensor:
        """Quantize a matrix, or the rows of a matrix that this rank has.

        Args:
            x: the matrix or its rows, [M, K] of bfloat16, float16 or float32.
            group: the ranks that have the rows of one matrix, in order. Amaxes are reduced over these ranks, so that
                codes and scales equal, bit for bit, those of the matrix quantized as a whole. Every rank must call this
                method.
            start: index of the first row of `x` in the whole matrix; None means that it is computed from the row counts
                of all ranks.
            whole: number of rows of the whole matrix; None means that it is computed from the row counts of all ranks.

        Raises:
            Refused: with the code DTYPE_MISMATCH, SHAPE_MISMATCH or UNSUPPORTED if the tensor cannot be quantized.
        """
        return _MAKER[0](self, x, group=read_group("group", group), start=start, whole=whole)


@dataclass(frozen=True, slots=True)
class Float8CurrentScaling(Quantizer):
    """Quantizer with one float32 scale for the tensor, computed from the tensor's current amax."""

    code: Float8Code = "F8_E4M3"
    """Dtype of the codes."""
    power_of_two: bool = False
    """Whether scales are powers of two."""

    @property
    def encoding(self) -> Encoding:
        """The encoding (dtypes and arithmetic) of the codes and scales."""
        return replace(encodings.FLOAT8, code=self.code, power_of_two=self.power_of_two)


@dataclass(frozen=True, slots=True)
class DelayedScaling(Quantizer):
    """Quantizer with one float32 scale for the tensor, computed from the largest amax of the tensor's latest
    quantizations.

    The first values are scaled by their own amax. Later values are scaled by the largest amax in the history; then
    their own amax replaces the oldest amax in the history. If the largest amax is zero, infinite or NaN, the scale does
    not change.
    """

    code: Float8Code = "F8_E4M3"
    """Dtype of the codes."""
    length: int = 1024
    """Number of amaxes in the history."""

    @property
    def encoding(self) -> Encoding:
        """The encoding (dtypes and arithmetic) of the codes and scales."""
        return replace(encodings.FLOAT8, code=self.code)

    @property
    def state_sizes(self) -> Mapping[str, int]:
        """Lengths of two buffers: the amax history, and the amax from which the next scale is computed."""
        return {"amax_history": self.length, "scaled_for": 1}


@dataclass(frozen=True, slots=True)
class Float8Block(Quantizer):
    """Quantizer with one float32 scale for each block of 128 x 128 elements (weights) or 1 x 128 (activations)."""

    block: tuple[int, int] = (128, 128)
    """Numbers of rows and columns of a block."""
    code: Float8Code = "F8_E4M3"
    """Dtype of the codes."""
    power_of_two: bool = True
    """Whether scales are powers of two."""

    @property
    def encoding(self) -> Encoding:
        """The encoding (dtypes and arithmetic) of the codes and scales."""
        return replace(encodings.FLOAT8_BLOCK, tile=self.block, code=self.code, power_of_two=self.power_of_two)


@dataclass(frozen=True, slots=True)
class MXFP8(Quantizer):
    """Quantizer with one E8M0 scale for every 32 elements of a row; with `columnwise`, also codes scaled along
    columns.
    """

    code: Float8Code = "F8_E4M3"
    """Dtype of the codes."""
    columnwise: bool = False
    """Whether to compute codes along columns in addition to codes along rows."""

    @property
    def encoding(self) -> Encoding:
        """The encoding (dtypes and arithmetic) of the codes and scales."""
        return replace(encodings.MXFP8, code=self.code)


@dataclass(frozen=True, slots=True)
class NVFP4(Quantizer):
    """Quantizer with 4-bit codes, one E4M3 scale for every 16 elements of a row, and one amax for the tensor.

    With `columnwise` there are also codes scaled along columns.
    """

    square: bool = False
    """Whether 16 x 16 elements share an amax, as in weights, so that the transpose has the same scales."""
    scale_max: int = 448
    """Upper limit of the block scales: 448, or 256 in the `4 over 6` variant."""
    columnwise: bool = False
    """Whether to compute codes along columns in addition to codes along rows."""

    @property
    def encoding(self) -> Encoding:
        """The encoding (dtypes and arithmetic) of the codes and scales."""
        return replace(encodings.NVFP4, scale_max=self.scale_max)

    @property
    def over(self) -> tuple[int, int] | None:
        """Numbers of rows and columns that share an amax, if more than one tile; None if each tile has a
        separate amax.
        """
        return (16, 16) if self.square else None


@dataclass(frozen=True, slots=True)
class NVFP4BlockScaling(Quantizer):
    """Quantizer for NVFP4 training: weights, inputs and gradients have 4-bit codes in all three products of a linear
    layer.

    The options have the names and defaults of TransformerEngine's recipe. Weights and inputs are rounded to nearest:
    weights with one scale per 16 x 16 elements, inputs with one scale per 16 elements along the summed dim. A random
    Hadamard transform is first applied to both operands of the weight gradient. Gradients are rounded stochastically.
    The random number for a gradient's element is computed from the seed, the weight's name, the number of gradients
    that the weight has had, and the element's row and column.
    """

    disable_rht: bool = False
    """Whether to omit the random Hadamard transform."""
    disable_stochastic_rounding: bool = False
    """Whether to round gradients to nearest instead of stochastically."""
    disable_2d_quantization: bool = False
    """Whether each scale of a weight applies to 16 elements of a row or column, instead of 16 x 16 elements."""
    seed: int = 0
    """Seed of the random numbers for stochastic rounding."""

    @property
    def encoding(self) -> Encoding:
        """The encoding (dtypes and arithmetic) of the codes and scales."""
        return encodings.NVFP4

    @property
    def over(self) -> tuple[int, int] | None:
        """Numbers of rows and columns that share an amax, if more than one tile; None if each tile has a
        separate amax.
        """
        return None if self.disable_2d_quantization else (16, 16)

    @property
    def columnwise(self) -> bool:
        """Whether codes are computed both along rows and along columns."""
        return self.disable_2d_quantization

    @property
    def multiplies_codes(self) -> bool:
        """Whether inputs and gradients are quantized too, like the weights, in every product of a layer."""
        return True

    @property
    def rounding_seed(self) -> int | None:
        """Seed of the random numbers with which gradients are rounded; None if gradients are not rounded at random."""
        return None if self.disable_stochastic_rounding else self.seed


QUANTIZERS: Mapping[str, type[Quantizer]] = MappingProxyType(
    {
        kind.__name__: kind
        for kind in (Float8CurrentScaling, DelayedScaling, Float8Block, MXFP8, NVFP4, NVFP4BlockScaling)
    }
)
"""Class name -> quantizer class; pickled tensors contain the class name."""


DATA = "data"
SCALE = "scale_inv"
AMAX = "amax"
COLUMN_DATA, COLUMN_SCALE, HISTORY, SCALED_FOR, ROUNDING = ASIDE
ORIGIN = "high_precision_init"
"""Name of the buffer with the values from which the first codes were computed, kept for master weights if requested."""
COMPONENTS = (DATA, SCALE, AMAX, COLUMN_DATA, COLUMN_SCALE)
"""Names of the buffers that determine a tensor's values, in the order of the encoding."""
STATE = (HISTORY, SCALED_FOR, ROUNDING)
"""Names of the buffers that determine how the next values are scaled (delayed scaling) or rounded (NVFP4 training)."""


def is_cut(encoding: Encoding, name: str, dims: int = 2) -> bool:
    """Return whether a buffer has one row for each row of the matrix; in a stack (3 dims), every buffer has one entry
    per matrix.
    """
    return dims > 2 or name in (DATA, COLUMN_DATA) or (name == SCALE and encoding.tile[0] == 1)


def tall(encoding: Encoding, *, columnwise: bool) -> bool:
    """Return whether some tiles have several rows, so that a cut between two rows may divide a tile."""
    return encoding.tile[0] > 1 or columnwise


def buffers_of(
    quantizer: Quantizer, shape: tuple[int, ...], *, columnwise: bool | None = None
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return buffer name -> (dtype, shape) for a matrix or a stack, including the buffers of state."""
    has_columnwise = quantizer.columnwise if columnwise is None else columnwise
    rows, columns = shape[-2:]
    buffers = layout(
        quantizer.encoding, (rows, columns), columnwise=has_columnwise and columnwise_of(quantizer.encoding) is not None
    )
    buffers |= {name: (torch.float32, (size,)) for name, size in quantizer.state_sizes.items()}
    if quantizer.rounding_seed is not None:
        buffers[ROUNDING] = torch.int64, (2,)
    return {name: (dtype, (*shape[:-2], *size)) for name, (dtype, size) in buffers.items()}
