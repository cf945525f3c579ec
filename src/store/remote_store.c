/* remote_store.c - files that are read through requests, and blocks of them that are read ahead.
 *
 *     remote_prefetch   these bytes will be read: they become blocks. Ranges that are a little apart become
 *                       one request.
 *     remote_start_...  blocks are requested as the limits on requests and memory allow
 *     remote_read       copies from a block, waiting for it if need be; other bytes are requested at once
 *     remote_release    these bytes are not read again: a block of which all are released is freed
 *
 * A reader never waits for the limits: a block that it needs is requested whatever they say, so whoever
 * prefetches too much cannot stop a reader.
 */
#include "remote.h"

#include <stdio.h>
#include <strings.h>

enum { JOINED_GAP = 64 << 10, MAX_BLOCKS = 2000 };

/* Bytes of a file that are requested together. */
struct remote_block {
    struct remote_store *store;
    uint32_t file;
    uint64_t offset, nbytes;
    uint64_t wanted; /* bytes that were prefetched and not released */
    bool requested, arrived;
    int nusers;
    char *data;
    struct http_request request;
    struct remote_block *next;         /* in the file */
    struct remote_block *next_waiting; /* in the store, until it is requested */
};

/* ---- opening ---- */

rsd_status remote_open(const struct store_ops *ops, remote_set_request *set_request,
                       rsd_storage *storage, const char *path, struct remote_store **out)
{
    struct remote_store *store = mem_new(1, sizeof *store);
    char *copy = text_copy(path);
    rsd_status status = store && copy ? storage_use(storage, &store->storage) : RSD_ENOMEM;
    if (status) {
        mem_free(store);
        mem_free(copy);
        return status;
    }
    store->base = (struct store){.ops = ops, .path = copy};
    store->set_request = set_request;
    store->waiting_end = &store->waiting;
    pthread_mutex_init(&store->lock, NULL);
    pthread_cond_init(&store->arrived, NULL);
    *out = store;
    return RSD_OK;
}

static void drop_block(struct remote_block *block)
{
    storage_free_buffer(block->store->storage, STORAGE_READS, block->data, (size_t)block->nbytes);
    http_request_drop(&block->request);
    mem_free(block);
}

/* Ends what is being requested, and frees all blocks. */
static void close_blocks(struct remote_store *store)
{
    pthread_mutex_lock(&store->lock);
    store->waiting = NULL;
    store->waiting_end = &store->waiting;
    for (size_t i = 0; i < store->base.names.n; i++)
        for (struct remote_block *block = store->files[i].blocks; block; block = block->next)
            if (block->requested && !block->arrived)
                http_cancel(&block->request);
    while (store->nactive > 0)
        pthread_cond_wait(&store->arrived, &store->lock);
    pthread_mutex_unlock(&store->lock);
    for (size_t i = 0; i < store->base.names.n; i++)
        for (struct remote_block *block = store->files[i].blocks, *next; block; block = next) {
            next = block->next;
            drop_block(block);
        }
}

void remote_close(struct store *base)
{
    struct remote_store *store = remote_store_of(base);
    close_blocks(store);
    storage_trim(store->storage);
    for (size_t i = 0; i < base->names.n; i++)
        mem_free(store->files[i].etag);
    for (size_t i = 0; i < store->nknown; i++) {
        mem_free(store->known[i].name);
        mem_free(store->known[i].etag);
    }
    string_map_drop(&store->known_names);
    mem_free(store->known);
    mem_free(store->files);
    mem_free(store->bucket);
    mem_free(store->prefix);
    mem_free(store->only_path);
    mem_free(store->only_query);
    pthread_mutex_destroy(&store->lock);
    pthread_cond_destroy(&store->arrived);
    rsd_storage_free(store->storage);
    mem_free(store);
}

rsd_status remote_add(struct store *base)
{
    struct remote_store *store = remote_store_of(base);
    pthread_mutex_lock(&store->lock); /* blocks of other files may arrive */
    rsd_status status = GROW(store->files, store->files_capacity, base->names.n + 1);
    if (!status)
        store->files[base->names.n] = (struct remote_file){0};
    pthread_mutex_unlock(&store->lock);
    return status;
}

/* ---- sizes ---- */

