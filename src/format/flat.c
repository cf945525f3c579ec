/* flat.c - flat vectors: which runs of which files hold a tensor. */
#include "flat.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

enum { SORT_STEPS = 32 }; /* to sort one run among many */

rsd_status flat_set_find_state(struct flat_set *set, struct slice key, uint32_t *state)
{
    enum { MAX_STATES = 256 };
    size_t known = set->keys.n;
    if (!string_map_find(&set->states, key, &known)) {
        if (known >= MAX_STATES)
            return fail(RSD_ELIMIT, "optimizer has more than %d kinds of state", (int)MAX_STATES);
        TRY(name_list_add(&set->keys, key));
        TRY(string_map_add(&set->states, set->keys.list[known], known));
    }
    *state = (uint32_t)known;
    return RSD_OK;
}

/* ---- adding ---- */

static bool is_dense_view(const struct torch_view *view)
{
    int64_t stride = 1;
    if (box_is_empty(view->ndim, view->shape))
        return true;
    for (int32_t d = view->ndim - 1; d >= 0; d--) {
        if (view->shape[d] > 1 && view->strides[d] != stride)
            return false;
        stride *= view->shape[d];
    }
    return true;
}

rsd_status flat_set_add_run(struct flat_set *set, uint32_t state, uint32_t group, uint32_t rank,
                            struct torch_file *file, pickle_node tensor)
{
    struct torch_view view;
    struct stored_array array;
    TRY(torch_file_find_tensor(file, tensor, &view, &array));
    if (!is_dense_view(&view))
        return fail(RSD_EUNSUPPORTED, "elements of a flat tensor are not in row-major order");
    struct catalog *catalog = set->catalog;
    if (!budget_take_memory(sizeof array + sizeof *set->runs))
        return budget_fail();
    TRY(GROW(catalog->arrays, catalog->arrays_capacity, catalog->narrays + 1));
    TRY(GROW(set->runs, set->runs_capacity, set->nruns + 1));
    set->runs[set->nruns++] = (struct flat_run){.state = state,
                                                .group = group,
                                                .rank = rank,
                                                .file = file->index,
                                                .dtype = view.dtype,
                                                .array = (uint32_t)catalog->narrays,
                                                .count = box_volume(view.ndim, view.shape)};
    catalog->arrays[catalog->narrays++] = array;
    return RSD_OK;
}

/* Returns false for a dtype whose value is not a number here. */
static bool add_scalar_text(rsd_dtype dtype, const unsigned char *bytes, struct text *text)
{
    double number;
    float single;
    int64_t integer;
    int32_t narrow;
    uint16_t half;
    switch (dtype) {
    case RSD_F64:
        memcpy(&number, bytes, sizeof number);
        break;
    case RSD_F32:
        memcpy(&single, bytes, sizeof single);
        number = (double)single;
        break;
    case RSD_BF16:
    case RSD_F16:
        memcpy(&half, bytes, sizeof half);
        number = (double)(dtype == RSD_BF16 ? f32_from_bf16(half) : f32_from_f16(half));
        break;
    case RSD_I64:
        memcpy(&integer, bytes, sizeof integer);
        text_add(text, "%" PRId64, integer);
        return true;
    case RSD_I32:
        memcpy(&narrow, bytes, sizeof narrow);
        text_add(text, "%" PRId32, narrow);
        return true;
    default:
        return false;
    }
    bool whole = fabs(number) < 1e15 && number == (double)(int64_t)number;
    text_add(text, whole ? "%.1f" : "%.17g", number);
    return isfinite(number) != 0;
}

static void reverse_bytes(unsigned char *bytes, size_t n)
{
    for (size_t i = 0; i < n / 2; i++) {
        unsigned char one = bytes[i];
        bytes[i] = bytes[n - 1 - i];
        bytes[n - 1 - i] = one;
    }
}

rsd_status flat_read_scalar(struct torch_file *file, pickle_node tensor, char **json)
{
    struct torch_view view;
    struct stored_array array;
    unsigned char bytes[16] = {0};
    struct text text = {0};
    *json = NULL;
    TRY(torch_file_find_tensor(file, tensor, &view, &array));
    size_t n = rsd_dtype_nbytes(view.dtype);
    TRY(store_read(file->store, file->index, array.offset + (uint64_t)array.base, bytes, n));
    if (array.big_endian)
        reverse_bytes(bytes, n);
    if (add_scalar_text(view.dtype, bytes, &text))
        return text_take(&text, json);
    text_drop(&text);
    return RSD_OK;
}

/* Adds a scalar of an optimizer's state, and takes its JSON over, also on failure. */
static rsd_status add_flat_scalar(struct flat_set *set, uint32_t state, uint32_t group, char *json)
{
    rsd_status status = budget_take_memory(sizeof *set->scalars) ? RSD_OK : budget_fail();
    if (!status)
        status = GROW(set->scalars, set->scalars_capacity, set->nscalars + 1);
    if (status) {
        rsd_free(json);
        return status;
    }
    set->scalars[set->nscalars++] = (struct flat_scalar){state, group, json};
    return RSD_OK;
}

