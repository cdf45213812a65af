"""From TransformerEngine's tensors to plain ones: the views that its codes and scales are, without what is padding.

In memory scales are padded for the kernels that read them, and codes may be there twice: by rows, and by columns for
the backward pass, some of these transposed. A catalog has no padding: it has the codes as the tensor's own rows and
columns, and one scale per tile. All of it is views of the same bytes, so nothing is copied or computed. What no view
can express is refused: scales in the order of a kernel, packed codes that are transposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from transaxle.formats.pickled.allowed_globals import transformer_engine as te
from transaxle.formats.pickled.descriptors import Quantized, TensorRef
from transaxle.formats.torch_file.views import ViewFault

NOTE = "transformer_engine"
"""Key of a container's metadata: name of each quantized tensor -> how it is stored, see `Kind.said`."""
CODES, SCALE, AMAX = "", "_scale_inv", "_amax"
"""What follows a tensor's name in the names of its buffers."""
TAKEN = "another item has this name, which a buffer of a quantized tensor gets"
HALVED = "_256"
"""What follows in the names of scales that were made to reach 256, not 448: they mean other values."""

PACKED = "U8"
"""Safetensors code under which codes of 4 bits are stored, two in each."""

_BYTE = "uint8"
_SINGLE = "float32"
_REAL, _EXPONENT, _E4M3 = "F32", "F8_E8M0", "F8_E4M3"
_BLOCK, _MX, _NV = 128, 32, 16
_WHOLE = 0
_FULL, _HALF = 448, 256

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """How codes and scales make values: alike in all parts of one tensor."""

    encoding: str
    """Name of the encoding: `float8`, `float8_block`, `mxfp8` or `nvfp4`."""
    tile: tuple[int, int]
    """Rows and columns that share a scale; 0 for all of them."""
    scale: str
    """Safetensors code of the scales."""
    number: int
    """TransformerEngine's number for the type of the codes."""
    numbering: str
    """The list that the number is from; see `codes`."""
    scale_max: int = _FULL
    """Largest value that block scales of nvfp4 were made to reach."""

    def codes(self, *, old: bool) -> str:
        """Return the safetensors code of the codes.

        Releases before 2.4 had other numbers, and 7 is in both lists. Where a pickle does not tell, 6 and 8 are in one
        of them only, and 7 is that of the newer list unless the checkpoint has a 6 elsewhere. (Before 2.4 it would
        be e5m2, in which no recipe ever kept weights.)

        Args:
            old: whether another tensor of the checkpoint shows that it is from before 2.4.

        Raises:
            ViewFault: UNSUPPORTED for a type that is none of codes.
        """
        numbering = self.numbering or (te.OLD if old or self.is_old else te.NEW)
        found = te.CODES[numbering].get(self.number)
        if found is None or (found == _FOUR_BITS) != self.packed:
            message = f"its codes are of TransformerEngine's type {self.number}, which is none of {self.encoding}"
            raise ViewFault("UNSUPPORTED", message)
        return found

    def stored(self, *, old: bool) -> str:
        """Return the safetensors code under which the codes are stored; see `codes`."""
        codes = self.codes(old=old)
        return PACKED if self.packed else codes

    @property
    def packed(self) -> bool:
        """Whether two codes are in one byte."""
        return self.encoding == _NVFP4

    @property
    def is_old(self) -> bool:
        """Whether the tensor shows that it was written before release 2.4."""
        return self.numbering == te.OLD or (self.numbering == te.UNTOLD and self.number == _ONLY_OLD)

    def said(self, *, old: bool) -> dict[str, Any]:
        """Return what a container's metadata says of the tensor."""
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
class Part:
    """One buffer of a tensor."""

    view: TensorRef
    """Where it lies."""
    dtype: str | None
    """Safetensors code of its numbers; None for the codes, see `Kind.stored`."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A quantized tensor as plain ones."""

    kind: Kind
    shape: Shape
    """Its elements along each dim."""
    parts: Mapping[str, Part]
    """What follows its name -> the buffer."""
    left: Mapping[str, str]
    """What follows its name -> what it is, for buffers that are not read."""


def layout(tensor: Quantized) -> Layout:
    """Return the plain tensors that a quantized one consists of.

    Raises:
        ViewFault: SHAPE_MISMATCH, DTYPE_MISMATCH or MISSING_TENSOR for buffers that do not go together; UNSUPPORTED
            for those that no view can express.
    """
    _check_settings(tensor)
    made = _LAYOUTS[tensor.kind](_Buffers(tensor))
    if tensor.shape is not None and tensor.shape != made.shape:
        message = f"it is said to be {list(tensor.shape)}, and its codes are those of {list(made.shape)}"
        raise ViewFault("SHAPE_MISMATCH", message)
    return made


