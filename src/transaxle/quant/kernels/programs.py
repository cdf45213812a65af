"""The Triton programs, each of which processes one block of a matrix on the device.

Rounding works on the bits of float32 numbers, so that every GPU and the interpreter (which handles bfloat16 and float8
wrongly) compute the same codes. To work on bits, bfloat16 is loaded as 16-bit integers, and float8 is stored as 8-bit
integers. If the chip has an instruction with bitwise equal results (`native`: Hopper and later), the instruction is
used instead; the tests compare the results.

Two operations must not be left to the compiler. The compiler must not fuse a product and a sum into one rounding
(programs are launched with `enable_fp_fusion=False`). The compiler must not compile `/`, which divides approximately
(`div_rn` is used).

Importing this module imports triton, and determines whether the interpreter runs (`TRITON_INTERPRET`).

The programs for groups of rows first compute, on the device, the group to which their block belongs. After that, the
programs for groups work like the programs for a single matrix.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False


ABS = tl.constexpr(0x7FFFFFFF)
"""Mask that clears the sign bit of a float32. Non-negative floats are ordered like their bits, with NaN as the
largest.
"""
INFINITY = tl.constexpr(0x7F800000)
NAN = tl.constexpr(0x7FC00000)
LARGEST = tl.constexpr(3.4028234663852886e38)
"""The largest finite float32."""

TENSOR = tl.constexpr(0)
"""Scaling scheme: one float32 scale for the whole tensor, computed from the tensor's amax."""
GIVEN = tl.constexpr(4)
"""Scaling scheme: one float32 scale for the whole tensor, which the caller passes."""
BLOCK = tl.constexpr(1)
"""Scaling scheme: one float32 scale per tile."""
E8M0 = tl.constexpr(2)
"""Scaling scheme: one power of two per tile, stored as its exponent."""
E4M3 = tl.constexpr(3)
"""Scaling scheme: one E4M3 scale per tile, and one factor for the tensor."""


def _cast_asm(to: str, gather: str) -> tl.constexpr:
    """Return PTX that rounds four floats to codes in one register, with the signs of the loaded values.

    Triton's own cast is not used: if a change of layout followed it, it produced wrong codes (Triton 3.6 on an H200).
    """
    return tl.constexpr(f"""{{
        .reg .b16 low, high;
        .reg .b32 codes, signs, more;
        cvt.rn.satfinite.{to}x2.f32 low, $2, $1;
        cvt.rn.satfinite.{to}x2.f32 high, $4, $3;
        mov.b32 codes, {{low, high}};
        {gather}
        lop3.b32 $0, signs, 0x80808080, codes, 0xEA;
    }}""")


_FROM_HALVES = "prmt.b32 signs, $5, $6, 0x7531;"
"""PTX that selects the upper bytes of four 16-bit halves, which are in two registers."""
_FROM_WORDS = "prmt.b32 signs, $5, $6, 0x0073; prmt.b32 more, $7, $8, 0x0073; prmt.b32 signs, signs, more, 0x5410;"
"""PTX that selects the upper bytes of four 32-bit words."""
HALVES_TO_E4M3, HALVES_TO_E5M2 = _cast_asm("e4m3", _FROM_HALVES), _cast_asm("e5m2", _FROM_HALVES)
WORDS_TO_E4M3, WORDS_TO_E5M2 = _cast_asm("e4m3", _FROM_WORDS), _cast_asm("e5m2", _FROM_WORDS)


@triton.jit
def as_float(raw):
    """Return loaded elements as float32; the elements are bfloat16 (as 16-bit integers), float16 or float32."""
    wide = raw.to(tl.uint32) << 16 if raw.dtype == tl.uint16 else raw.to(tl.float32)
    return wide.to(tl.float32, bitcast=True)


@triton.jit
def sign_of(raw):
    """Return the sign bits (int32, 128 or 0) of loaded elements, including those of NaN, which arithmetic would
    lose.
    """
    # The top byte of the input, whatever the input's width, has the sign in its highest bit.
    high = raw.to(tl.uint32, bitcast=True) >> 24 if raw.dtype == tl.float32 else raw.to(tl.uint16, bitcast=True) >> 8
    return high.to(tl.int32) & 0x80


