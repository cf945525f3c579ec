/* reflink.c - bytes of an output that lie in the input as they will lie in the output: on file systems that
 * share extents between files, they are shared instead of copied.
 *
 *     input    ....|=========|=========|=========|..      both begin at the same place within a block,
 *     output  |=========|=========|=========|...          so whole blocks are shared, and the ends copied
 *
 * What is shared is read all the same where its CRC is checked or needed; it is only not written.
 */
#include "checkpoint.h"

enum { BLOCK = 4096, LEAST_NBYTES = 64 << 10 };

/* ---- what is shared ---- */

rsd_status writer_start_cloning(struct writer *writer, enum rsd_reflink reflink, bool unchecked)
{
    writer->reflink = reflink;
    writer->unchecked = unchecked;
    if (reflink == RSD_REFLINK_NEVER || writer->manifest->compress || !writer->store->ops->clone)
        return RSD_OK;
    writer->cloned = mem_new(writer->manifest->catalog.nextents, sizeof *writer->cloned);
    return writer->cloned ? RSD_OK : RSD_ENOMEM;
}

/* Notes that bytes [lo, hi) of a file, which are in an extent, are shared. Only one thread has the extent. */
static rsd_status note_cloned(struct writer *writer, size_t extent, uint64_t lo, uint64_t hi)
{
    struct cloned_ranges *ranges = &writer->cloned[extent];
    TRY(GROW(ranges->list, ranges->capacity, ranges->n + 1));
    ranges->list[ranges->n++] = (struct cloned_range){lo, hi};
    writer->nbytes_shared += hi - lo;
    return RSD_OK;
}

void writer_drop_cloned(struct writer *writer)
{
    for (size_t i = 0; writer->cloned && i < writer->manifest->catalog.nextents; i++)
        mem_free(writer->cloned[i].list);
    mem_free(writer->cloned);
    writer->cloned = NULL;
}

uint64_t writer_find_uncloned(const struct writer *writer, size_t extent, uint64_t *at,
                              uint64_t end)
{
    uint64_t stop = end;
    const struct cloned_ranges *ranges = writer->cloned ? &writer->cloned[extent] : NULL;
    for (bool moved = ranges != NULL; moved;) {
        moved = false;
        for (size_t i = 0; i < ranges->n; i++)
            if (*at >= ranges->list[i].lo && *at < ranges->list[i].hi && *at < end) {
                *at = ranges->list[i].hi < end ? ranges->list[i].hi : end;
                moved = true;
            }
    }
    for (size_t i = 0; ranges && i < ranges->n; i++)
        if (ranges->list[i].lo > *at && ranges->list[i].lo < stop)
            stop = ranges->list[i].lo;
    return stop - *at;
}

/* ---- pieces ---- */

/* Where a piece lies: n bytes in a row in both files. */
struct piece_run {
    uint64_t from, to, n;
};

/* Returns whether a piece is one run of bytes in its source and in its item, and if so where. */
static bool find_piece_run(const struct writer *writer, struct transfer *transfer, size_t piece,
                           struct piece_run *run)
{
    struct source *source = &transfer->sources[transfer->pieces[piece].source];
    const struct sink *sink = &transfer->sinks[transfer->pieces[piece].sink];
    const struct manifest_item *item = &writer->manifest->items[sink->index];
    const struct extent *extent = &writer->manifest->catalog.extents[sink->index];
    const int64_t *lo = transfer->piece_lo + piece * (size_t)transfer->ndim;
    const int64_t *len = transfer->piece_len + piece * (size_t)transfer->ndim;
    int64_t packed[RSD_MAX_DIMS], strides[RSD_MAX_DIMS];
    uint64_t at;
    if (sink->dtype != transfer->dtype || item->at || source->array.big_endian ||
        !source_find_run(source, lo, len, &at, &run->n))
        return false;
    box_packed_strides(transfer->ndim, len, transfer->element_nbytes, packed);
    box_packed_strides(transfer->ndim, sink->len, transfer->element_nbytes, strides);
    if (box_loops(transfer->ndim, len, element_of_bytes(transfer->element_nbytes), strides, packed)
            .n > 0)
        return false;
    run->from = source->array.offset + at;
    run->to = extent->offset + item->head + sink_offset(sink, lo);
    return true;
}

/* Copies the ends of a piece whose middle is shared. */
static rsd_status copy_ends(struct writer *writer, const struct source *source, uint32_t file,
                            const struct piece_run *run, uint64_t lo, uint64_t hi)
{
    const uint64_t begins[] = {run->to, hi}, ends[] = {lo, run->to + run->n};
    for (int i = 0; i < 2; i++) {
        char bytes[BLOCK];
        size_t n = (size_t)(ends[i] - begins[i]);
        rsd_status status = store_read(source->checkpoint->store, source->file,
                                       run->from + (begins[i] - run->to), bytes, n);
        if (status)
            return store_fail_in(source->checkpoint->store, source->file, status);
        status = store_write(writer->store, file, begins[i], bytes, n);
        if (status)
            return store_fail_in(writer->store, file, status);
        writer->nbytes_written += n;
    }
    return RSD_OK;
}

/* Shares the whole blocks of a piece with the input. EUNSUPPORTED: the file system does not share them. */
static rsd_status clone_piece(struct writer *writer, struct transfer *transfer, size_t piece,
                              const struct piece_run *run)
{
    const struct source *source = &transfer->sources[transfer->pieces[piece].source];
    size_t index = transfer->sinks[transfer->pieces[piece].sink].index;
    uint32_t file = writer->manifest->catalog.extents[index].file;
    uint64_t lo = (run->to + BLOCK - 1) / BLOCK * BLOCK, hi = (run->to + run->n) / BLOCK * BLOCK;
    rsd_status status = store_clone(writer->store, file, lo, source->checkpoint->store,
                                    source->file, run->from + (lo - run->to), hi - lo);
    if (status)
        return status == RSD_EUNSUPPORTED ? status : store_fail_in(writer->store, file, status);
    TRY(note_cloned(writer, index, lo, hi));
    if (!writer->unchecked || writer->manifest->format->writer->frame)
        return RSD_OK;
    TRY(copy_ends(writer, source, file, run, lo, hi));
    transfer->sources[transfer->pieces[piece].source].unchecked = true;
    transfer->pieces[piece].done = true;
    return RSD_OK;
}

rsd_status reflink_share(struct writer *writer, struct transfer *transfer)
{
    for (size_t i = 0; i < transfer->npieces && writer->cloned; i++) {
        struct piece_run run;
        if (writer->reflink == RSD_REFLINK_NEVER)
            return RSD_OK;
        if (!find_piece_run(writer, transfer, i, &run) || run.n < LEAST_NBYTES ||
            (run.from - run.to) % BLOCK != 0)
            continue;
        rsd_status status = clone_piece(writer, transfer, i, &run);
        if (status == RSD_EUNSUPPORTED && writer->reflink != RSD_REFLINK_ALWAYS) {
            writer->reflink = RSD_REFLINK_NEVER; /* of this output, once and for all */
            return RSD_OK;
        }
        TRY(status);
    }
    return RSD_OK;
}
