/* output.c - the files of a draft, while they are written.
 *
 * Plain items are written where the draft says, block by block, by any thread; what stands around their
 * bytes comes last, since it has their CRC-32 in it. Compressed items are streams, one after the other in
 * their file, and their places are known when they are done. A file is complete when its last item is:
 * then it is brought to disk and noted in the journal.
 *
 * Safetensors files have no marker of their own, so their headers are written when everything else is
 * there, and until all files are complete their names end in .part.
 */
#include "checkpoint.h"

#include <stdio.h>
#include <string.h>

enum { COPY_NBYTES = 1 << 20 };
#define NOTE_NBYTES ((uint64_t)4 << 30)

/* ---- opening ---- */

static rsd_status add_name(struct output *output, const struct manifest_file *file)
{
    char name[4200];
    uint32_t index;
    int n = snprintf(name, sizeof name, "%s%s", file->name,
                     output->store->ops->random_write
                         ? output->manifest->format->writer->suffix_until_complete
                         : ""); /* it appears when it is complete */
    return store_add_file(output->store, (struct slice){name, (size_t)n}, &index);
}

rsd_status output_open(struct output *output, struct manifest *manifest, struct store_output *dest,
                       rsd_checkpoint *from, int32_t only)
{
    *output = (struct output){
        .manifest = manifest, .dest = dest, .store = dest->store, .from = from, .only = only};
    pthread_mutex_init(&output->lock, NULL);
    output->states = mem_new(manifest->nfiles, sizeof *output->states);
    rsd_status status = output->states ? RSD_OK : RSD_ENOMEM;
    for (size_t i = 0; i < manifest->nfiles && !status; i++) {
        output->states[i] = (struct out_state){.output = output,
                                               .file = (uint32_t)i,
                                               .left = manifest->files[i].nitems,
                                               .cursor = manifest->files[i].kept};
        status = add_name(output, &manifest->files[i]);
    }
    if (status)
        output_close(output);
    return status;
}

void output_close(struct output *output)
{
    for (size_t i = 0; output->states && i < output->manifest->nfiles; i++)
        zstd_writer_close(output->states[i].zstd);
    if (output->dest)
        output_drop_cloned(output);
    mem_free(output->states);
    mem_free(output->pending);
    output->states = NULL;
    output->pending = NULL;
    if (output->dest)
        pthread_mutex_destroy(&output->lock);
    output->dest = NULL;
}

/* Names the file of an extent, and the tensor or value, in the last error. */
static rsd_status fail_in_item(const struct output *output, uint32_t file, const char *name,
                               rsd_status status)
{
    return status ? store_fail_in(output->store, file, fail_in(status, "%.300s: ", name)) : RSD_OK;
}

/* Writes bytes and counts them. */
static rsd_status put_bytes(struct output *output, uint32_t file, uint64_t at, const void *data,
                            size_t n)
{
    TRY(store_write(output->store, file, at, data, n));
    output->nbytes_written += n;
    return RSD_OK;
}

static rsd_status sync_file(struct output *output, uint32_t file)
{
    rsd_status status = store_sync(output->store, file);
    return status ? store_fail_in(output->store, file, status) : RSD_OK;
}

/* ---- compressed items ---- */

static rsd_status append(void *context, const void *data, size_t n)
{
    struct out_state *state = context;
    TRY(put_bytes(state->output, state->file, state->cursor, data, n));
    state->cursor += n;
    return RSD_OK;
}

static rsd_status compress_item(struct output *output, struct extent *extent,
                                const struct bytes *item)
{
    struct out_state *state = &output->states[extent->file];
    extent->offset = state->cursor;
    TRY(zstd_writer_open(output->manifest->compress, item->n, append, state, &state->zstd));
    rsd_status status = zstd_writer_put(state->zstd, item->data, item->n);
    if (!status)
        status = zstd_writer_end(state->zstd);
    zstd_writer_close(state->zstd);
    state->zstd = NULL;
    extent->nbytes = state->cursor - extent->offset;
    return status;
}

/* ---- values ---- */

static rsd_status fail_in_value(const rsd_checkpoint *checkpoint, const struct stored_value *value,
                                rsd_status status)
{
    return store_fail_in(checkpoint->store, value->extent.file,
                         fail_in(status, "%.300s: ", value->name));
}

