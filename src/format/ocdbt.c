/* ocdbt.c - reads the keys of an OCDBT database, TensorStore's B+tree of keys and values in a directory.
 *
 *     manifest.ocdbt    the versions of the tree; the last one is read
 *     d/...             nodes of the tree, and values that are too long to be in a leaf
 *
 * A node refers to files by their numbers in a table of its own. A path in the table has a base, its first
 * part, which goes in front of all paths that are read through it. So the tree of one database may consist
 * of nodes of others (ocdbt.process_0/).
 *
 * Heights decrease by one from node to child. The nodes that are read from a file are together no longer
 * than the file, so a tree that refers to one node again and again is refused.
 */
#include "ocdbt.h"

enum { MANIFEST_MAGIC = 0x0cdb3a2a, NODE_MAGIC = 0x0cdb20de };

/* ---- the database ---- */

struct ocdbt_reader {
    struct catalog *catalog;
    struct key_list *keys;
    struct bytes last_key;
};

/* Where a node or value is. */
struct node_reference {
    uint32_t file;
    uint64_t offset, nbytes;
};

/* Finds a file of a table in the store. prefix: the base of the paths in the table. */
static rsd_status find_file(struct ocdbt_reader *reader, struct slice prefix,
                            const struct file_table *table, uint64_t index, uint32_t *file)
{
    struct bytes name = {0};
    if (index >= table->n)
        return fail(RSD_EFORMAT, "file %llu is not in the table of %zu files",
                    (unsigned long long)index, table->n);
    const struct table_path *path = &table->paths[index];
    bytes_put(&name, prefix.bytes, prefix.nbytes);
    bytes_put(&name, table->texts.data + path->text, path->nbytes);
    rsd_status status = name.failed ? RSD_ENOMEM
                                    : format_add_file(reader->keys->store, reader->keys->directory,
                                                      bytes_slice(&name), file);
    bytes_drop(&name);
    return status;
}

/* ---- nodes ---- */

enum { NCOLUMNS = 7 };

/* A node while it is read. The columns have n entries each. */
struct tree_node {
    struct frame_body body;
    struct file_table table;
    unsigned height;
    size_t n;
    uint64_t *columns, *shared, *suffix, *common, *kinds, *files, *offsets, *lengths;
    struct slice key_bytes;
    struct bytes prefix, child_prefix; /* of paths, in this node and in a child */
    struct bytes inherited, key;       /* what all keys begin with, and the current key */
};

static void drop_node(struct tree_node *node)
{
    bytes_drop(&node->body.bytes);
    bytes_drop(&node->prefix);
    bytes_drop(&node->child_prefix);
    bytes_drop(&node->inherited);
    bytes_drop(&node->key);
    file_table_drop(&node->table);
    if (node->columns)
        budget_return_memory(NCOLUMNS * node->n * sizeof *node->columns);
    mem_free(node->columns);
}

/* Reads a node of the tree, and opens its frame. */
static rsd_status load_node(struct ocdbt_reader *reader, const struct node_reference *at,
                            struct tree_node *node)
{
    uint64_t file_nbytes;
    TRY(store_stat(reader->keys->store, at->file, &file_nbytes, NULL));
    TRY(store_check_bounds(at->offset, at->nbytes, file_nbytes));
    if (at->nbytes > MAX_BODY_NBYTES)
        return fail(RSD_ELIMIT, "node of %llu bytes exceeds the limit of %d",
                    (unsigned long long)at->nbytes, (int)MAX_BODY_NBYTES);
    TRY(key_list_use(reader->keys, at->file, at->nbytes));
    unsigned char *frame = mem_new((size_t)at->nbytes, 1);
    if (!frame)
        return RSD_ENOMEM;
    rsd_status status =
        store_read(reader->keys->store, at->file, at->offset, frame, (size_t)at->nbytes);
    if (!status)
        status = frame_open(frame, (size_t)at->nbytes, NODE_MAGIC, &node->body);
    mem_free(frame);
    return status;
}

