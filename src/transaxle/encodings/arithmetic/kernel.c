/* Arithmetic of encodings: codes times the scale of their tile, and back.

   Four operations on the rows of a matrix: `largest` (amax of each tile), `cast` (values times a multiplier per tile,
   rounded to codes), `value` (codes times a scale per tile, rounded to a wide type) and the two measures of error.
   What a scale is, as a function of an amax, is decided in scaling.py, for this path and the numpy one alike;
   vectorised.py states in numpy what is computed here, and the tests hold the two to the same bits.

   Plain C11, loops that compilers turn into vector code; no state, no allocation, no dependency. It is built without
   contraction of products and sums (-ffp-contract=off) and without fast-math, so every operation rounds as IEEE 754
   says on any processor. */

#include <float.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if FLT_EVAL_METHOD != 0
#error "floats are computed as doubles here; the numpy path is exact"
#endif

/* One copy for each generation of x86-64, chosen when the library is loaded: needs glibc's indirect functions. */
#if defined(CLONES) && defined(__x86_64__) && defined(__GLIBC__)
#define CLONED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONED
#endif
#define INLINE static inline __attribute__((always_inline))

enum { BF16, F16, F32 };        /* wide types, numbered as in kernel.py */
enum { E4M3, E5M2, E2M1, I4, I8, U8, NF4, FP4 };  /* codes, likewise */
enum { INTEGER = I4, TABLE = FP4 };  /* loops for all integers, and for whatever a table states */
enum { WIDTH = 1024 };          /* columns worked on at a time: their buffers stay in the first cache; even */

#define INFINITE 0x7f800000u
#define NAN_BITS 0x7fc00000u

