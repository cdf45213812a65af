"""Stacks of matrices, [E, M, K]: as many matrices, each quantized for itself, alone and under FSDP2."""

from __future__ import annotations

import copy
import pickle
from unittest.mock import Mock

import pytest
import torch

from tests.quant.kinds import KINDS, MORE, raw, same, values
from transaxle.quant import (
    MXFP8,
    Float8CurrentScaling,
    QuantizedTensor,
    Quantizer,
    from_components,
    kernels,
)

kinds = pytest.mark.parametrize("quantizer", MORE.values(), ids=MORE.keys())
SHAPES = ((3, 70, 144), (2, 256, 128), (1, 33, 64))
"""Matrices that are no whole tiles, that are, and one alone."""


def stack(count: int, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Matrices of different sizes of numbers."""
    return torch.stack([values(rows, columns, seed=seed + place) * 2**place for place in range(count)])


def matrices(quantizer: Quantizer, x: torch.Tensor) -> list[QuantizedTensor]:
    """Each matrix quantized alone."""
    return [quantizer.quantize(matrix) for matrix in x]


@kinds
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_stack_is_its_matrices(quantizer: Quantizer, shape: tuple[int, int, int]) -> None:
    x = stack(*shape)
    made, alone = quantizer.quantize(x), matrices(quantizer, x)
    assert (made.shape, made.dtype) == (torch.Size(shape), torch.bfloat16)
    for name, buffer in made.components.items():
        assert type(buffer) is torch.Tensor
        assert torch.equal(raw(buffer), torch.stack([raw(one.components[name]) for one in alone]))
    assert torch.equal(made.dequantize(torch.float32), torch.stack([one.dequantize(torch.float32) for one in alone]))
    again = from_components(quantizer, made.components, shape, torch.bfloat16)
    twins = again, torch.stack(list(alone)), copy.deepcopy(made), pickle.loads(pickle.dumps(made))  # noqa: S301 - ours
    for twin in (*twins, torch.cat([made[:1], made[1:]])):
        assert isinstance(twin, QuantizedTensor)
        assert same(made, twin)


@pytest.mark.parametrize("quantizer", [Float8CurrentScaling(), MXFP8()], ids=str)
def test_a_stack_is_dequantized_in_one_go(quantizer: Quantizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch on a GPU, not one for each expert."""
    made = quantizer.quantize(stack(5, 64, 96))
    wanted = torch.stack([one.dequantize() for one in made.unbind()])
    counted = Mock(wraps=kernels.dequantize)
    monkeypatch.setattr(kernels, "dequantize", counted)
    assert torch.equal(made.dequantize(), wanted)
    assert counted.call_count == 1


@kinds
def test_matrices_of_a_stack_are_views(quantizer: Quantizer) -> None:
    made, other = quantizer.quantize(stack(4, 70, 144)), quantizer.quantize(values(70, 144, seed=9))
    views = [*made, made[1], made[-1], made.chunk(2)[1][0], made.unbind(0)[0], made.narrow(0, 1, 2)[1]]
    for view, place in zip(views, (0, 1, 2, 3, 1, 3, 2, 0, 2), strict=True):
        assert isinstance(view, QuantizedTensor)
        assert same(view, quantizer.quantize(stack(4, 70, 144)[place]))
    for place in range(4):
        made[place].copy_(other)
        assert all(same(one, other) for one in made[: place + 1])
        assert not any(same(one, other) for one in made[place + 1 :])
    made[2:].copy_(values(70, 144, seed=3).expand(2, 70, 144))
    if not made.state:
        assert [same(one, other) for one in made] == [True, True, False, False]
        assert same([*made][3], quantizer.quantize(values(70, 144, seed=3)))


def test_columnwise_codes_that_a_matrix_lost_are_not_left_in_the_stack() -> None:
    made, other = MXFP8(columnwise=True).quantize(stack(2, 64, 64)), MXFP8().quantize(values(64, 64, seed=9))
    made[1].copy_(other)
    assert list(made.components) == ["data", "scale_inv"]
    made = MXFP8(columnwise=True).quantize(stack(2, 64, 64))
    made.copy_(MXFP8().quantize(stack(2, 64, 64, seed=5)))
    assert list(made.components) == ["data", "scale_inv"]


@kinds
def test_blank_stacks_are_filled_matrix_by_matrix(quantizer: Quantizer) -> None:
    made, x = quantizer.quantize(stack(3, 70, 144)), stack(3, 70, 144, seed=7)
    blank = torch.empty_like(made)
    for place in (1, 0, 2):
        blank[place].copy_(made[place])
    assert isinstance(blank, QuantizedTensor)
    assert same(blank, made)
    assert isinstance(blank.zero_(), QuantizedTensor)
    assert not blank.dequantize().any()
    blank = torch.empty_like(made)
    for place in range(3):
        blank[place].copy_(x[place])
    assert isinstance(blank, QuantizedTensor)
    assert same(blank, quantizer.quantize(x))


def test_histories_are_of_each_matrix() -> None:
    quantizer, steps = KINDS["float8 delayed"], [stack(2, 8, 32, seed=seed) * (1 + seed) for seed in range(3)]
    made, alone = quantizer.quantize(steps[0]), matrices(quantizer, steps[0])
    for x in steps[1:]:
        made.quantize_(x)
        for one, matrix in zip(alone, x, strict=True):
            one.quantize_(matrix)
    for one, view in zip(alone, made, strict=True):
        assert isinstance(view, QuantizedTensor)
        assert same(one, view)
        assert all(torch.equal(one.state[name], view.state[name]) for name in one.state)
