/* convert_spread.c - what the ranks of a conversion tell each other.
 *
 *     rank 0 --state--> all        which files and items an earlier run has completed
 *     all --written--> rank 0      sums of what was split, and where compressed items came to lie
 *
 * Drafts need not travel: every rank has made the same one.
 */
#include "checkpoint.h"

#include <stdio.h>
#include <string.h>

/* ---- the state, at the beginning ---- */

enum { FILE_DONE = 1, FILE_NOTED = 2 };

struct file_state {
    uint64_t flags, nbytes;
};

/* Where the compressed items and values of some files lie: of those that are done, or of those that this
 * process has written. */
static rsd_status say_places(const struct converting *c, struct payload *own, bool touched)
{
    const struct catalog *catalog = &c->manifest.catalog;
    struct payload places = {0};
    rsd_status status = RSD_OK;
    for (size_t i = 0; i < catalog->nextents + catalog->nvalues && !status; i++) {
        bool value = i >= catalog->nextents;
        size_t index = value ? i - catalog->nextents : i;
        const struct extent *extent =
            value ? &catalog->values[index].extent : &catalog->extents[index];
        const struct out_state *state = &c->output.states[extent->file];
        struct extent_update one = {value, index, extent->offset, extent->nbytes};
        if (c->manifest.compress && state->done && (!touched || state->touched))
            status = payload_put(&places, &one, sizeof one);
    }
    if (!status)
        status = payload_put_list(own, places.bytes, places.n, 1);
    payload_drop(&places);
    return status;
}

static rsd_status hear_places(struct converting *c, const struct payload *payload, size_t *at)
{
    uint64_t n;
    TRY(payload_take(payload, at, &n, sizeof n));
    for (size_t end = *at + (size_t)n; *at < end;)
        TRY(payload_take_extent(payload, at, &c->manifest.catalog));
    return RSD_OK;
}

rsd_status convert_say_state(struct converting *c)
{
    const struct catalog *catalog = &c->manifest.catalog;
    struct payload *own = &c->open.own;
    for (size_t i = 0; i < c->manifest.nfiles; i++) {
        const struct out_state *state = &c->output.states[i];
        struct file_state one = {.flags = (state->done ? FILE_DONE : 0u) |
                                          (state->noted ? FILE_NOTED : 0u),
                                 .nbytes = c->manifest.files[i].nbytes};
        TRY(payload_put(own, &one, sizeof one));
    }
    for (size_t i = 0; i < catalog->nextents; i++) {
        char done = c->manifest.items[i].done;
        TRY(payload_put(own, &done, 1));
    }
    return say_places(c, own, false);
}

rsd_status convert_hear_state(struct converting *c)
{
    const struct catalog *catalog = &c->manifest.catalog;
    const struct payload *result = &c->open.result;
    size_t at = 0;
    snprintf(c->journal_name, sizeof c->journal_name, JOURNAL_NAME ".%d", (int)c->operation.rank);
    struct output_options options = {
        .mode = OUTPUT_JOIN, .journal = c->journal_name, .storage = c->options.storage};
    TRY(store_open_output(c->out, &options, &c->dest));
    TRY(output_open(&c->output, &c->manifest, c->dest, c->in, -1));
    c->output.journal = true;
    c->output.shared = !c->manifest.compress && c->dest->store->ops->random_write;
    for (size_t i = 0; i < c->manifest.nfiles; i++) {
        struct file_state one;
        TRY(payload_take(result, &at, &one, sizeof one));
        c->output.states[i].done = (one.flags & FILE_DONE) != 0;
        c->output.states[i].noted = (one.flags & FILE_NOTED) != 0;
        c->output.states[i].created = c->output.shared;
        c->manifest.files[i].nbytes = one.nbytes;
    }
    for (size_t i = 0; i < catalog->nextents; i++) {
        char done;
        TRY(payload_take(result, &at, &done, 1));
        c->manifest.items[i].done = done != 0;
    }
    return hear_places(c, result, &at);
}

/* ---- what was written, at the end ---- */

/* A compressed file that a rank has completed. */
struct file_written {
    uint64_t file, nbytes;
};

