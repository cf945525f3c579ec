/* writer.c - the files of a manifest, while they are written.
 *
 * Plain items are written at the offsets of the manifest, block by block, by any thread. What is around their bytes
 * comes last, because it contains their CRC-32. Compressed items are streams, one after the other in their file, and
 * their offsets are known when they are complete. A file is complete when its last item is: then it is written to
 * disk and noted in the journal.
 *
 * Safetensors files have no marker, so their headers are written last, and until all files are complete their names
 * end in .part.
 */
#include "checkpoint.h"

#include <stdio.h>
#include <string.h>

enum { COPY_NBYTES = 1 << 20 };
#define SAVE_NBYTES ((uint64_t)4 << 30) /* of items between two entries of the journal */

/* ---- opening ---- */

static rsd_status add_file_name(struct writer *writer, const struct manifest_file *file)
{
    char name[4200];
    uint32_t index;
    int n = snprintf(name, sizeof name, "%s%s", file->name,
                     writer->store->ops->random_write
                         ? writer->manifest->format->writer->suffix_until_complete
                         : ""); /* it appears when it is complete */
    return store_add_file(writer->store, (struct slice){name, (size_t)n}, &index);
}

rsd_status writer_open(struct writer *writer, struct manifest *manifest, struct store_output *dest,
                       rsd_checkpoint *from, int32_t only)
{
    *writer = (struct writer){
        .manifest = manifest, .dest = dest, .store = dest->store, .from = from, .only = only};
    pthread_mutex_init(&writer->lock, NULL);
    writer->files = mem_new(manifest->nfiles, sizeof *writer->files);
    rsd_status status = writer->files ? RSD_OK : RSD_ENOMEM;
    for (size_t i = 0; i < manifest->nfiles && !status; i++) {
        writer->files[i] = (struct writer_file){.writer = writer,
                                                .file = (uint32_t)i,
                                                .left = manifest->files[i].nitems,
                                                .end = manifest->files[i].kept};
        status = add_file_name(writer, &manifest->files[i]);
    }
    if (status)
        writer_close(writer);
    return status;
}

void writer_close(struct writer *writer)
{
    for (size_t i = 0; writer->files && i < writer->manifest->nfiles; i++)
        zstd_writer_close(writer->files[i].zstd);
    if (writer->dest)
        writer_drop_cloned(writer);
    mem_free(writer->files);
    mem_free(writer->pending);
    writer->files = NULL;
    writer->pending = NULL;
    if (writer->dest)
        pthread_mutex_destroy(&writer->lock);
    writer->dest = NULL;
}

/* Adds the file of an extent, and the name of its tensor or value, to the last error. */
static rsd_status fail_in_item(const struct writer *writer, uint32_t file, const char *name,
                               rsd_status status)
{
    return status ? store_fail_in(writer->store, file, fail_in(status, "%.300s: ", name)) : RSD_OK;
}

/* Writes bytes and counts them. */
static rsd_status write_bytes(struct writer *writer, uint32_t file, uint64_t at, const void *data,
                              size_t n)
{
    TRY(store_write(writer->store, file, at, data, n));
    writer->nbytes_written += n;
    return RSD_OK;
}

static rsd_status sync_file(struct writer *writer, uint32_t file)
{
    rsd_status status = store_sync(writer->store, file);
    return status ? store_fail_in(writer->store, file, status) : RSD_OK;
}

/* ---- compressed items ---- */

static rsd_status append_bytes(void *context, const void *data, size_t n)
{
    struct writer_file *file = context;
    TRY(write_bytes(file->writer, file->file, file->end, data, n));
    file->end += n;
    return RSD_OK;
}

static rsd_status begin_stream(struct writer *writer, struct extent *extent, uint64_t nbytes)
{
    struct writer_file *file = &writer->files[extent->file];
    extent->offset = file->end;
    return zstd_writer_open(writer->manifest->compress, nbytes, append_bytes, file, &file->zstd);
}

static rsd_status finish_stream(struct writer *writer, struct extent *extent)
{
    struct writer_file *file = &writer->files[extent->file];
    rsd_status status = zstd_writer_end(file->zstd);
    zstd_writer_close(file->zstd);
    file->zstd = NULL;
    extent->nbytes = file->end - extent->offset;
    return status;
}

