"""NVFP4 training: products of which all operands are quantized, as TransformerEngine's `NVFP4BlockScaling` makes them.

The three products of a linear layer whose operands are all quantized to nvfp4.

As TransformerEngine's `NVFP4BlockScaling` has them:

| product | left | right |
|---|---|---|
| output | input by rows | weight by rows |
| gradient of the input | gradient of the output by rows, rounded at random | weight by columns |
| gradient of the weight | gradient of the output by columns, transformed, rounded at random | input, transformed |

The batch that an input is a part of, where ranks have different rows of it.

By itself a rank numbers its rows from 0 and scales by its own amax, as if no other had rows. Inside `batch_over` the
ranks of a group do both together, so that each quantizes its rows as one rank would that has them all.

Where several ranks have the same columns of an output, all get the whole gradient of these, and one of them counts it
towards the gradient of the input, which is summed over the ranks (`counting`).

The random Hadamard transform of the operands of weight gradients.

Both operands are multiplied along what is summed up, 16 elements at a time, with an orthogonal matrix: exact products
stay the same, and outliers are spread over 16 elements before they are quantized. The signs are the sixteen that
TransformerEngine drew once (`pytorch/tensor/nvfp4_tensor.py`, `get_wgrad_sign_vector`), the same for every tensor, step
and rank, since both operands must have them.

**Stochastic rounding to E2M1**: up with the probability with which the result is the value on average.

Scales are those of rounding to nearest (`transaxle.encodings.arithmetic.scaling`); only the codes differ. A value
between two neighbours becomes the one farther from zero if a random word of 32 bits is below the fraction of the way
there, times 2**32. So a value that has a code keeps it, and what is beyond the largest code becomes that.

Operands of NVFP4 products, and the product.

The device that this is made for multiplies codes, each scaled by the E4M3 scale of its tile, sums up in float32, and
scales the result by the two amaxes (TransformerEngine, `nvfp4_compute_per_tensor_scale`). Here codes times scales are
float64. They are multiples of 2**-10 below 2688, so that sums of 1024 products are exact, and in practice far longer
ones: the result does not depend on the order of the sum, nor on how rows or columns were cut.

**Philox4x32-10**: random numbers that are a function of a key and a counter.

J. Salmon, M. Moraes, R. Dror, D. Shaw, *Parallel random numbers: as easy as 1, 2, 3* (SC 2011). No generator keeps a
state, so a number belongs to the element that it is drawn for, whichever rank draws it and in whatever order. Words of
32 bits are held in int64, whose products wrap as unsigned ones do.
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
    """Which rows of a batch are here, and which columns of the output count here."""

    group: dist.ProcessGroup | None = None
    """The ranks that have its rows, in order; None: all rows are here."""
    counted: Intervals | None = None
    """Columns of the output that this rank counts towards the gradient of the input; None: all that it has."""

    def first_rows(self, counts: Sequence[int], device: torch.device) -> list[int]:
        """Return, for each expert, the number of the first of its rows that is here. Collective.

        Args:
            counts: rows of each expert that are here; of a layer without experts, of the input.
            device: of the rows.
        """
        if self.group is None:
            return [0] * len(counts)
        own = torch.tensor(counts, dtype=torch.int64, device=device)
        ranks = own.new_zeros((dist.get_world_size(self.group), len(counts)))
        ranks[dist.get_rank(self.group)] = own
        dist.all_reduce(ranks, group=self.group)
        firsts: list[int] = ranks[: dist.get_rank(self.group)].sum(0).tolist()
        return firsts


_CURRENT: ContextVar[Batch] = ContextVar("batch", default=Batch())  # noqa: B039 - it is frozen


def current() -> Batch:
    """Return the batch that the caller's inputs are parts of."""
    return _CURRENT.get()


def batch_over(group: Ranks) -> AbstractContextManager[None]:
    """Context manager: inputs of NVFP4 layers are consecutive rows of one batch that the ranks of a group share.

    Amaxes of inputs and gradients are reduced over the group, and rows are numbered through, so that codes equal those
    of one rank with the whole batch, bit for bit, wherever each rank has a multiple of 16 rows. Only forward has to be
    inside; backward remembers. Every rank of the group has to call the same layers.

    Args:
        group: the ranks among which the batch is divided: a process group or a mesh of one dim.

    Raises:
        Refused: UNSUPPORTED without a group.
    """
    ranks = read_group("group", group)
    if ranks is None:
        raise refuse("UNSUPPORTED", "batch_over needs the ranks that share the batch")
    return _inside(replace(current(), group=ranks))


def counting(columns: Intervals) -> AbstractContextManager[None]:
    """Context manager: of a layer's output, only some columns count towards the gradient of its input.

    Args:
        columns: those of the output as it is here; other ranks count the rest.
    """
    return _inside(replace(current(), counted=columns))


@contextmanager
def _inside(batch: Batch) -> Iterator[None]:
    token = _CURRENT.set(batch)
    try:
        yield
    finally:
        _CURRENT.reset(token)


