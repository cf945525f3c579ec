/* torch_save_read.c - opens torch.save files: finds tensors in nested dicts and lists.
 *
 * The name of a tensor is its keys, joined by dots. A list or tuple with a tensor or dict in it is visited
 * too; anything else is a value. Objects of unknown classes are opaque, and what is in them is not visited.
 * A node that is referred to several times is visited as often, so the visits are limited by the length of
 * the pickle.
 */
#include "rows.h"
#include "torch_item.h"

#include <stdio.h>
#include <string.h>

enum { MAX_NAME_NBYTES = 2000, MAX_GROWTH = 64, START_NBYTES = 1 << 18 };

/* One part of a name, and whether it is an index of a list. */
struct name_step {
    size_t begin, end;
    bool number;
};

struct torch_reader {
    struct catalog *catalog;
    uint32_t index; /* of the file */
    struct torch_file file;
    uint64_t nodes_left;        /* that may still be visited */
    uint64_t nbytes_left;       /* that may still be made of them */
    char name[MAX_NAME_NBYTES]; /* of the current node, with a zero behind it */
    size_t name_nbytes;
    struct name_step steps[TORCH_MAX_DEPTH + 1];
    size_t nsteps;
};

static rsd_status reserve_nbytes(struct torch_reader *reader, uint64_t nbytes)
{
    if (nbytes > reader->nbytes_left)
        return fail(RSD_EFORMAT, "values are more than 64 times as long as their pickle");
    reader->nbytes_left -= nbytes;
    return RSD_OK;
}

/* ---- tensors ---- */

/* Adds the path of the current node: its keys as JSON texts, its indices as numbers. */
static rsd_status add_torch_path(struct torch_reader *reader, const char **out)
{
    struct text text = {0};
    char *json;
    if (reader->nsteps == 0)
        return RSD_OK;
    text_add(&text, "[");
    for (size_t i = 0; i < reader->nsteps; i++) {
        const struct name_step *step = &reader->steps[i];
        size_t n = step->end - step->begin;
        text_add(&text, i ? ", " : "");
        if (step->number)
            text_add(&text, "%.*s", (int)n, reader->name + step->begin);
        else
            json_add_string(&text, reader->name + step->begin, n);
    }
    text_add(&text, "]");
    TRY(text_take(&text, &json));
    rsd_status status = budget_take_text(strlen(json)) ? RSD_OK : budget_fail();
    if (!status)
        status = reserve_nbytes(reader, strlen(json));
    if (!status)
        status = catalog_copy_text(reader->catalog, json, out);
    rsd_free(json);
    return status;
}

/* Returns the name of the current node, in which a key may have put a zero. */
static struct slice current_name(const struct torch_reader *reader)
{
    return (struct slice){reader->name, reader->name_nbytes};
}

static rsd_status add_torch_tensor(struct torch_reader *reader, pickle_node c)
{
    static const int64_t origin[RSD_MAX_DIMS];
    struct catalog *catalog = reader->catalog;
    struct torch_view view;
    struct stored_array array;
    TRY(reserve_nbytes(reader, reader->name_nbytes + sizeof(struct stored_array) +
                                   sizeof(struct stored_tensor)));
    TRY(torch_file_find_tensor(&reader->file, c, &view, &array));
    TRY(catalog_add_tensor(catalog, current_name(reader), view.dtype, view.ndim, view.shape));
    TRY(add_torch_path(reader, &catalog->tensors[catalog->ntensors - 1].path));
    return catalog_add_array(catalog, origin, view.shape, reader->index, &array);
}

/* ---- values ---- */

static rsd_status add_torch_value(struct torch_reader *reader, pickle_node c)
{
    struct catalog *catalog = reader->catalog;
    struct bytes pickle = {0};
    char *json = NULL;
    bool plain;
    rsd_status status = pickle_to_json(&reader->file.tree, c, &json);
    if (!status)
        status = pickle_to_plain_pickle(&reader->file.tree, c, &pickle, &plain);
    if (!status)
        status = reserve_nbytes(reader, reader->name_nbytes + sizeof(struct stored_value) +
                                            pickle.n + (json ? strlen(json) : 0));
    if (!status)
        status = catalog_add_value(catalog, current_name(reader),
                                   (struct extent){.kind = EXTENT_NONE}, json);
    if (status) {
        mem_free(json);
        bytes_drop(&pickle);
        return status;
    }
    if (plain)
        catalog->values[catalog->nvalues - 1].pickle = pickle;
    else
        bytes_drop(&pickle);
    return add_torch_path(reader, &catalog->values[catalog->nvalues - 1].path);
}

