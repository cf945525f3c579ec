/* zero_read.c - reads checkpoints of DeepSpeed: stages 0 to 3 of ZeRO, and universal ones.
 *
 *     trainable parameters   fp32, out of flat vectors, under their names
 *     frozen parameters      as they are stored: in the state dict, or in parts of each rank (stage 3)
 *     buffers                as the state dict has them
 *     other names            of shared parameters: the same elements again
 *     optimizer states       optimizer.state.NAME.KEY; numbers such as `step` are values
 *     values                 optimizer.param_groups.I.KEY, and what else is in the model file
 */
#include "zero.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

rsd_status zero_fail_in(const struct zero_reader *reader, rsd_status status)
{
    const char *directory = reader->files.directory;
    return status
               ? fail_in(status, "%s%s%s: ", reader->store->path, *directory ? "/" : "", directory)
               : RSD_OK;
}

/* ---- tensors out of vectors ---- */

rsd_status zero_add_tensor(struct zero_reader *reader, const struct zero_list *list,
                           const struct zero_param *param, struct slice name,
                           const struct flat_run *runs)
{
    static const int64_t origin[RSD_MAX_DIMS];
    struct catalog *catalog = reader->catalog;
    const int64_t *shape = list->shapes + param->shape;
    rsd_status status = catalog_add_tensor(catalog, name, runs->dtype, param->ndim, shape);
    if (!status && param->numel == 0)
        status = catalog_add_box(catalog, origin, shape,
                                 (struct extent){.kind = EXTENT_DENSE, .file = runs->file});
    else if (!status)
        status = flat_set_add_ranges(&list->set, runs, param->at, param->numel);
    return status ? fail_in(status, "%.*s: ", slice_width(name, 300), name.bytes) : RSD_OK;
}

/* Adds the parameter under one of its names. */
static rsd_status add_param_tensor(struct zero_reader *reader, struct zero_list *list,
                                   struct zero_param *param, struct slice name)
{
    const struct flat_run *runs = zero_find_runs(list, param, 0);
    if (!runs)
        return fail(RSD_EFORMAT, "%.*s: no file has the parameter", slice_width(name, 300),
                    name.bytes);
    param->added = param->added || name.bytes == param->name.bytes;
    return zero_add_tensor(reader, list, param, name, runs);
}

/* ---- shared parameters ---- */

/* Where a trainable parameter is in the storages of the state dict. */
struct tied_place {
    struct slice key;
    int64_t offset, numel;
    pickle_node node;
    struct zero_param *param;
};

/* An entry of shared_params. */
struct shared_name {
    struct slice name, owner;
};

/* Other names of parameters. */
struct shared_names {
    struct string_map by_name; /* to the number in the list */
    struct shared_name *list;
    size_t n, capacity;
    struct tied_place *places; /* sorted */
    size_t nplaces;
};

static int compare_vector_places(const void *a, const void *b)
{
    const struct tied_place *x = a, *y = b;
    size_t n = x->key.nbytes < y->key.nbytes ? x->key.nbytes : y->key.nbytes;
    int order = memcmp(x->key.bytes, y->key.bytes, n);
    if (!order)
        order = (x->key.nbytes > y->key.nbytes) - (x->key.nbytes < y->key.nbytes);
    if (!order)
        order = (x->offset > y->offset) - (x->offset < y->offset);
    return order ? order : (x->numel > y->numel) - (x->numel < y->numel);
}

/* Finds the place of an entry of the state dict. False: it is not a tensor with elements. */
static bool find_place(const struct zero_reader *reader, const struct zero_entry *entry,
                       struct tied_place *place)
{
    struct torch_view view;
    const struct pickle_tree *tree = &reader->model.tree;
    if (!torch_view_is_tensor(tree, entry->node) || torch_view_read(tree, entry->node, &view))
        return false;
    *place = (struct tied_place){.key = view.key,
                                 .offset = view.offset,
                                 .numel = box_volume(view.ndim, view.shape),
                                 .node = entry->node};
    return place->numel > 0;
}

