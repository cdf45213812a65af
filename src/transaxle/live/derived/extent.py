"""Extents: where tensors lie in memory, by which it is proved that an entry of a state dict is a parameter itself.

An entry may as well be a copy: a fused weight cut in three, a buffer that is packed otherwise. What is written into a
copy is lost, and nothing else tells the two apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from transaxle.quant.modules.entries import entries, is_quantized
from transaxle.torch_tensors.local_tensor import TO_LOCAL, stored_local


@dataclass(frozen=True, slots=True)
class Extent:
    """The memory of a plain tensor."""

    storage: int
    """Identifies the storage; that of a meta tensor too, which has no memory. It is valid while the tensor lives."""
    start: int
    """First byte in it."""
    layout: tuple[Any, ...]
    """Shape, strides, type, and whether values are read conjugated or negated."""
    size: int
    """Bytes from the first to the last one, where the tensor has all that are between; else 0."""


def pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that this rank's part of a tensor is made of."""
    if is_quantized(tensor):
        return [_local(entry) for entry in entries(tensor).values()]
    plain, open_ = [], [_local(tensor)]
    while open_:
        outer = open_.pop()
        flatten = getattr(outer, "__tensor_flatten__", None)
        if flatten is None or type(outer) in (torch.Tensor, torch.nn.Parameter):
            plain.append(outer)
        else:
            open_ += [inner for name in flatten()[0] if isinstance(inner := getattr(outer, name), torch.Tensor)]
    return plain


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds; a wrapper that says so itself is asked, and nothing is made that has no need."""
    to_local = None if isinstance(tensor, DTensor) else getattr(tensor, TO_LOCAL, None)
    return stored_local(tensor) if to_local is None else to_local()


def extent(piece: torch.Tensor) -> Extent:
    """Return where a plain tensor lies; of one without a storage of its own, what identifies it."""
    kind = (tuple(piece.shape), piece.dtype, piece.device.type)
    try:
        storage = int(piece.untyped_storage()._cdata)
        strides = piece.stride()
    except (NotImplementedError, RuntimeError):  # sparse, or of a library that says nothing of its memory
        return Extent(id(piece), 0, kind, 0)
    item = piece.element_size()
    reads = (piece.is_conj(), piece.is_neg())
    size = piece.numel() * item if _dense(piece.shape, strides) and not any(reads) else 0
    live = tuple(stride for stride, length in zip(strides, piece.shape, strict=True) if length > 1)
    return Extent(storage, int(piece.storage_offset()) * item, (*kind, live, *reads), size)


def _dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements fill a range without holes, in whatever order."""
    expected = 1
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length > 1:
            if stride != expected:
                return False
            expected *= length
    return True


def filled_by(whole: Extent, parts: Iterable[Extent]) -> list[Extent] | None:
    """Return those of the parts that together are the whole, each byte once; None where there are none such.

    Args:
        whole: of a parameter.
        parts: of entries, each without holes.
    """
    inside = sorted(
        {
            part
            for part in parts
            if part.storage == whole.storage
            and part.size
            and whole.start <= part.start
            and part.start + part.size <= whole.start + whole.size
        },
        key=lambda part: part.start,
    )
    at = whole.start
    for part in inside:
        if part.start != at:
            return None
        at += part.size
    return inside if inside and at == whole.start + whole.size else None
