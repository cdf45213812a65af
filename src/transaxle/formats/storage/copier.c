/* Carries out lists of transfers between files and memory: reads of ranges, and of equally long runs, each into its
   place; transposed and strided copies; hashes (XXH3) and CRC-32 of what was read; writes; comparisons.

   Asked for one by one from Python, a step costs several times its copy; here it costs the system call. Plain C11 and
   POSIX; no state, no allocation, no dependency. */

#define _POSIX_C_SOURCE 200809L
#define _FILE_OFFSET_BITS 64

#include <stdint.h>
#include <string.h>
#include <unistd.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif
#if defined(__x86_64__) && defined(__GNUC__)
#define FOLDS 1
#include <immintrin.h>
#if defined(__clang__) || __GNUC__ >= 8
#define FOLDS_WIDE 1
#endif
#endif

/* One copy for each generation of x86-64, chosen when the library is loaded: needs glibc's indirect functions. */
#if defined(CLONES) && defined(__x86_64__) && defined(__GLIBC__)
#define CLONED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONED
#endif
#if defined(__clang__)
#define SWAPPED(words) __builtin_shufflevector(words, words, 1, 0, 3, 2, 5, 4, 7, 6)
#else
#define SWAPPED(words) __builtin_shuffle(words, (eight){1, 0, 3, 2, 5, 4, 7, 6})
#endif

/* A transpose goes through square tiles: of each, the lines of the source and those of the target stay in the cache, so
   that every line of memory is fetched once. Element (row, column) is `column` elements and `row` steps from the begin of
   the source, and the other way round in the target. */
enum { SIDE = 32 };

/* A full tile of elements of 16 or 32 bits, in squares as wide as a register, straight into the target; 0 where there
   are no such registers. The lines of the source are first laid side by side: where they lie a power of two apart, the
   cache keeps too few of them. Those of the tile to the right are fetched meanwhile. */
#if defined(__SSE2__)
#define LAID_OUT(source, step, tile)                                                                                   \
    for (int row = 0; row < SIDE; row++) {                                                                             \
        const uint8_t *from = (source) + row * (step);                                                                 \
        for (int at = 0; at < (int)sizeof tile[0]; at += 16)                                                           \
            _mm_store_si128((__m128i *)(tile[row] + at), _mm_loadu_si128((const __m128i *)(from + at)));               \
        _mm_prefetch((const char *)(from + sizeof tile[0]), _MM_HINT_T0);                                              \
    }

static int full_16(const uint8_t *source, int64_t step, uint8_t *target, int64_t into) {
    _Alignas(64) uint8_t tile[SIDE][2 * SIDE];
    LAID_OUT(source, step, tile)
    for (int column = 0; column < SIDE; column += 8)
        for (int row = 0; row < SIDE; row += 8) {
            __m128i a[8], b[8];
            for (int i = 0; i < 8; i++) a[i] = _mm_load_si128((const __m128i *)(tile[row + i] + 2 * column));
            for (int i = 0; i < 4; i++) {
                b[2 * i] = _mm_unpacklo_epi16(a[i], a[i + 4]);
                b[2 * i + 1] = _mm_unpackhi_epi16(a[i], a[i + 4]);
            }
            for (int i = 0; i < 4; i++) {
                a[2 * i] = _mm_unpacklo_epi16(b[i], b[i + 4]);
                a[2 * i + 1] = _mm_unpackhi_epi16(b[i], b[i + 4]);
            }
            for (int i = 0; i < 4; i++) {
                b[2 * i] = _mm_unpacklo_epi16(a[i], a[i + 4]);
                b[2 * i + 1] = _mm_unpackhi_epi16(a[i], a[i + 4]);
            }
            for (int i = 0; i < 8; i++) _mm_storeu_si128((__m128i *)(target + (column + i) * into + 2 * row), b[i]);
        }
    return 1;
}