static rsd_status compress_item(struct writer *writer, struct extent *extent,
                                const struct bytes *item)
{
    TRY(begin_stream(writer, extent, item->n));
    TRY(zstd_writer_put(writer->files[extent->file].zstd, item->data, item->n));
    return finish_stream(writer, extent);
}

/* ---- values ---- */

/* Copies the item of a value from the input, block by block. */
static rsd_status copy_value(struct writer *writer, const struct stored_value *to,
                             const struct stored_value *from)
{
    const struct extent *source = &from->extent, *extent = &to->extent;
    char *block = mem_new(COPY_NBYTES, 1);
    rsd_status status = block ? RSD_OK : RSD_ENOMEM;
    for (uint64_t at = 0; at < source->nbytes && !status; at += COPY_NBYTES) {
        uint64_t left = source->nbytes - at;
        size_t n = left < COPY_NBYTES ? (size_t)left : COPY_NBYTES;
        status = store_read(writer->from->store, source->file, source->offset + at, block, n);
        if (status)
            status = checkpoint_fail_in(writer->from, source->file, from->name, status);
        else
            status = fail_in_item(writer, extent->file, to->name,
                                  write_bytes(writer, extent->file, extent->offset + at, block, n));
    }
    mem_free(block);
    return status;
}

/* Writes the item of a value: copied, or made from its pickle, compressed if the file is. */
static rsd_status write_value(struct writer *writer, size_t i)
{
    struct stored_value *to = &writer->manifest->catalog.values[i];
    const struct manifest_value *value = &writer->manifest->values[i];
    const struct stored_value *from = value->from;
    struct extent *extent = &to->extent;
    struct bytes item = {0};
    rsd_status status = RSD_OK;
    if (from && !writer->manifest->compress) {
        TRY(checkpoint_check_value(writer->from, from));
        return copy_value(writer, to, from);
    }
    if (from)
        TRY(checkpoint_read_value(writer->from, from, &item));
    const struct bytes *bytes = from ? &item : &value->item;
    if (writer->manifest->compress)
        status = compress_item(writer, extent, bytes);
    else
        status = write_bytes(writer, extent->file, extent->offset, bytes->data, bytes->n);
    bytes_drop(&item);
    return fail_in_item(writer, extent->file, to->name, status);
}

/* ---- files ---- */

/* Creates a file of the output, with its values. */
static rsd_status create_file(struct writer *writer, uint32_t file)
{
    const struct manifest *manifest = writer->manifest;
    uint64_t nbytes = manifest->compress ? 0 : manifest->files[file].nbytes;
    if (writer->files[file].noted) /* it has its full length before it is complete */
        TRY(journal_redo_file(writer->dest, file));
    rsd_status status = store_create(writer->store, file, manifest->files[file].kept, nbytes);
    if (status)
        return store_fail_in(writer->store, file, status);
    for (size_t i = 0; i < manifest->catalog.nvalues && manifest->files[file].nvalues; i++)
        if (manifest->catalog.values[i].extent.file == file)
            TRY(write_value(writer, i));
    return RSD_OK;
}

static rsd_status ensure_created(struct writer *writer, uint32_t file)
{
    rsd_status status = RSD_OK;
    pthread_mutex_lock(&writer->lock);
    if (!writer->files[file].created) {
        status = create_file(writer, file);
        writer->files[file].created = !status;
    }
    pthread_mutex_unlock(&writer->lock);
    return status;
}

/* Writes the header of a file whose items are complete, flushes it, and adds it to the journal. */
static rsd_status complete_file(struct writer *writer, uint32_t file)
{
    struct manifest_file *about = &writer->manifest->files[file];
    rsd_status status = RSD_OK;
    if (writer->manifest->compress)
        about->nbytes = writer->files[file].end;
    if (about->header.n)
        status = write_bytes(writer, file, 0, about->header.data, about->header.n);
    if (!status)
        status = store_end_file(writer->store, file, about->nbytes);
    if (status)
        return store_fail_in(writer->store, file, status);
    pthread_mutex_lock(&writer->lock);
    writer->files[file].done = writer->files[file].touched = true;
    writer->nfiles_written++;
    status = writer->journal ? journal_add_file(writer->dest, writer, file) : RSD_OK;
    pthread_mutex_unlock(&writer->lock);
    return status;
}

