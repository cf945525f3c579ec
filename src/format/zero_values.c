/* zero_values.c - optimizer states and values of DeepSpeed's checkpoints. */
#include "zero.h"

#include <stdio.h>
#include <string.h>

rsd_status zero_visit(struct torch_visit *visit, pickle_node node, const char *prefix,
                      struct slice name)
{
    if (!*prefix)
        return torch_visit_part(visit, name, node);
    TRY(torch_visit_enter(visit, slice_of(prefix)));
    TRY(torch_visit_part(visit, name, node));
    torch_visit_leave(visit);
    return RSD_OK;
}

/* ---- optimizer states ---- */

enum { FIND_STEPS = 4 }; /* to find the vectors of a parameter */

/* Writes "optimizer.state.NAME.KEY". */
static rsd_status make_state_name(struct slice param, struct slice key, char *name, size_t capacity,
                                  struct slice *out)
{
    int n = snprintf(name, capacity, "optimizer.state.%.*s.%.*s", (int)param.nbytes, param.bytes,
                     (int)key.nbytes, key.bytes);
    if (n < 0 || (size_t)n >= capacity)
        return fail(RSD_ELIMIT, "optimizer.state.%.*s: name exceeds %zu bytes",
                    slice_width(param, 300), param.bytes, capacity - 1);
    *out = (struct slice){name, (size_t)n};
    return RSD_OK;
}

/* Adds the optimizer's states of all parameters as tensors. */
static rsd_status add_state_tensors(struct zero_reader *reader)
{
    const struct zero_list *list = &reader->trained;
    char text[TORCH_MAX_NAME_NBYTES];
    struct slice name;
    for (size_t i = 0; i < list->n; i++)
        for (uint32_t state = 1; state < list->set.keys.n; state++) {
            if (!budget_take(FIND_STEPS))
                return budget_fail();
            const struct flat_run *runs = zero_find_runs(list, &list->params[i], state);
            if (!runs)
                continue;
            TRY(make_state_name(list->params[i].name, list->set.keys.list[state], text, sizeof text,
                                &name));
            TRY(zero_add_tensor(reader, list, &list->params[i], name, runs));
        }
    return RSD_OK;
}

/* Adds vectors that have no element for each one of the parameters, such as the errors of 1-bit Adam. */
static rsd_status add_other_vectors(struct zero_reader *reader)
{
    const struct flat_set *set = &reader->trained.set;
    for (size_t i = 0; i < set->nruns; i++) {
        const struct flat_run *run = &set->runs[i];
        char text[TORCH_MAX_NAME_NBYTES], owner[64];
        struct slice name;
        size_t n;
        if (zero_is_param_state(&reader->trained,
                                flat_set_find_runs(set, run->state, run->group, &n)))
            continue;
        n = (size_t)snprintf(owner, sizeof owner, "group%u.rank%u", run->group, run->rank);
        TRY(make_state_name((struct slice){owner, n}, set->keys.list[run->state], text, sizeof text,
                            &name));
        TRY(catalog_add_tensor(reader->catalog, name, run->dtype, 1, &run->count));
        TRY(catalog_add_range(reader->catalog, 0, run->count, run->file, run->array, 0));
    }
    return RSD_OK;
}

/* Adds a scalar state as a value. */
static rsd_status add_scalar_value(struct catalog *catalog, struct slice name, const char *json)
{
    if (!budget_take_text(strlen(json)) || !budget_take_memory(strlen(json)))
        return budget_fail();
    char *copy = text_copy(json);
    return copy ? catalog_add_json(catalog, name, NULL, copy) : RSD_ENOMEM;
}