static int full_32(const uint8_t *source, int64_t step, uint8_t *target, int64_t into) {
    _Alignas(64) uint8_t tile[SIDE][4 * SIDE];
    LAID_OUT(source, step, tile)
    for (int column = 0; column < SIDE; column += 4)
        for (int row = 0; row < SIDE; row += 4) {
            __m128i a[4], b[4];
            for (int i = 0; i < 4; i++) a[i] = _mm_load_si128((const __m128i *)(tile[row + i] + 4 * column));
            for (int i = 0; i < 2; i++) {
                b[2 * i] = _mm_unpacklo_epi32(a[i], a[i + 2]);
                b[2 * i + 1] = _mm_unpackhi_epi32(a[i], a[i + 2]);
            }
            for (int i = 0; i < 2; i++) {
                a[2 * i] = _mm_unpacklo_epi32(b[i], b[i + 2]);
                a[2 * i + 1] = _mm_unpackhi_epi32(b[i], b[i + 2]);
            }
            for (int i = 0; i < 4; i++) _mm_storeu_si128((__m128i *)(target + (column + i) * into + 4 * row), a[i]);
        }
    return 1;
}
#else
#define full_16(source, step, target, into) 0
#define full_32(source, step, target, into) 0
#endif

#define TRANSPOSE(TYPE, FULL)                                                                                          \
    static void transpose_##TYPE(const uint8_t *from, uint8_t *to, int64_t rows, int64_t columns, int64_t step,        \
                                 int64_t into) {                                                                       \
        TYPE line[SIDE], tile[SIDE][SIDE];                                                                             \
        for (int64_t row = 0; row < rows; row += SIDE) {                                                               \
            int64_t high = rows - row < SIDE ? rows - row : SIDE;                                                      \
            for (int64_t column = 0; column < columns; column += SIDE) {                                               \
                int64_t wide = columns - column < SIDE ? columns - column : SIDE;                                      \
                const uint8_t *source = from + row * step + column * (int64_t)sizeof(TYPE);                            \
                uint8_t *target = to + column * into + row * (int64_t)sizeof(TYPE);                                    \
                if (high == SIDE && wide == SIDE && FULL(source, step, target, into)) continue;                        \
                for (int64_t r = 0; r < high; r++) {                                                                   \
                    memcpy(line, source + r * step, (size_t)wide * sizeof(TYPE));                                      \
                    for (int64_t c = 0; c < wide; c++) tile[c][r] = line[c];                                           \
                }                                                                                                      \
                for (int64_t c = 0; c < wide; c++) memcpy(target + c * into, tile[c], (size_t)high * sizeof(TYPE));    \
            }                                                                                                          \
        }                                                                                                              \
    }

#define NONE(source, step, target, into) 0

TRANSPOSE(uint8_t, NONE)
TRANSPOSE(uint16_t, full_16)
TRANSPOSE(uint32_t, full_32)
TRANSPOSE(uint64_t, NONE)

/* `loops`: count, step in the source and step in the target of each loop around the transpose, in bytes; `width`: bytes
   of an element; the rest as above. The caller has checked that all of it lies inside the two buffers. */
static void transpose(const uint8_t *from, uint8_t *to, int64_t width, int64_t rows, int64_t columns, int64_t step, int64_t into,
                      int64_t depth, const int64_t *loops) {
    int64_t total = 1;
    for (int64_t level = 0; level < depth; level++) total *= loops[3 * level];
    for (int64_t number = 0; number < total; number++) {
        const uint8_t *source = from;
        uint8_t *target = to;
        int64_t rest = number;
        for (int64_t level = depth - 1; level >= 0; level--) {
            int64_t index = rest % loops[3 * level];
            rest /= loops[3 * level];
            source += index * loops[3 * level + 1];
            target += index * loops[3 * level + 2];
        }
        switch (width) {
        case 1: transpose_uint8_t(source, target, rows, columns, step, into); break;
        case 2: transpose_uint16_t(source, target, rows, columns, step, into); break;
        case 4: transpose_uint32_t(source, target, rows, columns, step, into); break;
        case 8: transpose_uint64_t(source, target, rows, columns, step, into); break;
        }
    }
}

/* The CRC-32 of zip archives by carry-less multiplication (Intel, "Fast CRC Computation for Generic Polynomials Using
   PCLMULQDQ Instruction"): bits are coefficients of a polynomial, the lowest power in the highest bit, and what lies
   `d` bits before the end is folded into the end by multiplying its halves with x**(d + 32) and x**(d - 32). */
#if defined(FOLDS)
#define FOLDED(x, k, next)                                                                                             \
    _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, k, 0x00), _mm_clmulepi64_si128(x, k, 0x11)), next)
