/* optimizer_write.c - writes the state of an optimizer as its ranks save it.
 *
 *     optimizer.state.PARAMETER.KEY       becomes   {state: {0: {KEY: ...}, ...},
 *     optimizer.param_groups.I.KEY                   param_groups: [{KEY: ..., params: [0, ...], param_names: [...]}]}
 *     lr_scheduler.KEY                              {lr_scheduler: {KEY: ...}}
 *
 * The first part of the names of values may also be optim. Parameters are numbered in the order of param_groups. Their names
 * are written too, because the order of the parameters of a model is not known to a reader of the files.
 */
#include "dtensor_write.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char scheduler_name[] = "lr_scheduler", groups_key[] = "param_groups";
static const char *const roots[] = {"optimizer", "optim", NULL};

enum { MAX_VALUE_DEPTH = 16 };

static bool is_at_or_below(const char *name, const char *prefix)
{
    size_t n = strlen(prefix);
    return strncmp(name, prefix, n) == 0 && (!name[n] || name[n] == '.');
}

/* Returns the first part of the name of an optimizer's tensor or value; NULL: it is not one. */
static const char *find_root(const char *name)
{
    for (const char *const *root = roots; *root; root++)
        if (is_at_or_below(name, *root) && name[strlen(*root)])
            return *root;
    return NULL;
}

bool optimizer_has_tensor(const char *name)
{
    return find_root(name) != NULL;
}

/* Returns the name behind ROOT.state., or NULL. */
static const char *behind_state(const char *name)
{
    const char *root = find_root(name), *rest = root ? name + strlen(root) + 1 : "";
    return strncmp(rest, "state.", 6) == 0 ? rest + 6 : NULL;
}

bool optimizer_holds_value(const struct manifest *manifest, const char *name)
{
    const char *root = find_root(name);
    bool any = false;
    if (is_at_or_below(name, scheduler_name))
        return true;
    for (size_t t = 0; t < manifest->catalog.ntensors && root && !any; t++)
        any = optimizer_has_tensor(manifest->catalog.tensors[t].name);
    return any && (is_at_or_below(name + strlen(root) + 1, groups_key) || behind_state(name));
}

/* ---- values ---- */

/* The values of the manifest at or below a name. */
struct value_list {
    const struct manifest *manifest;
    size_t *list, n, capacity;
};

/* Lists the values at or below a name. The caller frees the list, also on failure. */
static rsd_status list_values(const struct manifest *manifest, const char *prefix,
                              struct value_list *values)
{
    *values = (struct value_list){.manifest = manifest};
    for (size_t i = 0; i < manifest->catalog.nvalues; i++) {
        if (!is_at_or_below(manifest->catalog.values[i].name, prefix))
            continue;
        TRY(GROW(values->list, values->capacity, values->n + 1));
        values->list[values->n++] = i;
    }
    return RSD_OK;
}

static const char *value_name(const struct value_list *values, size_t i)
{
    return values->manifest->catalog.values[values->list[i]].name;
}

/* Adds the pickle of a value without what begins and ends a pickle. */
static void splice_pickle(struct bytes *out, const struct bytes *pickle)
{
    if (pickle->n > 3)
        bytes_put(out, pickle->data + 2, pickle->n - 3);
}

/* Finds value i or a later one that is below a prefix under another key than all before it. */
static bool next_key(const struct value_list *values, const char *prefix, size_t *i,
                     struct slice *key)
{
    size_t n = strlen(prefix);
    for (; *i < values->n; ++*i) {
        const char *name = value_name(values, *i);
        bool known = false;
        if (!is_at_or_below(name, prefix) || !name[n])
            continue;
        *key = (struct slice){name + n + 1, strcspn(name + n + 1, ".")};
        for (size_t k = 0; k < *i && !known; k++) {
            const char *before = value_name(values, k);
            known = strncmp(before, name, n + 1 + key->nbytes) == 0 &&
                    (!before[n + 1 + key->nbytes] || before[n + 1 + key->nbytes] == '.');
        }
        ++*i;
        if (!known)
            return true;
        --*i;
    }
    return false;
}