/* Adds the numbers of a group for each of its parameters. */
static rsd_status add_state_scalars(struct zero_reader *reader)
{
    const struct zero_list *list = &reader->trained;
    char text[TORCH_MAX_NAME_NBYTES];
    struct slice name;
    size_t first = 0;
    for (size_t k = 0; k < list->set.nscalars; k++) {
        const struct flat_scalar *scalar = &list->set.scalars[k];
        while (first > 0 && list->params[first - 1].vector >= scalar->group)
            first--;
        while (first < list->n && list->params[first].vector < scalar->group)
            first++;
        for (size_t i = first; i < list->n && list->params[i].vector == scalar->group; i++) {
            TRY(make_state_name(list->params[i].name, list->set.keys.list[scalar->state], text,
                                sizeof text, &name));
            TRY(add_scalar_value(reader->catalog, name, scalar->json));
        }
    }
    return RSD_OK;
}

/* ---- values of the optimizer ---- */

/* Returns the number of the first parameter of a group. Parameters are in the order of groups. */
static size_t first_of_group(const struct zero_list *list, int64_t group)
{
    size_t lo = 0, hi = list->n;
    while (lo < hi) {
        size_t middle = lo + (hi - lo) / 2;
        if (list->params[middle].group < group)
            lo = middle + 1;
        else
            hi = middle;
    }
    return lo;
}

/* Adds the params of a group: names in place of the numbers of vectors. */
static rsd_status add_param_names(struct torch_visit *visit, pickle_node ids)
{
    const struct zero_reader *reader = visit->context;
    const struct pickle_tree *tree = &visit->file->tree;
    const struct zero_list *list = &reader->trained;
    struct pickle_walk walk = pickle_walk(tree, ids);
    struct text text = {0};
    char *json;
    pickle_node item;
    int64_t id;
    text_add(&text, "[");
    while (pickle_walk_next(&walk, &item) && pickle_as_i64(tree, item, &id))
        for (size_t i = first_of_group(list, id);
             i < list->n && list->params[i].group == id && !text.failed; i++) {
            text_add(&text, "%s", text.length > 1 ? ", " : "");
            json_add_string(&text, list->params[i].name.bytes, list->params[i].name.nbytes);
        }
    text_add(&text, "]");
    TRY(text_take(&text, &json));
    return catalog_add_json(visit->catalog, torch_visit_name(visit), NULL, json);
}

static rsd_status add_group_value(struct torch_visit *visit, pickle_node c)
{
    if (pickle_kind(&visit->file->tree, c) == NODE_LIST && has_suffix(visit->name, ".params"))
        return add_param_names(visit, c);
    return torch_visit_add_value(visit, c);
}

