"""The random Hadamard transform of the operands of weight gradients.

Both operands are multiplied along what is summed up, 16 elements at a time, with an orthogonal matrix: exact products
stay the same, and outliers are spread over 16 elements before they are quantized. The signs are the sixteen that
TransformerEngine drew once (`pytorch/tensor/nvfp4_tensor.py`, `get_wgrad_sign_vector`), the same for every tensor, step
and rank, since both operands must have them.
"""

from __future__ import annotations

from math import sqrt

import torch

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
