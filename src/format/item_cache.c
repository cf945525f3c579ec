/* item_cache.c - items in the data files of DCP that take long to parse, and are parsed once.
 *
 * Many tensors refer to one safetensors blob, so its header is parsed when the first of them is located, and
 * kept until the checkpoint is closed. An archive has one tensor, but a hostile file may refer to it from
 * many, so what was found in a large one is kept too. What is invalid is not parsed again either.
 */
#include "safetensors.h"
#include "torch_item.h"

#include <pthread.h>
#include <stdio.h>

/* Headers of one checkpoint may have so many bytes, and twice as many as the files that they are in. */
enum { START_HEADER_NBYTES = 4 << 20, MAX_HEADER_GROWTH = 2 };

struct blob {
    uint64_t key[2]; /* file and offset */
    struct catalog names;
    struct header_set set;
    uint64_t data;     /* where the bytes of its tensors begin in the file */
    rsd_status status; /* of the parsing */
    char *message;
};

/* A large archive. */
struct located_archive {
    uint64_t key[3]; /* file, offset, length */
    struct torch_view view;
    struct stored_array array;
    rsd_status status;
    char message[512];
};

struct item_cache {
    pthread_mutex_t lock;
    struct string_map map;   /* from keys to numbers in the list */
    struct string_map files; /* that have a blob in the list */
    struct blob **list;
    size_t n, capacity;
    uint64_t nbytes_left; /* of headers that may still be parsed */
    struct string_map archive_map;
    struct located_archive **archives;
    size_t narchives, archives_capacity;
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

static void drop_blob(struct blob *blob)
{
    header_set_drop(&blob->set);
    catalog_drop(&blob->names);
    mem_free(blob->message);
    mem_free(blob);
}

void item_cache_close(struct item_cache *cache)
{
    if (!cache)
        return;
    for (size_t i = 0; i < cache->n; i++)
        drop_blob(cache->list[i]);
    for (size_t i = 0; i < cache->narchives; i++)
        mem_free(cache->archives[i]);
    mem_free(cache->archives);
    string_map_drop(&cache->archive_map);
    mem_free(cache->list);
    string_map_drop(&cache->map);
    string_map_drop(&cache->files);
    pthread_mutex_destroy(&cache->lock);
    mem_free(cache);
}

/* Takes the length of a header from what may be parsed. A file adds to it with its first blob. */
static rsd_status take_header_nbytes(struct item_cache *cache, struct store *store, uint32_t file,
                                     uint64_t at)
{
    const uint64_t key = file;
    unsigned char length[8];
    uint64_t nbytes;
    size_t number;
    TRY(store_stat(store, file, &nbytes, NULL));
    if (!string_map_find(&cache->files, (struct slice){(const char *)&key, sizeof key}, &number) &&
        nbytes < UINT64_MAX / 4)
        cache->nbytes_left += nbytes * MAX_HEADER_GROWTH;
    TRY(store_read(store, file, at, length, sizeof length));
    uint64_t header = little_endian(length, sizeof length);
    if (header > cache->nbytes_left)
        return fail(RSD_EFORMAT, "headers of blobs are longer than %d times their files",
                    (int)MAX_HEADER_GROWTH);
    cache->nbytes_left -= header;
    return RSD_OK;
}

/* Parses a blob, and adds it to the cache, also if it is invalid. */
static rsd_status add_blob(struct item_cache *cache, struct store *store, uint32_t file,
                           uint64_t at, struct blob **out)
{
    TRY(mem_grow(&cache->list, &cache->capacity, cache->n + 1, sizeof(struct blob *)));
    struct blob *blob = mem_new(1, sizeof *blob);
    if (!blob)
        return RSD_ENOMEM;
    blob->key[0] = file;
    blob->key[1] = at;
    blob->set = (struct header_set){.catalog = &blob->names, .store = store};
    rsd_status status = take_header_nbytes(cache, store, file, at);
    if (!status)
        status = header_set_add_blob(&blob->set, file, at, &blob->data);
    if (status && status != RSD_EFORMAT && status != RSD_EUNSUPPORTED) {
        drop_blob(blob);
        return status;
    }
    blob->status = status;
    blob->message = text_copy(rsd_error());
    struct slice key = {(const char *)blob->key, sizeof blob->key};
    status =
        blob->message ? string_map_add(&cache->files, (struct slice){key.bytes, 8}, 0) : RSD_ENOMEM;
    if (!status)
        status = string_map_add(&cache->map, key, cache->n);
    if (status) { /* the maps may refer to it */
        cache->list[cache->n++] = blob;
        return status;
    }
    *out = cache->list[cache->n++] = blob;
    return RSD_OK;
}

/* ---- archives ---- */

enum { LARGE_NBYTES = 8192 }; /* besides the tensor; less is parsed faster than it is found */

/* Returns whether an archive was parsed before, and with what result. */
static bool find_archive(struct item_cache *cache, const uint64_t key[3], struct torch_view *view,
                         struct stored_array *array, rsd_status *status)
{
    size_t number;
    pthread_mutex_lock(&cache->lock);
    bool found = string_map_find(&cache->archive_map,
                                 (struct slice){(const char *)key, 3 * sizeof *key}, &number);
    if (found) {
        const struct located_archive *archive = cache->archives[number];
        *view = archive->view;
        *array = archive->array;
        *status = archive->status ? fail(archive->status, "%s", archive->message) : RSD_OK;
    }
    pthread_mutex_unlock(&cache->lock);
    return found;
}

/* Keeps what was found in an archive, also an error. */
static rsd_status keep_archive(struct item_cache *cache, const uint64_t key[3],
                               const struct torch_view *view, const struct stored_array *array,
                               rsd_status found)
{
    struct located_archive *archive = mem_new(1, sizeof *archive);
    if (!archive)
        return RSD_ENOMEM;
    *archive = (struct located_archive){.view = *view, .array = *array, .status = found};
    memcpy(archive->key, key, sizeof archive->key);
    snprintf(archive->message, sizeof archive->message, "%s", rsd_error());
    pthread_mutex_lock(&cache->lock);
    rsd_status status = mem_grow(&cache->archives, &cache->archives_capacity, cache->narchives + 1,
                                 sizeof(struct located_archive *));
    if (!status)
        status = string_map_add(&cache->archive_map,
                                (struct slice){(const char *)archive->key, sizeof archive->key},
                                cache->narchives);
    if (!status)
        cache->archives[cache->narchives++] = archive;
    pthread_mutex_unlock(&cache->lock);
    if (status)
        mem_free(archive);
    return status;
}

rsd_status archive_locate(const rsd_checkpoint *checkpoint, const struct extent *extent,
                          struct torch_view *view, struct stored_array *array)
{
    struct item_cache *cache = checkpoint->items;
    const uint64_t key[3] = {extent->file, extent->offset, extent->nbytes};
    rsd_status status;
    if (extent->nbytes > LARGE_NBYTES && find_archive(cache, key, view, array, &status))
        return status;
    *view = (struct torch_view){0};
    *array = (struct stored_array){0};
    status = torch_item_locate(checkpoint->store, extent, view, array);
    view->key = (struct slice){"", 0}; /* it was in the tree */
    bool large = extent->nbytes > LARGE_NBYTES && extent->nbytes - LARGE_NBYTES > array->nbytes;
    if (!large || (status && status != RSD_EFORMAT && status != RSD_EUNSUPPORTED))
        return status;
    TRY(keep_archive(cache, key, view, array, status));
    return status;
}

/* ---- blobs ---- */

rsd_status blob_find_tensor(const rsd_checkpoint *checkpoint, uint32_t file, uint64_t at,
                            const char *name, struct header_tensor *tensor, uint64_t *begin)
{
    struct item_cache *cache = checkpoint->items;
    const uint64_t key[2] = {file, at};
    struct blob *blob = NULL;
    rsd_status status = RSD_OK;
    size_t number;
    pthread_mutex_lock(&cache->lock);
    if (string_map_find(&cache->map, (struct slice){(const char *)key, sizeof key}, &number))
        blob = cache->list[number];
    else
        status = add_blob(cache, checkpoint->store, file, at, &blob);
    pthread_mutex_unlock(&cache->lock); /* what was parsed does not change any more */
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
