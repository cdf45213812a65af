"""Grouped tensors: the matrices of N experts as one tensor of three dims, in one buffer.

The grouped tensor is unquantized, a `QuantizedTensor`, or a DTensor of either kind. Its own class shards, pickles,
stacks and moves the tensor. `GroupedTensor` provides the tensor as N members (matrices).

`Splits` describes how the rows of an input are divided among experts, without copying numbers from a device to the
host. Row counts on the host (a list, a CPU tensor) are checked. Row counts on a device are not checked, because the
host would have to wait. Instead, negative counts are treated as zero, and rows past the end of the input are ignored,
so every offset is valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import index
from typing import Any

import torch

from transaxle.arguments import DType
from transaxle.errors import refuse
from transaxle.quant import QuantizedTensor, Quantizer
from transaxle.torch_tensors import Device, read_device, read_optional_dtype, stack_view


@dataclass(frozen=True, slots=True)
class GroupedTensor:
    """N matrices of equal shape in one buffer, which are one tensor [N, rows, columns] and also N members."""

    data: torch.Tensor
    """The tensor [N, rows, columns]: unquantized, quantized, or a DTensor."""

    def __post_init__(self) -> None:
        if self.data.dim() != 3:
            raise refuse("SHAPE_MISMATCH", f"expected a tensor [tensors, rows, columns], got {list(self.data.shape)}")

    @classmethod
    def make_grouped_tensor(
        cls,
        num_tensors: int,
        shape: tuple[int, int],
        *,
        quantizer: Quantizer | None = None,
        device: Device | None = None,
        dtype: DType | None = None,
    ) -> GroupedTensor:
        """Create a grouped tensor of zeros.

        Args:
            num_tensors: number of members N.
            shape: rows and columns of each member.
            quantizer: quantizer of the members; None means that the members are not quantized.
            device: device of the buffer; None means torch's default.
            dtype: dtype of the values; None means torch's default.
        """
        where, kind = read_device("device", device), read_optional_dtype("dtype", dtype)
        data = torch.zeros((num_tensors, *shape), device=where, dtype=kind)
        return cls(data if quantizer is None else quantizer.quantize(data))

    @classmethod
    def stack(cls, members: Sequence[torch.Tensor]) -> GroupedTensor:
        """Copy matrices into one buffer; the codes and scales of quantized matrices are kept."""
        return cls(torch.stack(list(members)))

    @property
    def num_tensors(self) -> int:
        """Number of members (matrices)."""
        return self.data.shape[0]

    @property
    def quantizer(self) -> Quantizer | None:
        """The quantizer that computed the members' codes; None if the members are not quantized."""
        return self.data.quantizer if isinstance(self.data, QuantizedTensor) else None

    @property
    def quantized_tensors(self) -> list[torch.Tensor]:
        """The members as views of the buffer: writing into a member changes the buffer. Each quantized member has its
        own scales.
        """
        return self.split_into_quantized_tensors()

    def split_into_quantized_tensors(self) -> list[torch.Tensor]:
        """Return the members (matrices) as views of the buffer."""
        return [self.data[place] for place in range(self.num_tensors)]