static rsd_status copy_value(struct output *output, const struct stored_value *to,
                             const struct stored_value *from)
{
    const struct extent *source = &from->extent;
    char *block = mem_new(COPY_NBYTES, 1);
    rsd_status status = block ? RSD_OK : RSD_ENOMEM;
    for (uint64_t at = 0; at < source->nbytes && !status; at += COPY_NBYTES) {
        uint64_t left = source->nbytes - at;
        size_t n = left < COPY_NBYTES ? (size_t)left : COPY_NBYTES;
        status = store_read(output->from->store, source->file, source->offset + at, block, n);
        if (status)
            status = fail_in_value(output->from, from, status);
        else
            status =
                fail_in_item(output, to->extent.file, to->name,
                             put_bytes(output, to->extent.file, to->extent.offset + at, block, n));
    }
    mem_free(block);
    return status;
}

static rsd_status write_value(struct output *output, size_t i)
{
    struct stored_value *to = &output->manifest->catalog.values[i];
    const struct manifest_value *value = &output->manifest->values[i];
    struct bytes item = {0};
    rsd_status status = RSD_OK;
    if (value->from && !output->manifest->compress)
        return copy_value(output, to, value->from);
    if (value->from) {
        status = output->from->format->read_item(output->from, value->from, &item);
        if (status)
            status = fail_in_value(output->from, value->from, status);
    }
    const struct bytes *bytes = value->from ? &item : &value->item;
    if (!status && output->manifest->compress)
        status = fail_in_item(output, to->extent.file, to->name,
                              compress_item(output, &to->extent, bytes));
    else if (!status)
        status = fail_in_item(
            output, to->extent.file, to->name,
            put_bytes(output, to->extent.file, to->extent.offset, bytes->data, bytes->n));
    bytes_drop(&item);
    return status;
}

/* ---- files ---- */

static rsd_status create(struct output *output, uint32_t file)
{
    const struct manifest *manifest = output->manifest;
    uint64_t nbytes = manifest->compress ? 0 : manifest->files[file].nbytes;
    if (output->states[file].noted) /* it will have its full length long before it is complete */
        TRY(journal_redo(output->dest, file));
    rsd_status status = store_create(output->store, file, manifest->files[file].kept, nbytes);
    if (status)
        return store_fail_in(output->store, file, status);
    for (size_t i = 0; i < manifest->catalog.nvalues && manifest->files[file].nvalues; i++)
        if (manifest->catalog.values[i].extent.file == file)
            TRY(write_value(output, i));
    return RSD_OK;
}

static rsd_status ensure_created(struct output *output, uint32_t file)
{
    rsd_status status = RSD_OK;
    struct out_state *state = &output->states[file];
    pthread_mutex_lock(&output->lock);
    if (!state->created) {
        status = create(output, file);
        state->created = !status;
    }
    pthread_mutex_unlock(&output->lock);
    return status;
}

static rsd_status complete(struct output *output, uint32_t file)
{
    struct manifest_file *about = &output->manifest->files[file];
    rsd_status status = RSD_OK;
    if (about->header.n)
        status = put_bytes(output, file, 0, about->header.data, about->header.n);
    if (!status)
        status = store_end_file(output->store, file,
                                output->manifest->compress ? output->states[file].cursor
                                                           : about->nbytes);
    if (status)
        return store_fail_in(output->store, file, status);
    pthread_mutex_lock(&output->lock);
    output->states[file].done = true;
    if (output->manifest->compress)
        about->nbytes = output->states[file].cursor;
    output->nfiles_written++;
    status = output->journal ? journal_add(output->dest, output, file) : RSD_OK;
    pthread_mutex_unlock(&output->lock);
    return status;
}

rsd_status output_finish(struct output *output)
{
    for (uint32_t file = 0; file < output->manifest->nfiles; file++)
        if (output_wants(output, file) && (output->states[file].left == 0 || output->shared)) {
            TRY(ensure_created(output, file));
            TRY(complete(output, file));
        }
    return output->unsynced ? RSD_OK : store_sync_names(output->store);
}

rsd_status output_make_files(struct output *output)
{
    for (uint32_t file = 0; file < output->manifest->nfiles; file++)
        if (output_wants(output, file))
            TRY(ensure_created(output, file));
    return store_sync_names(output->store);
}

/* What a process has written, it alone can bring to disk: on a file system of a network nobody else has
 * it. */
rsd_status output_flush(struct output *output)
{
    for (uint32_t file = 0; file < output->manifest->nfiles && output->shared; file++)
        if (output->states[file].touched)
            TRY(sync_file(output, file));
    TRY(output_note(output));
    return store_sync_names(output->store);
}

/* ---- items ---- */

