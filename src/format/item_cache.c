/* item_cache.c - items in the data files of DCP that take long to parse, and are parsed once.
 *
 * Many tensors refer to one safetensors blob, so its header is parsed when the first of them is located, and
 * kept until the checkpoint is closed. An archive has one tensor, but a hostile file may refer to it from
 * many, so what was found in a large one is kept too. What is invalid is not parsed again either.
 */
#include "safetensors.h"
#include "torch_item.h"

#include <pthread.h>

/* Headers of one checkpoint may have so many bytes, and twice as many as the files that they are in. */
enum { START_HEADER_NBYTES = 4 << 20, MAX_HEADER_GROWTH = 2 };

/* A blob with the headers of its tensors, or a large archive with its one tensor. */
struct cached_item {
    uint64_t key[3];           /* file, offset, length; 0 for a blob, whose length is not known */
    rsd_status status;         /* of the parsing */
    char *message;             /* its error */
    struct torch_view view;    /* of an archive */
    struct stored_array array; /* likewise */
    struct header_set set;     /* of a blob */
    struct catalog names;      /* in the set */
    uint64_t data;             /* where the bytes of the blob's tensors begin in the file */
};

struct item_cache {
    pthread_mutex_t lock;
    struct string_map map;   /* from keys to numbers in the list */
    struct string_map files; /* names of those that have a blob in the list */
    struct cached_item **list;
    size_t n, capacity;
    uint64_t nbytes_left; /* of headers that may still be parsed */
};

rsd_status item_cache_open(struct item_cache **out)
{
    struct item_cache *cache = mem_new(1, sizeof *cache);
    if (!cache)
        return RSD_ENOMEM;
    pthread_mutex_init(&cache->lock, NULL);
    cache->nbytes_left = START_HEADER_NBYTES;
    *out = cache;
    return RSD_OK;
}

static void drop_cached_item(struct cached_item *item)
{
    header_set_drop(&item->set);
    catalog_drop(&item->names);
    mem_free(item->message);
    mem_free(item);
}

void item_cache_close(struct item_cache *cache)
{
    if (!cache)
        return;
    for (size_t i = 0; i < cache->n; i++)
        drop_cached_item(cache->list[i]);
    mem_free(cache->list);
    string_map_drop(&cache->map);
    string_map_drop(&cache->files);
    pthread_mutex_destroy(&cache->lock);
    mem_free(cache);
}

static struct slice key_slice(const uint64_t key[3])
{
    return (struct slice){(const char *)key, 3 * sizeof *key};
}

/* Returns the item of a key, or NULL. Requires the lock; what was parsed does not change any more. */
static struct cached_item *find_cached_item(const struct item_cache *cache, const uint64_t key[3])
{
    size_t number;
    return string_map_find(&cache->map, key_slice(key), &number) ? cache->list[number] : NULL;
}

/* Returns whether the same bytes always fail in this way. */
static bool is_lasting(rsd_status status)
{
    return !status || status == RSD_EFORMAT || status == RSD_EUNSUPPORTED;
}

/* Adds an item with the result of its parsing, which is the last error. Takes the item over, also on failure.
 * Requires the lock. */
static rsd_status keep_cached_item(struct item_cache *cache, struct cached_item *item,
                                   rsd_status parsed)
{
    item->status = parsed;
    item->message = text_copy(rsd_error());
    rsd_status status = item->message ? RSD_OK : RSD_ENOMEM;
    if (!status)
        status =
            mem_grow(&cache->list, &cache->capacity, cache->n + 1, sizeof(struct cached_item *));
    if (!status)
        status = string_map_add(&cache->map, key_slice(item->key), cache->n);
    if (status)
        drop_cached_item(item);
    else
        cache->list[cache->n++] = item;
    return status;
}

/* ---- archives ---- */

enum { LARGE_NBYTES = 4096 }; /* besides the tensor; less is parsed faster than it is found */

/* Keeps what was found in an archive, also an error. */
static rsd_status keep_archive(struct item_cache *cache, const struct extent *extent,
                               const struct torch_view *view, const struct stored_array *array,
                               rsd_status parsed)
{
    struct cached_item *item = mem_new(1, sizeof *item);
    if (!item)
        return RSD_ENOMEM;
    *item = (struct cached_item){
        .key = {extent->file, extent->offset, extent->nbytes}, .view = *view, .array = *array};
    pthread_mutex_lock(&cache->lock);
    rsd_status status = keep_cached_item(cache, item, parsed);
    pthread_mutex_unlock(&cache->lock);
    return status;
}

