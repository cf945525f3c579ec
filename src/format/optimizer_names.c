/* optimizer_names.c - names the state of an optimizer, which numbers its parameters.
 *
 *     {state: {0: {step, exp_avg, ...}, ...}, param_groups: [{lr, ..., params: [0, 1], param_names: [...]}]}
 *
 * The names are those of param_names. Without them, the numbers of one group are those of the parameters of
 * the model in order: its distributed tensors, each storage once. That is used only if the number of
 * parameters and every shape agree; otherwise the numbers stay.
 */
#include "dtensor_read.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_PARAMETERS = 1 << 24 };

/* ---- parameters of the model ---- */

rsd_status optimizer_names_add(struct optimizer_names *names, size_t ntensors,
                               const struct rank_tensor *tensor)
{
    if (names->nplaces == ntensors)
        return RSD_OK; /* a lower rank had it */
    TRY(GROW(names->places, names->places_capacity, names->nplaces + 1));
    names->places[names->nplaces++] = tensor->place;
    return RSD_OK;
}

struct tensor_place {
    uint64_t place;
    size_t tensor;
};

static int by_tensor_place(const void *a, const void *b)
{
    const struct tensor_place *x = a, *y = b;
    if (x->place != y->place)
        return x->place < y->place ? -1 : 1;
    return (x->tensor > y->tensor) - (x->tensor < y->tensor);
}

rsd_status optimizer_names_finish(struct optimizer_names *names, const struct rank_parts *parts)
{
    size_t n = names->nplaces;
    bool any_sharded = false;
    struct tensor_place *places = mem_new(n, sizeof *places);
    bool *tied = mem_new(n, sizeof *tied);
    names->parameters = mem_new(n, sizeof *names->parameters);
    rsd_status status = places && tied && names->parameters ? RSD_OK : RSD_ENOMEM;
    for (size_t i = 0; i < n && !status; i++) {
        places[i] = (struct tensor_place){names->places[i], i};
        any_sharded = any_sharded || parts->tensors[i].sharded;
    }
    if (!status && n > 1)
        qsort(places, n, sizeof *places, by_tensor_place);
    for (size_t i = 1; i < n && !status; i++)
        tied[places[i].tensor] = places[i].place && places[i].place == places[i - 1].place;
    for (size_t i = 0; i < n && !status; i++)
        if (!tied[i] && parts->tensors[i].sharded == any_sharded)
            names->parameters[names->nparameters++] = i;
    mem_free(places);
    mem_free(tied);
    return status;
}

void optimizer_names_drop(struct optimizer_names *names)
{
    mem_free(names->places);
    mem_free(names->parameters);
    mem_free(names->names);
    *names = (struct optimizer_names){0};
}

/* ---- parameter groups ---- */

/* The numbers and names of all groups. */
struct group_names {
    struct optimizer_names *out;
    size_t ngroups, nnumbers;
    bool named, counted; /* all have names; the numbers are 0, 1, 2, ... */
};

/* Takes the numbers and the names of the parameters in one group. */
static rsd_status take_group_names(struct dtensor_reader *reader, const struct pickle_tree *tree,
                                   pickle_node group, struct group_names *groups)
{
    pickle_node numbers = pickle_find(tree, group, "params"),
                texts = pickle_find(tree, group, "param_names"), number, text;
    struct pickle_walk walk = pickle_walk(tree, numbers), names = pickle_walk(tree, texts);
    if (pickle_kind(tree, numbers) != NODE_LIST)
        return fail(RSD_EFORMAT, "param_groups: params are not a list");
    groups->ngroups++;
    if (pickle_kind(tree, texts) != NODE_LIST ||
        pickle_count(tree, texts) != pickle_count(tree, numbers))
        groups->named = false;
    while (pickle_walk_next(&walk, &number)) {
        int64_t value;
        size_t at = groups->nnumbers++;
        if (groups->nnumbers > MAX_PARAMETERS)
            return fail(RSD_ELIMIT, "param_groups: more than %d parameters", (int)MAX_PARAMETERS);
        if (!pickle_as_i64(tree, number, &value) || value != (int64_t)at)
            groups->counted = false;
        if (!groups->named || !groups->counted || !pickle_walk_next(&names, &text))
            continue;
        struct slice name = pickle_text(tree, text);
        if (pickle_kind(tree, text) != NODE_STRING || name.nbytes == 0) {
            groups->named = false;
            continue;
        }
        size_t capacity = groups->out->nnames;
        TRY(GROW(groups->out->names, capacity, at + 1));
        groups->out->nnames = capacity;
        TRY(catalog_add_name(reader->parts.catalog, name, &groups->out->names[at].bytes));
        groups->out->names[at].nbytes = name.nbytes;
    }
    return RSD_OK;
}

