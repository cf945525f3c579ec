/* torch_tree.c - names what is nested in a torch.save file, and adds it to a catalog.
 *
 * The name of a tensor is its keys, joined by dots. These are visited:
 *
 *     dicts and their subclasses    by key; a key that is not a string or an integer is written as Python does
 *     lists, tuples                 by index, if a tensor or dict is in them
 *     modules of torch.nn           by the names that their state dicts have
 *     other objects                 by attribute, if a tensor is in them
 *
 * Anything else is a value. A node that is referred to several times is visited as often, as far as the
 * budget of the call goes. A node that contains itself is a value there.
 */
#include "rows.h"
#include "torch_item.h"

#include <stdio.h>
#include <string.h>

enum { MAX_SEARCH_DEPTH = 400 };
enum { VISIT_STEPS = 4 }; /* of one node, besides its name */

/* ---- tensors ---- */

/* Adds the path of the current node: its keys as JSON texts, its indices as numbers. */
rsd_status torch_visit_path(struct torch_visit *visit, const char **out)
{
    struct text text = {0};
    char *json;
    if (visit->nsteps == 0)
        return RSD_OK;
    text_add(&text, "[");
    for (size_t i = 0; i < visit->nsteps; i++) {
        const struct torch_step *step = &visit->steps[i];
        size_t n = step->end - step->begin;
        text_add(&text, i ? ", " : "");
        if (step->number)
            text_add(&text, "%.*s", (int)n, visit->name + step->begin);
        else
            json_add_string(&text, visit->name + step->begin, n);
    }
    text_add(&text, "]");
    TRY(text_take(&text, &json));
    rsd_status status = catalog_copy_text(visit->catalog, json, out);
    rsd_free(json);
    return status;
}

struct slice torch_visit_name(const struct torch_visit *visit)
{
    return (struct slice){visit->name, visit->name_nbytes};
}

rsd_status torch_visit_add_refused(struct torch_visit *visit)
{
    struct catalog *catalog = visit->catalog;
    char reason[300];
    const char *kept;
    snprintf(reason, sizeof reason, "%s", rsd_error());
    TRY(catalog_copy_text(catalog, reason, &kept));
    TRY(catalog_add_value(catalog, torch_visit_name(visit), (struct extent){.kind = EXTENT_NONE},
                          NULL));
    struct stored_value *value = &catalog->values[catalog->nvalues - 1];
    value->refused = kept;
    return torch_visit_path(visit, &value->path);
}

rsd_status torch_visit_add_tensor(struct torch_visit *visit, pickle_node c)
{
    static const int64_t origin[RSD_MAX_DIMS];
    struct catalog *catalog = visit->catalog;
    struct torch_view view;
    struct stored_array array;
    rsd_status status = torch_file_find_tensor(visit->file, c, &view, &array);
    if (status == RSD_EUNSUPPORTED)
        return torch_visit_add_refused(visit);
    TRY(status);
    TRY(catalog_add_tensor(catalog, torch_visit_name(visit), view.dtype, view.ndim, view.shape));
    TRY(torch_visit_path(visit, &catalog->tensors[catalog->ntensors - 1].path));
    return catalog_add_array(catalog, origin, view.shape, visit->file->index, &array);
}

/* ---- values ---- */

rsd_status torch_visit_add_value(struct torch_visit *visit, pickle_node c)
{
    struct catalog *catalog = visit->catalog;
    struct bytes pickle = {0};
    char *json = NULL;
    bool plain = false;
    rsd_status status = pickle_to_json(&visit->file->tree, c, &json);
    if (!status)
        status = pickle_to_plain_pickle(&visit->file->tree, c, &pickle, &plain);
    if (!plain)
        bytes_drop(&pickle);
    if (!status)
        status = catalog_add_value(catalog, torch_visit_name(visit),
                                   (struct extent){.kind = EXTENT_NONE}, json);
    if (status) {
        mem_free(json);
        bytes_drop(&pickle);
        return status;
    }
    struct stored_value *value = &catalog->values[catalog->nvalues - 1];
    value->pickle = pickle;
    return torch_visit_path(visit, &value->path);
}

/* ---- what a node contains ---- */

static bool is_any_tensor(const struct pickle_tree *tree, pickle_node c)
{
    return torch_view_is_tensor(tree, c) || torch_is_sharded(tree, c) ||
           torch_is_odd_tensor(tree, c);
}