static rsd_status say_files(const struct converting *c, struct payload *own)
{
    struct payload files = {0};
    rsd_status status = RSD_OK;
    for (size_t i = 0; i < c->manifest.nfiles && !status && !c->output.shared; i++) {
        struct file_written one = {i, c->manifest.files[i].nbytes};
        if (c->output.states[i].done && c->output.states[i].touched)
            status = payload_put(&files, &one, sizeof one);
    }
    if (!status)
        status = payload_put_list(own, files.bytes, files.n, 1);
    payload_drop(&files);
    return status;
}

rsd_status convert_say_written(struct converting *c)
{
    struct payload *own = &c->transfer.own;
    c->report.nbytes_needed = c->nbytes_needed;
    if (c->operation.rank > 0) { /* rank 0 counts its own in the end */
        c->report.nbytes_written = (int64_t)c->output.nbytes_written;
        c->report.nfiles_written = c->output.nfiles_written;
    }
    TRY(payload_put_report(&c->operation, own, &c->report));
    TRY(payload_put_list(own, c->seen.list, c->seen.n, sizeof *c->seen.list));
    TRY(payload_put_list(own, c->split, c->nsplit, sizeof *c->split));
    TRY(say_files(c, own));
    return say_places(c, own, true);
}

static void take_part(struct converting *c, const struct split_item *part, bool own)
{
    struct manifest_item *item = &c->manifest.items[part->extent];
    item->split = true;
    if (own)
        return; /* it is in there already */
    item->crc ^= part->crc;
    for (size_t i = 0; i < sizeof item->first; i++)
        item->first[i] ^= part->first[i];
}

static rsd_status hear_parts(struct converting *c, const struct payload *payload, size_t *at,
                             bool own)
{
    struct split_item *list = NULL;
    size_t n = 0, capacity = 0;
    rsd_status status = payload_take_list(payload, at, &list, &n, &capacity, sizeof *list);
    for (size_t i = 0; i < n && !status; i++)
        if (list[i].extent >= c->manifest.catalog.nextents)
            status = fail(RSD_EPEER, "a rank wrote a part of item %llu of %zu",
                          (unsigned long long)list[i].extent, c->manifest.catalog.nextents);
        else
            take_part(c, &list[i], own);
    mem_free(list);
    return status;
}

static rsd_status hear_files(struct converting *c, const struct payload *payload, size_t *at)
{
    uint64_t n;
    TRY(payload_take(payload, at, &n, sizeof n));
    for (size_t end = *at + (size_t)n; *at < end;) {
        struct file_written one;
        TRY(payload_take(payload, at, &one, sizeof one));
        if (one.file >= c->manifest.nfiles)
            return fail(RSD_EPEER, "a rank wrote file %llu of %zu", (unsigned long long)one.file,
                        c->manifest.nfiles);
        c->output.states[one.file].done = true;
        c->manifest.files[one.file].nbytes = one.nbytes;
    }
    return RSD_OK;
}

static rsd_status damaged(void *context, const struct partial_crc *seen, rsd_status status)
{
    const struct converting *c = context;
    const struct stored_tensor *tensor = &c->in->catalog.tensors[c->source_of[seen->job]];
    return store_fail_in(c->in->store, (uint32_t)seen->file,
                         fail_in(status, "%.300s: ", tensor->name));
}

/* On rank 0, which ends what was split and writes the metadata. */
rsd_status convert_merge(void *context, const struct payload *all, struct payload *result)
{
    struct converting *c = context;
    struct partial_crc *seen = NULL;
    size_t nseen = 0, capacity = 0;
    rsd_report sum = {0};
    rsd_status status = RSD_OK;
    for (int32_t rank = 0; rank < c->operation.nranks && !status; rank++) {
        size_t at = 0;
        status = payload_take_report(&all[rank], &at, &sum);
        if (!status)
            status = payload_take_list(&all[rank], &at, &seen, &nseen, &capacity, sizeof *seen);
        if (!status)
            status = hear_parts(c, &all[rank], &at, rank == 0);
        if (!status)
            status = hear_files(c, &all[rank], &at);
        if (!status)
            status = hear_places(c, &all[rank], &at);
    }
    if (!status)
        status = partial_crcs_check(seen, nseen, &sum, damaged, c);
    mem_free(seen);
    c->report = sum;
    (void)result; /* all hear the report in the end */
    return status;
}
