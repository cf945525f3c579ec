/* names_apply.c - derives the tensors of a checkpoint under other names.
 *
 * The names decide the direction: those of the left column become those of the right one, or the reverse. A tensor
 * that consists of several is split into runs of rows, or put together from them. Optimizer state is treated as
 * its parameter: optimizer.state.NAME.KEY.
 */
#include "names.h"
#include "rules.h"

#include <stdlib.h>

struct name_change {
    rsd_checkpoint *checkpoint;
    const struct catalog *stored;
    struct name_map map;
    bool split; /* from the left column to the right one */
    struct head_counts heads;
    int64_t vocab_size;
};

/* A tensor, and the line that has its name. */
struct named_line {
    size_t tensor;
    const char *name;   /* of the tensor, or of a value */
    int nprefix;        /* bytes of the name before that of the parameter: of optimizer.state. */
    const char *suffix; /* behind it: .exp_avg */
    struct name_match match;
    char *parameter; /* its name, of which captures are parts; NULL: the whole name */
};

/* ---- lines of tensors ---- */

static void drop_named(struct named_line *named)
{
    mem_free(named->parameter);
    named->parameter = NULL;
}

/* Returns whether a line changes neither the name nor the tensor. */
static bool keeps_name(const struct name_line *line)
{
    return line->whole && line->nparts == 1 && strcmp(line->whole, line->parts[0]) == 0;
}

/* Finds the line of a name in one column: of the name itself, else of the parameter of which it is state. *found is
 * false if there is none. */
static rsd_status find_named_line(const struct name_change *change, bool left, const char *name,
                                  struct named_line *named, bool *found)
{
    *named = (struct named_line){.name = name, .suffix = name + strlen(name)};
    *found = name_map_find(&change->map, left, name, &named->match);
    struct slice parameter;
    if ((*found && !keeps_name(named->match.line)) || !state_name_split(name, &parameter))
        return RSD_OK;
    struct named_line state = {.name = name,
                               .nprefix = (int)(parameter.bytes - name),
                               .suffix = parameter.bytes + parameter.nbytes,
                               .parameter = slice_copy(parameter)};
    if (!state.parameter)
        return RSD_ENOMEM;
    if (name_map_find(&change->map, left, state.parameter, &state.match)) {
        *named = state;
        *found = true;
    } else {
        mem_free(state.parameter);
    }
    return RSD_OK;
}

/* Makes another name out of a pattern. The caller frees it. */
static rsd_status make_other_name(const struct named_line *named, const char *pattern, char **out)
{
    struct text text = {0};
    text_add(&text, "%.*s", named->nprefix, named->name);
    name_match_expand(&named->match, pattern, &text);
    text_add(&text, "%s", named->suffix);
    return text_take(&text, out);
}

/* ---- rows ---- */

/* The rows of a part: n runs of `length` rows in the whole. In the part they follow each other. */
struct row_runs {
    int64_t n, first, stride, length;
};

/* Finds the rows of a fused QKV tensor that are queries (part 0), keys (1) or values (2). */
static rsd_status find_qkv_runs(const struct name_change *change, enum name_kind kind, size_t part,
                                int64_t rows, struct row_runs *runs)
{
    int64_t heads = change->heads.all, keys = change->heads.keys;
    if (heads == 0)
        return fail(RSD_EINVAL, "neither the checkpoint nor a config.json says how many attention "
                                "heads there are; pass nheads and nkv_heads (--heads N,K)");
    if (heads % keys != 0 || rows % (heads + 2 * keys) != 0)
        return fail(RSD_EINVAL,
                    "%lld rows cannot be those of %lld heads and of %lld heads for keys and values",
                    (long long)rows, (long long)heads, (long long)keys);
    int64_t head = rows / (heads + 2 * keys), ngroups = kind == NAME_QKV ? keys : 1;
    int64_t queries = heads / ngroups * head, one = keys / ngroups * head;
    runs->n = ngroups;
    runs->stride = queries + 2 * one;
    runs->length = part == 0 ? queries : one;
    runs->first = part == 0 ? 0 : queries + ((int64_t)part - 1) * one;
    return RSD_OK;
}