/* ---- shapes ---- */

/* What the state of an optimizer has: to compare it with the model. */
struct state_shapes {
    struct dtensor_reader *reader;
    struct torch_file *file;
    size_t nsharded, nflat; /* tensors with dims that are distributed, and 1-d ones that are not */
    size_t nothers;
    bool match; /* with the parameters of the model, by number */
};

/* Compares the shapes of one parameter's states with that of the parameter. */
static rsd_status compare_state_shapes(struct state_shapes *shapes, int64_t number,
                                       pickle_node state)
{
    const struct pickle_tree *tree = &shapes->file->tree;
    struct dtensor_reader *reader = shapes->reader;
    struct pickle_walk walk = pickle_walk_dict(tree, state);
    pickle_node key, value;
    while (pickle_walk_next_pair(&walk, &key, &value)) {
        struct rank_tensor tensor;
        if (!torch_view_is_tensor(tree, value) && !torch_is_sharded(tree, value))
            continue;
        TRY(rank_tensor_read(shapes->file, value, reader->rank, &reader->mesh, &tensor));
        rank_tensor_drop_boxes(&tensor);
        if (!tensor.sharded && tensor.ndim == 0)
            continue;
        shapes->nsharded += tensor.sharded;
        shapes->nflat += !tensor.sharded && tensor.ndim == 1;
        shapes->nothers += !tensor.sharded && tensor.ndim > 1;
        if (number < 0 || (uint64_t)number >= reader->names.nparameters) {
            shapes->match = false;
            continue;
        }
        const struct joint_tensor *joint = &reader->parts.tensors[reader->names.parameters[number]];
        shapes->match = shapes->match && tensor.ndim == joint->ndim &&
                        memcmp(tensor.shape, reader->parts.coordinates + joint->shape,
                               (size_t)tensor.ndim * sizeof *tensor.shape) == 0;
    }
    return RSD_OK;
}

static rsd_status read_state_shapes(struct state_shapes *shapes, pickle_node states)
{
    const struct pickle_tree *tree = &shapes->file->tree;
    struct pickle_walk walk = pickle_walk_dict(tree, states);
    pickle_node key, state;
    while (pickle_walk_next_pair(&walk, &key, &state)) {
        int64_t number = -1;
        pickle_as_i64(tree, key, &number);
        TRY(compare_state_shapes(shapes, number, state));
    }
    return RSD_OK;
}

/* ---- deciding ---- */

/* Numbers parameters in the order of the model's tensors. */
static rsd_status use_model_names(struct dtensor_reader *reader)
{
    struct optimizer_names *names = &reader->names;
    mem_free(names->names);
    names->names = mem_new(names->nparameters, sizeof *names->names);
    if (!names->names)
        return RSD_ENOMEM;
    names->nnames = names->nparameters;
    for (size_t i = 0; i < names->nparameters; i++)
        names->names[i] = reader->parts.tensors[names->parameters[i]].name;
    return RSD_OK;
}

