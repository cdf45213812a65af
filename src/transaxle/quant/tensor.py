"""`QuantizedTensor`: a matrix, or stack of matrices, that is stored as codes and scales and used as a tensor of values.

The tensor object itself has no memory: its storage is empty and its data pointer is 0. The buffers of codes and scales
are in a `Frame`, which several views share. `transaxle.quant.dispatch` defines what torch operations do with a
`QuantizedTensor`.

**Columnwise codes** are stored in the same order as rowwise codes, so a cut between two rows cuts both kinds, but their
tiles run down the columns. A kernel reads columnwise codes as rows of the transposed matrix. TransformerEngine stores
nvfp4 in that form: packed along the columns, with transposed scales. `transpose_frame` returns the bytes in
TransformerEngine's form. If square tiles share a scale (nvfp4 weights), an element has the same code and scale in both
directions, and columnwise codes are copied from the rowwise codes. If tiles are not square, rowwise and columnwise
codes are rounded separately, which requires the values.

**FSDP2** gathers quantized parameters as bytes: codes, and scales that are cut with them. Scales of tiles of several
rows are already on every rank, and are not sent. Ranks with fewer rows than the first rank send padding, which is
removed on arrival. If FSDP2 cuts a dim other than the first, torch assembles the gathered bytes as if they had the
parameter's shape. For eight-bit codes that is correct. Four-bit codes are sent, with their scales, in a buffer of the
size that torch expects, and split again on arrival; buffers that do not fit into it are gathered by this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from transaxle.arguments import DType
from transaxle.encodings.encoding import WHOLE
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.quant import kernels
from transaxle.quant.frame import Frame, begin_rounding, make_frame
from transaxle.quant.global_scale import locate, quantize_to_frame
from transaxle.quant.kernels.components import columnwise_of
from transaxle.quant.quantizers import (
    AMAX,
    COLUMN_DATA,
    COLUMN_SCALE,
    COMPONENTS,
    DATA,
    ORIGIN,
    QUANTIZERS,
    ROUNDING,
    SCALE,
    STATE,
    Quantizer,
    buffers_of,
    is_cut,
    makes_tensors,
)
from transaxle.quant.tp_share import Band, Share
from transaxle.torch_tensors import Ranks, raw_local, read_dtype, read_group, same_bytes, with_plain_bytes

_PACKED = 4
"""Number of bits of codes that are stored in pairs, two codes per byte."""


def both_ways(frame: Frame, skip: int, rows: int) -> Frame:
    """Return a frame with columnwise codes added, if they can be derived from the rowwise codes; otherwise the frame
    itself.

    For a shard they can never be derived: the first and last square tile may continue on other ranks, which need the
    scales too but do not call this function.
    """
    square, columnwise_encoding = frame.quantizer.over, columnwise_of(frame.encoding)
    if square is None or columnwise_encoding is None or square != (columnwise_encoding.tile[0], frame.encoding.tile[1]):
        return frame
    # A matrix of one row may also be a shard, whose other ranks have no rows.
    if frame.matrix is None and ((frame.start, skip, rows) != (0, 0, frame.whole) or rows == 1):
        return frame
    high, wide = square
    kind, scale = frame.cut[SCALE].dtype, frame.cut[SCALE].view(torch.uint8)
    squares = scale[..., ::high, :]
    if scale.device.type != "meta":
        repeated = squares.repeat_interleave(high, -2)[..., : scale.shape[-2], :]
        if not torch.equal(repeated, scale):  # the rows of a square would have different scales
            return frame
    columnwise_buffers = {
        COLUMN_DATA: frame.cut[DATA],
        COLUMN_SCALE: squares.repeat_interleave(wide, -1)[..., : frame.row[-1]].view(kind),
    }
    cut = {name: buffer for name, buffer in columnwise_buffers.items() if frame.is_cut(name)}
    return replace(
        frame, cut=frame.cut | cut, shared=frame.shared | {n: b for n, b in columnwise_buffers.items() if n not in cut}
    )


def transpose_frame(frame: Frame, skip: int, shape: tuple[int, ...]) -> Frame:
    """Return the frame of a matrix's transpose, or of the transposes of a stack's matrices, as a copy.

    The new rowwise codes are the frame's columnwise codes. If the frame has stored columnwise codes, its rowwise codes
    become the new columnwise codes. One nvfp4 amax is valid for both directions; only random Hadamard transforms need
    two amaxes.

    Args:
        frame: buffers of the matrix, or of the stack.
        skip: index of the first row to use; in a stack, of the first matrix.
        shape: shape of the tensor: [M, K] or [E, M, K].

    Raises:
        Refused: with the code UNSUPPORTED if columnwise codes are neither stored nor derivable; with the code
            BLOCK_MISALIGNED if the tensor has only some rows of a matrix, or is a view with a different shape; with the
            code SHAPE_MISMATCH if 4-bit codes have an odd number of rows.
    """
    height = shape[0]
    if shape != (height, *frame.row) or (frame.matrix is None and (frame.start + skip, height) != (0, frame.whole)):
        raise refuse(
            "BLOCK_MISALIGNED",
            f"only a whole matrix can be transposed, not {height} of its {frame.whole} rows or another view",
        )
    source = frame if frame.columnwise else both_ways(frame, skip, height)
    if not source.columnwise:
        raise refuse(
            "UNSUPPORTED",
            f"this tensor of {frame.quantizer} has no columnwise codes, which the transpose needs",
            hint="Quantize both ways (columnwise=True), or transpose the values that dequantize() gives.",
        )
    buffers, bits = source.buffers(skip, height), frame.encoding.code_bits
    names = ((DATA, COLUMN_DATA), (SCALE, COLUMN_SCALE), (COLUMN_DATA, DATA), (COLUMN_SCALE, SCALE))
    transposed = {
        name: _transpose_codes(buffers[other], bits if other in (DATA, COLUMN_DATA) else 8)
        for name, other in (names if frame.columnwise else names[:2])
    }
    if AMAX in buffers:
        transposed[AMAX] = buffers[AMAX].clone()
    *stack, rows, columns = shape
    return make_frame(frame.quantizer, transposed, (*stack, columns, rows))


def _transpose_codes(buffer: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the transposes of matrices of codes or scales; 4-bit codes are unpacked, transposed and packed again."""
    raw = buffer.view(torch.uint8)
    if bits == _PACKED:
        if raw.shape[-2] % 2:
            raise refuse(
                "SHAPE_MISMATCH",
                f"{raw.shape[-2]} rows of 4-bit codes do not fill whole bytes; the number of rows must be even",
            )
        raw = torch.stack([raw & 15, raw >> 4], -1).flatten(-2)
    raw = raw.transpose(-1, -2)
    if bits == _PACKED:
        raw = raw[..., ::2] | (raw[..., 1::2] << 4)
    return raw.contiguous().view(buffer.dtype)