def _check_settings(tensor: Quantized) -> None:
    if tensor.settings.get(te.SWIZZLED):
        message = "its scales lie in the order of a matrix-multiply kernel (`with_gemm_swizzled_scales`)"
        raise ViewFault("UNSUPPORTED", message, "Save it with a quantizer whose `optimize_for_gemm` is False.")
    if tensor.settings.get(te.ROW_SCALED):
        raise ViewFault("UNSUPPORTED", "it has one amax for every row (`row_scaled_nvfp4`)", _DEQUANTIZE)
    if tensor.settings.get(te.FORMAT, 0) > te.COMPACT:
        message = f"its scales are in TransformerEngine's format {tensor.settings[te.FORMAT]}; known: 0, 1"
        raise ViewFault("UNSUPPORTED", message, _DEQUANTIZE)


_DEQUANTIZE = "Dequantize it with TransformerEngine, and save that."


class _Buffers:
    """The buffers of one tensor."""

    def __init__(self, tensor: Quantized) -> None:
        self.tensor = tensor

    def __contains__(self, name: str) -> bool:
        return name in self.tensor.buffers

    def take(self, name: str, dtype: str = _BYTE) -> TensorRef:
        """Return a buffer.

        Raises:
            ViewFault: MISSING_TENSOR, DTYPE_MISMATCH.
        """
        found = self.tensor.buffers.get(name)
        if found is None:
            raise ViewFault("MISSING_TENSOR", f"this {self.tensor.kind} has no {name}")
        own = found.dtype or getattr(found.storage, "dtype", None)
        if own is None or own.name != dtype:
            told = "unknown" if own is None else own.name
            raise ViewFault("DTYPE_MISMATCH", f"its {name} is {dtype} in every release; found {told}")
        return found

    def number(self, name: str) -> TensorRef:
        """Return a buffer that holds one number."""
        found = self.take(name, _SINGLE)
        if prod(found.shape) != 1:
            raise ViewFault("SHAPE_MISMATCH", f"its {name} is one number; found {list(found.shape)}")
        return found

    def scales(self, name: str, grid: Shape, pad: tuple[int, int], dtype: str = _BYTE) -> TensorRef:
        """Return a matrix of scales without its padding.

        Args:
            name: of the buffer.
            grid: its rows and columns without padding.
            pad: their multiples up to which they may be padded.
            dtype: of the numbers.

        Raises:
            ViewFault: SHAPE_MISMATCH, and as `take`.
        """
        found = self.take(name, dtype)
        padded = tuple(-(-size // step) * step for size, step in zip(grid, pad, strict=True))
        fits = len(found.shape) == 2 and all(
            own in (size, up) for own, size, up in zip(found.shape, grid, padded, strict=True)
        )
        if not fits:
            message = f"its {name} is {list(grid)}, padded to {list(padded)}; found {list(found.shape)}"
            raise ViewFault("SHAPE_MISMATCH", message)
        return replace(found, shape=grid)

    def kind(self, encoding: str, tile: tuple[int, int], scale: str, scale_max: int = _FULL) -> Kind:
        """Return how the buffers make values."""
        return Kind(encoding, tile, scale, self.tensor.number, self.tensor.numbering, scale_max)

    def twice(self, what: str = te.COLUMNS) -> dict[str, str]:
        """Return what is listed of codes that are there a second time."""
        return {f".{what}": "its codes by columns, for the backward pass"} if what in self else {}


def _float8(buffers: _Buffers) -> Layout:
    scale = buffers.number(te.SCALE_INV)
    codes = buffers.take(te.DATA) if te.DATA in buffers else _turned(buffers.take(te.TRANSPOSE))
    left = buffers.twice(te.TRANSPOSE) if te.DATA in buffers else {}
    parts = {CODES: Part(codes, None), SCALE: Part(scale, _REAL)}
    return Layout(buffers.kind(_FLOAT8, (_WHOLE, _WHOLE), _REAL), codes.shape, parts, left)


def _mxfp8(buffers: _Buffers) -> Layout:
    by_rows = te.ROWS in buffers
    codes = buffers.take(te.ROWS if by_rows else te.COLUMNS)
    tile = (1, _MX) if by_rows else (_MX, 1)
    rows, columns = _matrix(codes.shape, tile, whole=True)
    if by_rows:
        scales = buffers.scales(te.ROW_SCALES, (rows, columns // _MX), (128, 4))
    else:
        scales = buffers.scales(te.COLUMN_SCALES, (rows // _MX, columns), (4, 128))
    parts = {CODES: Part(codes, None), SCALE: Part(_stacked(scales, codes.shape, tile), _EXPONENT)}
    left = buffers.twice() if by_rows else {}
    return Layout(buffers.kind(_MXFP8, tile, _EXPONENT), codes.shape, parts, left)


def _blockwise(buffers: _Buffers) -> Layout:
    by_rows = te.ROWS in buffers
    is_2d = bool(buffers.tensor.settings.get(te.IS_2D))
    compact = not is_2d and buffers.tensor.settings.get(te.FORMAT, 0) == te.COMPACT
    if by_rows or compact:
        codes = buffers.take(te.ROWS if by_rows else te.COLUMNS)
    else:
        codes = _turned(buffers.take(te.COLUMNS))
    tile = (1 if by_rows and not is_2d else _BLOCK, _BLOCK if by_rows or is_2d else 1)
    rows, columns = _matrix(codes.shape, tile)
    grid = (-(-rows // tile[0]), -(-columns // tile[1]))
    # Scales of square tiles are transposed with their codes; those of rows always, except in the compact format.
    turned = not by_rows if is_2d else by_rows and not compact
    name = te.ROW_SCALES if by_rows else te.COLUMN_SCALES
    pad = (1, 1) if compact else (1, 4)
    if turned:
        scales = _turned(buffers.scales(name, grid[::-1], pad, _SINGLE))
    else:
        scales = buffers.scales(name, grid, pad, _SINGLE)
    parts = {CODES: Part(codes, None), SCALE: Part(_stacked(scales, codes.shape, tile), _REAL)}
    left = buffers.twice() if by_rows else {}
    return Layout(buffers.kind(_FLOAT8_BLOCK, tile, _REAL), codes.shape, parts, left)


def _nvfp4(buffers: _Buffers) -> Layout:
    if te.ROWS not in buffers and te.COLUMNS in buffers:
        message = "it has codes by columns only, whose pairs of 4 bits lie along the other dim"
        raise ViewFault("UNSUPPORTED", message, "Save it with a quantizer that keeps codes by rows.")
    settings = buffers.tensor.settings
    most = settings.get(te.E4M3_MAX, _FULL) if settings.get(te.FOUR_OVER_SIX) else _FULL
    if most not in (_FULL, _HALF):
        raise ViewFault("UNSUPPORTED", f"its scales were made to reach {most}; known: {_FULL}, {_HALF}")
    codes = buffers.take(te.ROWS)
    if not codes.shape:
        raise ViewFault("SHAPE_MISMATCH", "its codes have no dims")
    shape = (*codes.shape[:-1], codes.shape[-1] * 2)
    rows, columns = _matrix(shape, (1, _NV))
    scales = buffers.scales(te.ROW_SCALES, (rows, -(-columns // _NV)), (128, 4))
    end = HALVED if most == _HALF else ""
    parts = {
        CODES: Part(codes, None),
        SCALE + end: Part(_stacked(scales, shape, (1, _NV)), _E4M3),
        AMAX + end: Part(_repeated(buffers.number(te.ROW_AMAX), shape[:-2]), _REAL),
    }
    return Layout(buffers.kind(_NVFP4, (1, _NV), _E4M3, most), shape, parts, buffers.twice())


_LAYOUTS = {te.FLOAT8: _float8, te.MXFP8: _mxfp8, te.BLOCKWISE: _blockwise, te.NVFP4: _nvfp4}


def _turned(view: TensorRef) -> TensorRef:
    """Return a view with its first dim as the last one: TransformerEngine's transposition."""
    return replace(view, shape=(*view.shape[1:], *view.shape[:1]), strides=(*view.strides[1:], *view.strides[:1]))


def _repeated(number: TensorRef, stack: Shape) -> TensorRef:
    """Return one number as one for each matrix of a stack."""
    return replace(number, shape=stack, strides=(0,) * len(stack)) if stack else number


def _matrix(shape: Shape, tile: tuple[int, int], *, whole: bool = False) -> tuple[int, int]:
    """Return rows and columns of a tensor as TransformerEngine cuts it: all dims but the last are rows.

    Args:
        shape: its elements along each dim.
        tile: rows and columns of a tile.
        whole: whether tiles must fill it.

    Raises:
        ViewFault: SHAPE_MISMATCH without dims, or where `whole` is not so; BLOCK_MISALIGNED for tiles that reach from
            one matrix of a stack into the next.
    """
    if not shape:
        raise ViewFault("SHAPE_MISMATCH", "its codes have no dims")
    rows, columns = prod(shape[:-1]), shape[-1]
    if whole and (rows % tile[0] or columns % tile[1]):
        message = f"tiles of {tile[0]} x {tile[1]} do not fill codes of {list(shape)}"
        raise ViewFault("SHAPE_MISMATCH", message)
    if len(shape) > 2 and shape[-2] % tile[0]:
        message = f"tiles of {tile[0]} rows reach across the matrices of {list(shape)}"
        raise ViewFault("BLOCK_MISALIGNED", message, _DEQUANTIZE)
    return rows, columns


def _stacked(scales: TensorRef, shape: Shape, tile: tuple[int, int]) -> TensorRef:
    """Return a matrix of scales with the dims of its codes."""
    if len(shape) == 1:
        return replace(scales, shape=scales.shape[1:], strides=scales.strides[1:])
    outer = (*shape[:-2], -(-shape[-2] // tile[0]))
    steps = [scales.strides[0] * prod(outer[at + 1 :]) for at in range(len(outer))]
    return replace(scales, shape=(*outer, scales.shape[1]), strides=(*steps, scales.strides[1]))