@triton.jit
def round_to_code(value, mantissa: tl.constexpr, bias: tl.constexpr, largest: tl.constexpr, nan: tl.constexpr):
    """Round float32 values to codes (int32, without sign): to nearest, ties to even. Values that are too large become
    the largest code.

    `largest` is the code of the largest finite number, and `nan` the code for NaN. Below the smallest normal number,
    codes count equal steps; adding a float whose last bit is worth one step rounds to these steps.
    """
    size = value.to(tl.int32, bitcast=True) & ABS
    shift: tl.constexpr = 23 - mantissa
    # Round to nearest even on the bits: adding just under half of the last kept bit, plus that bit itself, produces a
    # carry exactly if the value must be rounded up.
    normal = (size + ((1 << (shift - 1)) - 1) + ((size >> shift) & 1)) >> shift
    # A carry out of the mantissa correctly increments the exponent. After rounding, the exponent is converted to the
    # target's bias.
    normal = tl.minimum(normal - ((127 - bias) << mantissa), largest)
    # At this size, the last bit of a float32 is worth one subnormal step of the target, so the hardware's addition
    # rounds to nearest, ties to even.
    magic: tl.constexpr = (127 + 24 - bias - mantissa) << 23
    step = tl.full(value.shape, magic, tl.int32).to(tl.float32, bitcast=True)
    small = (size.to(tl.float32, bitcast=True) + step).to(tl.int32, bitcast=True) - magic
    # `small` is the code for values below the smallest normal number of the target's dtype.
    code = tl.where(size < ((128 - bias) << 23), small, normal)
    return tl.where(size > INFINITY, nan, code)


@triton.jit
def float8_codes(value, raw, mantissa: tl.constexpr, native: tl.constexpr):
    """Round float32 values to float8 codes (uint8), E4M3 (3 mantissa bits) or E5M2 (2 bits), with the signs of
    `raw`.
    """
    if not native:
        size = round_to_code(value, mantissa, 7 if mantissa == 3 else 15, 0x7E if mantissa == 3 else 0x7B, 0x7F)
        codes = (size | sign_of(raw)).to(tl.uint8)
    elif raw.dtype == tl.float32:
        words: tl.constexpr = WORDS_TO_E4M3 if mantissa == 3 else WORDS_TO_E5M2
        codes = tl.inline_asm_elementwise(words, "=r,r,r,r,r,r,r,r,r", [value, raw], tl.uint8, is_pure=True, pack=4)
    else:
        halves: tl.constexpr = HALVES_TO_E4M3 if mantissa == 3 else HALVES_TO_E5M2
        codes = tl.inline_asm_elementwise(halves, "=r,r,r,r,r,r,r", [value, raw], tl.uint8, is_pure=True, pack=4)
    return codes


@triton.jit
def float8_values(code, mantissa: tl.constexpr, native: tl.constexpr):
    """Return the float32 values of float8 codes (uint8)."""
    if native:
        value = code.to(tl.float8e4nv if mantissa == 3 else tl.float8e5, bitcast=True).to(tl.float32)
    else:
        # The exponent is wrong by the difference of two biases; one multiplication corrects it, for subnormals too.
        raw = code.to(tl.int32) & 0x7F
        power = tl.full(code.shape, (254 - (7 if mantissa == 3 else 15)) << 23, tl.int32).to(tl.float32, bitcast=True)
        size = ((raw << (23 - mantissa)).to(tl.float32, bitcast=True) * power).to(tl.int32, bitcast=True)
        if mantissa == 3:
            size = tl.where(raw == 0x7F, NAN, size)
        else:
            size = tl.where(raw > 0x7C, NAN, tl.where(raw == 0x7C, INFINITY, size))
        value = (size | ((code.to(tl.int32) & 0x80) << 24)).to(tl.float32, bitcast=True)
    return value


