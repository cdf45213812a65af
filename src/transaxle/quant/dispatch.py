"""What torch operations do with quantized tensors: one table for all formats.

An operation is *raw* (codes and scales are moved, and the result is quantized), *dequantizes* (it gets the values, and
its result is a plain tensor) or *raises*. What the table does not name follows from its schema: an operation that
writes into a quantized tensor, or returns a view of one, raises, because what is written would be lost; any other one
dequantizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_map_only

from transaxle.errors import TransaxleError, refuse
from transaxle.quant.frame import DATA, ORIGIN, SCALE, STATE, blank
from transaxle.quant.tensor import QuantizedTensor, _same

aten = torch.ops.aten
Class = Literal["raw", "dequantizes", "raises"]
"""What an operation does."""
Handler = Callable[..., Any]


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do an operation some of whose arguments are quantized.

    Raises:
        Refused: UNSUPPORTED for what cannot be done on codes and scales, and not on values either.
    """
    handler = TABLE.get(func)
    if handler is not None:
        return handler(*args, **kwargs)
    if func not in COPIES and class_of(func, args, kwargs) == "raises":
        raise refuse(
            "UNSUPPORTED",
            f"{func} writes into a quantized tensor, or returns a view of one",
            hint="dequantize() first; quantize_() or copy_() put values back",
        )
    return _on_values(func, args, kwargs)


def class_of(func: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Class:
    """Return what an operation does, given the arguments that decide whether it writes into a quantized one."""
    if func in TABLE:
        return "raw"
    if func in COPIES:
        return "dequantizes"
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs or {})
    for argument in func._schema.arguments:
        alias, value = argument.alias_info, given.get(argument.name)
        if alias is not None and _quantized(value) and (alias.is_write or _returned(func, alias)):
            return "raises"
    return "dequantizes"


def _returned(func: Any, alias: Any) -> bool:
    results = (result.alias_info for result in func._schema.returns)
    return any(result is not None and result.before_set & alias.before_set for result in results)


