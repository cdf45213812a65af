"""Holding an opened checkpoint to tensors that torch gathered."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

import transaxle as tx
from tests.formats.dcp.peers.world import TRUTH, octets

CODES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.uint16: "U16",
    torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64", torch.uint64: "U64", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
    torch.float4_e2m1fn_x2: "F4", torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip

Tensors = Mapping[str, torch.Tensor]


def truth_of(place: Path) -> dict[str, torch.Tensor]:
    held: dict[str, torch.Tensor] = torch.load(place / TRUTH)
    return held


def hold(checkpoint: tx.Checkpoint, truth: Tensors) -> None:
    """Every tensor is there, of its type and shape, with its bytes, and nothing else is."""
    assert set(checkpoint) == set(truth)
    for name, tensor in truth.items():
        stored, shape = checkpoint[name], tuple(tensor.shape)
        if tensor.dtype == torch.float4_e2m1fn_x2:  # torch counts two as one
            shape = (*shape[:-1], 2 * shape[-1])
        assert (stored.dtype, stored.shape) == (CODES[tensor.dtype], shape), name
        assert stored.tobytes() == octets(tensor), name
