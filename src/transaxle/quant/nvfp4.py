"""NVFP4 training: in every matrix product both operands are quantized, as in TransformerEngine's `NVFP4BlockScaling`.

A linear layer computes three products:

| product | left | right |
|---|---|---|
| output | input by rows | weight by rows |
| gradient of the input | gradient of the output by rows, stochastic rounding | weight by columns |
| gradient of the weight | gradient of the output by columns, transformed, stochastic rounding | input, transformed |

**Batches.** Outside of `batch_over`, a rank numbers its rows from 0 and scales by its own amax (largest absolute
value). Inside `batch_over`, the ranks of a group number their rows consecutively and share amaxes, so that codes equal
those of a single rank with all rows. If several ranks have the same columns of an output, each gets the full gradient
of these columns. But only one of the ranks with the same columns uses them for the gradient of the input, which is
summed over the ranks (`count_columns`).

**The random Hadamard transform.** Both operands of a weight gradient are multiplied along the summed dim, 16 elements
at a time, by an orthogonal matrix. Exact products stay the same, and outliers are spread over 16 elements before they
are quantized. The signs are the sixteen signs that TransformerEngine drew once (`pytorch/tensor/nvfp4_tensor.py`,
`get_wgrad_sign_vector`). The signs are the same for every tensor, step and rank, because the two operands must have
equal signs.

**Stochastic rounding to E2M1** rounds up with the probability with which the result equals the value on average. Scales
are those of rounding to nearest (`transaxle.encodings.arithmetic.scaling`); only the codes differ. A value between two
neighbouring codes becomes the one farther from zero if a random 32-bit word is below 2**32 times the value's fraction
of the step. So a value that equals a code becomes this code, and a value beyond the largest code becomes the largest
code.

**Products.** Hardware for NVFP4 multiplies codes scaled by the E4M3 scales of their tiles, accumulates in float32, and
scales the result by the two amaxes (TransformerEngine, `nvfp4_compute_per_tensor_scale`). In this module, codes times
scales are float64. These float64 values are multiples of 2**-10 below 2688, so sums of 1024 products are exact, and in
practice much longer sums too. The result depends neither on the order of the sum, nor on how rows or columns are cut.

**Philox4x32-10** computes random numbers from a key and a counter (J. Salmon, M. Moraes, R. Dror, D. Shaw, *Parallel
random numbers: as easy as 1, 2, 3*, SC 2011). The generator has no state: each element has the same random number on
any rank and in any order of drawing. 32-bit words are stored as int64, whose products wrap like unsigned products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from math import sqrt

import torch
import torch.distributed as dist
from torch.nn import functional

from transaxle.axes.geometry import Intervals
from transaxle.encodings.encoding import NVFP4
from transaxle.errors import refuse
from transaxle.quant import kernels
from transaxle.quant.frame import Frame
from transaxle.quant.global_scale import reduce_max
from transaxle.quant.kernels.components import Components
from transaxle.quant.quantizers import NVFP4BlockScaling
from transaxle.quant.tp_share import Share
from transaxle.torch_tensors import Ranks, read_group


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of a batch that this rank has, and the columns of the output that it adds to the input gradient."""

    group: dist.ProcessGroup | None = None
    """The ranks that have the rows of the batch, in row order; None if this rank has all rows."""
    counted: Intervals | None = None
    """Columns of the output that this rank uses for the input gradient; None means all columns that it has."""

    def first_rows(self, counts: Sequence[int], device: torch.device) -> list[int]:
        """Return, for each expert, the index of this rank's first row in the whole batch. All ranks of the batch must
        call this method.

        Args:
            counts: number of rows of each expert on this rank; without experts, one number for the whole input.
            device: device of the rows.
        """
        if self.group is None:
            return [0] * len(counts)
        local_counts = torch.tensor(counts, dtype=torch.int64, device=device)
        counts_of_ranks = local_counts.new_zeros((dist.get_world_size(self.group), len(counts)))
        counts_of_ranks[dist.get_rank(self.group)] = local_counts
        dist.all_reduce(counts_of_ranks, group=self.group)
        firsts: list[int] = counts_of_ranks[: dist.get_rank(self.group)].sum(0).tolist()
        return firsts


_CURRENT: ContextVar[Batch] = ContextVar("batch", default=Batch())  # noqa: B039 - it is frozen


def current_batch() -> Batch:
    """Return the batch to which the caller's inputs belong."""
    return _CURRENT.get()