def _quantized(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(isinstance(item, QuantizedTensor) for item in value)
    return isinstance(value, QuantizedTensor)


def _on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    plain = tree_map_only(QuantizedTensor, lambda tensor: tensor.dequantize(), (args, kwargs))
    return func(*plain[0], **plain[1])


def _rows(tensor: QuantizedTensor, first: int, rows: int) -> QuantizedTensor:
    """Some rows of a matrix, as a view."""
    return QuantizedTensor(tensor.frame, tensor.skip + first, rows, tensor.dtype)


def _is_matrix(tensor: QuantizedTensor) -> bool:
    return tuple(tensor.shape) == (tensor.height, tensor.frame.columns)


def _refused(what: str, tensor: QuantizedTensor, why: str) -> TransaxleError:
    return refuse(
        "BLOCK_MISALIGNED", f"{what} of {tuple(tensor.shape)} in {tensor.quantizer}: {why}", hint="dequantize() first"
    )


def _detach(tensor: QuantizedTensor) -> QuantizedTensor:
    return QuantizedTensor(tensor.frame, tensor.skip, tensor.height, tensor.dtype, tuple(tensor.shape))


def _view(tensor: QuantizedTensor, size: Sequence[int], **_: Any) -> QuantizedTensor:
    """Another shape of the same elements in the same order."""
    known = prod(step for step in size if step != -1)
    shape = tuple(tensor.numel() // known if step == -1 and known else max(step, 0) for step in size)
    if prod(shape) != tensor.numel():
        raise refuse("SHAPE_MISMATCH", f"a view of shape {list(size)} of {list(tensor.shape)}")
    return QuantizedTensor(tensor.frame, tensor.skip, tensor.height, tensor.dtype, shape)


def _as_strided(
    tensor: QuantizedTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> QuantizedTensor:
    columns, offset = tensor.frame.columns, storage_offset or 0
    adjacent = all(stride[dim] == prod(size[dim + 1 :]) or size[dim] <= 1 for dim in range(len(size)))
    if not adjacent or not columns or offset % columns or prod(size) % columns:
        raise _refused("as_strided", tensor, f"size {list(size)}, {list(stride)} from {offset} is not whole rows")
    first, rows = offset // columns, prod(size) // columns
    if first + rows > tensor.height:
        raise refuse("SHAPE_MISMATCH", f"{prod(size)} elements from {offset} of {tensor.numel()}")
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
        raise _refused("slice", tensor, f"a step of {step}")
    if size == tensor.shape[along]:
        return _detach(tensor)
    if tensor.dim() == 1 and tensor.height != 1 and tensor.frame.columns:
        return _as_strided(tensor, (size,), (1,), first)
    if not _is_matrix(tensor):
        raise _refused("slice", tensor, "it is a view of another shape")
    return _rows(tensor, first, size) if along == 0 else _columns(tensor, first, size)


def _columns(tensor: QuantizedTensor, first: int, size: int) -> QuantizedTensor:
    """Some columns, as a view: they have to be whole tiles."""
    frame, encoding = tensor.frame, tensor.frame.encoding
    step = max(tensor.quantizer.grain[1], encoding.tile[1])
    last = first + size
    if step and (first % step or (last % step and last != frame.columns)):
        raise _refused("slice", tensor, f"columns {first} to {last} cut tiles of {step}")
    per_byte = 8 // encoding.code_bits

    def cut(name: str, buffer: torch.Tensor) -> torch.Tensor:
        if name == DATA:
            return buffer[..., first // per_byte : last // per_byte]
        if name == SCALE:
            return buffer[..., first // step : -(-last // step)] if step else buffer
        return buffer[..., first:last] if name.startswith("columnwise") or name == ORIGIN else buffer

    made = replace(
        frame,
        columns=size,
        cut={name: cut(name, buffer) for name, buffer in frame.cut.items()},
        shared={name: cut(name, buffer) for name, buffer in frame.shared.items()},
        blank=False,
        used=frame.rows + 1,  # other columns are under the same scales: no copy into these covers them
    )
    return QuantizedTensor(made, tensor.skip, tensor.height, tensor.dtype)


def _split(tensor: QuantizedTensor, size: int | Sequence[int], dim: int = 0) -> list[QuantizedTensor]:
    total = tensor.shape[dim]
    sizes = list(size) if not isinstance(size, int) else [min(size, total - at) for at in range(0, total, size)] or [0]
    found, first = [], 0
    for step in sizes:
        found.append(_slice(tensor, dim, first, first + step))
        first += step
    return found


def _clone(tensor: QuantizedTensor, **_: Any) -> QuantizedTensor:
    return _changed(tensor, lambda buffer: buffer.clone(memory_format=torch.contiguous_format))


def _changed(tensor: QuantizedTensor, change: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedTensor:
    frame = tensor.frame.taken(tensor.skip, tensor.height, change)
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
    """A move or copy stays quantized; another dtype makes it a plain tensor."""
    target = tensor.device if device is None else torch.device(device)
    if dtype is not None and dtype != tensor.dtype:
        made = tensor.dequantize(dtype if dtype in (torch.bfloat16, torch.float16, torch.float32) else None)
        return made.to(device=target, dtype=dtype, non_blocking=non_blocking)

    def moved(buffer: torch.Tensor) -> torch.Tensor:
        there = buffer.to(target, non_blocking=non_blocking, copy=True).contiguous()
        return there.pin_memory() if pin_memory else there

    return _changed(tensor, moved)


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy between tensors of which at least one is quantized."""
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
            hint="copy source.dequantize() to quantize it again",
        )
    if target.shape != source.shape or target.frame.columns != source.frame.columns:
        raise refuse("SHAPE_MISMATCH", f"{list(source.shape)} into {list(target.shape)}")
    target.adopt(source.frame, source.skip, source.height)
    return target


def _zero(tensor: QuantizedTensor) -> QuantizedTensor:
    """Zeros: of the codes, of scales that are cut with them, and of the others where nothing else is under them."""
    for buffer in tensor.frame.cut.values():
        rows = buffer[tensor.skip : tensor.skip + tensor.height]
        (rows.view(torch.uint8) if buffer.dtype.itemsize == 1 else rows).zero_()
    if tensor.skip == 0 and tensor.height >= (tensor.frame.used or tensor.frame.rows):
        fresh = blank(tensor.quantizer, tensor.frame.whole, tensor.frame.columns, tensor.device)
        for name, old in tensor.frame.shared.items():
            if name not in STATE:
                old.copy_(fresh.shared.get(name, old))
    return tensor


def _new(tensor: QuantizedTensor, size: Sequence[int], device: Any, pin_memory: bool | None) -> QuantizedTensor:
    """A quantized tensor of zeros; its last dim is the row, and no dims are one element."""
    rows, columns = (prod(size[:-1]), size[-1]) if size else (1, 1)
    target = tensor.device if device is None else torch.device(device)
    frame = blank(tensor.quantizer, rows, columns, target, columnwise=tensor.frame.columnwise)
    if pin_memory:
        frame = replace(
            frame,
            cut={name: buffer.pin_memory() for name, buffer in frame.cut.items()},
            shared={name: buffer.pin_memory() for name, buffer in frame.shared.items()},
        )
    return QuantizedTensor(frame, 0, rows, tensor.dtype, tuple(size))


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


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Put matrices together along a dim that keeps tiles whole; with plain tensors among them, their values."""
    parts = [tensor for tensor in tensors if isinstance(tensor, QuantizedTensor)]
    if len(parts) < len(tensors):
        return torch.cat([t.dequantize() if isinstance(t, QuantizedTensor) else t for t in tensors], dim)
    first = parts[0]
    if any(part.quantizer.encoding != first.quantizer.encoding for part in parts) or not all(map(_is_matrix, parts)):
        raise _refused("cat", first, "the tensors are not matrices of one encoding")
    parts = [part for part in parts if part.numel()] or parts[:1]
    first = parts[0]
    return _cat_columns(parts) if dim % 2 else _cat_rows(parts)


def _cat_rows(parts: list[QuantizedTensor]) -> QuantizedTensor:
    first = parts[0]
    encoding, frame = first.frame.encoding, first.frame
    both = all(part.frame.columnwise for part in parts)
    held = [part.frame.buffers(part.skip, part.height) for part in parts]
    names = [name for name in held[0] if both or not name.startswith("columnwise")]
    cut = {name: torch.cat([one[name].view(torch.uint8) for one in held]) for name in names if name in frame.cut}
    cut = {name: buffer.view(held[0][name].dtype) for name, buffer in cut.items()}
    shared = {name: frame.shared[name] for name in names if name in frame.shared}
    rows = sum(part.height for part in parts)
    step = 32 if both else encoding.tile[0]
    alike = all(_same({n: part.frame.shared[n] for n in shared if n in part.frame.shared}, shared) for part in parts)
    ends = [part.frame.start + part.skip + part.height for part in parts]
    starts = [part.frame.start + part.skip for part in parts]
    if alike and starts[1:] == ends[:-1] and all(part.frame.whole == frame.whole for part in parts):
        start, whole = starts[0], frame.whole
    elif step > 1:
        complete = all(part.height == part.frame.whole for part in parts)
        if not complete or any(part.height % step for part in parts[:-1]):
            raise _refused("cat", first, f"tiles of {step} rows would not stay whole")
        start, whole = 0, rows
        shared = {name: torch.cat([part.frame.shared[name] for part in parts]) for name in shared}
    elif not alike:
        raise refuse(
            "UNEQUAL_COPIES",
            f"{len(parts)} tensors of {first.quantizer} under differing scales of whole tensors",
            hint="quantize them with one amax: quantize(x, group=...)",
        )
    else:
        start, whole = 0, rows
    made = replace(frame, cut=cut, shared={n: b.clone() for n, b in shared.items()}, start=start, whole=whole)
    return QuantizedTensor(replace(made, used=None, blank=False), 0, rows, first.dtype)


def _cat_columns(parts: list[QuantizedTensor]) -> QuantizedTensor:
    first = parts[0]
    frame, step = first.frame, max(first.quantizer.grain[1], first.frame.encoding.tile[1])
    place = (frame.start + first.skip, frame.whole, first.height)
    if any((part.frame.start + part.skip, part.frame.whole, part.height) != place for part in parts):
        raise _refused("cat", first, "the tensors are not the same rows")
    if step and any(part.frame.columns % step for part in parts[:-1]):
        raise _refused("cat", first, f"tiles of {step} columns would not stay whole")
    flat = [{n: b for n, b in part.frame.shared.items() if b.dim() == 1} for part in parts]
    if not all(_same(one, flat[0]) for one in flat):
        raise refuse("UNEQUAL_COPIES", f"{len(parts)} tensors of {first.quantizer} under differing scales")
    both = all(part.frame.columnwise for part in parts)
    held = [part.frame.buffers(part.skip, part.height) for part in parts]
    joined = {}
    for name, buffer in held[0].items():
        if both or not name.startswith("columnwise"):
            wide = buffer.dim() > 1
            joined[name] = (
                torch.cat([one[name].view(torch.uint8) for one in held], 1).view(buffer.dtype)
                if wide and buffer.dtype.itemsize == 1
                else torch.cat([one[name] for one in held], 1)
                if wide
                else buffer.clone()
            )
    made = replace(
        frame,
        columns=sum(part.frame.columns for part in parts),
        cut={name: buffer for name, buffer in joined.items() if name in frame.cut},
        shared={name: buffer for name, buffer in joined.items() if name in frame.shared},
        start=frame.start + first.skip,
    )
    return QuantizedTensor(replace(made, used=None, blank=False), 0, first.height, first.dtype)


def _is_pinned(tensor: QuantizedTensor, *_: Any, **__: Any) -> bool:
    return all(buffer.is_pinned() for buffer in tensor.frame.buffers(0, tensor.frame.rows).values())


def _pin(tensor: QuantizedTensor, *_: Any, **__: Any) -> QuantizedTensor:
    return _changed(tensor, lambda buffer: buffer.contiguous().pin_memory())


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
        aten.cat.default: _cat,
        aten.is_pinned.default: _is_pinned,
        aten._pin_memory.default: _pin,
    }
)
"""Operations on codes and scales."""

COPIES = frozenset({aten.t.default, aten.transpose.int, aten.permute.default, aten.expand.default, aten.select.int})
"""Operations that torch calls views and that give plain copies here: a write into one does not reach the codes."""
