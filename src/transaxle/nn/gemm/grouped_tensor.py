"""Grouped tensors: the matrices of N experts as one tensor of three dims, in one buffer.

The tensor itself is plain, a `QuantizedTensor`, or a DTensor of either, and is sharded, pickled, stacked and moved by
those classes. This module gives the view of it as N members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from transaxle.arguments import DType
from transaxle.errors import refuse
from transaxle.quant import QuantizedTensor, Quantizer
from transaxle.torch_tensors.local_tensor import stacked_view
from transaxle.torch_tensors.torch_arguments import Device, read_device, read_optional_dtype


@dataclass(frozen=True, slots=True)
class GroupedTensor:
    """N matrices of equal shape in one buffer, seen as one tensor [N, rows, columns] or as N members."""

    data: torch.Tensor
    """[N, rows, columns]: plain, quantized, or this rank's and others' parts of such a one."""

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
        """Make a grouped tensor of zeros.

        Args:
            num_tensors: N.
            shape: rows and columns of each.
            quantizer: how they are quantized; None: they are plain.
            device: where; None: torch's default.
            dtype: of the values; None: torch's default.
        """
        where, kind = read_device("device", device), read_optional_dtype("dtype", dtype)
        data = torch.zeros((num_tensors, *shape), device=where, dtype=kind)
        return cls(data if quantizer is None else quantizer.quantize(data))

    @classmethod
    def stack(cls, members: Sequence[torch.Tensor]) -> GroupedTensor:
        """Copy matrices into one buffer; quantized ones keep their codes and scales."""
        return cls(torch.stack(list(members)))

    @property
    def num_tensors(self) -> int:
        """Number of members."""
        return self.data.shape[0]

    @property
    def quantizer(self) -> Quantizer | None:
        """The quantizer that made the codes; None for plain members."""
        return self.data.quantizer if isinstance(self.data, QuantizedTensor) else None

    @property
    def quantized_tensors(self) -> list[torch.Tensor]:
        """The members as views: writing into one changes the buffer. Quantized members have their own scales."""
        return self.split_into_quantized_tensors()

    def split_into_quantized_tensors(self) -> list[torch.Tensor]:
        """Return the members, as views of the buffer."""
        return [self.data[place] for place in range(self.num_tensors)]


def stacked(parameters: Sequence[torch.Tensor], dims: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of parameters as one plain tensor, without a copy where they lie so.

    Args:
        parameters: one with a dim of experts, or one per expert.
        dims: of what is returned.
        dtype: of the values.
    """
    first = parameters[0]
    if first.dim() == dims:
        return values(first.detach(), dtype)
    if isinstance(first, QuantizedTensor):
        codes = torch.stack([parameter.detach() for parameter in parameters])  # raw, to be dequantized in one go
        if isinstance(codes, QuantizedTensor):
            return codes.dequantize(dtype)
    if isinstance(first, QuantizedTensor) or not adjacent(parameters):
        return torch.stack([values(parameter.detach(), dtype) for parameter in parameters])
    return stacked_view(first.detach(), len(parameters)).to(dtype)


def values(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a tensor, plain or quantized."""
    return x.dequantize(dtype) if isinstance(x, QuantizedTensor) else x.to(dtype)


def adjacent(parameters: Sequence[torch.Tensor]) -> bool:
    """Tell whether plain tensors of one shape lie one after the other in one buffer, as members of a grouped one do."""
    first = parameters[0]
    if torch.compiler.is_compiling() or type(first.data) is not torch.Tensor:
        return False  # nothing is known of addresses while a program is traced
    start, step, storage = first.data_ptr(), first.numel() * first.element_size(), first.untyped_storage()
    size = step * len(parameters)
    if not step or start + size > storage.data_ptr() + storage.nbytes():
        return False  # others may lie next to it in buffers of their own
    places = [parameter.data_ptr() for parameter in parameters]
    return places == list(range(start, start + size, step)) and all(
        parameter.is_contiguous() for parameter in parameters
    )