/* FSDP1 leaves the optimizer the flat pieces of its units, which do not say what is in them. */
static bool is_flat_optimizer(const struct dtensor_reader *reader,
                              const struct state_shapes *shapes)
{
    bool sharded_model = false;
    for (size_t i = 0; i < reader->names.nparameters; i++)
        sharded_model = sharded_model || reader->parts.tensors[reader->names.parameters[i]].sharded;
    if (reader->fsdp_version == 1 && shapes->nsharded == 0)
        return true;
    return sharded_model && shapes->nflat > 0 && shapes->nothers == 0 && shapes->nsharded == 0;
}

/* Decides how the parameters of an optimizer are named: by the file, by the model, or by their numbers. */
static rsd_status decide_names(struct dtensor_reader *reader, struct torch_file *file,
                               pickle_node states, pickle_node list)
{
    const struct pickle_tree *tree = &file->tree;
    struct optimizer_names *names = &reader->names;
    struct group_names groups = {.out = names, .named = true, .counted = true};
    struct state_shapes shapes = {.reader = reader, .file = file, .match = true};
    struct pickle_walk walk = pickle_walk(tree, list);
    pickle_node group;
    names->known = true;
    TRY(read_state_shapes(&shapes, states));
    if (is_flat_optimizer(reader, &shapes)) {
        reader->optimizer_skipped = true;
        return catalog_add_note(reader->parts.catalog,
                                "%s: optimizer state of FSDP1 was not read: its flat pieces do "
                                "not name their parameters",
                                store_file_name(reader->store, file->index));
    }
    while (pickle_kind(tree, list) == NODE_LIST && pickle_walk_next(&walk, &group))
        TRY(take_group_names(reader, tree, group, &groups));
    if (groups.ngroups > 0 && groups.named && groups.counted) {
        names->nnames = groups.nnumbers;
        return RSD_OK;
    }
    if (groups.ngroups == 1 && groups.counted && groups.nnumbers == names->nparameters &&
        shapes.match)
        return use_model_names(reader);
    names->numbered = true;
    names->nnames = 0;
    return catalog_add_note(reader->parts.catalog,
                            "%s: optimizer state keeps the numbers of its parameters: the file "
                            "does not name them, and their shapes do not tell",
                            store_file_name(reader->store, file->index));
}

/* Compares the numbers and names of one group with those of the first file. *at counts the parameters. */
static rsd_status compare_group_names(const struct dtensor_reader *reader,
                                      const struct pickle_tree *tree, pickle_node group, size_t *at)
{
    const struct optimizer_names *names = &reader->names;
    pickle_node numbers = pickle_find(tree, group, "params"),
                texts = pickle_find(tree, group, "param_names"), number, text;
    struct pickle_walk walk = pickle_walk(tree, numbers), list = pickle_walk(tree, texts);
    bool named = pickle_kind(tree, texts) == NODE_LIST;
    for (; pickle_walk_next(&walk, &number); ++*at) {
        int64_t value;
        if (*at >= names->nnames || !pickle_as_i64(tree, number, &value) || value != (int64_t)*at)
            return fail(RSD_EMISMATCH, "param_groups has other numbers than the file of the lowest "
                                       "rank");
        struct slice known = names->names[*at];
        if (!named || !pickle_walk_next(&list, &text))
            continue;
        struct slice name = pickle_text(tree, text);
        TRY(budget_use(1 + name.nbytes / STEP_NBYTES));
        if (name.nbytes != known.nbytes || memcmp(name.bytes, known.bytes, name.nbytes) != 0)
            return fail(RSD_EMISMATCH,
                        "parameter %zu is %.*s, and %.*s in the file of the lowest rank", *at,
                        slice_width(name, 300), name.bytes, slice_width(known, 300), known.bytes);
    }
    return RSD_OK;
}