rsd_status writer_finish(struct writer *writer)
{
    for (uint32_t file = 0; file < writer->manifest->nfiles; file++)
        if (writer_wants_file(writer, file) && (writer->files[file].left == 0 || writer->shared)) {
            TRY(ensure_created(writer, file));
            TRY(complete_file(writer, file));
        }
    return writer->unsynced ? RSD_OK : store_sync_names(writer->store);
}

void writer_report(struct writer *writer, rsd_report *report)
{
    report->nbytes_written += (int64_t)atomic_exchange(&writer->nbytes_written, 0);
    report->nbytes_shared += (int64_t)atomic_exchange(&writer->nbytes_shared, 0);
    report->nfiles_written += writer->nfiles_written;
    writer->nfiles_written = 0;
}

rsd_status writer_create_files(struct writer *writer)
{
    for (uint32_t file = 0; file < writer->manifest->nfiles; file++)
        if (writer_wants_file(writer, file))
            TRY(ensure_created(writer, file));
    return store_sync_names(writer->store);
}

/* On a network file system, only the process that wrote bytes can write them to disk. */
rsd_status writer_flush(struct writer *writer)
{
    for (uint32_t file = 0; file < writer->manifest->nfiles && writer->shared; file++)
        if (writer->files[file].touched)
            TRY(sync_file(writer, file));
    TRY(writer_save_items(writer));
    return store_sync_names(writer->store);
}

/* ---- the journal ---- */

/* Takes the list of complete items away from the other threads. */
static size_t *take_pending(struct writer *writer, size_t *n)
{
    pthread_mutex_lock(&writer->lock);
    size_t *list = writer->pending;
    *n = writer->npending;
    writer->pending = NULL;
    writer->npending = writer->pending_capacity = 0;
    writer->pending_nbytes = 0;
    pthread_mutex_unlock(&writer->lock);
    return list;
}

rsd_status writer_save_items(struct writer *writer)
{
    const struct catalog *catalog = &writer->manifest->catalog;
    size_t n;
    size_t *list = take_pending(writer, &n);
    bool *synced = mem_new(writer->manifest->nfiles, sizeof *synced);
    rsd_status status = synced ? RSD_OK : RSD_ENOMEM;
    for (size_t i = 0; i < n && !status; i++) {
        uint32_t file = catalog->extents[list[i]].file;
        if (!synced[file])
            status = sync_file(writer, file);
        synced[file] = true;
    }
    if (!status && n > 0)
        status = journal_add_items(writer->dest, list, n);
    mem_free(synced);
    mem_free(list);
    return status;
}

/* The journal has compressed files only when they are complete: their items have no offsets before. */
static rsd_status add_pending(struct writer *writer, size_t extent, uint64_t nbytes)
{
    if (!writer->journal || writer->manifest->compress)
        return RSD_OK;
    pthread_mutex_lock(&writer->lock);
    rsd_status status = GROW(writer->pending, writer->pending_capacity, writer->npending + 1);
    if (!status) {
        writer->pending[writer->npending++] = extent;
        writer->pending_nbytes += nbytes;
    }
    bool due = writer->pending_nbytes >= SAVE_NBYTES;
    pthread_mutex_unlock(&writer->lock);
    return !status && due ? writer_save_items(writer) : status;
}

/* ---- items ---- */

/* Makes what is before and behind the bytes of an item. The caller frees both, also on failure. */
static rsd_status make_frame(const struct writer *writer, size_t index, struct bytes *head,
                             struct bytes *tail)
{
    const struct manifest *manifest = writer->manifest;
    struct extent_box box = extent_find_box(&manifest->catalog, index);
    return manifest->format->writer->frame(manifest, box.index, box.box, head, tail);
}

