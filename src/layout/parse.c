/* parse.c - reads the notation: one line of text for a layout or a problem.
 *
 *     problem    = tensor ":" side "->" [ dtype ] side
 *     layout     = tensor "@" side
 *     tensor     = dtype "[" [ extent { "," extent } ] "]"
 *     side       = mesh ":" placements | "{" group { "|" group } "}"
 *     mesh       = axis { ("x" | ",") axis } [ "ranks=" item { "," item } ]
 *     axis       = [ name "=" ] count
 *     item       = number [ "-" number ]
 *     placements = placement { "," placement } | the same in "[]" or "()" | "[" cuts { "," cuts } "]"
 *     cuts       = "-" | axis { "." axis }                    axis names or numbers
 *     placement  = ( "S" | "B" ) ( dim | "(" dim ")" ) | "S(" dim ";" extent { "," extent } ")"
 *                | "_S(" dim "," factor ")" | "C(" dim "," block ")" | "R" [ "()" ] | "P" [ "(" [ op ] ")" ]
 *     group      = [ box { ";" box } ]
 *     box        = range { "," range }                        range = lo ":" hi | ":"
 *
 * Words of PyTorch stand for the letters: Shard(dim=0) is S(0). Spaces are ignored. Every error names the column where it was detected. Memory is proportional to the
 * length of the text, except for lists of ranks, which have a limit.
 */
#include "layout.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

enum { MAX_LISTED_RANKS = 1 << 24 };

/* ---- tensor ---- */

struct parsed_tensor {
    rsd_dtype dtype;
    int32_t ndim;
    int64_t shape[RSD_MAX_DIMS];
};

/* Reads a dtype, such as f32 or torch.float32. */
static rsd_status parse_dtype(struct parser *p, rsd_dtype *out)
{
    char name[NAME_NCHARS], word[NAME_NCHARS], dtype[2 * NAME_NCHARS];
    scan_spaces(p);
    const char *begin = p->at;
    if (!scan_name(p, name))
        return scan_expected(p, "a dtype");
    bool dotted = scan_take(p, "."); /* torch.float32 */
    if (dotted && !scan_name(p, word))
        return scan_expected(p, "a dtype");
    snprintf(dtype, sizeof dtype, "%s%s%s", name, dotted ? "." : "", dotted ? word : "");
    return scan_at(p, begin, rsd_dtype_parse(dtype, out));
}

/* Parses the dtype of a destination that has another one. Another word is the name of a mesh axis. */
static void parse_other_dtype(struct parser *p, rsd_dtype *out)
{
    char name[NAME_NCHARS];
    scan_spaces(p);
    const char *begin = p->at;
    bool named = scan_name(p, name) && !scan_peek(p, "=");
    p->at = begin;
    if (named && parse_dtype(p, out))
        p->at = begin;
}

/* Reads a dtype and a shape: f32[8,8]. */
static rsd_status parse_tensor(struct parser *p, struct parsed_tensor *out)
{
    TRY(parse_dtype(p, &out->dtype));
    TRY(scan_need(p, "[", "'['"));
    out->ndim = 0;
    if (scan_take(p, "]"))
        return RSD_OK;
    do {
        if (out->ndim == RSD_MAX_DIMS)
            return fail(RSD_ELIMIT, "column %d: the tensor has more than %d dims",
                        scan_column(p, p->at), (int)RSD_MAX_DIMS);
        TRY(scan_number(p, "an extent", &out->shape[out->ndim++]));
    } while (scan_take(p, ","));
    return scan_need(p, "]", "',' or ']'");
}

/* ---- mesh ---- */

struct rank_range {
    int64_t first, last;
};

/* Reads ranks: 0-3,8,12-15. The caller frees the list, also on failure. */
static rsd_status parse_rank_ranges(struct parser *p, struct rank_range **ranges, size_t *count)
{
    size_t capacity = 0;
    do {
        struct rank_range range;
        TRY(scan_number(p, "a rank", &range.first));
        range.last = range.first;
        scan_spaces(p);
        const char *dash = p->at;
        if (scan_take(p, "-")) {
            if (scan_peek(p, ">")) /* "->" of a problem */
                return scan_expected(p, "a rank");
            TRY(scan_number(p, "a rank", &range.last));
        }
        if (range.last < range.first || range.last > INT32_MAX)
            return fail(
                RSD_EINVAL,
                "column %d: invalid range of ranks %lld-%lld: the first must not exceed the "
                "last, nor the last 2^31 - 1",
                scan_column(p, dash), (long long)range.first, (long long)range.last);
        TRY(GROW(*ranges, capacity, *count + 1));
        (*ranges)[(*count)++] = range;
    } while (scan_take(p, ","));
    return RSD_OK;
}