@dataclass(frozen=True, slots=True)
class GatherInput:
    """What `assemble_gathered` needs, besides the gathered bytes, to assemble the whole matrix."""

    shard: Frame
    """Codes and scales of this rank's rows, including the buffers that all ranks share."""
    buffers: tuple[tuple[str, torch.Tensor], ...]
    """(name, bytes to send) of each buffer that torch gathers."""
    extra: torch.Tensor | None = None
    """Gathered bytes, [ranks, bytes], of a band's buffers that torch does not gather; None if there are no such
    buffers.
    """
    world: int = 1
    """Number of ranks over which the matrix is cut."""


def prepare_gather(
    frame: Frame, skip: int, height: int, mesh: DeviceMesh
) -> tuple[tuple[torch.Tensor, ...], GatherInput]:
    """Return the bytes to gather, padded to the first rank's size, and the context that `assemble_gathered` needs.

    Raises:
        Refused: with the code UNSUPPORTED if the rows are not those that FSDP2 assigns to this rank.
    """
    world = mesh.size()
    if frame.band is not None:
        return _prepare_band_gather(frame, frame.band, skip, height, mesh)
    padded = -(-frame.whole // world)
    start = min(padded * mesh.get_local_rank(), frame.whole)
    if height and frame.tall and frame.start + skip != start:
        raise refuse(
            "UNSUPPORTED",
            f"this rank's rows start at {frame.start + skip} of {frame.whole}; FSDP2 on {world} ranks expects {start}",
            hint="Call fully_shard so that it cuts dim 0, over one mesh dim.",
        )
    buffers = []
    for name, buffer in frame.cut.items():
        if name == ORIGIN:
            continue
        rows = buffer[skip : skip + padded].view(torch.uint8)
        if len(rows) < padded:
            rows = torch.cat([rows, rows.new_zeros((padded - len(rows), *rows.shape[1:]))])
        buffers.append((name, rows.contiguous()))
    return tuple(rows for _, rows in buffers), GatherInput(frame, tuple(buffers))


def assemble_gathered(outputs: tuple[torch.Tensor, ...], context: GatherInput) -> Frame:
    """Return the frame (codes and scales) of the whole matrix, assembled from the gathered bytes.

    If there is only one rank, torch copies only the first output; the remaining buffers are those of the input.
    """
    shard = context.shard
    if shard.band is not None:
        return _assemble_bands(outputs, context, shard.band)
    cut = {}
    for number, (name, sent) in enumerate(context.buffers):
        whole = outputs[number] if number < len(outputs) else sent
        cut[name] = whole[: shard.whole].view(shard.cut[name].dtype)
    copied = () if ROUNDING not in shard.cut else (shard.cut[ROUNDING],)
    return Frame(
        shard.quantizer,
        shard.columns,
        shard.whole,
        cut,
        dict(shard.shared),
        matrix=shard.matrix,
        share=shard.share,
        identity=shard.identity,
        echoes=(*copied, *shard.echoes),
    )


def _prepare_band_gather(
    frame: Frame, band: Band, skip: int, height: int, mesh: DeviceMesh
) -> tuple[tuple[torch.Tensor, ...], GatherInput]:
    """Gather the band's buffers that torch cannot gather; return the bytes that torch gathers, and the context.

    Raises:
        Refused: with the code UNSUPPORTED if the band is not the one that FSDP2 assigns to this rank.
    """
    world, rank = mesh.size(), mesh.get_local_rank()
    expected = (rank * band.size, band.size * world)
    if (band.start, band.whole) != expected or (skip, height) != (0, frame.rows):
        raise refuse(
            "UNSUPPORTED",
            f"this rank has {band.size} of {band.whole} along dim {band.dim}, from {band.start} on; "
            f"FSDP2 on {world} ranks expects {expected[0]}",
            hint="Call fully_shard on the whole parameter, over one mesh dim.",
        )
    shape = (frame.rows, *frame.row)
    buffers = _band_bytes(frame, band)
    direct = tuple(buffer for buffer in buffers.values() if buffer.shape == shape)
    remainder = torch.cat(
        [buffer.flatten() for buffer in buffers.values() if buffer.shape != shape] or [direct[0][:0].flatten()]
    )
    carried_size = 0 if direct else prod(shape)
    inputs = direct or (_pad_bytes(remainder[:carried_size], carried_size).view(shape),)
    extra, gathered = remainder[carried_size:], None
    if extra.numel():
        gathered = extra.new_empty((world, extra.numel()))
        dist.all_gather_into_tensor(gathered.view(-1), extra, group=mesh.get_group())
    return inputs, GatherInput(frame, (), gathered, world)


def _pad_bytes(octets: torch.Tensor, size: int) -> torch.Tensor:
    return octets if octets.numel() == size else torch.cat([octets, octets.new_zeros(size - octets.numel())])


def _band_bytes(frame: Frame, band: Band) -> Mapping[str, torch.Tensor]:
    """Return buffer name -> bytes, for the buffers that are cut like the band (range of columns)."""
    names = [name for name in (*frame.cut, *frame.shared) if name != ORIGIN and band.step(frame.quantizer, name)]
    buffers = {**frame.cut, **frame.shared}
    return {name: buffers[name].contiguous().view(torch.uint8) for name in names}


def _assemble_bands(outputs: tuple[torch.Tensor, ...], context: GatherInput, band: Band) -> Frame:
    """Return the frame of the whole matrix or stack, assembled from the gathered bytes of its bands."""
    shard, world = context.shard, context.world
    shape = (shard.rows, *shard.row)
    whole = tuple(size * world if dim == band.dim else size for dim, size in enumerate(shape))
    buffers = {**shard.cut, **shard.shared}
    buffers.pop(ORIGIN, None)
    band_buffers = _band_bytes(shard, band)
    direct = [name for name, buffer in band_buffers.items() if buffer.shape == shape]
    gathered = {name: output.view(whole) for name, output in zip(direct, outputs, strict=False)}
    byte_rows = [] if context.extra is None else [context.extra]
    if not direct:
        bands = outputs[0].view(whole).chunk(world, band.dim)
        byte_rows = [torch.stack([each.flatten() for each in bands]), *byte_rows]
    at, octets = 0, torch.cat(byte_rows, 1) if byte_rows else None
    for name, buffer in band_buffers.items():
        if name not in gathered:
            assert octets is not None
            parts = octets[:, at : at + buffer.numel()].reshape(world, *buffer.shape)
            gathered[name], at = torch.cat(parts.unbind(0), band.dim), at + buffer.numel()
    buffers |= {name: buffer.view(buffers[name].dtype) for name, buffer in gathered.items()}
    return Frame(
        shard.quantizer,
        prod(whole[1:]),
        shard.whole,
        {name: buffers[name] for name in shard.cut if name in buffers},
        {name: buffers[name] for name in shard.shared},
        matrix=None if shard.matrix is None else (whole[1], whole[2]),
        share=shard.share,
        identity=shard.identity,
        echoes=shard.echoes,
    )


FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""Torch function -> implementation for quantized tensors, which `transaxle.quant.dispatch` registers."""
OPERATIONS: list[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = []
"""List whose only element is the function that runs torch operations; `transaxle.quant.dispatch` appends it."""


class QuantizedTensor(torch.Tensor):
    """A tensor stored as codes and scales: a matrix [M, K], some of its rows, or a stack [E, M, K] of matrices.

    Each matrix of a stack has separate scales. A quantizer or `from_components` creates the tensor. Views of rows, and
    of matrices of a stack, share the codes and scales of the tensor. Most operations use the dequantized values and
    return plain tensors.
    """

    frame: Frame
    """The buffers of codes and scales, which a tensor and its views share."""
    skip: int
    """Index of the frame's row (in a stack, matrix) at which this tensor starts."""
    height: int
    """Number of rows (in a stack, matrices) of this tensor."""

    @staticmethod
    def __new__(
        cls, frame: Frame, skip: int, height: int, dtype: torch.dtype, shape: tuple[int, ...] | None = None
    ) -> QuantizedTensor:
        """Create the tensor object, which has no memory."""
        return torch.Tensor._make_wrapper_subclass(
            cls,
            (height, *frame.row) if shape is None else shape,
            dtype=dtype,
            device=frame.device,
            storage_size=0,
        )

    def __init__(
        self,
        frame: Frame,
        skip: int,
        height: int,
        dtype: torch.dtype,  # noqa: ARG002 - `__new__` uses it
        shape: tuple[int, ...] | None = None,  # noqa: ARG002
    ) -> None:
        assert prod(self.shape) == height * frame.columns
        self.frame, self.skip, self.height = frame, skip, height

    @property
    def quantizer(self) -> Quantizer:
        """The quantizer that computed the codes."""
        return self.frame.quantizer

    @property
    def components(self) -> dict[str, torch.Tensor]:
        """Codes and scales as plain tensors that share this tensor's memory: `data`, `scale_inv`; for nvfp4 `amax`.

        If the quantizer computes columnwise codes, `columnwise_data` and `columnwise_scale_inv` follow. No buffer is
        padded or swizzled. If tiles span several rows, a shard has the whole matrix's scales. In a stack, each buffer
        has a leading dim E: `scale_inv` of float8 is [E, 1].
        """
        buffers = self.frame.buffers(self.skip, self.height)
        return {name: buffers[name] for name in COMPONENTS if name in buffers}

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Buffers of state for the next quantization: `amax_history` and `scaled_for` for delayed scaling,
        `rounding_state` for NVFP4 training, otherwise none.
        """
        buffers = self.frame.buffers(self.skip, self.height)
        return {name: buffers[name] for name in STATE if name in buffers}

    def dequantize(self, dtype: DType | None = None, *, columnwise: bool = False) -> torch.Tensor:
        """Return the values (codes times scales) as a plain tensor, rounded once to the dtype.

        Args:
            dtype: dtype of the values: bfloat16, float16 or float32; None means this tensor's dtype.
            columnwise: whether to use the columnwise codes instead of the rowwise codes.

        Raises:
            Refused: with the code DTYPE_MISMATCH if the dtype is not one of these; with the code MISSING_TENSOR if
                there are no columnwise codes.
        """
        if columnwise and not self.frame.columnwise:
            raise refuse("MISSING_TENSOR", f"{self.quantizer}: the tensor has no columnwise codes", tensor=COLUMN_DATA)
        value_dtype = self.dtype if dtype is None else read_dtype("dtype", dtype)
        if self.device.type == "meta":
            return torch.empty(self.shape, dtype=value_dtype, device=self.device)
        if self.frame.matrix is not None:
            return dequantize_stack(self.frame, self.skip, self.height, value_dtype, columnwise=columnwise).view(
                self.shape
            )
        parts, encoding = self.frame.operands(self.skip, self.height, columnwise=columnwise)
        return kernels.dequantize(parts, encoding, value_dtype)[:, : self.frame.columns].view(self.shape)

    def quantize_(self, values: torch.Tensor, *, group: Ranks | None = None) -> QuantizedTensor:
        """Quantize new values into this tensor's buffers, with the same quantizer; return the tensor.

        Args:
            values: a plain tensor with the shape of this tensor.
            group: the ranks that have the remaining rows or bands of the matrix; every rank of the group must call this
                method. None if this tensor is a whole matrix.

        Raises:
            Refused: with the code SHAPE_MISMATCH if the shape of `values` is wrong; with the code UNSUPPORTED if this
                tensor is a shard, `group` is None, and scales depend on other ranks' rows.
        """
        group = read_group("group", group)
        if values.shape != self.shape:
            raise refuse("SHAPE_MISMATCH", f"expected values of shape {list(self.shape)}, got {list(values.shape)}")
        frame = self.frame
        is_whole = self.height == frame.whole
        grain = frame.quantizer.grain[0]
        reduced = frame.matrix is None and (frame.tall or grain != 1 or frame.encoding.has_global)
        band = frame.band
        banded = band is not None and (not grain or frame.encoding.has_global)
        if group is None and (banded or (reduced and not (is_whole or frame.blank))):
            extent = f"{self.height} of {frame.whole} rows, and their scales depend on the other rows"
            if band is not None and banded:
                extent = f"{band.size} of {band.whole} positions of dim {band.dim}, and its scales depend on the others"
            raise refuse(
                "UNSUPPORTED",
                f"this tensor has {extent}",
                hint="Call quantize_(values, group=...) on every rank of the group, or use MasterWeights.",
            )
        rows = values.detach().reshape(self.height, *frame.row)
        if rows.dtype not in kernels.VALUES:
            rows = rows.to(self.dtype)
        if frame.matrix is not None and frame.quantizer.state_sizes:  # each matrix has a separate amax history
            for index, matrix in enumerate(rows, self.skip):
                member = QuantizedTensor(frame.member(index), 0, frame.matrix[0], self.dtype)
                member.quantize_(matrix, group=None if band is None else group)
            frame.blank = False
            return self
        if frame.blank and group is None:
            at = locate(rows, None, 0, self.height, frame.share)
        else:
            start = frame.start + self.skip
            at = locate(rows, group, start, frame.whole, frame.share, banded=band is not None)
        self.adopt(quantize_to_frame(frame.quantizer, rows.to(frame.device), at, frame), 0, self.height)
        return self

    def with_dtype_of(self, values: torch.Tensor) -> QuantizedTensor:
        """Return a quantized tensor of `values`, with the dtype and device of `values`; codes are kept if the values
        are equal.

        Raises:
            Refused: with the code UNSUPPORTED for new values of a tensor-parallel shard, because other ranks might get
                no new values.
        """
        moved = cast(QuantizedTensor, self.detach().to(values.device))
        if not values.is_meta and not torch.equal(values, moved.dequantize(values.dtype)):
            share = self.frame.share
            if share is not None:
                message = f"{list(self.shape)} is a rank's part of {list(share.shape)}; .data cannot give it new values"
                raise refuse("UNSUPPORTED", message, hint="Call copy_() with them on every rank that has a part.")
            moved.quantize_(values)
        return QuantizedTensor(moved.frame, moved.skip, moved.height, values.dtype, tuple(self.shape))

    def adopt(self, source: Frame, skip: int, rows: int) -> None:
        """Copy codes and scales from another frame with the same encoding into this tensor's buffers.

        Raises:
            Refused: with the code BLOCK_MISALIGNED or UNEQUAL_COPIES if other rows of this tensor's frame would then
                have wrong scales.
        """
        frame = self.frame
        if frame.columnwise and not source.columnwise:
            source = both_ways(source, skip, rows)
        used = frame.rows if frame.used is None else frame.used
        covers = frame.blank or (self.skip == 0 and self.height >= used)
        to_row, from_row = frame.start + self.skip, source.start + skip
        if frame.tall and not frame.blank and (to_row, frame.whole) != (from_row, source.whole):
            raise refuse(
                "BLOCK_MISALIGNED",
                f"rows from {from_row} of {source.whole} cannot become rows from {to_row} of {frame.whole}: "
                "their tiles begin elsewhere",
                hint="Copy the values that source.dequantize() gives.",
            )
        if frame.tall and from_row < self.skip and frame.blank:
            raise refuse(
                "BLOCK_MISALIGNED",
                f"rows from {from_row} of {source.whole} cannot begin at row {self.skip}: the rows above would be "
                "outside",
                hint="Copy the values that source.dequantize() gives.",
            )
        target_common, source_common = (
            one.common(first, rows, frame.band) for one, first in ((frame, self.skip), (source, skip))
        )
        if not covers and not same_buffers(target_common, source_common):
            raise refuse(
                "UNEQUAL_COPIES",
                f"copying {self.height} of {used} rows would leave the other rows with scales that are not theirs",
                hint="Copy the whole tensor.",
            )
        lengths = [name for name in STATE if name in frame.cut and name in source.cut]
        if any(frame.cut[name].shape[1:] != source.cut[name].shape[1:] for name in lengths):
            raise refuse("SHAPE_MISMATCH", f"a history of {source.quantizer} does not fit {frame.quantizer}")
        if frame.blank:
            _adopt_position(frame, source, from_row - self.skip)
        if frame.used is not None:
            frame.used = max(frame.used, self.skip + self.height)
        for name in list(frame.cut):
            if name in source.cut:
                frame.cut[name][self.skip : self.skip + rows].copy_(source.cut[name][skip : skip + rows])
            elif name in (COLUMN_DATA, COLUMN_SCALE):  # the source has no columnwise codes, and these are outdated
                frame.drop(name)
        _refresh(frame, source)

    def transposed(self) -> QuantizedTensor:
        """Return the transpose without quantizing again: the codes of the transpose are this tensor's
        columnwise codes.
        """
        transpose = transpose_frame(self.frame, self.skip, tuple(self.shape))
        return QuantizedTensor(transpose, 0, transpose.rows, self.dtype)

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Return codes, and scales that are cut like the rows, as bytes to gather; FSDP2 calls this method."""
        return prepare_gather(self.frame, self.skip, self.height, mesh)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Assemble the whole matrix from gathered bytes; return it, or copy it into `out`. FSDP2 calls this method."""
        frame = assemble_gathered(all_gather_outputs, metadata)
        if out is None:
            return QuantizedTensor(frame, 0, frame.whole, param_dtype), ()
        inner = raw_local(out)
        if not isinstance(inner, QuantizedTensor) or inner.dtype != param_dtype:
            message = f"out must be a quantized tensor of {param_dtype}, not {type(inner).__name__} of {inner.dtype}"
            raise refuse("UNSUPPORTED", message)
        inner.frame.cut, inner.frame.shared, inner.frame.echoes = frame.cut, frame.shared, frame.echoes
        return None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return OPERATIONS[0](func, args, kwargs or {})

    @classmethod
    def __torch_function__(
        cls, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        implementation = FUNCTIONS.get(func)
        if implementation is not None:
            return implementation(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        if id(self) not in memo:
            memo[id(self)] = self._as(self.detach().clone())
        return cast("QuantizedTensor", memo[id(self)])

    def _as(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` with this tensor's `requires_grad`, as a parameter if this tensor is a parameter."""
        if getattr(self, "_is_param", False):
            return torch.nn.Parameter(tensor, requires_grad=self.requires_grad)
        return tensor.requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.pickle_parts(torch.clone)

    def pickle_parts(self, change: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, ...]:
        """Return what a pickle contains: a function of this module, plain numbers, and buffers after `change` was
        applied.

        Raises:
            Refused: with the code UNSUPPORTED for a tensor-parallel shard, because its process group cannot be pickled.
        """
        if self.frame.share is not None:
            message = (
                f"{list(self.shape)} is a rank's part of {list(self.frame.share.shape)}, which a pickle cannot record"
            )
            raise refuse("UNSUPPORTED", message, hint="Save state_dict(), which has its codes and scales.")
        frame = self.frame.map_rows(self.skip, self.height, change)
        settings = {name: getattr(frame.quantizer, name) for name in _settings(frame.quantizer)}
        # Python's pickle cannot restore float8 tensors.
        buffers = {name: with_plain_bytes(buffer) for name, buffer in frame.buffers(0, self.height).items()}
        flags = (self.requires_grad, bool(getattr(self, "_is_param", False)))
        at = (frame.start, frame.whole)
        return rebuilt, (type(frame.quantizer).__name__, settings, buffers, tuple(self.shape), self.dtype, at, flags)

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"QuantizedTensor({self.quantizer!r}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"
        )