/* Reads the columns of the keys: how many bytes each shares with the one before it, and what follows. */
static rsd_status take_key_columns(struct tree_node *node)
{
    struct frame_body *body = &node->body;
    uint64_t nbytes = 0;
    TRY(body_take_count(body, &node->n));
    size_t n = node->n;
    if (n == 0)
        return body_fail(body, "node has no entries");
    if (!budget_take_memory(NCOLUMNS * n * sizeof *node->columns))
        return budget_fail();
    node->columns = mem_new(NCOLUMNS * n, sizeof *node->columns);
    if (!node->columns)
        return RSD_ENOMEM;
    node->shared = node->columns;
    node->suffix = node->columns + n;
    node->common = node->columns + 2 * n;
    node->kinds = node->columns + 3 * n;
    node->files = node->columns + 4 * n;
    node->offsets = node->columns + 5 * n;
    node->lengths = node->columns + 6 * n;
    TRY(body_take_column(body, n - 1, node->shared + 1)); /* the first key shares nothing */
    TRY(body_take_column(body, n, node->suffix));
    if (node->height > 0)
        TRY(body_take_column(body, n, node->common));
    for (size_t i = 0; i < n; i++)
        if (node->suffix[i] > MAX_KEY_NBYTES || (nbytes += node->suffix[i]) > body->bytes.n)
            return body_fail(body, "keys are too long");
    return body_take_slice(body, nbytes, &node->key_bytes);
}

static rsd_status take_inner_columns(struct tree_node *node)
{
    TRY(body_take_column(&node->body, 3 * node->n, node->files)); /* and offsets and lengths */
    return body_skip_column(&node->body, 3 * node->n);            /* statistics */
}

/* Reads the columns of the values of a leaf. */
static rsd_status take_leaf_columns(struct tree_node *node)
{
    struct frame_body *body = &node->body;
    TRY(body_take_column(body, node->n, node->lengths));
    TRY(body_take_column(body, node->n, node->kinds));
    for (size_t i = 0; i < node->n; i++)
        if (node->kinds[i] > 1)
            return fail(RSD_EUNSUPPORTED, "value of kind %llu is not supported",
                        (unsigned long long)node->kinds[i]);
    for (size_t i = 0; i < node->n; i++)
        if (node->kinds[i] == 1)
            TRY(body_take_varint(body, &node->files[i]));
    for (size_t i = 0; i < node->n; i++)
        if (node->kinds[i] == 1)
            TRY(body_take_varint(body, &node->offsets[i]));
    return RSD_OK;
}

static rsd_status parse_node(unsigned height, struct tree_node *node)
{
    TRY(body_take_byte(&node->body, &node->height));
    if (node->height != height)
        return body_fail(&node->body, "height of the node is not that of its place in the tree");
    TRY(file_table_take(&node->body, &node->table));
    TRY(take_key_columns(node));
    return height > 0 ? take_inner_columns(node) : take_leaf_columns(node);
}

/* ---- entries ---- */

/* Keys ascend over the whole tree, so no key occurs twice. */
static rsd_status check_key_order(struct ocdbt_reader *reader, struct slice key)
{
    struct bytes *last = &reader->last_key;
    size_t n = last->n < key.nbytes ? last->n : key.nbytes;
    int order = n ? memcmp(last->data, key.bytes, n) : 0;
    if (reader->keys->n > 0 && (order > 0 || (order == 0 && last->n >= key.nbytes)))
        return fail(RSD_EFORMAT, "key '%.*s' is not in order", slice_width(key, 200), key.bytes);
    last->n = 0;
    bytes_put(last, key.bytes, key.nbytes);
    return last->failed ? RSD_ENOMEM : RSD_OK;
}

/* Adds a key of a leaf. Its value is in the node itself, or in a file. */
static rsd_status add_leaf_entry(struct ocdbt_reader *reader, struct tree_node *node, size_t i,
                                 struct slice key, const struct node_reference *at)
{
    struct stored_key value = {
        .file = at->file, .offset = at->offset, .value_nbytes = node->lengths[i]};
    TRY(check_key_order(reader, key));
    if (node->kinds[i] == 1) {
        TRY(find_file(reader, bytes_slice(&node->prefix), &node->table, node->files[i],
                      &value.file));
        value.offset = node->offsets[i];
        rsd_status status =
            store_check_range(reader->keys->store, value.file, value.offset, value.value_nbytes);
        if (status)
            return fail_in(status, "value of '%.*s': %.300s: ", slice_width(key, 200), key.bytes,
                           store_file_name(reader->keys->store, value.file));
    } else {
        struct slice inside;
        TRY(body_take_slice(&node->body, node->lengths[i], &inside));
        TRY(catalog_add_name(reader->catalog, inside, &value.memory));
    }
    return key_list_add(reader->keys, key, &value);
}

static rsd_status visit_tree(struct ocdbt_reader *reader, const struct node_reference *at,
                             unsigned height, struct slice prefix, struct slice inherited);

