/* records.c - checks the CRC-32 of records that a transfer does not read whole.
 *
 * A transfer that needs a part of a record, or a view of it, cannot check its CRC-32. What it writes would
 * carry a fresh one, and so hide the damage. Such a record is read once more from start to end, once in a
 * call, however many transfers need parts of it.
 */
#include "transfer.h"

#include "crc.h"

enum { BLOCK_NBYTES = 1 << 18 };

void record_set_open(struct record_set *set)
{
    *set = (struct record_set){0};
    pthread_mutex_init(&set->lock, NULL);
}

void record_set_close(struct record_set *set)
{
    for (size_t i = 0; i < set->map.capacity; i++)
        mem_free(without_const(set->map.slots[i].name.bytes));
    string_map_drop(&set->map);
    pthread_mutex_destroy(&set->lock);
}

enum record_state { RECORD_HAS_CRC = 1, RECORD_LACKS_CRC };

/* Returns where a record is: of a stream, where its compressed item is. */
static uint64_t record_offset(const struct source *source)
{
    const struct catalog *catalog = &source->checkpoint->catalog;
    const struct stored_tensor *tensor = &catalog->tensors[source->tensor];
    return source->array.stream ? catalog->extents[tensor->first_extent + source->box].offset
                                : source->array.offset;
}

/* Finds a record in the set, and adds it if it is not there. */
static rsd_status find_record(struct record_set *set, const struct source *source, bool *found,
                              size_t *state)
{
    const uint64_t key[3] = {(uintptr_t)source->checkpoint, source->file, record_offset(source)};
    rsd_status status = RSD_OK;
    struct slice name = {(const char *)key, sizeof key};
    pthread_mutex_lock(&set->lock);
    *found = string_map_find(&set->map, name, state);
    if (!*found) {
        name.bytes = mem_copy(key, 1, sizeof key);
        status = name.bytes ? string_map_add(&set->map, name, RECORD_HAS_CRC) : RSD_ENOMEM;
        if (status)
            mem_free(without_const(name.bytes));
    }
    pthread_mutex_unlock(&set->lock);
    return status;
}

static rsd_status note_without_crc(struct record_set *set, const struct source *source)
{
    const uint64_t key[3] = {(uintptr_t)source->checkpoint, source->file, record_offset(source)};
    pthread_mutex_lock(&set->lock);
    rsd_status status = string_map_add(&set->map, (struct slice){(const char *)key, sizeof key},
                                       RECORD_LACKS_CRC); /* it is there, so its name is kept */
    pthread_mutex_unlock(&set->lock);
    return status;
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
    if (*has_crc && crc != expected)
        return fail(RSD_EFORMAT, "bytes %llu to %llu are damaged: CRC-32 is %08x, expected %08x",
                    (unsigned long long)source->array.offset,
                    (unsigned long long)(source->array.offset + source->array.nbytes), crc,
                    expected);
    return RSD_OK;
}

rsd_status record_set_check(struct record_set *set, struct source *source)
{
    bool found, has_crc = true;
    size_t state = RECORD_HAS_CRC;
    TRY(find_record(set, source, &found, &state));
    if (!found)
        TRY(check_record(source, &has_crc));
    if (!has_crc)
        TRY(note_without_crc(set, source));
    source->checked = has_crc && state == RECORD_HAS_CRC;
    return RSD_OK;
}
