/* zero_states.c - where DeepSpeed keeps fp32 parameters and optimizer states: flat vectors.
 *
 *     stages 1 and 2   A group is one vector, padded at its end, and cut into equal parts, one per rank. Some
 *                      files leave the padding out. param_alignment_paddings says what is between parameters.
 *     stage 3          Each parameter is cut into equal parts, one per rank; the last ones are padded. A rank
 *                      has its parts of a sub-group one after the other.
 */
#include "zero.h"

/* The file of one rank, while it is read. */
struct partition_file {
    struct zero_reader *reader;
    struct torch_file *file;
    uint32_t rank;
    pickle_node states; /* optimizer_state_dict */
    uint32_t nvectors;  /* groups, or sub-groups of stage 3 */
    int64_t *ids;       /* by group: its number in the state of the optimizer */
};

/* ---- one rank ---- */

/* Adds the fp32 vectors, one per group. */
static rsd_status add_master_runs(struct partition_file *part, pickle_node list)
{
    struct pickle_walk walk = pickle_walk(&part->file->tree, list);
    pickle_node tensor;
    uint32_t group = 0;
    for (; pickle_walk_next(&walk, &tensor); group++) {
        if (!torch_view_is_tensor(&part->file->tree, tensor))
            return fail(RSD_EUNSUPPORTED, "fp32 vector of group %u is not a tensor", group);
        TRY(flat_set_add_run(&part->reader->trained.set, 0, group, part->rank, part->file, tensor));
    }
    part->nvectors = group;
    return RSD_OK;
}

/* Adds the optimizer's states of one group. */
static rsd_status add_group_states(struct partition_file *part, uint32_t group, pickle_node states)
{
    const struct pickle_tree *tree = &part->file->tree;
    struct pickle_walk walk = pickle_walk_dict(tree, states);
    pickle_node key, value;
    while (pickle_walk_next_pair(&walk, &key, &value)) {
        struct slice name = pickle_text(tree, key);
        if (pickle_kind(tree, key) != NODE_STRING || name.nbytes == 0)
            return fail(RSD_EFORMAT, "optimizer state has a key that is not a name");
        rsd_status status = flat_set_add_state(&part->reader->trained.set, name, group, part->rank,
                                               part->file, value);
        if (status)
            return fail_in(status, "%.*s of group %u: ", slice_width(name, 100), name.bytes, group);
    }
    return RSD_OK;
}

/* Sets part->ids: the number of each group in the optimizer, which is its own in stage 3, else the first of its
 * params. */
static rsd_status read_state_ids(struct partition_file *part, pickle_node optimizer)
{
    const struct pickle_tree *tree = &part->file->tree;
    pickle_node groups = pickle_find(tree, optimizer, "param_groups"), dict, first;
    struct pickle_walk walk = pickle_walk(tree, groups);
    part->ids = mem_new(part->nvectors, sizeof *part->ids);
    if (!part->ids)
        return RSD_ENOMEM;
    for (uint32_t i = 0; i < part->nvectors; i++) {
        part->ids[i] = i;
        if (part->reader->trained.set.each_cut || pickle_kind(tree, groups) != NODE_LIST ||
            !pickle_walk_next(&walk, &dict))
            continue;
        pickle_node params = pickle_find(tree, dict, "params");
        struct pickle_walk list = pickle_walk(tree, params);
        if (pickle_kind(tree, params) == NODE_LIST && pickle_walk_next(&list, &first))
            pickle_as_i64(tree, first, &part->ids[i]);
    }
    return RSD_OK;
}

/* Finds the group of a state by its id. Usually ids are the numbers of groups. */
static rsd_status find_state_group(struct partition_file *part, int64_t id, uint32_t *group)
{
    if (id >= 0 && id < part->nvectors && part->ids[id] == id) {
        *group = (uint32_t)id;
        return RSD_OK;
    }
    if (!budget_take(part->nvectors))
        return budget_fail();
    for (*group = 0; *group < part->nvectors; ++*group)
        if (part->ids[*group] == id)
            return RSD_OK;
    return fail(RSD_EFORMAT, "optimizer has state %lld, which belongs to no group", (long long)id);
}

