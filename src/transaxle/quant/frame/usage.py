"""Rowwise and columnwise codes of one matrix, and when the latter follow from the former.

Columnwise codes are stored in the same order as rowwise ones, so a cut between two rows cuts both; only their tiles run
down the columns. A kernel reads them as rows of the transposed matrix, which is how TransformerEngine stores those of
nvfp4: packed along the columns, with transposed scales. `turned` gives these bytes.

Where square tiles share a scale (nvfp4 weights), an element has the same code and scale in both directions, and
columnwise codes are copied from the rowwise ones. Elsewhere the two are rounded separately, which needs the values.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from transaxle.errors import refuse
from transaxle.quant.frame.buffers import AMAX, COLUMN_DATA, COLUMN_SCALE, DATA, SCALE
from transaxle.quant.frame.frame import Frame, framed
from transaxle.quant.kernels.components import columnwise_of

_PACKED = 4
"""Bits of a code that shares its byte."""


def both_ways(frame: Frame, skip: int, rows: int) -> Frame:
    """Return the frame with columnwise codes added where they follow from the rowwise ones; otherwise the frame itself.

    They never follow for a shard: scales of its first and last squares are needed on ranks that are not asked here.
    """
    over, turned = frame.quantizer.over, columnwise_of(frame.encoding)
    if over is None or turned is None or over != (turned.tile[0], frame.encoding.tile[1]):
        return frame
    # One row may be cut too: the other ranks of its matrix have none.
    if frame.matrix is None and ((frame.start, skip, rows) != (0, 0, frame.whole) or rows == 1):
        return frame
    high, wide = over
    kind, scale = frame.cut[SCALE].dtype, frame.cut[SCALE].view(torch.uint8)
    squares = scale[..., ::high, :]
    if scale.device.type != "meta":
        same = squares.repeat_interleave(high, -2)[..., : scale.shape[-2], :]
        if not torch.equal(same, scale):  # rows put together from several matrices, or codes of another rule
            return frame
    columnwise_buffers = {
        COLUMN_DATA: frame.cut[DATA],
        COLUMN_SCALE: squares.repeat_interleave(wide, -1)[..., : frame.row[-1]].view(kind),
    }
    cut = {name: buffer for name, buffer in columnwise_buffers.items() if frame.is_cut(name)}
    return replace(
        frame, cut=frame.cut | cut, shared=frame.shared | {n: b for n, b in columnwise_buffers.items() if n not in cut}
    )


def turned(frame: Frame, skip: int, shape: tuple[int, ...]) -> Frame:
    """Return the frame of a matrix's transpose, or of the transposes of a stack's matrices, as a copy.

    Its rowwise codes are the frame's columnwise ones. Where the frame has stored columnwise codes, its rowwise ones
    become columnwise in turn. One nvfp4 amax serves both directions; only random Hadamard transforms need two.

    Args:
        frame: buffers of the matrix, or of the stack.
        skip: first row to use; in a stack, the first matrix.
        shape: shape of the tensor: [M, K] or [E, M, K].

    Raises:
        Refused: `UNSUPPORTED` without columnwise codes that are stored or can be derived; `BLOCK_MISALIGNED` for some
            rows of a matrix, and for views of another shape; `SHAPE_MISMATCH` for an odd number of rows of 4-bit codes.
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
        name: _turned(buffers[other], bits if other in (DATA, COLUMN_DATA) else 8)
        for name, other in (names if frame.columnwise else names[:2])
    }
    if AMAX in buffers:
        transposed[AMAX] = buffers[AMAX].clone()
    *stack, rows, columns = shape
    return framed(frame.quantizer, transposed, (*stack, columns, rows))


def _turned(buffer: torch.Tensor, bits: int) -> torch.Tensor:
    """Return matrices of codes or scales transposed; codes of 4 bits are put two to a byte anew."""
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