def batch_over(group: Ranks) -> AbstractContextManager[None]:
    """Context manager: inside the block, inputs of NVFP4 layers are consecutive rows of one batch that a group of ranks
    shares.

    Amaxes of inputs and gradients are reduced over the group, and rows are numbered consecutively over the ranks. So
    codes equal, bit for bit, those of a single rank with the whole batch, if each rank has a multiple of 16 rows. Only
    forward must be inside the block; backward uses the same batch. Every rank of the group must call the same layers.

    Args:
        group: the ranks over which the batch is divided, as a process group or a mesh of one dim.

    Raises:
        Refused: with the code UNSUPPORTED if `group` is None.
    """
    ranks = read_group("group", group)
    if ranks is None:
        raise refuse("UNSUPPORTED", "batch_over needs the ranks that share the batch")
    return _inside(replace(current_batch(), group=ranks))


def count_columns(columns: Intervals) -> AbstractContextManager[None]:
    """Context manager: inside the block, only some columns of a layer's output are used for the gradient of its input.

    Args:
        columns: the columns of this rank's output that this rank uses; the remaining columns must be used by other
            ranks.
    """
    return _inside(replace(current_batch(), counted=columns))


@contextmanager
def _inside(batch: Batch) -> Iterator[None]:
    token = _CURRENT.set(batch)
    try:
        yield
    finally:
        _CURRENT.reset(token)


SIZE = 16
"""Number of elements that the random Hadamard transform multiplies together."""
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Diagonal of the transform's sign matrix: sixteen fixed random signs."""


def hadamard_matrix() -> torch.Tensor:
    """Return `diag(SIGNS) H / 4`, float64 [16, 16], where H is Sylvester's matrix; the elements are 1/4 and -1/4."""
    order = torch.ones((1, 1), dtype=torch.float64)
    while len(order) < SIZE:
        order = torch.cat([torch.cat([order, order], 1), torch.cat([order, -order], 1)])
    signs = torch.tensor(SIGNS, dtype=torch.float64)
    return signs[:, None] * order / sqrt(SIZE)