/* Finds a scalar of rank 0. Ranks have them in one order, so the search begins behind the last one that was found. */
static const struct flat_scalar *find_flat_scalar(struct flat_set *set, uint32_t state,
                                                  uint32_t group)
{
    for (size_t i = 0; i < set->nscalars && budget_take(1); i++) {
        size_t at = (set->next_scalar + i) % set->nscalars;
        if (set->scalars[at].state == state && set->scalars[at].group == group) {
            set->next_scalar = at + 1;
            return &set->scalars[at];
        }
    }
    return NULL;
}

/* Compares the step of a rank with that of rank 0: a file of another step has other parameters. Takes json over. */
static rsd_status compare_step(struct flat_set *set, uint32_t state, uint32_t group, char *json)
{
    const struct flat_scalar *first = find_flat_scalar(set, state, group);
    rsd_status status = RSD_OK;
    if (first && strcmp(first->json, json) != 0)
        status =
            fail(RSD_EMISMATCH,
                 "number is %.100s, and %.100s on rank 0: the files are of different steps; set "
                 "take_rank_0 (--take-rank-0) to read both",
                 json, first->json);
    rsd_free(json);
    return status;
}

rsd_status flat_set_add_state(struct flat_set *set, struct slice key, uint32_t group, uint32_t rank,
                              struct torch_file *file, pickle_node value)
{
    struct torch_view view;
    uint32_t state;
    char *json;
    bool tensor = torch_view_is_tensor(&file->tree, value);
    TRY(flat_set_find_state(set, key, &state));
    if (tensor) {
        TRY(torch_view_read(&file->tree, value, &view));
        if (view.ndim > 0)
            return flat_set_add_run(set, state, group, rank, file, value);
    }
    if (rank > 0 && (set->take_rank_0 || !slice_is(key, "step")))
        return RSD_OK;
    TRY(tensor ? flat_read_scalar(file, value, &json) : pickle_to_json(&file->tree, value, &json));
    if (!json)
        return RSD_OK;
    return rank > 0 ? compare_step(set, state, group, json)
                    : add_flat_scalar(set, state, group, json);
}

/* ---- finding ---- */

static int compare_u32(uint32_t a, uint32_t b)
{
    return (a > b) - (a < b);
}

static int compare_runs(const void *a, const void *b)
{
    const struct flat_run *x = a, *y = b;
    int order = compare_u32(x->state, y->state);
    if (!order)
        order = compare_u32(x->group, y->group);
    return order ? order : compare_u32(x->rank, y->rank);
}

rsd_status flat_set_finish(struct flat_set *set)
{
    if (!budget_take(set->nruns * SORT_STEPS))
        return budget_fail();
    if (set->nruns > 1)
        qsort(set->runs, set->nruns, sizeof *set->runs, compare_runs);
    for (size_t i = 1; i < set->nruns; i++)
        if (compare_runs(&set->runs[i - 1], &set->runs[i]) == 0)
            return fail(RSD_EFORMAT, "rank %u has '%.100s' of group %u twice", set->runs[i].rank,
                        set->keys.list[set->runs[i].state].bytes, set->runs[i].group);
    return RSD_OK;
}

const struct flat_run *flat_set_find_runs(const struct flat_set *set, uint32_t state,
                                          uint32_t group, size_t *n)
{
    const struct flat_run key = {.state = state, .group = group};
    size_t lo = 0, hi = set->nruns;
    while (lo < hi) {
        size_t middle = lo + (hi - lo) / 2;
        if (compare_runs(&set->runs[middle], &key) < 0)
            lo = middle + 1;
        else
            hi = middle;
    }
    *n = 0;
    while (lo + *n < set->nruns && set->runs[lo + *n].state == state &&
           set->runs[lo + *n].group == group)
        ++*n;
    return *n ? set->runs + lo : NULL;
}

rsd_status flat_set_add_ranges(const struct flat_set *set, const struct flat_run *runs, int64_t at,
                               int64_t numel)
{
    int64_t each = ceil_div(numel, set->nranks), begin = 0, before = 0;
    for (uint32_t r = 0; r < set->nranks && begin < numel; r++) {
        const struct flat_run *run = &runs[r];
        int64_t in_run = set->each_cut ? at : at + begin - before;
        int64_t count = min_i64(numel - begin, set->each_cut ? each : run->count - in_run);
        before += run->count;
        if (count <= 0)
            continue;
        TRY(catalog_add_range(set->catalog, begin, count, run->file, run->array, in_run));
        begin += count;
    }
    return RSD_OK;
}

void flat_set_drop(struct flat_set *set)
{
    for (size_t i = 0; i < set->nscalars; i++)
        rsd_free(set->scalars[i].json);
    string_map_drop(&set->states);
    name_list_drop(&set->keys);
    mem_free(set->scalars);
    mem_free(set->runs);
    *set = (struct flat_set){0};
}
