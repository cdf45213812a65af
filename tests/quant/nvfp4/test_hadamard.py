"""The random Hadamard transform."""

from __future__ import annotations

import numpy as np
import torch

from tests.quant.nvfp4 import statement
from transaxle.quant.nvfp4 import hadamard_matrix, transpose_operand


def test_the_matrix_is_orthogonal() -> None:
    """Exactly, and entry by entry that of TransformerEngine."""
    found = hadamard_matrix().numpy()
    assert np.array_equal(found, statement.hadamard())
    assert np.array_equal(found @ found.T, np.eye(16))
    assert np.array_equal(found.T @ found, np.eye(16))


def test_rows_are_transformed_by_sixteens() -> None:
    """Of the transpose; rows that are missing are zeros, and bfloat16 stays bfloat16."""
    x = torch.randn((40, 6), generator=torch.Generator().manual_seed(1)).bfloat16()
    full = np.zeros((48, 6))
    full[:40] = x.double().numpy()
    wanted = statement.transformed(full, np.float32)
    found = transpose_operand(x, transform=True)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, torch.from_numpy(wanted).bfloat16())
    assert torch.equal(transpose_operand(x.float(), transform=True), torch.from_numpy(wanted))
    assert torch.equal(transpose_operand(x, transform=False).t()[:40], x)


def test_float16_does_not_overflow() -> None:
    """Sixteen large numbers add up to more than float16 has."""
    found = transpose_operand(torch.full((16, 1), 60000.0).half(), transform=True)
    assert found.dtype == torch.float32
    assert found.isfinite().all()
