/* Tallies of values: how often each code of a small type occurs, exact sums of floating point of 16 bits or more and of
   larger whole numbers, and the largest code of each channel. One call reads a block once, in pieces that stay in the
   first cache.

   All sums are exact: counts, whole numbers, and sums in double precision of which no addition rounds. So no order of
   addition changes anything: tally.py and exact_tally.py state the same in numpy, and the tests hold the two to the same
   numbers. Plain C11 with vectors and whole numbers of 128 bits as gcc and clang have them; no state, no allocation. */

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
/* Never part of a copy for one processor: these loops count one by one, which compilers would turn into slower gathers
   and scatters. */
#define ALONE static __attribute__((noinline))

enum { PIECE = 4096, PIECE_16 = 1024 }; /* elements looked at together; those of 16 bits */
enum { TABLES = 4 };           /* tables that take turns, so that equal neighbours do not wait for each other */

/* ---- the largest of each channel ---- */

/* `size` is a code without its sign; those above `last` are no finite numbers. Where `whole`, codes are whole numbers with
   a sign, and all are finite. `at` is the channel of the first element. `largest` has `width` codes. */
#define CHANNELS(bits)                                                                                                 \
    INLINE void channels_##bits(const uint##bits##_t *x, int64_t count, int64_t width, int64_t at, int whole,          \
                                uint##bits##_t mask, uint##bits##_t last, uint##bits##_t *largest) {                   \
        while (count) {                                                                                                \
            int64_t run = width - at < count ? width - at : count;                                                     \
            uint##bits##_t *restrict into = largest + at;                                                              \
            const uint##bits##_t *restrict from = x;                                                                   \
            if (whole)                                                                                                 \
                for (int64_t j = 0; j < run; j++) {                                                                    \
                    uint##bits##_t negative = (uint##bits##_t)-(from[j] >> (bits - 1));                                \
                    uint##bits##_t size = (uint##bits##_t)((from[j] ^ negative) - negative);                           \
                    into[j] = size > into[j] ? size : into[j];                                                         \
                }                                                                                                      \
            else                                                                                                       \
                for (int64_t j = 0; j < run; j++) {                                                                    \
                    uint##bits##_t size = from[j] & mask, finite = size <= last ? size : 0;                            \
                    into[j] = finite > into[j] ? finite : into[j];                                                     \
                }                                                                                                      \
            x += run, count -= run, at = 0;                                                                            \
        }                                                                                                              \
    }
CHANNELS(8)
CHANNELS(16)
CHANNELS(32)
CHANNELS(64)

/* ---- counts of each code ---- */

INLINE void count_four(uint64_t four, uint32_t times, uint32_t *counts) {
    counts[four & 0xffff] += times, counts[four >> 16 & 0xffff] += times;
    counts[four >> 32 & 0xffff] += times, counts[four >> 48] += times;
}

/* Four codes are one load. Where they are the four before once more, as in tensors of zeros, they wait: counts of the same
   code one after the other are slow. */
ALONE void count_16(const uint8_t *from, int64_t count, uint32_t *counts) {
    uint64_t four, before = 0;
    uint32_t times = 0;
    int64_t j = 0;
    for (; j + 4 <= count; j += 4) {
        memcpy(&four, from + 2 * j, sizeof four);
        if (four == before) {
            times++;
            continue;
        }
        if (times) count_four(before, times, counts), times = 0;
        count_four(four, 1, counts);
        before = four;
    }
    if (times) count_four(before, times, counts);
    for (; j < count; j++) {
        uint16_t code;
        memcpy(&code, from + 2 * j, sizeof code);
        counts[code]++;
    }
}

/* Pairs of codes are counted, as codes of 16 bits: half the work. */
ALONE void count_8(const uint8_t *from, int64_t count, uint32_t *pairs) { count_16(from, count / 2, pairs); }

