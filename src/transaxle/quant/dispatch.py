"""Defines what torch operations and functions do with quantized tensors; includes the quantized linear layer.

**Operations.** One table, `TABLE`, applies to all encodings. An operation is *raw* (codes and scales are moved, and the
result is quantized), *dequantizes* (the operation is applied to the values; the result is a plain tensor) or *raises*
an error. For an operation that is not in the table, its schema determines the class. An operation that writes into a
quantized tensor, or returns a view of one, raises, because the written values would be lost. Any other operation
outside of the table is applied to the dequantized values.

**Collectives** send codes as bytes, together with the scales that are cut like the codes.

**The linear layer**, forward and backward. If the device multiplies float8 (`scaled_mm`, from compute capability 8.9
on) and the weight has one scale, inputs and gradients are quantized too, by current scaling, and all three products are
float8 products with float32 sums. If the device cannot multiply float8, or the weight has several scales, the weight is
dequantized and multiplied in the input's dtype. With the recipe `NVFP4BlockScaling`, all operands of all three products
are quantized, on every device.

**Torch functions** above these operations are overridden only if they access a tensor's storage, which is empty in
quantized tensors, or if they are not implemented by operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from transaxle.encodings.encoding import FLOAT8, WHOLE
from transaxle.errors import refuse
from transaxle.quant import kernels
from transaxle.quant.frame import begin_rounding, blank, count_rounding, state_of
from transaxle.quant.joined_parts import cat, check_common, is_whole, refusal, stack
from transaxle.quant.nvfp4 import Products, current_batch
from transaxle.quant.quantizers import ORIGIN, STATE, NVFP4BlockScaling
from transaxle.quant.tensor import FUNCTIONS, OPERATIONS, QuantizedTensor
from transaxle.quant.tp_share import Band, tile_of
from transaxle.torch_tensors import with_plain_bytes


def pad_rows(tensor: QuantizedTensor, rows: int) -> QuantizedTensor:
    """Return a copy of a quantized tensor with rows of zeros appended, so that it has the given number of rows."""

    def pad_buffer(buffer: torch.Tensor) -> torch.Tensor:
        with_padding = torch.zeros((rows, *buffer.shape[1:]), dtype=buffer.dtype, device=buffer.device)
        with_padding[: tensor.height].copy_(buffer)
        return with_padding

    frame = tensor.frame.map_rows(tensor.skip, tensor.height, torch.clone)
    cut = {name: pad_buffer(buffer) for name, buffer in frame.cut.items()}
    return QuantizedTensor(replace(frame, cut=cut, used=tensor.height), 0, rows, tensor.dtype)


def all_gather(tensor: QuantizedTensor, group_size: int, group: Any) -> QuantizedTensor:
    """Gather the rows of a matrix, or the matrices of a stack, from all ranks; each rank sends equally many, padded at
    the end.

    Scales whose tiles span several rows are already on every rank, so they are not sent.

    Raises:
        Refused: with the code BLOCK_MISALIGNED for a view with a different shape or a range of columns; with the code
            UNSUPPORTED for a tensor that tensor parallelism has cut.
    """
    frame = tensor.frame
    if not is_whole(tensor) or frame.band is not None:
        raise refusal("all_gather", tensor, "it must be whole rows of a matrix")
    if frame.share is not None:
        raise refuse(
            "UNSUPPORTED",
            f"all_gather of {list(tensor.shape)}, which is a rank's part of {list(frame.share.shape)}",
            hint="Call full_tensor() on the entries of state_dict(), which are plain tensors, or use tx.save.",
        )
    cut = {}
    for name, buffer in frame.cut.items():
        if name != ORIGIN:
            local_rows = buffer[tensor.skip : tensor.skip + tensor.height].contiguous().view(torch.uint8)
            gathered = torch.ops._c10d_functional.wait_tensor(
                torch.ops._c10d_functional.all_gather_into_tensor(local_rows, group_size, group)
            )
            cut[name] = gathered.view(buffer.dtype)
    shared = {name: buffer.clone() for name, buffer in frame.shared.items()}
    gathered = replace(frame, cut=cut, shared=shared, start=0, blank=False, used=None, of=None)
    return QuantizedTensor(gathered, 0, tensor.height * group_size, tensor.dtype)


aten = torch.ops.aten
collectives = torch.ops._c10d_functional
_WAITS = ("wait_tensor", "_wrap_tensor_autograd")
"""Operations that wait for a functional collective; `_wrap_tensor_autograd` exists from torch 2.13 on."""
Class = Literal["raw", "dequantizes", "raises"]
"""Class of an operation: how it treats quantized tensors."""
Handler = Callable[..., Any]
_STACK = 3
"""Number of dims of a stack of matrices."""


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out an operation with quantized arguments.

    Raises:
        Refused: with the code UNSUPPORTED if the operation can use neither codes and scales nor values.
    """
    handler = TABLE.get(func)
    if handler is not None:
        return handler(*args, **kwargs)
    if func not in COPIES and operation_class(func, args, kwargs) == "raises":
        raise refuse(
            "UNSUPPORTED",
            f"{func} writes into a quantized tensor, or returns a view of one",
            hint="Call dequantize() first, and put values back with quantize_() or copy_().",
        )
    return _on_values(func, args, kwargs)