/* Adds the states of {state: {id: states}, param_groups}, or of a list with one dict per group. */
static rsd_status add_optimizer_states(struct partition_file *part, pickle_node optimizer)
{
    const struct pickle_tree *tree = &part->file->tree;
    pickle_node key, value, states = pickle_find(tree, optimizer, "state");
    uint32_t group = 0;
    int64_t id;
    if (pickle_kind(tree, optimizer) == NODE_LIST) {
        struct pickle_walk list = pickle_walk(tree, optimizer);
        for (; pickle_walk_next(&list, &value); group++) {
            if (group == part->nvectors)
                return fail(RSD_EFORMAT, "optimizer has states of more than %u groups",
                            part->nvectors);
            TRY(add_group_states(part, group, value));
        }
        return RSD_OK;
    }
    struct pickle_walk walk = pickle_walk_dict(tree, states);
    while (pickle_walk_next_pair(&walk, &key, &value)) {
        if (!pickle_as_i64(tree, key, &id))
            return fail(RSD_EFORMAT, "optimizer state has a key that is not a number");
        TRY(find_state_group(part, id, &group));
        TRY(add_group_states(part, group, value));
    }
    return RSD_OK;
}

/* ---- how many ranks ---- */

/* Reads the number of ranks over which the vectors are cut. *count is 0 if the file does not say it. */
static rsd_status read_partition_count(const struct partition_file *part, int64_t *count)
{
    const struct pickle_tree *tree = &part->file->tree;
    pickle_node node = pickle_find(tree, part->states, "partition_count"), item;
    *count = 0;
    if (pickle_kind(tree, node) != NODE_LIST) {
        pickle_as_i64(tree, node, count);
        return RSD_OK;
    }
    struct pickle_walk walk = pickle_walk(tree, node);
    while (pickle_walk_next(&walk, &item)) {
        int64_t one = 0;
        if (pickle_as_i64(tree, item, &one) && *count > 0 && one != *count)
            return fail(RSD_EUNSUPPORTED,
                        "groups are cut over %lld and %lld ranks; groups that differ are not "
                        "supported",
                        (long long)*count, (long long)one);
        *count = one;
    }
    return RSD_OK;
}

/* Checks that as many ranks have files as have written the checkpoint. */
static rsd_status check_partition_count(const struct partition_file *part)
{
    int64_t count, noptim = part->reader->files.noptim;
    TRY(read_partition_count(part, &count));
    if (count > noptim)
        return fail(RSD_ENOENT,
                    "%lld ranks wrote the checkpoint; the optimizer file of rank %lld is missing",
                    (long long)count, (long long)noptim);
    if (count > 0 && count < noptim)
        return fail(RSD_EUNSUPPORTED,
                    "vectors are cut over %lld ranks, and %lld ranks have files: partition groups "
                    "(MiCS) are not supported",
                    (long long)count, (long long)noptim);
    return RSD_OK;
}

/* ---- placing parameters ---- */

/* Reads the paddings between the parameters of stages 1 and 2: a list per group, with one number each. All ranks have
 * the same. */
static rsd_status read_paddings(struct partition_file *part)
{
    const struct pickle_tree *tree = &part->file->tree;
    struct zero_reader *reader = part->reader;
    pickle_node groups = pickle_find(tree, part->states, "param_alignment_paddings"), list, item;
    struct pickle_walk walk = pickle_walk(tree, groups);
    size_t i = 0;
    if (pickle_kind(tree, groups) != NODE_LIST)
        return RSD_OK;
    for (uint32_t group = 0; pickle_walk_next(&walk, &list); group++) {
        struct pickle_walk items = pickle_walk(tree, list);
        for (; i < reader->trained.n && reader->trained.params[i].group == group; i++) {
            int64_t padding = -1;
            if (pickle_kind(tree, list) != NODE_LIST || !pickle_walk_next(&items, &item) ||
                !pickle_as_i64(tree, item, &padding) || padding < 0 || padding > MAX_EXTENT)
                return fail(RSD_EFORMAT, "param_alignment_paddings of group %u is invalid", group);
            if (part->rank > 0 && reader->trained.params[i].padding != padding)
                return fail(RSD_EFORMAT,
                            "param_alignment_paddings of group %u differs from that of rank 0",
                            group);
            reader->trained.params[i].padding = padding;
        }
    }
    return RSD_OK;
}

/* ---- all ranks ---- */