@triton.jit
def nibble_values(code):
    """Return the float32 values of E2M1 codes (int32, 0 to 15): 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    size = code & 7
    # E2M1 has bias 1. After exponent and mantissa are moved to their places in a float32, 126 must be added to the
    # exponent.
    normal = (size + (126 << 1)) << 22
    value = tl.where(size > 1, normal, size * (126 << 23))
    return (value | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def power_of_two(code):
    """Return the float32 values of E8M0 codes (int32): 2 to the power of (code - 127), and NaN for code 255."""
    # Code 0 means 2^-127, which is subnormal in float32: only its highest mantissa bit is set.
    bits = tl.where(code == 0, 0x00400000, tl.where(code == 255, NAN, code << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e8m0_scale(amax, code_max: tl.constexpr):
    """Return a tile's E8M0 code (int32), amax / code_max rounded up to a power of two, and the factor for the tile's
    elements.

    The code for infinity is 254, the code for NaN is 255. If a tile is so small that its code is 0, the factor is 1.
    """
    bits = (amax * (1.0 / code_max)).to(tl.uint32, bitcast=True)
    # Adding a number with all bits below the exponent set rounds up; the first mantissa bit of a subnormal is 2^-127,
    # code 0.
    up = (bits + tl.where(bits < 0x800000, 0x3FFFFF, 0x7FFFFF)) >> 23
    code = up.to(tl.int32) - (bits >= INFINITY).to(tl.int32)
    # The inverse of 2^(code-127) has the exponent 254 - code; for code 254, the inverse is the subnormal 2^-127.
    by = tl.where(code >= 254, tl.where(code == 254, 0x400000, NAN), (254 - code) << 23)
    return code, tl.where(code == 0, 1.0, by.to(tl.float32, bitcast=True))


@triton.jit
def float8_scale(amax, code_max: tl.constexpr, largest: tl.constexpr, even: tl.constexpr):
    """Return the factor for a tile's elements that maps the tile's amax to the largest code; with `even`, a power of
    two.

    If the quotient overflows, the factor is `largest`, the largest finite number of the input's dtype.
    """
    scale = tl.div_rn(tl.full(amax.shape, code_max, tl.float32), amax)
    # A tiny amax makes the quotient overflow. For zeros, infinities and NaN, the scale becomes 1 below.
    scale = tl.where(scale == float("inf"), largest, scale)
    scale = tl.where((amax > 0) & (amax < float("inf")), scale, 1.0)
    if even:
        scale = (scale.to(tl.int32, bitcast=True) & INFINITY).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def inverse(value):
    """Return the reciprocal of a float32, rounded once."""
    return tl.div_rn(tl.full(value.shape, 1.0, tl.float32), value)


@triton.jit
def smaller(value, limit):
    """Return the smaller of `value` and `limit`; if `value` is NaN, return `limit`."""
    return tl.where(value < limit, value, limit)


@triton.jit
def e4m3_scale(amax, total, code_max: tl.constexpr, scale_max: tl.constexpr):
    """Return a block's E4M3 code, and the factor for the block's elements; `total` is the tensor's amax (a scalar)."""
    whole = tl.zeros([1], tl.float32) + total
    # Factor that maps the tensor's amax to the largest block scale times the largest code.
    spread = smaller(tl.div_rn(tl.full([1], scale_max * code_max, tl.float32), whole), LARGEST)
    spread = tl.where((whole == 0) | (spread == 0), 1.0, spread)
    by, back = tl.max(spread * (1.0 / code_max), axis=0), tl.max(inverse(spread), axis=0)
    # Elements are multiplied by the inverse of the scale as stored, and not of the exact scale, so that dequantizing
    # reverses exactly this multiplication.
    code = round_to_code(amax * by, 3, 7, 0x7E, 0x7F).to(tl.uint8)
    return code, smaller(inverse(float8_values(code, 3, False) * back), LARGEST)


@triton.jit
def element_offsets(rows, columns, row_stride, column_stride):
    """Return the offsets of a grid of elements, in int64, because a tensor may have more than 2^31 elements."""
    return rows.to(tl.int64)[:, None] * row_stride + columns.to(tl.int64)[None, :] * column_stride