#define FOLDED_WIDE(x, k, next)                                                                                        \
    _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(x, k, 0x00), _mm512_clmulepi64_epi128(x, k, 0x11), next, 0x96)

/* The CRC of what is folded into `x`, and of the whole blocks of 16 bytes after it. */
__attribute__((target("pclmul,sse2"))) static uint32_t summed(__m128i x, const __m128i *from, int64_t size) {
    const __m128i by_128 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    const __m128i by_64 = _mm_set_epi64x(0, 0x163cd6124), polynomial = _mm_set_epi64x(0x1f7011641, 0x1db710641);
    const __m128i low = _mm_set_epi32(0, -1, 0, -1);
    __m128i y;
    for (; size >= 16; from++, size -= 16) x = FOLDED(x, by_128, _mm_loadu_si128(from));
    /* 128 bits to 64, and to 32 by Barrett's reduction. */
    y = _mm_xor_si128(_mm_srli_si128(x, 8), _mm_clmulepi64_si128(x, by_128, 0x10));
    y = _mm_xor_si128(_mm_srli_si128(y, 4), _mm_clmulepi64_si128(_mm_and_si128(y, low), by_64, 0x00));
    x = _mm_and_si128(_mm_clmulepi64_si128(_mm_and_si128(y, low), polynomial, 0x10), low);
    y = _mm_xor_si128(y, _mm_clmulepi64_si128(x, polynomial, 0x00));
    return (uint32_t)_mm_cvtsi128_si32(_mm_srli_si128(y, 4));
}

/* At least 64 bytes. */
__attribute__((target("pclmul,sse2"))) static uint32_t folded(const uint8_t *data, int64_t size, uint32_t crc) {
    const __m128i by_512 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4), by_128 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    const __m128i *from = (const __m128i *)data;
    __m128i x[4];
    for (int i = 0; i < 4; i++) x[i] = _mm_loadu_si128(from + i);
    x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128((int)crc));
    for (from += 4, size -= 64; size >= 64; from += 4, size -= 64)
        for (int i = 0; i < 4; i++) x[i] = FOLDED(x[i], by_512, _mm_loadu_si128(from + i));
    for (int i = 1; i < 4; i++) x[0] = FOLDED(x[0], by_128, x[i]);
    return summed(x[0], from, size);
}

#if defined(FOLDS_WIDE)
/* The same by registers four times as wide: at least 256 bytes. */
#define WIDE "avx512f,vpclmulqdq,pclmul,sse2"
__attribute__((target(WIDE))) static uint32_t folded_wide(const uint8_t *data, int64_t size, uint32_t crc) {
    const __m512i by_2048 = _mm512_broadcast_i32x4(_mm_set_epi64x(0x1322d1430, 0x11542778a));
    const __m512i by_512 = _mm512_broadcast_i32x4(_mm_set_epi64x(0x1c6e41596, 0x154442bd4));
    const __m128i by_128 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    __m512i x[4];
    __m128i lanes[4];
    for (int i = 0; i < 4; i++) x[i] = _mm512_loadu_si512(data + 64 * i);
    x[0] = _mm512_xor_si512(x[0], _mm512_inserti32x4(_mm512_setzero_si512(), _mm_cvtsi32_si128((int)crc), 0));
    for (data += 256, size -= 256; size >= 256; data += 256, size -= 256)
        for (int i = 0; i < 4; i++) x[i] = FOLDED_WIDE(x[i], by_2048, _mm512_loadu_si512(data + 64 * i));
    for (int i = 1; i < 4; i++) x[0] = FOLDED_WIDE(x[0], by_512, x[i]);
    _mm512_storeu_si512(lanes, x[0]);
    for (int i = 1; i < 4; i++) lanes[0] = FOLDED(lanes[0], by_128, lanes[i]);
    return summed(lanes[0], (const __m128i *)data, size);
}
#endif
#endif

/* Adds bytes to the CRC-32 at `crc` and returns how many it has added, all but a few of the last ones; none where the
   processor cannot. */
int64_t transaxle_crc32(const uint8_t *data, int64_t size, uint32_t *crc) {
#if defined(FOLDS)
    size &= ~(int64_t)15;
    if (size >= 64 && __builtin_cpu_supports("pclmul")) {
#if defined(FOLDS_WIDE)
        if (size >= 256 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq")) {
            *crc = ~folded_wide(data, size, ~*crc);
            return size;
        }
#endif
        *crc = ~folded(data, size, ~*crc);
        return size;
    }
#endif
    (void)data, (void)size, (void)crc;
    return 0;
}