/* Returns how many keys are below a prefix; *list: they are 0, 1, 2, ... in any order. */
static size_t count_keys(const struct value_list *values, const char *prefix, bool *list)
{
    struct slice key;
    size_t n = 0, most = 0;
    *list = true;
    for (size_t i = 0; next_key(values, prefix, &i, &key); n++) {
        size_t number = 0;
        *list = *list && key.nbytes < 8;
        for (size_t k = 0; k < key.nbytes && *list; k++) {
            *list = key.bytes[k] >= '0' && key.bytes[k] <= '9' && (k == 0 || number > 0);
            number = number * 10 + (size_t)(key.bytes[k] - '0');
        }
        most = number > most ? number : most;
    }
    *list = *list && n > 0 && most == n - 1;
    return n;
}

/* Returns the name of a key below a prefix, which the caller frees; NULL: no memory. */
static char *join_key(const char *prefix, struct slice key)
{
    struct text text = {0};
    char *joined = NULL;
    text_add(&text, "%s.%.*s", prefix, (int)key.nbytes, key.bytes);
    return text_take(&text, &joined) ? NULL : joined;
}

static rsd_status put_values(const struct value_list *values, const char *prefix, int depth,
                             struct bytes *out);

/* Writes the values below a prefix under one key. */
static rsd_status put_values_below(const struct value_list *values, const char *prefix,
                                   struct slice key, int depth, struct bytes *out)
{
    char *below = join_key(prefix, key);
    if (!below)
        return RSD_ENOMEM;
    rsd_status status = put_values(values, below, depth + 1, out);
    rsd_free(below);
    return status;
}

/* Writes the value at a name, or the dict or list of the values below it; None: there is none. */
static rsd_status put_values(const struct value_list *values, const char *prefix, int depth,
                             struct bytes *out)
{
    struct slice key;
    bool list;
    size_t n = count_keys(values, prefix, &list);
    if (depth > MAX_VALUE_DEPTH)
        return fail(RSD_ELIMIT, "%s: nesting exceeds %d levels", prefix, (int)MAX_VALUE_DEPTH);
    for (size_t i = 0; i < values->n; i++)
        if (strcmp(value_name(values, i), prefix) == 0) {
            splice_pickle(out, &values->manifest->values[values->list[i]].item);
            return RSD_OK;
        }
    pickle_write_op(out, n == 0 ? "N" : list ? "](" : "}(");
    for (size_t k = 0; k < n && list; k++) {
        char number[24];
        key = (struct slice){number, (size_t)snprintf(number, sizeof number, "%zu", k)};
        TRY(put_values_below(values, prefix, key, depth, out));
    }
    for (size_t i = 0; !list && next_key(values, prefix, &i, &key);) {
        pickle_write_text(out, key);
        TRY(put_values_below(values, prefix, key, depth, out));
    }
    pickle_write_op(out, n == 0 ? "" : list ? "e" : "u");
    return RSD_OK;
}

/* ---- groups ---- */

struct written_group {
    struct bytes entries;        /* keys and values but the parameters, pickled */
    size_t first_param, nparams; /* numbers */
};

struct written_optimizer {
    struct string_map ids; /* of names of parameters */
    char **params;         /* names, by number */
    size_t nparams, params_capacity;
    struct written_group *groups;
    size_t ngroups, groups_capacity;
};

static void drop_optimizer(struct written_optimizer *optimizer)
{
    for (size_t i = 0; i < optimizer->nparams; i++)
        rsd_free(optimizer->params[i]);
    for (size_t i = 0; i < optimizer->ngroups; i++)
        bytes_drop(&optimizer->groups[i].entries);
    string_map_drop(&optimizer->ids);
    mem_free(optimizer->params);
    mem_free(optimizer->groups);
}

/* Adds a parameter to the last group: a name, or a number as a text. */
static rsd_status add_param(struct written_optimizer *optimizer, const struct pickle_tree *tree,
                            pickle_node item)
{
    struct text text = {0};
    struct slice name = pickle_text(tree, item);
    int64_t number;
    size_t known;
    TRY(GROW(optimizer->params, optimizer->params_capacity, optimizer->nparams + 1));
    if (pickle_as_i64(tree, item, &number))
        text_add(&text, "%lld", (long long)number);
    else if (pickle_kind(tree, item) == NODE_STRING && !memchr(name.bytes, '\0', name.nbytes))
        text_add(&text, "%.*s", (int)name.nbytes, name.bytes);
    else
        return fail(RSD_EUNSUPPORTED, "%s: params are neither names nor numbers", groups_key);
    TRY(text_take(&text, &optimizer->params[optimizer->nparams]));
    struct slice own = slice_of(optimizer->params[optimizer->nparams]);
    optimizer->nparams++;
    if (string_map_find(&optimizer->ids, own, &known))
        return fail(RSD_EUNSUPPORTED, "%s: parameter %s is in two groups", groups_key, own.bytes);
    return string_map_add(&optimizer->ids, own, optimizer->nparams - 1);
}