@triton.jit
def scale_offsets(rows, columns, row_stride, swizzled: tl.constexpr):
    """Return the offsets of a grid of scales; if `swizzled`, in swizzled order, with rows padded to a multiple of 4
    columns.
    """
    if swizzled:
        down, along = rows.to(tl.int64)[:, None], columns.to(tl.int64)[None, :]
        # A block of 128 x 4 scales has 512 bytes; inside a block, rows 0, 32, 64 and 96 are neighbours.
        block = (down // 128) * (row_stride // 4) + along // 4
        offsets = block * 512 + (down % 32) * 16 + (down % 128) // 32 * 4 + along % 4
    else:
        offsets = element_offsets(rows, columns, row_stride, 1)
    return offsets


@triton.jit
def tile_max(x, rows: tl.constexpr, columns: tl.constexpr):
    """Return the largest magnitude in each tile of a block [R, C] as [R / rows, C / columns]; NaN if the tile has a
    NaN.
    """
    high: tl.constexpr = x.shape[0] // rows
    wide: tl.constexpr = x.shape[1] // columns
    size = x.to(tl.int32, bitcast=True) & ABS
    # The maximum is computed over integers: the order of magnitudes is the same, and NaN, whose bits are the largest,
    # is kept.
    row_max = tl.max(tl.reshape(size, [high, rows, wide, columns]), axis=3)
    return tl.max(row_max, axis=1).to(tl.float32, bitcast=True)


@triton.jit
def times(x, scale, rows: tl.constexpr, columns: tl.constexpr):
    """Multiply each tile of a block [R, C] by the tile's scale, given as [R / rows, C / columns]."""
    high: tl.constexpr = x.shape[0] // rows
    wide: tl.constexpr = x.shape[1] // columns
    tiles = tl.reshape(x, [high, rows, wide, columns]) * scale[:, None, :, None]
    return tl.reshape(tiles, [x.shape[0], x.shape[1]])


@triton.jit
def write_block(
    raw, codes, scales, total, row, column, height, width, code_stride, scale_stride,
    rows: tl.constexpr, columns: tl.constexpr, repeat_rows: tl.constexpr, repeat_columns: tl.constexpr,
    scheme: tl.constexpr, mantissa: tl.constexpr, scale_max: tl.constexpr, largest: tl.constexpr,
    even: tl.constexpr, native: tl.constexpr, swizzled: tl.constexpr,
):  # fmt: skip
    """Quantize the part of a block that starts at (row, column), and store its codes and scales.

    Tiles of `rows` x `columns` share an amax, and the scale of each such tile is stored `repeat_rows` x
    `repeat_columns` times.
    """
    x = as_float(raw)
    high: tl.constexpr = x.shape[0] // rows
    wide: tl.constexpr = x.shape[1] // columns
    amax = tile_max(x, rows, columns)
    code_max: tl.constexpr = 448.0 if mantissa == 3 else 57344.0 if mantissa == 2 else 6.0
    if scheme == BLOCK:
        scale = float8_scale(amax, code_max, largest, even)
        stored = inverse(scale)
    elif scheme == E8M0:
        stored, scale = e8m0_scale(amax, code_max)
        stored = stored.to(tl.uint8)
    else:
        stored, scale = e4m3_scale(amax, total, code_max, scale_max)
    if repeat_rows * repeat_columns > 1:
        stored = tl.broadcast_to(stored[:, None, :, None], [high, repeat_rows, wide, repeat_columns])
        stored = tl.reshape(stored, [high * repeat_rows, wide * repeat_columns])
    step_rows: tl.constexpr = rows // repeat_rows
    step_columns: tl.constexpr = columns // repeat_columns
    tile_rows = row // step_rows + tl.arange(0, high * repeat_rows)
    tile_columns = column // step_columns + tl.arange(0, wide * repeat_columns)
    inside = (tile_rows[:, None] * step_rows < height) & (tile_columns[None, :] * step_columns < width)
    tl.store(scales + scale_offsets(tile_rows, tile_columns, scale_stride, swizzled), stored, mask=inside)
    store_codes(times(x, scale, rows, columns), raw, codes, row, column, height, width, code_stride, mantissa, native)


@triton.jit
def store_codes(x, raw, codes, row, column, height, width, stride, mantissa: tl.constexpr, native: tl.constexpr):
    """Round a block of scaled values, and store the codes, 4-bit codes in pairs. The signs are those of `raw`."""
    down = row + tl.arange(0, x.shape[0])
    if mantissa == 1:
        nibbles = round_to_code(x, 1, 1, 7, 7) | (sign_of(raw) >> 4)
        # Two neighbours along a row share a byte; the first is in the low half.
        low, high = tl.split(tl.reshape(nibbles, [x.shape[0], x.shape[1] // 2, 2]))
        along = column // 2 + tl.arange(0, x.shape[1] // 2)
        inside = (down[:, None] < height) & (along[None, :] < width // 2)
        tl.store(codes + element_offsets(down, along, stride, 1), (low | (high << 4)).to(tl.uint8), mask=inside)
    else:
        along = column + tl.arange(0, x.shape[1])
        inside = (down[:, None] < height) & (along[None, :] < width)
        tl.store(codes + element_offsets(down, along, stride, 1), float8_codes(x, raw, mantissa, native), mask=inside)


@triton.jit
def quantize_block(
    x, codes, scales, column_codes, column_scales, total, row, column,
    height, width, x_row, x_column, code_row, scale_row, column_code_row, column_scale_row,
    block_rows: tl.constexpr, block_columns: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
    repeat_rows: tl.constexpr, repeat_columns: tl.constexpr, scheme: tl.constexpr, mantissa: tl.constexpr,
    scale_max: tl.constexpr, largest: tl.constexpr, even: tl.constexpr, native: tl.constexpr, swizzled: tl.constexpr,
):  # fmt: skip
    """Quantize the block of a matrix that starts at (row, column); the arguments are those of `quantize_program`."""
    down, along = row + tl.arange(0, block_rows), column + tl.arange(0, block_columns)
    inside = (down[:, None] < height) & (along[None, :] < width)
    raw = tl.load(x + element_offsets(down, along, x_row, x_column), mask=inside, other=0)
    if scheme == TENSOR or scheme == GIVEN:  # noqa: SIM109 - Triton has no `in`
        scale = tl.load(total + tl.arange(0, 1))
        if scheme == TENSOR:
            scale = float8_scale(scale, 448.0 if mantissa == 3 else 57344.0, largest, even)
        # Every program has the same scale, which the first program stores.
        tl.store(scales + tl.arange(0, 1), inverse(scale), mask=row + column == 0)
        scaled = as_float(raw) * scale[:, None]
        store_codes(scaled, raw, codes, row, column, height, width, code_row, mantissa, native)
    else:
        whole = tl.load(total) if scheme == E4M3 else 0.0
        if codes is not None:
            write_block(
                raw, codes, scales, whole, row, column, height, width, code_row, scale_row,
                rows, columns, repeat_rows, repeat_columns,
                scheme, mantissa, scale_max, largest, even, native, swizzled,
            )  # fmt: skip
        if column_codes is not None:
            if codes is not None:  # load again, from the cache, because registers are scarce
                raw = tl.load(x + element_offsets(down, along, x_row, x_column), mask=inside, other=0)
            write_block(
                raw, column_codes, column_scales, whole, row, column, height, width, column_code_row,
                column_scale_row, columns, rows, repeat_columns, repeat_rows,
                scheme, mantissa, scale_max, largest, even, native, False,
            )  # fmt: skip


@triton.jit
def quantize_program(
    x, codes, scales, column_codes, column_scales, total,
    height, width, x_row, x_column, code_row, scale_row, column_code_row, column_scale_row,
    block_rows: tl.constexpr, block_columns: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
    repeat_rows: tl.constexpr, repeat_columns: tl.constexpr, scheme: tl.constexpr, mantissa: tl.constexpr,
    scale_max: tl.constexpr, largest: tl.constexpr, even: tl.constexpr, native: tl.constexpr,
):  # fmt: skip
    """Quantize one block of a matrix: load it once, and store rowwise codes, columnwise codes, or both.

    Tiles are `rows` x `columns` for rowwise codes, and `columns` x `rows` for columnwise codes. Nothing is written to
    pointers that are None. `total` is one float32: the tensor's amax or, depending on the scheme, a scale that the
    caller passes; None if only tiles have amaxes.
    """
    across = tl.maximum(tl.cdiv(width, block_columns), 1)
    program = tl.program_id(0).to(tl.int64)
    row, column = (program // across) * block_rows, (program % across) * block_columns
    quantize_block(
        x, codes, scales, column_codes, column_scales, total, row, column,
        height, width, x_row, x_column, code_row, scale_row, column_code_row, column_scale_row,
        block_rows, block_columns, rows, columns, repeat_rows, repeat_columns,
        scheme, mantissa, scale_max, largest, even, native, False,
    )  # fmt: skip


@triton.jit
def amax_program(x, most, height, width, x_row, x_column, block_rows: tl.constexpr, block_columns: tl.constexpr):
    """Store the largest magnitude of a matrix, as bits, in `most` (int32, initially 0). Each program processes every
    n-th block.
    """
    across = tl.cdiv(width, block_columns).to(tl.int64)
    blocks = tl.cdiv(height, block_rows) * across
    largest = tl.zeros([block_rows, block_columns], tl.int32)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        down = (block // across) * block_rows + tl.arange(0, block_rows)
        along = (block % across) * block_columns + tl.arange(0, block_columns)
        inside = (down[:, None] < height) & (along[None, :] < width)
        value = as_float(tl.load(x + element_offsets(down, along, x_row, x_column), mask=inside, other=0))
        largest = tl.maximum(largest, value.to(tl.int32, bitcast=True) & ABS)
    # The maximum is an atomic operation on integers, so the result does not depend on the order of the programs.
    tl.atomic_max(most, tl.max(tl.max(largest, axis=1), axis=0), sem="relaxed")


@triton.jit
def as_stored(value, sign, out, native: tl.constexpr):
    """Round float32 values to the dtype of the pointer `out`: bfloat16 (as 16-bit integers), float16 or float32.

    A NaN gets the sign in `sign` (int32, 128 or 0) and no payload bits.
    """
    sound = value == value
    if out.dtype.element_ty == tl.float32:
        bits = tl.where(sound, value.to(tl.int32, bitcast=True), NAN | (sign << 24)).to(tl.float32, bitcast=True)
    elif out.dtype.element_ty == tl.float16:
        half = value.to(tl.float16).to(tl.int16, bitcast=True)
        bits = tl.where(sound, half, (0x7E00 | (sign << 8)).to(tl.int16)).to(tl.float16, bitcast=True)
    else:
        if native:
            short = value.to(tl.bfloat16).to(tl.uint16, bitcast=True)
        else:
            wide = value.to(tl.uint32, bitcast=True)
            short = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).to(tl.uint16)
        bits = tl.where(sound, short, (0x7FC0 | (sign << 8)).to(tl.uint16))
    return bits


@triton.jit
def dequantize_program(
    codes, scales, total, out, height, width, code_row, scale_row, out_row, divisor: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
    scheme: tl.constexpr, mantissa: tl.constexpr, native: tl.constexpr,
):  # fmt: skip
    """Store the values of one block of codes: code times scale in float32, rounded once to the dtype of `out`.

    For nvfp4, a tile's scale is first multiplied by the tensor's factor: the amax `total` divided by `divisor`. Along
    each dim, a block either is inside one tile or consists of whole tiles.
    """
    across = tl.cdiv(width, block_columns)
    program = tl.program_id(0).to(tl.int64)
    row, column = (program // across) * block_rows, (program % across) * block_columns
    down, along = row + tl.arange(0, block_rows), column + tl.arange(0, block_columns)
    if mantissa == 1:
        pairs = column // 2 + tl.arange(0, block_columns // 2)
        stored = (down[:, None] < height) & (pairs[None, :] < width // 2)
        pair = tl.load(codes + element_offsets(down, pairs, code_row, 1), mask=stored, other=0).to(tl.int32)
        code = tl.reshape(tl.join(pair & 15, pair >> 4), [block_rows, block_columns])
        value, sign = nibble_values(code), (code & 8) << 4
    else:
        stored = (down[:, None] < height) & (along[None, :] < width)
        code = tl.load(codes + element_offsets(down, along, code_row, 1), mask=stored, other=0)
        value, sign = float8_values(code, mantissa, native), (code & 0x80).to(tl.int32)
    if scheme == TENSOR:
        value *= tl.load(scales)
    else:
        # Along each dim, a block is either inside one tile or made of whole tiles. Therefore `share_rows` x
        # `share_columns` elements of the block share a scale.
        share_rows: tl.constexpr = min(rows, block_rows)
        share_columns: tl.constexpr = min(columns, block_columns)
        tile_rows = (row + share_rows * tl.arange(0, block_rows // share_rows)) // rows
        tile_columns = (column + share_columns * tl.arange(0, block_columns // share_columns)) // columns
        stored = (tile_rows[:, None] * rows < height) & (tile_columns[None, :] * columns < width)
        scale = tl.load(scales + element_offsets(tile_rows, tile_columns, scale_row, 1), mask=stored, other=0)
        if scheme == E8M0:
            scale = power_of_two(scale.to(tl.int32))
        elif scheme == E4M3:
            # The factor is computed in double precision, and the scale is rounded once.
            factor = tl.load(total).to(tl.float64) / divisor
            scale = (float8_values(scale, 3, False).to(tl.float64) * factor).to(tl.float32)
        value = times(value, scale, share_rows, share_columns)
    inside = (down[:, None] < height) & (along[None, :] < width)
    tl.store(out + element_offsets(down, along, out_row, 1), as_stored(value, sign, out, native), mask=inside)


@triton.jit
def transpose_program(codes, out, height, width, block_rows: tl.constexpr, block_columns: tl.constexpr):
    """Store the transposes of matrices of bytes, which follow one another in memory."""
    program = tl.program_id(0).to(tl.int64)
    across = tl.cdiv(width, block_columns)
    blocks_per_matrix = tl.cdiv(height, block_rows) * across
    matrix, block = program // blocks_per_matrix, program % blocks_per_matrix
    rows = (block // across) * block_rows + tl.arange(0, block_rows)
    columns = (block % across) * block_columns + tl.arange(0, block_columns)
    start = matrix * height * width
    inside = (rows[:, None] < height) & (columns[None, :] < width)
    code = tl.load(codes + start + element_offsets(rows, columns, width, 1), mask=inside, other=0)
    inside_transpose = (columns[:, None] < width) & (rows[None, :] < height)
    tl.store(out + start + element_offsets(columns, rows, height, 1), tl.trans(code), mask=inside_transpose)


# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False


HIGH = tl.constexpr(128)
"""Number of rows of a block of swizzled scales; each group of rows starts a new block."""


@triton.jit
def spans(offsets, groups, height, size: tl.constexpr):
    """Return the first row and the number of rows of each group, int64 [size], clipped to the matrix.

    `offsets` are the rows after the groups; `size` is a power of two, at least `groups`. Wrong offsets never result in
    negative numbers of rows.
    """
    every = tl.arange(0, size)
    stop = tl.load(offsets + every, mask=every < groups, other=0).to(tl.int64)
    start = tl.load(offsets + every - 1, mask=(every > 0) & (every < groups), other=0).to(tl.int64)
    start = tl.minimum(tl.maximum(start, 0), height)
    return start, tl.maximum(tl.minimum(stop, height) - start, 0)


@triton.jit
def locate_block(block, offsets, groups, height, block_rows: tl.constexpr, size: tl.constexpr):
    """Return a block's group, the group's first row and number of rows, and the block's first row inside the group.

    Each group has at least one block, even if the group is empty. Blocks after the last group have `groups` as their
    group.
    """
    every = tl.arange(0, size)
    start, rows = spans(offsets, groups, height, size)
    blocks = tl.where(every < groups, tl.maximum((rows + block_rows - 1) // block_rows, 1), 0)
    ends = tl.cumsum(blocks, axis=0)
    group = tl.sum(((ends <= block) & (every < groups)).to(tl.int32), axis=0)
    selected = every == group
    first = tl.sum(tl.where(selected, start, 0), axis=0)
    count = tl.sum(tl.where(selected, rows, 0), axis=0)
    row = (block - tl.sum(tl.where(selected, ends - blocks, 0), axis=0)) * block_rows
    return group, first, count, row


@triton.jit
def tiles_before(group, offsets, groups, height, step: tl.constexpr, size: tl.constexpr):
    """Return the number of rows of tiles in all groups before `group`; each group starts with a new tile."""
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
    """Quantize one block of one group as if the group were a separate matrix; the arguments are those of
    `quantize_program`.

    `total` has one number for each group. The scales of a group's tiles follow those of the previous group; if
    `swizzled`, they begin at the next multiple of 128 rows. Blocks that wrong offsets place beyond `tile_rows` (or
    `column_tile_rows`) write nothing.
    """
    across = tl.maximum(tl.cdiv(width, block_columns), 1)
    program = tl.program_id(0).to(tl.int64)
    column = (program % across) * block_columns
    group, first, count, row = locate_block(program // across, offsets, groups, height, block_rows, size)
    fits = group < groups
    if codes is not None:
        codes += first * code_row
        if scheme == TENSOR:
            scales += group
        else:
            step: tl.constexpr = HIGH if swizzled else rows // repeat_rows
            alignment: tl.constexpr = HIGH if swizzled else 1
            first_tile_row = tiles_before(group, offsets, groups, height, step, size) * alignment
            fits = fits & (first_tile_row + (count + step - 1) // step * alignment <= tile_rows)
            scales += first_tile_row * scale_row
    if column_codes is not None:
        column_codes += first * column_code_row
        high: tl.constexpr = columns // repeat_columns
        first_column_tile_row = tiles_before(group, offsets, groups, height, high, size)
        fits = fits & (first_column_tile_row + (count + high - 1) // high <= column_tile_rows)
        column_scales += first_column_tile_row * column_scale_row
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
    """Store the largest magnitude of a block of one group, as bits, in the group's entry of `most` (int32, initially
    0).
    """
    across = tl.maximum(tl.cdiv(width, block_columns), 1)
    program = tl.program_id(0).to(tl.int64)
    group, first, count, row = locate_block(program // across, offsets, groups, height, block_rows, size)
    down = row + tl.arange(0, block_rows)
    along = (program % across) * block_columns + tl.arange(0, block_columns)
    inside = (down[:, None] < count) & (along[None, :] < width)
    value = as_float(tl.load(x + first * x_row + element_offsets(down, along, x_row, x_column), mask=inside, other=0))
    largest = value.to(tl.int32, bitcast=True) & ABS
    tl.atomic_max(most + group, tl.max(tl.max(largest, axis=1), axis=0), mask=group < groups, sem="relaxed")


@triton.jit
def quantize_rows_program(
    x, offsets, codes, scales, groups, height, width, x_row, x_column, code_row,
    block_rows: tl.constexpr, block_columns: tl.constexpr, mantissa: tl.constexpr,
    largest: tl.constexpr, even: tl.constexpr, native: tl.constexpr,
):  # fmt: skip
    """Quantize a block of rows, each by its own amax, which a first pass computes; rows outside of all groups are not
    written.
    """
    row = tl.program_id(0).to(tl.int64) * block_rows
    stop = tl.minimum(tl.load(offsets + groups - 1).to(tl.int64), height)
    down = row + tl.arange(0, block_rows)
    largest_bits = tl.zeros([block_rows, block_columns], tl.int32)
    if row < stop:
        for column in range(0, width, block_columns):
            along = column + tl.arange(0, block_columns)
            inside = (down[:, None] < stop) & (along[None, :] < width)
            value = as_float(tl.load(x + element_offsets(down, along, x_row, x_column), mask=inside, other=0))
            largest_bits = tl.maximum(largest_bits, value.to(tl.int32, bitcast=True) & ABS)
        code_max: tl.constexpr = 448.0 if mantissa == 3 else 57344.0
        scale = float8_scale(tl.max(largest_bits, axis=1).to(tl.float32, bitcast=True), code_max, largest, even)
        tl.store(scales + down, inverse(scale), mask=down < stop)
        for column in range(0, width, block_columns):
            along = column + tl.arange(0, block_columns)
            inside = (down[:, None] < stop) & (along[None, :] < width)
            raw = tl.load(x + element_offsets(down, along, x_row, x_column), mask=inside, other=0)
            scaled = as_float(raw) * scale[:, None]
            store_codes(scaled, raw, codes, row, column, stop, width, code_row, mantissa, native)