/* `counts` has 65,536 numbers; an odd code at the end is left to the caller. `largest` is null where channels are not
   wanted. Elements may lie at any address. */
#define CODES(bits)                                                                                                    \
    CLONED static void sizes_##bits(const uint8_t *from, int64_t count, int64_t width, int64_t at, int whole,          \
                                      uint32_t mask, uint32_t last, uint##bits##_t *largest) {                         \
        uint##bits##_t x[PIECE];                                                                                       \
        memcpy(x, from, (size_t)count * sizeof *x);                                                                    \
        channels_##bits(x, count, width, at, whole, (uint##bits##_t)mask, (uint##bits##_t)last, largest);              \
    }                                                                                                                  \
    void transaxle_codes_##bits(const uint8_t *from, int64_t count, uint32_t *counts, int64_t width, int64_t at,       \
                                int whole, uint32_t mask, uint32_t last, uint##bits##_t *largest) {                    \
        for (int64_t first = 0; first < count; first += PIECE) {                                                       \
            int64_t here = count - first < PIECE ? count - first : PIECE;                                              \
            const uint8_t *piece = from + first * (bits / 8);                                                          \
            count_##bits(piece, here, counts);                                                                         \
            if (largest) sizes_##bits(piece, here, width, (at + first) % width, whole, mask, last, largest);           \
        }                                                                                                              \
    }
CODES(8)
CODES(16)

/* ---- what is common to larger types ---- */

/* Places are in the order of values: codes as whole numbers with a sign. */
typedef struct { int64_t zeros, nans, infinite, least, most; } extremes;

/* A whole number of 128 bits: its low half, and its high half with the sign. */
typedef struct { uint64_t low, high; } whole;

INLINE void add_128(whole *into, unsigned __int128 value) {
    unsigned __int128 sum = ((unsigned __int128)into->high << 64 | into->low) + value;
    into->low = (uint64_t)sum, into->high = (uint64_t)(sum >> 64);
}

INLINE void deposit(whole *into, int64_t value, int shift) {
    add_128(into, (unsigned __int128)(__int128)value << shift);
}

/* Codes of floating point are in the order of values once the other bits of negative ones are turned round. */
#define PLACE(bits, code) (int##bits##_t)((code) ^ ((uint##bits##_t)-((code) >> (bits - 1)) >> 1))
#define WIDEN(bits)                                                                                                    \
    INLINE void widen_##bits(extremes *e, int##bits##_t least, int##bits##_t most) {                                   \
        e->most = most > e->most ? most : e->most;                                                                     \
        e->least = least < e->least ? least : e->least;                                                                \
    }
WIDEN(16)
WIDEN(32)
WIDEN(64)

/* Looks at a piece: the largest and the smallest value, zeros, the largest size of a finite number, and the smallest but
   0, less 1. Codes without a sign are in the order of sizes, and those with it come after them, so the smallest size and
   two extremes of codes tell all of it but zeros: where there are any, `zeros` looks again. Where something is not finite,
   `odd` does, and the answer is 0. */