rsd_status remote_note_file(struct remote_store *store, const char *name, uint64_t nbytes,
                            const char *etag)
{
    size_t number;
    if (string_map_find(&store->known_names, (struct slice){name, strlen(name)}, &number))
        return RSD_OK;
    TRY(GROW(store->known, store->known_capacity, store->nknown + 1));
    struct remote_known known = {
        .name = text_copy(name), .etag = text_copy(etag), .nbytes = nbytes};
    rsd_status status = known.name && known.etag ? RSD_OK : RSD_ENOMEM;
    if (!status)
        status = string_map_add(&store->known_names, (struct slice){known.name, strlen(name)},
                                store->nknown);
    if (status) {
        mem_free(known.name);
        mem_free(known.etag);
        return status;
    }
    store->known[store->nknown++] = known;
    return RSD_OK;
}

rsd_status remote_head(struct remote_store *store, const char *name, struct http_answer *answer)
{
    struct http_request request = {.storage = store->storage, .method = "HEAD"};
    rsd_status status = store->set_request(store, name, &request);
    if (!status)
        status = http_run(&request);
    if (!status && (!request.answer.has_length || request.answer.encoded))
        status = fail(RSD_EIO, "the server does not tell the length of the file");
    if (!status)
        *answer = request.answer;
    http_request_drop(&request);
    return status;
}

/* Keeps the size and the version of a file; the store is locked. */
static rsd_status set_size(struct remote_file *file, uint64_t nbytes, const char *etag)
{
    struct hash hash;
    hash_start(&hash, "etag");
    hash_string(&hash, etag);
    mem_free(file->etag);
    file->etag = NULL;
    if (*etag && !(file->etag = text_copy(etag)))
        return RSD_ENOMEM;
    file->nbytes = nbytes;
    file->version = (int64_t)(hash.a >> 1);
    file->known = true;
    return RSD_OK;
}

/* Learns the size of a file, if it is not known yet. The store is locked before and after. */
static rsd_status learn_size(struct remote_store *store, uint32_t index)
{
    const char *name = store_file_name(&store->base, index);
    struct remote_file *file = &store->files[index];
    struct http_answer answer;
    size_t number;
    if (file->known)
        return RSD_OK;
    if (string_map_find(&store->known_names, (struct slice){name, strlen(name)}, &number)) {
        const struct remote_known *known = &store->known[number];
        return set_size(file, known->nbytes, known->etag);
    }
    pthread_mutex_unlock(&store->lock);
    rsd_status status = remote_head(store, name, &answer);
    pthread_mutex_lock(&store->lock);
    if (status || file->known) /* another thread may have been faster */
        return status;
    return set_size(file, answer.length, answer.etag);
}

rsd_status remote_stat(struct store *base, uint32_t index, uint64_t *nbytes, int64_t *version)
{
    struct remote_store *store = remote_store_of(base);
    pthread_mutex_lock(&store->lock);
    rsd_status status = learn_size(store, index);
    if (!status) {
        *nbytes = store->files[index].nbytes;
        *version = store->files[index].version;
    }
    pthread_mutex_unlock(&store->lock);
    return status;
}

/* ---- requests ---- */

/* Fills in the request of n bytes of a file, of the version that was opened. */
static rsd_status prepare_range(struct remote_store *store, uint32_t index, uint64_t offset,
                                char *out, size_t n, struct http_request *request)
{
    const struct remote_file *file = &store->files[index];
    *request = (struct http_request){.storage = store->storage,
                                     .method = "GET",
                                     .for_range = true,
                                     .out = out,
                                     .out_nbytes = n,
                                     .offset = offset,
                                     .total = file->nbytes,
                                     .etag = file->etag};
    TRY(store->set_request(store, store_file_name(&store->base, index), request));
    http_set_header(request, "range", "bytes=%llu-%llu", (unsigned long long)offset,
                    (unsigned long long)(offset + n - 1));
    const char *quote = file->etag && !strchr(file->etag, '"') ? "\"" : "";
    if (file->etag && request->sign)
        http_set_header(request, "if-match", "%s%s%s", quote, file->etag, quote);
    return RSD_OK;
}

static rsd_status name_range(rsd_status status, uint64_t offset, uint64_t n)
{
    return status ? fail_in(status, "bytes %llu to %llu: ", (unsigned long long)offset,
                            (unsigned long long)(offset + n))
                  : RSD_OK;
}

static rsd_status read_directly(struct remote_store *store, uint32_t index, uint64_t offset,
                                char *out, size_t n)
{
    struct http_request request;
    rsd_status status = prepare_range(store, index, offset, out, n, &request);
    if (!status)
        status = http_run(&request);
    http_request_drop(&request);
    return name_range(status, offset, n);
}

/* ---- blocks; the store is locked ---- */

static void start_blocks(struct remote_store *store);

/* Called by the engine. */
static void finish_block(struct http_request *request)
{
    struct remote_block *block = request->context;
    struct remote_store *store = block->store;
    pthread_mutex_lock(&store->lock);
    block->arrived = true;
    store->nactive--;
    start_blocks(store);
    pthread_cond_broadcast(&store->arrived);
    pthread_mutex_unlock(&store->lock);
}