static bool is_container(const struct pickle_tree *tree, pickle_node c)
{
    enum pickle_kind kind = pickle_kind(tree, c);
    return kind == NODE_DICT || kind == NODE_LIST || kind == NODE_TUPLE || pickle_is_built(tree, c);
}

static bool search_tensor(struct torch_visit *visit, pickle_node c, int depth);

/* Says whether a tensor is in what a container refers to. */
static bool search_parts(struct torch_visit *visit, pickle_node c, int depth)
{
    static const enum pickle_part parts[] = {NODE_ARGS, NODE_STATE, NODE_ITEMS};
    const struct pickle_tree *tree = &visit->file->tree;
    struct pickle_walk walk = pickle_walk(tree, c);
    for (pickle_node item; pickle_walk_next(&walk, &item);)
        if (search_tensor(visit, item, depth))
            return true;
    for (size_t i = 0; i < 3 && pickle_is_built(tree, c); i++)
        if (search_tensor(visit, pickle_part(tree, c, parts[i]), depth))
            return true;
    return false;
}

/* Says whether a tensor is in a node, at any depth. A node is searched once, unless a tensor is in it. */
static bool search_tensor(struct torch_visit *visit, pickle_node c, int depth)
{
    const struct pickle_tree *tree = &visit->file->tree;
    unsigned char bit = (unsigned char)(1 << (c >> 2 & 7));
    if (is_any_tensor(tree, c))
        return true;
    if (!is_container(tree, c) || c == PICKLE_EMPTY_TUPLE)
        return false;
    unsigned char *mark = &visit->without_tensor[c >> 5];
    if (*mark & bit)
        return false;
    if (depth > MAX_SEARCH_DEPTH) /* the visit fails there, so that nothing is left out */
        return true;
    *mark |= bit;
    bool found = search_parts(visit, c, depth + 1);
    if (found)
        *mark &= (unsigned char)~bit;
    return found;
}

static rsd_status has_tensor(struct torch_visit *visit, pickle_node c, bool *found)
{
    if (!visit->without_tensor) {
        size_t nnodes = visit->file->tree.nsegments << visit->file->tree.shift;
        visit->without_tensor = mem_new(nnodes / 8 + 1, 1);
        if (!visit->without_tensor)
            return RSD_ENOMEM;
    }
    *found = search_tensor(visit, c, 0);
    return RSD_OK;
}

/* Says whether a list or tuple has a tensor or dict in it, at any depth. */
static bool has_parts(const struct pickle_tree *tree, pickle_node c, int depth)
{
    struct pickle_walk walk = pickle_walk(tree, c);
    pickle_node item;
    while (depth <= TORCH_MAX_DEPTH && pickle_walk_next(&walk, &item)) {
        enum pickle_kind kind = pickle_kind(tree, item);
        if (is_any_tensor(tree, item) || pickle_is_dict(tree, item) ||
            ((kind == NODE_LIST || kind == NODE_TUPLE) && has_parts(tree, item, depth + 1)))
            return true;
    }
    return false;
}

/* ---- names ---- */

static rsd_status visit_node(struct torch_visit *visit, pickle_node c);

static rsd_status fail_depth(const struct torch_visit *visit)
{
    return fail(RSD_EFORMAT, "%.300s: nesting exceeds %d levels", visit->name,
                (int)TORCH_MAX_DEPTH);
}

/* Returns the length of the name of the current node. */
static size_t base_nbytes(const struct torch_visit *visit)
{
    return visit->nsteps ? visit->steps[visit->nsteps - 1].end : 0;
}

/* Adds a part to the name of the current node. */
static rsd_status push_step(struct torch_visit *visit, struct slice name, bool number)
{
    size_t length = base_nbytes(visit), need = name.nbytes + (length ? 1 : 0);
    if (!budget_take_text(need))
        return budget_fail();
    if (length + need >= sizeof visit->name)
        return fail(RSD_ELIMIT, "name exceeds %d bytes", (int)TORCH_MAX_NAME_NBYTES);
    if (length)
        visit->name[length++] = '.';
    memcpy(visit->name + length, name.bytes, name.nbytes);
    visit->name[length + name.nbytes] = '\0';
    if (visit->nsteps == sizeof visit->steps / sizeof *visit->steps)
        return fail_depth(visit);
    visit->steps[visit->nsteps++] =
        (struct torch_step){length, length + name.nbytes, number, false};
    return RSD_OK;
}

static rsd_status visit_named_node(struct torch_visit *visit, struct slice name, bool number,
                                   pickle_node c)
{
    TRY(push_step(visit, name, number));
    rsd_status status = visit_node(visit, c);
    visit->nsteps--;
    return status;
}