#define LOOK(name, bits, infinity)                                                                                     \
    CLONED static void odd_##name(const uint##bits##_t *restrict x, int count, extremes *e, uint##bits##_t *highest) { \
        const uint##bits##_t limit = (uint##bits##_t)infinity;                                                         \
        uint##bits##_t nans = 0, infinite = 0, top = 0;                                                                \
        int##bits##_t most = INT##bits##_MIN, least = INT##bits##_MAX;                                                 \
        for (int j = 0; j < count; j++) {                                                                              \
            uint##bits##_t size = x[j] & UINT##bits##_MAX >> 1, finite = size < limit ? size : 0;                      \
            int##bits##_t place = PLACE(bits, x[j]);                                                                   \
            int##bits##_t above = size < limit ? place : INT##bits##_MIN;                                              \
            int##bits##_t below = size < limit ? place : INT##bits##_MAX;                                              \
            nans += size > limit, infinite += size == limit;                                                           \
            top = finite > top ? finite : top;                                                                         \
            most = above > most ? above : most;                                                                        \
            least = below < least ? below : least;                                                                     \
        }                                                                                                              \
        e->nans += (int64_t)nans, e->infinite += (int64_t)infinite, *highest = top;                                    \
        if (least <= most) widen_##bits(e, least, most);                                                               \
    }                                                                                                                  \
    CLONED static uint##bits##_t zeros_##name(const uint##bits##_t *restrict x, int count, extremes *e) {              \
        uint##bits##_t zeros = 0, lowest = UINT##bits##_MAX;                                                           \
        for (int j = 0; j < count; j++) {                                                                              \
            uint##bits##_t size = x[j] & UINT##bits##_MAX >> 1, less = (uint##bits##_t)(size - 1);                     \
            zeros += size == 0;                                                                                        \
            lowest = less < lowest ? less : lowest;                                                                    \
        }                                                                                                              \
        e->zeros += (int64_t)zeros;                                                                                    \
        return lowest;                                                                                                 \
    }                                                                                                                  \
    CLONED static int look_##name(const uint##bits##_t *restrict x, int count, extremes *e, uint##bits##_t *highest,   \
                                  uint##bits##_t *lowest) {                                                            \
        const uint##bits##_t mask = UINT##bits##_MAX >> 1;                                                             \
        uint##bits##_t bottom = mask, high = 0;                                                                        \
        int##bits##_t positive = INT##bits##_MIN;                                                                      \
        for (int j = 0; j < count; j++) {                                                                              \
            uint##bits##_t size = x[j] & mask;                                                                         \
            int##bits##_t code = (int##bits##_t)x[j];                                                                  \
            bottom = size < bottom ? size : bottom;                                                                    \
            high = x[j] > high ? x[j] : high;                                                                          \
            positive = code > positive ? code : positive;                                                              \
        }                                                                                                              \
        *lowest = bottom ? (uint##bits##_t)(bottom - 1) : zeros_##name(x, count, e);                                   \
        const int signs = high > mask, none = positive >= 0;                                                           \
        const uint##bits##_t below = signs ? high & mask : 0, above = none ? (uint##bits##_t)positive : 0;             \
        *highest = above > below ? above : below;                                                                      \
        if (*highest >= (uint##bits##_t)infinity) {                                                                    \
            odd_##name(x, count, e, highest);                                                                          \
            return 0;                                                                                                  \
        }                                                                                                              \
        uint##bits##_t most = none ? above : (uint##bits##_t)(bottom | (mask + 1)), least = signs ? high : bottom;     \
        widen_##bits(e, PLACE(bits, least), PLACE(bits, most));                                                        \
        return 1;                                                                                                      \
    }
LOOK(bf16, 16, 0x7f80)
LOOK(f16, 16, 0x7c00)
LOOK(f32, 32, 0x7f800000)
LOOK(f64, 64, 0x7ff0000000000000)

/* The largest size below another. */
#define BELOW(bits)                                                                                                    \
    CLONED static uint##bits##_t below_##bits(const uint##bits##_t *x, int count, uint##bits##_t limit) {              \
        uint##bits##_t most = 0;                                                                                       \
        for (int j = 0; j < count; j++) {                                                                              \
            uint##bits##_t size = x[j] & UINT##bits##_MAX >> 1, lower = size & (uint##bits##_t)-(size < limit);        \
            most = lower > most ? lower : most;                                                                        \
        }                                                                                                              \
        return most;                                                                                                   \
    }
BELOW(16)
BELOW(32)