/* Adds the parameters of the last group. */
static rsd_status add_params(struct written_optimizer *optimizer, const struct pickle_tree *tree,
                             pickle_node params)
{
    struct pickle_walk walk = pickle_walk(tree, params);
    pickle_node item;
    if (pickle_kind(tree, params) != NODE_LIST)
        return fail(RSD_EUNSUPPORTED, "%s: params are not a list", groups_key);
    while (pickle_walk_next(&walk, &item))
        TRY(add_param(optimizer, tree, item));
    struct written_group *group = &optimizer->groups[optimizer->ngroups - 1];
    group->nparams = optimizer->nparams - group->first_param;
    return RSD_OK;
}

/* Adds a group without entries. */
static rsd_status start_param_group(struct written_optimizer *optimizer)
{
    TRY(GROW(optimizer->groups, optimizer->groups_capacity, optimizer->ngroups + 1));
    optimizer->groups[optimizer->ngroups++] =
        (struct written_group){.first_param = optimizer->nparams};
    return RSD_OK;
}

static bool is_param_list(struct slice key)
{
    return slice_is(key, "params") || slice_is(key, "param_names");
}

/* Adds a group that is one dict. */
static rsd_status add_param_group(struct written_optimizer *optimizer,
                                  const struct pickle_tree *tree, pickle_node dict)
{
    TRY(start_param_group(optimizer));
    struct written_group *group = &optimizer->groups[optimizer->ngroups - 1];
    struct pickle_walk walk = pickle_walk_dict(tree, dict);
    pickle_node key, value;
    while (pickle_walk_next_pair(&walk, &key, &value)) {
        struct bytes pickle = {0};
        bool plain = false;
        if (pickle_kind(tree, key) != NODE_STRING || is_param_list(pickle_text(tree, key)))
            continue;
        rsd_status status = pickle_to_plain_pickle(tree, value, &pickle, &plain);
        if (!status && plain) {
            pickle_write_text(&group->entries, pickle_text(tree, key));
            splice_pickle(&group->entries, &pickle);
        }
        bytes_drop(&pickle);
        TRY(status);
    }
    return add_params(optimizer, tree, pickle_find(tree, dict, "params"));
}

/* Adds all groups, which are one value. */
static rsd_status add_group_list(struct written_optimizer *optimizer,
                                 const struct pickle_tree *tree, pickle_node list)
{
    struct pickle_walk walk = pickle_walk(tree, list);
    pickle_node group;
    if (pickle_kind(tree, list) != NODE_LIST)
        return fail(RSD_EUNSUPPORTED, "%s is not a list", groups_key);
    while (pickle_walk_next(&walk, &group))
        TRY(add_param_group(optimizer, tree, group));
    return RSD_OK;
}

typedef rsd_status use_tree(struct written_optimizer *optimizer, const struct pickle_tree *tree,
                            pickle_node root);

/* Reads a value, and passes it on. */
static rsd_status read_value(const struct value_list *values, size_t i,
                             struct written_optimizer *optimizer, use_tree *use)
{
    const struct bytes *item = &values->manifest->values[values->list[i]].item;
    struct pickle_tree tree;
    pickle_node root;
    uint64_t used;
    rsd_status status = pickle_read_memory(item->data, item->n, &tree, &root, &used);
    if (!status)
        status = use(optimizer, &tree, root);
    pickle_tree_drop(&tree);
    return status;
}

/* Adds a group that is a value for each key, at a name. */
static rsd_status add_group_values(struct written_optimizer *optimizer,
                                   const struct value_list *values, const char *at)
{
    struct slice key;
    bool found = false;
    TRY(start_param_group(optimizer));
    for (size_t i = 0; next_key(values, at, &i, &key);) {
        struct written_group *group = &optimizer->groups[optimizer->ngroups - 1];
        if (slice_is(key, "params")) {
            TRY(read_value(values, i - 1, optimizer, add_params));
            found = true;
        }
        if (is_param_list(key))
            continue;
        pickle_write_text(&group->entries, key);
        TRY(put_values_below(values, at, key, 0, &group->entries));
    }
    return found ? RSD_OK : fail(RSD_EUNSUPPORTED, "%s.params is missing", at);
}