/* Visits what a module has. Its name is added to that of the module, if that is in a module too. */
static rsd_status visit_module_child(struct torch_visit *visit, struct slice name, pickle_node c)
{
    struct torch_step *last = visit->nsteps ? &visit->steps[visit->nsteps - 1] : NULL;
    bool joins = last && last->module;
    size_t length = base_nbytes(visit);
    TRY(push_step(visit, name, false));
    if (joins) {
        visit->nsteps--;
        last->end = visit->steps[visit->nsteps].end;
    }
    visit->steps[visit->nsteps - 1].module = true;
    rsd_status status = visit_node(visit, c);
    if (joins)
        last->end = length;
    else
        visit->nsteps--;
    return status;
}

static bool add_key_text(const struct pickle_tree *tree, pickle_node key, int depth,
                         struct text *text);

/* Adds the items of a list, which is in the call that makes a frozenset. */
static bool add_list_text(const struct pickle_tree *tree, pickle_node list, int depth,
                          struct text *text)
{
    struct pickle_walk walk = pickle_walk(tree, list);
    pickle_node item;
    text_add(text, "[");
    for (bool first = true; pickle_walk_next(&walk, &item); first = false) {
        text_add(text, first ? "" : ", ");
        if (!add_key_text(tree, item, depth, text))
            return false;
    }
    text_add(text, "]");
    return true;
}

/* Adds a key as Python writes it: None, 1.5, b'x', ('a', 0). False: it cannot be written. */
static bool add_key_text(const struct pickle_tree *tree, pickle_node key, int depth,
                         struct text *text)
{
    struct slice bytes = pickle_text(tree, key);
    int64_t number;
    double value;
    char global[GLOBAL_TEXT_NCHARS];
    if (depth > 8 || text->length > TORCH_MAX_NAME_NBYTES)
        return false;
    switch (pickle_kind(tree, key)) {
    case NODE_ATOM:
        text_add(text, "%s", key == PICKLE_NONE ? "None" : key == PICKLE_TRUE ? "True" : "False");
        return true;
    case NODE_INT:
        if (pickle_as_i64(tree, key, &number))
            text_add(text, "%lld", (long long)number);
        return pickle_as_i64(tree, key, &number);
    case NODE_FLOAT:
        memcpy(&value, bytes.bytes, sizeof value);
        text_add(text, "%.17g", value);
        return true;
    case NODE_STRING:
        text_add(text, depth ? "'%.*s'" : "%.*s", (int)bytes.nbytes, bytes.bytes);
        return !memchr(bytes.bytes, '\0', bytes.nbytes);
    case NODE_TUPLE:
        text_add(text, "(");
        for (uint32_t i = 0; i < pickle_count(tree, key); i++) {
            text_add(text, i ? ", " : "");
            if (!add_key_text(tree, pickle_item(tree, key, i), depth + 1, text))
                return false;
        }
        text_add(text, pickle_count(tree, key) == 1 ? ",)" : ")");
        return true;
    case NODE_LIST:
        return add_list_text(tree, key, depth + 1, text);
    case NODE_GLOBAL:
        text_add(text, "%s", pickle_global_text(tree, key, global));
        return true;
    case NODE_CALL:
        return add_key_text(tree, pickle_part(tree, key, NODE_WHAT), depth + 1, text) &&
               add_key_text(tree, pickle_part(tree, key, NODE_ARGS), depth + 1, text);
    default:
        return false;
    }
}

/* Visits an entry whose key is not a string, under a name as Python would print the key. */
static rsd_status visit_odd_key(struct torch_visit *visit, pickle_node key, pickle_node value)
{
    struct text text = {0};
    char *name;
    bool named = add_key_text(&visit->file->tree, key, 0, &text);
    TRY(text_take(&text, &name));
    size_t n = strlen(name);
    rsd_status status = RSD_OK;
    if (named && n < TORCH_MAX_NAME_NBYTES)
        status = visit_named_node(visit, (struct slice){name, n}, false, value);
    else
        status = fail(RSD_EUNSUPPORTED, "%.*s%skey of a dict cannot be written as text",
                      (int)min_i64((int64_t)base_nbytes(visit), 300), visit->name,
                      base_nbytes(visit) ? ": " : "");
    rsd_free(name);
    return status;
}

