/* pickle_mutator.h - changes pickles opcode by opcode, so that most results are pickles again. */
#ifndef PICKLE_MUTATOR_H
#define PICKLE_MUTATOR_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Of libFuzzer. A program that only replays a corpus does not have it, and does not mutate. */
__attribute__((weak)) size_t LLVMFuzzerMutate(uint8_t *data, size_t n, size_t capacity);

enum { MOST_OPS = 4096, MOST_PICKLE_NBYTES = 1 << 16 };

struct pickle_ops {
    size_t at[MOST_OPS + 1]; /* where each opcode begins; behind the last: the end */
    size_t n;
};

static size_t little_number(const uint8_t *bytes, size_t n)
{
    size_t value = 0;
    for (size_t i = n; i-- > 0;)
        value = value << 8 | bytes[i];
    return value;
}

static size_t lines_nbytes(const uint8_t *op, size_t left, int nlines)
{
    size_t n = 1;
    for (; n < left && nlines > 0; n++)
        nlines -= op[n] == '\n';
    return n;
}

/* Returns how many bytes of an opcode say the length of what follows; 0: it has none. */
static size_t prefix_nbytes(uint8_t op)
{
    switch (op) {
    case 'U':
    case 'C':
    case 0x8a:
    case 0x8c:
        return 1;
    case 'X':
    case 'B':
    case 'T':
    case 0x8b:
        return 4;
    case 0x8d:
    case 0x8e:
    case 0x96:
        return 8;
    default:
        return 0;
    }
}

static size_t op_nbytes(const uint8_t *op, size_t left)
{
    size_t n = 1, prefix = prefix_nbytes(*op);
    if (prefix)
        n = prefix < left ? 1 + prefix + little_number(op + 1, prefix) : left;
    else if (strchr("Khq", *op) || *op == 0x80 || *op == 0x82)
        n = 2;
    else if (*op == 'M' || *op == 0x83)
        n = 3;
    else if (strchr("Jjr", *op) || *op == 0x84)
        n = 5;
    else if (*op == 'G' || *op == 0x95)
        n = 9;
    else if (strchr("ci", *op))
        n = lines_nbytes(op, left, 2);
    else if (strchr("FILPSVgp", *op))
        n = lines_nbytes(op, left, 1);
    return n < left ? n : left;
}

static void find_ops(const uint8_t *data, size_t n, struct pickle_ops *ops)
{
    size_t at = 0;
    for (ops->n = 0; at < n && ops->n < MOST_OPS; at += op_nbytes(data + at, n - at))
        ops->at[ops->n++] = at;
    ops->at[ops->n] = at < n ? at : n;
}

/* Replaces [begin, end) of the data. Returns the new length; what does not fit changes nothing. */
static size_t splice_bytes(uint8_t *data, size_t n, size_t capacity, size_t begin, size_t end,
                           const uint8_t *with, size_t nwith)
{
    static uint8_t copy[MOST_PICKLE_NBYTES];
    if (n - (end - begin) + nwith > capacity || nwith > sizeof copy)
        return n;
    if (nwith)
        memcpy(copy, with, nwith); /* it may be a part of the data */
    memmove(data + begin + nwith, data + end, n - end);
    if (nwith)
        memcpy(data + begin, copy, nwith);
    return n - (end - begin) + nwith;
}

static unsigned next_random(unsigned *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 8;
}

