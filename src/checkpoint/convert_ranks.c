/* convert_ranks.c - which rank converts what, and what ranks send each other.
 *
 *     rank 0 --state--> all ranks      files and items that an earlier run has completed
 *     all ranks --written--> rank 0    CRCs of split items, and offsets of compressed ones
 *
 * Manifests are not sent: every rank has made the same one.
 */
#include "checkpoint.h"

#include <stdio.h>
#include <string.h>

enum {
    UPLOAD_NBYTES = 16 << 20
}; /* of the parts of a file that is uploaded, in memory at a time */

/* ---- jobs ---- */

/* Returns the bytes of an item, as wide as they are read; -1 if it is complete. */
static int64_t wanted_nbytes(const struct conversion_run *c, size_t item)
{
    if (!writer_wants_item(&c->writer, item))
        return -1;
    struct extent_box box = extent_find_box(&c->manifest.catalog, item);
    rsd_dtype dtype = c->in->catalog.tensors[c->source_of[box.index]].dtype;
    return box_volume(box.tensor->ndim, box.len) * (int64_t)rsd_dtype_nbytes(dtype);
}

/* A compressed file is one stream after the other. So a rank has whole files, a job is an item, and a queue is a
 * file. */
static rsd_status partition_files(const struct conversion_run *c, struct job_list *files)
{
    const struct catalog *catalog = &c->manifest.catalog;
    int64_t *nbytes = mem_new(c->manifest.nfiles, sizeof *nbytes);
    rsd_status status = nbytes ? RSD_OK : RSD_ENOMEM;
    for (size_t i = 0; i < catalog->nextents && !status; i++)
        nbytes[catalog->extents[i].file] += max_i64(0, wanted_nbytes(c, i));
    for (size_t i = 0; i < c->manifest.nfiles && !status; i++)
        status = job_list_add(files, (struct batch_job){.id = i, .of = nbytes[i]});
    job_list_partition(files, c->operation.rank, c->operation.nranks);
    mem_free(nbytes);
    return status;
}

/* Lists the items of the files that this rank writes, as one job each. */
static rsd_status list_item_jobs(const struct conversion_run *c, const struct job_list *files,
                                 struct job_list *jobs)
{
    const struct catalog *catalog = &c->manifest.catalog;
    bool *mine = mem_new(c->manifest.nfiles, sizeof *mine);
    rsd_status status = mine ? RSD_OK : RSD_ENOMEM;
    for (size_t i = 0; i < files->n && !status; i++)
        mine[files->list[i].id] = true;
    for (size_t i = 0; i < catalog->nextents && !status; i++) {
        int64_t nbytes = wanted_nbytes(c, i);
        struct batch_job job = {.id = i, .queue = catalog->extents[i].file, .of = nbytes};
        if (nbytes >= 0 && mine[job.queue])
            status = job_list_add(jobs, job);
    }
    mem_free(mine);
    return status;
}

/* A job is a tensor with all items that are not complete, so that bytes that several of them need are read once. Its
 * queue is the file of the first. */
static rsd_status list_tensor_jobs(const struct conversion_run *c, struct job_list *jobs)
{
    const struct catalog *catalog = &c->manifest.catalog, *in = &c->in->catalog;
    for (size_t t = 0; t < catalog->ntensors; t++) {
        const struct stored_tensor *tensor = &catalog->tensors[t];
        const struct stored_tensor *source = &in->tensors[c->source_of[t]];
        struct batch_job job = {.id = t,
                                .can_split = tensor_can_split(in, source),
                                .whole = c->dest->resumed ? NULL : source};
        bool wanted = false;
        for (size_t i = tensor->first_extent + tensor->nboxes; i-- > tensor->first_extent;) {
            int64_t nbytes = wanted_nbytes(c, i);
            if (nbytes < 0)
                continue;
            wanted = true;
            job.of += nbytes;
            job.queue = catalog->extents[i].file;
        }
        if (wanted)
            TRY(job_list_add(jobs, job));
    }
    job_list_partition(jobs, c->operation.rank, c->operation.nranks);
    return RSD_OK;
}

