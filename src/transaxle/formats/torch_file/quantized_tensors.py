"""Reads TransformerEngine's quantized tensors as plain tensors, which are views of the codes and scales without
padding.

In memory, scales are padded for the kernels. Codes may exist twice: rowwise, and columnwise for the backward pass, in
some cases transposed. In a catalog there is no padding: codes have the tensor's rows and columns, and each tile (block
of codes with a common scale) has one scale. The tensors in the catalog are views of the stored bytes, so nothing is
copied or computed. Tensors that no view can express are refused: tensors with scales in a kernel's order, and tensors
with packed transposed codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from msgspec.structs import replace

from transaxle.formats.catalog import Shape
from transaxle.formats.pickled import transformer_engine as te
from transaxle.formats.pickled.descriptors import Quantized, TensorRef
from transaxle.formats.torch_file.saved import ViewFault

NOTE = "transformer_engine"
"""Metadata key of a dict from the name of each quantized tensor to its description, see `StoringKind.describe`."""
CODES, SCALE, AMAX = "", "_scale_inv", "_amax"
"""Suffixes that are added to the tensor's name in the names of its buffers."""
TAKEN = "another item has this name, which a buffer of a quantized tensor needs"
HALVED = "_256"
"""Suffix for scales that were computed for a maximum code value of 256 instead of 448, so that they decode to different
values."""

PACKED = "U8"
"""Safetensors code under which packed 4-bit codes are stored, two per byte."""

_BYTE = "uint8"
_SINGLE = "float32"
_REAL, _EXPONENT, _E4M3 = "F32", "F8_E8M0", "F8_E4M3"
_BLOCK, _MX, _NV = 128, 32, 16
_WHOLE = 0
_FULL, _HALF = 448, 256


@dataclass(frozen=True, slots=True)
class StoringKind:
    """How codes and scales encode the values of a tensor; it is the same for all buffers of the tensor."""

    encoding: str
    """Name of the encoding: `float8`, `float8_block`, `mxfp8` or `nvfp4`."""
    tile: tuple[int, int]
    """Number of rows and columns of a tile, the block of elements that share one scale; 0 means the whole dim."""
    scale: str
    """Safetensors code of the scales' dtype."""
    number: int
    """Number by which TransformerEngine denotes the dtype of the codes."""
    numbering: str
    """Numbering of dtypes to which `number` belongs; see `codes`."""
    scale_max: int = _FULL
    """Maximum code value for which the block scales of nvfp4 were computed."""

    def codes(self, *, old: bool) -> str:
        """Return the safetensors code of the codes' dtype.

        Releases before 2.4 numbered dtypes differently, and the number 7 occurs in both numberings. If a pickle does
        not state its numbering, the number itself may show it: 6 occurs only in the old numbering, 8 only in the new
        one. The number 7 is read in the new numbering, unless a 6 occurs elsewhere in the checkpoint. (Before release
        2.4 the number 7 meant e5m2, which no recipe used for weights.)

        Args:
            old: whether another tensor of the checkpoint shows that it was written before release 2.4.

        Raises:
            ViewFault: with the code UNSUPPORTED for a dtype that codes cannot have.
        """
        numbering = self.numbering or (te.OLD if old or self.is_old else te.NEW)
        code = te.CODES[numbering].get(self.number)
        if code is None or (code == _FOUR_BITS) != self.packed:
            message = f"its codes have TransformerEngine's type {self.number}, which {self.encoding} does not have"
            raise ViewFault("UNSUPPORTED", message)
        return code

    def stored_code(self, *, old: bool) -> str:
        """Return the safetensors code under which the codes are stored; see `codes`."""
        codes = self.codes(old=old)
        return PACKED if self.packed else codes

    @property
    def packed(self) -> bool:
        """Whether each byte contains two codes."""
        return self.encoding == _NVFP4

    @property
    def is_old(self) -> bool:
        """Whether the tensor was certainly written before release 2.4."""
        return self.numbering == te.OLD or (self.numbering == te.UNKNOWN and self.number == _ONLY_OLD)

    def describe(self, *, old: bool) -> dict[str, Any]:
        """Return the description of the tensor for the metadata of an opened checkpoint."""
        return {
            "encoding": self.encoding,
            "codes": self.codes(old=old),
            "scale": self.scale,
            "tile": list(self.tile),
            "scale_max": self.scale_max,
        }