/* Finds the child of an inner node. Its keys begin with a part of the key in this node. */
static rsd_status find_child(struct ocdbt_reader *reader, struct tree_node *node, size_t i,
                             struct slice *key, struct node_reference *child)
{
    if (node->common[i] > key->nbytes - node->inherited.n)
        return body_fail(&node->body, "common prefix of a subtree is longer than its key");
    key->nbytes = node->inherited.n + (size_t)node->common[i];
    *child = (struct node_reference){.offset = node->offsets[i], .nbytes = node->lengths[i]};
    TRY(find_file(reader, bytes_slice(&node->prefix), &node->table, node->files[i], &child->file));
    const struct table_path *path = &node->table.paths[node->files[i]];
    if (node->prefix.n + path->base_nbytes > MAX_KEY_NBYTES)
        return fail(RSD_EFORMAT, "base of the paths exceeds %d bytes", (int)MAX_KEY_NBYTES);
    node->child_prefix.n = 0;
    bytes_put(&node->child_prefix, node->prefix.data, node->prefix.n);
    bytes_put(&node->child_prefix, node->table.texts.data + path->text, path->base_nbytes);
    return node->child_prefix.failed ? RSD_ENOMEM : RSD_OK;
}

static rsd_status fail_in_node(struct ocdbt_reader *reader, const struct node_reference *at,
                               rsd_status status)
{
    return store_fail_in(reader->keys->store, at->file,
                         fail_in(status, "node at byte %llu: ", (unsigned long long)at->offset));
}

/* Adds the key of a leaf, or visits a child of an inner node. */
static rsd_status visit_entry(struct ocdbt_reader *reader, struct tree_node *node, size_t i,
                              struct slice key, const struct node_reference *at)
{
    struct node_reference child;
    rsd_status status = node->height > 0 ? find_child(reader, node, i, &key, &child)
                                         : add_leaf_entry(reader, node, i, key, at);
    if (status)
        return fail_in_node(reader, at, status);
    return node->height == 0 ? RSD_OK
                             : visit_tree(reader, &child, node->height - 1,
                                          bytes_slice(&node->child_prefix), key);
}

/* Visits all entries of a node, with their whole keys. */
static rsd_status visit_entries(struct ocdbt_reader *reader, struct tree_node *node,
                                const struct node_reference *at)
{
    struct bytes *key = &node->key;
    const char *suffix = node->key_bytes.bytes;
    bytes_put(key, node->inherited.data, node->inherited.n);
    for (size_t i = 0; i < node->n; suffix += node->suffix[i++]) {
        if (node->shared[i] > key->n - node->inherited.n ||
            node->inherited.n + node->shared[i] + node->suffix[i] > MAX_KEY_NBYTES)
            return fail_in_node(reader, at, body_fail(&node->body, "key is too long"));
        key->n = node->inherited.n + (size_t)node->shared[i];
        bytes_put(key, suffix, (size_t)node->suffix[i]);
        if (key->failed)
            return RSD_ENOMEM;
        TRY(visit_entry(reader, node, i, bytes_slice(key), at));
    }
    return node->body.at == node->body.bytes.n
               ? RSD_OK
               : fail_in_node(reader, at, body_fail(&node->body, "unexpected bytes at the end"));
}

/* Reads a node and all that is below it. `inherited` begins all of its keys. */
static rsd_status visit_tree(struct ocdbt_reader *reader, const struct node_reference *at,
                             unsigned height, struct slice prefix, struct slice inherited)
{
    struct tree_node *node = mem_new(1, sizeof *node);
    if (!node)
        return RSD_ENOMEM;
    bytes_put(&node->prefix, prefix.bytes, prefix.nbytes);
    bytes_put(&node->inherited, inherited.bytes, inherited.nbytes);
    rsd_status status = node->prefix.failed || node->inherited.failed ? RSD_ENOMEM : RSD_OK;
    if (!status)
        status = load_node(reader, at, node);
    if (!status)
        status = parse_node(height, node);
    status = status ? fail_in_node(reader, at, status) : visit_entries(reader, node, at);
    drop_node(node);
    mem_free(node);
    return status;
}

/* ---- the manifest ---- */

