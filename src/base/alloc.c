/* memory.c - the only malloc: counts are checked for overflow, memory is zeroed, failure has a
 * message. */
#include "base.h"

#include <stdlib.h>
#include <string.h>

static rsd_status no_memory(size_t count, size_t nbytes_each)
{
    return fail(RSD_ENOMEM, "no memory for %zu times %zu bytes", count, nbytes_each);
}

void *mem_new(size_t count, size_t nbytes_each)
{
    void *memory = calloc(count ? count : 1, nbytes_each);
    if (!memory)
        no_memory(count, nbytes_each);
    return memory;
}

/* The list is any kind of pointer, so it is read and written as bytes. */
rsd_status mem_grow(void *list, size_t *room, size_t need, size_t nbytes_each)
{
    void *memory;
    memcpy(&memory, list, sizeof memory);
    if (need <= *room && memory)
        return RSD_OK;
    size_t want = *room < 8 ? 8 : *room;
    while (want < need && want <= SIZE_MAX / 2)
        want *= 2;
    if (want < need || want > SIZE_MAX / nbytes_each)
        return no_memory(need, nbytes_each);
    memory = realloc(memory, want * nbytes_each);
    if (!memory)
        return no_memory(want, nbytes_each);
    memcpy(list, &memory, sizeof memory);
    *room = want;
    return RSD_OK;
}

void *mem_copy(const void *from, size_t count, size_t nbytes_each)
{
    void *copy = mem_new(count, nbytes_each);
    if (copy && count)
        memcpy(copy, from, count * nbytes_each);
    return copy;
}

void mem_free(void *memory)
{
    free(memory);
}

void rsd_free(void *returned)
{
    mem_free(returned);
}
