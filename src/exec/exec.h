/* exec.h - runs a plan between arrays in memory. */
#ifndef EXEC_H
#define EXEC_H

#include "memory.h"
#include "peer.h"
#include "plan.h"

/* The functions that run an exec: by threads of one process (threads.c), or between ranks (exchange.c). */
struct backend {
    rsd_status (*start)(rsd_exec *exec, const void *const *src, void *const *dst);
    rsd_status (*wait)(rsd_exec *exec);
    rsd_status (*run)(rsd_exec *exec, const void *const *src, void *const *dst);
    void (*free)(rsd_exec *exec);
    void (*progress)(rsd_exec *exec);              /* NULL: it needs no calls to progress */
    const char *(*describe)(const rsd_exec *exec); /* NULL: "" */
};

/* The struct of every backend begins with this. */
struct rsd_exec {
    const struct backend *backend;
    bool started;
    bool has_stream;
    void *stream; /* of a device, in which runs are ordered; NULL: the default stream */
};

#endif