#define LARGEST(bits)                                                                                                  \
    CLONED static void largest_##bits(const uint##bits##_t *x, int64_t count, int64_t width, int64_t at, int whole,    \
                                      uint##bits##_t last, uint##bits##_t *largest) {                                  \
        const uint##bits##_t every = UINT##bits##_MAX;                                                                 \
        if (last >= every >> 1)                                                                                        \
            channels_##bits(x, count, width, at, whole, last == every ? last : every >> 1, every, largest);            \
        else                                                                                                           \
            channels_##bits(x, count, width, at, whole, every >> 1, last, largest);                                    \
    }
LARGEST(16)
LARGEST(32)
LARGEST(64)

/* A piece as an array: itself where it may be read in place, else a copy, filled up with zeros. */
#define ARRAY(word, from, here, room)                                                                                  \
    ((size_t)(here) * sizeof(word) == sizeof room && (uintptr_t)(from) % sizeof(word) == 0                             \
         ? (const word *)(const void *)(from)                                                                          \
         : (memset(room, 0, sizeof room), (const word *)memcpy(room, from, (size_t)(here) * sizeof(word))))

/* ---- half precision and bfloat16 ---- */

enum { SIXTEEN = 16 }; /* sums that each take every sixteenth element: 64 of a piece */
typedef uint32_t words __attribute__((vector_size(SIXTEEN * sizeof(uint32_t))));
typedef int32_t integers __attribute__((vector_size(SIXTEEN * sizeof(int32_t))));
typedef float singles __attribute__((vector_size(SIXTEEN * sizeof(float))));

typedef struct { integers sum, rest; words high; } sixteen;

/* Add sixteen numbers, whole ones of 11 bits at most before they were multiplied with powers of 2, to sums that hold 64 of
   them exactly:
   - They are less than 2^23, so their sum is less than 2^29.
   - Their squares are less than 2^46, and exact in single precision. Adding 2^46 leaves of each a multiple of 2^23: how
     many times that is what the code of the result is above the code of 2^46. 64 of them are at most 2^29, and of the
     rest, less than 2^23 each, less than 2^29. That holds however the processor rounds. */
INLINE void add_sixteen(sixteen *to, words code) {
    singles value = (singles)code, square = value * value, large = square + 0x1p46f;
    to->sum += __builtin_convertvector(value, integers);
    to->high += (words)large;
    to->rest += __builtin_convertvector(square - (large - 0x1p46f), integers);
}

/* What sums come to together, of which each has taken `count` numbers. */
INLINE void deposit_sixteen(const sixteen *from, uint32_t count, whole *sum, whole *squares) {
    const uint32_t none = count * ((127 + 46) << 23);
    int64_t of_sum = 0, of_rest = 0, of_high = 0;
    for (int lane = 0; lane < SIXTEEN; lane++)
        of_sum += from->sum[lane], of_rest += from->rest[lane], of_high += (uint32_t)(from->high[lane] - none);
    deposit(sum, of_sum, 0), deposit(squares, of_rest, 0), deposit(squares, of_high, 23);
}

/* Ask for the next piece while this one is looked at, so that nobody waits for it; there may be none. */
INLINE void expect(const uint8_t *next, int size) {
    for (int at = 0; at < size; at += 64) __builtin_prefetch(next + at);
}

/* Add the numbers of a piece from `bottom` to `most`, whose exponents are 22 - stored apart at most. `stored` are the bits
   of a mantissa that are stored. Numbers are moved under exponents that make them whole numbers, in units of the last bit
   of the smallest. `LOW` and `HIGH` put sign and mantissa of the halves of a word where single precision has them, and the
   exponent as it is. Where `all` numbers are known to be in the range, none is looked at. */
