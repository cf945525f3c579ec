/* key_list.c - the keys of a checkpoint: those of a database, or the names of the files in a directory.
 *
 * Keys are short in a database, where each shares its first bytes with the one before it. So what is made
 * of them is taken from the budget of the call.
 */
#include "orbax.h"

enum { MAX_LEVELS = 32, MAX_ENTRIES = 1 << 22 };

void key_list_start(struct key_list *keys, struct store *store, const char *directory)
{
    *keys = (struct key_list){.store = store, .directory = directory};
}

void key_list_drop(struct key_list *keys)
{
    mem_free(keys->list);
    bytes_drop(&keys->texts);
    mem_free(keys->used);
    *keys = (struct key_list){0};
}

rsd_status key_list_add(struct key_list *keys, struct slice key, const struct stored_key *value)
{
    TRY(budget_use_memory(sizeof *value));
    TRY(GROW(keys->list, keys->capacity, keys->n + 1));
    struct stored_key *added = &keys->list[keys->n];
    *added = *value;
    added->text = keys->texts.n;
    added->nbytes = key.nbytes;
    bytes_put(&keys->texts, key.bytes, key.nbytes);
    if (keys->texts.failed)
        return RSD_ENOMEM;
    keys->n++;
    return RSD_OK;
}

rsd_status key_list_use(struct key_list *keys, uint32_t file, uint64_t nbytes)
{
    uint64_t file_nbytes;
    size_t known = keys->used_capacity;
    TRY(GROW(keys->used, keys->used_capacity, (size_t)file + 1));
    for (size_t i = known; i < keys->used_capacity; i++)
        keys->used[i] = 0;
    TRY(store_stat(keys->store, file, &file_nbytes, NULL));
    if (nbytes > file_nbytes - keys->used[file])
        return fail(RSD_EFORMAT, "bytes of the file are referred to several times");
    keys->used[file] += nbytes;
    return RSD_OK;
}

/* ---- directories ---- */

/* Adds the files of a directory and of those below it. skip: bytes of their names that are not in keys. */
static rsd_status add_directory(struct key_list *keys, const char *directory, size_t skip,
                                int level)
{
    struct store_listing listing;
    const char *path = keys->store->path;
    if (level > MAX_LEVELS)
        return fail(RSD_ELIMIT, "%s/%s: nesting exceeds %d levels", path, directory,
                    (int)MAX_LEVELS);
    rsd_status status = store_list(keys->store, directory, &listing);
    if (status)
        return fail_in(status, "%s/%s: ", path, directory);
    for (size_t i = 0; i < listing.n && !status; i++) {
        const struct store_entry *entry = &listing.entries[i];
        struct slice key = {entry->name + skip, strlen(entry->name) - skip};
        if (entry->directory)
            status = add_directory(keys, entry->name, skip, level + 1);
        else if (keys->n < MAX_ENTRIES)
            status = key_list_add(keys, key, &(struct stored_key){.by_name = true});
        else
            status = fail(RSD_ELIMIT, "%s has more than %d files", path, (int)MAX_ENTRIES);
    }
    store_listing_drop(&listing);
    return status;
}

rsd_status key_list_add_directory(struct key_list *keys)
{
    const char *directory = keys->directory;
    return add_directory(keys, directory, *directory ? strlen(directory) + 1 : 0, 0);
}

/* ---- values ---- */

rsd_status key_list_find_value(struct key_list *keys, size_t index)
{
    struct stored_key *key = &keys->list[index];
    if (!key->by_name)
        return RSD_OK;
    TRY(format_add_file(keys->store, keys->directory, key_list_text(keys, index), &key->file));
    TRY(store_stat(keys->store, key->file, &key->value_nbytes, NULL));
    key->by_name = false;
    return RSD_OK;
}

rsd_status key_list_read(struct key_list *keys, size_t index, uint64_t at, void *out, size_t n)
{
    const struct stored_key *key = &keys->list[index];
    if (key->memory) {
        memcpy(out, key->memory + at, n);
        return RSD_OK;
    }
    TRY(key_list_use(keys, key->file, n));
    return store_read(keys->store, key->file, key->offset + at, out, n);
}

rsd_status key_list_fail_in(const struct key_list *keys, size_t index, rsd_status status)
{
    struct slice key = key_list_text(keys, index);
    return fail_in(status, "%s%s%s/%.*s: ", keys->store->path, *keys->directory ? "/" : "",
                   keys->directory, slice_width(key, 300), key.bytes);
}
