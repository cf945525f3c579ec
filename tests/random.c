/* random.c - random layouts as text; see random.h. */
#include "random.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

uint64_t random_next(struct random *random)
{
    uint64_t x = random->state += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

int64_t random_below(struct random *random, int64_t limit)
{
    return (int64_t)(random_next(random) % (uint64_t)limit);
}

struct writer {
    char *text;
    size_t at, capacity;
};

__attribute__((format(printf, 2, 3))) static void put(struct writer *w, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vsnprintf(w->text + w->at, w->capacity - w->at, format, args);
    va_end(args);
    w->at += (size_t)n;
    if (w->at >= w->capacity)
        w->at = w->capacity - 1;
}

struct random_tensor random_tensor(struct random *r, const char *dtype)
{
    struct random_tensor tensor = {.ndim = (int32_t)random_below(r, 5)};
    struct writer w = {tensor.text, 0, sizeof tensor.text};
    int64_t largest = tensor.ndim < 3 ? 24 : 7;
    put(&w, "%s[", dtype);
    for (int32_t d = 0; d < tensor.ndim; d++) {
        tensor.shape[d] = random_below(r, 20) ? 1 + random_below(r, largest) : 0;
        put(&w, "%s%lld", d ? "," : "", (long long)tensor.shape[d]);
    }
    put(&w, "]");
    return tensor;
}

static void put_segments(struct random *r, int64_t extent, struct writer *w)
{
    int64_t left = extent, n = 1 + random_below(r, 4);
    for (int64_t i = 0; i < n; i++) {
        int64_t length = i == n - 1 ? left : random_below(r, left + 1);
        put(w, "%s%lld", i ? "," : "", (long long)length);
        left -= length;
    }
}

static void put_placement(struct random *r, const struct random_tensor *t, const char *partial,
                          struct writer *w)
{
    if (partial && random_below(r, 2) == 0) {
        put(w, "P(%s)", partial);
        return;
    }
    if (t->ndim == 0 || random_below(r, 4) == 0) {
        put(w, "R");
        return;
    }
    long long dim = random_below(r, t->ndim);
    switch (random_below(r, 8)) {
    case 0:
        put(w, "B(%lld)", dim);
        break;
    case 1:
        put(w, "_S(%lld,%lld)", dim, 1 + (long long)random_below(r, 5));
        break;
    case 2:
        put(w, "C(%lld,%lld)", dim, 1 + (long long)random_below(r, 4));
        break;
    case 3:
        put(w, "S(%lld;", dim);
        put_segments(r, t->shape[dim], w);
        put(w, ")");
        break;
    case 4:
        put(w, "S(%lld)", dim - t->ndim);
        break;
    default:
        put(w, "S(%lld)", dim);
    }
}

/* Writes the ranks of a mesh, from a base on, in random order and with gaps. */
static void put_ranks(struct random *r, int64_t nranks, struct writer *w)
{
    int64_t ranks[256], base = random_below(r, 6), rank = base;
    for (int64_t i = 0; i < nranks; i++, rank += 1 + random_below(r, 2))
        ranks[i] = rank;
    for (int64_t i = nranks - 1; i > 0; i--) {
        int64_t j = random_below(r, i + 1), swap = ranks[i];
        ranks[i] = ranks[j];
        ranks[j] = swap;
    }
    put(w, " ranks=");
    for (int64_t i = 0; i < nranks; i++)
        put(w, "%s%lld", i ? "," : "", (long long)ranks[i]);
}

static void put_mesh_side(struct random *r, const struct random_tensor *t, const char *partial,
                          struct writer *w)
{
    int64_t naxes = 1 + random_below(r, 3), nranks = 1, nterms = 1;
    for (int64_t a = 0; a < naxes; a++) {
        int64_t count = 1 + random_below(r, naxes == 1 ? 8 : naxes == 2 ? 4 : 2);
        put(w, "%s%lld", a ? "x" : "", (long long)count);
        nranks *= count;
    }
    if (random_below(r, 3) == 0)
        put_ranks(r, nranks, w);
    put(w, " : ");
    if (!partial && t->ndim > 0 && random_below(r, 5) == 0) { /* axes per dim, in any order */
        int64_t dim_of[3], order[3] = {0, 1, 2};
        for (int64_t a = 0; a < naxes; a++) {
            int64_t j = random_below(r, a + 1), swap = order[a];
            order[a] = order[j];
            order[j] = swap;
            dim_of[a] = random_below(r, t->ndim + 1);
        }
        put(w, "[");
        for (int32_t d = 0; d < t->ndim; d++) {
            bool any = false;
            put(w, "%s", d ? ", " : "");
            for (int64_t a = 0; a < naxes; a++)
                if (dim_of[order[a]] == d) {
                    put(w, "%s%lld", any ? "." : "", (long long)order[a]);
                    any = true;
                }
            put(w, "%s", any ? "" : "-");
        }
        put(w, "]");
        return;
    }
    for (int64_t a = 0; a < naxes; a++) {
        put(w, "%s", a ? "," : "");
        put_placement(r, t, nterms > 8 ? NULL : partial, w);
    }
}

/* Cuts the tensor into random boxes and assigns them to ranks; some have copies. */
static void put_explicit_side(struct random *r, const struct random_tensor *t, struct writer *w)
{
    enum { MAX = 12 };
    int64_t lo[MAX][8] = {{0}}, len[MAX][8], nboxes = 1, nranks = 1 + random_below(r, 6);
    memcpy(len[0], t->shape, sizeof t->shape);
    for (int64_t tries = random_below(r, 16); tries > 0 && nboxes < MAX && t->ndim > 0; tries--) {
        int64_t i = random_below(r, nboxes), d = random_below(r, t->ndim);
        int64_t cut = random_below(r, len[i][d] + 1);
        memcpy(lo[nboxes], lo[i], sizeof lo[i]);
        memcpy(len[nboxes], len[i], sizeof len[i]);
        lo[nboxes][d] += cut;
        len[nboxes][d] -= cut;
        len[i][d] = cut;
        nboxes++;
    }
    int64_t owner[MAX], copy[MAX];
    for (int64_t i = 0; i < nboxes; i++) {
        owner[i] = random_below(r, nranks);
        copy[i] = random_below(r, 3) ? -1 : random_below(r, nranks);
    }
    put(w, "{");
    for (int64_t rank = 0; rank < nranks; rank++) {
        bool any = false;
        put(w, "%s", rank ? " |" : "");
        for (int64_t i = 0; i < nboxes; i++)
            for (int times = (owner[i] == rank) + (copy[i] == rank); times > 0; times--) {
                put(w, "%s", any ? "; " : " ");
                any = true;
                if (t->ndim == 0)
                    put(w, ":");
                for (int32_t d = 0; d < t->ndim; d++) { /* a copy may hold more than its box */
                    int64_t more = copy[i] == rank ? random_below(r, 2) : 0, from = lo[i][d];
                    from -= from > 0 ? more : 0;
                    put(w, "%s%lld:%lld", d ? "," : "", (long long)from,
                        (long long)(lo[i][d] + len[i][d]));
                }
            }
    }
    put(w, " }");
}

void random_side(struct random *r, const struct random_tensor *tensor, const char *partial,
                 char *text, size_t capacity)
{
    struct writer w = {text, 0, capacity};
    text[0] = '\0';
    if (!partial && random_below(r, 3) == 0)
        put_explicit_side(r, tensor, &w);
    else
        put_mesh_side(r, tensor, partial, &w);
}

struct random_tensor known_tensor(const rsd_tensor_info *tensor)
{
    struct random_tensor about = {.ndim = tensor->ndim};
    size_t at =
        (size_t)snprintf(about.text, sizeof about.text, "%s[", rsd_dtype_name(tensor->dtype));
    for (int32_t d = 0; d < tensor->ndim; d++) {
        about.shape[d] = tensor->shape[d];
        at += (size_t)snprintf(about.text + at, sizeof about.text - at, "%s%lld", d ? "," : "",
                               (long long)tensor->shape[d]);
    }
    snprintf(about.text + at, sizeof about.text - at, "]");
    return about;
}

rsd_status random_choice(void *random, const rsd_tensor_info *tensor, rsd_tensor_target *choice)
{
    struct random_tensor about = known_tensor(tensor);
    char side[4096], text[4400];
    for (;;) {
        rsd_coverage check = {.struct_nbytes = sizeof check};
        random_side(random, &about, NULL, side, sizeof side);
        snprintf(text, sizeof text, "%s @ %s", about.text, side);
        if (rsd_layout_parse(text, &choice->layout))
            return RSD_EINVAL;
        if (rsd_layout_coverage(choice->layout, &check) == RSD_OK &&
            check.kind <= RSD_COVERS_EVENLY)
            return RSD_OK;
        rsd_layout_free(choice->layout);
        choice->layout = NULL;
    }
}
