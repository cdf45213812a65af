"""Joins and splits quantized tensors without quantizing again: rows or columns of matrices, stacks, tensor-parallel
shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from transaxle.errors import TransaxleError, refuse
from transaxle.quant.frame import Frame, make_frame
from transaxle.quant.global_scale import stack_buffers
from transaxle.quant.kernels.components import columnwise_of
from transaxle.quant.quantizers import COLUMN_SCALE, COMPONENTS, ORIGIN, SCALE, STATE
from transaxle.quant.tensor import QuantizedTensor, same_buffers
from transaxle.quant.tp_share import Share


def is_whole(tensor: QuantizedTensor) -> bool:
    """Return whether a tensor has the shape of its buffers, and is not a view with a different shape."""
    return tuple(tensor.shape) == (tensor.height, *tensor.frame.row)


def refusal(operation: str, tensor: QuantizedTensor, reason: str) -> TransaxleError:
    """Return the error that refuses an operation because its result could not be stored as codes and scales."""
    return refuse(
        "BLOCK_MISALIGNED",
        f"{operation} of {tuple(tensor.shape)} in {tensor.quantizer}: {reason}",
        hint="Call dequantize() first.",
    )


def cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Concatenate tensors along a dim. The codes are kept if tiles stay whole; if some tensors are plain, the values of
    all are concatenated.
    """
    parts = [tensor for tensor in tensors if isinstance(tensor, QuantizedTensor)]
    if len(parts) < len(tensors):
        return torch.cat([t.dequantize() if isinstance(t, QuantizedTensor) else t for t in tensors], dim)
    first = parts[0]
    if any(part.quantizer.encoding != first.quantizer.encoding for part in parts) or not all(map(is_whole, parts)):
        raise refusal("cat", first, "the tensors must be matrices, or stacks, with one encoding")
    parts = [part for part in parts if part.numel()] or parts[:1]
    first = parts[0]
    if any(part.dim() != first.dim() for part in parts):
        raise refuse(
            "SHAPE_MISMATCH",
            f"cat needs tensors with as many dims, not {', '.join(str(list(part.shape)) for part in parts)}",
        )
    if not dim % first.dim():
        return _cat_rows(parts)
    if first.frame.matrix is not None:
        raise refusal("cat", first, "stacks can only be joined along their first dim")
    return _cat_columns(parts)


def stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Stack tensors: the codes if the tensors are matrices of one quantizer and `dim` is 0, otherwise the dequantized
    values.

    Raises:
        Refused: with the code BLOCK_MISALIGNED if an input is a range of rows that cuts a tile.
    """
    parts = [tensor for tensor in tensors if isinstance(tensor, QuantizedTensor)]
    first = parts[0]
    alike = all(
        (part.quantizer, part.dtype, part.shape) == (first.quantizer, first.dtype, first.shape)
        and part.frame.matrix is None
        and is_whole(part)
        for part in parts
    )
    if dim % (first.dim() + 1) or len(parts) < len(tensors) or not alike:
        plain = [tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor for tensor in tensors]
        return torch.stack(plain, dim)
    buffers_of_parts = [standalone_buffers(part) for part in parts]
    names = [name for name in buffers_of_parts[0] if all(name in of_part for of_part in buffers_of_parts)]
    buffers = {name: stack_buffers([of_part[name] for of_part in buffers_of_parts]) for name in names}
    shape = (len(parts), *first.shape)
    return QuantizedTensor(make_frame(first.quantizer, buffers, shape), 0, len(parts), first.dtype)


def standalone_buffers(part: QuantizedTensor) -> dict[str, torch.Tensor]:
    """Return the buffers of a range of rows in the form that they would have in a separate matrix."""
    frame, buffers = part.frame, part.frame.buffers(part.skip, part.height)
    first = frame.start + part.skip
    last = first + part.height
    for name in (SCALE, COLUMN_SCALE):
        buffer = frame.shared.get(name)
        if buffer is not None and buffer.dim() > 1:
            step = _step(frame, columnwise=name == COLUMN_SCALE)
            if first % step or (last % step and last != frame.whole):
                raise refusal("stack", part, f"rows {first} to {last} would cut tiles of {step} rows")
            buffers[name] = buffer[first // step : -(-last // step)]
    return buffers


def _cat_rows(parts: list[QuantizedTensor]) -> QuantizedTensor:
    first = parts[0]
    frame = first.frame
    has_columnwise = all(part.frame.columnwise for part in parts)
    buffers_of_parts = [part.frame.buffers(part.skip, part.height) for part in parts]
    names = [name for name in buffers_of_parts[0] if has_columnwise or not name.startswith("columnwise")]
    cut = {
        name: torch.cat([of_part[name].view(torch.uint8) for of_part in buffers_of_parts])
        for name in names
        if name in frame.cut
    }
    cut = {name: buffer.view(buffers_of_parts[0][name].dtype) for name, buffer in cut.items()}
    shared = {name: frame.shared[name] for name in names if name in frame.shared}
    rows = sum(part.height for part in parts)
    step = _step(frame, columnwise=has_columnwise)
    equal_shared = all(
        same_buffers({n: part.frame.shared[n] for n in shared if n in part.frame.shared}, shared) for part in parts
    )
    ends = [part.frame.start + part.skip + part.height for part in parts]
    starts = [part.frame.start + part.skip for part in parts]
    share = None
    if equal_shared and starts[1:] == ends[:-1] and all(part.frame.whole == frame.whole for part in parts):
        start, whole, share = starts[0], frame.whole, frame.share
    elif step > 1 and frame.matrix is None:
        complete = all(part.height == part.frame.whole for part in parts)
        if not complete or any(part.height % step for part in parts[:-1]):
            raise refusal("cat", first, f"tiles of {step} rows would not stay whole")
        single = {name: buffer for name, buffer in shared.items() if buffer.dim() == 1}
        if not all(same_buffers({name: part.frame.shared[name] for name in single}, single) for part in parts):
            raise _unequal_scales(parts)
        start, whole = 0, rows
        shared |= {n: torch.cat([part.frame.shared[n] for part in parts]) for n in shared if n not in single}
    elif not equal_shared:
        raise _unequal_scales(parts)
    else:
        start, whole = 0, rows
    joined = replace(frame, cut=cut, shared={n: b.clone() for n, b in shared.items()}, start=start, whole=whole)
    return QuantizedTensor(replace(joined, used=None, blank=False, of=None, share=share), 0, rows, first.dtype)


def _step(frame: Frame, *, columnwise: bool) -> int:
    """Return the number of rows of one tile, for the columnwise or the rowwise codes."""
    encoding = columnwise_of(frame.encoding) if columnwise else frame.encoding
    assert encoding is not None
    return encoding.tile[0]


def _unequal_scales(parts: list[QuantizedTensor]) -> TransaxleError:
    return refuse(
        "UNEQUAL_COPIES",
        f"the {len(parts)} tensors of {parts[0].quantizer} have different global scales; the result can have only one",
        hint="Quantize them with one amax: quantize(x, group=...).",
    )


def _cat_columns(parts: list[QuantizedTensor]) -> QuantizedTensor:
    first = parts[0]
    frame, step = first.frame, max(first.quantizer.grain[1], first.frame.encoding.tile[1])
    row_range = (frame.start + first.skip, frame.whole, first.height)
    if any((part.frame.start + part.skip, part.frame.whole, part.height) != row_range for part in parts):
        raise refusal("cat", first, "the tensors must be columns of the same rows")
    if step and any(part.frame.columns % step for part in parts[:-1]):
        raise refusal("cat", first, f"tiles of {step} columns would not stay whole")
    flat = [{n: b for n, b in part.frame.shared.items() if b.dim() == 1} for part in parts]
    if not all(same_buffers(of_part, flat[0]) for of_part in flat):
        raise refuse(
            "UNEQUAL_COPIES",
            f"the {len(parts)} tensors of {first.quantizer} have different global scales; the result can have only one",
        )
    has_columnwise = all(part.frame.columnwise for part in parts)
    buffers_of_parts = [part.frame.buffers(part.skip, part.height) for part in parts]
    joined = {}
    for name, buffer in buffers_of_parts[0].items():
        if has_columnwise or not name.startswith("columnwise"):
            wide = buffer.dim() > 1
            joined[name] = (
                torch.cat([of_part[name].view(torch.uint8) for of_part in buffers_of_parts], 1).view(buffer.dtype)
                if wide and buffer.dtype.itemsize == 1
                else torch.cat([of_part[name] for of_part in buffers_of_parts], 1)
                if wide
                else buffer.clone()
            )
    frame_of_all = replace(
        frame,
        columns=(columns := sum(part.frame.columns for part in parts)),
        band=None if frame.band is None or columns == frame.band.whole else replace(frame.band, size=columns),
        cut={name: buffer for name, buffer in joined.items() if name in frame.cut},
        shared={name: buffer for name, buffer in joined.items() if name in frame.shared},
        start=frame.start + first.skip,
        share=None if frame.band is None else frame.share,
    )
    return QuantizedTensor(replace(frame_of_all, used=None, blank=False, of=None), 0, first.height, first.dtype)


def cut_share(tensor: QuantizedTensor, share: Share) -> QuantizedTensor:
    """Copy a rank's tensor-parallel share out of a whole quantized tensor, without quantizing again."""
    frame = tensor.frame
    buffers = {n: share.part(frame.quantizer, n, buffer) for n, buffer in (frame.cut | frame.shared).items()}
    origin = buffers.pop(ORIGIN, None)
    part_frame = make_frame(frame.quantizer, buffers, share.local, blank=frame.blank)
    if origin is not None:
        part_frame.cut[ORIGIN] = origin
    part_frame.share = share
    return QuantizedTensor(part_frame, 0, share.local[0], tensor.dtype)


