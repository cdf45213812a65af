/* The steps of a pickle, done on numbers: what it builds becomes nodes of a graph, and no object is made.

Only the steps are known by which torch and Megatron describe checkpoints; at any other, at whatever is wrong, and where
the memory does not suffice, the scan gives up, and the interpreter in Python reads the pickle and says what is wrong.

A reference is a number of 32 bits: a small integer with the highest bit set, or the number of a node. A node has a tag
and two numbers:

    TEXT    first byte in the pickle, bytes; UTF-8, and equal texts are one node
    INTEGER low and high half
    FLOAT   first byte in the pickle
    TUPLE, LIST, DICT   first of their parts, how many; a dict has a key and a value in turn
    GLOBAL  the texts of its module and name
    CALL    a global and the tuple of its arguments
    OBJECT  its class, a global, and its state; made without arguments
*/

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { CONSTANT, TEXT, INTEGER, FLOAT, TUPLE, LIST, DICT, GLOBAL, CALL, OBJECT };
enum { NONE, FALSE_, TRUE_, EMPTY, FIRST };

#define SMALL 0x80000000u
#define NO_STATE 0x7fffffffu
#define UNKNOWN 0xffffffffu
#define MOST_NODES 0x7fff0000
#define MOST_PROBES 16

typedef struct {
    uint8_t *tag;
    uint32_t *first, *count, *parts;
    int64_t nodes, part_count;
    uint32_t root;
} Graph;

typedef struct {
    void *data;
    int64_t count, room;
} Array;

typedef struct {
    Graph *graph;
    const uint8_t *data;
    int64_t size, at, left;
    Array tag, first, count, parts, stack, marks, memo, later, texts;
    int64_t remembered, known_texts, probes;
    int failed;
} Scan;

static uint32_t *numbers(const Array *array) { return (uint32_t *)array->data; }

/* Make room for more items; what is allocated is taken from the grant. */
static int grow(Scan *s, Array *array, int64_t count, int64_t width) {
    if (count <= array->room) return 1;
    int64_t room = array->room ? array->room : 256;
    while (room < count) room += room / 2;
    s->left -= (room - array->room) * width;
    void *data = s->left < 0 ? NULL : realloc(array->data, (size_t)(room * width));
    if (data == NULL) return !(s->failed = 1);
    array->data = data, array->room = room;
    return 1;
}

static void add(Scan *s, Array *array, uint32_t value) {
    if (array->count < array->room || grow(s, array, array->count + 1, 4)) numbers(array)[array->count++] = value;
}

static uint32_t node(Scan *s, int tag, uint32_t first, uint32_t count) {
    int64_t number = s->tag.count;
    if (number >= MOST_NODES || !grow(s, &s->tag, number + 1, 1)) return s->failed = 1, 0;
    ((uint8_t *)s->tag.data)[s->tag.count++] = (uint8_t)tag;
    add(s, &s->first, first);
    add(s, &s->count, count);
    return (uint32_t)number;
}

static int is_a(const Scan *s, uint32_t reference, int tag) {
    return !(reference & SMALL) && ((uint8_t *)s->tag.data)[reference] == tag;
}

/* The next little-endian number; what is not there ends the scan. */
static uint64_t number(Scan *s, int width) {
    uint64_t value = 0;
    if (s->size - s->at < width) return s->failed = 1, 0;
    for (int i = 0; i < width; i++) value |= (uint64_t)s->data[s->at + i] << 8 * i;
    s->at += width;
    return value;
}

static void push(Scan *s, uint32_t reference) { add(s, &s->stack, reference); }

/* Where the values since the last mark begin, or the last so many, on the stack. */
static int64_t floor_of(const Scan *s) { return s->marks.count ? numbers(&s->marks)[s->marks.count - 1] : 0; }

static int64_t last(Scan *s, int64_t count) {
    int64_t begin = s->stack.count - count;
    return begin < floor_of(s) ? (s->failed = 1, 0) : begin;
}

static uint32_t pop(Scan *s) {
    int64_t begin = last(s, 1);
    if (s->failed) return 0;
    s->stack.count = begin;
    return numbers(&s->stack)[begin];
}

static int64_t since_mark(Scan *s) {
    return s->marks.count ? numbers(&s->marks)[--s->marks.count] : (s->failed = 1, 0);
}

static void integer(Scan *s, int64_t value) {
    if (value >= 0 && value < SMALL - 1) push(s, SMALL | (uint32_t)value);
    else push(s, node(s, INTEGER, (uint32_t)(uint64_t)value, (uint32_t)((uint64_t)value >> 32)));
}

