/* stores.c - the table of stores, and what all of them have in common. */
#include "local.h"
#include "remote.h"

#include <stdio.h>
#include <stdlib.h>

static const struct store_ops *const stores[] = {&local_store, &s3_store, &https_store, &http_store,
                                                 NULL};

/* ---- names ---- */

rsd_status name_list_add(struct name_list *names, struct slice name)
{
    TRY(GROW(names->list, names->capacity, names->n + 1));
    char *copy = slice_copy(name);
    if (!copy)
        return RSD_ENOMEM;
    names->list[names->n++] = (struct slice){copy, name.nbytes};
    return RSD_OK;
}

void name_list_drop(struct name_list *names)
{
    for (size_t i = 0; i < names->n; i++)
        mem_free(without_const(names->list[i].bytes));
    mem_free(names->list);
    *names = (struct name_list){0};
}

rsd_status store_check_name(struct slice name)
{
    bool fine = name.nbytes > 0 && name.nbytes < 4096 && !memchr(name.bytes, '\0', name.nbytes);
    for (size_t at = 0; fine && at <= name.nbytes;) {
        const char *slash = memchr(name.bytes + at, '/', name.nbytes - at);
        size_t end = slash ? (size_t)(slash - name.bytes) : name.nbytes;
        struct slice part = {name.bytes + at, end - at};
        fine = part.nbytes > 0 && !slice_is(part, ".") && !slice_is(part, "..");
        at = end + 1;
    }
    if (!fine)
        return fail(RSD_EFORMAT, "'%.*s' is not the name of a file in this directory",
                    (int)(name.nbytes < 200 ? name.nbytes : 200), name.bytes);
    return RSD_OK;
}

/* ---- stores ---- */

/* Returns the store whose scheme a path begins with; the local one for any other path. */
static const struct store_ops *find_store(const char *path)
{
    for (size_t i = 0; stores[i]; i++) {
        size_t n = stores[i]->scheme ? strlen(stores[i]->scheme) : 0;
        if (n > 0 && strncmp(path, stores[i]->scheme, n) == 0 && strncmp(path + n, "://", 3) == 0)
            return stores[i];
    }
    return &local_store;
}

rsd_status store_open(const char *path, rsd_storage *storage, struct store **store,
                      const char **file)
{
    return find_store(path)->open(path, storage, store, file);
}

void store_close(struct store *store)
{
    if (!store)
        return;
    char *path = store->path;
    bool *counted = store->counted;
    struct name_list names = store->names;
    struct string_map numbers = store->numbers;
    store->ops->close(store);
    mem_free(path);
    mem_free(counted);
    string_map_drop(&numbers);
    name_list_drop(&names);
}

rsd_status store_add_file(struct store *store, struct slice name, uint32_t *file)
{
    size_t number = store->names.n;
    if (string_map_find(&store->numbers, name, &number)) {
        *file = (uint32_t)number;
        return RSD_OK;
    }
    TRY(store_check_name(name));
    if (number >= UINT32_MAX)
        return fail(RSD_ELIMIT, "checkpoint has more than 2^32 files");
    TRY(store->ops->add(store));
    TRY(name_list_add(&store->names, name));
    *file = (uint32_t)number;
    return string_map_add(&store->numbers, store->names.list[number], number);
}

static rsd_status fail_in_file(const struct store *store, const char *name, rsd_status status)
{
    size_t n = strlen(store->path);
    const char *slash = n == 0 || store->path[n - 1] == '/' ? "" : "/";
    return status ? fail_in(status, "%s%s%s: ", store->path, slash, name) : RSD_OK;
}

rsd_status store_fail_in(const struct store *store, uint32_t file, rsd_status status)
{
    return fail_in_file(store, store_file_name(store, file), status);
}

/* ---- listings ---- */

rsd_status store_listing_add(struct store_listing *listing, const char *directory, const char *name,
                             bool is_directory)
{
    size_t n = strlen(directory) + strlen(name) + 2;
    TRY(GROW(listing->entries, listing->capacity, listing->n + 1));
    char *path = mem_new(n, 1);
    if (!path)
        return RSD_ENOMEM;
    snprintf(path, n, "%s%s%s", directory, *directory ? "/" : "", name);
    const char *base = path + strlen(path) - strlen(name);
    listing->entries[listing->n++] = (struct store_entry){path, base, is_directory};
    return RSD_OK;
}

