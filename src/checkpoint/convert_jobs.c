/* convert_jobs.c - what one rank hauls of a conversion, and in which order.
 *
 * A job is a tensor with all its boxes that are not there yet, so that what several of them want is read
 * once; jobs stand in a row as their boxes do in the files. A compressed file is one stream after the other:
 * there a job is an item, a lane is a file, and a rank has whole files.
 */
#include "checkpoint.h"

#include <stdlib.h>

enum { MOST_UPLOADS = 8 }; /* of which a few parts are kept in memory at a time */

static rsd_status add_job(struct converting *c, struct convert_job job)
{
    TRY(GROW(c->jobs, c->jobs_capacity, c->njobs + 1));
    c->jobs[c->njobs++] = job;
    return RSD_OK;
}

/* As wide as they are read. */
static int64_t source_nbytes(const struct converting *c, size_t t, size_t box)
{
    const struct catalog *catalog = &c->manifest.catalog;
    const struct stored_tensor *tensor = &catalog->tensors[t];
    return box_volume(tensor->ndim, tensor_box_len(catalog, tensor, box)) *
           (int64_t)rsd_dtype_nbytes(c->in->catalog.tensors[c->source_of[t]].dtype);
}

/* ---- compressed ---- */

static rsd_status share_files(const struct converting *c, bool *mine)
{
    const struct catalog *catalog = &c->manifest.catalog;
    struct partition parts = {0};
    int64_t *nbytes = mem_new(c->manifest.nfiles, sizeof *nbytes);
    rsd_status status = nbytes ? RSD_OK : RSD_ENOMEM;
    for (size_t t = 0; t < catalog->ntensors && !status; t++)
        for (size_t box = 0; box < catalog->tensors[t].nboxes; box++) {
            size_t extent = catalog->tensors[t].first_extent + box;
            if (output_wants_item(&c->output, extent))
                nbytes[catalog->extents[extent].file] += source_nbytes(c, t, box);
        }
    if (!status)
        status = partition_jobs(c->operation.rank, c->operation.nranks, nbytes, NULL,
                                c->manifest.nfiles, &parts);
    for (size_t i = 0; i < parts.n && !status; i++)
        mine[parts.list[i].job] = true;
    partition_drop(&parts);
    mem_free(nbytes);
    return status;
}

static rsd_status list_items(struct converting *c)
{
    const struct catalog *catalog = &c->manifest.catalog;
    bool *mine = mem_new(c->manifest.nfiles, sizeof *mine);
    rsd_status status = mine ? share_files(c, mine) : RSD_ENOMEM;
    c->nlanes = c->manifest.nfiles;
    for (size_t t = 0; t < catalog->ntensors && !status; t++)
        for (size_t box = 0; box < catalog->tensors[t].nboxes && !status; box++) {
            size_t extent = catalog->tensors[t].first_extent + box;
            uint32_t file = catalog->extents[extent].file;
            if (!mine[file] || !output_wants_item(&c->output, extent))
                continue;
            c->nbytes += source_nbytes(c, t, box);
            status = add_job(c, (struct convert_job){.tensor = t, .lane = file, .box = box});
        }
    mem_free(mine);
    return status;
}

/* ---- plain ---- */

/* False if nothing of the tensor is wanted. */
static bool wanted_nbytes(const struct converting *c, size_t t, int64_t *nbytes)
{
    const struct stored_tensor *tensor = &c->manifest.catalog.tensors[t];
    bool any = false;
    *nbytes = 0;
    for (size_t box = 0; box < tensor->nboxes; box++)
        if (output_wants_item(&c->output, tensor->first_extent + box)) {
            any = true;
            *nbytes += source_nbytes(c, t, box);
        }
    return any;
}

static uint32_t first_wanted_file(const struct converting *c, size_t t)
{
    const struct stored_tensor *tensor = &c->manifest.catalog.tensors[t];
    size_t box = 0;
    while (!output_wants_item(&c->output, tensor->first_extent + box))
        box++;
    return c->manifest.catalog.extents[tensor->first_extent + box].file;
}

