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
rsd_status save_as_one_rank(rsd_saving *saving)
{
    rsd_save_options *options = &saving->options;
    const struct spread *spread = &saving->spread;
    if (options->nranks && options->nranks != spread->nranks)
        return fail(RSD_EINVAL, "files for %lld ranks, and %d save", (long long)options->nranks,
                    (int)spread->nranks);
    if (options->one_rank && options->rank != spread->rank)
        return fail(RSD_EINVAL, "rank %d saves what is of rank %d", (int)spread->rank,
                    (int)options->rank);
    options->nranks = spread->nranks;
    options->one_rank = 1;
    options->rank = spread->rank;
    return RSD_OK;
}

static rsd_status make_part(void *context)
{
    rsd_saving *saving = context;
    return part_open(&saving->part, saving->path, PART_REPLACE, saving->options.overwrite != 0,
                     false);
}

rsd_status save_meet(rsd_saving *saving, rsd_status status)
{
    struct hash what = saving->drafted;
    if (!status) {
        hash_string(&what, saving->path);
        hash_i64(&what, saving->options.overwrite);
    }
    TRY(spread_meet(&saving->spread, status, what, NULL));
    return spread_lead(&saving->spread, make_part, saving);
}

rsd_status save_own_part(void *context)
{
    rsd_saving *saving = context;
    double began = seconds_now();
    if (saving->spread.rank > 0)
        TRY(part_join(&saving->part, saving->path, -1));
    TRY(output_open(&saving->output, &saving->draft, &saving->part, NULL, saving->options.rank));
    TRY(save_write_files(saving));
    saving->report.seconds = seconds_now() - began;
    return RSD_OK;
}

/* ---- what ranks say ---- */

/* Where something compressed lies, which only its writer knows. */
static rsd_status say_extent(const rsd_saving *saving, struct said *own,
                             const struct extent *extent, bool value, size_t index)
{
    struct extent_said said = {value, index, extent->offset, extent->nbytes};
    if (extent->file != (uint32_t)saving->spread.rank)
        return RSD_OK;
    return said_add(own, &said, sizeof said);
}

/* The work of the step in which files are written, and what is said of it. */
struct writing {
    rsd_saving *saving;
    rsd_status (*work)(void *saving);
    struct joint_step step;
};

static rsd_status write_and_say(void *context)
{
    struct writing *writing = context;
    rsd_saving *saving = writing->saving;
    const struct contents *contents = &saving->draft.contents;
    struct said *own = &writing->step.own;
    TRY(writing->work(saving));
    TRY(said_add(own, &saving->report, sizeof saving->report));
    for (size_t i = 0; i < contents->nextents && saving->draft.compress; i++)
        TRY(say_extent(saving, own, &contents->extents[i], false, i));
    for (size_t i = 0; i < contents->nvalues && saving->draft.compress; i++)
        TRY(say_extent(saving, own, &contents->values[i].extent, true, i));
    return RSD_OK;
}

static rsd_status merge(void *context, const struct said *all, struct said *heard)
{
    const struct writing *writing = context;
    rsd_saving *saving = writing->saving;
    rsd_report sum = {0};
    for (int32_t rank = 0; rank < saving->spread.nranks; rank++) {
        size_t at = 0;
        TRY(hear_report(&all[rank], &at, &sum));
        while (at < all[rank].n)
            TRY(hear_extent(&all[rank], &at, &saving->draft.contents));
    }
    return said_add(heard, &sum, sizeof sum);
}

static rsd_status publish(void *context)
{
    rsd_saving *saving = context;
    TRY(save_metadata(&saving->part, &saving->draft.contents, &saving->output.files, ".metadata"));
    return part_publish(&saving->part);
}

rsd_status save_together(rsd_saving *saving, rsd_status (*work)(void *saving))
{
    struct writing writing = {.saving = saving, .work = work};
    size_t at = 0;
    writing.step.work = write_and_say;
    writing.step.merge = merge;
    writing.step.context = &writing;
    rsd_status status = spread_step(&saving->spread, &writing.step);
    if (!status)
        status = said_take(&writing.step.heard, &at, &saving->report, sizeof saving->report);
    said_drop(&writing.step.own);
    said_drop(&writing.step.heard);
    if (!status)
        status = spread_lead(&saving->spread, publish, saving);
    saving->published = !status;
    return status;
}

void save_drop_together(rsd_saving *saving)
{
    output_close(&saving->output);
    if (saving->spread.rank == 0 && !saving->published)
        part_remove(&saving->part);
    else
        part_close(&saving->part);
}