/* Creates a mesh whose ranks are the given ranges, one after the other. */
static rsd_status make_listed_mesh(int32_t naxes, const int64_t *counts, const char *const *names,
                                   const struct rank_range *ranges, size_t nranges, rsd_mesh **out)
{
    int64_t listed = 0, nranks = 1;
    for (size_t i = 0; i < nranges; i++)
        listed += ranges[i].last - ranges[i].first + 1;
    for (int32_t a = 0; a < naxes; a++)
        if (!mul_i64(nranks, counts[a], &nranks))
            return fail(RSD_ELIMIT, "the mesh has more than 2^31 - 1 ranks");
    if (listed != nranks)
        return fail(RSD_EINVAL, "the mesh has %lld positions, but ranks= lists %lld",
                    (long long)nranks, (long long)listed);
    if (nranges == 1)
        return mesh_new_from(naxes, counts, names, (int32_t)ranges[0].first, out);
    if (listed > MAX_LISTED_RANKS)
        return fail(RSD_ELIMIT, "ranks= lists %lld ranks in several ranges (at most %d)",
                    (long long)listed, (int)MAX_LISTED_RANKS);
    int32_t *ranks = mem_new((size_t)listed, sizeof *ranks), *next = ranks;
    if (!ranks)
        return RSD_ENOMEM;
    for (size_t i = 0; i < nranges; i++)
        for (int64_t rank = ranges[i].first; rank <= ranges[i].last; rank++)
            *next++ = (int32_t)rank;
    rsd_status status = rsd_mesh_new(naxes, counts, names, ranks, out);
    mem_free(ranks);
    return status;
}

static rsd_status parse_axis(struct parser *p, char label[NAME_NCHARS], int64_t *count)
{
    label[0] = '\0';
    if (!scan_at_digit(p)) {
        if (!scan_name(p, label))
            return scan_expected(p, "a mesh axis, such as 4 or tp=4");
        TRY(scan_need(p, "=", "'=' after the name of a mesh axis"));
    }
    return scan_number(p, "the number of ranks along a mesh axis", count);
}

/* Reads a mesh: 4, 2x4 or dp=2,tp=4, and perhaps ranks=0-7. */
static rsd_status parse_mesh(struct parser *p, rsd_mesh **out)
{
    char labels[RSD_MAX_AXES][NAME_NCHARS];
    const char *names[RSD_MAX_AXES] = {NULL};
    int64_t counts[RSD_MAX_AXES] = {0};
    int32_t naxes = 0;
    scan_spaces(p);
    const char *begin = p->at;
    do {
        scan_spaces(p);
        if (naxes == RSD_MAX_AXES)
            return fail(RSD_ELIMIT, "column %d: the mesh has more than %d axes",
                        scan_column(p, p->at), (int)RSD_MAX_AXES);
        TRY(parse_axis(p, labels[naxes], &counts[naxes]));
        names[naxes] = labels[naxes][0] ? labels[naxes] : NULL;
        naxes++;
    } while (scan_take(p, "x") || scan_take(p, ","));

    if (!scan_take(p, "ranks"))
        return scan_at(p, begin, rsd_mesh_new(naxes, counts, names, NULL, out));
    TRY(scan_need(p, "=", "'=' after ranks"));
    struct rank_range *ranges = NULL;
    size_t nranges = 0;
    rsd_status status = parse_rank_ranges(p, &ranges, &nranges);
    if (!status)
        status = scan_at(p, begin, make_listed_mesh(naxes, counts, names, ranges, nranges, out));
    mem_free(ranges);
    return status;
}

/* ---- placements ---- */

