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

static rsd_status add_name(struct output *output, const struct out_file *file)
{
    char name[4200];
    uint32_t index;
    const char *suffix = output->manifest->format == RSD_FORMAT_SAFETENSORS ? ".part" : "";
    int n = snprintf(name, sizeof name, "%s%s", file->name, suffix);
    return files_add(&output->files, (struct slice){name, (size_t)n}, &index);
}

rsd_status output_open(struct output *output, struct manifest *manifest, struct part *part,
                       rsd_checkpoint *from, int32_t only)
{
    *output = (struct output){.manifest = manifest, .part = part, .from = from, .only = only};
    TRY(files_open(&output->files, part->folder));
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
    mem_free(output->states);
    mem_free(output->pending);
    output->states = NULL;
    output->pending = NULL;
    if (output->files.folder) {
        files_close(&output->files);
        pthread_mutex_destroy(&output->lock);
    }
}

static rsd_status put(struct output *output, uint32_t file, uint64_t at, const void *data, size_t n)
{
    TRY(file_write(&output->files, file, at, data, n));
    output->nbytes_written += n;
    return RSD_OK;
}

/* ---- compressed items ---- */

static rsd_status append(void *context, const void *data, size_t n)
{
    struct out_state *state = context;
    TRY(put(state->output, state->file, state->cursor, data, n));
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

static rsd_status copy_value(struct output *output, const struct extent *to,
                             const struct extent *from)
{
    char *block = mem_new(COPY_NBYTES, 1);
    rsd_status status = block ? RSD_OK : RSD_ENOMEM;
    for (uint64_t at = 0; at < from->nbytes && !status; at += COPY_NBYTES) {
        uint64_t left = from->nbytes - at;
        size_t n = left < COPY_NBYTES ? (size_t)left : COPY_NBYTES;
        status = file_read(&output->from->files, from->file, from->offset + at, block, n);
        if (!status)
            status = put(output, to->file, to->offset + at, block, n);
    }
    mem_free(block);
    return status;
}

static rsd_status write_value(struct output *output, size_t i)
{
    struct extent *extent = &output->manifest->catalog.values[i].extent;
    const struct out_value *value = &output->manifest->values[i];
    if (value->from && !output->manifest->compress)
        return copy_value(output, extent, &value->from->extent);
    if (!output->manifest->compress)
        return put(output, extent->file, extent->offset, value->item.data, value->item.n);
    if (!value->from)
        return compress_item(output, extent, &value->item);
    struct bytes item = {0};
    rsd_status status = value_read_item(output->from, value->from, &item);
    if (!status)
        status = compress_item(output, extent, &item);
    bytes_drop(&item);
    return status;
}

/* ---- files ---- */

static rsd_status create(struct output *output, uint32_t file)
{
    const struct manifest *manifest = output->manifest;
    uint64_t nbytes = manifest->compress ? 0 : manifest->files[file].nbytes;
    if (output->states[file].noted) /* it will have its full length long before it is complete */
        TRY(journal_redo(output->part, file));
    TRY(file_create(&output->files, file, manifest->files[file].kept, nbytes));
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
    struct out_file *about = &output->manifest->files[file];
    if (about->header.n)
        TRY(put(output, file, 0, about->header.data, about->header.n));
    if (!output->unsynced)
        TRY(file_sync(&output->files, file));
    pthread_mutex_lock(&output->lock);
    output->states[file].done = true;
    if (output->manifest->compress)
        about->nbytes = output->states[file].cursor;
    output->nfiles_written++;
    rsd_status status = output->journal ? journal_add(output->part, output, file) : RSD_OK;
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
    return output->unsynced ? RSD_OK : folder_sync(&output->files);
}

rsd_status output_make_files(struct output *output)
{
    for (uint32_t file = 0; file < output->manifest->nfiles; file++)
        if (output_wants(output, file))
            TRY(ensure_created(output, file));
    return folder_sync(&output->files);
}

/* What a process has written, it alone can bring to disk: on a file system of a network nobody else has
 * it. */
rsd_status output_flush(struct output *output)
{
    for (uint32_t file = 0; file < output->manifest->nfiles && output->shared; file++)
        if (output->states[file].touched)
            TRY(file_sync(&output->files, file));
    TRY(output_note(output));
    return folder_sync(&output->files);
}

/* ---- items ---- */

static struct extent *extent_of(struct output *output, size_t tensor, size_t box, size_t *index)
{
    struct catalog *catalog = &output->manifest->catalog;
    *index = catalog->tensors[tensor].first_extent + box;
    return &catalog->extents[*index];
}

/* The shape and strides that an item says of itself. */
struct form {
    const int64_t *shape, *strides;
};

static struct form form_of(const struct out_item *item, int32_t ndim, const int64_t *len)
{
    return item->form ? (struct form){item->form, item->form + ndim} : (struct form){len, NULL};
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
    struct bytes head = {0};
    uint64_t head_nbytes, nbytes;
    struct form form = form_of(&output->manifest->items[index], tensor->ndim,
                               tensor_box_len(catalog, tensor, box));
    TRY(torch_item_nbytes(tensor->dtype, tensor->ndim, form.shape, form.strides, &head_nbytes,
                          &nbytes));
    extent->offset = state->cursor;
    rsd_status status =
        torch_item_head(tensor->dtype, tensor->ndim, form.shape, form.strides, &head);
    if (!status)
        status = zstd_writer_open(output->manifest->compress, nbytes, append, state, &state->zstd);
    if (!status)
        status = zstd_writer_put(state->zstd, head.data, head.n);
    bytes_drop(&head);
    return status;
}

static rsd_status end_plain(struct output *output, const struct extent *extent,
                            const struct out_item *item, const struct bytes *tail,
                            const struct stored_tensor *tensor, struct form form)
{
    struct bytes head = {0};
    rsd_status status =
        torch_item_head(tensor->dtype, tensor->ndim, form.shape, form.strides, &head);
    if (!status && head.n != item->head)
        status = fail(RSD_EINVAL, "%s: the head of an item changed its length", tensor->name);
    if (!status)
        status = put(output, extent->file, extent->offset, head.data, head.n);
    bytes_drop(&head);
    if (!status)
        status = put(output, extent->file, extent->offset + extent->nbytes - tail->n, tail->data,
                     tail->n);
    return status;
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

static rsd_status end_item(struct output *output, const struct stored_tensor *tensor, size_t box,
                           size_t index, struct extent *extent)
{
    const struct catalog *catalog = &output->manifest->catalog;
    const struct out_item *item = &output->manifest->items[index];
    struct form form = form_of(item, tensor->ndim, tensor_box_len(catalog, tensor, box));
    struct bytes tail = {0};
    uint32_t crc = crc32_from_raw(item->crc, box_nbytes(catalog, tensor, box));
    rsd_status status = torch_item_tail(tensor->dtype, tensor->ndim, form.shape, form.strides, crc,
                                        item->first, &tail);
    if (!status)
        status = output->manifest->compress ? end_compressed(output, extent, &tail)
                                            : end_plain(output, extent, item, &tail, tensor, form);
    bytes_drop(&tail);
    return status;
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
            status = file_sync(&output->files, file);
        synced[file] = true;
    }
    if (!status && n > 0)
        status = journal_add_items(output->part, list, n);
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
    if (output->manifest->format == RSD_FORMAT_DCP)
        TRY(end_item(output, &output->manifest->catalog.tensors[tensor], box, index, extent));
    pthread_mutex_lock(&output->lock);
    bool last = --output->states[extent->file].left == 0 && !output->shared;
    pthread_mutex_unlock(&output->lock);
    return last ? complete(output, extent->file) : note_item(output, index, extent->nbytes);
}

/* Whose bytes are all there, and whose sums are added up. */
rsd_status output_end_split(struct output *output)
{
    struct catalog *catalog = &output->manifest->catalog;
    for (size_t t = 0; t < catalog->ntensors && output->manifest->format == RSD_FORMAT_DCP; t++)
        for (size_t box = 0; box < catalog->tensors[t].nboxes; box++) {
            size_t index = catalog->tensors[t].first_extent + box;
            if (output->manifest->items[index].split)
                TRY(end_item(output, &catalog->tensors[t], box, index, &catalog->extents[index]));
        }
    return RSD_OK;
}

/* ---- blocks ---- */

static void note_bytes(struct out_item *item, uint64_t at, const char *block, size_t n,
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
    int64_t index[MAX_LOOPS] = {0};
    uint64_t to = extent->offset;
    struct loops loops = {0};
    for (int32_t d = sink->ndim - 1; d >= 0; d--) {
        to += (uint64_t)((at[d] + lo[d] - sink->lo[d]) * stride);
        loops_add(&loops, len[d], packed, stride);
        packed *= len[d];
        stride *= shape[d];
    }
    loops_finish(&loops, (size_t)element_nbytes);
    for (int32_t i = 0; i >= 0;) {
        TRY(put(output, extent->file, to, block, loops.run));
        block += loops.run; /* the block is packed: rows follow each other */
        for (i = loops.n - 1; i >= 0; i--) {
            to += (uint64_t)loops.dst_stride[i];
            if (++index[i] < loops.count[i])
                break;
            to -= (uint64_t)(loops.count[i] * loops.dst_stride[i]);
            index[i] = 0;
        }
    }
    return RSD_OK;
}

static rsd_status take_block(const struct sink *sink, struct scratch *scratch, const int64_t *lo,
                             const int64_t *len, const char *block)
{
    struct output *output = sink->context;
    const struct manifest *manifest = output->manifest;
    const struct extent *extent = &manifest->catalog.extents[sink->index];
    struct out_item *item = &manifest->items[sink->index];
    size_t element_nbytes = rsd_dtype_nbytes(sink->dtype);
    size_t nbytes = (size_t)box_volume(sink->ndim, len) * element_nbytes;
    uint64_t at = offset_in_box(sink, lo),
             all = (uint64_t)box_volume(sink->ndim, sink->len) * element_nbytes;
    (void)scratch;
    if (manifest->format == RSD_FORMAT_DCP)
        note_bytes(item, at, block, nbytes, all);
    if (manifest->compress)
        return zstd_writer_put(output->states[extent->file].zstd, block, nbytes);
    if (item->at)
        return put_rows(output, sink, lo, len, block);
    return put(output, extent->file, extent->offset + item->head + at, block, nbytes);
}

void output_sink(struct output *output, size_t tensor_index, size_t box, struct sink *sink)
{
    const struct catalog *catalog = &output->manifest->catalog;
    const struct stored_tensor *tensor = &catalog->tensors[tensor_index];
    *sink = (struct sink){.kind = SINK_BLOCKS,
                          .dtype = tensor->dtype,
                          .ndim = tensor->ndim,
                          .take = take_block,
                          .context = output,
                          .index = tensor->first_extent + box};
    copy_i64s(sink->lo, tensor_box_lo(catalog, tensor, box), tensor->ndim);
    copy_i64s(sink->len, tensor_box_len(catalog, tensor, box), tensor->ndim);
}