/* Adds the groups, whose values have the name or are below it. */
static rsd_status find_groups(const struct value_list *values, const char *groups_name,
                              struct written_optimizer *optimizer)
{
    bool list;
    size_t n = count_keys(values, groups_name, &list);
    for (size_t i = 0; i < values->n; i++)
        if (strcmp(value_name(values, i), groups_name) == 0)
            return read_value(values, i, optimizer, add_group_list);
    if (!list)
        return fail(RSD_EUNSUPPORTED,
                    "there are no values %s.0, without which an optimizer of torch loads no state; "
                    "leave the optimizer out (--exclude)",
                    groups_name);
    for (size_t g = 0; g < n; g++) {
        char number[24];
        int length = snprintf(number, sizeof number, "%zu", g);
        char *at = join_key(groups_name, (struct slice){number, (size_t)length});
        if (!at)
            return RSD_ENOMEM;
        rsd_status status = add_group_values(optimizer, values, at);
        rsd_free(at);
        TRY(status);
    }
    return RSD_OK;
}

/* Writes the list of groups, with the numbers and names of their parameters. */
static void put_groups(const struct written_optimizer *optimizer, struct bytes *out)
{
    pickle_write_op(out, "](");
    for (size_t g = 0; g < optimizer->ngroups; g++) {
        const struct written_group *group = &optimizer->groups[g];
        pickle_write_op(out, "}(");
        bytes_put(out, group->entries.data, group->entries.n);
        pickle_write_string(out, "params");
        pickle_write_op(out, "](");
        for (size_t i = 0; i < group->nparams; i++)
            pickle_write_int(out, (int64_t)(group->first_param + i));
        pickle_write_op(out, "e");
        pickle_write_string(out, "param_names");
        pickle_write_op(out, "](");
        for (size_t i = 0; i < group->nparams; i++)
            pickle_write_string(out, optimizer->params[group->first_param + i]);
        pickle_write_op(out, "eu");
    }
    pickle_write_op(out, "e");
}

/* ---- states ---- */

/* A tensor or value of one parameter. */
struct param_state {
    size_t id, index; /* the parameter; the tensor, or behind all tensors the value */
};

static int by_param(const void *a, const void *b)
{
    const struct param_state *x = a, *y = b;
    if (x->id != y->id)
        return x->id < y->id ? -1 : 1;
    return (x->index > y->index) - (x->index < y->index);
}

static const char *state_name(const struct catalog *catalog, size_t index)
{
    return index < catalog->ntensors ? catalog->tensors[index].name
                                     : catalog->values[index - catalog->ntensors].name;
}

/* Finds the parameter of a state by its name, which ends in the key. */
static rsd_status find_state_param(const struct written_optimizer *optimizer, const char *name,
                                   size_t *id)
{
    const char *param = behind_state(name), *dot = strrchr(name, '.');
    bool found = param && dot > param &&
                 string_map_find(&optimizer->ids, (struct slice){param, (size_t)(dot - param)}, id);
    return found ? RSD_OK
                 : fail(RSD_EUNSUPPORTED,
                        "%.300s is not the state of a parameter in %s; leave it out (--exclude)",
                        name, groups_key);
}

/* Lists the states of all parameters, sorted by parameter. */
static rsd_status list_states(const struct catalog *catalog,
                              const struct written_optimizer *optimizer, struct param_state *states,
                              size_t *n)
{
    *n = 0;
    for (size_t i = 0; i < catalog->ntensors + catalog->nvalues; i++) {
        const char *name = state_name(catalog, i);
        if (i < catalog->ntensors ? !optimizer_has_tensor(name) : !behind_state(name))
            continue;
        if (i < catalog->ntensors && !is_at_or_below(name, roots[0])) /* readers name them so */
            return fail(
                RSD_EUNSUPPORTED,
                "%.300s: states must be named %s.state.PARAMETER.KEY; rename them (--rename "
                "'s/^%s[.]/%s./')",
                name, roots[0], find_root(name), roots[0]);
        states[*n].index = i;
        TRY(find_state_param(optimizer, name, &states[*n].id));
        ++*n;
    }
    if (*n > 1)
        qsort(states, *n, sizeof *states, by_param);
    return RSD_OK;
}

