/* cases.h - problems for tests of every backend: those of PyTorch's own tests, every dtype, every arrangement of
 * memory, and meshes of all kinds. */
#ifndef CASES_H
#define CASES_H

#include "oracle.h"

struct cases {
    void (*group)(void *context, const char *name); /* a heading of the cases that follow */
    void (*one)(void *context, const char *problem, enum arrangement from, enum arrangement to);
    void *context;
};

void every_case(const struct cases *to_each);

/* The destinations of some cases have another dtype than their sources. */
extern const rsd_plan_options case_options;

#endif