static rsd_status visit_dict(struct torch_visit *visit, pickle_node dict)
{
    const struct pickle_tree *tree = &visit->file->tree;
    struct pickle_walk walk = pickle_walk_dict(tree, dict);
    pickle_node key, value;
    while (pickle_walk_next_pair(&walk, &key, &value))
        if (pickle_kind(tree, key) == NODE_STRING)
            TRY(visit_named_node(visit, pickle_text(tree, key), false, value));
        else
            TRY(visit_odd_key(visit, key, value));
    return RSD_OK;
}

static rsd_status visit_list(struct torch_visit *visit, pickle_node list)
{
    struct pickle_walk walk = pickle_walk(&visit->file->tree, list);
    pickle_node item;
    for (uint32_t i = 0; pickle_walk_next(&walk, &item); i++) {
        char digits[24];
        snprintf(digits, sizeof digits, "%u", i);
        TRY(visit_named_node(visit, slice_of(digits), true, item));
    }
    return RSD_OK;
}

/* ---- objects ---- */

/* Returns whether a buffer of a module is left out of its state dict. */
static bool is_transient(const struct pickle_tree *tree, pickle_node transient, struct slice name)
{
    if (pickle_kind(tree, transient) == NODE_CALL) { /* set([...]) of protocol 2 */
        pickle_node args = pickle_part(tree, transient, NODE_ARGS);
        transient = pickle_count(tree, args) == 1 ? pickle_item(tree, args, 0) : PICKLE_NONE;
    }
    struct pickle_walk walk = pickle_walk(tree, transient);
    for (pickle_node item; pickle_walk_next(&walk, &item);) {
        struct slice other = pickle_text(tree, item);
        if (other.nbytes == name.nbytes && budget_take_text(name.nbytes) &&
            slice_equal(other, name))
            return true;
    }
    return false;
}

/* Visits what a dict of a module has by the names that the state dict of the module has. */
static rsd_status visit_module_part(struct torch_visit *visit, pickle_node dict,
                                    pickle_node transient)
{
    const struct pickle_tree *tree = &visit->file->tree;
    struct pickle_walk walk = pickle_walk_dict(tree, dict);
    pickle_node key, value;
    while (pickle_walk_next_pair(&walk, &key, &value)) {
        struct slice name = pickle_text(tree, key);
        bool found;
        TRY(has_tensor(visit, value, &found));
        if (found && !is_transient(tree, transient, name))
            TRY(visit_module_child(visit, name, value));
    }
    return RSD_OK;
}

/* Visits the attributes in a dict that have a tensor in them. */
static rsd_status visit_attributes(struct torch_visit *visit, pickle_node dict, bool module)
{
    const struct pickle_tree *tree = &visit->file->tree;
    pickle_node transient = pickle_find(tree, dict, "_non_persistent_buffers_set");
    struct pickle_walk walk = pickle_walk(tree, dict);
    pickle_node key, value;
    while (pickle_kind(tree, dict) == NODE_DICT && pickle_walk_next_pair(&walk, &key, &value)) {
        struct slice name = pickle_text(tree, key);
        bool found, part = module && (slice_is(name, "_parameters") || slice_is(name, "_modules") ||
                                      slice_is(name, "_buffers"));
        if (part) {
            TRY(visit_module_part(visit, value,
                                  slice_is(name, "_buffers") ? transient : PICKLE_NONE));
            continue;
        }
        TRY(has_tensor(visit, value, &found));
        if (found && pickle_kind(tree, key) == NODE_STRING)
            TRY(visit_named_node(visit, name, false, value));
    }
    return RSD_OK;
}

/* Visits an object with a tensor in it: its items, its attributes, and what it was made of. */
static rsd_status visit_object(struct torch_visit *visit, pickle_node c)
{
    const struct pickle_tree *tree = &visit->file->tree;
    pickle_node items = pickle_part(tree, c, NODE_ITEMS), state = pickle_part(tree, c, NODE_STATE),
                args = pickle_part(tree, c, NODE_ARGS);
    bool found, pair = pickle_kind(tree, state) == NODE_TUPLE && pickle_count(tree, state) == 2;
    if (items != PICKLE_ABSENT)
        TRY(pickle_kind(tree, items) == NODE_DICT ? visit_dict(visit, items)
                                                  : visit_list(visit, items));
    bool module = pickle_find(tree, state, "_parameters") != PICKLE_ABSENT &&
                  pickle_find(tree, state, "_modules") != PICKLE_ABSENT;
    for (uint32_t i = 0; i < 2 && pair; i++)
        TRY(visit_attributes(visit, pickle_item(tree, state, i), false));
    if (!pair && pickle_kind(tree, state) == NODE_DICT)
        return visit_attributes(visit, state, module);
    TRY(has_tensor(visit, args, &found));
    if (found)
        TRY(visit_list(visit, args));
    if (pair || state == PICKLE_ABSENT)
        return RSD_OK;
    TRY(has_tensor(visit, state, &found));
    return found ? visit_named_node(visit, slice_of("state"), false, state) : RSD_OK;
}