/* Finds the rows of a part in a whole of so many rows. */
static rsd_status find_runs(const struct name_change *change, const struct name_line *line,
                            size_t part, int64_t rows, struct row_runs *runs)
{
    int64_t n = (int64_t)line->nparts;
    if (line->kind == NAME_QKV || line->kind == NAME_QKV_ROWS)
        return find_qkv_runs(change, line->kind, part, rows, runs);
    if (rows % n != 0)
        return fail(RSD_EINVAL, "%lld rows cannot be %lld equal parts", (long long)rows,
                    (long long)n);
    *runs = (struct row_runs){.n = 1, .length = rows / n, .first = (int64_t)part * (rows / n)};
    return RSD_OK;
}

/* Adds the runs of a part to the last tensor: from the whole, or to the whole. */
static rsd_status add_runs(const struct name_change *change, size_t tensor,
                           const struct row_runs *runs)
{
    const struct stored_tensor *stored = &change->stored->tensors[tensor];
    struct derived_region region = {.tensor = tensor};
    copy_i64s(region.len, tensor_shape(change->stored, stored), stored->ndim);
    region.len[0] = runs->length;
    for (int64_t i = 0; i < runs->n && runs->length > 0; i++) {
        int64_t whole = runs->first + i * runs->stride, part = i * runs->length;
        region.lo[0] = change->split ? whole : part;
        region.to[0] = change->split ? part : whole;
        TRY(derive_add_region(change->checkpoint, &region));
    }
    return RSD_OK;
}

/* ---- tensors ---- */

/* Starts a tensor with the dtype and dims of a stored one; rows -1: with its rows too. */
static rsd_status start_tensor(const struct name_change *change, const struct named_line *named,
                               const char *pattern, int64_t rows)
{
    const struct stored_tensor *stored = &change->stored->tensors[named->tensor];
    int64_t shape[RSD_MAX_DIMS] = {0};
    char *name;
    copy_i64s(shape, tensor_shape(change->stored, stored), stored->ndim);
    if (rows >= 0)
        shape[0] = rows;
    TRY(make_other_name(named, pattern, &name));
    rsd_status status =
        catalog_add_tensor(&change->checkpoint->catalog, (struct slice){name, strlen(name)},
                           stored->dtype, stored->ndim, shape);
    rsd_free(name);
    return status;
}

/* Derives a tensor from one whole stored tensor. */
static rsd_status derive_renamed(const struct name_change *change, const struct named_line *named,
                                 const char *pattern)
{
    const struct stored_tensor *stored = &change->stored->tensors[named->tensor];
    const int64_t *shape = tensor_shape(change->stored, stored);
    struct derived_region region = {.tensor = named->tensor};
    int64_t lo[RSD_MAX_DIMS] = {0}, len[RSD_MAX_DIMS], rows = stored->ndim > 0 ? shape[0] : -1;
    bool vocab = named->match.line->kind == NAME_VOCAB && change->vocab_size && stored->ndim > 0;
    copy_i64s(region.len, shape, stored->ndim);
    copy_i64s(len, shape, stored->ndim);
    if (vocab && (change->split ? rows < change->vocab_size : rows > change->vocab_size))
        return fail(RSD_EINVAL, "vocab_size is %lld; the tensor has %lld rows",
                    (long long)change->vocab_size, (long long)rows);
    if (vocab) {
        region.len[0] = min_i64(rows, change->vocab_size);
        lo[0] = region.len[0];
        len[0] = change->vocab_size - region.len[0];
        rows = change->vocab_size;
    }
    TRY(start_tensor(change, named, pattern, rows));
    TRY(derive_add_region(change->checkpoint, &region));
    return vocab && !box_is_empty(stored->ndim, len) ? derive_add_zeros(change->checkpoint, lo, len)
                                                     : RSD_OK;
}

/* Derives the parts of a stored tensor. */
static rsd_status split_tensor(const struct name_change *change, const struct named_line *named)
{
    const struct name_line *line = named->match.line;
    const struct stored_tensor *stored = &change->stored->tensors[named->tensor];
    for (size_t part = 0; part < line->nparts; part++) {
        struct row_runs runs = {0};
        if (stored->ndim == 0 || line->nparts == 1) {
            TRY(derive_renamed(change, named, line->parts[part]));
            continue;
        }
        TRY(find_runs(change, line, part, tensor_shape(change->stored, stored)[0], &runs));
        TRY(start_tensor(change, named, line->parts[part], runs.n * runs.length));
        TRY(add_runs(change, named->tensor, &runs));
    }
    return RSD_OK;
}

