"""The three products of a linear layer, against the statement, for every option of the recipe."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import functional

from tests.quant.nvfp4.statement import product, quantized, transformed, words
from tests.some import some
from transaxle.errors import TransaxleError
from transaxle.quant import NVFP4BlockScaling, QuantizedTensor, quantize_

OPTIONS = [
    {},
    {"disable_rht": True},
    {"disable_stochastic_rounding": True},
    {"disable_2d_quantization": True},
    {"disable_rht": True, "disable_stochastic_rounding": True, "disable_2d_quantization": True},
]
ROWS, OUT, IN = 32, 48, 64


def drawn(*sizes: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random numbers with outliers."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(sizes, generator=generator) ** 3).to(dtype)


def key_of(seed: int, name: str, number: int = 0) -> int:
    """The key of a weight: eight bytes of a hash of what it is called."""
    digest = blake2b(f"{seed}/{number}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def layer(recipe: NVFP4BlockScaling, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.nn.Linear:
    """A quantized layer."""
    made = torch.nn.Linear(IN, OUT, bias=False, dtype=dtype)
    with torch.no_grad():
        made.weight.copy_(drawn(OUT, IN, seed=seed, dtype=dtype))
    assert quantize_(made, recipe) == ["weight"]
    return made


def stated(
    x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, recipe: NVFP4BlockScaling, calls: int, key: int
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Output, gradient of the input and gradient of the weight, as TransformerEngine's recipe makes them."""
    a, g, w = (tensor.detach().double().numpy() for tensor in (x, grad, weight))
    kind = np.float32 if x.dtype == torch.float32 else ml_dtypes.bfloat16
    flat = recipe.disable_2d_quantization
    by_rows = quantized(w, (1, 16) if flat else (16, 16))
    by_columns = quantized(w.T, (1, 16) if flat else (16, 16))
    random: list[NDArray[np.uint64] | None] = [None, None]
    if not recipe.disable_stochastic_rounding:
        random = [words((key, calls), range(len(g)), range(OUT), stream) for stream in (0, 1)]
    turned = [part.T if recipe.disable_rht else transformed(part, kind) for part in (g, a)]
    left = quantized(turned[0], random=None if random[1] is None else random[1].T)
    return (
        product(quantized(a), by_rows),
        product(quantized(g, random=random[0]), by_columns),
        product(left, quantized(turned[1])),
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_products_are_those_of_the_statement(options: dict[str, bool], dtype: torch.dtype, device: str) -> None:
    """Bit for bit, in the first call and in the second, which has other random numbers."""
    recipe = NVFP4BlockScaling(**options, seed=9)
    made, source = layer(recipe, dtype).to(device), drawn(OUT, IN, seed=0, dtype=dtype)
    x, grad = drawn(ROWS, IN, seed=1, dtype=dtype), drawn(ROWS, OUT, seed=2, dtype=dtype)
    given = x.to(device).requires_grad_()
    for calls in range(2):
        output = made(given)
        of_x, of_weight = torch.autograd.grad(output, [given, made.weight], grad.to(device))
        wanted = stated(x, grad, source, recipe, calls, key_of(9, "weight"))
        for found, expected in zip((output.detach(), of_x, of_weight), wanted, strict=True):
            assert torch.equal(found.cpu(), torch.from_numpy(expected).to(dtype))


def test_sizes_that_are_no_multiples() -> None:
    """Rows, inputs and outputs are completed with zeros, which change nothing: so does the statement on larger ones."""
    recipe = NVFP4BlockScaling(disable_stochastic_rounding=True)
    made = torch.nn.Linear(20, 7, bias=False, dtype=torch.float32)
    source = drawn(7, 20, seed=3, dtype=torch.float32)
    with torch.no_grad():
        made.weight.copy_(source)
    quantize_(made, recipe)
    x = drawn(5, 20, seed=4, dtype=torch.float32).requires_grad_()
    grad = drawn(5, 7, seed=5, dtype=torch.float32)
    output = made(x)
    output.backward(grad)
    full_x, full_grad, full_weight = (
        functional.pad(part.detach(), (0, columns - part.shape[1], 0, rows - part.shape[0]))
        for part, rows, columns in ((x, 16, 32), (grad, 16, 16), (source, 16, 32))
    )
    wanted = stated(full_x, full_grad, full_weight, recipe, 0, 0)
    found = (output.detach(), some(x.grad), some(made.weight.grad))
    for one, expected, (rows, columns) in zip(found, wanted, ((5, 7), (5, 20), (7, 20)), strict=True):
        assert torch.equal(one, torch.from_numpy(expected)[:rows, :columns])


def test_inputs_of_any_shape() -> None:
    """Leading dims are rows; no rows make no numbers, and gradients of zeros."""
    made = layer(NVFP4BlockScaling())
    x = drawn(4, 8, IN, seed=1).requires_grad_()
    rows = x.detach().reshape(32, IN).requires_grad_()
    assert torch.equal(made(x).reshape(32, OUT), made(rows))
    none = torch.zeros((0, IN), dtype=torch.bfloat16, requires_grad=True)
    made(none).sum().backward()
    assert not some(made.weight.grad).any()


def test_what_is_not_a_whole_matrix_is_refused() -> None:
    """A view of some rows has scales of the whole, and a hook that keeps values leaves no codes to multiply."""
    made = layer(NVFP4BlockScaling())
    weight = made.weight
    with pytest.raises(TransaxleError, match="only a whole matrix"):
        functional.linear(drawn(ROWS, IN, seed=1), weight[:16])

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor

    with torch.autograd.graph.saved_tensors_hooks(kept, lambda tensor: tensor):
        output = made(drawn(ROWS, IN, seed=1).requires_grad_())
    with pytest.raises(TransaxleError, match="in place of its codes"):
        output.sum().backward()
