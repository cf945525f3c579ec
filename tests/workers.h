/* workers.h - the ranks of a test, which are threads with a transport between them; and comparison of directories. */
#ifndef WORKERS_H
#define WORKERS_H

#include "reshard.h"

#include <stdbool.h>

enum { MOST_WORKERS = 8 };

/* The work of one rank, and its results. */
struct worker {
    rsd_transport transport;
    const void *task;
    int64_t number, found; /* for the test */
    rsd_report report;
    rsd_status status;
    char message[1100];
    char *lines; /* of text; freed by workers_free */
    size_t nchars;
};
typedef rsd_status worker_function(struct worker *worker);

struct workers {
    int32_t n;
    struct worker list[MOST_WORKERS];
};

/* Runs the work on n ranks; those in `absent` (a bit each) do nothing. */
void workers_run(struct workers *workers, int32_t n, worker_function *work, const void *task,
                 unsigned absent);
void workers_free(struct workers *workers);
void worker_add_line(struct worker *worker, const char *text);

/* Returns whether two directories have the same files with the same bytes. Prints the first difference. */
bool same_folders(const char *a, const char *b);

#endif