/* Checks that a rank numbers and names its parameters as the first one does, if their names are known. */
static rsd_status compare_names(const struct dtensor_reader *reader, const struct pickle_tree *tree,
                                pickle_node groups)
{
    struct pickle_walk walk = pickle_walk(tree, groups);
    pickle_node group;
    size_t at = 0;
    while (reader->names.nnames > 0 && pickle_kind(tree, groups) == NODE_LIST &&
           pickle_walk_next(&walk, &group))
        TRY(compare_group_names(reader, tree, group, &at));
    return RSD_OK;
}

/* ---- visiting ---- */

/* Visits the state of each parameter, under the name of the parameter. */
static rsd_status visit_states(struct dtensor_reader *reader, struct torch_visit *visit,
                               pickle_node states)
{
    const struct pickle_tree *tree = &visit->file->tree;
    const struct optimizer_names *names = &reader->names;
    struct pickle_walk walk = pickle_walk_dict(tree, states);
    pickle_node key, state;
    while (pickle_walk_next_pair(&walk, &key, &state)) {
        struct slice name = pickle_text(tree, key);
        char digits[24];
        int64_t number;
        if (pickle_as_i64(tree, key, &number)) {
            snprintf(digits, sizeof digits, "%lld", (long long)number);
            name = slice_of(digits);
            if (number >= 0 && (uint64_t)number < names->nnames)
                name = names->names[number];
        } else if (pickle_kind(tree, key) != NODE_STRING) {
            return fail(RSD_EFORMAT, "optimizer state has a key that is not a number or a text");
        }
        TRY(torch_visit_part(visit, name, state));
    }
    return RSD_OK;
}

rsd_status optimizer_visit_file(struct torch_visit *visit)
{
    struct dtensor_reader *reader = visit->context;
    const struct pickle_tree *tree = &visit->file->tree;
    pickle_node states = pickle_find(tree, visit->file->root, "state"),
                groups = pickle_find(tree, visit->file->root, "param_groups");
    if (!pickle_is_dict(tree, states))
        return fail(RSD_EFORMAT, "file has no optimizer state");
    TRY(reader->names.known ? compare_names(reader, tree, groups)
                            : decide_names(reader, visit->file, states, groups));
    if (reader->optimizer_skipped)
        return RSD_OK;
    TRY(torch_visit_enter(visit, slice_of("optimizer")));
    TRY(torch_visit_enter(visit, slice_of("state")));
    TRY(visit_states(reader, visit, states));
    torch_visit_leave(visit);
    if (reader->first_file && groups != PICKLE_ABSENT)
        TRY(torch_visit_part(visit, slice_of("param_groups"), groups));
    torch_visit_leave(visit);
    return RSD_OK;
}

bool optimizer_has_names(const struct dtensor_reader *reader, struct slice value)
{
    int64_t group;
    return reader->names.nnames > 0 &&
           name_has_form(value.bytes, "optimizer.param_groups.#.params", &group);
}

rsd_status optimizer_add_names(const struct dtensor_reader *reader, struct torch_visit *visit,
                               pickle_node numbers)
{
    const struct pickle_tree *tree = &visit->file->tree;
    struct pickle_walk walk = pickle_walk(tree, numbers);
    struct text text = {0};
    pickle_node item;
    char *json;
    for (bool first = true; pickle_walk_next(&walk, &item); first = false) {
        int64_t number;
        text_add(&text, first ? "[" : ", ");
        if (!pickle_as_i64(tree, item, &number) || number < 0 ||
            (uint64_t)number >= reader->names.nnames) {
            text_drop(&text);
            return torch_visit_add_value(visit, numbers);
        }
        json_add_string(&text, reader->names.names[number].bytes,
                        reader->names.names[number].nbytes);
    }
    text_add(&text, text.length ? "]" : "[]");
    TRY(text_take(&text, &json));
    TRY(catalog_add_json(visit->catalog, torch_visit_name(visit), NULL, json));
    return torch_visit_path(visit, &visit->catalog->values[visit->catalog->nvalues - 1].path);
}
