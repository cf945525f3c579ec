/* orbax_tree.c - what _METADATA says of the tree of an item: names, paths, and what is not an array.
 *
 *     {"tree_metadata": {"('a', '0')": {"key_metadata": [{"key": "a", "key_type": 2}, {"key": "0", "key_type": 1}],
 *                                       "value_metadata": {"value_type": "jax.Array", ...}}, ...}, ...}
 *
 * The name of an array is its keys, joined by dots. A key of type 1 is an index of a list. Texts are in
 * _strings.json, by name. Empty containers and None are in the tree only.
 */
#include "orbax.h"

#include "pickle.h"

enum { MAX_METADATA_NBYTES = 1 << 30 };

/* ---- names ---- */

void orbax_add_name(const struct orbax_item *item, struct slice name, struct text *text)
{
    if (name.nbytes == 0) /* the tree is one array */
        text_add(text, "%s", *item->name ? item->name : "tensor");
    else
        text_add(text, "%s%s%.*s", item->name, *item->name ? "." : "", (int)name.nbytes,
                 name.bytes);
}

struct tree_entry *orbax_tree_find(const struct orbax_tree *tree, struct slice name)
{
    size_t index;
    return string_map_find(&tree->names, name, &index) ? &tree->list[index] : NULL;
}

void orbax_tree_drop(struct orbax_tree *tree)
{
    mem_free(tree->list);
    string_map_drop(&tree->names);
    *tree = (struct orbax_tree){0};
}

/* ---- entries ---- */

/* Takes a key: a text, or a number. */
static rsd_status take_key(struct json *j, struct text *out)
{
    struct slice text;
    uint64_t number;
    if (json_peek(j) == '"') {
        TRY(json_string(j, &text));
        text_add(out, "%.*s", (int)text.nbytes, text.bytes);
        return RSD_OK;
    }
    TRY(json_u64(j, &number));
    text_add(out, "%llu", (unsigned long long)number);
    return RSD_OK;
}

static bool is_number(const struct text *text)
{
    for (size_t i = 0; i < text->length; i++)
        if (text->chars[i] < '0' || text->chars[i] > '9')
            return false;
    return text->length > 0 && text->length < 19 && (text->length == 1 || text->chars[0] != '0');
}

/* Adds one key of an entry to its name and its path. */
static rsd_status take_key_step(struct json *j, struct text *name, struct text *path)
{
    struct slice key;
    struct text step = {0};
    uint64_t type = 2;
    bool more;
    rsd_status status = json_enter(j, '{');
    while (!status && !(status = json_next_key(j, &key, &more)) && more) {
        bool is_key = slice_is(key, "key"), is_type = slice_is(key, "key_type");
        if (is_key)
            step.length = 0;
        status = is_key ? take_key(j, &step) : is_type ? json_u64(j, &type) : json_skip(j);
    }
    if (!status && !step.chars)
        status = step.failed ? RSD_ENOMEM : json_fail(j, "key_metadata has no key");
    if (!status) {
        text_add(name, "%s%s", name->length ? "." : "", step.chars);
        text_add(path, "%s", path->length > 1 ? ", " : "");
        if (type == 1 && is_number(&step))
            text_add(path, "%s", step.chars);
        else
            json_add_string(path, step.chars, step.length);
    }
    text_drop(&step);
    return status;
}

static rsd_status take_key_steps(struct json *j, struct text *name, struct text *path)
{
    bool more;
    TRY(json_enter(j, '['));
    for (;;) {
        TRY(json_next_item(j, &more));
        if (!more)
            return RSD_OK;
        TRY(take_key_step(j, name, path));
    }
}

/* Sets what a leaf of the tree is by the type in its metadata. */
static void set_tree_kind(struct tree_entry *entry, struct slice type)
{
    static const struct {
        const char *type, *json;
    } empty[] = {
        {"None", "null"}, {"Dict", "{}"}, {"List", "[]"}, {"Tuple", "[]"}, {"NamedTuple", "{}"}};
    if (slice_is(type, "scalar"))
        entry->kind = TREE_SCALAR;
    else if (slice_is(type, "string"))
        entry->kind = TREE_STRING;
    for (size_t i = 0; i < sizeof empty / sizeof *empty; i++)
        if (slice_is(type, empty[i].type)) {
            entry->kind = TREE_EMPTY;
            entry->json = empty[i].json;
        }
}

/* Reads what a leaf is, and whether Orbax would skip it. */
static rsd_status take_value_metadata(struct json *j, struct tree_entry *entry)
{
    struct slice key, type;
    bool more, skipped = false;
    TRY(json_enter(j, '{'));
    for (;;) {
        TRY(json_next_key(j, &key, &more));
        if (!more)
            break;
        if (slice_is(key, "value_type") && json_peek(j) == '"') {
            TRY(json_string(j, &type));
            set_tree_kind(entry, type);
            continue;
        }
        if (slice_is(key, "skip_deserialize"))
            skipped = json_peek(j) == 't';
        TRY(json_skip(j));
    }
    if (skipped && entry->kind != TREE_EMPTY)
        entry->kind = TREE_SKIPPED;
    return RSD_OK;
}

