/* Tallies of values: how often each code of a small type occurs, sums of single precision by exponent, and the largest
   code of each channel. One call reads a block once, in pieces that stay in the first cache.

   All that is added here are whole numbers, so no order of addition changes anything: tally.py states the same in numpy,
   and the tests hold the two to the same numbers. Plain C11; no state, no allocation, no dependency. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* One copy for each generation of x86-64, chosen when the library is loaded: needs glibc's indirect functions. */
#if defined(CLONES) && defined(__x86_64__) && defined(__GLIBC__)
#define CLONED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONED
#endif
#define INLINE static inline __attribute__((always_inline))

enum { PIECE = 4096 };         /* elements looked at together */
enum { TABLES = 4 };           /* tables that take turns, so that equal neighbours do not wait for each other */
enum { MOST_SQUARES = 65536 }; /* squares of 24 bits that 64 bits hold */

/* ---- the largest of each channel ---- */

/* `size` is a code without its sign; those above `last` are no finite numbers. `at` is the channel of the first
   element. `largest` has `width` codes. */
#define CHANNELS(name, word)                                                                                           \
    INLINE void name(const word *x, int64_t count, int64_t width, int64_t at, word mask, word last, word *largest) {   \
        while (count) {                                                                                                \
            int64_t run = width - at < count ? width - at : count;                                                     \
            word *restrict into = largest + at;                                                                        \
            const word *restrict from = x;                                                                             \
            for (int64_t j = 0; j < run; j++) {                                                                        \
                word size = from[j] & mask, finite = size <= last ? size : 0;                                          \
                into[j] = finite > into[j] ? finite : into[j];                                                         \
            }                                                                                                          \
            x += run, count -= run, at = 0;                                                                            \
        }                                                                                                              \
    }
CHANNELS(channels_8, uint8_t)
CHANNELS(channels_16, uint16_t)
CHANNELS(channels_32, uint32_t)

/* ---- counts of each code ---- */

INLINE void count_8(const uint8_t *x, int64_t count, int64_t *counts) {
    uint32_t tables[TABLES][256];
    memset(tables, 0, sizeof tables);
    for (int64_t j = 0; j < count; j++) tables[j % TABLES][x[j]]++;
    for (int table = 0; table < TABLES; table++)
        for (int code = 0; code < 256; code++) counts[code] += tables[table][code];
}

INLINE void count_16(const uint16_t *x, int64_t count, int64_t *counts) {
    for (int64_t j = 0; j < count; j++) counts[x[j]]++;
}

/* `largest` is null where channels are not wanted. Elements may lie at any address. */
#define CODES(bits, word)                                                                                              \
    CLONED void transaxle_codes_##bits(const uint8_t *from, int64_t count, int64_t *counts, int64_t width, int64_t at, \
                                       uint32_t mask, uint32_t last, word *largest) {                                  \
        word x[PIECE];                                                                                                 \
        for (int64_t first = 0; first < count; first += PIECE) {                                                       \
            int64_t here = count - first < PIECE ? count - first : PIECE;                                              \
            memcpy(x, from + first * (int64_t)sizeof(word), (size_t)here * sizeof(word));                              \
            count_##bits(x, here, counts);                                                                             \
            if (largest) channels_##bits(x, here, width, (at + first) % width, (word)mask, (word)last, largest);       \
        }                                                                                                              \
    }
CODES(8, uint8_t)
CODES(16, uint16_t)

/* ---- single precision ---- */

/* Apart, because compilers put two neighbours into one register, whose halves then wait for each other. */
typedef struct { int64_t sums[TABLES][256]; uint64_t squares[TABLES][256]; } bins;

/* What is known of single-precision values, as `_Singles` of tally.py. */
typedef struct {
    int64_t zeros, nans, infinite;
    int32_t least, most;          /* of finite numbers, as codes in the order of values: see `look` */
    int64_t sums[256];            /* by exponent: of mantissas with their sign */
    uint64_t low[256], high[256]; /* likewise of their squares: the low 32 bits of partial sums, and the others */
} singles;

/* Codes are in the order of values, as whole numbers with a sign, once the other bits of negative ones are turned round. */
CLONED static void look(const uint32_t *restrict x, int count, singles *s) {
    uint32_t zeros = 0, nans = 0, infinite = 0;
    int32_t most = s->most, least = s->least;
    for (int j = 0; j < count; j++) {
        uint32_t size = x[j] & 0x7fffffff;
        int32_t place = (int32_t)(x[j] ^ (-(x[j] >> 31) >> 1));
        int32_t above = size < 0x7f800000 ? place : INT32_MIN, below = size < 0x7f800000 ? place : INT32_MAX;
        zeros += size == 0;
        nans += size > 0x7f800000;
        infinite += size == 0x7f800000;
        most = above > most ? above : most;
        least = below < least ? below : least;
    }
    s->zeros += zeros, s->nans += nans, s->infinite += infinite, s->most = most, s->least = least;
}

/* Mantissas of numbers that are not finite land in the bin of exponent 255, which nobody reads. Never part of a copy for
   one processor: elements go one by one here, which compilers would turn into slower gathers and scatters. */
static __attribute__((noinline)) void add(const uint32_t *x, int count, bins *b) {
    for (int j = 0; j < count; j++) {
        uint32_t exponent = x[j] >> 23 & 255;
        int64_t mantissa = (x[j] & 0x7fffff) | (uint32_t)(exponent > 0) << 23, sign = -(int64_t)(x[j] >> 31);
        b->sums[j % TABLES][exponent] += (mantissa ^ sign) - sign;
        b->squares[j % TABLES][exponent] += (uint64_t)(mantissa * mantissa);
    }
}

static void gather(bins *b, singles *s) {
    for (int table = 0; table < TABLES; table++)
        for (int exponent = 0; exponent < 256; exponent++) {
            s->sums[exponent] += b->sums[table][exponent];
            s->low[exponent] += b->squares[table][exponent] & 0xffffffff;
            s->high[exponent] += b->squares[table][exponent] >> 32;
        }
    memset(b, 0, sizeof *b);
}

CLONED void transaxle_singles(const uint8_t *from, int64_t count, singles *s, int64_t width, int64_t at,
                              uint32_t *largest) {
    uint32_t x[PIECE];
    bins b;
    int64_t inside = 0;
    memset(&b, 0, sizeof b);
    for (int64_t first = 0; first < count; first += PIECE) {
        int64_t here = count - first < PIECE ? count - first : PIECE;
        memcpy(x, from + first * 4, (size_t)here * 4);
        look(x, (int)here, s);
        if (inside + here > MOST_SQUARES) gather(&b, s), inside = 0;
        add(x, (int)here, &b), inside += here;
        if (largest) channels_32(x, here, width, (at + first) % width, 0x7fffffff, 0x7f7fffff, largest);
    }
    gather(&b, s);
}

/* Which source this was built from: tally.py loads no other. */
uint32_t transaxle_stamp(void) { return STAMP; }
