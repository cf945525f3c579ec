/* crew.h - the ranks of a test, which are threads with a transport between them; and comparison of directories. */
#ifndef CREW_H
#define CREW_H

#include "reshard.h"

#include <stdbool.h>

enum { MOST_CREW = 8 };

/* The work of one rank, and its results. */
struct hand {
    rsd_transport transport;
    const void *task;
    int64_t number, found; /* for the test */
    rsd_report report;
    rsd_status status;
    char message[1100];
    char *told; /* lines; freed by crew_free */
    size_t ntold;
};
typedef rsd_status hand_work(struct hand *hand);

struct crew {
    int32_t n;
    struct hand hands[MOST_CREW];
};

/* Runs the work on n ranks; those in `absent` (a bit each) do nothing. */
void crew_run(struct crew *crew, int32_t n, hand_work *work, const void *task, unsigned absent);
void crew_free(struct crew *crew);
void hand_tell(struct hand *hand, const char *text); /* adds a line */

/* Returns whether two directories have the same files with the same bytes. Prints the first difference. */
bool same_folders(const char *a, const char *b);

#endif