/* Finds the stored tensors that are the parts of one. */
static rsd_status find_named_parts(const struct name_change *change, const struct named_line *named,
                                   size_t tensors[NAME_MAX_PARTS], int64_t *rows)
{
    const struct catalog *stored = change->stored;
    const struct stored_tensor *first = &stored->tensors[named->tensor];
    *rows = 0;
    for (size_t part = 0; part < named->match.line->nparts; part++) {
        char *name;
        TRY(make_other_name(named, named->match.line->parts[part], &name));
        tensors[part] = catalog_find_tensor(stored, name);
        rsd_status status = RSD_OK;
        if (tensors[part] == SIZE_MAX)
            status = fail(RSD_EMISMATCH, "the checkpoint has no %.300s, which belongs to it", name);
        rsd_free(name);
        TRY(status);
        const struct stored_tensor *tensor = &stored->tensors[tensors[part]];
        const int64_t *one = tensor_shape(stored, tensor), *other = tensor_shape(stored, first);
        bool same = tensor->dtype == first->dtype && tensor->ndim == first->ndim;
        for (int32_t d = 1; d < tensor->ndim && same; d++)
            same = one[d] == other[d];
        if (!same)
            return fail(RSD_EMISMATCH, "%.300s has another dtype, or other rows", tensor->name);
        if (tensor->ndim > 0 && !add_i64(*rows, one[0], rows))
            return fail(RSD_ELIMIT, "parts have 2^63 rows or more");
    }
    return RSD_OK;
}

/* Derives the tensor of which a stored one is a part. The first part does it; the others are checked. */
static rsd_status join_tensors(const struct name_change *change, const struct named_line *named)
{
    const struct name_line *line = named->match.line;
    size_t tensors[NAME_MAX_PARTS];
    int64_t rows;
    if (line->nparts == 1)
        return derive_renamed(change, named, line->whole);
    TRY(find_named_parts(change, named, tensors, &rows));
    if (named->match.part > 0)
        return RSD_OK;
    if (change->stored->tensors[named->tensor].ndim == 0)
        return derive_renamed(change, named, line->whole);
    TRY(start_tensor(change, named, line->whole, rows));
    for (size_t part = 0; part < line->nparts; part++) {
        struct row_runs runs = {0};
        const struct stored_tensor *tensor = &change->stored->tensors[tensors[part]];
        TRY(find_runs(change, line, part, rows, &runs));
        if (tensor_shape(change->stored, tensor)[0] != runs.n * runs.length)
            return fail(RSD_EMISMATCH,
                        "%.300s has %lld rows; %lld are expected of %lld heads and "
                        "of %lld for keys and values",
                        tensor->name, (long long)tensor_shape(change->stored, tensor)[0],
                        (long long)(runs.n * runs.length), (long long)change->heads.all,
                        (long long)change->heads.keys);
        TRY(add_runs(change, tensors[part], &runs));
    }
    return RSD_OK;
}

/* Derives the tensors that the line of a stored tensor makes of it. EINVAL: no line has its name. */
static rsd_status derive_named(const struct name_change *change, size_t tensor)
{
    struct named_line named;
    bool found;
    TRY(find_named_line(change, change->split, change->stored->tensors[tensor].name, &named,
                        &found));
    named.tensor = tensor;
    if (!found)
        return fail(RSD_EINVAL,
                    "no line of %s has this name; add one to a copy of the map, with - on the "
                    "other side to leave the tensor out",
                    change->map.title);
    const struct name_line *line = named.match.line;
    rsd_status status = RSD_OK;
    if (line->whole && line->nparts > 0)
        status = change->split ? split_tensor(change, &named) : join_tensors(change, &named);
    drop_named(&named);
    return status;
}

/* ---- values: optimizer state that is not a tensor ---- */

static rsd_status rename_value(struct name_change *change, size_t index,
                               const struct named_line *named, const char *pattern)
{
    struct catalog *catalog = &change->checkpoint->catalog;
    char *name;
    TRY(make_other_name(named, pattern, &name));
    rsd_status status = catalog_copy_text(catalog, name, &catalog->values[index].name);
    catalog->values[index].path = NULL;
    rsd_free(name);
    return status;
}

/* Adds a value that is equal to another one. */
static rsd_status add_equal_value(struct catalog *catalog, size_t index)
{
    TRY(GROW(catalog->values, catalog->values_capacity, catalog->nvalues + 1));
    struct stored_value copy = catalog->values[index];
    copy.pickle = (struct bytes){0};
    bytes_put(&copy.pickle, catalog->values[index].pickle.data, catalog->values[index].pickle.n);
    copy.json = copy.json ? text_copy(copy.json) : NULL;
    if (copy.pickle.failed || (catalog->values[index].json && !copy.json)) {
        bytes_drop(&copy.pickle);
        mem_free(copy.json);
        return RSD_ENOMEM;
    }
    catalog->values[catalog->nvalues++] = copy;
    return RSD_OK;
}