/* Returns whether a key of the optimizer says how vectors are cut. */
static bool is_layout_key(struct slice key)
{
    static const char *const keys[] = {"base_optimizer_state",
                                       "optimizer_state_dict",
                                       "single_partition_of_fp32_groups",
                                       "fp32_flat_groups",
                                       "zero_stage",
                                       "group_paddings",
                                       "param_alignment_paddings",
                                       "partition_count",
                                       "param_slice_mappings",
                                       "param_groups"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (slice_is(key, keys[i]))
            return true;
    return false;
}

/* Adds the values of optimizer_state_dict, or of optimizer_state.pt of a universal checkpoint. */
static rsd_status add_optimizer_values(struct torch_visit *visit, pickle_node states)
{
    const struct pickle_tree *tree = &visit->file->tree;
    struct pickle_walk walk = pickle_walk_dict(tree, states);
    pickle_node key, value, groups = pickle_find(tree, states, "param_groups");
    const char *const optimizers[] = {"base_optimizer_state", "optimizer_state_dict"};
    for (size_t i = 0; i < 2 && groups == PICKLE_ABSENT; i++)
        groups = pickle_find(tree, pickle_find(tree, states, optimizers[i]), "param_groups");
    visit->on_value = add_group_value;
    if (groups != PICKLE_ABSENT)
        TRY(zero_visit(visit, groups, "optimizer", slice_of("param_groups")));
    visit->on_value = NULL;
    while (pickle_walk_next_pair(&walk, &key, &value)) {
        struct slice text = pickle_text(tree, key);
        if (pickle_kind(tree, key) == NODE_STRING && !is_layout_key(text))
            TRY(zero_visit(visit, value, "optimizer", text));
    }
    return RSD_OK;
}

/* Adds the step of a universal checkpoint that has no step.pt: it is in optimizer_state.pt. */
static rsd_status add_common_step(struct zero_reader *reader, struct torch_file *file)
{
    const struct pickle_tree *tree = &file->tree;
    struct zero_list *list = &reader->trained;
    pickle_node optimizer = pickle_find(tree, file->root, "optimizer_state_dict"), key, value;
    struct pickle_walk walk = pickle_walk_dict(tree, pickle_find(tree, optimizer, "state"));
    if (list->set.nscalars > 0 || !pickle_walk_next_pair(&walk, &key, &value))
        return RSD_OK;
    pickle_node step = pickle_find(tree, value, "step");
    for (uint32_t i = 0; i < list->n && step != PICKLE_ABSENT; i++)
        TRY(flat_set_add_state(&list->set, slice_of("step"), i, 0, file, step));
    return RSD_OK;
}

/* Adds the values of a file of the optimizer. */
static rsd_status add_optimizer_file(struct torch_visit *visit)
{
    struct zero_reader *reader = visit->context;
    struct torch_file *file = visit->file;
    if (!reader->files.universal)
        return add_optimizer_values(visit,
                                    pickle_find(&file->tree, file->root, "optimizer_state_dict"));
    TRY(add_common_step(reader, file));
    return add_optimizer_values(visit, file->root);
}

rsd_status zero_add_states(struct zero_reader *reader)
{
    struct torch_visit visit = {.catalog = reader->catalog, .context = reader};
    uint32_t index = reader->files.optimizer_state;
    if (!reader->files.universal && reader->files.noptim > 0)
        index = reader->files.optim[0];
    TRY(zero_fail_in(reader, add_state_tensors(reader)));
    TRY(zero_fail_in(reader, add_other_vectors(reader)));
    if (index != UINT32_MAX)
        TRY(torch_visit_file(&visit, reader->store, index, add_optimizer_file));
    return zero_fail_in(reader, add_state_scalars(reader));
}

/* ---- values of the model file ---- */

/* Returns whether a key of the model file is read otherwise, or says how tensors are stored. */
static bool is_model_key(struct slice key)
{
    static const char *const keys[] = {"module",
                                       "buffer_names",
                                       "param_shapes",
                                       "frozen_param_shapes",
                                       "frozen_param_fragments",
                                       "shared_params"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (slice_is(key, keys[i]))
            return true;
    return false;
}

/* Adds a number without dims as a value, as for other stages; any other tensor as it is. */
static rsd_status add_plain_state(struct torch_visit *visit, pickle_node c)
{
    struct torch_view view;
    char *json = NULL;
    if (!has_suffix(visit->name, ".step") || !torch_view_is_tensor(&visit->file->tree, c))
        return torch_visit_add_tensor(visit, c);
    TRY(torch_view_read(&visit->file->tree, c, &view));
    if (view.ndim == 0)
        TRY(flat_read_scalar(visit->file, c, &json));
    if (!json)
        return torch_visit_add_tensor(visit, c);
    return catalog_add_json(visit->catalog, torch_visit_name(visit), NULL, json);
}

rsd_status zero_add_model_values(struct zero_reader *reader, struct torch_visit *visit)
{
    const struct pickle_tree *tree = &reader->model.tree;
    struct pickle_walk walk = pickle_walk_dict(tree, reader->model.root);
    pickle_node key, value;
    while (pickle_walk_next_pair(&walk, &key, &value)) {
        struct slice text = pickle_text(tree, key);
        size_t known;
        bool optimizer = slice_is(text, "optimizer");
        if (pickle_kind(tree, key) != NODE_STRING)
            return fail(RSD_EFORMAT, "model states have a key that is not a name");
        if (is_model_key(text) || (optimizer && value == PICKLE_NONE))
            continue;
        /* What the user saved may have the name of a tensor of the model. */
        bool taken = string_map_find(&reader->entries_by_name, text, &known);
        visit->on_tensor = optimizer ? add_plain_state : NULL;
        TRY(zero_visit(visit, value, taken ? "client_state" : "", text));
        visit->on_tensor = NULL;
    }
    return RSD_OK;
}
