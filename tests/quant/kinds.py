"""The quantizers that tests run over, and bytes to compare."""

from __future__ import annotations

import torch
from torch import nn

from tests.some import a
from transaxle.quant import (
    MXFP8,
    NVFP4,
    DelayedScaling,
    Float8Block,
    Float8CurrentScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    Quantizer,
)

KINDS: dict[str, Quantizer] = {
    "float8": Float8CurrentScaling(), "float8 delayed": DelayedScaling(length=4), "float8_block": Float8Block(),
    "mxfp8": MXFP8(), "nvfp4": NVFP4(),
}  # fmt: skip
"""One quantizer for each kind of scaling."""
MORE: dict[str, Quantizer] = {
    **KINDS,
    "float8, E5M2": Float8CurrentScaling(code="F8_E5M2"),
    "float8_block, 1x128": Float8Block(block=(1, 128)),
    "mxfp8, both ways": MXFP8(columnwise=True),
    "nvfp4, 16x16": NVFP4(square=True),
    "nvfp4, both ways": NVFP4(columnwise=True),
    "nvfp4, 16x16, both ways": NVFP4(square=True, columnwise=True),
    "nvfp4 training": NVFP4BlockScaling(),
}
"""Those and their variants."""


def values(rows: int, columns: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random numbers whose size differs from place to place, the largest of them last."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((rows, columns), generator=generator) * torch.exp2(torch.arange(rows).remainder(7) - 4)[:, None]
    x[-1, -1] = 1000 + seed
    return x.to(dtype)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a plain tensor."""
    assert type(tensor) is torch.Tensor
    whole = tensor.detach().contiguous()
    return (whole if whole.dim() else whole.reshape(1)).view(torch.uint8)


def same_state(first: nn.Module, second: nn.Module) -> bool:
    """Whether the state dicts of two modules have the same entries, byte by byte."""
    one, two = first.state_dict(), second.state_dict()
    return one.keys() == two.keys() and all(torch.equal(raw(one[n].detach()), raw(two[n].detach())) for n in one)


def same(first: object, second: object) -> bool:
    """Whether two quantized tensors have the same buffers, byte by byte."""
    one, two = a(QuantizedTensor, first).components, a(QuantizedTensor, second).components
    return one.keys() == two.keys() and all(torch.equal(raw(one[name]), raw(two[name])) for name in one)