def check_common(target: QuantizedTensor, source: QuantizedTensor) -> None:
    """Refuse a copy into one rank's shard of a matrix if the copy would change a scale, amax or history that all ranks
    share.

    Raises:
        Refused: with the code UNEQUAL_COPIES if the copy would do so, because other ranks would keep the old value.
    """
    frame, share = target.frame, target.frame.share
    if target.is_meta or source.is_meta:
        return
    if share is None:
        rows = frame.rows if frame.used is None else frame.used
        same_matrix = frame.blank or rows >= frame.whole or source.frame.whole == frame.whole
        common = [name for name in frame.shared if not same_matrix]
        band = frame.band
        if band is not None and source.frame.band != band and not frame.blank:
            common = [name for name in (*COMPONENTS, *STATE) if not band.step(target.quantizer, name)]
    else:
        same_matrix = _is_of(share, source.frame)
        common = [name for name in (*COMPONENTS, *STATE) if not same_matrix and not share.step(target.quantizer, name)]
    target_buffers, source_buffers = ({**one.components, **one.state} for one in (target, source))
    names = [name for name in common if name in target_buffers and name in source_buffers]
    if not same_buffers({name: target_buffers[name] for name in names}, {name: source_buffers[name] for name in names}):
        raise refuse(
            "UNEQUAL_COPIES",
            f"the source {list(source.shape)} has its own {', '.join(names)}, which the parts on all ranks must share",
            hint="Call copy_() with values on every rank that has a part, or use load_state_dict().",
        )


def _is_of(share: Share, frame: Frame) -> bool:
    """Return whether a frame is the part that a share describes, or the whole from which that part was cut."""
    frame_share = frame.share
    if frame_share is None:
        band = frame.band
        width = band.whole if band is not None and band.dim == 1 and band.dims == 2 else frame.columns
        return (frame.whole, width) == share.shape
    return (frame_share.shape, frame_share.dim, frame_share.positions) == (share.shape, share.dim, share.positions)
