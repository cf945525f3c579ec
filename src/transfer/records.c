/* records.c - checks the CRC-32 of records that a transfer does not read whole.
 *
 * A transfer that needs a part of a record, or a view of it, cannot check its CRC-32. What it writes would
 * carry a fresh one, and so hide the damage. Such a record is read once more from start to end, once in a
 * call, however many transfers need parts of it.
 */
#include "transfer.h"

#include "crc.h"

enum { BLOCK_NBYTES = 1 << 18 };

/* What came of the check of a record. */
struct record_check {
    bool done, has_crc;
    rsd_status status;
    char *error; /* with the status */
};

void record_set_open(struct record_set *set)
{
    *set = (struct record_set){0};
    pthread_mutex_init(&set->lock, NULL);
    pthread_cond_init(&set->changed, NULL);
}

void record_set_close(struct record_set *set)
{
    for (size_t i = 0; i < set->map.capacity; i++)
        mem_free(without_const(set->map.slots[i].name.bytes));
    for (size_t i = 0; i < set->n; i++)
        mem_free(set->checks[i].error);
    string_map_drop(&set->map);
    mem_free(set->checks);
    pthread_cond_destroy(&set->changed);
    pthread_mutex_destroy(&set->lock);
}

/* What tells a record apart from all others. */
struct record_key {
    uint64_t checkpoint, file, offset, nbytes, crc;
};

/* The offset of a stream is that of its compressed item. */
static struct record_key record_key_of(const struct source *source)
{
    const struct catalog *catalog = &source->checkpoint->catalog;
    const struct stored_tensor *tensor = &catalog->tensors[source->tensor];
    uint64_t item = catalog->extents[tensor->first_extent + source->box].offset;
    return (struct record_key){(uintptr_t)source->checkpoint, source->file,
                               source->array.stream ? item : source->array.offset,
                               source->array.nbytes, source->array.crc};
}

/* Adds a record that is to be checked. Requires the lock. */
static rsd_status add_record(struct record_set *set, const struct record_key *key, size_t *index)
{
    TRY(GROW(set->checks, set->capacity, set->n + 1));
    struct slice name = {mem_copy(key, 1, sizeof *key), sizeof *key};
    rsd_status status = name.bytes ? string_map_add(&set->map, name, set->n) : RSD_ENOMEM;
    if (status) {
        mem_free(without_const(name.bytes));
        return status;
    }
    set->checks[ *index = set->n++] = (struct record_check){0};
    return RSD_OK;
}

/* Finds what came of the check of a record, and waits for it while another thread checks. If *check is not done,
 * the record was added, and the caller must check it. */
static rsd_status find_check(struct record_set *set, const struct source *source, size_t *index,
                             struct record_check *check)
{
    const struct record_key key = record_key_of(source);
    rsd_status status = RSD_OK;
    pthread_mutex_lock(&set->lock);
    bool found = string_map_find(&set->map, (struct slice){(const char *)&key, sizeof key}, index);
    if (!found)
        status = add_record(set, &key, index);
    while (found && !set->checks[*index].done)
        pthread_cond_wait(&set->changed, &set->lock);
    if (!status)
        *check = set->checks[*index];
    pthread_mutex_unlock(&set->lock);
    return status;
}

static void end_check(struct record_set *set, size_t index, const struct record_check *check)
{
    pthread_mutex_lock(&set->lock);
    set->checks[index] = *check;
    pthread_cond_broadcast(&set->changed);
    pthread_mutex_unlock(&set->lock);
}

/* Reads the whole record in blocks, from its stream or from the file. *raw is for crc32_from_raw. */
static rsd_status read_record(const struct source *source, struct stored_stream *stream,
                              char *block, uint64_t *raw)
{
    *raw = 0;
    for (uint64_t at = 0; at < source->array.nbytes; at += BLOCK_NBYTES) {
        uint64_t left = source->array.nbytes - at;
        size_t n = left < BLOCK_NBYTES ? (size_t)left : BLOCK_NBYTES;
        TRY(stream ? stream->read(stream, block, n)
                   : store_read(source->checkpoint->store, source->file, source->array.offset + at,
                                block, n));
        *raw = crc_update(CRC_ZIP, *raw, block, n);
    }
    return RSD_OK;
}

/* Reads a whole record. *has_crc is false if it turns out to have no CRC-32. */
static rsd_status check_record(const struct source *source, bool *has_crc)
{
    const rsd_checkpoint *checkpoint = source->checkpoint;
    struct stored_stream *stream = NULL;
    uint32_t expected = source->array.crc;
    uint64_t raw = 0;
    char *block = mem_new(BLOCK_NBYTES, 1);
    rsd_status status = block ? RSD_OK : RSD_ENOMEM;
    if (!status && source->array.stream)
        status = format_open_stream(checkpoint, source->tensor, source->box, &stream);
    if (!status)
        status = read_record(source, stream, block, &raw);
    *has_crc = true;
    if (!status && stream)
        status = stream->end(stream, has_crc, &expected);
    stored_stream_close(stream);
    mem_free(block);
    TRY(status);
    uint32_t crc = crc32_from_raw(raw, source->array.nbytes);
    return *has_crc && crc != expected ? source_fail_damaged(source, crc, expected) : RSD_OK;
}

rsd_status record_set_check(struct record_set *set, struct source *source)
{
    size_t index = 0;
    struct record_check check = {0};
    TRY(find_check(set, source, &index, &check));
    if (!check.done) {
        check.status = check_record(source, &check.has_crc);
        check.error = check.status ? text_copy(rsd_error()) : NULL;
        check.done = true;
        end_check(set, index, &check);
    }
    if (check.status)
        return check.error ? fail(check.status, "%s", check.error) : RSD_ENOMEM;
    source->checked = check.has_crc;
    return RSD_OK;
}

/* Returns whether the CRC-32 of a source is compared with what this rank, or all ranks together, have read. */
static bool is_summed(const struct source *source, bool whole)
{
    return source->checkable &&
           (!whole || source->ended || source->crc_nbytes == source->array.nbytes);
}

rsd_status transfer_check_records(struct transfer *transfer, struct record_set *records, bool whole)
{
    for (size_t i = 0; i < transfer->nsources; i++) {
        struct source *source = &transfer->sources[i];
        if (source->memory || source->unchecked || !source->wanted || !source->array.has_crc ||
            is_summed(source, whole))
            continue;
        rsd_status status = record_set_check(records, source);
        if (status)
            return source_fail_in(source, status);
    }
    return RSD_OK;
}