/* Returns whether two tensors in one place are the same view of it. One may be the other, transposed. */
static bool is_same_view(const struct zero_reader *reader, const struct tied_place *a,
                         const struct tied_place *b)
{
    struct torch_view x, y;
    const struct pickle_tree *tree = &reader->model.tree;
    if (torch_view_read(tree, a->node, &x) || torch_view_read(tree, b->node, &y) ||
        x.ndim != y.ndim || x.dtype != y.dtype)
        return false;
    for (int32_t d = 0; d < x.ndim; d++)
        if (x.shape[d] != y.shape[d] || (x.shape[d] > 1 && x.strides[d] != y.strides[d]))
            return false;
    return true;
}

/* Checks that the state dict has a parameter with the shape of param_shapes, where it has its elements. */
static rsd_status check_entry_shape(const struct zero_reader *reader, const struct zero_list *list,
                                    const struct zero_param *param, const struct zero_entry *entry)
{
    const int64_t *shape = list->shapes + param->shape;
    char a[SHAPE_TEXT_NCHARS], b[SHAPE_TEXT_NCHARS];
    struct tied_place place;
    struct torch_view view;
    if (reader->files.model_by_rank || reader->files.universal ||
        !find_place(reader, entry, &place))
        return RSD_OK;
    TRY(torch_view_read(&reader->model.tree, entry->node, &view));
    if (view.ndim == param->ndim &&
        memcmp(view.shape, shape, (size_t)view.ndim * sizeof *shape) == 0)
        return RSD_OK;
    return fail(RSD_EFORMAT, "%.*s: the state dict has the shape %s; param_shapes says %s",
                slice_width(entry->name, 300), entry->name.bytes,
                shape_text(view.ndim, view.shape, a), shape_text(param->ndim, shape, b));
}

/* Finds where entries of the state dict lie in the flat vectors, to recognize tied parameters. */
static rsd_status read_places(struct zero_reader *reader, struct shared_names *shared)
{
    shared->places = mem_new(reader->nentries, sizeof *shared->places);
    if (!shared->places)
        return RSD_ENOMEM;
    for (size_t i = 0; i < reader->nentries && !reader->files.model_by_rank; i++) {
        struct zero_param *param = zero_list_find(&reader->trained, reader->entries[i].name);
        struct tied_place *place = &shared->places[shared->nplaces];
        if (param && find_place(reader, &reader->entries[i], place)) {
            place->param = param;
            shared->nplaces++;
        }
    }
    if (shared->nplaces > 1)
        qsort(shared->places, shared->nplaces, sizeof *shared->places, compare_vector_places);
    return RSD_OK;
}

/* Reads the names that share a parameter with another name, and where parameters lie in the state dict. The caller
 * drops both, also on failure. */
static rsd_status read_shared_names(struct zero_reader *reader, struct shared_names *shared)
{
    const struct pickle_tree *tree = &reader->model.tree;
    pickle_node dict = pickle_find(tree, reader->model.root, "shared_params"), key, owner;
    struct pickle_walk walk = pickle_walk_dict(tree, dict);
    while (pickle_walk_next_pair(&walk, &key, &owner)) {
        struct slice name = pickle_text(tree, key);
        if (pickle_kind(tree, key) != NODE_STRING || name.nbytes == 0 ||
            pickle_kind(tree, owner) != NODE_STRING)
            return fail(RSD_EFORMAT, "shared_params is not a dict of names");
        TRY(GROW(shared->list, shared->capacity, shared->n + 1));
        TRY(string_map_add(&shared->by_name, name, shared->n));
        shared->list[shared->n++] = (struct shared_name){name, pickle_text(tree, owner)};
    }
    return read_places(reader, shared);
}

static void drop_shared_names(struct shared_names *shared)
{
    string_map_drop(&shared->by_name);
    mem_free(shared->list);
    mem_free(shared->places);
}