/* Requests a block. On failure the block has arrived, with an error. */
static void request_block(struct remote_block *block)
{
    struct remote_store *store = block->store;
    block->requested = true;
    block->data = storage_new_buffer(store->storage, STORAGE_READS, (size_t)block->nbytes);
    rsd_status status = block->data ? prepare_range(store, block->file, block->offset, block->data,
                                                    (size_t)block->nbytes, &block->request)
                                    : RSD_ENOMEM;
    block->request.done = finish_block;
    block->request.context = block;
    if (!status)
        status = http_start(&block->request);
    if (status) {
        block->request.status = status;
        snprintf(block->request.error, sizeof block->request.error, "%s", rsd_error());
        block->arrived = true;
    } else
        store->nactive++;
}

/* Requests blocks that wait, as far as the limits allow. */
static void start_blocks(struct remote_store *store)
{
    while (store->waiting && store->nactive < store->storage->max_requests) {
        struct remote_block *block = store->waiting;
        if (!storage_reserve(store->storage, STORAGE_READS, block->nbytes, false))
            return;
        store->waiting = block->next_waiting;
        if (!store->waiting)
            store->waiting_end = &store->waiting;
        request_block(block);
    }
}

/* Requests a block that a reader needs, whatever the limits. */
static void force_block(struct remote_store *store, struct remote_block *block)
{
    struct remote_block **at = &store->waiting;
    while (*at && *at != block)
        at = &(*at)->next_waiting;
    if (*at)
        *at = block->next_waiting;
    store->waiting_end = &store->waiting;
    while (*store->waiting_end)
        store->waiting_end = &(*store->waiting_end)->next_waiting;
    storage_reserve(store->storage, STORAGE_READS, block->nbytes, true);
    request_block(block);
}

/* Frees a block that nobody needs any more. */
static void free_unused(struct remote_block *block)
{
    if (block->wanted > 0 || block->nusers > 0 || !block->arrived)
        return;
    struct remote_store *store = block->store;
    struct remote_file *file = &store->files[block->file];
    struct remote_block **at = &file->blocks;
    while (*at != block)
        at = &(*at)->next;
    *at = block->next;
    file->nblocks--;
    drop_block(block);
    start_blocks(store);
}

/* Extends the last block before an offset, if it is not requested yet. Returns how many bytes it takes. */
static uint64_t extend_block(struct remote_block *block, uint64_t offset, uint64_t n)
{
    uint64_t end = block->offset + block->nbytes;
    if (block->requested || offset < end || offset - end > JOINED_GAP)
        return 0;
    uint64_t gap = offset - end, most = block->store->storage->block_nbytes;
    if (block->nbytes + gap >= most)
        return 0;
    uint64_t left = most - block->nbytes - gap, taken = n < left ? n : left;
    block->nbytes += gap + taken;
    block->wanted += taken;
    return taken;
}

/* Adds a block at a place in the list of its file, and to the blocks that wait to be requested. */
static rsd_status insert_block(struct remote_store *store, uint32_t file, uint64_t offset,
                               uint64_t nbytes, struct remote_block **at)
{
    struct remote_block *block = mem_new(1, sizeof *block);
    if (!block)
        return RSD_ENOMEM;
    *block = (struct remote_block){.store = store,
                                   .file = file,
                                   .offset = offset,
                                   .nbytes = nbytes,
                                   .wanted = nbytes,
                                   .next = *at};
    *at = block;
    store->files[file].nblocks++;
    *store->waiting_end = block;
    store->waiting_end = &block->next_waiting;
    return RSD_OK;
}

/* Makes blocks for bytes of a file; where there are some already, those are used. */
static rsd_status add_blocks(struct remote_store *store, uint32_t file, uint64_t offset, uint64_t n)
{
    struct remote_block **at = &store->files[file].blocks, *before = NULL;
    uint64_t most = store->storage->block_nbytes;
    while (n > 0) {
        while (*at && (*at)->offset + (*at)->nbytes <= offset) {
            before = *at;
            at = &before->next;
        }
        uint64_t end = *at && (*at)->offset < offset + n ? (*at)->offset : offset + n, taken;
        if (*at && end <= offset) { /* inside a block */
            uint64_t left = (*at)->offset + (*at)->nbytes - offset;
            taken = n < left ? n : left; /* who says it twice reads it once */
        } else {
            taken = end - offset < most ? end - offset : most;
            uint64_t extended = before ? extend_block(before, offset, taken) : 0;
            if (extended)
                taken = extended;
            else
                TRY(insert_block(store, file, offset, taken, at));
        }
        offset += taken;
        n -= taken;
    }
    return RSD_OK;
}