/* ---- nodes ---- */

/* Says whether a list or tuple has a tensor or dict in it, at any depth. */
static bool has_parts(struct torch_reader *reader, pickle_node c, int depth)
{
    const struct pickle_tree *tree = &reader->file.tree;
    bool tuple = pickle_kind(tree, c) == NODE_TUPLE;
    struct pickle_walk walk = pickle_walk(tree, c);
    pickle_node item;
    for (uint32_t i = 0; tuple ? i < pickle_count(tree, c) : pickle_walk_next(&walk, &item); i++) {
        pickle_node one = tuple ? pickle_item(tree, c, i) : item;
        enum pickle_kind kind = pickle_kind(tree, one);
        if (reader->nodes_left == 0 || depth > TORCH_MAX_DEPTH)
            return false;
        reader->nodes_left--;
        if (torch_view_is_tensor(tree, one) || pickle_is_dict(tree, one) ||
            ((kind == NODE_LIST || kind == NODE_TUPLE) && has_parts(reader, one, depth + 1)))
            return true;
    }
    return false;
}

static rsd_status visit_node(struct torch_reader *reader, pickle_node c, size_t length, int depth);

static rsd_status visit_named_node(struct torch_reader *reader, struct slice name, bool number,
                                   pickle_node c, size_t length, int depth)
{
    size_t need = name.nbytes + (length ? 1 : 0);
    if (!budget_take_text(need))
        return budget_fail();
    if (length + need >= sizeof reader->name)
        return fail(RSD_ELIMIT, "name exceeds %d bytes", (int)MAX_NAME_NBYTES);
    if (length)
        reader->name[length++] = '.';
    memcpy(reader->name + length, name.bytes, name.nbytes);
    reader->name[length + name.nbytes] = '\0';
    if (reader->nsteps == sizeof reader->steps / sizeof *reader->steps)
        return fail(RSD_EFORMAT, "%.300s: nesting exceeds %d levels", reader->name,
                    (int)TORCH_MAX_DEPTH);
    reader->steps[reader->nsteps++] = (struct name_step){length, length + name.nbytes, number};
    rsd_status status = visit_node(reader, c, length + name.nbytes, depth + 1);
    reader->nsteps--;
    return status;
}

static rsd_status visit_dict(struct torch_reader *reader, pickle_node dict, size_t length,
                             int depth)
{
    struct pickle_walk walk = pickle_walk(&reader->file.tree, dict);
    pickle_node key, value;
    while (pickle_walk_next_pair(&walk, &key, &value)) {
        char digits[24];
        int64_t number;
        struct slice name = pickle_text(&reader->file.tree, key);
        if (pickle_as_i64(&reader->file.tree, key, &number)) {
            snprintf(digits, sizeof digits, "%lld", (long long)number);
            name = (struct slice){digits, strlen(digits)};
        } else if (pickle_kind(&reader->file.tree, key) != NODE_STRING) {
            continue; /* any other key names nothing */
        }
        TRY(visit_named_node(reader, name, false, value, length, depth));
    }
    return RSD_OK;
}

static rsd_status visit_list(struct torch_reader *reader, pickle_node list, size_t length,
                             int depth)
{
    bool tuple = pickle_kind(&reader->file.tree, list) == NODE_TUPLE;
    struct pickle_walk walk = pickle_walk(&reader->file.tree, list);
    pickle_node item;
    for (uint32_t i = 0;
         tuple ? i < pickle_count(&reader->file.tree, list) : pickle_walk_next(&walk, &item); i++) {
        char digits[24];
        snprintf(digits, sizeof digits, "%u", i);
        TRY(visit_named_node(reader, (struct slice){digits, strlen(digits)}, true,
                             tuple ? pickle_item(&reader->file.tree, list, i) : item, length,
                             depth));
    }
    return RSD_OK;
}