def _reduce_shared(tensor: QuantizedTensor) -> tuple[Any, ...]:
    """Return what a pickle for another process contains: references to the buffers' shared memory, without copies."""
    return tensor.pickle_parts(lambda buffer: buffer)


ForkingPickler.register(QuantizedTensor, _reduce_shared)


def _settings(quantizer: Quantizer) -> tuple[str, ...]:
    return tuple(name for kind in type(quantizer).__mro__ for name in getattr(kind, "__slots__", ()))


def same_buffers(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    """Return whether two dicts of buffers have the same names and bytes."""
    return first.keys() == second.keys() and all(same_bytes(first[name], second[name]) for name in first)


def _adopt_position(frame: Frame, source: Frame, start: int) -> None:
    """Set the position of a blank frame in the whole matrix to that of the frame from which its buffers are copied."""
    frame.start, frame.whole, frame.blank, frame.used = start, source.whole, False, 0
    frame.identity = source.identity
    if source.band is not None:
        frame.band, frame.share = source.band, frame.share or source.share
    if ORIGIN in source.cut:
        frame.cut[ORIGIN] = source.cut[ORIGIN].new_zeros((frame.rows, *frame.row))


def _refresh(frame: Frame, source: Frame) -> None:
    """Copy the shared buffers of another frame into this frame, in place if the shapes are equal."""
    for name in list(frame.shared):
        if name not in source.shared and name not in STATE:
            frame.drop(name)
    for name, buffer in source.shared.items():
        old = frame.shared.get(name)
        if old is not None and old.shape == buffer.shape:
            old.copy_(buffer)
        elif old is not None or name != COLUMN_SCALE:
            frame.shared[name] = buffer.to(frame.device, copy=True)


def dequantize_stack(
    frame: Frame, first: int, count: int, dtype: torch.dtype, *, columnwise: bool = False
) -> torch.Tensor:
    """Return the values of some matrices of a stack, computed in one kernel launch if tiles are inside matrices."""
    assert frame.matrix is not None
    rows, columns = frame.matrix
    encoding, last = frame.encoding, first + count
    step = encoding.tile[0]
    if step and not rows % step and not encoding.has_global and count and rows and not columnwise:
        codes, scale = frame.cut[DATA][first:last].flatten(0, 1), frame.cut[SCALE][first:last].flatten(0, 1)
        return kernels.dequantize(kernels.Components(codes, scale), encoding, dtype).view(count, rows, columns)
    if encoding.tile == (WHOLE, WHOLE) and not encoding.has_global and count and rows:
        codes, scale = frame.cut[DATA][first:last].flatten(1), frame.cut[SCALE][first:last].view(count, 1)
        flat = replace(encoding, tile=(1, WHOLE))
        return kernels.dequantize(kernels.Components(codes, scale), flat, dtype).view(count, rows, columns)
    values = torch.empty((count, rows, columns), dtype=dtype, device=frame.device)
    for index in range(count):
        parts, encoding = frame.member(first + index).operands(0, rows, columnwise=columnwise)
        kernels.dequantize(parts, encoding, dtype, out=values[index])
    return values


@makes_tensors
def make_quantized(
    quantizer: Quantizer,
    x: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    start: int | None = None,
    whole: int | None = None,
    share: Share | None = None,
    band: Band | None = None,
) -> QuantizedTensor:
    """Quantize a matrix, a stack of matrices or, with `group`, this rank's rows of a matrix; see `Quantizer.quantize`.

    With `share`, `x` is this rank's tensor-parallel share of a whole matrix or stack, and every rank of its group must
    call this. With `band`, `x` is a range of columns of every row, and other ranks of the group have the remaining
    columns.
    """
    if x.dim() not in (2, 3):
        raise refuse(
            "SHAPE_MISMATCH", f"expected a matrix or a stack of matrices, not a tensor of shape {list(x.shape)}"
        )
    if isinstance(x, QuantizedTensor):
        raise refuse(
            "UNSUPPORTED",
            f"the tensor is quantized already, by {x.quantizer}",
            hint="Quantize x.dequantize() to quantize its values again.",
        )
    plain = x.detach()
    frame = quantize_to_frame(quantizer, plain, locate(plain, group, start, whole, share, banded=band is not None))
    frame.share, frame.band = share, band
    begin_rounding(frame)
    return QuantizedTensor(frame, 0, x.shape[0], x.dtype)


def from_components(
    quantizer: Quantizer,
    components: Mapping[str, torch.Tensor],
    shape: tuple[int, ...],
    dtype: DType,
    *,
    start: int = 0,
    whole: int | None = None,
) -> QuantizedTensor:
    """Create a quantized tensor from codes and scales, whose memory the tensor shares.

    Args:
        quantizer: the quantizer that computed the codes and scales.
        components: name -> buffer, as in `QuantizedTensor.components` and `.state`; missing state is initialized.
        shape: shape of the tensor: [M, K], or [E, M, K] for a stack, whose components all have a leading dim E.
        dtype: dtype of the values: bfloat16, float16 or float32.
        start: for a shard, the index of the whole matrix's row (in a stack, of the matrix) at which the shard begins.
        whole: for a shard, the number of rows of the whole matrix; if tiles have several rows, the scales are those of
            the whole matrix.

    Raises:
        Refused: with the code MISSING_TENSOR, UNEXPECTED_TENSOR, DTYPE_MISMATCH or SHAPE_MISMATCH if components do not
            fit; the error lists every problem.
    """
    dtype = read_dtype("dtype", dtype)
    if len(shape) not in (2, 3) or dtype not in kernels.VALUES:
        expected = "a matrix of bfloat16, float16 or float32, or a stack of them"
        raise refuse("SHAPE_MISMATCH", f"expected {expected}, not {dtype} {list(shape)}")
    has_columnwise = COLUMN_DATA in components
    encoding, problems = quantizer.encoding, []
    local_buffers = buffers_of(quantizer, shape, columnwise=has_columnwise)
    whole_buffers = buffers_of(quantizer, (shape[0] if whole is None else whole, *shape[1:]), columnwise=has_columnwise)
    device = components[DATA].device if DATA in components else torch.device("cpu")
    for name in local_buffers:
        kind, size = local_buffers[name] if is_cut(encoding, name, len(shape)) else whole_buffers[name]
        buffer = components.get(name)
        if buffer is None:
            if name not in STATE:
                problems.append(Refusal("MISSING_TENSOR", f"the buffer {name!r} is missing", Where(tensor=name)))
        elif buffer.dtype != kind:
            problems.append(Refusal("DTYPE_MISMATCH", f"expected {kind}, got {buffer.dtype}", Where(tensor=name)))
        elif tuple(buffer.shape) != size or buffer.device != device:
            message = f"expected {list(size)} on {device}, got {list(buffer.shape)} on {buffer.device}"
            problems.append(Refusal("SHAPE_MISMATCH", message, Where(tensor=name)))
    problems += [
        Refusal("UNEXPECTED_TENSOR", f"{quantizer} has no such buffer", Where(tensor=name))
        for name in components
        if name not in local_buffers
    ]
    if problems:
        raise gathered(problems)
    return QuantizedTensor(make_frame(quantizer, components, shape, start=start, whole=whole), 0, shape[0], dtype)


# Existing pickles refer to `transaxle.quant.tensor.rebuilt`, so neither the function nor the module may be renamed.
def rebuilt(
    kind: str,
    settings: dict[str, Any],
    buffers: dict[str, torch.Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    at: tuple[int, int],
    flags: tuple[bool, bool],
) -> torch.Tensor:
    """Create a tensor from the content of a pickle: names, plain numbers and buffers.

    Raises:
        Refused: with the code UNSUPPORTED if the quantizer is unknown; also with the errors of `from_components`.
    """
    if kind not in QUANTIZERS:
        raise refuse("UNSUPPORTED", f"the pickle names the quantizer {kind}; known are {', '.join(QUANTIZERS)}")
    quantizer = QUANTIZERS[kind](**settings)
    *leading, packed = buffers[DATA].shape
    stored = (*leading, packed * (8 // quantizer.encoding.code_bits))
    expected = buffers_of(quantizer, stored, columnwise=COLUMN_DATA in buffers)
    typed = {name: buffer.view(expected[name][0]) if name in expected else buffer for name, buffer in buffers.items()}
    tensor: torch.Tensor = from_components(quantizer, typed, stored, dtype, start=at[0], whole=at[1])
    tensor = tensor.view(shape)
    return torch.nn.Parameter(tensor, requires_grad=flags[0]) if flags[1] else tensor.requires_grad_(flags[0])