/* Skips the settings, which only a writer needs. */
static rsd_status take_settings(struct frame_body *body)
{
    struct slice uuid, level;
    uint64_t kind, ignored, compression;
    unsigned arity;
    TRY(body_take_slice(body, 16, &uuid));
    TRY(body_take_varint(body, &kind));
    if (kind != 0)
        return fail(RSD_EUNSUPPORTED, "numbered manifests are not supported");
    TRY(body_take_varint(body, &ignored)); /* the longest value inside a leaf */
    TRY(body_take_varint(body, &ignored)); /* the longest node */
    TRY(body_take_byte(body, &arity));
    TRY(body_take_varint(body, &compression));
    if (compression > 1)
        return fail(RSD_EUNSUPPORTED, "compression %llu is not supported",
                    (unsigned long long)compression);
    return compression == 1 ? body_take_slice(body, 4, &level) : RSD_OK;
}

/* Finds the root of the last version. *file is its number in the table, *nkeys how many keys it has. */
static rsd_status take_last_version(struct frame_body *body, unsigned *height, uint64_t *file,
                                    uint64_t *offset, uint64_t *nbytes, uint64_t *nkeys)
{
    size_t n;
    struct slice heights;
    TRY(body_take_count(body, &n));
    if (n == 0)
        return body_fail(body, "manifest has no version");
    for (uint64_t i = 0, last = 0, generation; i < n; i++, last = generation) {
        TRY(body_take_varint(body, &generation));
        if (i > 0 && generation <= last)
            return body_fail(body, "versions are not in the order of their generations");
    }
    TRY(body_take_slice(body, n, &heights));
    *height = (unsigned char)heights.bytes[n - 1];
    uint64_t *const columns[] = {file, offset, nbytes, nkeys};
    for (size_t i = 0; i < sizeof columns / sizeof *columns; i++) {
        TRY(body_skip_column(body, n - 1));
        TRY(body_take_varint(body, columns[i]));
    }
    return RSD_OK;
}

/* Reads where the root of the last version is, and how many keys its tree has. */
static rsd_status read_manifest(struct ocdbt_reader *reader, struct frame_body *body,
                                struct node_reference *root, unsigned *height, struct bytes *prefix,
                                uint64_t *nkeys)
{
    struct file_table table = {0};
    uint64_t file = 0;
    TRY(take_settings(body));
    rsd_status status = file_table_take(body, &table);
    if (!status)
        status = take_last_version(body, height, &file, &root->offset, &root->nbytes, nkeys);
    bool empty = !status && *nkeys == 0;
    if (empty && (root->offset != UINT64_MAX || root->nbytes != UINT64_MAX))
        status = body_fail(body, "version has no keys, and a root");
    if (!status && !empty)
        status = find_file(reader, slice_of(""), &table, file, &root->file);
    if (!status && !empty)
        bytes_put(prefix, table.texts.data + table.paths[file].text, table.paths[file].base_nbytes);
    if (!status && prefix->failed)
        status = RSD_ENOMEM;
    file_table_drop(&table);
    return status;
}

/* Adds all keys of the database. */
static rsd_status read_database(struct ocdbt_reader *reader, uint32_t manifest)
{
    struct frame_body body = {0};
    struct node_reference root = {0};
    struct bytes prefix = {0};
    unsigned height = 0;
    uint64_t nkeys = 0;
    char *frame = NULL;
    size_t n = 0;
    rsd_status status = store_load(reader->keys->store, manifest, MAX_BODY_NBYTES, &frame, &n);
    if (!status)
        status = frame_open((unsigned char *)frame, n, MANIFEST_MAGIC, &body);
    if (!status)
        status = read_manifest(reader, &body, &root, &height, &prefix, &nkeys);
    if (status)
        status = store_fail_in(reader->keys->store, manifest, status);
    else if (nkeys > 0)
        status = visit_tree(reader, &root, height, bytes_slice(&prefix), slice_of(""));
    if (!status && reader->keys->n != nkeys)
        status = store_fail_in(reader->keys->store, manifest,
                               fail(RSD_EFORMAT, "version has %llu keys, and its tree %zu",
                                    (unsigned long long)nkeys, reader->keys->n));
    mem_free(frame);
    bytes_drop(&body.bytes);
    bytes_drop(&prefix);
    return status;
}

rsd_status ocdbt_read_keys(struct key_list *keys, struct catalog *catalog)
{
    struct ocdbt_reader reader = {.catalog = catalog, .keys = keys};
    uint32_t manifest;
    TRY(format_add_file(keys->store, keys->directory, slice_of("manifest.ocdbt"), &manifest));
    rsd_status status = read_database(&reader, manifest);
    bytes_drop(&reader.last_key);
    return status;
}