/* Starts the stream of a compressed item with what is before the bytes of its tensor. */
static rsd_status begin_compressed(struct writer *writer, size_t index)
{
    struct catalog *catalog = &writer->manifest->catalog;
    struct extent *extent = &catalog->extents[index];
    struct extent_box box = extent_find_box(catalog, index);
    struct bytes head = {0}, tail = {0};
    rsd_status status = make_frame(writer, index, &head, &tail);
    if (!status)
        status = begin_stream(writer, extent, head.n + box.nbytes + tail.n);
    if (!status)
        status = zstd_writer_put(writer->files[extent->file].zstd, head.data, head.n);
    bytes_drop(&head);
    bytes_drop(&tail);
    return fail_in_item(writer, extent->file, box.tensor->name, status);
}

/* Ends the stream of a compressed item with what is behind the bytes of its tensor. */
static rsd_status end_compressed(struct writer *writer, struct extent *extent,
                                 const struct bytes *tail)
{
    TRY(zstd_writer_put(writer->files[extent->file].zstd, tail->data, tail->n));
    return finish_stream(writer, extent);
}

/* Writes what is around the bytes of a plain item. A store that writes in order also needs the zeros before it. */
static rsd_status write_around(struct writer *writer, size_t index, const struct bytes *head,
                               const struct bytes *tail)
{
    static const char zeros[ALIGNED_NBYTES];
    const struct extent *extent = &writer->manifest->catalog.extents[index];
    uint64_t end = extent->offset + extent->nbytes;
    size_t gap = (size_t)writer->manifest->items[index].gap;
    if (gap > 0 && !writer->store->ops->random_write)
        TRY(store_write(writer->store, extent->file, extent->offset - gap, zeros, gap));
    TRY(write_bytes(writer, extent->file, extent->offset, head->data, head->n));
    return write_bytes(writer, extent->file, end - tail->n, tail->data, tail->n);
}

/* Writes what is around the bytes of an item, when all bytes are known. */
static rsd_status write_frame(struct writer *writer, size_t index)
{
    struct catalog *catalog = &writer->manifest->catalog;
    struct extent *extent = &catalog->extents[index];
    struct bytes head = {0}, tail = {0};
    if (!writer->manifest->format->writer->frame)
        return RSD_OK;
    rsd_status status = make_frame(writer, index, &head, &tail);
    if (!status)
        status = writer->manifest->compress ? end_compressed(writer, extent, &tail)
                                            : write_around(writer, index, &head, &tail);
    bytes_drop(&head);
    bytes_drop(&tail);
    return fail_in_item(writer, extent->file,
                        catalog->tensors[tensor_of_extent(catalog, index)].name, status);
}

rsd_status writer_end_item(struct writer *writer, size_t index)
{
    const struct extent *extent = &writer->manifest->catalog.extents[index];
    TRY(write_frame(writer, index));
    pthread_mutex_lock(&writer->lock);
    bool last = --writer->files[extent->file].left == 0 && !writer->shared;
    pthread_mutex_unlock(&writer->lock);
    return last ? complete_file(writer, extent->file) : add_pending(writer, index, extent->nbytes);
}

rsd_status writer_end_split_items(struct writer *writer)
{
    for (size_t i = 0; i < writer->manifest->catalog.nextents; i++)
        if (writer->manifest->items[i].split)
            TRY(write_frame(writer, i));
    return RSD_OK;
}

/* ---- blocks ---- */

static void add_item_crc(struct manifest_item *item, uint64_t at, const char *block, size_t n,
                         uint64_t all)
{
    item->crc ^= crc_shift(CRC_ZIP, crc_update(CRC_ZIP, 0, block, n), all - at - n);
    for (size_t i = 0; i < n && at + i < sizeof item->first; i++)
        item->first[at + i] = (unsigned char)block[i];
}