#define ADD_16(name, stored, LOW, HIGH)                                                                                \
    INLINE words ranged_##name(words code, int all, uint32_t from, uint32_t span, uint32_t raised) {                   \
        return all ? code + raised : (code + raised) & (words)((code & 0x7fffffff) - from <= span);                    \
    }                                                                                                                  \
    INLINE void band_##name(const uint16_t *x, int count, int all, uint16_t bottom, uint16_t most, whole *sums,        \
                            whole *squares) {                                                                          \
        const int low = bottom >> stored;                                                                              \
        const uint32_t from = LOW((uint32_t)bottom), span = LOW((uint32_t)most) - from;                                \
        const uint32_t raised = (uint32_t)(127 + stored - low) << 23;                                                  \
        sixteen found = {{0}, {0}, {0}};                                                                               \
        for (int j = 0; j < count; j += 2 * SIXTEEN) {                                                                 \
            words word;                                                                                                \
            memcpy(&word, x + j, sizeof word);                                                                         \
            add_sixteen(&found, ranged_##name(LOW(word), all, from, span, raised));                                    \
            add_sixteen(&found, ranged_##name(HIGH(word), all, from, span, raised));                                   \
        }                                                                                                              \
        deposit_sixteen(&found, (uint32_t)count / SIXTEEN, sums + low, squares + low);                                 \
    }                                                                                                                  \
    INLINE void subnormal_##name(const uint16_t *restrict x, int count, whole *sums, whole *squares) {                 \
        int32_t sum = 0, square = 0;                                                                                   \
        for (int j = 0; j < count; j++) {                                                                              \
            int32_t size = x[j] & 0x7fff, mantissa = size < 1 << stored ? size : 0, sign = -(int32_t)(x[j] >> 15);     \
            sum += (mantissa ^ sign) - sign;                                                                           \
            square += mantissa * mantissa;                                                                             \
        }                                                                                                              \
        deposit(sums + 1, sum, 0), deposit(squares + 1, square, 0);                                                    \
    }                                                                                                                  \
    INLINE uint16_t bottom_##name(uint16_t most) {                                                                     \
        int exponent = most >> stored;                                                                                 \
        return (uint16_t)((exponent > 22 - stored ? exponent - (22 - stored) : 1) << stored);                          \
    }                                                                                                                  \
    CLONED static void add_##name(const uint16_t *x, int count, uint16_t highest, uint16_t lowest, int every,          \
                                  whole *sums, whole *squares) {                                                       \
        const uint16_t smallest = 1 << stored, first = bottom_##name(highest);                                         \
        if (every && lowest >= first - 1) {                                                                            \
            band_##name(x, count, 1, first, highest, sums, squares);                                                   \
            return;                                                                                                    \
        }                                                                                                              \
        if (lowest < smallest - 1) subnormal_##name(x, count, sums, squares);                                          \
        for (uint16_t most = highest; most >= smallest;) {                                                             \
            uint16_t bottom = bottom_##name(most);                                                                     \
            band_##name(x, count, 0, bottom, most, sums, squares);                                                     \
            most = lowest < bottom - 1 ? below_16(x, count, bottom) : 0;                                               \
        }                                                                                                              \
    }                                                                                                                  \
    void transaxle_##name(const uint8_t *from, int64_t count, extremes *e, whole *sums, whole *squares, int64_t width, \
                          int64_t at, uint16_t *largest) {                                                             \
        uint16_t room[PIECE_16];                                                                                       \
        for (int64_t first = 0; first < count; first += PIECE_16) {                                                    \
            int here = (int)(count - first < PIECE_16 ? count - first : PIECE_16);                                     \
            const uint16_t *x = ARRAY(uint16_t, from + first * 2, here, room);                                         \
            expect(from + (first + PIECE_16) * 2, sizeof room);                                                        \
            uint16_t highest, lowest;                                                                                  \
            int64_t zeros = e->zeros;                                                                                  \
            int finite = look_##name(x, here, e, &highest, &lowest);                                                   \
            int every = finite && e->zeros == zeros && here % (2 * SIXTEEN) == 0;                                            \
            add_##name(x, (here + 2 * SIXTEEN - 1) / (2 * SIXTEEN) * (2 * SIXTEEN), highest, lowest, every, sums, squares);            \
            if (largest)                                                                                               \
                largest_16(x, here, width, (at + first) % width, 0, finite ? 0x7fff : (0x7fff >> stored << stored) - 1,\
                           largest);                                                                                   \
        }                                                                                                              \
    }