/* Reads one placement per mesh axis: S(0),R. */
static rsd_status parse_axis_placements(struct parser *p, const struct parsed_tensor *tensor,
                                        const rsd_mesh *mesh, rsd_layout **out)
{
    rsd_placement placements[RSD_MAX_AXES] = {{0}};
    int64_t *lists[RSD_MAX_AXES] = {NULL};
    int32_t n = 0;
    const char *begin = p->at;
    rsd_status status = RSD_OK;
    do {
        scan_spaces(p);
        if (n == mesh->naxes)
            status = fail(RSD_EINVAL, "column %d: more placements than mesh axes (%d)",
                          scan_column(p, p->at), (int)mesh->naxes);
        else
            status = placement_parse(p, tensor->ndim, &placements[n], &lists[n]);
        n++;
    } while (!status && scan_take(p, ","));
    bool everywhere = !status && n == 1 && placements[0].kind == RSD_REPLICATE;
    for (; everywhere && n < mesh->naxes; n++)
        placements[n] = placements[0];
    if (!status && n < mesh->naxes)
        status = fail(RSD_EINVAL, "column %d: %d placement%s, but the mesh has %d axes",
                      scan_column(p, p->at), (int)n, n == 1 ? "" : "s", (int)mesh->naxes);
    if (!status)
        status = scan_at(
            p, begin,
            rsd_layout_new(tensor->dtype, tensor->ndim, tensor->shape, mesh, placements, out));
    for (int32_t a = 0; a < RSD_MAX_AXES; a++)
        mem_free(lists[a]);
    return status;
}

/* Reads a mesh axis, by name or number. */
static rsd_status parse_axis_reference(struct parser *p, const rsd_mesh *mesh, int32_t *out)
{
    scan_spaces(p);
    const char *begin = p->at;
    char label[NAME_NCHARS];
    if (scan_name(p, label)) {
        const char *names[RSD_MAX_AXES];
        size_t n = 0;
        for (int32_t a = 0; a < mesh->naxes; a++) {
            if (!mesh->names[a])
                continue;
            if (strcmp(mesh->names[a], label) == 0) {
                *out = a;
                return RSD_OK;
            }
            names[n++] = mesh->names[a];
        }
        return scan_at(p, begin, text_unknown("mesh axis", label, n, names));
    }
    int64_t value;
    TRY(scan_number(p, "'-' or a mesh axis", &value));
    if (value >= mesh->naxes)
        return fail(RSD_EINVAL, "column %d: axis %lld out of range: the mesh has %d axes",
                    scan_column(p, begin), (long long)value, (int)mesh->naxes);
    *out = (int32_t)value;
    return RSD_OK;
}

/* Reads the mesh axes that cut each dim, after the opening bracket: [dp.tp, -]. */
static rsd_status parse_dim_axes(struct parser *p, const struct parsed_tensor *tensor,
                                 const rsd_mesh *mesh, rsd_layout **out)
{
    int32_t naxes[RSD_MAX_DIMS] = {0}, axes[RSD_MAX_AXES], total = 0, ndims = 0;
    const char *begin = p->at;
    if (tensor->ndim > 0)
        do {
            if (ndims == tensor->ndim)
                return fail(RSD_EINVAL, "column %d: the list has more dims than the tensor (%d)",
                            scan_column(p, p->at), (int)tensor->ndim);
            if (!scan_take(p, "-"))
                do {
                    if (total == mesh->naxes)
                        return fail(RSD_EINVAL, "column %d: a mesh axis is used twice",
                                    scan_column(p, p->at));
                    TRY(parse_axis_reference(p, mesh, &axes[total++]));
                    naxes[ndims]++;
                } while (scan_take(p, "."));
            ndims++;
        } while (scan_take(p, ","));
    TRY(scan_need(p, "]", "',', '.' or ']'"));
    if (ndims < tensor->ndim)
        return fail(RSD_EINVAL, "column %d: the list has %d dims, but the tensor has %d",
                    scan_column(p, begin), (int)ndims, (int)tensor->ndim);
    return scan_at(
        p, begin,
        rsd_layout_new_by_dim(tensor->dtype, tensor->ndim, tensor->shape, mesh, naxes, axes, out));
}

/* ---- explicit boxes ---- */

struct box_list {
    size_t count, ranks_capacity, lo_capacity, len_capacity;
    int32_t *ranks;
    int64_t *lo, *len;
};