/* Adds a leaf, under the name and the path that were read. */
static rsd_status add_tree_entry(struct orbax_item *item, struct json *j, struct tree_entry *entry,
                                 struct text *name, struct text *path)
{
    struct orbax_tree *tree = item->tree;
    text_add(path, "]");
    text_add(name, "%s", "");
    if (name->failed || path->failed)
        return RSD_ENOMEM;
    struct slice text = {name->chars, name->length};
    if (orbax_tree_find(tree, text))
        return json_fail(j, "two entries of the tree have the same name");
    TRY(GROW(tree->list, tree->capacity, tree->n + 1));
    TRY(catalog_add_name(item->catalog, text, &entry->name));
    if (path->length > 2)
        TRY(catalog_add_name(item->catalog, (struct slice){path->chars, path->length},
                             &entry->path));
    tree->list[tree->n] = *entry;
    return string_map_add(&tree->names, (struct slice){entry->name, text.nbytes}, tree->n++);
}

static rsd_status take_tree_entry(struct orbax_item *item, struct json *j)
{
    struct tree_entry entry = {0};
    struct text name = {0}, path = {0};
    struct slice key;
    bool more;
    text_add(&path, "[");
    if (*item->name)
        json_add_string(&path, item->name, strlen(item->name));
    rsd_status status = json_enter(j, '{');
    while (!status && !(status = json_next_key(j, &key, &more)) && more)
        status = slice_is(key, "key_metadata")     ? take_key_steps(j, &name, &path)
                 : slice_is(key, "value_metadata") ? take_value_metadata(j, &entry)
                                                   : json_skip(j);
    if (!status)
        status = add_tree_entry(item, j, &entry, &name, &path);
    text_drop(&name);
    text_drop(&path);
    return status;
}

static rsd_status take_tree(struct orbax_item *item, struct json *j)
{
    struct slice key;
    bool more;
    TRY(json_enter(j, '{'));
    for (;;) {
        TRY(json_next_key(j, &key, &more));
        if (!more)
            return RSD_OK;
        TRY(take_tree_entry(item, j));
    }
}

/* Reads _METADATA. */
static rsd_status take_tree_file(struct json *j, void *context)
{
    struct orbax_item *item = context;
    struct slice key;
    bool more;
    TRY(json_enter(j, '{'));
    for (;;) {
        TRY(json_next_key(j, &key, &more));
        if (!more)
            return RSD_OK;
        if (slice_is(key, "store_array_data_equal_to_fill_value"))
            item->tree->complete = json_peek(j) == 't';
        bool tree = slice_is(key, "tree_metadata") && json_peek(j) == '{';
        TRY(tree ? take_tree(item, j) : json_skip(j));
    }
}

rsd_status orbax_tree_read(struct orbax_item *item, uint32_t file)
{
    return format_parse_json(item->keys.store, file, MAX_METADATA_NBYTES, take_tree_file, item);
}

/* ---- values ---- */

rsd_status orbax_add_value(struct orbax_item *item, struct slice name, const char *path, char *json)
{
    struct text text = {0};
    char *full;
    orbax_add_name(item, name, &text);
    rsd_status status = text_take(&text, &full);
    if (status) {
        mem_free(json);
        return status;
    }
    status = catalog_add_json(item->catalog, slice_of(full), path, json);
    rsd_free(full);
    return status;
}

/* Adds the texts of _strings.json, also those that are not in the tree. */
static rsd_status take_strings(struct json *j, void *context)
{
    struct orbax_item *item = context;
    struct slice key, string;
    bool more;
    TRY(json_enter(j, '{'));
    for (;;) {
        TRY(json_next_key(j, &key, &more));
        if (!more)
            return RSD_OK;
        struct text text = {0}, name = {0};
        char *json = NULL;
        text_add(&name, "%.*s", (int)key.nbytes,
                 key.bytes); /* the next string may take its place */
        rsd_status status = name.failed ? RSD_ENOMEM : json_string(j, &string);
        if (!status) {
            json_add_string(&text, string.bytes, string.nbytes);
            status = text_take(&text, &json);
        }
        struct slice found = {name.chars, name.length};
        struct tree_entry *entry = status ? NULL : orbax_tree_find(item->tree, found);
        if (!status)
            status = orbax_add_value(item, found, entry ? entry->path : NULL, json);
        if (entry)
            entry->found = true;
        text_drop(&name);
        TRY(status);
    }
}

/* Adds a leaf that has no array: an empty container. EFORMAT: its array or text is missing. */
static rsd_status add_tree_value(struct orbax_item *item, struct tree_entry *entry)
{
    struct slice name = slice_of(entry->name);
    char *json = NULL;
    if (entry->kind == TREE_ARRAY || entry->kind == TREE_SCALAR)
        return fail(RSD_EFORMAT, "%.300s: the array of this name is missing", entry->name);
    if (entry->kind == TREE_STRING)
        return fail(RSD_EFORMAT, "%.300s: the text of this name is missing in _strings.json",
                    entry->name);
    if (name.nbytes == 0) /* the tree itself is empty */
        return RSD_OK;
    if (entry->json) {
        json = text_copy(entry->json);
        if (!json)
            return RSD_ENOMEM;
    }
    return orbax_add_value(item, name, entry->path, json);
}

rsd_status orbax_add_tree_values(struct orbax_item *item, uint32_t strings)
{
    if (strings != UINT32_MAX)
        TRY(format_parse_json(item->keys.store, strings, MAX_METADATA_NBYTES, take_strings, item));
    for (size_t i = 0; i < item->tree->n; i++) {
        struct tree_entry *entry = &item->tree->list[i];
        rsd_status status = entry->found ? RSD_OK : add_tree_value(item, entry);
        if (status)
            return fail_in(status, "%s%s%s: ", item->keys.store->path,
                           *item->keys.directory ? "/" : "", item->keys.directory);
    }
    return RSD_OK;
}
