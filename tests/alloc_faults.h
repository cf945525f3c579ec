/* alloc_faults.h - lets one allocation of the library fail. The linker redirects calloc and realloc to these functions
 * (--wrap, see LINK_ in tests.mk), so the library needs no hook. Included by one file of a test. */
#ifndef ALLOC_FAULTS_H
#define ALLOC_FAULTS_H

#include <stdbool.h>
#include <stdlib.h>

void *__real_calloc(size_t count, size_t nbytes);
void *__real_realloc(void *memory, size_t nbytes);
void *__wrap_calloc(size_t count, size_t nbytes);
void *__wrap_realloc(void *memory, size_t nbytes);

/* A test of several ranks in one process defines it as _Thread_local. */
#ifndef FAULTS_OF
#define FAULTS_OF
#endif

static FAULTS_OF long until_failure = -1; /* allocations that still succeed; negative: all */
static FAULTS_OF bool failed;

static bool fails_now(void)
{
    if (until_failure < 0 || until_failure-- > 0)
        return false;
    until_failure = -1;
    failed = true;
    return true;
}

void *__wrap_calloc(size_t count, size_t nbytes)
{
    return fails_now() ? NULL : __real_calloc(count, nbytes);
}

void *__wrap_realloc(void *memory, size_t nbytes)
{
    return fails_now() ? NULL : __real_realloc(memory, nbytes);
}

#endif