/* Adds a box of a rank to the list. */
static rsd_status append_box(struct box_list *list, int32_t ndim, int32_t rank, const int64_t *lo,
                             const int64_t *len)
{
    size_t n = list->count, dims = (size_t)ndim;
    TRY(GROW(list->ranks, list->ranks_capacity, n + 1));
    TRY(GROW(list->lo, list->lo_capacity, (n + 1) * dims));
    TRY(GROW(list->len, list->len_capacity, (n + 1) * dims));
    list->ranks[n] = rank;
    copy_i64s(list->lo + n * dims, lo, ndim);
    copy_i64s(list->len + n * dims, len, ndim);
    list->count++;
    return RSD_OK;
}

/* Reads a range of one dim: 0:4, or : for all of it. */
static rsd_status parse_range(struct parser *p, int64_t extent, int64_t *lo, int64_t *len)
{
    int64_t hi;
    scan_spaces(p);
    const char *begin = p->at;
    *lo = 0;
    *len = extent;
    if (scan_take(p, ":"))
        return RSD_OK;
    TRY(scan_number(p, "a range, such as 0:4", lo));
    TRY(scan_need(p, ":", "':'"));
    TRY(scan_number(p, "the end of a range", &hi));
    if (hi < *lo)
        return fail(RSD_EINVAL,
                    "column %d: invalid range %lld:%lld: the end is less than the start",
                    scan_column(p, begin), (long long)*lo, (long long)hi);
    *len = hi - *lo;
    return RSD_OK;
}

/* Dims that are left out are whole. The one element of a tensor without dims is ":". */
static rsd_status parse_box(struct parser *p, const struct parsed_tensor *tensor, int32_t rank,
                            struct box_list *list)
{
    int64_t lo[RSD_MAX_DIMS] = {0}, len[RSD_MAX_DIMS];
    int32_t d = 0;
    scan_spaces(p);
    const char *begin = p->at;
    if (tensor->ndim == 0)
        TRY(scan_need(p, ":", "':', the one element of a tensor without dims"));
    else
        do {
            if (d == tensor->ndim)
                return fail(RSD_EINVAL, "column %d: the box has more dims than the tensor (%d)",
                            scan_column(p, p->at), (int)tensor->ndim);
            TRY(parse_range(p, tensor->shape[d], &lo[d], &len[d]));
            d++;
        } while (scan_take(p, ","));
    for (; d < tensor->ndim; d++)
        len[d] = tensor->shape[d];
    bool empty = false;
    int32_t outside = -1;
    for (d = 0; d < tensor->ndim; d++) {
        empty = empty || len[d] == 0;
        if ((lo[d] > tensor->shape[d] || len[d] > tensor->shape[d] - lo[d]) && outside < 0)
            outside = d;
    }
    if (outside >= 0 && !empty)
        return fail(RSD_EINVAL, "column %d: range %lld:%lld exceeds the extent %lld of dim %d",
                    scan_column(p, begin), (long long)lo[outside],
                    (long long)(lo[outside] + len[outside]), (long long)tensor->shape[outside],
                    (int)outside);
    return append_box(list, tensor->ndim, rank, lo, len);
}

/* Reads the boxes of all ranks, after the opening brace: boxes of one rank are separated by ;, and ranks by |. */
static rsd_status parse_box_groups(struct parser *p, const struct parsed_tensor *tensor,
                                   struct box_list *list)
{
    int32_t rank = 0;
    do {
        if (rank == INT32_MAX)
            return fail(RSD_ELIMIT, "column %d: more than 2^31 - 1 ranks", scan_column(p, p->at));
        if (!scan_peek(p, "|") && !scan_peek(p, "}"))
            do
                TRY(parse_box(p, tensor, rank, list));
            while (scan_take(p, ";"));
        rank++;
    } while (scan_take(p, "|"));
    return scan_need(p, "}", "',', ';', '|' or '}'");
}

/* Reads a layout of explicit boxes, after the opening brace. */
static rsd_status parse_explicit_side(struct parser *p, const struct parsed_tensor *tensor,
                                      rsd_layout **out)
{
    struct box_list list = {0};
    const char *begin = p->at;
    rsd_status status = parse_box_groups(p, tensor, &list);
    if (!status)
        status =
            scan_at(p, begin,
                    rsd_layout_new_boxes(tensor->dtype, tensor->ndim, tensor->shape,
                                         (int64_t)list.count, list.ranks, list.lo, list.len, out));
    mem_free(list.ranks);
    mem_free(list.lo);
    mem_free(list.len);
    return status;
}

/* ---- layouts and problems ---- */