static int compare_entries(const void *a, const void *b)
{
    const struct store_entry *x = a, *y = b;
    return strverscmp(x->name, y->name);
}

rsd_status store_list(struct store *store, const char *directory, struct store_listing *out)
{
    *out = (struct store_listing){0};
    rsd_status status = store->ops->list(store, directory, out);
    if (status)
        store_listing_drop(out);
    else if (out->n > 1)
        qsort(out->entries, out->n, sizeof *out->entries, compare_entries);
    return status;
}

void store_listing_drop(struct store_listing *listing)
{
    for (size_t i = 0; i < listing->n; i++)
        mem_free(listing->entries[i].name);
    mem_free(listing->entries);
    *listing = (struct store_listing){0};
}

/* ---- files ---- */

rsd_status store_stat(struct store *store, uint32_t file, uint64_t *nbytes, int64_t *version)
{
    int64_t ignored;
    return store->ops->stat(store, file, nbytes, version ? version : &ignored);
}

rsd_status store_stat_own(struct store *store, uint32_t file, uint64_t *nbytes)
{
    TRY(store_stat(store, file, nbytes, NULL));
    if (store->ops->repeats && store->ops->repeats(store, file))
        *nbytes = 0;
    return RSD_OK;
}

rsd_status store_check_bounds(uint64_t offset, uint64_t n, uint64_t nbytes)
{
    if (offset <= nbytes && n <= nbytes - offset)
        return RSD_OK;
    return fail(RSD_EFORMAT, "bytes %llu to %llu exceed the file of %llu bytes",
                (unsigned long long)offset, (unsigned long long)(offset + n),
                (unsigned long long)nbytes);
}

rsd_status store_check_range(struct store *store, uint32_t file, uint64_t offset, uint64_t n)
{
    uint64_t nbytes;
    TRY(store_stat(store, file, &nbytes, NULL));
    return store_check_bounds(offset, n, nbytes);
}

/* Says how long a file is, before it is read for the first time. */
static rsd_status count_file(struct store *store, uint32_t file)
{
    uint64_t nbytes;
    size_t known = store->counted_capacity;
    TRY(GROW(store->counted, store->counted_capacity, (size_t)file + 1));
    for (size_t i = known; i < store->counted_capacity; i++)
        store->counted[i] = false;
    if (store->counted[file])
        return RSD_OK;
    TRY(store_stat_own(store, file, &nbytes));
    store->counted[file] = true;
    budget_add_file(nbytes);
    return RSD_OK;
}

rsd_status store_read(struct store *store, uint32_t file, uint64_t offset, void *out, size_t n)
{
    if (budget_counts_files())
        TRY(count_file(store, file));
    budget_add_input(n);
    return store->ops->read(store, file, offset, out, n);
}

rsd_status store_read_runs(struct store *store, uint32_t file, const struct store_run *runs,
                           size_t nruns)
{
    if (budget_counts_files())
        TRY(count_file(store, file));
    for (size_t i = 0; i < nruns; i++)
        budget_add_input(runs[i].n);
    if (store->ops->read_runs)
        return store->ops->read_runs(store, file, runs, nruns);
    for (size_t i = 0; i < nruns; i++)
        TRY(store->ops->read(store, file, runs[i].offset, runs[i].out, runs[i].n));
    return RSD_OK;
}

void store_prefetch(struct store *store, uint32_t file, uint64_t offset, uint64_t n)
{
    if (store->ops->prefetch && n > 0)
        store->ops->prefetch(store, file, offset, n);
}

void store_start_prefetch(struct store *store)
{
    if (store->ops->start_prefetch)
        store->ops->start_prefetch(store);
}

void store_release(struct store *store, uint32_t file, uint64_t offset, uint64_t n)
{
    if (store->ops->release && n > 0)
        store->ops->release(store, file, offset, n);
}

