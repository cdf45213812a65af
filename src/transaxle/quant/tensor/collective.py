"""Collectives on quantized tensors: codes, and scales that are cut with them, travel as bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from transaxle.errors import refuse
from transaxle.quant.frame.buffers import ORIGIN
from transaxle.quant.tensor.join import is_whole, refused
from transaxle.quant.tensor.tensor import QuantizedTensor

collectives = torch.ops._c10d_functional


def padded(tensor: QuantizedTensor, rows: int) -> QuantizedTensor:
    """Return a copy with rows of zeros at the end, so that it has the rows asked for."""

    def longer(buffer: torch.Tensor) -> torch.Tensor:
        with_padding = torch.zeros((rows, *buffer.shape[1:]), dtype=buffer.dtype, device=buffer.device)
        with_padding[: tensor.height].copy_(buffer)
        return with_padding

    frame = tensor.frame.taken(tensor.skip, tensor.height, torch.clone)
    cut = {name: longer(buffer) for name, buffer in frame.cut.items()}
    return QuantizedTensor(replace(frame, cut=cut, used=tensor.height), 0, rows, tensor.dtype)


def all_gather(tensor: QuantizedTensor, group_size: int, group: Any) -> QuantizedTensor:
    """Gather the rows of a matrix, or the matrices of a stack; every rank has equally many, padding is at the end.

    Scales of tiles of several rows are already on every rank.

    Raises:
        Refused: `BLOCK_MISALIGNED` for a view of another shape, or some of the columns; `UNSUPPORTED` for a part that
            tensor parallelism has cut.
    """
    frame = tensor.frame
    if not is_whole(tensor) or frame.band is not None:
        raise refused("all_gather", tensor, "it must be whole rows of a matrix")
    if frame.share is not None:
        raise refuse(
            "UNSUPPORTED",
            f"all_gather of {list(tensor.shape)}, which is a rank's part of {list(frame.share.shape)}",
            hint="Call full_tensor() on the entries of state_dict(), which are plain tensors, or use tx.save.",
        )
    cut = {}
    for name, buffer in frame.cut.items():
        if name != ORIGIN:
            own = buffer[tensor.skip : tensor.skip + tensor.height].contiguous().view(torch.uint8)
            gathered = collectives.wait_tensor(collectives.all_gather_into_tensor(own, group_size, group))
            cut[name] = gathered.view(buffer.dtype)
    shared = {name: buffer.clone() for name, buffer in frame.shared.items()}
    gathered = replace(frame, cut=cut, shared=shared, start=0, blank=False, used=None, of=None)
    return QuantizedTensor(gathered, 0, tensor.height * group_size, tensor.dtype)