INLINE uint32_t bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
INLINE float real(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
INLINE ptrdiff_t least(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }

/* `yes` where the condition is 1, `no` where it is 0: by masks, because branches keep compilers from making vectors. */
INLINE uint32_t pick(uint32_t condition, uint32_t yes, uint32_t no) { return no ^ ((yes ^ no) & -condition); }

/* ---- one element ---- */

INLINE float from_half(uint32_t half) {
    uint32_t size = half & 0x7fff;
    uint32_t wide = (size << 13) + (112u << 23) + pick(size >= 0x7c00, 112u << 23, 0);
    return real((half & 0x8000) << 16 | pick(size < 0x400, bits((float)(int32_t)size * 0x1p-24f), wide));
}

INLINE float widened(const void *x, ptrdiff_t j, int type) {
    if (type == BF16) return real((uint32_t)((const uint16_t *)x)[j] << 16);
    if (type == F16) return from_half(((const uint16_t *)x)[j]);
    return ((const float *)x)[j];
}

/* Round to nearest, ties to even; what is too large becomes the largest finite code, NaN stays NaN, signs stay. */
INLINE uint8_t rounded_to(float f, int code) {
    const uint32_t mantissa = code == E4M3 ? 3 : code == E5M2 ? 2 : 1;
    const uint32_t bias = code == E4M3 ? 7 : code == E5M2 ? 15 : 1;
    const uint32_t top = code == E4M3 ? 0x7e : code == E5M2 ? 0x7b : 7;
    const uint32_t none = code == E2M1 ? 7 : 0x7f;
    const uint32_t shift = 23 - mantissa;
    const uint32_t grain = (127 + 24 - bias - mantissa) << 23; /* a power of two whose last bit is the smallest code */
    uint32_t u = bits(f), size = u & 0x7fffffff;
    uint32_t normal = ((size + (1u << (shift - 1)) - 1 + (size >> shift & 1)) >> shift) - ((127 - bias) << mantissa);
    uint32_t small = bits(real(size) + real(grain)) - grain;
    uint32_t q = pick(size < (128 - bias) << 23, small, normal);
    q = pick(size > INFINITE, none, pick(q < top, q, top));
    return (uint8_t)(q | u >> 31 << (code == E2M1 ? 3 : 7));
}

/* Multipliers are positive or NaN: the sign is that of the value, whatever the processor makes of two NaN. */
INLINE uint8_t rounded_product(float f, float multiplier, int code) {
    return rounded_to(real((bits(f * multiplier) & 0x7fffffff) | (bits(f) & 0x80000000)), code);
}

/* What is known of a type only when the code runs: integers are stored plus 8 (I4), plus 128 (U8) or in two's
   complement (I8); a table has the value of each code. */
typedef struct { int code, halves; int32_t flip, bias; float table[256]; } kind;

/* The tables of codes.py. */
static const float normal_floats[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
static const float small_floats[16] = {
    0.0f, 0.0625f / 12, 8.0f / 12, 1.0f, 4.0f / 12, 0.5f, 2.0f / 12, 0.25f,
    0.0f, -0.0625f / 12, -8.0f / 12, -1.0f, -4.0f / 12, -0.5f, -2.0f / 12, -0.25f};

static void describe(kind *k, int code) {
    k->code = code;
    k->halves = code == E2M1 || code == I4 || code == NF4 || code == FP4;
    k->flip = code == I8 ? 128 : 0;
    k->bias = code == I4 ? 8 : 128;
    for (int q = 0; code >= I4 && q < (k->halves ? 16 : 256); q++)
        k->table[q] = code == NF4   ? normal_floats[q]
                      : code == FP4 ? small_floats[q]
                                    : (float)((q ^ k->flip) - k->bias);
}

INLINE float meant(uint32_t q, int code, const kind *k) {
    if (code == INTEGER) return (float)(((int32_t)q ^ k->flip) - k->bias);
    if (code == TABLE) return k->table[q];
    if (code == E5M2) return from_half(q << 8);
    const uint32_t mantissa = code == E4M3 ? 3 : 1, bias = code == E4M3 ? 7 : 1;
    uint32_t size = q & (code == E4M3 ? 0x7f : 7), sign = q >> (code == E4M3 ? 7 : 3) << 31;
    float smallest = code == E4M3 ? 0x1p-9f : 0x1p-1f;
    uint32_t small = bits((float)(int32_t)size * smallest);
    uint32_t normal = (size << (23 - mantissa)) + ((127 - bias) << 23);
    uint32_t wide = pick(size < 1u << mantissa, small, normal);
    return real(sign | (code == E4M3 ? pick(size == 0x7f, NAN_BITS, wide) : wide));
}

/* Every NaN has the sign of what is scaled and no payload: processors differ in what they make of them. */
INLINE float times(float wide, float scale) {
    float f = wide * scale;
    return real(pick((bits(f) & 0x7fffffff) > INFINITE, (bits(wide) & 0x80000000) | NAN_BITS, bits(f)));
}

/* Code minus zero point; the zero point is an integer, 0 where there is none. */
INLINE float shifted(uint32_t q, int code, const kind *k, float zero) {
    return code >= INTEGER ? meant(q, code, k) - zero : meant(q, code, k);
}

INLINE float scaled(uint32_t q, int code, const kind *k, float scale, float zero) {
    return times(shifted(q, code, k, zero), scale);
}

INLINE uint16_t to_bfloat(float f) {
    uint32_t u = bits(f), even = (u + 0x7fff + (u >> 16 & 1)) >> 16;
    return (uint16_t)pick((u & 0x7fffffff) > INFINITE, u >> 16 | 0x40, even);
}

INLINE uint16_t to_half(float f) {
    uint32_t u = bits(f), size = u & 0x7fffffff, sign = u >> 16 & 0x8000;
    uint32_t normal = (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    uint32_t small = bits(real(size) + 0.5f) - (126u << 23);
    uint32_t half = pick(size < 113u << 23, small, pick(size >= 143u << 23, 0x7c00, normal));
    return (uint16_t)(sign | pick(size > INFINITE, 0x7e00, half));
}

INLINE void narrowed(void *restrict out, ptrdiff_t j, float f, int type) {
    if (type == F32) ((float *)out)[j] = f;
    else ((uint16_t *)out)[j] = type == BF16 ? to_bfloat(f) : to_half(f);
}

INLINE float as_type(float f, int type) {
    if (type == F32) return f;
    return type == BF16 ? real((uint32_t)to_bfloat(f) << 16) : from_half(to_half(f));
}

/* ---- rows and tiles ---- */

/* A matrix of tiles: where the first row and column lie in their tile, and the tile's size. */
typedef struct { ptrdiff_t rows, columns, row_phase, column_phase, tile_rows, tile_columns; } grid;

INLINE ptrdiff_t across(const grid *g) { return (g->column_phase + g->columns + g->tile_columns - 1) / g->tile_columns; }
INLINE ptrdiff_t item(int type) { return type == F32 ? 4 : 2; }

/* Repeat each tile's number over its columns, for `count` columns from `first` on. */
#define SPREAD(name, real_type)                                                                                       \
    INLINE void name(real_type *restrict out, const real_type *row, const grid *g, ptrdiff_t first, ptrdiff_t count) { \
        ptrdiff_t at = g->column_phase + first, tile = at / g->tile_columns, in = at % g->tile_columns;               \
        for (ptrdiff_t j = 0; j < count; tile++, in = 0) {                                                            \
            ptrdiff_t end = j + least(g->tile_columns - in, count - j);                                               \
            for (real_type number = row[tile]; j < end; j++) out[j] = number;                                         \
        }                                                                                                             \
    }
SPREAD(spread, float)
SPREAD(spread_wide, double)

/* Codes of `count` columns from `first` on, one to a byte. */
INLINE const uint8_t *unpacked(uint8_t *restrict buffer, const uint8_t *row, ptrdiff_t first, ptrdiff_t count, int halves) {
    if (!halves) return row + first;
    for (ptrdiff_t j = 0; j < count / 2; j++) {
        buffer[2 * j] = row[first / 2 + j] & 15;
        buffer[2 * j + 1] = row[first / 2 + j] >> 4;
    }
    return buffer;
}

/* ---- largest: the amax of each tile, as the bits of the input's type without sign: ordered, NaN above all ---- */

#define LARGEST(name, word, mask)                                                                                     \
    INLINE word name##_of(const word *restrict x, ptrdiff_t count) {                                                  \
        word most = 0;                                                                                                \
        for (ptrdiff_t j = 0; j < count; j++) most = x[j] > most ? x[j] : most;                                       \
        return most;                                                                                                  \
    }                                                                                                                 \
    INLINE void name(const uint8_t *x, ptrdiff_t stride, const grid *g, uint32_t *out) {                              \
        word most[WIDTH];                                                                                             \
        const ptrdiff_t wide = g->tile_columns < WIDTH ? WIDTH - WIDTH % g->tile_columns : WIDTH, tiles = across(g);  \
        for (ptrdiff_t top = 0; top < g->rows; top += g->tile_rows, out += tiles) {                                   \
            ptrdiff_t end = least(top + g->tile_rows, g->rows);                                                       \
            for (ptrdiff_t first = 0; first < g->columns; first += wide) {                                            \
                ptrdiff_t count = least(wide, g->columns - first);                                                    \
                memset(most, 0, sizeof most);                                                                         \
                for (ptrdiff_t i = top; i < end; i++) {                                                               \
                    const word *row = (const word *)(x + i * stride) + first;                                         \
                    for (ptrdiff_t j = 0; j < count; j++) {                                                           \
                        word size = row[j] & mask;                                                                    \
                        most[j] = size > most[j] ? size : most[j];                                                    \
                    }                                                                                                 \
                }                                                                                                     \
                ptrdiff_t step = least(g->tile_columns, wide);                                                        \
                for (ptrdiff_t j = 0; j < count; j += step) {                                                         \
                    word found = step == 16 ? name##_of(most + j, 16) : step == 32 ? name##_of(most + j, 32)          \
                                                                                   : name##_of(most + j, step);       \
                    uint32_t *tile = out + (first + j) / g->tile_columns;                                             \
                    *tile = found > *tile ? found : *tile;                                                            \
                }                                                                                                     \
            }                                                                                                         \
        }                                                                                                             \
    }
LARGEST(largest16, uint16_t, 0x7fff)
LARGEST(largest32, uint32_t, 0x7fffffff)

/* `out` holds zeros, one for each tile; the matrix starts on a tile. `stride`: bytes from row to row. */
CLONED void transaxle_largest(const uint8_t *x, ptrdiff_t stride, const grid *g, uint32_t *out, int type) {
    if (type == F32) largest32(x, stride, g, out);
    else largest16(x, stride, g, out);
}

/* ---- cast: values times their tile's multiplier, as codes ---- */

INLINE void cast(const uint8_t *x, ptrdiff_t stride, const grid *g, const float *by, uint8_t *out,
                 ptrdiff_t out_stride, int type, int code) {
    float multiplier[WIDTH];
    uint8_t codes[WIDTH];
    for (ptrdiff_t first = 0; first < g->columns; first += WIDTH) {
        ptrdiff_t count = least(WIDTH, g->columns - first), filled = -1;
        for (ptrdiff_t i = 0; i < g->rows; i++) {
            ptrdiff_t tile = (g->row_phase + i) / g->tile_rows;
            if (tile != filled) spread(multiplier, by + tile * across(g), g, first, count);
            filled = tile;
            const uint8_t *restrict row = x + i * stride + first * item(type);
            uint8_t *restrict to = code == E2M1 ? codes : out + i * out_stride + first;
            for (ptrdiff_t j = 0; j < count; j++) to[j] = rounded_product(widened(row, j, type), multiplier[j], code);
            if (code == E2M1) {
                uint8_t *restrict packed = out + i * out_stride + first / 2;
                for (ptrdiff_t j = 0; j < count / 2; j++) packed[j] = (uint8_t)(codes[2 * j] | codes[2 * j + 1] << 4);
            }
        }
    }
}

/* Call OPERATION with constants in place of `type` and `code`, so that each pair has loops of its own. */
#define EACH_FLOAT(type, OPERATION, ...)                                                                              \
    (code == E4M3   ? OPERATION(__VA_ARGS__, type, E4M3)                                                              \
     : code == E5M2 ? OPERATION(__VA_ARGS__, type, E5M2)                                                              \
                    : OPERATION(__VA_ARGS__, type, E2M1))
#define EACH_CODE(type, OPERATION, ...)                                                                               \
    (code == NF4 || code == FP4 ? OPERATION(__VA_ARGS__, type, TABLE)                                                 \
     : code >= I4               ? OPERATION(__VA_ARGS__, type, INTEGER)                                               \
                                : EACH_FLOAT(type, OPERATION, __VA_ARGS__))
#define EACH_TABLE(type, OPERATION, ...)                                                                              \
    (code >= I4 ? OPERATION(__VA_ARGS__, type, TABLE) : EACH_FLOAT(type, OPERATION, __VA_ARGS__))
#define EACH(CODES, OPERATION, ...)                                                                                   \
    (type == BF16  ? CODES(BF16, OPERATION, __VA_ARGS__)                                                              \
     : type == F16 ? CODES(F16, OPERATION, __VA_ARGS__)                                                               \
                   : CODES(F32, OPERATION, __VA_ARGS__))

CLONED void transaxle_cast(const uint8_t *x, ptrdiff_t stride, const grid *g, const float *by, uint8_t *out,
                           ptrdiff_t out_stride, int type, int code) {
    EACH(EACH_FLOAT, cast, x, stride, g, by, out, out_stride);
}

/* ---- int4: the scale of each group of values, and their codes (the rule is in codes.py) ---- */

INLINE uint32_t type_bits(float f, int type) {
    return type == F32 ? bits(f) : type == BF16 ? to_bfloat(f) : to_half(f);
}

INLINE float from_bits(uint32_t u, int type) {
    return type == F32 ? real(u) : type == BF16 ? real(u << 16) : from_half(u);
}

/* Round to the nearest integer, ties to even: adding 1.5 x 2^23 leaves no bits for a fraction. */
INLINE float whole(float f) { return f + 0x1.8p23f - 0x1.8p23f; }

/* Whether every value is an integer from -8 to 7 times the scale, rounded to the type. */
INLINE int keeps(const float *x, ptrdiff_t count, float scale, int type) {
    if (!(scale > 0 && bits(scale) < INFINITE)) return 0;
    for (ptrdiff_t j = 0; j < count; j++) {
        float quotient = x[j] / scale;
        if (!(quotient >= -9 && quotient <= 8)) return 0;
        float integer = whole(quotient);
        if (integer < -8 || integer > 7 || as_type(integer * scale, type) != x[j]) return 0;
    }
    return 1;
}

INLINE float group_scale(const float *x, ptrdiff_t count, int type, int search) {
    const float top = type == F32 ? FLT_MAX : type == BF16 ? 0x1.fep127f : 65504.0f;
    const float epsilon = type == F32 ? 0x1p-23f : type == BF16 ? 0x1p-7f : 0x1p-10f;
    uint32_t most = 0;
    for (ptrdiff_t j = 0; j < count; j++) {
        uint32_t size = bits(x[j]) & 0x7fffffff;
        most = size > most ? size : most;
    }
    if (most > INFINITE) return real(NAN_BITS);
    float amax = most == INFINITE ? top : real(most), scale = as_type(amax / 7.5f, type);
    for (int divisor = 7; search && most && most < INFINITE && divisor <= 8; divisor++) {
        uint32_t near = type_bits(amax / (float)divisor, type);
        for (int step = 0; step < 3; step++) {
            float candidate = from_bits(near + (step == 0 ? 0u : step == 1 ? -1u : 1u), type);
            if (keeps(x, count, candidate, type)) return candidate;
        }
    }
    return scale == 0 ? epsilon : scale;
}

/* `scales`: room for one number of the type for each tile; a tile is one row high. */
INLINE void int4(const uint8_t *x, ptrdiff_t stride, const grid *g, uint8_t *scales, uint8_t *out,
                 ptrdiff_t out_stride, float *row_values, int type) {
    const int search = g->columns % g->tile_columns == 0;
    for (ptrdiff_t i = 0; i < g->rows; i++) {
        for (ptrdiff_t j = 0; j < g->columns; j++) row_values[j] = widened(x + i * stride, j, type);
        for (ptrdiff_t first = 0; first < g->columns; first += g->tile_columns) {
            ptrdiff_t count = least(g->tile_columns, g->columns - first);
            float *values = row_values + first, scale = group_scale(values, count, type, search);
            narrowed(scales + (i * across(g) + first / g->tile_columns) * item(type), 0, scale, type);
            for (ptrdiff_t j = 0; j < count; j++) {
                float quotient = as_type(values[j] / scale, type);
                float bounded = quotient < -8 ? -8 : quotient > 7 ? 7 : quotient == quotient ? quotient : 0;
                values[j] = whole(bounded) + 8;
            }
        }
        for (ptrdiff_t j = 0; j < g->columns / 2; j++)
            out[i * out_stride + j] = (uint8_t)((uint8_t)row_values[2 * j] | (uint8_t)row_values[2 * j + 1] << 4);
    }
}

/* `row_values`: room for the values of one row. */
CLONED void transaxle_int4(const uint8_t *x, ptrdiff_t stride, const grid *g, uint8_t *scales, uint8_t *out,
                           ptrdiff_t out_stride, float *row_values, int type) {
    if (type == BF16) int4(x, stride, g, scales, out, out_stride, row_values, BF16);
    else if (type == F16) int4(x, stride, g, scales, out, out_stride, row_values, F16);
    else int4(x, stride, g, scales, out, out_stride, row_values, F32);
}

/* ---- value: codes times their tile's scale ---- */

/* `zeros`: the zero point of each tile, for integers only; null if all are 0. */
INLINE void value(const uint8_t *q, ptrdiff_t stride, const grid *g, const float *by, const float *zeros, uint8_t *out,
                  ptrdiff_t out_stride, const kind *k, int type, int code) {
    float scale[WIDTH], zero[WIDTH];
    uint8_t buffer[WIDTH];
    for (ptrdiff_t first = 0; first < g->columns; first += WIDTH) {
        ptrdiff_t count = least(WIDTH, g->columns - first), filled = -1;
        for (ptrdiff_t i = 0; i < g->rows; i++) {
            ptrdiff_t tile = (g->row_phase + i) / g->tile_rows;
            if (tile != filled) spread(scale, by + tile * across(g), g, first, count);
            if (tile != filled && zeros) spread(zero, zeros + tile * across(g), g, first, count);
            filled = tile;
            const uint8_t *restrict codes = unpacked(buffer, q + i * stride, first, count, k->halves);
            uint8_t *restrict row = out + i * out_stride + first * item(type);
            if (code == INTEGER && zeros)
                for (ptrdiff_t j = 0; j < count; j++)
                    narrowed(row, j, scaled(codes[j], code, k, scale[j], zero[j]), type);
            else
                for (ptrdiff_t j = 0; j < count; j++) narrowed(row, j, scaled(codes[j], code, k, scale[j], 0), type);
        }
    }
}

CLONED void transaxle_value(const uint8_t *q, ptrdiff_t stride, const grid *g, const float *by, const float *zeros,
                            uint8_t *out, ptrdiff_t out_stride, int type, int code) {
    kind k;
    describe(&k, code);
    EACH(EACH_CODE, value, q, stride, g, by, zeros, out, out_stride, &k);
}

/* ---- error: the largest difference, the sum of its squares, and how many elements differ ---- */

enum { LANES = 8 };
typedef struct { double most, squares[LANES]; int64_t unequal; } tally;

/* Add the absolute differences in `apart`, which are numbers or infinite; `count` is a multiple of LANES. */
INLINE void add(tally *t, const double *restrict apart, ptrdiff_t count) {
    int64_t most = 0, unequal = 0, size; /* numbers without sign are ordered as their bits are */
    double squares[LANES];
    memcpy(squares, t->squares, sizeof squares);
    for (ptrdiff_t j = 0; j < count; j++) unequal += apart[j] > 0;
    for (ptrdiff_t j = 0; j < count; j++) {
        memcpy(&size, apart + j, 8);
        most = size > most ? size : most;
    }
    for (ptrdiff_t j = 0; j < count; j += LANES)
        for (int k = 0; k < LANES; k++) squares[k] += apart[j + k] * apart[j + k];
    double largest;
    memcpy(&largest, &most, 8);
    t->most = largest > t->most ? largest : t->most;
    t->unequal += unequal;
    memcpy(t->squares, squares, sizeof squares);
}

/* Add the differences between `made` and `whole` times `wide`. The arrays have room for a multiple of LANES. Two NaN are
   equal, and so are two infinities; a difference that is NaN otherwise is infinite. */
CLONED static void compare(tally *t, float *restrict made, float *restrict whole, double *restrict wide,
                           double *restrict apart, ptrdiff_t count) {
    int64_t none = 0, size;
    for (; count % LANES; count++) made[count] = whole[count] = 0, wide[count] = 0;
    for (ptrdiff_t j = 0; j < count; j++) {
        double difference = made[j] - whole[j] * wide[j];
        memcpy(&size, &difference, 8);
        size &= INT64_MAX;
        memcpy(apart + j, &size, 8);
        none += difference != difference;
    }
    for (ptrdiff_t j = 0; none && j < count; j++) {
        double a = made[j], b = whole[j] * wide[j];
        if (apart[j] != apart[j]) apart[j] = a == b || (a != a && b != b) ? 0 : (double)real(INFINITE);
    }
    add(t, apart, count);
}

/* Given `x`: what the codes say in float32 against it. Without: what they say, rounded to the type, against the
   product of code and `exact`, the scale in double precision. */
INLINE void error(const uint8_t *x, ptrdiff_t x_stride, const uint8_t *q, ptrdiff_t stride, const grid *g,
                  const float *by, const float *zeros, const double *exact, double *out, const kind *k, int type,
                  int code) {
    float scale[WIDTH], zero[WIDTH], made[WIDTH], whole[WIDTH];
    double wide[WIDTH], apart[WIDTH];
    uint8_t buffer[WIDTH];
    tally t;
    memset(&t, 0, sizeof t);
    memset(zero, 0, sizeof zero);
    for (ptrdiff_t j = 0; j < WIDTH; j++) wide[j] = 1;
    for (ptrdiff_t first = 0; first < g->columns; first += WIDTH) {
        ptrdiff_t count = least(WIDTH, g->columns - first), filled = -1;
        for (ptrdiff_t i = 0; i < g->rows; i++) {
            ptrdiff_t tile = (g->row_phase + i) / g->tile_rows;
            if (tile != filled) spread(scale, by + tile * across(g), g, first, count);
            if (tile != filled && zeros) spread(zero, zeros + tile * across(g), g, first, count);
            if (tile != filled && !x) spread_wide(wide, exact + tile * across(g), g, first, count);
            filled = tile;
            const uint8_t *restrict codes = unpacked(buffer, q + i * stride, first, count, k->halves);
            for (ptrdiff_t j = 0; j < count; j++) whole[j] = shifted(codes[j], code, k, zero[j]);
            if (x) {
                const uint8_t *restrict row = x + i * x_stride + first * item(type);
                for (ptrdiff_t j = 0; j < count; j++) made[j] = times(whole[j], scale[j]);
                for (ptrdiff_t j = 0; j < count; j++) whole[j] = widened(row, j, type);
            } else {
                for (ptrdiff_t j = 0; j < count; j++) made[j] = as_type(times(whole[j], scale[j]), type);
            }
            compare(&t, made, whole, wide, apart, count);
        }
    }
    out[0] = t.most;
    for (int lane = 0; lane < LANES; lane++) out[1] += t.squares[lane];
    out[2] = (double)t.unequal;
}

CLONED void transaxle_error(const uint8_t *x, ptrdiff_t x_stride, const uint8_t *q, ptrdiff_t stride, const grid *g,
                            const float *by, const float *zeros, const double *exact, double *out, int type, int code) {
    kind k;
    describe(&k, code);
    if (x) EACH(EACH_TABLE, error, x, x_stride, q, stride, g, by, zeros, exact, out, &k);
    else EACH(EACH_TABLE, error, NULL, 0, q, stride, g, by, zeros, exact, out, &k);
}

/* Which source this was built from: kernel.py loads no other. */
uint32_t transaxle_stamp(void) { return STAMP; }