static struct extent *extent_of(struct output *output, size_t tensor, size_t box, size_t *index)
{
    struct catalog *catalog = &output->manifest->catalog;
    *index = catalog->tensors[tensor].first_extent + box;
    return &catalog->extents[*index];
}

rsd_status output_begin(struct output *output, size_t tensor_index, size_t box)
{
    const struct catalog *catalog = &output->manifest->catalog;
    const struct stored_tensor *tensor = &catalog->tensors[tensor_index];
    size_t index;
    struct extent *extent = extent_of(output, tensor_index, box, &index);
    struct out_state *state = &output->states[extent->file];
    TRY(ensure_created(output, extent->file));
    pthread_mutex_lock(&output->lock);
    state->touched = true;
    pthread_mutex_unlock(&output->lock);
    if (!output->manifest->compress)
        return RSD_OK;
    struct bytes head = {0}, tail = {0};
    extent->offset = state->cursor;
    rsd_status status =
        output->manifest->format->writer->frame(output->manifest, tensor_index, box, &head, &tail);
    uint64_t nbytes = head.n + box_nbytes(catalog, tensor, box) + tail.n;
    if (!status)
        status = zstd_writer_open(output->manifest->compress, nbytes, append, state, &state->zstd);
    if (!status)
        status = zstd_writer_put(state->zstd, head.data, head.n);
    bytes_drop(&head);
    bytes_drop(&tail);
    return fail_in_item(output, extent->file, tensor->name, status);
}

static rsd_status end_plain(struct output *output, const struct extent *extent,
                            const struct bytes *head, const struct bytes *tail)
{
    TRY(put_bytes(output, extent->file, extent->offset, head->data, head->n));
    return put_bytes(output, extent->file, extent->offset + extent->nbytes - tail->n, tail->data,
                     tail->n);
}

static rsd_status end_compressed(struct output *output, struct extent *extent,
                                 const struct bytes *tail)
{
    struct out_state *state = &output->states[extent->file];
    TRY(zstd_writer_put(state->zstd, tail->data, tail->n));
    TRY(zstd_writer_end(state->zstd));
    zstd_writer_close(state->zstd);
    state->zstd = NULL;
    extent->nbytes = state->cursor - extent->offset;
    return RSD_OK;
}

/* Writes what stands around the bytes of an item, now that they are all known. */
static rsd_status end_item(struct output *output, size_t tensor, size_t box)
{
    const struct manifest *manifest = output->manifest;
    size_t index;
    struct extent *extent = extent_of(output, tensor, box, &index);
    struct bytes head = {0}, tail = {0};
    if (!manifest->format->writer->frame)
        return RSD_OK;
    rsd_status status = manifest->format->writer->frame(manifest, tensor, box, &head, &tail);
    if (!status && manifest->compress)
        status = end_compressed(output, extent, &tail);
    else if (!status)
        status = end_plain(output, extent, &head, &tail);
    bytes_drop(&head);
    bytes_drop(&tail);
    return fail_in_item(output, extent->file, manifest->catalog.tensors[tensor].name, status);
}

/* Takes over the list of what is complete. */
static size_t *take_pending(struct output *output, size_t *n)
{
    pthread_mutex_lock(&output->lock);
    size_t *list = output->pending;
    *n = output->npending;
    output->pending = NULL;
    output->npending = output->pending_capacity = 0;
    output->pending_nbytes = 0;
    pthread_mutex_unlock(&output->lock);
    return list;
}

rsd_status output_note(struct output *output)
{
    const struct catalog *catalog = &output->manifest->catalog;
    size_t n;
    size_t *list = take_pending(output, &n);
    bool *synced = mem_new(output->manifest->nfiles, sizeof *synced);
    rsd_status status = synced ? RSD_OK : RSD_ENOMEM;
    for (size_t i = 0; i < n && !status; i++) {
        uint32_t file = catalog->extents[list[i]].file;
        if (!synced[file])
            status = sync_file(output, file);
        synced[file] = true;
    }
    if (!status && n > 0)
        status = journal_add_items(output->dest, list, n);
    mem_free(synced);
    mem_free(list);
    return status;
}

/* Compressed items have no place before they are written: their files are noted whole. */
static rsd_status note_item(struct output *output, size_t extent, uint64_t nbytes)
{
    if (!output->journal || output->manifest->compress)
        return RSD_OK;
    pthread_mutex_lock(&output->lock);
    rsd_status status = GROW(output->pending, output->pending_capacity, output->npending + 1);
    if (!status) {
        output->pending[output->npending++] = extent;
        output->pending_nbytes += nbytes;
    }
    bool due = output->pending_nbytes >= NOTE_NBYTES;
    pthread_mutex_unlock(&output->lock);
    return !status && due ? output_note(output) : status;
}

