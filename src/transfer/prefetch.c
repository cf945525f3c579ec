/* prefetch.c - tells a remote store which bytes will be read, so that it requests them ahead. */
#include "transfer.h"

/* What a job may have ahead of the one that is read, in each queue. */
enum { AHEAD_JOBS = 64, AHEAD_NBYTES = 64 << 20 };

static void prefetch_tensor(const rsd_checkpoint *checkpoint, const struct stored_tensor *tensor)
{
    const struct catalog *catalog = &checkpoint->catalog;
    for (size_t box = 0; box < tensor->nboxes; box++) {
        const struct extent *extent = &catalog->extents[tensor->first_extent + box];
        if (extent->kind != EXTENT_NONE)
            store_prefetch(checkpoint->store, extent->file, extent->offset, extent->nbytes);
    }
}

void prefetch_jobs(const struct batch *batch, size_t job, size_t end, size_t *next)
{
    const rsd_checkpoint *from = batch->from;
    uint64_t nbytes = 0;
    if (!from || !store_can_prefetch(from->store))
        return;
    for (size_t i = job; i < end && i < job + AHEAD_JOBS && nbytes < AHEAD_NBYTES; i++) {
        const struct batch_job *one = &batch->jobs.list[i];
        if (!one->whole || !batch_job_is_whole(one))
            continue;
        nbytes += (uint64_t)tensor_nbytes(&from->catalog, one->whole);
        if (i >= *next)
            prefetch_tensor(from, one->whole);
        *next = i >= *next ? i + 1 : *next;
    }
    store_start_prefetch(from->store);
}

void prefetch_tiles(const struct transfer *transfer, int64_t first, int64_t end)
{
    if (transfer->nsources == 0 || !transfer->sources[0].checkpoint || /* in memory */
        !store_can_prefetch(transfer->sources[0].checkpoint->store))
        return;
    for (int64_t tile = first; tile < end; tile++) {
        int64_t lo[RSD_MAX_DIMS], len[RSD_MAX_DIMS];
        struct box_tree_search search = {0};
        transfer_tile_box(transfer, tile, lo, len);
        for (int64_t i; (i = box_tree_next(&transfer->tree, &search, lo, len)) >= 0;) {
            size_t first_dim = (size_t)i * (size_t)transfer->ndim;
            int64_t part_lo[RSD_MAX_DIMS], part_len[RSD_MAX_DIMS];
            box_overlap(transfer->ndim, lo, len, transfer->piece_lo + first_dim,
                        transfer->piece_len + first_dim, part_lo, part_len);
            source_prefetch(&transfer->sources[transfer->pieces[i].source], part_lo, part_len);
        }
    }
    store_start_prefetch(transfer->sources[0].checkpoint->store);
}