def stack_values(parameters: Sequence[torch.Tensor], dims: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of parameters as one plain tensor, without a copy if they are adjacent in memory.

    Args:
        parameters: one parameter whose first dim numbers experts, or one parameter per expert.
        dims: number of dims of the result.
        dtype: dtype of the values.
    """
    first = parameters[0]
    if first.dim() == dims:
        return values(first.detach(), dtype)
    if isinstance(first, QuantizedTensor):
        codes = torch.stack([parameter.detach() for parameter in parameters])  # one kernel dequantizes all experts
        if isinstance(codes, QuantizedTensor):
            return codes.dequantize(dtype)
    if isinstance(first, QuantizedTensor) or not adjacent(parameters):
        return torch.stack([values(parameter.detach(), dtype) for parameter in parameters])
    return stack_view(first.detach(), len(parameters)).to(dtype)


def values(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of an unquantized or quantized tensor as a plain tensor."""
    return x.dequantize(dtype) if isinstance(x, QuantizedTensor) else x.to(dtype)


def adjacent(parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether plain tensors of one shape follow one another in one buffer, as members of a grouped tensor do."""
    first = parameters[0]
    if torch.compiler.is_compiling() or type(first.data) is not torch.Tensor:
        return False  # addresses are unknown while a program is traced
    start, step, storage = first.data_ptr(), first.numel() * first.element_size(), first.untyped_storage()
    size = step * len(parameters)
    if not step or start + size > storage.data_ptr() + storage.nbytes():
        return False  # the parameters are adjacent by chance, but are not in one storage
    places = [parameter.data_ptr() for parameter in parameters]
    return places == list(range(start, start + size, step)) and all(
        parameter.is_contiguous() for parameter in parameters
    )


INTEGERS = (torch.int32, torch.int64)
"""Accepted dtypes of row counts."""


@dataclass(frozen=True, slots=True)
class Splits:
    """The rows of each expert, which are consecutive and start with the first row of the input."""

    offsets: torch.Tensor
    """For each expert, the row after its last row; int32 [experts], on the device of the input."""
    rows: int
    """Number of rows of the input."""
    counts: tuple[int, ...] | None
    """Number of rows of each expert; None if only the device has these numbers."""

    @property
    def complete(self) -> bool:
        """Whether the host can verify that every row has an expert."""
        return self.counts is not None and sum(self.counts) == self.rows

    def experts(self) -> torch.Tensor:
        """Return the expert index of each row, int64 [rows]; for rows without an expert, the number of experts."""
        rows = torch.arange(self.rows, dtype=torch.int32, device=self.offsets.device)
        return torch.searchsorted(self.offsets, rows, right=True)

    def past(self) -> torch.Tensor:
        """Return a mask of the rows that belong to no expert, bool [rows, 1]."""
        rows = torch.arange(self.rows, dtype=torch.int32, device=self.offsets.device)
        return (rows >= self.offsets[-1:]).unsqueeze(1)

    def empty(self) -> torch.Tensor:
        """Return a mask of the experts without rows, bool [experts, 1, 1]."""
        before = torch.nn.functional.pad(self.offsets[:-1], (1, 0))
        return (self.offsets == before).view(-1, 1, 1)


def on_host(m_splits: Sequence[int] | torch.Tensor) -> bool:
    """Return whether the host may read row counts: they must be a list, or a CPU tensor outside of tracing.

    Tensors of other classes (fake or traced tensors) may have no values.
    """
    if not isinstance(m_splits, torch.Tensor):
        return True
    plain = type(m_splits) is torch.Tensor and m_splits.device.type == "cpu"
    return plain and not torch.compiler.is_compiling()


def splits(m_splits: Sequence[int] | torch.Tensor, experts: int, rows: int, device: torch.device) -> Splits:
    """Compute the offsets of the experts' rows from the number of rows of each expert.

    Args:
        m_splits: rows of each expert; a list or an int32 or int64 tensor on any device.
        experts: number of experts.
        rows: number of rows of the input.
        device: device of the input.

    Raises:
        Refused: with the code SHAPE_MISMATCH or DTYPE_MISMATCH if `m_splits` has a wrong shape or dtype; with the code
            SHAPE_MISMATCH if numbers on the host are negative or their sum exceeds the rows; with the code UNSUPPORTED
            if the numbers are on the host during capture of a CUDA graph.
    """
    if isinstance(m_splits, torch.Tensor):
        if m_splits.dtype not in INTEGERS:
            raise refuse("DTYPE_MISMATCH", f"m_splits must be {' or '.join(map(str, INTEGERS))}, not {m_splits.dtype}")
        if tuple(m_splits.shape) != (experts,):
            raise refuse(
                "SHAPE_MISMATCH",
                f"m_splits must have the shape [{experts}], one number per expert, not {list(m_splits.shape)}",
            )
        if not on_host(m_splits):
            # The clamped counts cannot overflow int64 when they are summed.
            ends = m_splits.to(device).clamp(0, rows).cumsum(0).clamp(max=rows)
            return Splits(ends.to(torch.int32), rows, None)
    counts = _numbers(m_splits.tolist() if isinstance(m_splits, torch.Tensor) else m_splits)
    _check(counts, experts, rows)
    return Splits(_copy_to_device(list(accumulate(counts)), device), rows, counts)


def _copy_to_device(ends: list[int], device: torch.device) -> torch.Tensor:
    """Copy offsets from the host to the device as int32; return before the copy has finished.

    Raises:
        Refused: with the code UNSUPPORTED during capture of a CUDA graph, because each replay of the graph would use
            the same numbers.
    """
    if device.type != "cuda" or torch.compiler.is_compiling():
        return torch.tensor(ends, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        message = (
            "m_splits is on the host while a CUDA graph is being captured; the graph would always use these numbers"
        )
        raise refuse("UNSUPPORTED", message, hint="Give m_splits as a tensor on the device.")
    return torch.tensor(ends, dtype=torch.int32, pin_memory=True).to(device, non_blocking=True)


def _numbers(m_splits: Sequence[Any]) -> tuple[int, ...]:
    """Return row counts as Python integers; fractions and booleans are refused.

    Raises:
        Refused: with the code DTYPE_MISMATCH if a row count is not an integer.
    """
    numbers: tuple[int, ...] = ()
    try:
        numbers = tuple(index(number) for number in m_splits)
        whole = not any(
            isinstance(number, bool) or (isinstance(number, torch.Tensor) and number.dtype == torch.bool)
            for number in m_splits
        )
    except TypeError:
        whole = False
    if not whole:
        raise refuse("DTYPE_MISMATCH", f"m_splits must be whole numbers, one per expert, not {m_splits!r}")
    return numbers


def _check(counts: tuple[int, ...], experts: int, rows: int) -> None:
    if len(counts) != experts:
        raise refuse("SHAPE_MISMATCH", f"m_splits must have {experts} numbers, one per expert, not {len(counts)}")
    for expert, count in enumerate(counts):
        if count < 0:
            raise refuse("SHAPE_MISMATCH", f"m_splits must not be negative, but has {count} rows for expert {expert}")
    if sum(counts) > rows:
        raise refuse("SHAPE_MISMATCH", f"m_splits sums to {sum(counts)}, but the input has only {rows} rows")


@torch.compiler.disable(reason="one product per expert needs m_splits on the host")  # type: ignore[untyped-decorator]
def read_back(m_splits: torch.Tensor, rows: int) -> tuple[int, ...]:
    """Copy row counts from the device to the host, which must wait for the device; limit them as `splits` does on the
    device.

    Raises:
        Refused: with the code UNSUPPORTED during capture of a CUDA graph, because the host then cannot wait for the
            device.
    """
    if m_splits.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise refuse(
            "UNSUPPORTED",
            "one product per expert needs m_splits on the host, but a CUDA graph is being captured",
            hint="Ask layer.path(x) why there is no grouped product, or give m_splits as a list.",
        )
    counts, remaining = [], rows
    for count in m_splits.tolist():
        counts.append(min(max(count, 0), remaining))
        remaining -= counts[-1]
    return tuple(counts)
