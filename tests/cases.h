/* cases.h - the problems that every backend has to get right: those of PyTorch's own tests, every dtype, every
 * arrangement of memory, meshes of all kinds. */
#ifndef CASES_H
#define CASES_H

#include "oracle.h"

struct cases {
    void (*group)(void *context, const char *name); /* what follows is about this */
    void (*one)(void *context, const char *problem, enum arrangement from, enum arrangement to);
    void *context;
};

void every_case(const struct cases *to_each);

#endif