/* Finds the parameter that an entry is another name of. The state dict says it too: both are in one place. */
static struct zero_param *find_owner(struct zero_reader *reader, const struct shared_names *shared,
                                     const struct zero_entry *entry, struct zero_list **list)
{
    struct tied_place key, *place = NULL;
    size_t number;
    *list = &reader->trained;
    if (string_map_find(&shared->by_name, entry->name, &number) && number < shared->n) {
        struct slice owner = shared->list[number].owner;
        struct zero_param *param = zero_list_find(&reader->trained, owner);
        if (!param) {
            *list = &reader->frozen;
            param = zero_list_find(&reader->frozen, owner);
        }
        return param;
    }
    if (shared->nplaces > 0 && find_place(reader, entry, &key))
        place = bsearch(&key, shared->places, shared->nplaces, sizeof key, compare_vector_places);
    return place && is_same_view(reader, place, &key) ? place->param : NULL;
}

/* ---- the state dict ---- */

static rsd_status read_buffer_names(struct zero_reader *reader)
{
    const struct pickle_tree *tree = &reader->model.tree;
    pickle_node list = pickle_find(tree, reader->model.root, "buffer_names"), item;
    struct pickle_walk walk = pickle_walk(tree, list);
    while (pickle_kind(tree, list) == NODE_LIST && pickle_walk_next(&walk, &item))
        if (pickle_kind(tree, item) == NODE_STRING)
            TRY(string_map_add(&reader->buffers, pickle_text(tree, item), 0));
    return RSD_OK;
}

/* Returns whether an entry of stage 3 stands for a parameter that is elsewhere. */
static bool is_emptied(const struct zero_reader *reader, const struct zero_entry *entry)
{
    struct tied_place place;
    size_t known;
    return reader->files.model_by_rank && torch_view_is_tensor(&reader->model.tree, entry->node) &&
           !find_place(reader, entry, &place) &&
           !string_map_find(&reader->buffers, entry->name, &known);
}

/* Adds an entry of the state dict as it is stored. */
static rsd_status add_stored_entry(struct zero_reader *reader, const struct zero_entry *entry,
                                   struct torch_visit *visit)
{
    if (is_emptied(reader, entry))
        return fail(RSD_EFORMAT,
                    "%.*s: the model file has no elements of the parameter, and "
                    "neither param_shapes nor frozen_param_shapes lists it",
                    slice_width(entry->name, 300), entry->name.bytes);
    return zero_visit(visit, entry->node, "", entry->name);
}

/* Adds one entry of the state dict: from the flat vectors if they have it, else as it is stored. */
static rsd_status add_entry(struct zero_reader *reader, const struct shared_names *shared,
                            const struct zero_entry *entry, struct torch_visit *visit)
{
    struct zero_param *param = zero_list_find(&reader->trained, entry->name);
    struct zero_list *list;
    if (param)
        TRY(check_entry_shape(reader, &reader->trained, param, entry));
    if (param && !reader->options->model_dtype)
        return add_param_tensor(reader, &reader->trained, param, param->name);
    if (param)
        param->added = true;
    if ((param = zero_list_find(&reader->frozen, entry->name)))
        return add_param_tensor(reader, &reader->frozen, param, param->name);
    param = find_owner(reader, shared, entry, &list);
    if (!param || reader->options->model_dtype)
        return add_stored_entry(reader, entry, visit);
    TRY(check_entry_shape(reader, list, param, entry));
    return add_param_tensor(reader, list, param, entry->name);
}

/* Adds a name of shared_params that the state dict does not have. */
static rsd_status add_unlisted_name(struct zero_reader *reader, const struct shared_names *shared,
                                    size_t number)
{
    const struct zero_entry entry = {.name = shared->list[number].name, .node = PICKLE_NONE};
    struct zero_list *list;
    size_t listed;
    if (string_map_find(&reader->entries_by_name, entry.name, &listed) ||
        !string_map_find(&shared->by_name, entry.name, &listed) || listed != number)
        return RSD_OK;
    struct zero_param *param = find_owner(reader, shared, &entry, &list);
    return param && !reader->options->model_dtype
               ? add_param_tensor(reader, list, param, entry.name)
               : RSD_OK;
}