_ONLY_OLD, _FOUR_BITS = 6, "F4"
_FLOAT8, _FLOAT8_BLOCK, _MXFP8, _NVFP4 = "float8", "float8_block", "mxfp8", "nvfp4"


@dataclass(frozen=True, slots=True)
class QuantizedPart:
    """One buffer of a quantized tensor."""

    view: TensorRef
    """The buffer, as a view of the storage that contains it."""
    dtype: str | None
    """Safetensors code of the buffer's dtype; None for codes, see `StoringKind.stored_code`."""


@dataclass(frozen=True, slots=True)
class PlainLayout:
    """The plain tensors that make up a quantized tensor."""

    kind: StoringKind
    shape: Shape
    """Shape of the tensor in elements."""
    parts: Mapping[str, QuantizedPart]
    """Suffix of the buffer's name -> buffer."""
    left: Mapping[str, str]
    """Suffix of the buffer's name -> description, for buffers that are not read."""


def layout(tensor: Quantized) -> PlainLayout:
    """Return the plain tensors that make up a quantized tensor.

    Raises:
        ViewFault: with one of the codes SHAPE_MISMATCH, DTYPE_MISMATCH or MISSING_TENSOR for inconsistent buffers; with
            the code UNSUPPORTED for buffers that no view can express.
    """
    _check_settings(tensor)
    plain_layout = _LAYOUTS[tensor.kind](_Buffers(tensor))
    if tensor.shape is not None and tensor.shape != plain_layout.shape:
        message = f"its shape is {list(tensor.shape)}, but its codes have the shape {list(plain_layout.shape)}"
        raise ViewFault("SHAPE_MISMATCH", message)
    return plain_layout


def _check_settings(tensor: Quantized) -> None:
    if tensor.settings.get(te.SWIZZLED):
        message = "its scales are in the order of a matrix-multiply kernel (`with_gemm_swizzled_scales`)"
        raise ViewFault("UNSUPPORTED", message, "Save the tensor with a quantizer whose `optimize_for_gemm` is False.")
    if tensor.settings.get(te.ROW_SCALED):
        raise ViewFault("UNSUPPORTED", "it has a separate amax for every row (`row_scaled_nvfp4`)", _DEQUANTIZE)
    if tensor.settings.get(te.FORMAT, 0) > te.COMPACT:
        message = f"its scales are in TransformerEngine's format {tensor.settings[te.FORMAT]}; known: 0, 1"
        raise ViewFault("UNSUPPORTED", message, _DEQUANTIZE)


_DEQUANTIZE = "Dequantize it with TransformerEngine, and save the result."