#define LOW_BF16(word) ((word) << 16)
#define HIGH_BF16(word) ((word) & 0xffff0000)
#define LOW_F16(word) (((word) & 0x7fff) << 13 | ((word) & 0x8000) << 16)
#define HIGH_F16(word) (((word) & 0x7fff0000) >> 3 | ((word) & 0x80000000))
ADD_16(bf16, 7, LOW_BF16, HIGH_BF16)
ADD_16(f16, 10, LOW_F16, HIGH_F16)

/* ---- single precision ---- */

enum { BAND = 21 };  /* how many exponents below the largest are added together */
enum { LANES = 16 }; /* sums that each take every sixteenth element: at most 256 of a piece */
typedef float floats __attribute__((vector_size(LANES / 2 * sizeof(float))));
typedef uint32_t codes __attribute__((vector_size(LANES / 2 * sizeof(float))));
typedef double doubles __attribute__((vector_size(LANES / 2 * sizeof(double))));

INLINE double power(int exponent) {
    uint64_t code = (uint64_t)(exponent + 1023) << 52;
    double value;
    memcpy(&value, &code, sizeof value);
    return value;
}

/* Add the numbers of a piece with exponents from `top - BAND` on, up to `most`, whose exponent is `top` at most, exactly,
   in double precision:
   - They are less than 2^(E+1), E = top - 127, and multiples of g = 2^(E-21-23), so 256 of them add up to less than
     2^(E+9) = 2^53 g: no sum of a lane rounds.
   - Squares are exact products of 24 bits each, less than 2^(2E+2) and multiples of g^2 = 2^(2E-88). Adding and taking
     away 1.5 * 2^(2E+9) leaves of each a multiple of 2^(2E-43), of which 256 add up to at most 2^(2E+10) = 2^53 of them,
     and the rest, at most 2^(2E-43), of which they add up to 2^(2E-35) = 2^53 g^2. That holds however the processor
     rounds, because the rest is what it is. */
CLONED static void band(const uint32_t *x, int count, int top, uint32_t most, whole *sums, whole *squares) {
    const int low = top - BAND, twice = 2 * (top - 127);
    const uint32_t from = (uint32_t)low << 23, span = most - from;
    const double cut = 1.5 * power(twice + 9);
    doubles sum[2] = {{0}, {0}}, high[2] = {{0}, {0}}, rest[2] = {{0}, {0}};
    for (int j = 0; j < count; j += LANES)
        for (int half = 0; half < 2; half++) {
            codes code;
            memcpy(&code, x + j + half * (LANES / 2), sizeof code);
            code &= (codes)((code & 0x7fffffff) - from <= span);
            doubles value = __builtin_convertvector((floats)code, doubles), square = value * value;
            doubles large = square + cut - cut;
            sum[half] += value, high[half] += large, rest[half] += square - large;
        }
    int64_t of_sum = 0, of_high = 0, of_rest = 0;
    const double unit = power(150 - low), coarse = power(43 - twice), fine = power(88 - twice);
    for (int half = 0; half < 2; half++)
        for (int lane = 0; lane < LANES / 2; lane++) {
            of_sum += (int64_t)(sum[half][lane] * unit);
            of_high += (int64_t)(high[half][lane] * coarse);
            of_rest += (int64_t)(rest[half][lane] * fine);
        }
    deposit(sums + low, of_sum, 0), deposit(squares + low, of_rest, 0), deposit(squares + low, of_high, 45);
}

