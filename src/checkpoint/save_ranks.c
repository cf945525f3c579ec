/* save_spread.c - a save that all ranks make together.
 *
 *     all      draft everything, agree
 *     rank 0   makes the folder
 *     all      write their own files, and say where compressed items came to lie
 *     rank 0   writes the metadata, publishes
 *
 * Whoever fails, all fail, the folder goes, and what was at the path stays there.
 */
#include "checkpoint.h"

#include <string.h>

/* A rank of the transport is a rank of the layouts. */
rsd_status save_as_one_rank(rsd_async_save *saving)
{
    rsd_save_options *options = &saving->options;
    const struct operation *operation = &saving->operation;
    if (options->nranks && options->nranks != operation->nranks)
        return fail(RSD_EINVAL, "files for %lld ranks, and %d save", (long long)options->nranks,
                    (int)operation->nranks);
    if (options->one_rank && options->rank != operation->rank)
        return fail(RSD_EINVAL, "rank %d saves what is of rank %d", (int)operation->rank,
                    (int)options->rank);
    options->nranks = operation->nranks;
    options->one_rank = 1;
    options->rank = operation->rank;
    return RSD_OK;
}

static rsd_status make_part(void *context)
{
    rsd_async_save *saving = context;
    return save_open_output(saving->path, OUTPUT_REPLACE, saving->options.overwrite != 0,
                            saving->options.storage, &saving->dest);
}

rsd_status save_meet(rsd_async_save *saving, rsd_status status)
{
    struct hash what = saving->drafted;
    if (!status) {
        hash_string(&what, saving->path);
        hash_i64(&what, saving->options.overwrite);
    }
    TRY(operation_agree(&saving->operation, status, what, NULL));
    return operation_lead(&saving->operation, make_part, saving);
}

rsd_status save_own_part(void *context)
{
    rsd_async_save *saving = context;
    double began = seconds_now();
    struct output_options joined = {.mode = OUTPUT_JOIN, .storage = saving->options.storage};
    if (saving->operation.rank > 0)
        TRY(store_open_output(saving->path, &joined, &saving->dest));
    TRY(output_open(&saving->output, &saving->manifest, saving->dest, NULL, saving->options.rank));
    TRY(save_write_files(saving));
    saving->report.seconds = seconds_now() - began;
    return RSD_OK;
}

/* ---- what ranks say ---- */

/* Where something compressed lies, which only its writer knows. */
static rsd_status say_extent(const rsd_async_save *saving, struct payload *own,
                             const struct extent *extent, bool value, size_t index)
{
    struct extent_update payload = {value, index, extent->offset, extent->nbytes};
    if (extent->file != (uint32_t)saving->operation.rank)
        return RSD_OK;
    return payload_put(own, &payload, sizeof payload);
}

/* The work of the step in which files are written, and what is said of it. */
struct writing {
    rsd_async_save *saving;
    rsd_status (*work)(void *saving);
    struct peer_step step;
};

static rsd_status write_and_say(void *context)
{
    struct writing *writing = context;
    rsd_async_save *saving = writing->saving;
    const struct catalog *catalog = &saving->manifest.catalog;
    struct payload *own = &writing->step.own;
    TRY(writing->work(saving));
    TRY(payload_put(own, &saving->report, sizeof saving->report));
    for (size_t i = 0; i < catalog->nextents && saving->manifest.compress; i++)
        TRY(say_extent(saving, own, &catalog->extents[i], false, i));
    for (size_t i = 0; i < catalog->nvalues && saving->manifest.compress; i++)
        TRY(say_extent(saving, own, &catalog->values[i].extent, true, i));
    return RSD_OK;
}

static rsd_status merge(void *context, const struct payload *all, struct payload *result)
{
    const struct writing *writing = context;
    rsd_async_save *saving = writing->saving;
    rsd_report sum = {0};
    for (int32_t rank = 0; rank < saving->operation.nranks; rank++) {
        size_t at = 0;
        TRY(payload_take_report(&all[rank], &at, &sum));
        while (at < all[rank].n)
            TRY(payload_take_extent(&all[rank], &at, &saving->manifest.catalog));
    }
    return payload_put(result, &sum, sizeof sum);
}

static rsd_status publish(void *context)
{
    rsd_async_save *saving = context;
    TRY(saving->manifest.format->writer->finish(&saving->manifest, saving->output.store));
    return store_commit(saving->dest);
}

rsd_status save_together(rsd_async_save *saving, rsd_status (*work)(void *saving))
{
    struct writing writing = {.saving = saving, .work = work};
    size_t at = 0;
    writing.step.work = write_and_say;
    writing.step.merge = merge;
    writing.step.context = &writing;
    rsd_status status = operation_step(&saving->operation, &writing.step);
    if (!status)
        status = payload_take(&writing.step.result, &at, &saving->report, sizeof saving->report);
    payload_drop(&writing.step.own);
    payload_drop(&writing.step.result);
    if (!status)
        status = operation_lead(&saving->operation, publish, saving);
    saving->published = !status;
    return status;
}

void save_drop_together(rsd_async_save *saving)
{
    output_close(&saving->output);
    store_close_output(saving->dest, saving->operation.rank > 0 || saving->published);
}