/* Parses placements by axis, which may be in brackets as in Python, or the axes of each dim in brackets. Only
 * placements have parentheses. */
static rsd_status parse_placements(struct parser *p, const struct parsed_tensor *tensor,
                                   const rsd_mesh *mesh, rsd_layout **out)
{
    char word[NAME_NCHARS];
    const char *close = scan_take(p, "(") ? ")" : NULL;
    if (!close && scan_take(p, "[")) {
        const char *begin = p->at;
        bool placements = scan_name(p, word) && scan_peek(p, "(");
        p->at = begin;
        if (!placements)
            return parse_dim_axes(p, tensor, mesh, out);
        close = "]";
    }
    rsd_layout *layout = NULL;
    TRY(parse_axis_placements(p, tensor, mesh, &layout));
    if (close && !scan_take(p, close)) {
        rsd_layout_free(layout);
        return scan_expected(p, *close == ')' ? "',' or ')'" : "',' or ']'");
    }
    *out = layout;
    return RSD_OK;
}

/* Reads a mesh with placements, or explicit boxes. */
static rsd_status parse_side(struct parser *p, const struct parsed_tensor *tensor, rsd_layout **out)
{
    if (scan_take(p, "{"))
        return parse_explicit_side(p, tensor, out);
    rsd_mesh *ranks = NULL;
    TRY(parse_mesh(p, &ranks));
    assert(ranks);
    rsd_status status = scan_need(p, ":", "':' between the mesh and its placements");
    if (!status)
        status = parse_placements(p, tensor, ranks, out);
    rsd_mesh_free(ranks);
    return status;
}

static rsd_status parse_end(struct parser *p)
{
    scan_spaces(p);
    return *p->at ? scan_expected(p, "the end") : RSD_OK;
}

rsd_status rsd_mesh_parse(const char *text, rsd_mesh **out)
{
    struct parser p = {text, text};
    rsd_mesh *parsed = NULL;
    TRY(parse_mesh(&p, &parsed));
    rsd_status status = parse_end(&p);
    if (status)
        rsd_mesh_free(parsed);
    else
        *out = parsed;
    return status;
}

rsd_status rsd_layout_parse(const char *text, rsd_layout **out)
{
    struct parser p = {text, text};
    struct parsed_tensor whole = {0};
    rsd_layout *layout = NULL;
    TRY(parse_tensor(&p, &whole));
    TRY(scan_need(&p, "@",
                  "'@' between the tensor and its layout (':' is for a problem of two layouts)"));
    TRY(parse_side(&p, &whole, &layout));
    rsd_status status = parse_end(&p);
    if (status)
        rsd_layout_free(layout);
    else
        *out = layout;
    return status;
}

rsd_status rsd_layout_parse_on(rsd_dtype dtype, int32_t ndim, const int64_t *shape,
                               const rsd_mesh *mesh, const char *text, rsd_layout **out)
{
    struct parser p = {text, text};
    struct parsed_tensor whole = {.dtype = dtype, .ndim = ndim};
    rsd_layout *layout = NULL;
    if (ndim < 0 || ndim > RSD_MAX_DIMS)
        return fail(RSD_EINVAL, "invalid number of dims %d (0 to %d)", (int)ndim,
                    (int)RSD_MAX_DIMS);
    copy_i64s(whole.shape, shape, ndim);
    TRY(parse_placements(&p, &whole, mesh, &layout));
    rsd_status status = parse_end(&p);
    if (status)
        rsd_layout_free(layout);
    else
        *out = layout;
    return status;
}

rsd_status rsd_problem_parse(const char *text, rsd_layout **src, rsd_layout **dst)
{
    struct parser p = {text, text};
    struct parsed_tensor whole = {0};
    rsd_layout *from = NULL, *to = NULL;
    TRY(parse_tensor(&p, &whole));
    TRY(scan_need(&p, ":", "':' between the tensor and its two layouts ('@' is for one layout)"));
    TRY(parse_side(&p, &whole, &from));
    rsd_status status = scan_need(&p, "->", "'->' between the two layouts");
    if (!status) {
        parse_other_dtype(&p, &whole.dtype);
        status = parse_side(&p, &whole, &to);
    }
    if (!status)
        status = parse_end(&p);
    if (status) {
        rsd_layout_free(from);
        rsd_layout_free(to);
        return status;
    }
    *src = from;
    *dst = to;
    return RSD_OK;
}
