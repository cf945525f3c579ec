/* zero_vectors.c - places DeepSpeed's parameters in flat vectors, and checks these.
 *
 * A vector is checked before a tensor is made of it: its ranks, its dtype, its length and its padding. So each
 * element of a parameter is in one place, and no element of a vector is left over but for padding.
 */
#include "zero.h"

#include <stdio.h>

/* ---- placing ---- */

/* Places the parameters of stages 1 and 2: those of a group one after the other. */
static rsd_status place_whole_params(struct zero_list *list)
{
    int64_t at = 0, most = 0;
    for (size_t i = 0; i < list->n; i++) {
        struct zero_param *param = &list->params[i];
        if (i == 0 || param->group != param[-1].group)
            at = 0;
        param->vector = param->group;
        param->at = at;
        if (!add_i64(at, param->numel, &at) || !add_i64(at, param->padding, &at) || at > MAX_EXTENT)
            return fail(RSD_ELIMIT, "group %u has more than 2^62 elements", param->group);
        most = max_i64(most, param->padding);
    }
    list->max_padding = 2 * (int64_t)list->set.nranks + most; /* of 2 elements per rank */
    return RSD_OK;
}

static int64_t vector_length(const struct zero_list *list, uint32_t vector)
{
    size_t n;
    const struct flat_run *runs = flat_set_find_runs(&list->set, 0, vector, &n);
    return n > 0 ? runs->count : 0;
}

/* Places the parameters of stage 3. A sub-group begins where the one before it is used up. */
static rsd_status place_cut_params(struct zero_list *list, uint32_t nvectors)
{
    uint32_t vector = 0;
    int64_t at = 0, length = nvectors > 0 ? vector_length(list, 0) : 0;
    for (size_t i = 0; i < list->n; i++) {
        struct zero_param *param = &list->params[i];
        int64_t each = ceil_div(param->numel, list->set.nranks);
        for (; at == length && each > 0 && vector + 1 < nvectors; at = 0)
            length = vector_length(list, ++vector);
        if (each > length - at)
            return fail(RSD_EFORMAT,
                        "%.*s has %lld elements per rank; sub-group %u of the optimizer files has "
                        "%lld left",
                        slice_width(param->name, 300), param->name.bytes, (long long)each, vector,
                        (long long)(length - at));
        param->vector = vector;
        param->at = at;
        at += each;
    }
    while (at == length && vector + 1 < nvectors)
        length += vector_length(list, ++vector);
    if (at != length)
        return fail(RSD_EFORMAT,
                    "param_shapes has no parameter for %lld elements per rank of sub-group %u",
                    (long long)(length - at), vector);
    return RSD_OK;
}

/* ---- checking ---- */

enum { VECTOR_TEXT_NCHARS = 400, FIND_STEPS = 4 };

/* Writes "exp_avg of group 0", or the name of a parameter that has a vector of its own. Returns text. */
static const char *vector_text(const struct zero_list *list, const struct flat_run *run,
                               char text[VECTOR_TEXT_NCHARS])
{
    const char *key = list->set.keys.list[run->state].bytes;
    if (list->by_param)
        snprintf(text, VECTOR_TEXT_NCHARS, "fragment of %.*s",
                 slice_width(list->params[run->group].name, 300),
                 list->params[run->group].name.bytes);
    else
        snprintf(text, VECTOR_TEXT_NCHARS, "%.100s of group %u", *key ? key : "fp32 vector",
                 run->group);
    return text;
}

static rsd_status fail_length(const struct zero_reader *reader, const struct zero_list *list,
                              const struct flat_run *run, const char *what, int64_t expected)
{
    char text[VECTOR_TEXT_NCHARS];
    return store_fail_in(reader->store, run->file,
                         fail(RSD_EFORMAT, "%s has %lld elements; %s %lld",
                              vector_text(list, run, text), (long long)run->count, what,
                              (long long)expected));
}

/* Checks that all ranks have the vector, and have it in one dtype. files: of the ranks. */
static rsd_status check_ranks(const struct zero_reader *reader, const struct zero_list *list,
                              const struct flat_run *runs, size_t n, const uint32_t *files)
{
    char text[VECTOR_TEXT_NCHARS];
    for (uint32_t r = 0; r < list->set.nranks; r++) {
        if (r >= n || runs[r].rank != r)
            return store_fail_in(reader->store, files[r],
                                 fail(RSD_EFORMAT, "%s is missing", vector_text(list, runs, text)));
        if (runs[r].dtype != runs->dtype)
            return store_fail_in(reader->store, files[r],
                                 fail(RSD_EFORMAT, "%s has another dtype than that of rank 0",
                                      vector_text(list, runs, text)));
    }
    return RSD_OK;
}