rsd_status archive_locate(const rsd_checkpoint *checkpoint, const struct extent *extent,
                          struct torch_view *view, struct stored_array *array)
{
    struct item_cache *cache = checkpoint->items;
    const uint64_t key[3] = {extent->file, extent->offset, extent->nbytes};
    const struct cached_item *item = NULL;
    if (extent->nbytes > LARGE_NBYTES) {
        pthread_mutex_lock(&cache->lock);
        item = find_cached_item(cache, key);
        pthread_mutex_unlock(&cache->lock);
    }
    if (item) {
        *view = item->view;
        *array = item->array;
        return item->status ? fail(item->status, "%s", item->message) : RSD_OK;
    }
    *view = (struct torch_view){0};
    *array = (struct stored_array){0};
    rsd_status status = torch_item_locate(checkpoint->store, extent, view, array);
    view->key = slice_of(""); /* it was in the tree */
    if (extent->nbytes > LARGE_NBYTES && extent->nbytes - LARGE_NBYTES > array->nbytes &&
        is_lasting(status))
        TRY(keep_archive(cache, extent, view, array, status));
    return status;
}

/* ---- blobs ---- */

/* Takes the length of a header from what may be parsed. A file adds to it with its first blob. */
static rsd_status take_header_nbytes(struct item_cache *cache, struct store *store, uint32_t file,
                                     uint64_t at)
{
    struct slice name = store->names.list[file];
    unsigned char length[8];
    uint64_t nbytes;
    size_t number;
    TRY(store_stat_own(store, file, &nbytes));
    if (!string_map_find(&cache->files, name, &number)) {
        TRY(string_map_add(&cache->files, name, 0));
        cache->nbytes_left += nbytes < UINT64_MAX / 4 ? nbytes * MAX_HEADER_GROWTH : 0;
    }
    TRY(store_read(store, file, at, length, sizeof length));
    uint64_t header = little_endian(length, sizeof length);
    if (header > cache->nbytes_left)
        return fail(RSD_EFORMAT, "headers of blobs are longer than %d times their files",
                    (int)MAX_HEADER_GROWTH);
    cache->nbytes_left -= header;
    return RSD_OK;
}

/* Parses a blob, and adds it to the cache, also if it is invalid. Requires the lock. */
static rsd_status add_blob(struct item_cache *cache, struct store *store, const uint64_t key[3])
{
    uint32_t file = (uint32_t)key[0];
    struct cached_item *blob = mem_new(1, sizeof *blob);
    if (!blob)
        return RSD_ENOMEM;
    memcpy(blob->key, key, sizeof blob->key);
    blob->set = (struct header_set){.catalog = &blob->names, .store = store};
    rsd_status status = take_header_nbytes(cache, store, file, key[1]);
    if (!status)
        status = header_set_add_blob(&blob->set, file, key[1], &blob->data);
    if (is_lasting(status))
        return keep_cached_item(cache, blob, status);
    drop_cached_item(blob);
    return status;
}

rsd_status blob_find_tensor(const rsd_checkpoint *checkpoint, uint32_t file, uint64_t at,
                            const char *name, struct header_tensor *tensor, uint64_t *begin)
{
    struct item_cache *cache = checkpoint->items;
    const uint64_t key[3] = {file, at, 0};
    rsd_status status = RSD_OK;
    pthread_mutex_lock(&cache->lock);
    struct cached_item *blob = find_cached_item(cache, key);
    if (!blob) {
        status = add_blob(cache, checkpoint->store, key);
        blob = status ? NULL : cache->list[cache->n - 1];
    }
    pthread_mutex_unlock(&cache->lock);
    TRY(status);
    if (blob->status)
        return fail(blob->status, "%s", blob->message);
    const struct header_tensor *found = header_set_find(&blob->set, name);
    if (!found)
        return fail(RSD_EFORMAT, "blob at byte %llu has no tensor %.300s", (unsigned long long)at,
                    name);
    TRY(header_tensor_check(found));
    *begin = blob->data + found->begin;
    *tensor = *found;
    return store_check_range(checkpoint->store, file, *begin, found->end - found->begin);
}