/* Adds bytes to the CRC-32 at `crc`; returns 0 where there are many and the processor cannot. */
static int add(const uint8_t *data, int64_t size, uint32_t *crc) {
    int64_t at = transaxle_crc32(data, size, crc);
    if (size >= 64 && !at) return 0;
    uint32_t rest = ~*crc;
    for (; at < size; at++) {
        rest ^= data[at];
        for (int bit = 0; bit < 8; bit++) rest = rest >> 1 ^ (0xEDB88320 & -(rest & 1));
    }
    *crc = ~rest;
    return 1;
}

/* XXH3 of 128 bits, with seed 0, of more bytes than SHORT, as they come (Yann Collet's xxHash, BSD-2-Clause, says what it
   is; xxhash hashes fewer). Stripes of 64 bytes are mixed into eight sums; the last stripe is that of the last 64 bytes,
   so what may be in it waits in `buffer`. Numbers are read as they lie: low bytes first. */
enum { STRIPE = 64, PER_BLOCK = 16, SHORT = 240, WAITING = 256 };
#define P32_1 0x9E3779B1U
#define P64_1 0x9E3779B185EBCA87U
#define P64_2 0xC2B2AE3D27D4EB4FU

static const uint64_t SECRET[24] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072, 0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82,
    0x8e2443f7744608b8, 0x4c263a81e69035e0, 0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8, 0xc3ebd33483acc5ea, 0xeb6313faffa081c5,
    0x49daf0b751dd0d17, 0x9e68d429265516d3, 0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af};
static const uint64_t BEGIN[8] = {0xC2B2AE3D, P64_1, P64_2, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x85EBCA77,
                                  0x27D4EB2F165667C5, P32_1};

typedef struct {
    uint64_t sums[8], total, stripes, waiting; /* stripes: of this block; waiting: bytes in the buffer */
    uint8_t before[STRIPE], buffer[WAITING];   /* before: the last stripe that was mixed */
} hash;

/* Mixes stripes into the sums; `stripes`: how many of their block were before. */
typedef uint64_t eight __attribute__((vector_size(64), aligned(8)));
typedef uint32_t sixteen __attribute__((vector_size(64)));

CLONED static void mixed(uint64_t *restrict sums, const uint8_t *restrict data, int64_t count, uint64_t *stripes) {
    eight s, word, key, secret;
    uint64_t at = *stripes;
    memcpy(&s, sums, sizeof s);
    while (count) {
        int64_t some = count < (int64_t)(PER_BLOCK - at) ? count : (int64_t)(PER_BLOCK - at);
        for (int64_t end = at + some; (int64_t)at < end; at++, data += STRIPE) {
            memcpy(&word, data, sizeof word);
            memcpy(&secret, SECRET + at, sizeof secret);
            key = word ^ secret;
            s += SWAPPED(word);
            s += (key & 0xFFFFFFFF) * (key >> 32);
        }
        count -= some;
        if (at == PER_BLOCK) {
            at = 0;
            memcpy(&secret, SECRET + PER_BLOCK, sizeof secret);
            s = (s ^ s >> 47 ^ secret) * P32_1;
        }
    }
    memcpy(sums, &s, sizeof s);
    *stripes = at;
}

void transaxle_hash(hash *h, const uint8_t *data, int64_t size) {
    if (!h->total) memcpy(h->sums, BEGIN, sizeof BEGIN);
    h->total += (uint64_t)size;
    int64_t room = WAITING - (int64_t)h->waiting;
    if (size <= room) {
        memcpy(h->buffer + h->waiting, data, (size_t)size);
        h->waiting += (uint64_t)size;
        return;
    }
    if (h->waiting) {
        memcpy(h->buffer + h->waiting, data, (size_t)room);
        data += room, size -= room;
        mixed(h->sums, h->buffer, WAITING / STRIPE, &h->stripes);
        memcpy(h->before, h->buffer + WAITING - STRIPE, STRIPE);
    }
    int64_t count = (size - 1) / STRIPE;
    mixed(h->sums, data, count, &h->stripes);
    data += count * STRIPE;
    if (count) memcpy(h->before, data - STRIPE, STRIPE);
    h->waiting = (uint64_t)(size - count * STRIPE);
    memcpy(h->buffer, data, h->waiting);
}

