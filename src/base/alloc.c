/* alloc.c - all allocations of the library. Counts are checked for overflow, and every failure sets
 * the error text. */
#include "base.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static rsd_status fail_to_allocate(size_t count, size_t element_nbytes)
{
    return fail(RSD_ENOMEM, "out of memory: cannot allocate %zu elements of %zu bytes", count,
                element_nbytes);
}

void *mem_new(size_t count, size_t element_nbytes)
{
    void *memory = calloc(count ? count : 1, element_nbytes);
    if (!memory)
        fail_to_allocate(count, element_nbytes);
    return memory;
}

/* Buffers of this size are mapped: what malloc keeps of them after they are freed would exceed limits on memory. Address
 * sanitizers see the ends of those that are not. */
#if defined(__SANITIZE_ADDRESS__)
enum { MAPPED_NBYTES = 1 << 30 };
#else
enum { MAPPED_NBYTES = 1 << 20 };
#endif

void *mem_new_buffer(size_t nbytes)
{
    if (nbytes < MAPPED_NBYTES)
        return mem_new(nbytes, 1);
    void *memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        fail_to_allocate(nbytes, 1);
        return NULL;
    }
    (void)madvise(memory, nbytes, MADV_HUGEPAGE); /* without it, pages are small */
    return memory;
}

void mem_free_buffer(void *buffer, size_t nbytes)
{
    if (nbytes < MAPPED_NBYTES)
        mem_free(buffer);
    else if (buffer)
        munmap(buffer, nbytes);
}

/* The list may be a pointer of any type, so it is read and written as bytes. */
rsd_status mem_grow(void *list, size_t *capacity, size_t need, size_t element_nbytes)
{
    void *memory;
    memcpy(&memory, list, sizeof memory);
    if (need <= *capacity && memory)
        return RSD_OK;
    size_t want = *capacity < 8 ? 8 : *capacity;
    while (want < need && want <= SIZE_MAX / 2)
        want *= 2;
    if (want < need || want > SIZE_MAX / element_nbytes)
        return fail_to_allocate(need, element_nbytes);
    memory = realloc(memory, want * element_nbytes);
    if (!memory)
        return fail_to_allocate(want, element_nbytes);
    memcpy(list, &memory, sizeof memory);
    *capacity = want;
    return RSD_OK;
}

void *mem_copy(const void *from, size_t count, size_t element_nbytes)
{
    void *copy = mem_new(count, element_nbytes);
    if (copy && count)
        memcpy(copy, from, count * element_nbytes);
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