/* Checks the lengths of stages 1 and 2. All ranks have as many elements, but for padding at the end. */
static rsd_status check_lengths(const struct zero_reader *reader, const struct zero_list *list,
                                const struct flat_run *runs, int64_t needed)
{
    int64_t each = runs->count, total = 0;
    char text[VECTOR_TEXT_NCHARS];
    for (uint32_t r = 0; r < list->set.nranks; r++) {
        total += runs[r].count;
        if (runs[r].count > each || (runs[r].count < each && total < needed))
            return fail_length(reader, list, &runs[r], "that of rank 0 has", each);
    }
    if (total < needed || total - needed >= list->max_padding)
        return store_fail_in(
            reader->store, runs->file,
            fail(RSD_EFORMAT, "%s has %lld elements on all ranks; its parameters have %lld",
                 vector_text(list, runs, text), (long long)total, (long long)needed));
    return RSD_OK;
}

static rsd_status check_equal_lengths(const struct zero_reader *reader,
                                      const struct zero_list *list, const struct flat_run *runs)
{
    for (uint32_t r = 1; r < list->set.nranks; r++)
        if (runs[r].count != runs->count)
            return fail_length(reader, list, &runs[r], "that of rank 0 has", runs->count);
    return RSD_OK;
}

bool zero_is_param_state(const struct zero_list *list, const struct flat_run *runs)
{
    size_t n;
    const struct flat_run *master = flat_set_find_runs(&list->set, 0, runs->group, &n);
    if (n == 0 || list->set.each_cut)
        return n > 0 && runs->count == master->count;
    int64_t more = runs->count - master->count; /* one of them may have no padding */
    return more < list->max_padding && -more < list->max_padding;
}

const struct flat_run *zero_find_runs(const struct zero_list *list, const struct zero_param *param,
                                      uint32_t state)
{
    size_t n;
    const struct flat_run *runs = flat_set_find_runs(&list->set, state, param->vector, &n);
    return n > 0 && zero_is_param_state(list, runs) ? runs : NULL;
}

/* Checks all vectors of a group, whose parameters need so many elements. */
static rsd_status check_group(const struct zero_reader *reader, uint32_t group, int64_t needed)
{
    const struct zero_list *list = &reader->trained;
    for (uint32_t state = 0; state < list->set.keys.n; state++) {
        size_t n;
        TRY(zero_fail_in(reader, budget_use(FIND_STEPS)));
        const struct flat_run *runs = flat_set_find_runs(&list->set, state, group, &n);
        if (n == 0)
            continue;
        TRY(check_ranks(reader, list, runs, n, reader->files.optim));
        if (!zero_is_param_state(list, runs))
            continue;
        TRY(list->set.each_cut ? check_equal_lengths(reader, list, runs)
                               : check_lengths(reader, list, runs, needed));
    }
    return RSD_OK;
}

rsd_status zero_place_params(struct zero_reader *reader, uint32_t nvectors)
{
    struct zero_list *list = &reader->trained;
    rsd_status status =
        list->set.each_cut ? place_cut_params(list, nvectors) : place_whole_params(list);
    if (status)
        return store_fail_in(reader->store, reader->files.model[0], status);
    size_t i = 0;
    for (uint32_t group = 0; group < nvectors; group++) {
        int64_t needed = 0;
        for (; i < list->n && list->params[i].vector == group; i++)
            needed = list->params[i].at + list->params[i].numel;
        TRY(check_group(reader, group, needed));
    }
    return RSD_OK;
}

rsd_status zero_check_fragments(const struct zero_reader *reader)
{
    const struct zero_list *list = &reader->frozen;
    for (size_t i = 0; i < list->n; i++) {
        const struct zero_param *param = &list->params[i];
        int64_t each = ceil_div(param->numel, list->set.nranks);
        size_t n;
        const struct flat_run *runs = flat_set_find_runs(&list->set, 0, param->vector, &n);
        if (n == 0)
            return store_fail_in(reader->store, reader->files.model[0],
                                 fail(RSD_EFORMAT, "frozen_param_fragments lacks %.*s",
                                      slice_width(param->name, 300), param->name.bytes));
        TRY(check_ranks(reader, list, runs, n, reader->files.model));
        TRY(check_equal_lengths(reader, list, runs));
        if (runs->count != each)
            return fail_length(reader, list, runs, "its shape needs, on each rank,", each);
    }
    return RSD_OK;
}