rsd_status output_end(struct output *output, size_t tensor, size_t box)
{
    size_t index;
    struct extent *extent = extent_of(output, tensor, box, &index);
    TRY(end_item(output, tensor, box));
    pthread_mutex_lock(&output->lock);
    bool last = --output->states[extent->file].left == 0 && !output->shared;
    pthread_mutex_unlock(&output->lock);
    return last ? complete(output, extent->file) : note_item(output, index, extent->nbytes);
}

/* Whose bytes are all there, and whose sums are added up. */
rsd_status output_end_split(struct output *output)
{
    const struct catalog *catalog = &output->manifest->catalog;
    for (size_t t = 0; t < catalog->ntensors; t++)
        for (size_t box = 0; box < catalog->tensors[t].nboxes; box++)
            if (output->manifest->items[catalog->tensors[t].first_extent + box].split)
                TRY(end_item(output, t, box));
    return RSD_OK;
}

/* ---- blocks ---- */

static void note_bytes(struct manifest_item *item, uint64_t at, const char *block, size_t n,
                       uint64_t all)
{
    uint64_t part = crc_shift(CRC_ZIP, crc_update(CRC_ZIP, 0, block, n), all - at - n);
    item->crc ^= part;
    for (size_t i = 0; i < n && at + i < sizeof item->first; i++)
        item->first[at + i] = (unsigned char)block[i];
}

/* Writes a block of a box that shares its array with others: its rows may lie apart there. */
static rsd_status put_rows(struct output *output, const struct sink *sink, const int64_t *lo,
                           const int64_t *len, const char *block)
{
    const struct manifest *manifest = output->manifest;
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
    loops_finish(&loops, (size_t)element_nbytes);
    do
        TRY(put_bytes(output, extent->file, (uint64_t)to, block + from, loops.run));
    while (loops_next(&loops, index, &from, &to));
    return RSD_OK;
}

/* Writes what of a block is not shared with the input. */
static rsd_status put_uncloned(struct output *output, size_t extent, uint64_t at, const char *block,
                               size_t n)
{
    uint32_t file = output->manifest->catalog.extents[extent].file;
    uint64_t begin = at, end = at + n;
    for (uint64_t some; (some = output_find_uncloned(output, extent, &at, end)) > 0; at += some)
        TRY(put_bytes(output, file, at, block + (at - begin), (size_t)some));
    return RSD_OK;
}

static rsd_status take_block(const struct sink *sink, struct scratch *scratch, const int64_t *lo,
                             const int64_t *len, const char *block)
{
    struct output *output = sink->context;
    const struct manifest *manifest = output->manifest;
    const struct extent *extent = &manifest->catalog.extents[sink->index];
    struct manifest_item *item = &manifest->items[sink->index];
    size_t element_nbytes = rsd_dtype_nbytes(sink->dtype);
    size_t nbytes = (size_t)box_volume(sink->ndim, len) * element_nbytes;
    uint64_t at = offset_in_box(sink, lo),
             all = (uint64_t)box_volume(sink->ndim, sink->len) * element_nbytes;
    (void)scratch;
    if (manifest->format->writer->frame)
        note_bytes(item, at, block, nbytes, all);
    rsd_status status;
    if (manifest->compress)
        status = zstd_writer_put(output->states[extent->file].zstd, block, nbytes);
    else if (item->at)
        status = put_rows(output, sink, lo, len, block);
    else
        status = put_uncloned(output, sink->index, extent->offset + item->head + at, block, nbytes);
    return fail_in_item(output, extent->file, sink->name, status);
}

void output_sink(struct output *output, size_t tensor_index, size_t box, struct sink *sink)
{
    const struct catalog *catalog = &output->manifest->catalog;
    const struct stored_tensor *tensor = &catalog->tensors[tensor_index];
    *sink = (struct sink){.kind = SINK_BLOCKS,
                          .name = tensor->name,
                          .dtype = tensor->dtype,
                          .ndim = tensor->ndim,
                          .take = take_block,
                          .context = output,
                          .index = tensor->first_extent + box};
    copy_i64s(sink->lo, tensor_box_lo(catalog, tensor, box), tensor->ndim);
    copy_i64s(sink->len, tensor_box_len(catalog, tensor, box), tensor->ndim);
}