static rsd_status share_tensors(const struct converting *c, struct partition *mine)
{
    const struct catalog *catalog = &c->manifest.catalog, *in = &c->in->catalog;
    size_t n = 0, *wanted = mem_new(catalog->ntensors, sizeof *wanted);
    int64_t *nbytes = mem_new(catalog->ntensors, sizeof *nbytes);
    bool *splits = mem_new(catalog->ntensors, sizeof *splits);
    rsd_status status = nbytes && splits && wanted ? RSD_OK : RSD_ENOMEM;
    for (size_t t = 0; t < catalog->ntensors && !status; t++) {
        if (!wanted_nbytes(c, t, &nbytes[n]))
            continue;
        splits[n] = partition_can_split(in, &in->tensors[c->source_of[t]]);
        wanted[n++] = t;
    }
    if (!status)
        status = partition_jobs(c->operation.rank, c->operation.nranks, nbytes, splits, n, mine);
    for (size_t i = 0; i < mine->n && !status; i++)
        mine->list[i].job = wanted[mine->list[i].job];
    mem_free(wanted);
    mem_free(nbytes);
    mem_free(splits);
    return status;
}

/* Those of one file make a lane, or, where tensors go to many files, lanes are about equal. */
static rsd_status list_tensors(struct converting *c)
{
    c->nlanes = c->whole ? c->manifest.nfiles : (size_t)pool_nthreads(c->options.pool);
    int64_t *load = mem_new(c->nlanes, sizeof *load);
    struct partition mine = {0};
    rsd_status status = load ? share_tensors(c, &mine) : RSD_ENOMEM;
    for (size_t i = 0; i < mine.n && !status; i++) {
        struct convert_job job = {
            .tensor = mine.list[i].job, .box = SIZE_MAX, .part = mine.list[i]};
        if (c->whole)
            job.lane = first_wanted_file(c, job.tensor);
        for (size_t lane = 1; lane < c->nlanes && !c->whole; lane++)
            job.lane = load[lane] < load[job.lane] ? lane : job.lane;
        load[job.lane] += mine.nbytes[i];
        c->nbytes += mine.nbytes[i];
        status = add_job(c, job);
    }
    partition_drop(&mine);
    mem_free(load);
    return status;
}

/* ---- lanes ---- */

static int by_lane(const void *a, const void *b)
{
    const struct convert_job *x = a, *y = b;
    if (x->lane != y->lane)
        return x->lane < y->lane ? -1 : 1;
    if (x->tensor != y->tensor)
        return x->tensor < y->tensor ? -1 : 1;
    return (x->box > y->box) - (x->box < y->box);
}

/* Parts of files that are uploaded are kept in memory until they are full, so many files are written one
 * after the other; and a rank uploads whole files. */
static bool has_file_order(const struct converting *c)
{
    return !c->dest->store->ops->random_write &&
           (c->operation.nranks > 1 || (c->manifest.nfiles > MOST_UPLOADS && !c->whole));
}

rsd_status convert_list_jobs(struct converting *c)
{
    TRY(c->manifest.compress || has_file_order(c) ? list_items(c) : list_tensors(c));
    if (c->njobs > 1)
        qsort(c->jobs, c->njobs, sizeof *c->jobs, by_lane);
    c->first_job = mem_new(c->nlanes + 1, sizeof *c->first_job);
    c->parts = mem_new(c->njobs, sizeof *c->parts);
    if (!c->first_job || !c->parts)
        return RSD_ENOMEM;
    for (size_t i = 0; i < c->njobs; i++) {
        c->parts[i] = c->jobs[i].part;
        c->first_job[c->jobs[i].lane + 1]++;
    }
    for (size_t i = 0; i < c->nlanes; i++)
        c->first_job[i + 1] += c->first_job[i];
    return RSD_OK;
}