/* Subnormal numbers, which some threads are told to read as 0, are added as the whole numbers that they are. */
CLONED static void subnormal(const uint32_t *x, int count, whole *sums, whole *squares) {
    int64_t sum = 0, square = 0;
    for (int j = 0; j < count; j++) {
        int64_t size = x[j] & 0x7fffffff, mantissa = size < 0x800000 ? size : 0, sign = -(int64_t)(x[j] >> 31);
        sum += (mantissa ^ sign) - sign;
        square += mantissa * mantissa;
    }
    deposit(sums + 1, sum, 0), deposit(squares + 1, square, 0);
}

/* `sums` and `squares` have a number for each exponent of the last bit, of which 0 is not used: sums[b] counts
   2^(b - 150), squares[b] counts its square. They hold 2^36 elements. */
void transaxle_f32(const uint8_t *from, int64_t count, extremes *e, whole *sums, whole *squares, int64_t width,
                   int64_t at, uint32_t *largest) {
    uint32_t room[PIECE];
    for (int64_t first = 0; first < count; first += PIECE) {
        int here = (int)(count - first < PIECE ? count - first : PIECE);
        const uint32_t *x = ARRAY(uint32_t, from + first * 4, here, room);
        uint32_t highest, lowest;
        int finite = look_f32(x, here, e, &highest, &lowest);
        if (lowest < 0x7fffff) subnormal(x, here, sums, squares);
        while (highest >= 0x800000) {
            int top = (int)(highest >> 23) > BAND ? (int)(highest >> 23) : BAND + 1;
            uint32_t bottom = (uint32_t)(top - BAND) << 23;
            band(x, (here + LANES - 1) / LANES * LANES, top, highest, sums, squares);
            highest = lowest < bottom - 1 ? below_32(x, here, bottom) : 0;
        }
        if (largest) largest_32(x, here, width, (at + first) % width, 0, finite ? 0x7fffffff : 0x7f7fffff, largest);
    }
}

/* ---- double precision ---- */

/* Mantissas and their squares, of 53 and 106 bits, by exponent; those of what is not finite land in the last bin, which
   nobody reads. There are tables of 2,048 numbers that take turns; they hold 2^20 elements. */
ALONE void mantissas(const uint64_t *x, int count, whole *sums, whole *squares) {
    for (int j = 0; j < count; j++) {
        uint64_t exponent = x[j] >> 52 & 2047, mantissa = (x[j] & 0xfffffffffffff) | (uint64_t)(exponent > 0) << 52;
        int64_t sign = -(int64_t)(x[j] >> 63);
        uint64_t bin = (uint64_t)(j % TABLES) * 2048 + exponent;
        deposit(sums + bin, ((int64_t)mantissa ^ sign) - sign, 0);
        add_128(squares + bin, (unsigned __int128)mantissa * mantissa);
    }
}

void transaxle_f64(const uint8_t *from, int64_t count, extremes *e, whole *sums, whole *squares, int64_t width,
                   int64_t at, uint64_t *largest) {
    uint64_t room[PIECE];
    for (int64_t first = 0; first < count; first += PIECE) {
        int here = (int)(count - first < PIECE ? count - first : PIECE);
        const uint64_t *x = ARRAY(uint64_t, from + first * 8, here, room);
        uint64_t highest, lowest;
        look_f64(x, here, e, &highest, &lowest);
        mantissas(x, here, sums, squares);
        if (largest) largest_64(x, here, width, (at + first) % width, 0, 0x7fefffffffffffff, largest);
    }
}

/* ---- whole numbers ---- */