static uint64_t secret_at(int at) {
    uint64_t word;
    memcpy(&word, (const uint8_t *)SECRET + at, sizeof word);
    return word;
}

/* Both halves of a product of 128 bits, xored. */
static uint64_t folded_product(uint64_t a, uint64_t b) {
    uint64_t low = (a & 0xFFFFFFFF) * (b & 0xFFFFFFFF), one = (a >> 32) * (b & 0xFFFFFFFF);
    uint64_t two = (a & 0xFFFFFFFF) * (b >> 32), high = (a >> 32) * (b >> 32);
    uint64_t cross = (low >> 32) + (one & 0xFFFFFFFF) + two;
    return ((one >> 32) + (cross >> 32) + high) ^ (cross << 32 | (low & 0xFFFFFFFF));
}

static uint64_t merged(const uint64_t *sums, int at, uint64_t found) {
    for (int i = 0; i < 8; i += 2)
        found += folded_product(sums[i] ^ secret_at(at + 8 * i), sums[i + 1] ^ secret_at(at + 8 * i + 8));
    found = (found ^ found >> 37) * 0x165667919E3779F9;
    return found ^ found >> 32;
}

/* `found`: the high half, and the low one. Nothing has changed then: more bytes may come. */
void transaxle_hash_of(const hash *h, uint64_t *found) {
    uint64_t sums[8], stripes = h->stripes;
    uint8_t last[STRIPE];
    memcpy(sums, h->sums, sizeof sums);
    mixed(sums, h->buffer, (int64_t)(h->waiting - 1) / STRIPE, &stripes);
    if (h->waiting >= STRIPE) memcpy(last, h->buffer + h->waiting - STRIPE, STRIPE);
    else {
        memcpy(last, h->before + h->waiting, STRIPE - h->waiting);
        memcpy(last + STRIPE - h->waiting, h->buffer, h->waiting);
    }
    for (int i = 0; i < 8; i++) {
        uint64_t word, other, key;
        memcpy(&word, last + 8 * i, 8), memcpy(&other, last + 8 * (i ^ 1), 8);
        key = word ^ secret_at(121 + 8 * i);
        sums[i] += other + (key & 0xFFFFFFFF) * (key >> 32);
    }
    found[0] = merged(sums, 117, ~(h->total * P64_2));
    found[1] = merged(sums, 11, h->total * P64_1);
}

/* Copies runs of `width` bytes; `loops` as above. */
static void scatter(const uint8_t *from, uint8_t *to, int64_t width, int64_t depth, const int64_t *loops) {
    if (!depth) {
        memcpy(to, from, (size_t)width);
        return;
    }
    for (int64_t number = 0; number < loops[0]; number++, from += loops[1], to += loops[2])
        scatter(from, to, width, depth - 1, loops + 3);
}

/* Reads bytes, and adds them to a CRC-32 while they are in the cache; returns 0 where either cannot be done whole. */
static int summed_read(int fd, int64_t offset, uint8_t *out, int64_t size, uint32_t *crc) {
    enum { PIECE = 1 << 18 };
    uint32_t found = *crc;
    for (int64_t at = 0; at < size; at += PIECE) {
        int64_t length = size - at < PIECE ? size - at : PIECE;
        if (pread(fd, out + at, (size_t)length, (off_t)(offset + at)) != length || !add(out + at, length, &found)) return 0;
    }
    *crc = found;
    return 1;
}

/* The product of two polynomials modulo that of the CRC. */
static uint32_t times(uint32_t one, uint32_t two) {
    uint32_t product = 0;
    for (; one; one <<= 1) {
        product ^= two & -(one >> 31);
        two = two >> 1 ^ (0xEDB88320 & -(two & 1));
    }
    return product;
}

/* `loops`: count, step in the file and step in memory of each loop, in bytes, the outermost first; memory has room for
   all runs. Returns 0 where a run cannot be read whole at once. */
