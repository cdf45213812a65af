"""The linear layer on quantized weights, forward and backward.

Where the device multiplies float8 (`scaled_mm`, from compute capability 8.9 on) and the weight has one scale, inputs
and gradients are quantized too, by current scaling, and all three products are float8 with float32 sums. Elsewhere the
weight is dequantized and multiplied in the input's dtype.

With the recipe `NVFP4BlockScaling` all operands of all three products are quantized, on every device.

What torch functions, as opposed to the operations below them, do with quantized tensors.

These are the few that would look at a tensor's storage, which is empty here, or that are no operations at all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from transaxle.encodings.encoding import FLOAT8, WHOLE
from transaxle.errors import refuse
from transaxle.quant import kernels
from transaxle.quant.frame import state_of, taken
from transaxle.quant.nvfp4 import Products, current
from transaxle.quant.quantized_tensor import FUNCTIONS, QuantizedTensor
from transaxle.quant.quantizers import NVFP4BlockScaling

_STEP = 16
"""Sizes of float8 products are multiples of this."""
_CAPABLE = (8, 9)
"""Compute capability from which there are float8 products."""


def multiplies(x: torch.Tensor, weight: QuantizedTensor) -> bool:
    """Whether the device can multiply this weight's codes directly."""
    matrix = weight.frame.matrix is None and weight.dim() == 2
    if not matrix or x.device.type != "cuda" or weight.frame.encoding.tile != (WHOLE, WHOLE):
        return False
    sizes = (x.numel() // max(x.shape[-1], 1), *weight.shape)
    capable = torch.cuda.get_device_capability(x.device) >= _CAPABLE
    return capable and weight.frame.encoding.code == FLOAT8.code and not any(size % _STEP for size in sizes)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `x @ weight.T + bias` in the input's dtype, or that of autocast; gradients are plain, also the weight's.

    Args:
        x: [..., K], plain.
        weight: [N, K], quantized. A plain one is multiplied as torch does.
        bias: [N].
    """
    if not isinstance(weight, QuantizedTensor):
        plain = x.dequantize() if isinstance(x, QuantizedTensor) else x
        return functional.linear(plain, weight, bias)
    with torch._C.DisableTorchFunctionSubclass():
        if torch.is_autocast_enabled(x.device.type):  # which sees nothing of a function's backward
            x = x.to(torch.get_autocast_dtype(x.device.type))
        recipe = weight.quantizer
        product: torch.Tensor
        if isinstance(recipe, NVFP4BlockScaling):
            product = _LinearOfCodes.apply(x, weight, _products(x, weight, recipe))  # type: ignore[no-untyped-call]
        else:
            product = _Linear.apply(x, weight)  # type: ignore[no-untyped-call]
        product = product.view(*x.shape[:-1], weight.shape[0])  # a view made in a function cannot be changed in place
        return product if bias is None else product + bias.to(product.dtype)


class _Linear(torch.autograd.Function):
    """Keeps the codes, not the values, between forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: QuantizedTensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        rows = x.reshape(-1, x.shape[-1])
        if multiplies(x, weight):
            product = _product(_codes(rows), (weight.components["data"], weight.components["scale_inv"]), x.dtype)
        else:
            product = rows @ weight.dequantize(x.dtype).t()
        return product

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors  # of values, where a hook like `save_on_cpu(pin_memory=True)` has copied them
        rows, grad = x.reshape(-1, x.shape[-1]), grads[0].reshape(-1, weight.shape[0])
        of_x, of_weight = ctx.needs_input_grad
        quick = isinstance(weight, QuantizedTensor) and multiplies(x, weight)
        codes = _codes(grad) if quick else None
        first = second = None
        if of_x and codes is not None:
            buffers = weight.components
            first = _product(codes, (kernels.transposed(buffers["data"]), buffers["scale_inv"]), x.dtype).view(x.shape)
        elif of_x:
            values = weight.dequantize(grad.dtype) if isinstance(weight, QuantizedTensor) else weight.to(grad.dtype)
            first = (grad @ values).view(x.shape)
        if of_weight and codes is not None:
            turned = kernels.transposed(codes[0]), codes[1]
            across = _codes(rows)
            second = _product(turned, (kernels.transposed(across[0]), across[1]), weight.dtype)
        elif of_weight:
            second = (grad.t() @ rows).to(weight.dtype)
        return first, second


class _LinearOfCodes(torch.autograd.Function):
    """Inputs and gradients are quantized as the recipe of the weight says."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: QuantizedTensor, products: Products) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.products, ctx.frame = products, weight.frame  # which counts: a hook may have put a copy into backward
        return products.output(_rows(x), weight.frame, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        if not isinstance(weight, QuantizedTensor):
            raise refuse(
                "UNSUPPORTED",
                "a hook on saved tensors has kept a weight's values in place of its codes, which backward multiplies",
                hint="Use save_on_cpu() without pin_memory.",
            )
        products, grad = ctx.products, grads[0].reshape(-1, weight.shape[0])
        state = None if state_of(ctx.frame) is None else taken(ctx.frame)
        of_x, of_weight, _ = ctx.needs_input_grad
        first = products.of_input(grad, weight.frame, state, x.dtype).view(x.shape) if of_x else None
        second = products.of_weight(grad, _rows(x), state, weight.dtype) if of_weight else None
        return first, second, None


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _products(x: torch.Tensor, weight: QuantizedTensor, recipe: NVFP4BlockScaling) -> Products:
    """Return the products with a weight.

    Raises:
        Refused: UNSUPPORTED for a view of a weight, and for a matrix that is not one.
    """
    frame = weight.frame
    if frame.matrix is not None or weight.dim() != 2 or (weight.skip, weight.height) != (0, frame.rows):
        raise refuse(
            "UNSUPPORTED", f"only a whole matrix can be multiplied by {recipe}, not {list(weight.shape)} of it"
        )
    batch = current()
    (first,) = batch.first_rows([x.numel() // max(x.shape[-1], 1)], x.device)
    return Products(recipe, frame.share, batch, first)


def _codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    quantized_x = kernels.quantize(x, FLOAT8)
    assert quantized_x.data is not None
    assert quantized_x.scale_inv is not None
    return quantized_x.data, quantized_x.scale_inv


def _product(
    left: tuple[torch.Tensor, torch.Tensor], right: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """Return left [M, K] times right [N, K] transposed, of codes with one scale each."""
    kind = functional.ScalingType.TensorWise
    return functional.scaled_mm(
        left[0], right[0].t(), left[1], kind, right[1], kind, output_dtype=dtype, use_fast_accum=False
    )


def _buffers(tensor: QuantizedTensor) -> list[torch.Tensor]:
    return [*tensor.frame.cut.values(), *tensor.frame.shared.values()]


def _share_memory(tensor: QuantizedTensor) -> QuantizedTensor:
    """Move all buffers to shared memory."""
    for buffer in _buffers(tensor):
        buffer.share_memory_()
    return tensor


def _is_shared(tensor: QuantizedTensor) -> bool:
    return all(buffer.is_shared() for buffer in _buffers(tensor))


def _set_item(tensor: torch.Tensor, index: Any, value: Any) -> None:
    """Copy into a view; what torch calls a view and is a copy here would swallow the values.

    Raises:
        Refused: `UNSUPPORTED` for elements, and rows of a matrix one at a time, whose values are copies.
    """
    if not isinstance(tensor, QuantizedTensor):
        with torch._C.DisableTorchFunctionSubclass():
            tensor[index] = value
        return
    target = tensor[index]
    if not isinstance(target, QuantizedTensor):
        raise refuse(
            "UNSUPPORTED",
            f"{tuple(target.shape)} of a quantized {tuple(tensor.shape)} cannot be assigned: this index gives a copy",
            hint="Assign to a slice of rows, or change the values that dequantize() gives and copy_() them back.",
        )
    given = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=tensor.dtype, device=tensor.device)
    target.copy_(given)


def _set_data(tensor: QuantizedTensor, other: torch.Tensor) -> None:
    """Take over what another tensor holds, as `Module.to` has parameters do.

    Values of another dtype, if they are those of the codes, leave these as they are; any others are quantized.

    Raises:
        Refused: `UNSUPPORTED` for other values of a part that tensor parallelism has cut: another rank may have none.
    """
    if not isinstance(other, QuantizedTensor):
        other = tensor.retyped(other)
    with torch._C.DisableTorchFunctionSubclass():
        tensor.data = other
    tensor.frame, tensor.skip, tensor.height = other.frame, other.skip, other.height


FUNCTIONS.update(
    {
        functional.linear: linear,
        torch.Tensor.share_memory_: _share_memory,
        torch.Tensor.is_shared: _is_shared,
        torch.Tensor.__setitem__: _set_item,
        torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    }
)