static uint64_t hash_of(const uint8_t *text, int64_t size) {
    uint64_t hash = 0x9e3779b97f4a7c15u ^ (uint64_t)size;
    for (; size >= 8; text += 8, size -= 8) {
        uint64_t word;
        memcpy(&word, text, 8);
        hash = (hash ^ word) * 0xff51afd7ed558ccdu;
        hash ^= hash >> 32;
    }
    while (size--) hash = (hash ^ *text++) * 0xff51afd7ed558ccdu;
    return hash ^ hash >> 29;
}

/* Where a text is in the table of texts, or has its place there. */
static int64_t place_of(Scan *s, const uint8_t *text, int64_t size) {
    int64_t mask = s->texts.count - 1, at = (int64_t)hash_of(text, size) & mask;
    for (;; at = (at + 1) & mask) {
        uint32_t known = numbers(&s->texts)[at];
        if (!known) return at;
        uint32_t length = numbers(&s->count)[known];
        if (length == size && !memcmp(s->data + numbers(&s->first)[known], text, (size_t)size)) return at;
        if (--s->probes < 0) return s->failed = 1, 0;
    }
}

static void more_texts(Scan *s) {
    Array old = s->texts;
    s->texts = (Array){0};
    int64_t room = old.count ? 2 * old.count : 1024;
    if (grow(s, &s->texts, room, 4)) {
        memset(s->texts.data, 0, (size_t)room * 4);
        s->texts.count = room;
        s->probes += MOST_PROBES * s->known_texts;
        for (int64_t i = 0; i < old.count && !s->failed; i++) {
            uint32_t known = numbers(&old)[i];
            if (!known) continue;
            int64_t at = place_of(s, s->data + numbers(&s->first)[known], numbers(&s->count)[known]);
            numbers(&s->texts)[at] = known;
        }
    }
    s->left += old.room * 4;
    free(old.data);
}

/* Whether bytes are UTF-8; surrogates are let through, as Python's pickler writes them. */
static int is_utf8(const uint8_t *text, int64_t size) {
    uint8_t seen = 0;
    for (int64_t i = 0; i < size; i++) seen |= text[i];
    for (int64_t i = 0; seen & 0x80 && i < size;) {
        uint8_t first = text[i];
        int width = first < 0x80 ? 1 : first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 0;
        if (!width || i + width > size) return 0;
        for (int j = 1; j < width; j++)
            if ((text[i + j] & 0xc0) != 0x80) return 0;
        if ((first == 0xe0 && text[i + 1] < 0xa0) || (first == 0xf0 && text[i + 1] < 0x90)) return 0;
        if (first == 0xf4 && text[i + 1] > 0x8f) return 0;
        i += width;
    }
    return 1;
}

static uint32_t text_at(Scan *s, int64_t begin, int64_t size) {
    s->probes += MOST_PROBES;
    if (2 * s->known_texts >= s->texts.count) more_texts(s);
    if (!is_utf8(s->data + begin, size)) s->failed = 1;
    if (s->failed) return 0;
    int64_t at = place_of(s, s->data + begin, size);
    if (s->failed) return 0;
    if (!numbers(&s->texts)[at]) {
        uint32_t made = node(s, TEXT, (uint32_t)begin, (uint32_t)size);
        numbers(&s->texts)[at] = made;
        s->known_texts++;
    }
    return numbers(&s->texts)[at];
}

static void text(Scan *s, uint64_t size) {
    if (size > (uint64_t)(s->size - s->at)) s->failed = 1;
    if (s->failed) return;
    push(s, text_at(s, s->at, (int64_t)size));
    s->at += (int64_t)size;
}

static uint32_t line(Scan *s) {
    const uint8_t *end = memchr(s->data + s->at, '\n', (size_t)(s->size - s->at));
    if (end == NULL) return s->failed = 1, 0;
    int64_t begin = s->at;
    s->at = end - s->data + 1;
    return text_at(s, begin, end - s->data - begin);
}

/* Let the values from a place of the stack on be parts. */
static uint32_t as_parts(Scan *s, int64_t begin) {
    int64_t count = s->stack.count - begin, at = s->parts.count;
    if (!grow(s, &s->parts, at + count, 4)) return 0;
    memcpy(numbers(&s->parts) + at, numbers(&s->stack) + begin, (size_t)count * 4);
    s->parts.count += count;
    s->stack.count = begin;
    return (uint32_t)at;
}

static void tuple(Scan *s, int64_t begin) {
    uint32_t count = (uint32_t)(s->stack.count - begin);
    if (!s->failed) push(s, count ? node(s, TUPLE, as_parts(s, begin), count) : EMPTY);
}