static int runs_read(int fd, int64_t offset, uint8_t *out, int64_t width, int64_t depth, const int64_t *loops) {
    if (!depth) return pread(fd, out, (size_t)width, (off_t)offset) == width;
    for (int64_t number = 0; number < loops[0]; number++, offset += loops[1], out += loops[2])
        if (!runs_read(fd, offset, out, width, depth - 1, loops + 3)) return 0;
    return 1;
}

/* Reads runs of a file likewise, and finds their share in the CRC-32 of the bytes up to the last run's end:
   what it is, begun with zero bits and not inverted, where all bytes between the runs are zero. The shares of disjoint
   runs up to the same end xor to that of all of them. `powers`: x**(8 * step in the file) of each loop. Returns 0 where
   not all can be done. */
static int shared_read(int fd, int64_t offset, uint8_t *out, int64_t width, int64_t depth, const int64_t *loops,
                       const uint32_t *powers, uint32_t *share) {
    if (!depth) {
        uint32_t crc = ~(uint32_t)0;
        if (pread(fd, out, (size_t)width, (off_t)offset) != width || !add(out, width, &crc)) return 0;
        *share = ~crc;
        return 1;
    }
    *share = 0;
    for (int64_t number = 0; number < loops[0]; number++, offset += loops[1], out += loops[2]) {
        uint32_t more;
        if (!shared_read(fd, offset, out, width, depth - 1, loops + 3, powers + 1, &more)) return 0;
        *share = times(*share, *powers) ^ more;
    }
    return 1;
}

/* The same where `found` is not null: the share, whether it is known, and the powers. */
static int read_runs(int fd, int64_t offset, uint8_t *out, int64_t width, int64_t depth, const int64_t *loops,
                     uint32_t *found) {
    if (!found) return runs_read(fd, offset, out, width, depth, loops);
    return (int)(found[1] = (uint32_t)shared_read(fd, offset, out, width, depth, loops, found + 2, found));
}

/* `steps`: what is done, and up to nine numbers that say to what. Carries out the steps from number `first` on and
   returns the number of the one that could not be done whole at once (of bytes to be compared, that differ; that Python
   does), or how many there are. Who calls does that one in the ordinary way, and so learns what is wrong. */
enum { READ, WRITE, HASH, SUM, TRANSPOSE, SCATTER, COMPARE, READ_AND_SUM, READ_RUNS, WORDS = 10 };

int64_t transaxle_steps(const int64_t *steps, int64_t total, int64_t first) {
    for (; first < total; first++) {
        const int64_t *at = steps + WORDS * first;
        void *one = (void *)(intptr_t)at[1], *two = (void *)(intptr_t)at[2], *three = (void *)(intptr_t)at[3];
        switch (at[0]) {
        case READ: /* descriptor, first byte, address, size */
            if (pread((int)at[1], three, (size_t)at[4], (off_t)at[2]) != at[4]) return first;
            break;
        case WRITE: /* the same */
            if (pwrite((int)at[1], three, (size_t)at[4], (off_t)at[2]) != at[4]) return first;
            break;
        case HASH: /* state, address, size */
            transaxle_hash(one, two, at[3]);
            break;
        case SUM: /* address, size, the sum that they are added to */
            if (!add(one, at[2], three)) return first;
            break;
        case TRANSPOSE:
            transpose(one, two, at[3], at[4], at[5], at[6], at[7], at[8], (const int64_t *)(intptr_t)at[9]);
            break;
        case SCATTER: /* from, to, width, depth, loops */
            scatter(one, two, at[3], at[4], (const int64_t *)(intptr_t)at[5]);
            break;
        case COMPARE: /* two addresses, size */
            if (memcmp(one, two, (size_t)at[3])) return first;
            break;
        case READ_AND_SUM: /* descriptor, first byte, address, size, the sum that they are added to */
            if (!summed_read((int)at[1], at[2], three, at[4], (uint32_t *)(intptr_t)at[5])) return first;
            break;
        case READ_RUNS: /* descriptor, first byte, address, width, depth, loops, what is found */
            if (!read_runs((int)at[1], at[2], three, at[4], at[5], (const int64_t *)(intptr_t)at[6],
                           (uint32_t *)(intptr_t)at[7]))
                return first;
            break;
        default: return first;
        }
    }
    return total;
}

/* Which source this was built from: copier.py loads no other. */
uint32_t transaxle_stamp(void) { return STAMP; }