/* Writes a block of a box that shares its array with others, where its rows may lie apart. */
static rsd_status write_rows(struct writer *writer, const struct sink *sink, const int64_t *lo,
                             const int64_t *len, const char *block)
{
    const struct manifest *manifest = writer->manifest;
    const struct extent *extent = &manifest->catalog.extents[sink->index];
    const int64_t *at = manifest->places + manifest->items[sink->index].at,
                  *shape = at + sink->ndim;
    int64_t element_nbytes = (int64_t)rsd_dtype_nbytes(sink->dtype), stride = element_nbytes,
            packed = element_nbytes;
    int64_t index[MAX_LOOPS] = {0}, from = 0, to = (int64_t)extent->offset;
    struct loops loops = {0};
    for (int32_t d = sink->ndim - 1; d >= 0; d--) {
        to += (at[d] + lo[d] - sink->lo[d]) * stride;
        loops_add(&loops, len[d], packed, stride);
        packed *= len[d];
        stride *= shape[d];
    }
    loops_finish(&loops, element_of_bytes((size_t)element_nbytes));
    do
        TRY(write_bytes(writer, extent->file, (uint64_t)to, block + from, loops.run));
    while (loops_next(&loops, index, &from, &to));
    return RSD_OK;
}

/* Reserves space for an item when its first block was read: before that, the input only claims its length. */
static rsd_status reserve_item(struct writer *writer, size_t index)
{
    const struct extent *extent = &writer->manifest->catalog.extents[index];
    struct manifest_item *item = &writer->manifest->items[index];
    uint64_t at = extent->offset, end = extent->offset + extent->nbytes;
    if (writer->manifest->compress || atomic_exchange(&item->reserved, true))
        return RSD_OK;
    for (uint64_t some; (some = writer_find_uncloned(writer, index, &at, end)) > 0; at += some)
        TRY(store_reserve(writer->store, extent->file, at, some));
    return RSD_OK;
}

/* Writes what of a block is not shared with the input. */
static rsd_status write_uncloned(struct writer *writer, size_t extent, uint64_t at,
                                 const char *block, size_t n)
{
    uint32_t file = writer->manifest->catalog.extents[extent].file;
    uint64_t begin = at, end = at + n;
    for (uint64_t some; (some = writer_find_uncloned(writer, extent, &at, end)) > 0; at += some)
        TRY(write_bytes(writer, file, at, block + (at - begin), (size_t)some));
    return RSD_OK;
}

/* Writes a block of a box to its item. It is the function of the sinks of writer_begin_item. */
static rsd_status write_block(const struct sink *sink, struct scratch *scratch, const int64_t *lo,
                              const int64_t *len, const char *block)
{
    struct writer *writer = sink->context;
    const struct manifest *manifest = writer->manifest;
    const struct extent *extent = &manifest->catalog.extents[sink->index];
    struct manifest_item *item = &manifest->items[sink->index];
    size_t nbytes = (size_t)sink_nbytes(sink, len);
    uint64_t at = sink_offset(sink, lo);
    (void)scratch;
    if (manifest->format->writer->frame)
        add_item_crc(item, at, block, nbytes, sink_nbytes(sink, sink->len));
    rsd_status status = reserve_item(writer, sink->index);
    if (status)
        return fail_in_item(writer, extent->file, sink->name, status);
    if (manifest->compress)
        status = zstd_writer_put(writer->files[extent->file].zstd, block, nbytes);
    else if (item->at)
        status = write_rows(writer, sink, lo, len, block);
    else
        status =
            write_uncloned(writer, sink->index, extent->offset + item->head + at, block, nbytes);
    return fail_in_item(writer, extent->file, sink->name, status);
}

rsd_status writer_begin_item(struct writer *writer, size_t index, struct sink *sink)
{
    const struct catalog *catalog = &writer->manifest->catalog;
    uint32_t file = catalog->extents[index].file;
    struct extent_box box = extent_find_box(catalog, index);
    *sink = (struct sink){.kind = SINK_BLOCKS,
                          .name = box.tensor->name,
                          .dtype = box.tensor->dtype,
                          .ndim = box.tensor->ndim,
                          .take = write_block,
                          .context = writer,
                          .index = index};
    copy_i64s(sink->lo, box.lo, box.tensor->ndim);
    copy_i64s(sink->len, box.len, box.tensor->ndim);
    TRY(ensure_created(writer, file));
    pthread_mutex_lock(&writer->lock);
    writer->files[file].touched = true;
    pthread_mutex_unlock(&writer->lock);
    return writer->manifest->compress ? begin_compressed(writer, index) : RSD_OK;
}