/* Add the values from a place of the stack on to the list or dict below them. */
static void extend(Scan *s, int64_t begin, int tag) {
    if (s->failed || begin - 1 < floor_of(s)) { s->failed = 1; return; }
    uint32_t count = (uint32_t)(s->stack.count - begin), target = numbers(&s->stack)[begin - 1];
    if (!is_a(s, target, tag) || (tag == DICT && count % 2)) { s->failed = 1; return; }
    for (int64_t i = begin; tag == DICT && i < s->stack.count; i += 2) {
        uint32_t key = numbers(&s->stack)[i];
        if (!is_a(s, key, TEXT) && !is_a(s, key, OBJECT)) { s->failed = 1; return; }
    }
    uint32_t at = as_parts(s, begin);
    if (s->failed || !count) return;
    if (numbers(&s->count)[target]) {
        add(s, &s->later, target);
        add(s, &s->later, at);
        add(s, &s->later, count);
    } else {
        numbers(&s->first)[target] = at;
        numbers(&s->count)[target] = count;
    }
}

static void remember(Scan *s, uint64_t index) {
    last(s, 1);
    if (index > (uint64_t)s->size) s->failed = 1;
    int64_t before = s->memo.count;
    if (s->failed || !grow(s, &s->memo, (int64_t)index + 1, 4)) return;
    if ((int64_t)index >= before) {
        s->memo.count = (int64_t)index + 1;
        memset(numbers(&s->memo) + before, 0xff, (size_t)(s->memo.count - before) * 4);
    }
    s->remembered += numbers(&s->memo)[index] == UNKNOWN;
    numbers(&s->memo)[index] = numbers(&s->stack)[s->stack.count - 1];
}

static void recall(Scan *s, uint64_t index) {
    if (s->failed || index >= (uint64_t)s->memo.count || numbers(&s->memo)[index] == UNKNOWN) { s->failed = 1; return; }
    push(s, numbers(&s->memo)[index]);
}

static void call(Scan *s, int is_new) {
    uint32_t args = pop(s), function = pop(s);
    if (s->failed || !is_a(s, function, GLOBAL)) { s->failed = 1; return; }
    if (is_new && args != EMPTY) { s->failed = 1; return; }
    if (args != EMPTY && !is_a(s, args, TUPLE)) { s->failed = 1; return; }
    push(s, node(s, is_new ? OBJECT : CALL, function, is_new ? NO_STATE : args));
}

static void build(Scan *s) {
    uint32_t state = pop(s);
    int64_t at = last(s, 1);
    if (s->failed) return;
    uint32_t target = numbers(&s->stack)[at];
    if (!is_a(s, target, OBJECT) || numbers(&s->count)[target] != NO_STATE) s->failed = 1;
    else numbers(&s->count)[target] = state;
}

static void step(Scan *s, uint8_t code) {
    uint32_t one, other;
    int64_t at;
    switch (code) {
    case 0x80: if (number(s, 1) > 5) s->failed = 1; break;
    case 0x95: if (number(s, 8) > (uint64_t)(s->size - s->at)) s->failed = 1; break;
    case '(': add(s, &s->marks, (uint32_t)s->stack.count); break;
    case 'N': push(s, NONE); break;
    case 0x88: push(s, TRUE_); break;
    case 0x89: push(s, FALSE_); break;
    case ')': push(s, EMPTY); break;
    case 'K': integer(s, (int64_t)number(s, 1)); break;
    case 'M': integer(s, (int64_t)number(s, 2)); break;
    case 'J': integer(s, (int32_t)number(s, 4)); break;
    case 0x8a: {
        int width = (int)number(s, 1);
        if (width > 8) { s->failed = 1; break; }
        uint64_t value = number(s, width);
        if (width && width < 8 && value >> (8 * width - 1)) value |= ~(uint64_t)0 << 8 * width;
        integer(s, (int64_t)value);
        break;
    }
    case 'G': one = (uint32_t)s->at; number(s, 8); push(s, node(s, FLOAT, one, 0)); break;
    case 'X': text(s, number(s, 4)); break;
    case 0x8c: text(s, number(s, 1)); break;
    case 0x8d: text(s, number(s, 8)); break;
    case ']': push(s, node(s, LIST, 0, 0)); break;
    case '}': push(s, node(s, DICT, 0, 0)); break;
    case 't': tuple(s, since_mark(s)); break;
    case 0x85: tuple(s, last(s, 1)); break;
    case 0x86: tuple(s, last(s, 2)); break;
    case 0x87: tuple(s, last(s, 3)); break;
    case 'a': extend(s, last(s, 1), LIST); break;
    case 's': extend(s, last(s, 2), DICT); break;
    case 'e': at = since_mark(s); extend(s, at, LIST); break;
    case 'u': at = since_mark(s); extend(s, at, DICT); break;
    case 'q': remember(s, number(s, 1)); break;
    case 'r': remember(s, number(s, 4)); break;
    case 0x94: remember(s, (uint64_t)s->remembered); break;
    case 'h': recall(s, number(s, 1)); break;
    case 'j': recall(s, number(s, 4)); break;
    case 'c': one = line(s); other = s->failed ? 0 : line(s); push(s, node(s, GLOBAL, one, other)); break;
    case 0x93:
        other = pop(s), one = pop(s);
        if (s->failed || !is_a(s, one, TEXT) || !is_a(s, other, TEXT)) { s->failed = 1; break; }
        push(s, node(s, GLOBAL, one, other));
        break;
    case 'R': call(s, 0); break;
    case 0x81: call(s, 1); break;
    case 'b': build(s); break;
    default: s->failed = 1;
    }
}