/* ---- nodes ---- */

/* Says whether the node is one of those in which the current node is. */
static bool is_on_path(const struct torch_visit *visit, pickle_node c)
{
    for (size_t i = 0; i < visit->ncontainers; i++)
        if (visit->containers[i] == c)
            return true;
    return false;
}

/* Passes a tensor or a value to the visitor. */
static rsd_status visit_leaf(struct torch_visit *visit, pickle_node c)
{
    bool tensor = is_any_tensor(&visit->file->tree, c);
    rsd_status status = RSD_OK;
    visit->name_nbytes = base_nbytes(visit);
    if (visit->name_nbytes == 0) /* the file is one tensor or one value */
        visit->name_nbytes =
            (size_t)snprintf(visit->name, sizeof visit->name, "%s", tensor ? "tensor" : "value");
    if (tensor)
        status = visit->on_tensor ? visit->on_tensor(visit, c) : torch_visit_add_tensor(visit, c);
    else
        status = visit->on_value ? visit->on_value(visit, c) : torch_visit_add_value(visit, c);
    return status ? fail_in(status, "%.300s: ", visit->name) : RSD_OK;
}

/* Visits what is in a container. One without a tensor is a value as a whole. */
static rsd_status visit_container(struct torch_visit *visit, pickle_node c)
{
    const struct pickle_tree *tree = &visit->file->tree;
    enum pickle_kind kind = pickle_kind(tree, c);
    bool found = false;
    if (pickle_is_dict(tree, c)) {
        if (kind != NODE_DICT)
            TRY(has_tensor(visit, pickle_part(tree, c, NODE_STATE), &found));
        return found ? visit_object(visit, c) : visit_dict(visit, c);
    }
    if (kind == NODE_LIST || kind == NODE_TUPLE)
        return has_parts(tree, c, 0) ? visit_list(visit, c) : visit_leaf(visit, c);
    TRY(has_tensor(visit, c, &found));
    return found ? visit_object(visit, c) : visit_leaf(visit, c);
}

/* Visits a node, and what is below it. A node that contains itself is a value. */
static rsd_status visit_node(struct torch_visit *visit, pickle_node c)
{
    const struct pickle_tree *tree = &visit->file->tree;
    if (!budget_take(VISIT_STEPS + base_nbytes(visit) / STEP_NBYTES))
        return fail_in(budget_fail(), "%.300s: ", visit->name);
    if (!is_container(tree, c) || is_any_tensor(tree, c) || is_on_path(visit, c))
        return visit_leaf(visit, c);
    if (visit->ncontainers == sizeof visit->containers / sizeof *visit->containers)
        return fail_depth(visit);
    visit->containers[visit->ncontainers++] = c;
    rsd_status status = visit_container(visit, c);
    visit->ncontainers--;
    return status;
}

/* ---- the visit ---- */

rsd_status torch_visit_file(struct torch_visit *visit, struct store *store, uint32_t index,
                            rsd_status (*run)(struct torch_visit *visit))
{
    rsd_status status = torch_file_open(&visit->opened, store, index);
    if (!status) {
        visit->file = &visit->opened;
        status = run(visit);
        torch_visit_end(visit);
        torch_file_close(&visit->opened);
    }
    return status ? store_fail_in(store, index, status) : RSD_OK;
}

void torch_visit_end(struct torch_visit *visit)
{
    mem_free(visit->without_tensor);
    visit->without_tensor = NULL;
}

rsd_status torch_visit_enter(struct torch_visit *visit, struct slice part)
{
    return push_step(visit, part, false);
}

void torch_visit_leave(struct torch_visit *visit)
{
    visit->nsteps--;
}

rsd_status torch_visit_run(struct torch_visit *visit, pickle_node c)
{
    visit->name[base_nbytes(visit)] = '\0';
    visit->ncontainers = 0;
    return visit_node(visit, c);
}

rsd_status torch_visit_part(struct torch_visit *visit, struct slice part, pickle_node c)
{
    TRY(torch_visit_enter(visit, part));
    TRY(torch_visit_run(visit, c));
    torch_visit_leave(visit);
    return RSD_OK;
}