/* Changes the argument of an opcode. A text keeps a right length. */
static size_t mutate_argument(uint8_t *data, size_t n, size_t capacity, size_t begin, size_t end,
                              unsigned *seed)
{
    static const int64_t numbers[] = {
        0,  1,     2,         3,         4,          8,         16,        255,      256,
        -1, 65536, INT32_MAX, INT32_MIN, 4294967296, INT64_MAX, INT64_MIN, 1ll << 62};
    uint8_t op[16], text[512];
    size_t prefix = prefix_nbytes(data[begin]), length = end - begin;
    if (prefix && length > prefix) {
        size_t old = length - 1 - prefix;
        if (old > sizeof text || !LLVMFuzzerMutate)
            return n;
        memcpy(text, data + begin + 1 + prefix, old);
        size_t new = LLVMFuzzerMutate(text, old, prefix == 1 ? 255 : sizeof text);
        size_t after = splice_bytes(data, n, capacity, begin + 1 + prefix, end, text, new);
        if (after == n - old + new)
            for (size_t i = 0; i < prefix; i++)
                data[begin + 1 + i] = (uint8_t)(new >> (8 * i));
        return after;
    }
    int64_t number = numbers[next_random(seed) % (sizeof numbers / sizeof *numbers)];
    op[0] = 0x8a;
    op[1] = 8;
    memcpy(op + 2, &number, sizeof number);
    bool is_number = strchr("KMJG", data[begin]) || data[begin] == 0x8a;
    if (is_number)
        return splice_bytes(data, n, capacity, begin, end, op, 10);
    for (size_t i = begin + 1; i < end; i++)
        data[i] = (uint8_t)next_random(seed);
    return n;
}

static size_t insert_op(uint8_t *data, size_t n, size_t capacity, size_t at, unsigned *seed)
{
    static const struct {
        uint8_t nbytes;
        const char *bytes;
    } small[] = {{1, "N"},    {1, ")"},    {1, "]"},    {1, "}"},   {1, "("},
                 {1, "0"},    {1, "e"},    {1, "u"},    {1, "t"},   {1, "b"},
                 {1, "R"},    {1, "\x81"}, {1, "."},    {1, "2"},   {2, "K\0"},
                 {2, "h\0"},  {2, "q\0"},  {2, "h\1"},  {2, "q\1"}, {1, "Q"},
                 {1, "\x88"}, {1, "\x85"}, {1, "\x86"}, {1, "s"},   {1, "a"}};
    size_t which = next_random(seed) % (sizeof small / sizeof *small);
    return splice_bytes(data, n, capacity, at, at, (const uint8_t *)small[which].bytes,
                        small[which].nbytes);
}

/* Changes a pickle of n bytes. Returns its new length. */
static size_t mutate_pickle(uint8_t *data, size_t n, size_t capacity, unsigned seed)
{
    static struct pickle_ops ops;
    for (int rounds = 1 + (int)(next_random(&seed) % 4); rounds > 0; rounds--) {
        find_ops(data, n, &ops);
        if (ops.n < 2)
            return LLVMFuzzerMutate ? LLVMFuzzerMutate(data, n, capacity) : n;
        size_t i = next_random(&seed) % ops.n, k = next_random(&seed) % ops.n;
        size_t begin = ops.at[i], end = ops.at[i + 1], to = ops.at[k];
        size_t many = ops.at[i + 1 + next_random(&seed) % (ops.n - i)];
        switch (next_random(&seed) % 8) {
        case 0:
            n = splice_bytes(data, n, capacity, begin, end, NULL, 0);
            break;
        case 1: /* an opcode that is somewhere else too */
            n = splice_bytes(data, n, capacity, to, to, data + begin, end - begin);
            break;
        case 2: /* several */
            n = splice_bytes(data, n, capacity, to, to, data + begin, many - begin);
            break;
        case 3: /* in the place of another */
            n = splice_bytes(data, n, capacity, to, ops.at[k + 1], data + begin, end - begin);
            break;
        case 4:
            n = insert_op(data, n, capacity, to, &seed);
            break;
        case 5: /* one value in two places */
            n = splice_bytes(data, n, capacity, end, end, (const uint8_t *)"q\xf0", 2);
            find_ops(data, n, &ops);
            to = ops.at[next_random(&seed) % ops.n];
            n = splice_bytes(data, n, capacity, to, to, (const uint8_t *)"h\xf0", 2);
            break;
        default:
            n = mutate_argument(data, n, capacity, begin, end, &seed);
            break;
        }
    }
    return n;
}

#endif