/* Bring the parts of each list and dict together that were added in several steps. */
static void together(Scan *s) {
    int64_t steps = s->later.count / 3;
    if (!steps) return;
    const uint32_t *later = numbers(&s->later);
    Array more = {0};
    if (grow(s, &more, s->tag.count, 4)) {
        memset(more.data, 0, (size_t)s->tag.count * 4);
        for (int64_t i = 0; i < steps; i++) numbers(&more)[later[3 * i]] += later[3 * i + 2];
        for (int64_t i = 0; i < steps && !s->failed; i++) {
            uint32_t target = later[3 * i], at = later[3 * i + 1], count = later[3 * i + 2];
            uint32_t *first = numbers(&s->first) + target, *total = numbers(&s->count) + target;
            if (numbers(&more)[target]) { /* the first of them: the parts move to where there is room for all */
                int64_t begin = s->parts.count;
                if (!grow(s, &s->parts, begin + *total + numbers(&more)[target], 4)) break;
                memcpy(numbers(&s->parts) + begin, numbers(&s->parts) + *first, (size_t)*total * 4);
                s->parts.count += *total + numbers(&more)[target];
                *first = (uint32_t)begin;
                numbers(&more)[target] = 0;
            }
            memcpy(numbers(&s->parts) + *first + *total, numbers(&s->parts) + at, (size_t)count * 4);
            *total += count;
        }
        s->left += more.room * 4;
    }
    free(more.data);
}

/* Give up if a dict has a key twice. Equal texts are one node, and an object is equal to itself alone. */
static void keys(Scan *s) {
    Array owner = {0};
    if (grow(s, &owner, s->tag.count, 4)) {
        memset(owner.data, 0, (size_t)s->tag.count * 4);
        for (int64_t i = 0; i < s->tag.count && !s->failed; i++) {
            if (((uint8_t *)s->tag.data)[i] != DICT) continue;
            const uint32_t *parts = numbers(&s->parts) + numbers(&s->first)[i];
            uint32_t count = numbers(&s->count)[i];
            for (uint32_t j = 0; j < count; j += 2) {
                if (numbers(&owner)[parts[j]] == i) s->failed = 1;
                numbers(&owner)[parts[j]] = (uint32_t)i;
            }
        }
    }
    free(owner.data);
}

/* Give back the room that is not used. */
static void *shrunk(Array *array, int64_t width) {
    void *data = array->count ? realloc(array->data, (size_t)(array->count * width)) : NULL;
    return data ? data : array->data;
}

void transaxle_scan_free(Graph *graph) {
    free(graph->tag), free(graph->first), free(graph->count), free(graph->parts);
    *graph = (Graph){0};
}

/* Scan a pickle with so much memory; 1 if the graph is what it builds, 0 if the scan has given up. */
int transaxle_scan(const uint8_t *data, int64_t size, int64_t memory, Graph *graph) {
    Scan s = {.data = data, .size = size, .left = memory};
    if (size > UINT32_MAX / 2) return 0;
    for (int i = 0; i < FIRST; i++) node(&s, i == EMPTY ? TUPLE : CONSTANT, 0, 0);
    while (!s.failed) {
        if (s.at >= size) { s.failed = 1; break; }
        uint8_t code = data[s.at++];
        if (code == '.') break;
        step(&s, code);
    }
    if (s.stack.count != 1 || s.marks.count) s.failed = 1;
    if (!s.failed) together(&s);
    if (!s.failed) keys(&s);
    uint32_t root = s.failed ? 0 : *numbers(&s.stack);
    free(s.stack.data), free(s.marks.data), free(s.memo.data), free(s.later.data), free(s.texts.data);
    *graph = (Graph){shrunk(&s.tag, 1), shrunk(&s.first, 4), shrunk(&s.count, 4), shrunk(&s.parts, 4),
                     s.tag.count, s.parts.count, root};
    if (s.failed) transaxle_scan_free(graph);
    return !s.failed;
}

uint32_t transaxle_stamp(void) { return STAMP; }