/* ---- between ranks ---- */

struct file_state {
    uint64_t file, done, noted, nbytes;
};

/* Where a compressed item lies, which only its writer knows. */
struct extent_update {
    uint64_t index, offset, nbytes; /* values have the numbers behind all extents */
};

static struct extent *extent_or_value(struct catalog *catalog, uint64_t index)
{
    return index < catalog->nextents ? &catalog->extents[index]
                                     : &catalog->values[index - catalog->nextents].extent;
}

static bool is_own_file(const struct writer_file *file)
{
    return file->done && file->touched;
}

rsd_status writer_put_files(const struct writer *writer, bool own, struct payload *payload)
{
    struct catalog *catalog = &writer->manifest->catalog;
    uint64_t nfiles = writer->manifest->nfiles, n = 0, end = UINT64_MAX,
             nitems = writer->manifest->compress ? catalog->nextents + catalog->nvalues : 0;
    for (size_t i = 0; i < nfiles; i++)
        n += !own || is_own_file(&writer->files[i]);
    TRY(payload_put(payload, &n, sizeof n));
    for (size_t i = 0; i < nfiles; i++) {
        const struct writer_file *file = &writer->files[i];
        struct file_state one = {i, file->done, file->noted, writer->manifest->files[i].nbytes};
        if (!own || is_own_file(file))
            TRY(payload_put(payload, &one, sizeof one));
    }
    for (uint64_t i = 0; i < nitems; i++) {
        const struct extent *extent = extent_or_value(catalog, i);
        const struct writer_file *file = &writer->files[extent->file];
        struct extent_update one = {i, extent->offset, extent->nbytes};
        if (own ? is_own_file(file) : file->done)
            TRY(payload_put(payload, &one, sizeof one));
    }
    return payload_put(payload, &end, sizeof end);
}

/* Takes the place of a compressed item, which must lie in its file. */
static rsd_status take_item_place(struct writer *writer, uint64_t index,
                                  const struct payload *payload, size_t *at)
{
    struct manifest *manifest = writer->manifest;
    struct catalog *catalog = &manifest->catalog;
    uint64_t nitems = manifest->compress ? catalog->nextents + catalog->nvalues : 0, place[2];
    if (index >= nitems)
        return fail(RSD_EPEER, "a rank wrote item %llu of %llu", (unsigned long long)index,
                    (unsigned long long)nitems);
    struct extent *extent = extent_or_value(catalog, index);
    uint64_t nbytes = manifest->files[extent->file].nbytes;
    TRY(payload_take(payload, at, place, sizeof place));
    if (place[0] > nbytes || place[1] > nbytes - place[0])
        return fail(RSD_EPEER, "a rank wrote item %llu behind the end of its file",
                    (unsigned long long)index);
    extent->offset = place[0];
    extent->nbytes = place[1];
    return RSD_OK;
}

rsd_status writer_take_files(struct writer *writer, const struct payload *payload, size_t *at)
{
    struct manifest *manifest = writer->manifest;
    uint64_t n, index;
    TRY(payload_take(payload, at, &n, sizeof n));
    for (uint64_t i = 0; i < n; i++) {
        struct file_state one;
        TRY(payload_take(payload, at, &one, sizeof one));
        if (one.file >= manifest->nfiles)
            return fail(RSD_EPEER, "a rank wrote file %llu of %zu", (unsigned long long)one.file,
                        manifest->nfiles);
        if (!manifest->compress && one.nbytes != manifest->files[one.file].nbytes)
            return fail(RSD_EPEER, "a rank wrote %llu of the %llu bytes of file %llu",
                        (unsigned long long)one.nbytes,
                        (unsigned long long)manifest->files[one.file].nbytes,
                        (unsigned long long)one.file);
        writer->files[one.file].done = one.done != 0;
        writer->files[one.file].noted = one.noted != 0;
        manifest->files[one.file].nbytes = one.nbytes;
    }
    for (;;) {
        TRY(payload_take(payload, at, &index, sizeof index));
        if (index == UINT64_MAX)
            return RSD_OK;
        TRY(take_item_place(writer, index, payload, at));
    }
}