def apply_hadamard(x: torch.Tensor) -> torch.Tensor:
    """Multiply each 16 adjacent elements of a row by `hadamard_matrix()`; the result is bfloat16 for bfloat16 input,
    else float32.

    Sums are computed in float64, and then rounded to float32. In float64, sums of 16 bfloat16 or float16 numbers are
    exact if the numbers differ by less than a factor of 2**40. The result for float16 is float32, because it could
    overflow float16.

    Args:
        x: rows of a multiple of 16 elements, [..., 16 n].
    """
    parts = x.unflatten(-1, (x.shape[-1] // SIZE, SIZE)).double()
    sums: torch.Tensor = (parts @ hadamard_matrix().to(x.device)).float().flatten(-2)
    return sums.to(x.dtype) if x.dtype == torch.bfloat16 else sums


_LARGEST = 6.0
_TOP = 7
_SIGN = 8
_WORDS = 2.0**32
_FINEST = (2.0, 4.0)
"""Neighbouring E2M1 values are 1/2 apart below the first of these numbers, 1 apart up to the second, and 2 apart
beyond.
"""


def quantize(x: torch.Tensor, words: torch.Tensor, amax: torch.Tensor) -> Components:
    """Quantize the rows of a matrix to nvfp4 with stochastic rounding.

    Args:
        x: the matrix, [M, K] of bfloat16, float16 or float32; K must be even.
        words: for each element, a random number below 2**32, int64 [M, K].
        amax: amax of the whole tensor, float32 [1].
    """
    nearest = kernels.quantize(x, NVFP4, amax=amax)
    assert nearest.scale_inv is not None
    multiplier = _multiplier(nearest.scale_inv, amax).repeat_interleave(NVFP4.tile[1], 1)[:, : x.shape[1]]
    scaled = x.detach().float() * multiplier
    size = scaled.abs()
    size = torch.where(size <= _LARGEST, size, _LARGEST)  # NaN becomes the largest value, as in rounding to nearest
    codes = _codes(size, words) | torch.where(torch.signbit(scaled), _SIGN, 0)
    packed = (codes[:, ::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
    return replace(nearest, data=packed)


def _multiplier(scales: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Return the factor by which each tile's values are multiplied, computed in float32 as in the module `scaling`."""
    largest = torch.finfo(torch.float32).max
    limit = amax.new_tensor(largest)
    global_scale = torch.fmin(NVFP4.scale_max * NVFP4.code_max / amax, limit)
    global_scale = torch.where((amax == 0) | (global_scale == 0), 1.0, global_scale)
    return torch.fmin(1.0 / (scales.float() * (1.0 / global_scale)), limit)


def _codes(size: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return the codes (int64) for magnitudes from 0 to 6, rounded stochastically."""
    half, two = _FINEST
    step = torch.where(size < half, 0.5, torch.where(size < two, 1.0, 2.0))
    whole = (size / step).floor()
    fraction = size / step - whole  # exact, because the step is a power of two
    first = torch.where(size < half, 0, torch.where(size < two, 2, 4)).long()
    code = whole.long() + first
    up = words.double() < fraction.double() * _WORDS
    return (code + up).clamp(max=_TOP)


_TILE = NVFP4.tile[1]
_UNIT = float(NVFP4.scale_max * NVFP4.code_max)
"""The amax for which the global scale is 1. With this amax, values equal codes times block scales."""


@dataclass(frozen=True, slots=True)
class Operand:
    """The left or right operand of a product, quantized."""

    units: torch.Tensor
    """Codes times block scales, float64 [rows, summed dim]."""
    amax: torch.Tensor
    """Largest absolute value of the tensor, float32 [1]."""


def quantize_operand(
    x: torch.Tensor, groups: Sequence[dist.ProcessGroup | None] = (), words: torch.Tensor | None = None
) -> Operand:
    """Quantize an operand with tiles along its rows; the product sums along the rows.

    Args:
        x: the operand, [M, K].
        groups: process groups of ranks that have the remaining parts of the matrix; the amax is reduced over these
            groups.
        words: random numbers [M, K] for stochastic rounding; None means that values are rounded to nearest.
    """
    size = x.shape[1]
    full = functional.pad(x.detach(), (0, -size % _TILE))
    amax = reduce_max(kernels.amax(full), groups)
    if words is None:
        parts = kernels.quantize(full, NVFP4, amax=amax)
    else:
        parts = quantize(full, functional.pad(words, (0, full.shape[1] - size)), amax)
    return Operand(_units(parts)[:, :size], amax)


def transpose_operand(x: torch.Tensor, *, transform: bool) -> torch.Tensor:
    """Transpose a matrix to [K, M], so that products sum over its rows; M is padded with zeros to a multiple of 16.

    Args:
        x: the matrix, [M, K].
        transform: whether to apply the random Hadamard transform along the rows of the transpose.
    """
    turned = functional.pad(x.detach(), (0, 0, 0, -x.shape[0] % SIZE)).t().contiguous()
    return apply_hadamard(turned) if transform else turned


def weight_operand(frame: Frame, *, columnwise: bool = False) -> Operand:
    """Return a whole weight as operand [N, K], or as [K, N] with `columnwise`, from its columnwise codes if it has any.

    Raises:
        Refused: with the code UNSUPPORTED if the frame has only some rows of a weight.
    """
    if frame.rows != frame.whole:
        raise refuse(
            "UNSUPPORTED",
            f"{frame.rows} of {frame.whole} rows of a weight cannot be multiplied: their scales are of the whole",
            hint="Call the module that fully_shard was applied to, which gathers them.",
        )
    parts, encoding = frame.operands(0, frame.rows, columnwise=columnwise and frame.columnwise)
    assert parts.amax is not None
    values = kernels.dequantize(replace(parts, amax=torch.full_like(parts.amax, _UNIT)), encoding, torch.float32)
    units = values[:, : frame.columns].double()
    return Operand(units.t() if columnwise else units, parts.amax)


def product(left_operand: Operand, right_operand: Operand, dtype: torch.dtype) -> torch.Tensor:
    """Return left [M, K] times the transpose of right [N, K], rounded to float32 and then to `dtype`."""
    scale = left_operand.amax.double() * right_operand.amax.double() / _UNIT**2
    return ((left_operand.units @ right_operand.units.t()) * scale).float().to(dtype)


def _units(parts: Components) -> torch.Tensor:
    assert parts.amax is not None
    unit = replace(parts, amax=torch.full_like(parts.amax, _UNIT))
    return kernels.dequantize(unit, NVFP4, torch.float32).double()


_ROUNDS = 10
_FACTORS = (0xD2511F53, 0xCD9E8D57)
_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_BITS = 32
_LANES = 4
"""Number of random 32-bit words that are computed from one counter."""


def philox(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], key: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return four random words for each counter.

    Args:
        counter: the four words of each counter, as int64 tensors whose shapes can be broadcast.
        key: the two words of the key, as int64 tensors whose shapes can be broadcast with those of the counters.
    """
    first, second, third, fourth = counter
    low, high = key
    for _ in range(_ROUNDS):
        low_product, high_product = first * _FACTORS[0], third * _FACTORS[1]
        first, second, third, fourth = (
            _upper(high_product) ^ second ^ low,
            high_product & _WORD,
            _upper(low_product) ^ fourth ^ high,
            low_product & _WORD,
        )
        low, high = (low + _STEPS[0]) & _WORD, (high + _STEPS[1]) & _WORD
    return first, second, third, fourth


def _upper(product: torch.Tensor) -> torch.Tensor:
    return (product >> _BITS) & _WORD


def words(state: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, stream: int) -> torch.Tensor:
    """Return a random number for each element of a matrix, int64 [rows, columns], below 2**32.

    Element (r, c) is the word c % 4 that Philox computes from the counter (c // 4, r, calls, stream).

    Args:
        state: key and number of calls, int64 [2]; see `transaxle.quant.frame`.
        rows: indices of the rows, int64.
        columns: indices of the columns, int64.
        stream: index of the random stream; streams with different indices are independent.
    """
    key, calls = state[0], state[1]
    quads, places = torch.unique(columns // _LANES, return_inverse=True)
    counter = (quads & _WORD, rows[:, None] & _WORD, calls & _WORD, torch.full_like(calls, stream))
    four = torch.broadcast_tensors(*philox(counter, (key & _WORD, _upper(key))))
    lanes = torch.stack(four, -1).flatten(-2)
    return lanes[:, places * _LANES + columns % _LANES]


_BY_ROWS, _BY_COLUMNS = 0, 1
"""Indices of two random streams: for gradients quantized by rows, and for gradients quantized by columns."""
_OUT, _IN = -2, -1
"""Dims of a weight: `_OUT` is the dim of outputs, `_IN` the dim of inputs."""


@dataclass(frozen=True, slots=True)
class Products:
    """The three products with one weight [N, K], for a range of rows of a batch."""

    recipe: NVFP4BlockScaling
    """The weight's recipe, which enables the Hadamard transform and stochastic rounding."""
    share: Share | None = None
    """This rank's share of the weight, if tensor parallelism has cut it."""
    batch: Batch = field(default_factory=Batch)
    """The batch to which the rows of the input belong."""
    first: int = 0
    """Index of the input's first row in the batch."""

    def output(self, x: torch.Tensor, weight: Frame, dtype: torch.dtype) -> torch.Tensor:
        """Return the output [M, N] of an input [M, K]."""
        return product(quantize_operand(x, self._groups(_IN)), weight_operand(weight), dtype)

    def input_gradient(
        self, grad: torch.Tensor, weight: Frame, state: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the gradient of the input [M, K], given the gradient of the output [M, N]."""
        random = None if state is None else words(state, self._rows(grad), self._columns(grad), _BY_ROWS)
        operand = quantize_operand(grad, self._groups(_OUT), random)
        if self.batch.counted is not None:
            units = torch.zeros_like(operand.units)
            for start, stop in self.batch.counted:
                units[:, start:stop] = operand.units[:, start:stop]
            operand = replace(operand, units=units)
        return product(operand, weight_operand(weight, columnwise=True), dtype)

    def weight_gradient(
        self, grad: torch.Tensor, x: torch.Tensor, state: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the gradient of the weight [N, K], given the gradient of the output [M, N] and the input [M, K]."""
        transposed = transpose_operand(grad, transform=not self.recipe.disable_rht)
        random = (
            None if state is None else words(state, self._rows(transposed.t()), self._columns(grad), _BY_COLUMNS).t()
        )
        grad_operand = quantize_operand(transposed, self._groups(_OUT), random)
        input_operand = quantize_operand(transpose_operand(x, transform=not self.recipe.disable_rht), self._groups(_IN))
        return product(grad_operand, input_operand, dtype)

    def _groups(self, dim: int) -> tuple[dist.ProcessGroup | None, ...]:
        """Return the groups of ranks that have further parts of a matrix [batch rows, weight's `dim`] and use the same
        amax.
        """
        cut = self.share is not None and self.share.dim - len(self.share.shape) == dim
        return (self.batch.group, self.share.common if cut and self.share is not None else None)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        return torch.arange(self.first, self.first + x.shape[0], device=x.device)

    def _columns(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the indices of a gradient's columns among the columns of the whole output."""
        share = self.share
        if share is None or share.dim - len(share.shape) != _OUT:
            return torch.arange(grad.shape[1], device=grad.device)
        positions: Intervals = share.positions
        return torch.cat([torch.arange(start, stop, device=grad.device) for start, stop in positions])
