/* stash_cases.h - a stash returns the bytes that were put: the same cases for every transport. */
#ifndef STASH_CASES_H
#define STASH_CASES_H

#include "ranks.h"
#include "reshard_experimental.h"

/* Each is run by all ranks, with a seed as its context: on threads from 1 to nseeds. */
struct stash_case {
    const char *name;
    void (*work)(struct rank *rank, void *seed);
    uintptr_t nseeds;
};
extern const struct stash_case stash_cases[];
extern const int nstash_cases;

#endif