static rsd_status visit_node(struct torch_reader *reader, pickle_node c, size_t length, int depth)
{
    enum pickle_kind kind = pickle_kind(&reader->file.tree, c);
    if (depth > TORCH_MAX_DEPTH)
        return fail(RSD_EFORMAT, "%.300s: nesting exceeds %d levels", reader->name,
                    (int)TORCH_MAX_DEPTH);
    if (reader->nodes_left == 0)
        return fail(RSD_EFORMAT, "%.300s: too many values for the length of the pickle",
                    reader->name);
    reader->nodes_left--;
    if (pickle_is_dict(&reader->file.tree, c))
        return visit_dict(reader, pickle_dict_items(&reader->file.tree, c), length, depth);
    if ((kind == NODE_LIST || kind == NODE_TUPLE) && has_parts(reader, c, depth))
        return visit_list(reader, c, length, depth);
    reader->name_nbytes = length;
    if (length == 0) /* the file is one tensor or one value */
        reader->name_nbytes =
            (size_t)snprintf(reader->name, sizeof reader->name, "%s",
                             torch_view_is_tensor(&reader->file.tree, c) ? "tensor" : "value");
    rsd_status status = torch_view_is_tensor(&reader->file.tree, c) ? add_torch_tensor(reader, c)
                                                                    : add_torch_value(reader, c);
    return status == RSD_OK ? RSD_OK : fail_in(status, "%.300s: ", reader->name);
}

/* ---- files ---- */

static rsd_status add_torch_file(struct store *store, struct catalog *catalog, uint32_t index)
{
    struct torch_reader reader = {.catalog = catalog, .index = index};
    rsd_status status = torch_file_open(&reader.file, store, index);
    if (!status) {
        reader.nodes_left = torch_file_max_visits(&reader.file);
        reader.nbytes_left = START_NBYTES + reader.file.pickle_nbytes * MAX_GROWTH;
        status = visit_node(&reader, reader.file.root, 0, 0);
        torch_file_close(&reader.file);
    }
    return status ? store_fail_in(store, index, status) : RSD_OK;
}

/* ---- the row ---- */

static bool is_torch_index(const char *name)
{
    return has_suffix(name, ".bin.index.json");
}

static int torch_save_probe(const struct store_listing *listing, const struct store_entry *entry,
                            struct slice start)
{
    (void)listing;
    const char *name = entry->base, *bytes = start.bytes;
    bool named = has_suffix(name, ".pt") || has_suffix(name, ".pth") || has_suffix(name, ".bin");
    if (entry->directory)
        return NOT_SURE;
    if (is_torch_index(name))
        return SURE_OF_TORCH_INDEX;
    if (!bytes)
        return named ? SURE_OF_TORCH_FILE : NOT_SURE;
    bool archive = start.nbytes >= 4 && memcmp(bytes, "PK\3\4", 4) == 0;
    bool safetensors = start.nbytes > 8 && bytes[8] == '{';
    bool pickle = start.nbytes >= 2 && bytes[0] == '\x80' && bytes[1] >= 2 && bytes[1] <= 5;
    if (archive || (pickle && !safetensors))
        return SURE_OF_BYTES;
    return named ? SURE_OF_SUFFIX : NOT_SURE;
}

static rsd_status torch_save_open(struct store *store, struct catalog *catalog)
{
    size_t n = store->names.n;
    bool index = is_torch_index(store_file_name(store, 0));
    if (n > 1 && index)
        return fail(RSD_EFORMAT, "%s: found %zu index files; name one of them", store->path, n);
    if (n > 1)
        return fail(RSD_EFORMAT, "%s: found %zu torch.save files and no index; name one of them",
                    store->path, n);
    if (index)
        TRY(index_add_files(store, 0));
    for (uint32_t file = index ? 1 : 0; file < store->names.n; file++)
        TRY(add_torch_file(store, catalog, file));
    return RSD_OK;
}

const struct format format_torch_save = {.id = RSD_FORMAT_TORCH_SAVE,
                                         .name = "torch.save",
                                         .probe = torch_save_probe,
                                         .open = torch_save_open,
                                         .locate = catalog_locate};