void remote_prefetch(struct store *base, uint32_t file, uint64_t offset, uint64_t n)
{
    struct remote_store *store = remote_store_of(base);
    pthread_mutex_lock(&store->lock);
    bool inside = learn_size(store, file) == RSD_OK && offset <= store->files[file].nbytes &&
                  n <= store->files[file].nbytes - offset &&
                  store->files[file].nblocks < MAX_BLOCKS;
    if (inside) /* without memory, readers request what they need */
        (void)add_blocks(store, file, offset, n);
    pthread_mutex_unlock(&store->lock);
}

void remote_start_prefetch(struct store *base)
{
    struct remote_store *store = remote_store_of(base);
    pthread_mutex_lock(&store->lock);
    start_blocks(store);
    pthread_mutex_unlock(&store->lock);
}

void remote_release(struct store *base, uint32_t file, uint64_t offset, uint64_t n)
{
    struct remote_store *store = remote_store_of(base);
    pthread_mutex_lock(&store->lock);
    for (struct remote_block *block = store->files[file].blocks, *next; block; block = next) {
        uint64_t lo = block->offset > offset ? block->offset : offset;
        uint64_t end = block->offset + block->nbytes;
        uint64_t hi = end < offset + n ? end : offset + n;
        next = block->next;
        if (block->offset >= offset + n)
            break;
        if (hi <= lo)
            continue;
        block->wanted -= hi - lo < block->wanted ? hi - lo : block->wanted;
        free_unused(block);
    }
    pthread_mutex_unlock(&store->lock);
}

/* ---- reading ---- */

/* The block that has a byte; else NULL, and *until is where the next block begins. */
static struct remote_block *find_block(const struct remote_file *file, uint64_t offset,
                                       uint64_t *until)
{
    for (struct remote_block *block = file->blocks; block; block = block->next) {
        if (offset < block->offset) {
            *until = block->offset;
            return NULL;
        }
        if (offset < block->offset + block->nbytes)
            return block;
    }
    *until = UINT64_MAX;
    return NULL;
}

/* Copies what a block has of some bytes, when it has arrived. The store is locked before and after. */
static rsd_status copy_block(struct remote_store *store, struct remote_block *block,
                             uint64_t offset, char *out, size_t n, size_t *taken)
{
    if (!block->requested)
        force_block(store, block);
    block->nusers++;
    while (!block->arrived)
        pthread_cond_wait(&store->arrived, &store->lock);
    rsd_status status = block->request.status;
    if (status) {
        error_set("%s", block->request.error);
        name_range(status, block->offset, block->nbytes);
    } else {
        uint64_t left = block->offset + block->nbytes - offset;
        *taken = n < left ? n : (size_t)left;
        pthread_mutex_unlock(&store->lock);
        memcpy(out, block->data + (offset - block->offset), *taken);
        pthread_mutex_lock(&store->lock);
    }
    block->nusers--;
    free_unused(block);
    return status;
}

rsd_status remote_read(struct store *base, uint32_t index, uint64_t offset, void *memory, size_t n)
{
    struct remote_store *store = remote_store_of(base);
    char *out = memory;
    pthread_mutex_lock(&store->lock);
    rsd_status status = learn_size(store, index);
    if (!status)
        status = store_check_bounds(offset, n, store->files[index].nbytes);
    if (!status &&
        n > store->storage->block_nbytes) { /* many requests at once; and each block is read once */
        uint64_t until;
        bool known = find_block(&store->files[index], offset, &until) != NULL;
        if (!known) {
            status = add_blocks(store, index, offset, n);
            start_blocks(store);
            pthread_mutex_unlock(&store->lock);
            if (!status)
                status = remote_read(base, index, offset, memory, n);
            remote_release(base, index, offset, n);
            return status;
        }
    }
    while (!status && n > 0) {
        uint64_t until;
        size_t taken = 0;
        struct remote_block *block = find_block(&store->files[index], offset, &until);
        if (block)
            status = copy_block(store, block, offset, out, n, &taken);
        else {
            taken = until - offset < n ? (size_t)(until - offset) : n;
            pthread_mutex_unlock(&store->lock);
            status = read_directly(store, index, offset, out, taken);
            pthread_mutex_lock(&store->lock);
        }
        if (!status) {
            out += taken;
            offset += taken;
            n -= taken;
        }
    }
    pthread_mutex_unlock(&store->lock);
    return status;
}