/* Puts each job into the queue with the fewest bytes. */
static rsd_status balance_queues(struct job_list *jobs, size_t nqueues)
{
    int64_t *nbytes = mem_new(nqueues, sizeof *nbytes);
    if (!nbytes)
        return RSD_ENOMEM;
    for (size_t i = 0; i < jobs->n; i++) {
        struct batch_job *job = &jobs->list[i];
        job->queue = 0;
        for (size_t queue = 1; queue < nqueues; queue++)
            if (nbytes[queue] < nbytes[job->queue])
                job->queue = queue;
        nbytes[job->queue] += job->to - job->from;
    }
    mem_free(nbytes);
    return RSD_OK;
}

/* Parts of files that are uploaded are kept in memory until they are full, so many files are written one after the
 * other; and a rank uploads whole files. */
static bool has_file_order(const struct conversion_run *c)
{
    int64_t given = c->operation.io.max_nbytes, all = given > 0 ? given : DEFAULT_MAX_NBYTES;
    return !c->dest->store->ops->random_write &&
           (c->operation.nranks > 1 ||
            ((int64_t)c->manifest.nfiles > all / UPLOAD_NBYTES &&
             c->manifest.catalog.nextents > c->manifest.catalog.ntensors));
}

rsd_status convert_list_jobs(struct conversion_run *c, struct batch *batch)
{
    struct job_list files = {0};
    c->item_jobs = c->manifest.compress || has_file_order(c);
    batch->nqueues = c->manifest.nfiles;
    batch->one_per_queue = c->manifest.compress != 0;
    if (c->item_jobs) {
        rsd_status status = partition_files(c, &files);
        if (!status)
            status = list_item_jobs(c, &files, &batch->jobs);
        job_list_drop(&files);
        return status;
    }
    TRY(list_tensor_jobs(c, &batch->jobs));
    if (c->manifest.files_of == FILES_OF_TENSORS)
        return RSD_OK;
    batch->nqueues = (size_t)pool_nthreads(c->operation.io.pool);
    return balance_queues(&batch->jobs, batch->nqueues);
}

/* ---- the state, at the start ---- */

rsd_status convert_put_state(struct conversion_run *c)
{
    for (size_t i = 0; i < c->manifest.catalog.nextents; i++) {
        char done = c->manifest.items[i].done;
        TRY(payload_put(&c->state, &done, 1));
    }
    return writer_put_files(&c->writer, false, &c->state);
}

rsd_status convert_take_state(struct conversion_run *c)
{
    size_t at = 0;
    for (size_t i = 0; i < c->manifest.nfiles; i++)
        c->writer.files[i].created = c->writer.shared;
    for (size_t i = 0; i < c->manifest.catalog.nextents; i++) {
        char done;
        TRY(payload_take(&c->state, &at, &done, 1));
        c->manifest.items[i].done = done != 0;
    }
    return writer_take_files(&c->writer, &c->state, &at);
}

/* ---- what was written, at the end ---- */

rsd_status convert_put_written(void *context, struct payload *own)
{
    const struct conversion_run *c = context;
    TRY(payload_put_list(own, c->split, c->nsplit, sizeof *c->split));
    return writer_put_files(&c->writer, true, own);
}

/* On rank 0: adds the CRCs that a rank has of items that several ranks wrote. */
static rsd_status take_split_items(struct conversion_run *c, const struct payload *sent, size_t *at)
{
    uint64_t n;
    TRY(payload_take(sent, at, &n, sizeof n));
    for (uint64_t i = 0; i < n; i++) {
        struct split_item one;
        TRY(payload_take(sent, at, &one, sizeof one));
        if (one.extent >= c->manifest.catalog.nextents)
            return fail(RSD_EPEER, "a rank wrote a part of item %llu of %zu",
                        (unsigned long long)one.extent, c->manifest.catalog.nextents);
        struct manifest_item *item = &c->manifest.items[one.extent];
        item->split = true;
        item->crc ^= one.crc;
        for (size_t k = 0; k < sizeof item->first; k++)
            item->first[k] ^= one.first[k];
    }
    return RSD_OK;
}

rsd_status convert_take_written(void *context, const struct payload *sent, size_t *at)
{
    struct conversion_run *c = context;
    TRY(take_split_items(c, sent, at));
    return writer_take_files(&c->writer, sent, at);
}