/* Writes the states: a dict for each parameter that has one. */
static void put_states(struct dtensor_pickle *pickle, const struct param_state *states, size_t n)
{
    const struct manifest *manifest = pickle->manifest;
    struct bytes *out = pickle->out;
    size_t ntensors = manifest->catalog.ntensors;
    pickle_write_op(out, "}(");
    for (size_t i = 0; i < n; i++) {
        if (i == 0 || states[i].id != states[i - 1].id) {
            pickle_write_int(out, (int64_t)states[i].id);
            pickle_write_op(out, "}(");
        }
        pickle_write_string(out, strrchr(state_name(&manifest->catalog, states[i].index), '.') + 1);
        if (states[i].index < ntensors)
            dtensor_put_tensor(pickle, states[i].index);
        else
            splice_pickle(out, &manifest->values[states[i].index - ntensors].item);
        if (i + 1 == n || states[i].id != states[i + 1].id)
            pickle_write_op(out, "u");
    }
    pickle_write_op(out, "u");
}

/* The name of the groups: below the first root that has such values. */
static void name_groups(const struct catalog *catalog, char name[FILE_NAME_NCHARS])
{
    for (const char *const *root = roots; *root; root++) {
        snprintf(name, FILE_NAME_NCHARS, "%s.%s", *root, groups_key);
        for (size_t i = 0; i < catalog->nvalues; i++)
            if (is_at_or_below(catalog->values[i].name, name))
                return;
    }
    snprintf(name, FILE_NAME_NCHARS, "%s.%s", roots[0], groups_key);
}

/* Fails if a parameter is not a tensor of the model. Parameters without names are numbers. */
static rsd_status check_params(const struct catalog *catalog,
                               const struct written_optimizer *optimizer)
{
    for (size_t i = 0; i < optimizer->nparams; i++) {
        const char *name = optimizer->params[i];
        if (name[strspn(name, "0123456789")] && catalog_find_tensor(catalog, name) == SIZE_MAX)
            return fail(RSD_EUNSUPPORTED,
                        "%s names the parameter %.300s, and the output has no tensor of this name; "
                        "rename tensors so, or leave the optimizer out (--exclude)",
                        groups_key, name);
    }
    return RSD_OK;
}

rsd_status optimizer_put_dict(struct dtensor_pickle *pickle)
{
    const struct catalog *catalog = &pickle->manifest->catalog;
    struct written_optimizer optimizer = {0};
    struct value_list values = {0};
    char name[FILE_NAME_NCHARS];
    size_t n = 0;
    struct param_state *states = mem_new(catalog->ntensors + catalog->nvalues, sizeof *states);
    name_groups(catalog, name);
    rsd_status status = states ? list_values(pickle->manifest, name, &values) : RSD_ENOMEM;
    if (!status)
        status = find_groups(&values, name, &optimizer);
    if (!status)
        status = check_params(catalog, &optimizer);
    if (!status)
        status = list_states(catalog, &optimizer, states, &n);
    if (!status) {
        pickle_write_op(pickle->out, "}(");
        pickle_write_string(pickle->out, "state");
        put_states(pickle, states, n);
        pickle_write_string(pickle->out, "param_groups");
        put_groups(&optimizer, pickle->out);
        pickle_write_op(pickle->out, "u");
    }
    for (size_t i = 0; i < optimizer.ngroups && !status; i++)
        status = optimizer.groups[i].entries.failed ? RSD_ENOMEM : RSD_OK;
    drop_optimizer(&optimizer);
    mem_free(values.list);
    mem_free(states);
    return status;
}

/* ---- the learning rate ---- */

rsd_status optimizer_put_extra_files(const struct manifest *manifest, struct store *store)
{
    struct value_list values = {0};
    struct bytes pickle = {0}, item = {0};
    rsd_status status = list_values(manifest, scheduler_name, &values);
    pickle_write_op(&pickle, "\x80\x02}");
    pickle_write_string(&pickle, scheduler_name);
    if (!status)
        status = put_values(&values, scheduler_name, 0, &pickle);
    pickle_write_op(&pickle, "s.");
    if (!status)
        status = pickle.failed ? RSD_ENOMEM : torch_item_from_pickle(&pickle, &item);
    for (int64_t rank = 0; rank < manifest->nranks && !status; rank++) {
        char name[FILE_NAME_NCHARS];
        snprintf(name, sizeof name, "extra_state_world_size_%lld_rank_%lld.pt",
                 (long long)manifest->nranks, (long long)rank);
        status = store_put(store, name, item.data, item.n);
    }
    bytes_drop(&pickle);
    bytes_drop(&item);
    mem_free(values.list);
    return status;
}