def operation_class(func: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Class:
    """Return how an operation treats quantized tensors; for some operations this depends on the arguments, which may be
    written to.
    """
    if func in TABLE:
        return "raw"
    if func in COPIES:
        return "dequantizes"
    arguments = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(
        kwargs or {}
    )
    for argument in func._schema.arguments:
        alias, value = argument.alias_info, arguments.get(argument.name)
        if alias is not None and _has_quantized(value) and (alias.is_write or _aliases_result(func, alias)):
            return "raises"
    return "dequantizes"


def _aliases_result(func: Any, alias: Any) -> bool:
    results = (result.alias_info for result in func._schema.returns)
    return any(result is not None and result.before_set & alias.before_set for result in results)


def _has_quantized(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(isinstance(item, QuantizedTensor) for item in value)
    return isinstance(value, QuantizedTensor)


def _on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    plain = tree_map_only(QuantizedTensor, lambda tensor: tensor.dequantize(), (args, kwargs))
    return func(*plain[0], **plain[1])


def _rows(tensor: QuantizedTensor, first: int, rows: int) -> QuantizedTensor:
    """Return a range of rows of a matrix as a view."""
    return QuantizedTensor(tensor.frame, tensor.skip + first, rows, tensor.dtype)


def _detach(tensor: QuantizedTensor) -> QuantizedTensor:
    return QuantizedTensor(tensor.frame, tensor.skip, tensor.height, tensor.dtype, tuple(tensor.shape))


def _view(tensor: QuantizedTensor, size: Sequence[int], **_: Any) -> QuantizedTensor:
    """Return a view of the same elements with a different shape."""
    fixed = prod(step for step in size if step != -1)
    shape = tuple(tensor.numel() // fixed if step == -1 and fixed else max(step, 0) for step in size)
    if prod(shape) != tensor.numel():
        raise refuse("SHAPE_MISMATCH", f"a tensor of shape {list(tensor.shape)} cannot be viewed as {list(size)}")
    return QuantizedTensor(tensor.frame, tensor.skip, tensor.height, tensor.dtype, shape)


def _as_strided(
    tensor: QuantizedTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> QuantizedTensor:
    columns, offset = tensor.frame.columns, storage_offset or 0
    adjacent = all(stride[dim] == prod(size[dim + 1 :]) or size[dim] <= 1 for dim in range(len(size)))
    if not adjacent or not columns or offset % columns or prod(size) % columns:
        raise refusal(
            "as_strided",
            tensor,
            f"size {list(size)} with strides {list(stride)} from {offset} does not select whole rows",
        )
    first, rows = offset // columns, prod(size) // columns
    if first + rows > tensor.height:
        raise refuse("SHAPE_MISMATCH", f"{prod(size)} elements from {offset} lie outside the tensor's {tensor.numel()}")
    return QuantizedTensor(tensor.frame, tensor.skip + first, rows, tensor.dtype, tuple(size))


def _slice(
    tensor: QuantizedTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> QuantizedTensor:
    along = dim % max(tensor.dim(), 1)
    first, last, _ = slice(start, end).indices(tensor.shape[along])
    size = max(last - first, 0)
    if step != 1:
        raise refusal("slice", tensor, f"the step must be 1, not {step}")
    if size == tensor.shape[along]:
        return _detach(tensor)
    if tensor.dim() == 1 and tensor.height != 1 and tensor.frame.columns:
        return _as_strided(tensor, (size,), (1,), first)
    if not is_whole(tensor):
        raise refusal("slice", tensor, "it is a view of another shape")
    if along == 0:
        return _rows(tensor, first, size)
    return _band(tensor, along, first, size)


def _select(tensor: QuantizedTensor, dim: int, index: int) -> torch.Tensor:
    """Return one matrix of a stack as a view; for any dim except the first, return dequantized values."""
    matrix = tensor.frame.matrix
    if matrix is None or dim % tensor.dim() or not is_whole(tensor):
        return cast(torch.Tensor, _on_values(aten.select.int, (tensor, dim, index), {}))
    if not -tensor.height <= index < tensor.height:
        raise IndexError(f"index {index} is out of range for a stack of {tensor.height} matrices")
    frame = tensor.frame.member(tensor.skip + index % tensor.height)
    return QuantizedTensor(frame, 0, matrix[0], tensor.dtype)


def _unbind(tensor: QuantizedTensor, dim: int = 0) -> list[torch.Tensor]:
    """Return the matrices of a stack as views."""
    if tensor.frame.matrix is None or dim % tensor.dim() or not is_whole(tensor):
        raise refusal("unbind", tensor, "only the matrices of a stack have scales of their own")
    return [_select(tensor, 0, place) for place in range(tensor.height)]


def _band(tensor: QuantizedTensor, dim: int, first: int, size: int) -> QuantizedTensor:
    """Return a range of columns, or of rows of every matrix of a stack, as a view; the range must consist of whole
    tiles.
    """
    frame, shape, last = tensor.frame, list(tensor.shape), first + size
    kind = "columns" if dim == tensor.dim() - 1 else "rows of each matrix"
    step = tile_of(tensor.quantizer, shape, dim, columnwise=frame.columnwise)
    if first % step or (last % step and last != shape[dim]):
        raise refusal("slice", tensor, f"{kind} {first} to {last} would cut tiles of {step}")
    old_band = frame.band
    if old_band is not None and old_band.dim != dim:
        raise refusal("slice", tensor, f"it is {old_band.size} of {old_band.whole} along dim {old_band.dim} already")
    cut = Band(dim, tensor.dim(), first, size, shape[dim])
    shape[dim] = size
    band_frame = replace(
        frame,
        columns=prod(shape[1:]),
        cut={name: cut.part(frame.quantizer, name, buffer) for name, buffer in frame.cut.items()},
        shared={name: cut.part(frame.quantizer, name, buffer) for name, buffer in frame.shared.items()},
        matrix=None if frame.matrix is None else (shape[1], shape[2]),
        blank=False,
        of=None,
        band=cut if old_band is None else replace(cut, start=old_band.start + first, whole=old_band.whole),
        used=frame.rows + 1,  # never reached, so no copy into the band counts as complete
    )
    return QuantizedTensor(band_frame, tensor.skip, tensor.height, tensor.dtype)


def _split(tensor: QuantizedTensor, size: int | Sequence[int], dim: int = 0) -> list[QuantizedTensor]:
    total = tensor.shape[dim]
    sizes = list(size) if not isinstance(size, int) else [min(size, total - at) for at in range(0, total, size)] or [0]
    parts, first = [], 0
    for step in sizes:
        parts.append(_slice(tensor, dim, first, first + step))
        first += step
    return parts


def _clone(tensor: QuantizedTensor, **_: Any) -> QuantizedTensor:
    return _map_buffers(tensor, lambda buffer: buffer.clone(memory_format=torch.contiguous_format))


def _map_buffers(tensor: QuantizedTensor, change: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedTensor:
    frame = tensor.frame.map_rows(tensor.skip, tensor.height, change)
    return QuantizedTensor(frame, 0, tensor.height, tensor.dtype, tuple(tensor.shape))


def _to_copy(
    tensor: QuantizedTensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Copy or move a tensor; the result is quantized unless the dtype changes, in which case it is a plain tensor."""
    target = tensor.device if device is None else torch.device(device)
    if dtype is not None and dtype != tensor.dtype:
        values = tensor.dequantize(dtype if dtype in (torch.bfloat16, torch.float16, torch.float32) else None)
        return values.to(device=target, dtype=dtype, non_blocking=non_blocking)

    def move_buffer(buffer: torch.Tensor) -> torch.Tensor:
        copy_on_target = buffer.to(target, non_blocking=non_blocking, copy=True).contiguous()
        return copy_on_target.pin_memory() if pin_memory else copy_on_target

    copy = _map_buffers(tensor, move_buffer)
    state = state_of(tensor.frame)
    # FSDP2 makes a copy with another dtype before it gathers.
    if state is not None and (tensor.device.type, target.type) == ("cpu", "cuda"):
        state_rows = state if tensor.frame.matrix is None else state[tensor.skip : tensor.skip + tensor.height]
        copy.frame.echoes = (*tensor.frame.echoes, state_rows)
    return copy


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy between two tensors, at least one of which is quantized."""
    if not isinstance(target, QuantizedTensor):
        assert isinstance(source, QuantizedTensor)
        exact = target.dtype if target.dtype in (torch.bfloat16, torch.float16, torch.float32) else None
        return target.copy_(source.dequantize(exact), non_blocking=non_blocking)
    if not isinstance(source, QuantizedTensor):
        return target.quantize_(source.expand(target.shape))
    if target.quantizer.encoding != source.quantizer.encoding:
        raise refuse(
            "DTYPE_MISMATCH",
            f"codes of {source.quantizer} cannot become codes of {target.quantizer}",
            hint="Copy source.dequantize() to quantize it again.",
        )
    if target.shape != source.shape or target.frame.row != source.frame.row:
        raise refuse(
            "SHAPE_MISMATCH", f"a tensor of {list(source.shape)} cannot be copied into one of {list(target.shape)}"
        )
    check_common(target, source)
    target.adopt(source.frame, source.skip, source.height)
    return target


def _zero(tensor: QuantizedTensor) -> QuantizedTensor:
    """Set the codes to zero, and the scales that are cut like them; shared scales only if no other rows use them."""
    for name, buffer in tensor.frame.cut.items():
        if name in STATE:
            continue
        rows = buffer[tensor.skip : tensor.skip + tensor.height]
        with_plain_bytes(rows).zero_()
    if tensor.skip == 0 and tensor.height >= (tensor.frame.used or tensor.frame.rows):
        fresh = blank(tensor.quantizer, (tensor.frame.whole, *tensor.frame.row), tensor.device)
        for name, old in tensor.frame.shared.items():
            if name not in STATE:
                old.copy_(fresh.shared.get(name, old))
    return tensor


def _new(tensor: QuantizedTensor, size: Sequence[int], device: Any, pin_memory: bool | None) -> QuantizedTensor:
    """Return a quantized tensor of zeros. A shape of three dims creates a stack of matrices. A shape of fewer dims
    creates one matrix whose rows have the length of the last dim; an empty shape creates a matrix with one element.

    If the new tensor has rows of the same length as the given tensor, and at most as many, the new tensor may become a
    part of the same matrix. So the new tensor gets the given tensor's position and shared buffers, because FSDP2 copies
    nothing into a rank that it leaves without rows.
    """
    shape = tuple(size) if len(size) == _STACK else (prod(size[:-1]), size[-1]) if size else (1, 1)
    target = tensor.device if device is None else torch.device(device)
    old = tensor.frame
    frame = blank(tensor.quantizer, shape, target, columnwise=old.columnwise)
    if frame.row == old.row and shape[0] <= old.whole:
        shared = blank(tensor.quantizer, (old.whole, *old.row), target, columnwise=old.columnwise).shared
        if old.device.type != "meta":
            shared = {name: buffer.to(target, copy=True) for name, buffer in old.shared.items()}
        start = old.start + tensor.skip if shape[0] == tensor.height else 0
        frame = replace(frame, whole=old.whole, shared=shared, start=start, share=old.share, band=old.band)
        frame.identity = old.identity
    if old.device.type == "meta":
        begin_rounding(frame)  # a meta tensor has no rounding state to copy
    if pin_memory:
        frame = replace(
            frame,
            cut={name: buffer.pin_memory() for name, buffer in frame.cut.items()},
            shared={name: buffer.pin_memory() for name, buffer in frame.shared.items()},
        )
    return QuantizedTensor(frame, 0, shape[0], tensor.dtype, tuple(size))


def _new_sized(
    tensor: QuantizedTensor,
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    pin_memory: bool | None = None,
    **_: Any,
) -> torch.Tensor:
    if dtype is not None and dtype != tensor.dtype:
        return torch.zeros(size, dtype=dtype, device=tensor.device if device is None else device)
    return _new(tensor, size, device, pin_memory)


def _empty_like(
    tensor: QuantizedTensor,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    pin_memory: bool | None = None,
    **_: Any,
) -> torch.Tensor:
    return _new_sized(tensor, tuple(tensor.shape), dtype=dtype, device=device, pin_memory=pin_memory)


def _is_pinned(tensor: QuantizedTensor, *_: Any, **__: Any) -> bool:
    return all(buffer.is_pinned() for buffer in tensor.frame.buffers(0, tensor.frame.rows).values())


def _pin(tensor: QuantizedTensor, *_: Any, **__: Any) -> QuantizedTensor:
    return _map_buffers(tensor, lambda buffer: buffer.contiguous().pin_memory())


def _pad(tensor: QuantizedTensor, pad: Sequence[int], value: float = 0) -> torch.Tensor:
    """Append rows of zeros, as DTensor does before a gather; any other padding is applied to dequantized values."""
    last = 2 * tensor.dim() - 1
    if len(pad) != last + 1 or any(pad[:last]) or pad[last] < 0 or value or not is_whole(tensor):
        return cast(torch.Tensor, _on_values(aten.constant_pad_nd.default, (tensor, pad, value), {}))
    return pad_rows(tensor, tensor.height + pad[last])


def _wait(tensor: QuantizedTensor) -> QuantizedTensor:
    """Return the result of a collective, which has already been waited for."""
    return tensor


TABLE: Mapping[Any, Handler] = MappingProxyType(
    {
        aten.detach.default: _detach,
        aten.alias.default: _detach,
        aten.view.default: _view,
        aten._unsafe_view.default: _view,
        aten.as_strided.default: _as_strided,
        aten.slice.Tensor: _slice,
        aten.split.Tensor: _split,
        aten.split_with_sizes.default: _split,
        aten.clone.default: _clone,
        aten._to_copy.default: _to_copy,
        aten.copy_.default: _copy,
        aten.zero_.default: _zero,
        aten.new_zeros.default: _new_sized,
        aten.new_empty.default: _new_sized,
        aten.empty_like.default: _empty_like,
        aten.select.int: _select,
        aten.unbind.int: _unbind,
        aten.cat.default: cat,
        aten.stack.default: stack,
        aten.is_pinned.default: _is_pinned,
        aten._pin_memory.default: _pin,
        aten.constant_pad_nd.default: _pad,
        collectives.all_gather_into_tensor.default: all_gather,
        **{getattr(collectives, name).default: _wait for name in _WAITS if hasattr(collectives, name)},
    }
)
"""Operation -> function that applies the operation to codes and scales."""

COPIES = frozenset({aten.t.default, aten.transpose.int, aten.permute.default, aten.expand.default})
"""Operations that return views in torch, but copies for quantized tensors: writing into the result does not change the
codes.
"""

OPERATIONS[:] = [run]


_STEP = 16
"""All sizes of a float8 product must be multiples of this number."""
_CAPABLE = (8, 9)
"""Lowest CUDA compute capability with float8 products."""


def multiplies(x: torch.Tensor, weight: QuantizedTensor) -> bool:
    """Return whether the input's device can multiply the weight's codes directly."""
    matrix = weight.frame.matrix is None and weight.dim() == 2
    if not matrix or x.device.type != "cuda" or weight.frame.encoding.tile != (WHOLE, WHOLE):
        return False
    sizes = (x.numel() // max(x.shape[-1], 1), *weight.shape)
    capable = torch.cuda.get_device_capability(x.device) >= _CAPABLE
    return capable and weight.frame.encoding.code == FLOAT8.code and not any(size % _STEP for size in sizes)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `x @ weight.T + bias` in the input's dtype, or in autocast's; all gradients are plain tensors.

    Args:
        x: the input, [..., K], a plain tensor.
        weight: the weight, [N, K], a quantized tensor; a plain weight is passed to torch's linear.
        bias: the bias, [N], or None.
    """
    if not isinstance(weight, QuantizedTensor):
        plain = x.dequantize() if isinstance(x, QuantizedTensor) else x
        return functional.linear(plain, weight, bias)
    with torch._C.DisableTorchFunctionSubclass():
        if torch.is_autocast_enabled(x.device.type):  # autocast does not apply to a custom function's backward
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
    """Linear product that saves codes, not values, between forward and backward."""

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
        x, weight = ctx.saved_tensors  # `save_on_cpu(pin_memory=True)` saves a weight's plain values
        rows, grad = x.reshape(-1, x.shape[-1]), grads[0].reshape(-1, weight.shape[0])
        needs_x, needs_weight = ctx.needs_input_grad
        float8 = isinstance(weight, QuantizedTensor) and multiplies(x, weight)
        codes = _codes(grad) if float8 else None
        input_grad = weight_grad = None
        if needs_x and codes is not None:
            buffers = weight.components
            input_grad = _product(codes, (kernels.transposed(buffers["data"]), buffers["scale_inv"]), x.dtype).view(
                x.shape
            )
        elif needs_x:
            values = weight.dequantize(grad.dtype) if isinstance(weight, QuantizedTensor) else weight.to(grad.dtype)
            input_grad = (grad @ values).view(x.shape)
        if needs_weight and codes is not None:
            transposed_grad = kernels.transposed(codes[0]), codes[1]
            input_codes = _codes(rows)
            weight_grad = _product(transposed_grad, (kernels.transposed(input_codes[0]), input_codes[1]), weight.dtype)
        elif needs_weight:
            weight_grad = (grad.t() @ rows).to(weight.dtype)
        return input_grad, weight_grad


class _LinearOfCodes(torch.autograd.Function):
    """Linear product whose inputs and gradients are quantized by the weight's recipe, like the weight itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: QuantizedTensor, products: Products) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        # The weight's frame contains the rounding counter. Hooks on saved tensors may pass backward a copy of the
        # weight.
        ctx.products, ctx.frame = products, weight.frame
        return products.output(_as_rows(x), weight.frame, x.dtype)

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
        state = None if state_of(ctx.frame) is None else count_rounding(ctx.frame)
        needs_x, needs_weight, _ = ctx.needs_input_grad
        input_grad = products.input_gradient(grad, weight.frame, state, x.dtype).view(x.shape) if needs_x else None
        weight_grad = products.weight_gradient(grad, _as_rows(x), state, weight.dtype) if needs_weight else None
        return input_grad, weight_grad, None


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _products(x: torch.Tensor, weight: QuantizedTensor, recipe: NVFP4BlockScaling) -> Products:
    """Return the object that computes the three products (forward and backward) with a weight.

    Raises:
        Refused: with the code UNSUPPORTED if the weight is a view, or is not a single matrix.
    """
    frame = weight.frame
    if frame.matrix is not None or weight.dim() != 2 or (weight.skip, weight.height) != (0, frame.rows):
        raise refuse(
            "UNSUPPORTED", f"only a whole matrix can be multiplied by {recipe}, not {list(weight.shape)} of it"
        )
    batch = current_batch()
    (first_row,) = batch.first_rows([x.numel() // max(x.shape[-1], 1)], x.device)
    return Products(recipe, frame.share, batch, first_row)


def _codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    quantized_x = kernels.quantize(x, FLOAT8)
    assert quantized_x.data is not None
    assert quantized_x.scale_inv is not None
    return quantized_x.data, quantized_x.scale_inv


def _product(
    left_operand: tuple[torch.Tensor, torch.Tensor],
    right_operand: tuple[torch.Tensor, torch.Tensor],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return left [M, K] times the transpose of right [N, K]; both operands are codes with one scale each."""
    kind = functional.ScalingType.TensorWise
    return functional.scaled_mm(
        left_operand[0],
        right_operand[0].t(),
        left_operand[1],
        kind,
        right_operand[1],
        kind,
        output_dtype=dtype,
        use_fast_accum=False,
    )


def _buffers(tensor: QuantizedTensor) -> list[torch.Tensor]:
    return [*tensor.frame.cut.values(), *tensor.frame.shared.values()]


def _share_memory(tensor: QuantizedTensor) -> QuantizedTensor:
    """Move all buffers of a quantized tensor to shared memory."""
    for buffer in _buffers(tensor):
        buffer.share_memory_()
    return tensor


def _is_shared(tensor: QuantizedTensor) -> bool:
    return all(buffer.is_shared() for buffer in _buffers(tensor))


def _set_item(tensor: torch.Tensor, index: Any, value: Any) -> None:
    """Assign values to an index that yields a view. An index that yields a copy is refused, because the values would be
    lost.

    Raises:
        Refused: with the code UNSUPPORTED for elements and single rows of a matrix, because indexing copies their
            values.
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
    values = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=tensor.dtype, device=tensor.device)
    target.copy_(values)


def _set_data(tensor: QuantizedTensor, source: torch.Tensor) -> None:
    """Replace the content of a quantized tensor by that of another tensor, as `Module.to` does with parameters.

    If plain values in a different dtype equal the dequantized values, the codes are kept; all other values are
    quantized.

    Raises:
        Refused: with the code UNSUPPORTED for new values of a tensor-parallel shard, because other ranks may have no
            new values.
    """
    if not isinstance(source, QuantizedTensor):
        source = tensor.with_dtype_of(source)
    with torch._C.DisableTorchFunctionSubclass():
        tensor.data = source
    tensor.frame, tensor.skip, tensor.height = source.frame, source.skip, source.height


FUNCTIONS.update(
    {
        functional.linear: linear,
        torch.Tensor.share_memory_: _share_memory,
        torch.Tensor.is_shared: _is_shared,
        torch.Tensor.__setitem__: _set_item,
        torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    }
)
