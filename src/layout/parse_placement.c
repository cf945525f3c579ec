/* parse_placement.c - reads one placement of the notation, in its letters or in the words of PyTorch.
 *
 *     S(0)  Shard(0)  Shard(dim=0)             _S(0,2)  _StridedShard(dim=0, split_factor=2)
 *     R     Replicate()                        P(avg)   Partial("avg")  Partial(mean)
 *     S(0)  colwise, for a weight of Linear    S(1)     rowwise
 */
#include "layout.h"

#include <string.h>
#include <strings.h>

/* A word, what it stands for, and the dim if the word states it. Long words are known in any case of letters. */
static const struct {
    const char *word;
    rsd_kind kind;
    int32_t dim;
} kinds[] = {{"S", RSD_SHARD, -1},         {"B", RSD_BALANCED, -1},
             {"_S", RSD_STRIDED, -1},      {"C", RSD_CYCLIC, -1},
             {"R", RSD_REPLICATE, -1},     {"P", RSD_PARTIAL, -1},
             {"Shard", RSD_SHARD, -1},     {"Replicate", RSD_REPLICATE, -1},
             {"Partial", RSD_PARTIAL, -1}, {"_StridedShard", RSD_STRIDED, -1},
             {"Strided", RSD_STRIDED, -1}, {"Balanced", RSD_BALANCED, -1},
             {"Cyclic", RSD_CYCLIC, -1},   {"colwise", RSD_SHARD, 0},
             {"rowwise", RSD_SHARD, 1}};

enum { NKINDS = sizeof kinds / sizeof *kinds };

/* Skips the name of an argument and its equals sign, if that comes next. */
static void skip_keyword(struct parser *p, const char *keyword)
{
    char word[NAME_NCHARS];
    const char *begin = p->at;
    if (!scan_name(p, word) || strcmp(word, keyword) != 0 || !scan_take(p, "="))
        p->at = begin;
}

static rsd_status fail_dim(struct parser *p, const char *begin, const char *sign, int64_t dim,
                           int32_t ndim)
{
    return fail(RSD_EINVAL, "column %d: dim %s%lld out of range: the tensor has %d dims",
                scan_column(p, begin), sign, (long long)dim, (int)ndim);
}

/* Reads a dim, which may be counted from the end: -1. */
static rsd_status parse_dim(struct parser *p, int32_t ndim, int32_t *out)
{
    skip_keyword(p, "dim");
    scan_spaces(p);
    const char *begin = p->at;
    bool from_end = scan_take(p, "-");
    int64_t value;
    TRY(scan_number(p, "a dim", &value));
    if (from_end ? value < 1 || value > ndim : value >= ndim)
        return fail_dim(p, begin, from_end ? "-" : "", value, ndim);
    *out = (int32_t)(from_end ? ndim - value : value);
    return RSD_OK;
}

/* Reads the segments of S(d;...) into *list, which the caller frees, also on failure. */
static rsd_status parse_segments(struct parser *p, rsd_placement *out, int64_t **list)
{
    size_t capacity = 0;
    do {
        if (out->nsegments == RSD_MAX_SEGMENTS)
            return fail(RSD_ELIMIT, "column %d: the shard has more than %d segments",
                        scan_column(p, p->at), (int)RSD_MAX_SEGMENTS);
        TRY(GROW(*list, capacity, (size_t)out->nsegments + 1));
        TRY(scan_number(p, "the length of a segment", &(*list)[out->nsegments++]));
    } while (scan_take(p, ","));
    out->segments = *list;
    return RSD_OK;
}

static rsd_status parse_shard(struct parser *p, int32_t ndim, rsd_placement *out, int64_t **list)
{
    if (!scan_take(p, "("))
        return parse_dim(p, ndim, &out->dim);
    TRY(parse_dim(p, ndim, &out->dim));
    if (out->kind == RSD_SHARD && scan_take(p, ";")) {
        out->kind = RSD_SEGMENTED;
        TRY(parse_segments(p, out, list));
    }
    return scan_need(p, ")", "')'");
}

/* Parses the rest of _S(dim,factor) or C(dim,block). */
static rsd_status parse_with_factor(struct parser *p, int32_t ndim, rsd_placement *out)
{
    bool cyclic = out->kind == RSD_CYCLIC;
    TRY(scan_need(p, "(", "'('"));
    TRY(parse_dim(p, ndim, &out->dim));
    TRY(scan_need(p, ",", "','"));
    skip_keyword(p, cyclic ? "block" : "split_factor");
    skip_keyword(p, "sf"); /* as torch prints it */
    scan_spaces(p);
    const char *begin = p->at;
    TRY(scan_number(p, cyclic ? "a block" : "a split factor", &out->factor));
    if (out->factor < 1)
        return fail(RSD_EINVAL, "column %d: %s is 0, but must be at least 1", scan_column(p, begin),
                    cyclic ? "block" : "split factor");
    return scan_need(p, ")", "')'");
}

/* Reads the reduction of a partial placement in parentheses. Without one it is a sum. */
static rsd_status parse_partial(struct parser *p, rsd_placement *out)
{
    char op[NAME_NCHARS];
    if (!scan_take(p, "(") || scan_take(p, ")"))
        return RSD_OK;
    skip_keyword(p, "reduce_op");
    const char *quote = scan_take(p, "\"") ? "\"" : scan_take(p, "'") ? "'" : "";
    scan_spaces(p);
    const char *begin = p->at;
    if (!scan_name(p, op))
        return scan_expected(p, "a reduction");
    TRY(scan_at(p, begin, rsd_reduce_parse(op, &out->reduce)));
    TRY(scan_need(p, quote, "the closing quote"));
    return scan_need(p, ")", "')'");
}

/* Reads the letters of a placement, and returns the number of its kind. */
static rsd_status parse_kind(struct parser *p, size_t *kind)
{
    const char *words[NKINDS];
    char word[NAME_NCHARS];
    size_t n = 0;
    scan_spaces(p);
    while (n < NAME_NCHARS - 1 && is_name_start(p->at[n]))
        n++;
    if (n == 0)
        return scan_expected(p, "a placement: S, B, _S, C, R or P");
    memcpy(word, p->at, n);
    word[n] = '\0';
    for (*kind = 0; *kind < NKINDS; (*kind)++) {
        words[*kind] = kinds[*kind].word;
        if (n > 2 ? strcasecmp(word, words[*kind]) == 0 : strcmp(word, words[*kind]) == 0) {
            p->at += n;
            return RSD_OK;
        }
    }
    return scan_at(p, p->at, text_unknown("placement", word, NKINDS, words));
}

rsd_status placement_parse(struct parser *p, int32_t ndim, rsd_placement *out, int64_t **list)
{
    size_t kind = 0;
    scan_spaces(p);
    const char *begin = p->at;
    TRY(parse_kind(p, &kind));
    *out = (rsd_placement){.kind = kinds[kind].kind};
    if (kinds[kind].dim >= 0) {
        out->dim = kinds[kind].dim;
        return out->dim < ndim ? RSD_OK : fail_dim(p, begin, "", out->dim, ndim);
    }
    switch (out->kind) {
    case RSD_SHARD:
    case RSD_BALANCED:
        return parse_shard(p, ndim, out, list);
    case RSD_STRIDED:
    case RSD_CYCLIC:
        return parse_with_factor(p, ndim, out);
    case RSD_PARTIAL:
        return parse_partial(p, out);
    case RSD_REPLICATE:
    case RSD_SEGMENTED:
        break;
    }
    return scan_take(p, "(") ? scan_need(p, ")", "')'") : RSD_OK;
}