/* Reads the vectors and states in the file of one rank, and compares it with that of rank 0. */
static rsd_status read_partition(struct torch_visit *visit)
{
    struct partition_file *part = visit->context;
    const struct pickle_tree *tree = &visit->file->tree;
    struct zero_reader *reader = part->reader;
    uint32_t nvectors = part->nvectors; /* of the rank before */
    part->file = visit->file;
    part->states = pickle_find(tree, part->file->root, "optimizer_state_dict");
    pickle_node list = pickle_find(tree, part->states, "fp32_flat_groups");
    bool each_cut = pickle_kind(tree, list) == NODE_LIST;
    if (!each_cut)
        list = pickle_find(tree, part->states, "single_partition_of_fp32_groups");
    if (pickle_kind(tree, list) != NODE_LIST)
        return fail(RSD_EFORMAT, "found no fp32 vectors: neither fp32_flat_groups nor "
                                 "single_partition_of_fp32_groups is a list");
    if (part->rank == 0)
        reader->trained.set.each_cut = each_cut;
    if (reader->trained.set.each_cut != each_cut)
        return fail(RSD_EFORMAT, "file is of another stage of ZeRO than that of rank 0");
    TRY(check_partition_count(part));
    if (!each_cut)
        TRY(read_paddings(part));
    TRY(add_master_runs(part, list));
    if (part->rank > 0 && part->nvectors != nvectors)
        return fail(RSD_EFORMAT, "file has %u groups; that of rank 0 has %u", part->nvectors,
                    nvectors);
    pickle_node optimizer =
        pickle_find(tree, part->states, each_cut ? "optimizer_state_dict" : "base_optimizer_state");
    TRY(read_state_ids(part, optimizer));
    return add_optimizer_states(part, optimizer);
}

rsd_status zero_read_partitions(struct zero_reader *reader)
{
    struct partition_file part = {.reader = reader};
    uint32_t master;
    reader->trained.set.nranks = reader->files.noptim;
    TRY(flat_set_find_state(&reader->trained.set, slice_of(""), &master));
    for (; part.rank < reader->files.noptim; part.rank++) {
        struct torch_visit visit = {.context = &part};
        rsd_status status =
            torch_visit_file(&visit, reader->store, reader->files.optim[part.rank], read_partition);
        mem_free(part.ids);
        part.ids = NULL;
        TRY(status);
    }
    TRY(zero_fail_in(reader, flat_set_finish(&reader->trained.set)));
    if (!reader->trained.set.each_cut && reader->ngroups != part.nvectors)
        return store_fail_in(reader->store, reader->files.model[0],
                             fail(RSD_EFORMAT,
                                  "param_shapes has %u groups; the optimizer files have %u",
                                  reader->ngroups, part.nvectors));
    return zero_place_params(reader, part.nvectors);
}

/* ---- frozen parameters of stage 3 ---- */

/* Adds the fragments of one rank, which has a part of each frozen parameter. */
static rsd_status add_fragments(struct torch_visit *visit)
{
    const struct partition_file *part = visit->context;
    struct zero_list *list = &part->reader->frozen;
    const struct pickle_tree *tree = &visit->file->tree;
    pickle_node dict = pickle_find(tree, visit->file->root, "frozen_param_fragments"), key, tensor;
    struct pickle_walk walk = pickle_walk_dict(tree, dict);
    if (!pickle_is_dict(tree, dict))
        return fail(RSD_EFORMAT, "frozen_param_fragments is not a dict");
    while (pickle_walk_next_pair(&walk, &key, &tensor)) {
        struct slice name = pickle_text(tree, key);
        const struct zero_param *param = zero_list_find(list, name);
        if (!param || !torch_view_is_tensor(tree, tensor))
            return fail(RSD_EFORMAT, "%.*s: fragment is not a tensor of frozen_param_shapes",
                        slice_width(name, 300), name.bytes);
        rsd_status status =
            flat_set_add_run(&list->set, 0, param->vector, part->rank, visit->file, tensor);
        if (status)
            return fail_in(status, "%.*s: ", slice_width(name, 300), name.bytes);
    }
    return RSD_OK;
}

rsd_status zero_read_fragments(struct zero_reader *reader)
{
    struct partition_file part = {.reader = reader};
    struct zero_list *list = &reader->frozen;
    uint32_t master;
    if (list->n == 0)
        return RSD_OK;
    list->by_param = true;
    list->set.nranks = reader->files.nmodel;
    list->set.each_cut = true;
    TRY(flat_set_find_state(&list->set, slice_of(""), &master));
    for (size_t i = 0; i < list->n; i++)
        list->params[i].vector = (uint32_t)i;
    for (; part.rank < reader->files.nmodel; part.rank++) {
        struct torch_visit visit = {.context = &part};
        TRY(torch_visit_file(&visit, reader->store, reader->files.model[part.rank], add_fragments));
    }
    TRY(zero_fail_in(reader, flat_set_finish(&list->set)));
    return zero_check_fragments(reader);
}