/* Whole numbers of 32 bits, with a sign or none; places are the numbers themselves. */
#define WHOLE_32(name, number, least_of_all, most_of_all, is_signed)                                                   \
    CLONED static void piece_##name(const number *restrict x, int count, extremes *e, whole *sums, whole *squares) {   \
        uint32_t zeros = 0;                                                                                            \
        int64_t sum = 0;                                                                                               \
        uint64_t low = 0, high = 0;                                                                                    \
        number least = most_of_all, most = least_of_all;                                                               \
        for (int j = 0; j < count; j++) {                                                                              \
            number value = x[j];                                                                                       \
            uint64_t size = (uint32_t)(is_signed && (int64_t)value < 0 ? 0u - (uint32_t)value : (uint32_t)value), square = size * size;\
            zeros += value == 0, sum += value, low += square & 0xffffffff, high += square >> 32;                       \
            most = value > most ? value : most;                                                                        \
            least = value < least ? value : least;                                                                     \
        }                                                                                                              \
        e->zeros += zeros;                                                                                             \
        e->most = most > e->most ? most : e->most;                                                                     \
        e->least = least < e->least ? least : e->least;                                                                \
        deposit(sums, sum, 0), deposit(squares, (int64_t)low, 0), deposit(squares, (int64_t)high, 32);                 \
    }                                                                                                                  \
    void transaxle_##name(const uint8_t *from, int64_t count, extremes *e, whole *sums, whole *squares, int64_t width, \
                          int64_t at, uint32_t *largest) {                                                             \
        uint32_t room[PIECE];                                                                                          \
        for (int64_t first = 0; first < count; first += PIECE) {                                                       \
            int here = (int)(count - first < PIECE ? count - first : PIECE);                                           \
            const uint32_t *x = ARRAY(uint32_t, from + first * 4, here, room);                                         \
            piece_##name((const number *)x, here, e, sums, squares);                                                   \
            if (largest) largest_32(x, here, width, (at + first) % width, is_signed, UINT32_MAX, largest);             \
        }                                                                                                              \
    }
WHOLE_32(i32, int32_t, INT32_MIN, INT32_MAX, 1)
WHOLE_32(u32, uint32_t, 0, UINT32_MAX, 0)

/* Likewise of 64 bits; places of those without a sign are less 2^63. `squares` are two sums: of the low halves of squares,
   and of the high ones. */
#define WHOLE_64(name, turned, is_signed)                                                                              \
    void transaxle_##name(const uint8_t *from, int64_t count, extremes *e, whole *sums, whole *squares, int64_t width, \
                          int64_t at, uint64_t *largest) {                                                             \
        uint64_t room[PIECE];                                                                                          \
        for (int64_t first = 0; first < count; first += PIECE) {                                                       \
            int here = (int)(count - first < PIECE ? count - first : PIECE);                                           \
            const uint64_t *x = ARRAY(uint64_t, from + first * 8, here, room);                                         \
            unsigned __int128 sum = 0, low = 0, high = 0;                                                              \
            int64_t zeros = 0, least = INT64_MAX, most = INT64_MIN;                                                    \
            for (int j = 0; j < here; j++) {                                                                           \
                int64_t place = (int64_t)(x[j] ^ (turned));                                                            \
                uint64_t size = is_signed && place < 0 ? 0u - x[j] : x[j];                                             \
                unsigned __int128 square = (unsigned __int128)size * size;                                             \
                sum += is_signed ? (unsigned __int128)(__int128)place : x[j];                                          \
                low += (uint64_t)square, high += (uint64_t)(square >> 64);                                             \
                zeros += x[j] == 0;                                                                                    \
                most = place > most ? place : most;                                                                    \
                least = place < least ? place : least;                                                                 \
            }                                                                                                          \
            e->zeros += zeros;                                                                                         \
            e->most = most > e->most ? most : e->most;                                                                 \
            e->least = least < e->least ? least : e->least;                                                            \
            add_128(sums, sum), add_128(squares, low), add_128(squares + 1, high);                                     \
            if (largest) largest_64(x, here, width, (at + first) % width, is_signed, UINT64_MAX, largest);             \
        }                                                                                                              \
    }
WHOLE_64(i64, 0, 1)
WHOLE_64(u64, (uint64_t)1 << 63, 0)

/* Which source this was built from: tally.py loads no other. */
uint32_t transaxle_stamp(void) { return STAMP; }