rsd_status store_range_read(void *context, uint64_t offset, void *out, size_t n)
{
    const struct store_range *range = context;
    return store_read(range->store, range->file, range->offset + offset, out, n);
}

rsd_status store_load(struct store *store, uint32_t file, uint64_t limit, char **bytes, size_t *n)
{
    uint64_t nbytes;
    TRY(store_stat(store, file, &nbytes, NULL));
    if (nbytes > limit)
        return fail(RSD_ELIMIT, "file of %llu bytes exceeds the limit of %llu bytes",
                    (unsigned long long)nbytes, (unsigned long long)limit);
    char *memory = mem_new((size_t)nbytes + 1, 1);
    if (!memory)
        return RSD_ENOMEM;
    rsd_status status = store_read(store, file, 0, memory, (size_t)nbytes);
    if (status) {
        mem_free(memory);
        return status;
    }
    *bytes = memory;
    *n = (size_t)nbytes;
    return RSD_OK;
}

rsd_status store_create(struct store *store, uint32_t file, uint64_t kept, uint64_t nbytes)
{
    return store->ops->create(store, file, kept, nbytes);
}

rsd_status store_reserve(struct store *store, uint32_t file, uint64_t offset, uint64_t nbytes)
{
    return store->ops->reserve ? store->ops->reserve(store, file, offset, nbytes) : RSD_OK;
}

rsd_status store_write(struct store *store, uint32_t file, uint64_t offset, const void *data,
                       size_t n)
{
    return store->ops->write(store, file, offset, data, n);
}

rsd_status store_clone(struct store *store, uint32_t file, uint64_t offset, struct store *from,
                       uint32_t from_file, uint64_t from_offset, uint64_t n)
{
    if (!store->ops->clone || from->ops != store->ops)
        return fail(RSD_EUNSUPPORTED, "%s and %s cannot share extents", from->path, store->path);
    return store->ops->clone(store, file, offset, from, from_file, from_offset, n);
}

rsd_status store_sync(struct store *store, uint32_t file)
{
    return store->ops->sync(store, file);
}

rsd_status store_end_file(struct store *store, uint32_t file, uint64_t nbytes)
{
    if (store->ops->end_file)
        return store->ops->end_file(store, file, nbytes);
    return store->unsynced ? RSD_OK : store->ops->sync(store, file);
}

bool store_has(struct store *store, uint32_t file, uint64_t offset, uint64_t n)
{
    return store->ops->has && store->ops->has(store, file, offset, n);
}

rsd_status store_sync_names(struct store *store)
{
    return store->ops->sync_names(store);
}

rsd_status store_put(struct store *store, const char *name, const void *data, size_t n)
{
    return fail_in_file(store, name, store->ops->put(store, name, data, n));
}

rsd_status store_rename(struct store *store, const char *from, const char *to)
{
    return fail_in_file(store, from, store->ops->rename(store, from, to));
}

rsd_status store_remove(struct store *store, const char *name)
{
    return fail_in_file(store, name, store->ops->remove(store, name));
}

/* ---- outputs ---- */

rsd_status store_open_output(const char *path, const struct output_options *options,
                             struct store_output **output)
{
    const struct store_ops *ops = find_store(path);
    if (!ops->open_output)
        return fail(RSD_EUNSUPPORTED, "%s: %s:// is for reading only", path, ops->scheme);
    return ops->open_output(path, options, output);
}

rsd_status store_check_output(const char *path, const struct output_options *options)
{
    const struct store_ops *ops = find_store(path);
    if (!ops->check_output)
        return fail(RSD_EUNSUPPORTED, "%s: %s:// is for reading only", path, ops->scheme);
    return ops->check_output(path, options);
}

rsd_status store_sync_journal(struct store_output *output)
{
    return output->ops->sync_journal ? output->ops->sync_journal(output) : RSD_OK;
}

rsd_status store_commit(struct store_output *output)
{
    return output->ops->commit(output);
}

void store_close_output(struct store_output *output, bool keep)
{
    if (output)
        output->ops->close_output(output, keep);
}