class _Buffers:
    """Reads the buffers of one quantized tensor, and checks each buffer."""

    def __init__(self, tensor: Quantized) -> None:
        self.tensor = tensor

    def __contains__(self, name: str) -> bool:
        return name in self.tensor.buffers

    def take(self, name: str, dtype: str = _BYTE) -> TensorRef:
        """Return the buffer with the given name.

        Raises:
            ViewFault: with the code MISSING_TENSOR if there is no such buffer; with the code DTYPE_MISMATCH if the
                buffer has the wrong dtype.
        """
        buffer = self.tensor.buffers.get(name)
        if buffer is None:
            raise ViewFault("MISSING_TENSOR", f"this {self.tensor.kind} has no {name}")
        dtype_found = buffer.dtype or getattr(buffer.storage, "dtype", None)
        if dtype_found is None or dtype_found.name != dtype:
            dtype_name = "unknown" if dtype_found is None else dtype_found.name
            raise ViewFault("DTYPE_MISMATCH", f"its {name} must be {dtype}; found {dtype_name}")
        return buffer

    def number(self, name: str) -> TensorRef:
        """Return the buffer with the given name, which must contain exactly one number."""
        buffer = self.take(name, _SINGLE)
        if prod(buffer.shape) != 1:
            raise ViewFault("SHAPE_MISMATCH", f"its {name} must be one number; found {list(buffer.shape)}")
        return buffer

    def scales(self, name: str, grid: Shape, pad: tuple[int, int], dtype: str = _BYTE) -> TensorRef:
        """Return a matrix of scales without its padding.

        Args:
            name: name of the buffer.
            grid: number of rows and columns of the scales without padding.
            pad: two numbers; the rows may be padded to a multiple of the first, the columns to a multiple of the
                second.
            dtype: torch's name of the scales' dtype.

        Raises:
            ViewFault: with the code SHAPE_MISMATCH for a wrong shape; with the codes of `take` for a missing buffer or
                a wrong dtype.
        """
        buffer = self.take(name, dtype)
        padded = tuple(-(-size // step) * step for size, step in zip(grid, pad, strict=True))
        fits = len(buffer.shape) == 2 and all(
            stored_size in (size, up) for stored_size, size, up in zip(buffer.shape, grid, padded, strict=True)
        )
        if not fits:
            message = f"its {name} must be {list(grid)}, padded to {list(padded)}; found {list(buffer.shape)}"
            raise ViewFault("SHAPE_MISMATCH", message)
        return replace(buffer, shape=grid)

    def kind(self, encoding: str, tile: tuple[int, int], scale: str, scale_max: int = _FULL) -> StoringKind:
        """Return how the codes and scales of this tensor encode its values."""
        return StoringKind(encoding, tile, scale, self.tensor.number, self.tensor.numbering, scale_max)

    def describe_columnwise(self, name: str = te.COLUMNS) -> dict[str, str]:
        """Return a description of columnwise codes, which are not read."""
        return {f".{name}": "its columnwise codes, for the backward pass"} if name in self else {}


def _float8(buffers: _Buffers) -> PlainLayout:
    scale = buffers.number(te.SCALE_INV)
    codes = buffers.take(te.DATA) if te.DATA in buffers else _first_dim_last(buffers.take(te.TRANSPOSE))
    left = buffers.describe_columnwise(te.TRANSPOSE) if te.DATA in buffers else {}
    parts = {CODES: QuantizedPart(codes, None), SCALE: QuantizedPart(scale, _REAL)}
    return PlainLayout(buffers.kind(_FLOAT8, (_WHOLE, _WHOLE), _REAL), codes.shape, parts, left)


def _mxfp8(buffers: _Buffers) -> PlainLayout:
    by_rows = te.ROWS in buffers
    codes = buffers.take(te.ROWS if by_rows else te.COLUMNS)
    tile = (1, _MX) if by_rows else (_MX, 1)
    rows, columns = _matrix(codes.shape, tile, whole=True)
    if by_rows:
        scales = buffers.scales(te.ROW_SCALES, (rows, columns // _MX), (128, 4))
    else:
        scales = buffers.scales(te.COLUMN_SCALES, (rows // _MX, columns), (4, 128))
    parts = {
        CODES: QuantizedPart(codes, None),
        SCALE: QuantizedPart(_with_leading_dims(scales, codes.shape, tile), _EXPONENT),
    }
    left = buffers.describe_columnwise() if by_rows else {}
    return PlainLayout(buffers.kind(_MXFP8, tile, _EXPONENT), codes.shape, parts, left)


def _blockwise(buffers: _Buffers) -> PlainLayout:
    by_rows = te.ROWS in buffers
    is_2d = bool(buffers.tensor.settings.get(te.IS_2D))
    compact = not is_2d and buffers.tensor.settings.get(te.FORMAT, 0) == te.COMPACT
    if by_rows or compact:
        codes = buffers.take(te.ROWS if by_rows else te.COLUMNS)
    else:
        codes = _first_dim_last(buffers.take(te.COLUMNS))
    tile = (1 if by_rows and not is_2d else _BLOCK, _BLOCK if by_rows or is_2d else 1)
    rows, columns = _matrix(codes.shape, tile)
    grid = (-(-rows // tile[0]), -(-columns // tile[1]))
    # The scales of square tiles (blocks with a common scale) are transposed together with the codes; the scales of row
    # tiles are always transposed, except in the compact format.
    transposed = not by_rows if is_2d else by_rows and not compact
    name = te.ROW_SCALES if by_rows else te.COLUMN_SCALES
    pad = (1, 1) if compact else (1, 4)
    if transposed:
        scales = _first_dim_last(buffers.scales(name, grid[::-1], pad, _SINGLE))
    else:
        scales = buffers.scales(name, grid, pad, _SINGLE)
    parts = {
        CODES: QuantizedPart(codes, None),
        SCALE: QuantizedPart(_with_leading_dims(scales, codes.shape, tile), _REAL),
    }
    left = buffers.describe_columnwise() if by_rows else {}
    return PlainLayout(buffers.kind(_FLOAT8_BLOCK, tile, _REAL), codes.shape, parts, left)


def _nvfp4(buffers: _Buffers) -> PlainLayout:
    if te.ROWS not in buffers and te.COLUMNS in buffers:
        message = "it has only columnwise codes, whose pairs of 4 bits lie along the other dim"
        raise ViewFault("UNSUPPORTED", message, "Save the tensor with a quantizer that keeps rowwise codes.")
    settings = buffers.tensor.settings
    scale_max = settings.get(te.E4M3_MAX, _FULL) if settings.get(te.FOUR_OVER_SIX) else _FULL
    if scale_max not in (_FULL, _HALF):
        raise ViewFault(
            "UNSUPPORTED", f"its scales were computed for a maximum of {scale_max}; known: {_FULL}, {_HALF}"
        )
    codes = buffers.take(te.ROWS)
    if not codes.shape:
        raise ViewFault("SHAPE_MISMATCH", "its codes have no dims")
    shape = (*codes.shape[:-1], codes.shape[-1] * 2)
    rows, columns = _matrix(shape, (1, _NV))
    scales = buffers.scales(te.ROW_SCALES, (rows, -(-columns // _NV)), (128, 4))
    end = HALVED if scale_max == _HALF else ""
    parts = {
        CODES: QuantizedPart(codes, None),
        SCALE + end: QuantizedPart(_with_leading_dims(scales, shape, (1, _NV)), _E4M3),
        AMAX + end: QuantizedPart(_expand(buffers.number(te.ROW_AMAX), shape[:-2]), _REAL),
    }
    return PlainLayout(buffers.kind(_NVFP4, (1, _NV), _E4M3, scale_max), shape, parts, buffers.describe_columnwise())


_LAYOUTS = {te.FLOAT8: _float8, te.MXFP8: _mxfp8, te.BLOCKWISE: _blockwise, te.NVFP4: _nvfp4}


def _first_dim_last(view: TensorRef) -> TensorRef:
    """Return a view in which the first dim is moved to the end, as TransformerEngine does when it transposes."""
    return replace(view, shape=(*view.shape[1:], *view.shape[:1]), strides=(*view.strides[1:], *view.strides[:1]))


def _expand(number: TensorRef, stack: Shape) -> TensorRef:
    """Return a view of a single number that repeats the number for every matrix of a stack."""
    return replace(number, shape=stack, strides=(0,) * len(stack)) if stack else number


def _matrix(shape: Shape, tile: tuple[int, int], *, whole: bool = False) -> tuple[int, int]:
    """Return the number of rows and columns of a tensor seen as a matrix: all dims except the last form the rows.

    Args:
        shape: shape of the tensor in elements.
        tile: number of rows and columns of a tile (block of elements with a common scale).
        whole: whether the matrix must consist of whole tiles.

    Raises:
        ViewFault: with the code SHAPE_MISMATCH for a tensor without dims or, if `whole`, with incomplete tiles (blocks
            with a common scale); with the code BLOCK_MISALIGNED for tiles that cross the boundary between two matrices
            of a stack.
    """
    if not shape:
        raise ViewFault("SHAPE_MISMATCH", "its codes have no dims")
    rows, columns = prod(shape[:-1]), shape[-1]
    if whole and (rows % tile[0] or columns % tile[1]):
        message = f"tiles of {tile[0]} x {tile[1]} do not fill codes of {list(shape)}"
        raise ViewFault("SHAPE_MISMATCH", message)
    if len(shape) > 2 and shape[-2] % tile[0]:
        message = f"tiles of {tile[0]} rows cross the boundaries of the matrices of {list(shape)}"
        raise ViewFault("BLOCK_MISALIGNED", message, _DEQUANTIZE)
    return rows, columns


def _with_leading_dims(scales: TensorRef, shape: Shape, tile: tuple[int, int]) -> TensorRef:
    """Return a matrix of scales, reshaped so that it has the leading dims of the codes."""
    if len(shape) == 1:
        return replace(scales, shape=scales.shape[1:], strides=scales.strides[1:])
    outer = (*shape[:-2], -(-shape[-2] // tile[0]))
    steps = [scales.strides[0] * prod(outer[at + 1 :]) for at in range(len(outer))]
    return replace(scales, shape=(*outer, scales.shape[1]), strides=(*steps, scales.strides[1]))
