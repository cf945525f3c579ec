/* zero_params.c - what a model file of DeepSpeed says of parameters.
 *
 *     module         the state dict: whole tensors; in stage 3 parameters have no elements there
 *     param_shapes   one dict per group of stages 1 and 2, or per sub-group of stage 3: the names and shapes
 *                    of trainable parameters, in the order in which the flat vectors have their elements
 */
#include "zero.h"

/* Returns false if there are more than 2^62 elements. */
static bool count_elements(int32_t ndim, const int64_t *shape, int64_t *numel)
{
    *numel = box_is_empty(ndim, shape) ? 0 : 1;
    for (int32_t d = 0; d<ndim && * numel> 0; d++)
        if (!mul_i64(*numel, shape[d], numel) || *numel > MAX_EXTENT)
            return false;
    return true;
}

rsd_status zero_list_add(struct zero_list *list, struct slice name, int32_t ndim,
                         const int64_t *shape, uint32_t group)
{
    struct zero_param param = {.name = name, .ndim = ndim, .shape = list->nshapes, .group = group};
    size_t known;
    if (string_map_find(&list->by_name, name, &known))
        return fail(RSD_EFORMAT, "parameter is listed twice");
    if (!count_elements(ndim, shape, &param.numel))
        return fail(RSD_ELIMIT, "tensor has more than 2^62 elements");
    TRY(GROW(list->shapes, list->shapes_capacity, list->nshapes + (size_t)ndim + 1));
    TRY(GROW(list->params, list->capacity, list->n + 1));
    TRY(string_map_add(&list->by_name, name, list->n));
    copy_i64s(list->shapes + list->nshapes, shape, ndim);
    list->nshapes += (size_t)ndim;
    list->params[list->n++] = param;
    return RSD_OK;
}

struct zero_param *zero_list_find(const struct zero_list *list, struct slice name)
{
    size_t number;
    return string_map_find(&list->by_name, name, &number) ? &list->params[number] : NULL;
}

void zero_list_drop(struct zero_list *list)
{
    mem_free(list->params);
    mem_free(list->shapes);
    string_map_drop(&list->by_name);
    flat_set_drop(&list->set);
    *list = (struct zero_list){0};
}

/* Adds the parameters of a dict of names and shapes. */
static rsd_status add_shapes(struct zero_reader *reader, struct zero_list *list, pickle_node dict,
                             uint32_t group)
{
    const struct pickle_tree *tree = &reader->model.tree;
    struct pickle_walk walk = pickle_walk_dict(tree, dict);
    pickle_node key, node;
    if (!pickle_is_dict(tree, dict))
        return fail(RSD_EFORMAT, "param_shapes is not a list of dicts");
    while (pickle_walk_next_pair(&walk, &key, &node)) {
        struct slice name = pickle_text(tree, key);
        int64_t shape[RSD_MAX_DIMS];
        int32_t ndim;
        if (pickle_kind(tree, key) != NODE_STRING || name.nbytes == 0 ||
            memchr(name.bytes, '\0', name.nbytes))
            return fail(RSD_EFORMAT, "param_shapes has a key that is not a name");
        rsd_status status = torch_take_shape(tree, node, &ndim, shape);
        if (!status)
            status = zero_list_add(list, name, ndim, shape, group);
        if (status)
            return fail_in(status, "param_shapes: %.*s: ", slice_width(name, 300), name.bytes);
    }
    return RSD_OK;
}

/* Reads the names and shapes of the trained parameters, group by group. */
static rsd_status read_param_shapes(struct zero_reader *reader)
{
    const struct pickle_tree *tree = &reader->model.tree;
    pickle_node shapes = pickle_find(tree, reader->model.root, "param_shapes"), dict;
    if (shapes == PICKLE_ABSENT || shapes == PICKLE_NONE)
        return RSD_OK;
    reader->has_shapes = true;
    if (pickle_is_dict(tree, shapes)) { /* early versions have one group */
        reader->ngroups = 1;
        return add_shapes(reader, &reader->trained, shapes, 0);
    }
    if (pickle_kind(tree, shapes) != NODE_LIST)
        return fail(RSD_EFORMAT, "param_shapes is not a list of dicts");
    struct pickle_walk walk = pickle_walk(tree, shapes);
    while (pickle_walk_next(&walk, &dict))
        TRY(add_shapes(reader, &reader->trained, dict, reader->ngroups++));
    return RSD_OK;
}

/* Lists the frozen parameters of stage 3. In other stages the state dict has them whole. */
static rsd_status read_frozen_shapes(struct zero_reader *reader)
{
    const struct pickle_tree *tree = &reader->model.tree;
    pickle_node dict = pickle_find(tree, reader->model.root, "frozen_param_shapes");
    if (!reader->files.model_by_rank || !pickle_is_dict(tree, dict))
        return RSD_OK;
    return add_shapes(reader, &reader->frozen, dict, 0);
}

/* Lists the state dict. A name that is there twice has its last value, as in Python. */
static rsd_status read_entries(struct zero_reader *reader)
{
    const struct pickle_tree *tree = &reader->model.tree;
    pickle_node module = pickle_find(tree, reader->model.root, "module"), key, node;
    struct pickle_walk walk = pickle_walk_dict(tree, module);
    if (!pickle_is_dict(tree, module) && reader->files.universal)
        return RSD_OK;
    if (!pickle_is_dict(tree, module))
        return fail(RSD_EUNSUPPORTED, "model states have no state dict 'module': "
                                      "pipeline-parallel checkpoints are not supported");
    while (pickle_walk_next_pair(&walk, &key, &node)) {
        struct slice name = pickle_text(tree, key);
        size_t known;
        if (pickle_kind(tree, key) != NODE_STRING || name.nbytes == 0 ||
            memchr(name.bytes, '\0', name.nbytes))
            return fail(RSD_EFORMAT, "state dict has a key that is not a name");
        if (string_map_find(&reader->entries_by_name, name, &known)) {
            reader->entries[known].node = node;
            continue;
        }
        TRY(GROW(reader->entries, reader->entries_capacity, reader->nentries + 1));
        TRY(string_map_add(&reader->entries_by_name, name, reader->nentries));
        reader->entries[reader->nentries++] = (struct zero_entry){name, node};
    }
    return RSD_OK;
}

rsd_status zero_read_params(struct zero_reader *reader)
{
    if (!pickle_is_dict(&reader->model.tree, reader->model.root))
        return fail(RSD_EFORMAT, "model states are not a dict");
    TRY(read_entries(reader));
    TRY(read_param_shapes(reader));
    return read_frozen_shapes(reader);
}