SIZE = 16
"""Elements that are transformed together."""
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The diagonal of random signs."""


def matrix() -> torch.Tensor:
    """Return `diag(SIGNS) H / 4`, float64 [16, 16], with Sylvester's H: orthogonal, of elements 1/4 and -1/4."""
    order = torch.ones((1, 1), dtype=torch.float64)
    while len(order) < SIZE:
        order = torch.cat([torch.cat([order, order], 1), torch.cat([order, -order], 1)])
    signs = torch.tensor(SIGNS, dtype=torch.float64)
    return signs[:, None] * order / sqrt(SIZE)


def transformed(x: torch.Tensor) -> torch.Tensor:
    """Return each 16 adjacent elements of a row times the matrix, as float32, and of bfloat16 as bfloat16.

    Sums are float64, in which 16 numbers of bfloat16 or float16 that differ by less than 2**40 are added exactly, and
    are rounded to float32. The transform of float16 could be too large for its type.

    Args:
        x: [..., 16 n].
    """
    parts = x.unflatten(-1, (x.shape[-1] // SIZE, SIZE)).double()
    sums: torch.Tensor = (parts @ matrix().to(x.device)).float().flatten(-2)
    return sums.to(x.dtype) if x.dtype == torch.bfloat16 else sums


_LARGEST = 6.0
_TOP = 7
_SIGN = 8
_WORDS = 2.0**32
_FINEST = (2.0, 4.0)
"""Values below the first lie 1/2 apart, below the second 1, and beyond it 2."""


def quantize(x: torch.Tensor, words: torch.Tensor, amax: torch.Tensor) -> Components:
    """Quantize a matrix by rows to nvfp4.

    Args:
        x: [M, K] of bfloat16, float16 or float32; K is even.
        words: a random number below 2**32 for each element, int64 [M, K].
        amax: the amax of the whole tensor, float32 [1].
    """
    nearest = kernels.quantize(x, NVFP4, amax=amax)
    assert nearest.scale_inv is not None
    multiplier = _multiplier(nearest.scale_inv, amax).repeat_interleave(NVFP4.tile[1], 1)[:, : x.shape[1]]
    scaled = x.detach().float() * multiplier
    size = scaled.abs()
    size = torch.where(size <= _LARGEST, size, _LARGEST)  # of NaN too, as rounding to nearest has it
    codes = _codes(size, words) | torch.where(torch.signbit(scaled), _SIGN, 0)
    packed = (codes[:, ::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
    return replace(nearest, data=packed)


def _multiplier(scales: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Return what values of each tile are multiplied by: the rule of `scaling`, an operation of float32 at a time."""
    most = torch.finfo(torch.float32).max
    limit = amax.new_tensor(most)
    whole = torch.fmin(NVFP4.scale_max * NVFP4.code_max / amax, limit)
    whole = torch.where((amax == 0) | (whole == 0), 1.0, whole)
    return torch.fmin(1.0 / (scales.float() * (1.0 / whole)), limit)


def _codes(size: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return the codes, int64, of magnitudes from 0 to 6."""
    half, one = _FINEST
    step = torch.where(size < half, 0.5, torch.where(size < one, 1.0, 2.0))
    whole = (size / step).floor()
    fraction = size / step - whole  # exact: the step is a power of two
    first = torch.where(size < half, 0, torch.where(size < one, 2, 4)).long()
    code = whole.long() + first
    up = words.double() < fraction.double() * _WORDS
    return (code + up).clamp(max=_TOP)


_TILE = NVFP4.tile[1]
_UNIT = float(NVFP4.scale_max * NVFP4.code_max)
"""The amax with which codes and scales give their product."""


@dataclass(frozen=True, slots=True)
class Operand:
    """One side of a product."""

    units: torch.Tensor
    """Codes times scales, float64 [rows, what is summed up]."""
    amax: torch.Tensor
    """Of the tensor, float32 [1]."""


def rounded(
    x: torch.Tensor, groups: Sequence[dist.ProcessGroup | None] = (), words: torch.Tensor | None = None
) -> Operand:
    """Quantize a matrix whose rows are summed up.

    Args:
        x: [M, K].
        groups: ranks that have other parts of the matrix, over which its amax is reduced.
        words: random numbers [M, K] to round by; None: to nearest.
    """
    size = x.shape[1]
    full = functional.pad(x.detach(), (0, -size % _TILE))
    amax = reduce_max(kernels.amax(full), groups)
    if words is None:
        parts = kernels.quantize(full, NVFP4, amax=amax)
    else:
        parts = quantize(full, functional.pad(words, (0, full.shape[1] - size)), amax)
    return Operand(_units(parts)[:, :size], amax)


def across(x: torch.Tensor, *, transform: bool) -> torch.Tensor:
    """Return the transpose [K, M] of a matrix, for sums over its rows, with zeros for rows up to a multiple of 16.

    Args:
        x: [M, K].
        transform: whether to apply the random Hadamard transform along the rows.
    """
    turned = functional.pad(x.detach(), (0, 0, 0, -x.shape[0] % SIZE)).t().contiguous()
    return transformed(turned) if transform else turned


def weight_operand(frame: Frame, *, columnwise: bool = False) -> Operand:
    """Return the codes of a whole weight [N, K]; with `columnwise` those for sums over N, if there are any, as [K, N].

    Raises:
        Refused: UNSUPPORTED for some rows of a weight: it is multiplied whole.
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


def product(left: Operand, right: Operand, dtype: torch.dtype) -> torch.Tensor:
    """Return left [M, K] times right [N, K] transposed, rounded to float32 and then to a dtype."""
    scale = left.amax.double() * right.amax.double() / _UNIT**2
    return ((left.units @ right.units.t()) * scale).float().to(dtype)


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
"""Words that one counter gives."""


def philox(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], key: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return four words for each counter.

    Args:
        counter: four words, int64 tensors of shapes that broadcast.
        key: two words, likewise.
    """
    first, second, third, fourth = counter
    low, high = key
    for _ in range(_ROUNDS):
        one, two = first * _FACTORS[0], third * _FACTORS[1]
        first, second, third, fourth = _upper(two) ^ second ^ low, two & _WORD, _upper(one) ^ fourth ^ high, one & _WORD
        low, high = (low + _STEPS[0]) & _WORD, (high + _STEPS[1]) & _WORD
    return first, second, third, fourth


def _upper(product: torch.Tensor) -> torch.Tensor:
    return (product >> _BITS) & _WORD


def words(state: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, stream: int) -> torch.Tensor:
    """Return a random word for each element of a matrix, int64 [rows, columns] below 2**32.

    Element (r, c) gets word c % 4 of the counter (c // 4, r, calls, stream).

    Args:
        state: key and number of calls, int64 [2]; see `transaxle.quant.frame`.
        rows: numbers of the rows, int64.
        columns: numbers of the columns, int64.
        stream: numbers of different streams are independent.
    """
    key, calls = state[0], state[1]
    quads, places = torch.unique(columns // _LANES, return_inverse=True)
    counter = (quads & _WORD, rows[:, None] & _WORD, calls & _WORD, torch.full_like(calls, stream))
    four = torch.broadcast_tensors(*philox(counter, (key & _WORD, _upper(key))))
    lanes = torch.stack(four, -1).flatten(-2)
    return lanes[:, places * _LANES + columns % _LANES]


_BY_ROWS, _BY_COLUMNS = 0, 1
"""Streams of random numbers."""
_OUT, _IN = -2, -1
"""Dims of a weight."""


@dataclass(frozen=True, slots=True)
class Products:
    """Products with one weight [N, K], of some rows of a batch."""

    recipe: NVFP4BlockScaling
    """What is transformed, and rounded at random."""
    share: Share | None = None
    """What the weight is a part of, where tensor parallelism has cut it."""
    batch: Batch = field(default_factory=Batch)
    """The ranks that have the other rows."""
    first: int = 0
    """Number of the first row in the batch."""

    def output(self, x: torch.Tensor, weight: Frame, dtype: torch.dtype) -> torch.Tensor:
        """Return the output [M, N] of an input [M, K]."""
        return product(rounded(x, self._groups(_IN)), weight_operand(weight), dtype)

    def of_input(
        self, grad: torch.Tensor, weight: Frame, state: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the gradient of the input [M, K], from that of the output [M, N]."""
        random = None if state is None else words(state, self._rows(grad), self._columns(grad), _BY_ROWS)
        left = rounded(grad, self._groups(_OUT), random)
        if self.batch.counted is not None:
            units = torch.zeros_like(left.units)
            for start, stop in self.batch.counted:
                units[:, start:stop] = left.units[:, start:stop]
            left = replace(left, units=units)
        return product(left, weight_operand(weight, columnwise=True), dtype)

    def of_weight(
        self, grad: torch.Tensor, x: torch.Tensor, state: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the gradient of the weight [N, K], from that of the output [M, N] and the input [M, K]."""
        turned = across(grad, transform=not self.recipe.disable_rht)
        random = None if state is None else words(state, self._rows(turned.t()), self._columns(grad), _BY_COLUMNS).t()
        left = rounded(turned, self._groups(_OUT), random)
        right = rounded(across(x, transform=not self.recipe.disable_rht), self._groups(_IN))
        return product(left, right, dtype)

    def _groups(self, dim: int) -> tuple[dist.ProcessGroup | None, ...]:
        """Return the ranks that have other parts of a matrix with the rows of the batch and a dim of the weight."""
        cut = self.share is not None and self.share.dim - len(self.share.shape) == dim
        return (self.batch.group, self.share.common if cut and self.share is not None else None)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        return torch.arange(self.first, self.first + x.shape[0], device=x.device)

    def _columns(self, grad: torch.Tensor) -> torch.Tensor:
        """Return which of all outputs the columns of a gradient are."""
        share = self.share
        if share is None or share.dim - len(share.shape) != _OUT:
            return torch.arange(grad.shape[1], device=grad.device)
        held: Intervals = share.held
        return torch.cat([torch.arange(start, stop, device=grad.device) for start, stop in held])