/* Renames a value as its parameter. */
static rsd_status derive_value(struct name_change *change, size_t index)
{
    struct catalog *catalog = &change->checkpoint->catalog;
    struct named_line named;
    bool found;
    TRY(find_named_line(change, change->split, catalog->values[index].name, &named, &found));
    if (!found)
        return RSD_OK;
    const struct name_line *line = named.match.line;
    rsd_status status = RSD_OK;
    if (named.nprefix > 0 && !change->split && line->whole)
        status = rename_value(change, index, &named, line->whole);
    for (size_t part = 0; named.nprefix > 0 && change->split && part < line->nparts && !status;
         part++) {
        if (part > 0)
            status = add_equal_value(catalog, index);
        if (!status)
            status = rename_value(change, part > 0 ? catalog->nvalues - 1 : index, &named,
                                  line->parts[part]);
    }
    drop_named(&named);
    return status;
}

static int by_value_name(const void *a, const void *b)
{
    return strcmp(((const struct stored_value *)a)->name, ((const struct stored_value *)b)->name);
}

/* Parts have a value each, of which the tensor that they make up has one. */
static void drop_equal_values(struct catalog *catalog)
{
    size_t n = 0;
    if (catalog->nvalues > 1)
        qsort(catalog->values, catalog->nvalues, sizeof *catalog->values, by_value_name);
    for (size_t i = 0; i < catalog->nvalues; i++) {
        struct stored_value *value = &catalog->values[i];
        if (n > 0 && by_value_name(&catalog->values[n - 1], value) == 0) {
            mem_free(value->json);
            bytes_drop(&value->pickle);
        } else {
            catalog->values[n++] = *value;
        }
    }
    catalog->nvalues = n;
}

static rsd_status derive_values(struct name_change *change)
{
    struct catalog *catalog = &change->checkpoint->catalog;
    for (size_t i = 0, n = catalog->nvalues; i < n; i++)
        TRY(derive_value(change, i));
    if (!change->split)
        drop_equal_values(catalog);
    return RSD_OK;
}

/* ---- the direction ---- */

/* Says whether a tensor has a name of one column, under a line that changes it. */
static rsd_status has_column(const struct name_change *change, bool left, const char *name,
                             bool *has)
{
    struct named_line named;
    bool found;
    TRY(find_named_line(change, left, name, &named, &found));
    *has = found && !keeps_name(named.match.line);
    if (found)
        drop_named(&named);
    return RSD_OK;
}

/* Finds which column of the map has the names of the checkpoint. EINVAL: neither has, or both have. */
static rsd_status choose_direction(struct name_change *change)
{
    const char *names[2] = {NULL, NULL};
    for (size_t i = 0; i < change->stored->ntensors; i++)
        for (int left = 0; left < 2; left++) {
            bool has;
            TRY(has_column(change, left == 1, change->stored->tensors[i].name, &has));
            if (has && !names[left])
                names[left] = change->stored->tensors[i].name;
        }
    if (names[0] && names[1])
        return fail(RSD_EINVAL, "names of both columns of %s are there: %.300s and %.300s",
                    change->map.title, names[1], names[0]);
    if (!names[0] && !names[1])
        return fail(RSD_EINVAL, "no tensor has a name of %s, such as %s", change->map.title,
                    change->map.n && change->map.lines[0].whole ? change->map.lines[0].whole : "");
    change->split = names[1] != NULL;
    return RSD_OK;
}

rsd_status names_apply(rsd_checkpoint *checkpoint, const rsd_open_options *options)
{
    struct name_change change = {.checkpoint = checkpoint, .vocab_size = options->vocab_size};
    TRY(name_map_open(&change.map, options->names));
    rsd_status status = head_counts_find(&change.heads, checkpoint, options);
    if (!status)
        status = derive_start(checkpoint);
    if (!status) {
        change.stored = derive_stored(checkpoint);
        status = choose_direction(&change);
    }
    for (size_t i = 0; !status && i < change.stored->ntensors; i++) {
        status = derive_named(&change, i);
        if (status)
            status = fail_in(status, "%.300s: ", change.stored->tensors[i].name);
    }
    if (!status)
        status = derive_values(&change);
    name_map_close(&change.map);
    return status ? status : catalog_finish(&checkpoint->catalog);
}