/* Adds the parameters that the state dict does not have. */
static rsd_status add_other_params(struct zero_reader *reader, struct zero_list *list)
{
    for (size_t i = 0; i < list->n; i++)
        if (!list->params[i].added)
            TRY(add_param_tensor(reader, list, &list->params[i], list->params[i].name));
    return RSD_OK;
}

/* Adds all names of parameters, and what else is in the state dict. */
static rsd_status add_state_dict(struct zero_reader *reader, struct torch_visit *visit)
{
    struct shared_names shared = {0};
    rsd_status status = read_shared_names(reader, &shared);
    if (!status)
        status = read_buffer_names(reader);
    for (size_t i = 0; i < reader->nentries && !status; i++)
        status = add_entry(reader, &shared, &reader->entries[i], visit);
    for (size_t i = 0; i < shared.n && !status; i++)
        status = add_unlisted_name(reader, &shared, i);
    drop_shared_names(&shared);
    if (!status)
        status = add_other_params(reader, &reader->trained);
    if (!status)
        status = add_other_params(reader, &reader->frozen);
    return status;
}

/* ---- the row ---- */

/* Checks that the files have what is asked for. */
static rsd_status check_files(const struct zero_reader *reader)
{
    bool model_dtype = reader->options->model_dtype != 0, stage_3 = reader->files.model_by_rank;
    if (model_dtype && stage_3)
        return fail(RSD_EUNSUPPORTED,
                    "stage 3 has no parameters in the model's dtype; leave out model_dtype "
                    "(--dtype model), and convert with --cast");
    if (reader->files.universal)
        return RSD_OK;
    if (reader->has_shapes && reader->files.noptim == 0 && !model_dtype)
        return fail(RSD_ENOENT,
                    "its optimizer files (*_optim_states.pt), which have the fp32 parameters, are "
                    "missing%s",
                    stage_3 ? "" : "; set model_dtype (--dtype model) to read those of this file");
    if (!reader->has_shapes && reader->files.noptim > 0)
        return fail(RSD_EFORMAT, "param_shapes is missing; it names the parameters");
    return RSD_OK;
}

/* Reads the checkpoint: parameters, then the vectors of all ranks, then tensors and values. */
static rsd_status read_model(struct zero_reader *reader)
{
    uint32_t first = reader->files.model[0];
    struct torch_visit visit = {.file = &reader->model, .catalog = reader->catalog};
    rsd_status status = zero_read_params(reader);
    if (!status)
        status = check_files(reader);
    if (status)
        return store_fail_in(reader->store, first, status);
    if (reader->files.universal)
        TRY(zero_read_universal(reader));
    else if (reader->files.noptim > 0)
        TRY(zero_read_partitions(reader));
    TRY(zero_read_fragments(reader));
    status = add_state_dict(reader, &visit);
    if (!status)
        status = zero_add_model_values(reader, &visit);
    torch_visit_end(&visit);
    if (status)
        return store_fail_in(reader->store, first, status);
    return zero_add_states(reader);
}

static rsd_status zero_open(struct store *store, struct catalog *catalog,
                            const rsd_open_options *options)
{
    struct zero_reader reader = {.store = store,
                                 .catalog = catalog,
                                 .options = options,
                                 .trained.set.catalog = catalog,
                                 .trained.set.take_rank_0 = options->take_rank_0 != 0,
                                 .frozen.set.catalog = catalog};
    rsd_status status = zero_find_files(store, &reader.files);
    if (!status) {
        status = torch_file_open(&reader.model, store, reader.files.model[0]);
        if (status) {
            status = store_fail_in(store, reader.files.model[0], status);
        } else {
            status = read_model(&reader);
            torch_file_close(&reader.model);
        }
    }
    zero_files_drop(&reader.files);
    zero_list_drop(&reader.trained);
    zero_list_drop(&reader.frozen);
    string_map_drop(&reader.entries_by_name);
    string_map_drop(&reader.buffers);
    mem_free(reader.entries);
    return status;
}

const struct format format_zero = {.id = RSD_FORMAT_DEEPSPEED,
                                   .name = "deepspeed",
                                   .probe = zero_probe,
                                   .open = zero_open,
                                   .locate = catalog_locate};
