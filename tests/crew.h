/* crew.h - the ranks of a test, as threads with a transport between them; and folders that must be equal. */
#ifndef CREW_H
#define CREW_H

#include "reshard.h"

#include <stdbool.h>

enum { MOST_CREW = 8 };

/* What one rank does, with what it came to. */
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

/* Whether two folders hold the same files with the same bytes; says what is not. */
bool same_folders(const char *a, const char *b);

#endif
