# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""The Triton programs for groups of rows of a matrix: each finds its group on the device, and goes on in it as the
programs for a single matrix do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from transaxle.quant.kernels.programs import (
    ABS,
    E4M3,
    TENSOR,
    as_float,
    float8_scale,
    inverse,
    place,
    quantize_block,
    store_codes,
)

HIGH = tl.constexpr(128)
"""Rows of swizzled scales that each group begins a new one of."""


@triton.jit
def spans(offsets, groups, height, size: tl.constexpr):
    """First row and number of rows of each group, int64 [size]; what no group has is left out, and none is negative.

    `offsets` are the rows at which groups end; `size` is a power of two, at least `groups`.
    """
    every = tl.arange(0, size)
    stop = tl.load(offsets + every, mask=every < groups, other=0).to(tl.int64)
    start = tl.load(offsets + every - 1, mask=(every > 0) & (every < groups), other=0).to(tl.int64)
    start = tl.minimum(tl.maximum(start, 0), height)
    return start, tl.maximum(tl.minimum(stop, height) - start, 0)


@triton.jit
def located(block, offsets, groups, height, block_rows: tl.constexpr, size: tl.constexpr):
    """Group of a block of rows, first row and rows of the group, and the row in it at which the block starts.

    Groups have at least one block each, also if they are empty. A block past the last one has group `groups`.
    """
    every = tl.arange(0, size)
    start, rows = spans(offsets, groups, height, size)
    blocks = tl.where(every < groups, tl.maximum((rows + block_rows - 1) // block_rows, 1), 0)
    ends = tl.cumsum(blocks, axis=0)
    group = tl.sum(((ends <= block) & (every < groups)).to(tl.int32), axis=0)
    own = every == group
    first = tl.sum(tl.where(own, start, 0), axis=0)
    count = tl.sum(tl.where(own, rows, 0), axis=0)
    row = (block - tl.sum(tl.where(own, ends - blocks, 0), axis=0)) * block_rows
    return group, first, count, row


@triton.jit
def tiles_before(group, offsets, groups, height, step: tl.constexpr, size: tl.constexpr):
    """Rows of tiles that the groups before one have, each of which starts with a tile of its own."""
    _, rows = spans(offsets, groups, height, size)
    return tl.sum(tl.where(tl.arange(0, size) < group, (rows + step - 1) // step, 0), axis=0)


@triton.jit
def quantize_groups_program(
    x, offsets, codes, scales, column_codes, column_scales, total,
    groups, height, width, tile_rows, column_tile_rows,
    x_row, x_column, code_row, scale_row, column_code_row, column_scale_row,
    size: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
    repeat_rows: tl.constexpr, repeat_columns: tl.constexpr, scheme: tl.constexpr, mantissa: tl.constexpr,
    scale_max: tl.constexpr, largest: tl.constexpr, even: tl.constexpr, native: tl.constexpr, swizzled: tl.constexpr,
):  # fmt: skip
    """Quantize one block of one group as if the group were a matrix by itself: see `quantize_program`.

    `total` has one number for each group. Scales of a group's tiles follow those of the group before it (`swizzled`:
    from the next multiple of 128 rows on); offsets so wrong that they would not fit into the `tile_rows` (and
    `column_tile_rows`) that there are write nothing.
    """
    across = tl.maximum(tl.cdiv(width, block_columns), 1)
    program = tl.program_id(0).to(tl.int64)
    column = (program % across) * block_columns
    group, first, count, row = located(program // across, offsets, groups, height, block_rows, size)
    fits = group < groups
    if codes is not None:
        codes += first * code_row
        if scheme == TENSOR:
            scales += group
        else:
            step: tl.constexpr = HIGH if swizzled else rows // repeat_rows
            many: tl.constexpr = HIGH if swizzled else 1
            before = tiles_before(group, offsets, groups, height, step, size) * many
            fits = fits & (before + (count + step - 1) // step * many <= tile_rows)
            scales += before * scale_row
    if column_codes is not None:
        column_codes += first * column_code_row
        high: tl.constexpr = columns // repeat_columns
        passed = tiles_before(group, offsets, groups, height, high, size)
        fits = fits & (passed + (count + high - 1) // high <= column_tile_rows)
        column_scales += passed * column_scale_row
    if scheme == TENSOR or scheme == E4M3:  # noqa: SIM109 - Triton has no `in`
        total += group
    if fits:
        quantize_block(
            x + first * x_row, codes, scales, column_codes, column_scales, total, row, column,
            count, width, x_row, x_column, code_row, scale_row, column_code_row, column_scale_row,
            block_rows, block_columns, rows, columns, repeat_rows, repeat_columns,
            scheme, mantissa, scale_max, largest, even, native, swizzled,
        )  # fmt: skip


@triton.jit
def amax_groups_program(
    x, offsets, most, groups, height, width, x_row, x_column,
    size: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """Largest magnitude of a block of one group, as bits, into the group's place in `most` (int32, 0 before)."""
    across = tl.maximum(tl.cdiv(width, block_columns), 1)
    program = tl.program_id(0).to(tl.int64)
    group, first, count, row = located(program // across, offsets, groups, height, block_rows, size)
    down = row + tl.arange(0, block_rows)
    along = (program % across) * block_columns + tl.arange(0, block_columns)
    inside = (down[:, None] < count) & (along[None, :] < width)
    value = as_float(tl.load(x + first * x_row + place(down, along, x_row, x_column), mask=inside, other=0))
    largest = value.to(tl.int32, bitcast=True) & ABS
    tl.atomic_max(most + group, tl.max(tl.max(largest, axis=1), axis=0), mask=group < groups, sem="relaxed")


@triton.jit
def quantize_rows_program(
    x, offsets, codes, scales, groups, height, width, x_row, x_column, code_row,
    block_rows: tl.constexpr, block_columns: tl.constexpr, mantissa: tl.constexpr,
    largest: tl.constexpr, even: tl.constexpr, native: tl.constexpr,
):  # fmt: skip
    """Quantize some rows, each by its own amax, which a first pass over them finds: those of groups only."""
    row = tl.program_id(0).to(tl.int64) * block_rows
    stop = tl.minimum(tl.load(offsets + groups - 1).to(tl.int64), height)
    down = row + tl.arange(0, block_rows)
    most = tl.zeros([block_rows, block_columns], tl.int32)
    if row < stop:
        for column in range(0, width, block_columns):
            along = column + tl.arange(0, block_columns)
            inside = (down[:, None] < stop) & (along[None, :] < width)
            value = as_float(tl.load(x + place(down, along, x_row, x_column), mask=inside, other=0))
            most = tl.maximum(most, value.to(tl.int32, bitcast=True) & ABS)
        code_max: tl.constexpr = 448.0 if mantissa == 3 else 57344.0
        scale = float8_scale(tl.max(most, axis=1).to(tl.float32, bitcast=True), code_max, largest, even)
        tl.store(scales + down, inverse(scale), mask=down < stop)
        for column in range(0, width, block_columns):
            along = column + tl.arange(0, block_columns)
            inside = (down[:, None] < stop) & (along[None, :] < width)
            raw = tl.load(x + place(down, along, x_row, x_column), mask=inside, other=0)
            scaled = as_float(raw) * scale[:, None]
            store_codes(scaled, raw, codes, row, column, stop, width, code_row, mantissa, native)
